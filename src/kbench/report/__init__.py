"""Two sets of results side by side: what became faster, slower, stayed the same, or cannot be said."""
