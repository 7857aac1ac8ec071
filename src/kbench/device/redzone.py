"""What stands in the memory around a tensor, on every device."""

from __future__ import annotations

import functools

import numpy as np

from kbench.family import Array

# Repeated, as little-endian 16-bit words. As fp16, bf16, fp32 or fp64 it is a NaN, so that a kernel that reads beyond
# a tensor spoils its own result; and it differs from what a wrong kernel is likely to write there: zeros, -1 or
# poison (0xFF...), and the NaN that a GPU computes (0x7FFF...).
PATTERN = 0x7FF5


def pattern(start: int, count: int) -> Array:
    """The `count` bytes of a redzone that begins `start` bytes from its tensor. Not to be written to."""
    return _from_parity(start % 2, count)


@functools.lru_cache(maxsize=64)  # few sizes, compared after every launch
def _from_parity(parity: int, count: int) -> Array:
    words = np.full(count // 2 + 1, PATTERN, dtype="<u2")
    return words.view(np.uint8)[parity : parity + count]
