"""Device memory of a tensor between two redzones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kbench.device.base import Buffer, Damage
from kbench.device.cuda.steps import driver_api
from kbench.device.dtypes import numpy_dtype
from kbench.device.redzone import next_pattern, pattern
from kbench.errors import CannotRunError
from kbench.family import Tensor

# On each side: more than a row of any tensor of a transformer (C = 1600, 4 C wide, fp32: 25,600 bytes), so that
# a kernel that is one row off is caught too. A multiple of 256, which keeps the tensor aligned.
REDZONE = 65_536


def allocate(tensor: Tensor, free_memory: Callable[[], int], stream: Any) -> Buffer:
    """Memory for `tensor`, all of it filled with the redzones' word. Raises CannotRunError if there is not enough."""
    import cupy

    size = REDZONE + tensor.nbytes + REDZONE
    size += size % 2  # a word has two bytes
    memory = reserve(size, f"tensor {tensor.name}", free_memory)
    word = next_pattern()
    driver_api().cuMemsetD16Async(memory.ptr, word, size // 2, stream.ptr)
    inside = memory + REDZONE
    array = cupy.ndarray(tensor.shape, dtype=numpy_dtype(tensor.dtype), memptr=inside)
    return Buffer(tensor, array, int(inside.ptr), memory, word)


def reserve(size: int, what: str, free_memory: Callable[[], int]) -> Any:
    """`size` bytes of CuPy's pool. Raises CannotRunError, with both numbers, if there are not as many."""
    import cupy

    try:
        return cupy.cuda.alloc(size)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise CannotRunError(
            f"not enough GPU memory: {what} needs {size:,} bytes, {free_memory():,} are free", "use smaller sizes"
        ) from error


def copy_in(address: int, values: Any, stream: Any) -> None:
    """Copy a contiguous numpy array to `address`, in the order of `stream`; it may be changed afterwards."""
    from cupy.cuda import runtime

    runtime.memcpyAsync(address, values.ctypes.data, values.nbytes, runtime.memcpyHostToDevice, stream.ptr)
    stream.synchronize()


def copy_out(address: int, values: Any, stream: Any) -> None:
    """Copy from `address` into a contiguous numpy array, after all that `stream` holds."""
    from cupy.cuda import runtime

    runtime.memcpyAsync(values.ctypes.data, address, values.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
    stream.synchronize()


def check_redzones(buffer: Buffer, stream: Any) -> Damage | None:
    """The first damage, after which the redzones are whole again.

    The zones are compared on the host: they are 128 KiB together, less work than a kernel and its result.
    """
    first: Damage | None = None
    for start in (-REDZONE, buffer.tensor.nbytes):
        found, whole = np.empty(REDZONE, dtype=np.uint8), pattern(buffer.redzone, start, REDZONE)
        copy_out(buffer.address + start, found, stream)
        wrong = np.flatnonzero(found != whole)
        if wrong.size:
            copy_in(buffer.address + start, whole, stream)
            first = first or Damage(buffer.tensor.name, start + int(wrong[0]), int(wrong.size))
    return first
