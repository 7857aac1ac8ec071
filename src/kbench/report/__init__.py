"""Two sets of records side by side: what became faster, slower, wrong, or cannot be told."""
