"""Nsight Compute on one version: running it, reading what it counted, and saying what that means."""
