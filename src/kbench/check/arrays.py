"""The few array operations that the check needs on either array module, in bounded memory.

`xp` is numpy or cupy, handed in: nothing here imports CuPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kbench.family import ITEM_SIZES, Array

# Elements handled at a time. On the CPU the half dozen float64 temporaries of a part should stay in the L2
# cache; on a GPU a part must be large enough to fill the device, and 32 MiB a temporary is nothing there.
_CPU_PART = 1 << 16
GPU_PART = 1 << 22

_WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def part_size(xp: Any) -> int:
    return _CPU_PART if xp is np else GPU_PART


def parts(count: int, xp: Any) -> Iterator[slice]:
    """Slices that cover `count` elements in order."""
    step = part_size(xp)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def words(array: Array, xp: Any) -> Array:
    """The elements' bits, flat, as unsigned integers of the same size: NaNs compare like anything else."""
    return array.view(getattr(xp, _WORDS[array.dtype.itemsize])).reshape(-1)


def poison_word(dtype: str, byte: int) -> int:
    """The bits of an element of which every byte is `byte`."""
    return int.from_bytes(bytes([byte]) * ITEM_SIZES[dtype], "little")


def as_float64(array: Array, dtype: str, xp: Any) -> Array:
    """Elements as float64, exactly. `array` is flat and holds `dtype`."""
    if dtype == "bf16":
        # bfloat16 is the upper half of a float32; shifting is faster than a conversion of either library.
        wide = words(array, xp).astype(xp.uint32) << xp.uint32(16)
        return wide.view(xp.float32).astype(xp.float64)
    return array.astype(xp.float64)


def to_device(array: Array, xp: Any) -> Array:
    """The same elements as an array of `xp`; no copy where it is one already."""
    return array if isinstance(array, xp.ndarray) else xp.asarray(array)


def to_host(array: Array) -> Array:
    return array if isinstance(array, np.ndarray) else array.get()


def count_different(a: Array, b: Array, skip: Array | None, xp: Any) -> int:
    """How many elements of two flat arrays of words differ, apart from those in the boolean mask `skip`."""
    different = 0
    for part in parts(a.size, xp):
        unequal = a[part] != b[part]
        if skip is not None:
            unequal &= ~skip[part]
        different += int(xp.count_nonzero(unequal))
    return different


def first_different(a: Array, b: Array, xp: Any) -> int | None:
    """Flat index of the first element in which two arrays of words differ."""
    for part in parts(a.size, xp):
        unequal = a[part] != b[part]
        if bool(unequal.any()):
            return part.start + int(unequal.argmax())
    return None


def first_where(test: Any, array: Array, xp: Any) -> int | None:
    """Flat index of the first element of a flat array for which `test(part)` is true."""
    for part in parts(array.size, xp):
        found = test(array[part])
        if bool(found.any()):
            return part.start + int(found.argmax())
    return None
