"""Training GPT-2 with the kernels of the families."""
