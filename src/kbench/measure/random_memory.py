"""Device memory full of random numbers, for measuring what a card does at most: zeros would draw less power, and so
run at a higher clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kbench.errors import CannotRunError
from kbench.family import Copy, Ref, Tensor

if TYPE_CHECKING:
    import numpy as np

    from kbench.device.base import Buffer
    from kbench.device.cuda.device import CudaDevice

# Elements that are drawn; a tensor repeats them.
TILE = 1 << 20
# For the timer's flush, workspaces and fragments.
SPARE_BYTES = 1 << 30


def random_words(count: int) -> np.ndarray[Any, Any]:
    """The tile of a tensor of `count` uint32 elements."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 1 << 32, min(TILE, count), dtype=np.uint32)


def random_normals(count: int, storage: str) -> np.ndarray[Any, Any]:
    """The tile of a tensor of `count` normal numbers in a storage type."""
    import numpy as np

    from kbench.device.dtypes import numpy_dtype

    return np.random.default_rng(0).standard_normal(min(TILE, count), dtype=np.float32).astype(numpy_dtype(storage))


def fitting(wanted: int, least: int, free: int, needs: Callable[[int], int]) -> int:
    """The size that was wanted, or as many halves of it as fit into `free` bytes. Raises CannotRunError."""
    size = wanted
    while needs(size) + SPARE_BYTES > free:
        size //= 2
        if size < least:
            text = f"needs {needs(least) + SPARE_BYTES:,} bytes of GPU memory, {free:,} are free"
            raise CannotRunError(text)
    return size


@contextmanager
def filled(
    device: CudaDevice, tensors: tuple[Tensor, ...], tiles: Mapping[str, np.ndarray[Any, Any]]
) -> Iterator[dict[str, Any]]:
    """Memory of the tensors, filled with their tiles over and over."""
    buffers: dict[str, Any] = {}
    try:
        for tensor in tensors:
            buffers[tensor.name] = device.alloc(tensor)
            if tensor.name in tiles:
                _fill(device, buffers[tensor.name], tiles[tensor.name])
        yield buffers
    finally:
        for buffer in buffers.values():
            device.free(buffer)
        with device.activate():  # gigabytes that the rows to come may need in one piece
            device.xp.get_default_memory_pool().free_all_blocks()


def _fill(device: CudaDevice, buffer: Buffer, values: np.ndarray[Any, Any]) -> None:
    """Repeat a tile in a buffer. The device does it: the host may lack the memory for a whole tensor."""
    tile = Tensor("tile", values.shape, buffer.tensor.dtype, "scratch")
    source = device.alloc(tile)
    try:
        device.upload(source, values)
        steps = tuple(repeats(buffer.tensor, tile))
        prepared = device.prepare(steps, None, (buffer.tensor, tile))
        bound = device.bind(prepared, {buffer.tensor.name: buffer, tile.name: source})
        with device.activate():
            device.enqueue(bound)
        device.synchronize()
    finally:
        device.free(source)


def repeats(tensor: Tensor, tile: Tensor) -> Iterator[Copy]:
    """Copies that fill a tensor with a smaller one over and over, twice as much with each."""
    filled = min(tile.count, tensor.count)
    yield Copy(Ref(tensor.name), Ref(tile.name), filled)
    while filled < tensor.count:
        count = min(filled, tensor.count - filled)
        yield Copy(Ref(tensor.name, filled), Ref(tensor.name), count)
        filled += count
