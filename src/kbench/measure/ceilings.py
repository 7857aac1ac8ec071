"""What a card can do at most, measured on that very card: how fast it copies, and how fast cuBLASLt multiplies.

A kernel that moves bytes cannot be faster than a copy of as many bytes, nor one that multiplies matrices than the
library's best case. So a time that is near one of the two has nothing left to gain. Measured with kbench's own timer,
once for each card, power limit, driver and library, and then kept in the cache; but what was measured on a busy card
(smaller sizes, or with anything to remark on) is measured again the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.ceilings import Ceilings
from kbench.errors import CannotRunError, LaunchRefused
from kbench.family import STORAGE, Copy, Gemm, Launch, Matrix, Ref, Step, Tensor, kernels_of
from kbench.measure.statistics import StopRule

if TYPE_CHECKING:
    import numpy as np

    from kbench.device.base import Buffer
    from kbench.device.cuda.device import CudaDevice
    from kbench.measure.measurement import Measurement

# Read and written each. Far beyond any L2, and long enough (1 ms at 4 TB/s) that starting and ending do not count.
COPY_BYTES = 2 << 30
# Rows and columns: large enough to fill any GPU with whole tiles, many times over.
GEMM_SIZE = 8192
GEMM_DTYPES = ("fp32", "tf32", "bf16", "fp16")
# Where memory is short both shrink, by halves, to what still keeps a large card busy.
LEAST_COPY_BYTES, LEAST_GEMM_SIZE = 256 << 20, 2048
# For the timer's flush, workspaces and fragments.
_SPARE_BYTES = 1 << 30
# An algorithm is chosen on operands of its own, beside those that are timed.
_OPERAND_SETS = 2
# A median of five is steady to a percent, and a ceiling needs no more.
_RULE = StopRule(minimum=5, maximum=15)
# Drawn at random and repeated: zeros draw less power, and so run at a higher clock.
_TILE = 1 << 20
_COPY_BLOCK, _COPY_LOADS, _PACKET = 512, 4, 16  # as in ceilings.cu

_CACHE = "ceilings"
_FORMAT = 2  # 1 kept what had been measured with small sizes too


def measured_ceilings(device: CudaDevice, note: Callable[[str], None]) -> Ceilings:
    """The ceilings of a device: from the cache, or measured now, after a note that says so."""
    from kbench.device.cuda import cache, card

    facts = device.describe()
    key = {
        "format": _FORMAT, "gpu": facts["name"], **card.identity(device.ordinal), "driver": facts["driver"],
        "cublaslt": _cublaslt_version(), "copy": COPY_BYTES, "gemm": GEMM_SIZE,
    }  # fmt: skip
    if (entry := cache.load(_CACHE, key)) is not None:
        return Ceilings.from_dict(entry[0])
    note(f"measuring what {facts['name']} can do at most")
    found = measure(device)
    if found.notes:  # what memory was too short for today may fit tomorrow
        more = f" (and {len(found.notes) - 1} more)" if len(found.notes) > 1 else ""
        note(f"the next sweep measures it again: {found.notes[0]}{more}")
    elif not cache.store(_CACHE, key, found.to_dict()):
        note("the next sweep measures it again: the cache cannot be written; `kbench doctor` says why")
    return found


def measure(device: CudaDevice) -> Ceilings:
    """Measure now. What this machine lacks memory or a library for is a note, and so is what was measured with less
    than the wanted size or drew a remark of the timer. A KernelFault is raised."""
    copy_gbs, copy_by, copy_bytes = None, "", 0
    notes: list[str] = []
    try:
        copy_bytes = fitting(COPY_BYTES, LEAST_COPY_BYTES, device.free_memory(), lambda size: 2 * size)
        copy_gbs, copy_by, remark = _copy(device, copy_bytes)
        notes += _remarks("copy", copy_bytes, COPY_BYTES, "bytes", remark)
    except CannotRunError as error:
        notes.append(f"copy not measured: {error}")
    rates: dict[str, float] = {}
    sizes = []
    for dtype in GEMM_DTYPES:
        try:
            size = fitting(GEMM_SIZE, LEAST_GEMM_SIZE, device.free_memory(), lambda n: _OPERAND_SETS * 3 * 4 * n * n)
            rates[dtype], remark = _gemm(device, dtype, size)
            sizes.append(size)
            notes += _remarks(f"{dtype} GEMM", size, GEMM_SIZE, "rows and columns", remark)
        except (CannotRunError, LaunchRefused) as error:
            notes.append(f"{dtype} GEMM not measured: {error}")
    return Ceilings(copy_gbs, copy_by, copy_bytes, rates, min(sizes, default=0), tuple(notes))


def _remarks(what: str, size: int, wanted: int, unit: str, remark: str) -> Iterator[str]:
    """What is to be said of a ceiling that was measured."""
    if size < wanted:
        yield f"{what} measured with {size:,} {unit}, not {wanted:,}: GPU memory is short"
    if remark:
        yield f"{what}: {remark}"


def fitting(wanted: int, least: int, free: int, needs: Callable[[int], int]) -> int:
    """The size that was wanted, or as many halves of it as fit into `free` bytes. Raises CannotRunError."""
    size = wanted
    while needs(size) + _SPARE_BYTES > free:
        size //= 2
        if size < least:
            text = f"needs {needs(least) + _SPARE_BYTES:,} bytes of GPU memory, {free:,} are free"
            raise CannotRunError(text)
    return size


def _cublaslt_version() -> int | None:
    from kbench.device.cuda.gemm import CublasLt

    try:
        library = CublasLt()
    except CannotRunError:
        return None
    library.close()
    return library.version


def _copy(device: CudaDevice, size: int) -> tuple[float, str, str]:
    """1e9 bytes a second of the faster of the driver's copy and a kernel of our own, which it was, and the timer's
    remark."""
    import numpy as np

    words = size // 4
    tensors = tuple(Tensor(name, (words,), "uint32", "scratch") for name in ("from", "to"))
    packets = size // _PACKET
    blocks = -(-packets // (_COPY_BLOCK * _COPY_LOADS))
    ways: dict[str, Step] = {
        "cudaMemcpyAsync": Copy(Ref("to"), Ref("from"), words),
        "a kernel": Launch("copy_packets", (blocks,), (_COPY_BLOCK,), ("to", "from", packets)),
    }
    random = np.random.default_rng(0).integers(0, 1 << 32, min(_TILE, words), dtype=np.uint32)
    with _buffers(device, tensors, {"from": random}) as buffers:
        times = {name: _time(device, step, tensors, buffers) for name, step in ways.items()}
    best = min(times, key=lambda name: times[name].median_ms)
    return 2 * size / times[best].median_ms / 1e6, best, times[best].note


def _gemm(device: CudaDevice, dtype: str, size: int) -> tuple[float, str]:
    """1e12 operations a second, and the timer's remark."""
    import numpy as np

    from kbench.device.dtypes import numpy_dtype

    storage = STORAGE[dtype]
    tensors = tuple(Tensor(name, (size, size), storage, "scratch") for name in ("a", "b", "out"))
    left, right, out = (Matrix(tensor.name, size, size) for tensor in tensors)
    step = Gemm(left, right, out, dtype)
    count = min(_TILE, size * size)
    normal = np.random.default_rng(0).standard_normal(count, dtype=np.float32).astype(numpy_dtype(storage))
    with _buffers(device, tensors, {"a": normal, "b": normal}) as buffers:
        taken = _time(device, step, tensors, buffers)
    return 2 * size**3 / taken.median_ms / 1e9, taken.note


@contextmanager
def _buffers(
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


def _time(device: CudaDevice, step: Step, tensors: tuple[Tensor, ...], buffers: dict[str, Any]) -> Measurement:
    from kbench.measure.timer import time_plan
    from kbench.source import load_source

    kernels = kernels_of((step,))
    module = device.build(load_source(Path(__file__).with_suffix(".cu")), kernels) if kernels else None
    bound = device.bind(device.prepare((step,), module, tensors), buffers)
    # Without the second timer: a graph copies memory in a way of its own, and what follows upon itself runs hotter.
    return time_plan(device, bound, rule=_RULE, second=False)
