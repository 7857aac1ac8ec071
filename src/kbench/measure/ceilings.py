"""What a card can do at most, measured on that very card: how fast it copies, and how fast cuBLASLt multiplies.

A kernel that moves bytes cannot be faster than a copy of as many bytes, nor one that multiplies matrices than the
library's best case. So a time that is near one of the two has nothing left to gain. Measured with kbench's own timer,
once for each card, driver and library, and then kept in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.errors import CannotRunError, LaunchRefused
from kbench.family import STORAGE, Copy, Gemm, Launch, Matrix, Ref, Step, Tensor, kernels_of
from kbench.measure.statistics import StopRule

if TYPE_CHECKING:
    import numpy as np

    from kbench.device.cuda.device import CudaDevice

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
_FORMAT = 1


@dataclass(frozen=True)
class Ceilings:
    """The most that one card does. copy_gbs: bytes read and written in 1e9 a second; None where it was not measured.
    copy_by: what copied them. gemm_tflops: by compute dtype, those that were measured. notes: what is missing, and why.
    """

    copy_gbs: float | None = None
    copy_by: str = ""
    copy_bytes: int = 0
    gemm_tflops: Mapping[str, float] = field(default_factory=dict)
    gemm_size: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gemm_tflops": dict(self.gemm_tflops), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ceilings:
        return cls(**{**data, "notes": tuple(data["notes"])})


def share_of_ceiling(
    nbytes: float | None, flops: float | None, dtype: str, milliseconds: float, ceilings: Ceilings
) -> tuple[float, str] | None:
    """How near a time is to the least that this card could need, 1 being as fast, and which ceiling sets that least:
    "copy" or "gemm". None where neither is known."""
    least = []
    if nbytes and ceilings.copy_gbs:
        least.append((nbytes / ceilings.copy_gbs / 1e6, "copy"))
    if flops and ceilings.gemm_tflops.get(dtype):
        least.append((flops / ceilings.gemm_tflops[dtype] / 1e9, "gemm"))
    if not least or not milliseconds > 0:
        return None
    time, which = max(least)
    return time / milliseconds, which


def measured_ceilings(device: CudaDevice, note: Callable[[str], None]) -> Ceilings:
    """The ceilings of a device: from the cache, or measured now, after a note that says so."""
    from kbench.device.cuda import cache

    facts = device.describe()
    key = {
        "format": _FORMAT, "gpu": facts["name"], "driver": facts["driver"], "cublaslt": _cublaslt_version(),
        "copy": COPY_BYTES, "gemm": GEMM_SIZE,
    }  # fmt: skip
    if (entry := cache.load(_CACHE, key)) is not None:
        return Ceilings.from_dict(entry[0])
    note(f"measuring what {facts['name']} can do at most (once; the cache keeps it)")
    found = measure(device)
    if not found.notes:  # what memory was too short for today may fit tomorrow
        cache.store(_CACHE, key, found.to_dict())
    return found


def measure(device: CudaDevice) -> Ceilings:
    """Measure now. What this machine lacks memory or a library for is a note; a KernelFault is raised."""
    copy_gbs, copy_by, copy_bytes, notes = None, "", 0, []
    try:
        copy_bytes = fitting(COPY_BYTES, LEAST_COPY_BYTES, device.free_memory(), lambda size: 2 * size)
        copy_gbs, copy_by = _copy(device, copy_bytes)
    except CannotRunError as error:
        notes.append(f"copy: {error}")
    rates: dict[str, float] = {}
    size = 0
    for dtype in GEMM_DTYPES:
        try:
            size = fitting(GEMM_SIZE, LEAST_GEMM_SIZE, device.free_memory(), lambda n: _OPERAND_SETS * 3 * 4 * n * n)
            rates[dtype] = _gemm(device, dtype, size)
        except (CannotRunError, LaunchRefused) as error:
            notes.append(f"{dtype} GEMM: {error}")
    return Ceilings(copy_gbs, copy_by, copy_bytes, rates, size, tuple(notes))


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


def _copy(device: CudaDevice, size: int) -> tuple[float, str]:
    """The faster of the driver's copy and a kernel of our own."""
    import numpy as np

    words = size // 4
    tensors = tuple(Tensor(name, (words,), "uint32", "scratch") for name in ("from", "to"))
    packets = size // _PACKET
    blocks = -(-packets // (_COPY_BLOCK * _COPY_LOADS))
    ways: dict[str, Step] = {
        "cudaMemcpyAsync": Copy(Ref("to"), Ref("from"), words),
        "a kernel": Launch("copy_packets", (blocks,), (_COPY_BLOCK,), ("to", "from", packets)),
    }
    random = np.random.default_rng(0).integers(0, 1 << 32, _TILE, dtype=np.uint32)
    times = {}
    with _buffers(device, tensors, {"from": random}) as buffers:
        for name, step in ways.items():
            times[name] = _time(device, step, tensors, buffers)
    best = min(times, key=lambda name: times[name])
    return 2 * size / times[best] / 1e6, best


def _gemm(device: CudaDevice, dtype: str, size: int) -> float:
    import numpy as np

    from kbench.device.dtypes import numpy_dtype

    storage = STORAGE[dtype]
    tensors = tuple(Tensor(name, (size, size), storage, "scratch") for name in ("a", "b", "out"))
    left, right, out = (Matrix(tensor.name, size, size) for tensor in tensors)
    step = Gemm(left, right, out, dtype)
    normal = np.random.default_rng(0).standard_normal(_TILE, dtype=np.float32).astype(numpy_dtype(storage))
    with _buffers(device, tensors, {"a": normal, "b": normal}) as buffers:
        milliseconds = _time(device, step, tensors, buffers)
    return 2 * size**3 / milliseconds / 1e9


@contextmanager
def _buffers(
    device: CudaDevice, tensors: tuple[Tensor, ...], tiles: Mapping[str, np.ndarray[Any, Any]]
) -> Iterator[dict[str, Any]]:
    """Memory of the tensors, filled with their tiles over and over."""
    import numpy as np

    buffers: dict[str, Any] = {}
    try:
        for tensor in tensors:
            buffers[tensor.name] = device.alloc(tensor)
            if tensor.name in tiles:
                device.upload(buffers[tensor.name], np.resize(tiles[tensor.name], tensor.shape))
        yield buffers
    finally:
        for buffer in buffers.values():
            device.free(buffer)
        with device.activate():  # gigabytes that the rows to come may need in one piece
            device.xp.get_default_memory_pool().free_all_blocks()


def _time(device: CudaDevice, step: Step, tensors: tuple[Tensor, ...], buffers: dict[str, Any]) -> float:
    """Median milliseconds of one step."""
    from kbench.measure.timer import time_plan
    from kbench.source import load_source

    kernels = kernels_of((step,))
    module = device.build(load_source(Path(__file__).with_suffix(".cu")), kernels) if kernels else None
    bound = device.bind(device.prepare((step,), module, tensors), buffers)
    return time_plan(device, bound, rule=_RULE).median_ms
