"""What stands in the memory around a tensor, on every device."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from kbench.family import Array

# Repeated, as little-endian 16-bit words. As fp16, bf16, fp32 or fp64 each is a NaN, so that a kernel that reads
# beyond a tensor spoils its own result; and each differs from what a wrong kernel is likely to write there: zeros, -1
# or poison (0xFF...), and the NaN that a GPU computes (0x7FFF...). Several, because a copy, and on a CPU arithmetic
# too, carries a NaN's bits along: what comes out of one tensor's redzone must show in another's.
PATTERNS = tuple(range(0x7FF1, 0x7FFF))

_turns = itertools.cycle(PATTERNS)


def next_pattern() -> int:
    """The redzone word of a new buffer: one of PATTERNS, in rotation. Threads may share it (next() is atomic)."""
    return next(_turns)


def pattern(word: int, start: int, count: int) -> Array:
    """The `count` bytes of a redzone of `word`s that begins `start` bytes from its tensor. Not to be written to."""
    return _from_parity(word, start % 2, count)


@functools.lru_cache(maxsize=64)  # compared after every launch; a GPU's zones have one size and two parities
def _from_parity(word: int, parity: int, count: int) -> Array:
    words = np.full(count // 2 + 1, word, dtype="<u2")
    return words.view(np.uint8)[parity : parity + count]
