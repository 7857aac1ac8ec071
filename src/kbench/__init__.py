"""kbench proves, times and compares CUDA kernels, and trains GPT-2 with the fastest proven ones."""

__version__ = "0.1.0"
