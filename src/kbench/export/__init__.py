"""One version at one problem as a CUDA program that needs nothing of kbench."""
