"""What can be said of a version without running it: what its kernels use, how many fit, what they are made of."""
