"""The same experiment over many runs: where its time changed, and which commit changed it."""
