"""One measurement for each thing that bounds a kernel: memory, L2, arithmetic, matrix products, launching.

Every probe is timed by `kbench.measure.timer` like any other plan. Where the best number of loads or chains differs
between cards, some are tried and the fastest stands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.errors import CannotRunError
from kbench.family import STORAGE, Copy, Gemm, Launch, Matrix, Ref, Step, Tensor
from kbench.measure.empty import empty_launches
from kbench.measure.random_memory import filled, fitting, random_normals, random_words
from kbench.measure.statistics import StopRule, confidence_interval, median

if TYPE_CHECKING:
    from kbench.device.base import Bound
    from kbench.device.cuda.device import CudaDevice, Module
    from kbench.measure.measurement import Measurement

SOURCE = Path(__file__).with_name("ceilings.cu")

# Read and written each. Far beyond any L2, and long enough (1 ms at 4 TB/s) that starting and ending do not count.
COPY_BYTES = 2 << 30
# Rows and columns: large enough to fill any GPU with whole tiles, many times over.
GEMM_SIZE = 8192
GEMM_DTYPES = ("fp32", "tf32", "bf16", "fp16")
# Where memory is short both shrink, by halves, to what still keeps a large card busy.
LEAST_COPY_BYTES, LEAST_GEMM_SIZE = 256 << 20, 2048
# An algorithm is chosen on operands of its own, beside those that are timed.
_OPERAND_SETS = 2
# Six samples are the fewest that the 95% interval of a median takes. A ceiling needs no more than a percent.
_RULE = StopRule(minimum=6, maximum=15)

_BLOCK, _PACKET = 512, 16  # of the kernels that move bytes, as in ceilings.cu
_MOVES = (2, 4, 8)  # loads or stores of a thread: with fewer too little is under way, with more nothing is gained
# Of the L2, the part that is read: half of it may hold copies of what the other half has, and some is used otherwise.
_L2_SHARE = 4
_L2_BYTES = 4 << 30  # read in all: 0.6 ms at 7 TB/s
_L2_LOADS = (4, 8)
_FMA_BLOCK, _FMA_CHAINS = 256, 16  # as in ceilings.cu: eight pairs
_FMA_STEPS = (16, 32)  # of a round: the loop around them costs 1% of the instructions, or half of one
_FMA_IN_CHAIN = 8192  # of 64 warps, four of which have one each cycle: 1.2 ms at 1.8 GHz, however large the card
# Launches in a chain. The driver queues up to 1024 without waiting for the GPU, which is held meanwhile.
_SHORT_CHAIN, _LONG_CHAIN = 64, 512
_HOST_REPEATS = 7


@dataclass(frozen=True)
class Found:
    """A ceiling, the 95% interval of its median, on what it was measured, and what there is to remark on it."""

    value: float
    low: float
    high: float
    how: str
    remark: str = ""

    @classmethod
    def rate(cls, work: float, taken: Measurement, how: str) -> Found:
        """`work` in units of a million a second, or 1e9 a second where it is in units of a thousand."""
        return cls(work / taken.median_ms, work / taken.high_ms, work / taken.low_ms, how, taken.note)

    @classmethod
    def median(cls, samples: Sequence[float], how: str) -> Found:
        interval = confidence_interval(samples)
        return cls(median(samples), interval.low, interval.high, how)


class Probes:
    """The probes of one GPU. All raise CannotRunError, LaunchRefused or KernelFault for what cannot be measured."""

    def __init__(self, device: CudaDevice):
        self._device = device
        self._module: Module | None = None

    # ------------------------------------------------------------------------------------ memory

    def memory(self) -> Iterator[tuple[str, Found, int, str]]:
        """Name, ceiling in GB/s, bytes that a copy read, and what did it, of copying, reading and writing.

        All three move as many bytes, in the same memory.
        """
        device = self._device
        size = fitting(COPY_BYTES, LEAST_COPY_BYTES, device.free_memory(), lambda size: 2 * size)
        words = 2 * size // 4
        memory, out = Tensor("memory", (words,), "uint32", "scratch"), Tensor("out", (1,), "uint32", "scratch")
        half = Ref("memory", words // 2)
        ways: dict[str, dict[str, Step]] = {
            "copy": {"cudaMemcpyAsync": Copy(half, Ref("memory"), words // 2)},
            "read": {},
            "write": {},
        }
        for count in _MOVES:
            ways["copy"][f"a kernel, {count} loads a thread"] = _moving("copy", count, size, half, "memory")
            ways["read"][f"{count} loads a thread"] = _moving("read", count, 2 * size, "out", "memory")
            ways["write"][f"{count} stores a thread"] = _moving("write", count, 2 * size, "memory")
        with filled(device, (memory, out), {"memory": random_words(words)}) as buffers:
            for what, steps in ways.items():
                times = {by: self._time((step,), (memory, out), buffers) for by, step in steps.items()}
                by = min(times, key=lambda by: times[by].median_ms)
                moved = f"{_bytes(size)} read and written" if what == "copy" else _bytes(2 * size)
                found = Found.rate(2 * size / 1e6, times[by], f"{moved}, {by}, cold L2")
                yield what, found, size, by.partition(",")[0]

    def l2(self) -> Found:
        """GB/s out of L2."""
        props = self._device.props
        packets = 1 << max(0, (props.l2_bytes // _L2_SHARE // _PACKET).bit_length() - 1)
        if props.l2_bytes < _L2_SHARE * _PACKET:
            raise CannotRunError("the GPU does not say how large its L2 is")
        blocks = props.multiprocessors * max(1, props.threads_per_multiprocessor // _BLOCK)
        threads = blocks * _BLOCK
        tensors = (
            Tensor("from", (packets * _PACKET // 4,), "uint32", "scratch"),
            Tensor("out", (threads,), "uint32", "scratch"),
        )
        best: Found | None = None
        with filled(self._device, tensors, {"from": random_words(tensors[0].count)}) as buffers:
            for loads in _L2_LOADS:
                rounds = max(1, _L2_BYTES // (threads * loads * _PACKET))
                step = Launch(f"read_cached<{loads}>", (blocks,), (_BLOCK,), ("out", "from", packets - 1, rounds))
                nbytes = threads * loads * rounds * _PACKET
                how = f"{_bytes(packets * _PACKET)} read {nbytes / packets / _PACKET:,.0f} times past L1, hot L2"
                found = Found.rate(nbytes / 1e6, self._time((step,), tensors, buffers, "hot"), how)
                best = found if best is None or found.value > best.value else best
        assert best is not None
        return best

    # ------------------------------------------------------------------------------------ arithmetic

    def fma(self) -> Found:
        """1e12 operations a second of fp32 fused multiply-adds, each of which counts as two."""
        props = self._device.props
        blocks = props.multiprocessors * max(1, props.threads_per_multiprocessor // _FMA_BLOCK)
        threads = blocks * _FMA_BLOCK
        tensors = tuple(Tensor(name, (threads,), "fp32", "scratch") for name in ("in", "out"))
        operations = 2 * threads * _FMA_CHAINS * _FMA_IN_CHAIN
        how = f"{_FMA_CHAINS} chains of {_FMA_IN_CHAIN:,} in each of {threads:,} threads, in registers"
        best: Found | None = None
        with filled(self._device, tensors, {"in": random_normals(threads, "fp32")}) as buffers:
            for steps in _FMA_STEPS:
                step = Launch(f"turn_pairs<{steps}>", (blocks,), (_FMA_BLOCK,), ("out", "in", _FMA_IN_CHAIN // steps))
                found = Found.rate(operations / 1e9, self._time((step,), tensors, buffers, "hot"), how)
                best = found if best is None or found.value > best.value else best
        assert best is not None
        return best

    def gemm(self, dtype: str) -> tuple[Found, int]:
        """1e12 operations a second of a dtype's matrix product, and rows and columns of its matrices."""
        device = self._device
        size = fitting(GEMM_SIZE, LEAST_GEMM_SIZE, device.free_memory(), lambda n: _OPERAND_SETS * 3 * 4 * n * n)
        storage = STORAGE[dtype]
        tensors = tuple(Tensor(name, (size, size), storage, "scratch") for name in ("a", "b", "out"))
        left, right, out = (Matrix(tensor.name, size, size) for tensor in tensors)
        normal = random_normals(size * size, storage)
        with filled(device, tensors, {"a": normal, "b": normal}) as buffers:
            taken = self._time((Gemm(left, right, out, dtype),), tensors, buffers)
        return Found.rate(2 * size**3 / 1e9, taken, f"M = N = K = {size:,}, cuBLASLt, cold L2"), size

    # ------------------------------------------------------------------------------------ launching

    def launches(self) -> dict[str, Found]:
        """Microseconds of the launches of an empty kernel: those that each adds to a chain, queued before the first of
        it runs, and those that the host takes to queue one."""
        short, long = empty_launches(self._device, _SHORT_CHAIN, _LONG_CHAIN)
        self._chain_ms(short, hold=False)  # what the driver loads at the first launch would wait for the hold
        pairs = [(self._chain_ms(short), self._chain_ms(long)) for _ in range(_RULE.maximum)]
        added = [1e3 * (more - less) / (_LONG_CHAIN - _SHORT_CHAIN) for less, more in pairs if less and more]
        if len(added) < _RULE.minimum or min(added) <= 0:
            raise CannotRunError(f"{_LONG_CHAIN} launches cannot be told from {_SHORT_CHAIN} by their times")
        how = f"what each adds from {_SHORT_CHAIN} to {_LONG_CHAIN} of an empty kernel, queued"
        queued = [1e6 * self._queueing_s(long) / _LONG_CHAIN for _ in range(_HOST_REPEATS)]
        return {
            "launch": Found.median(added, how),
            "host launch": Found.median(queued, "the host's time to queue one, from Python"),
        }

    def _chain_ms(self, bound: Bound, hold: bool = True) -> float | None:
        """One time of a chain; None where it must not be used."""
        from kbench.measure.timer import timer_of

        with self._device.activate():
            sample = timer_of(self._device).sample(bound, hold=hold, flush=False)
        return None if sample.fault else sample.event_ms

    def _queueing_s(self, bound: Bound) -> float:
        """Seconds that the host takes to queue a plan on an idle GPU."""
        self._device.synchronize()
        with self._device.activate():
            started = time.perf_counter()
            self._device.enqueue(bound)
            taken = time.perf_counter() - started
        self._device.synchronize()
        return taken

    # ------------------------------------------------------------------------------------ timing

    def _time(
        self, plan: tuple[Step, ...], tensors: tuple[Tensor, ...], buffers: Mapping[str, Any], mode: str = "cold"
    ) -> Measurement:
        return self._measure(self._bind(plan, tensors, buffers), mode)

    def _bind(self, plan: tuple[Step, ...], tensors: tuple[Tensor, ...], buffers: Mapping[str, Any]) -> Bound:
        module = self._kernels() if any(isinstance(step, Launch) for step in plan) else None
        return self._device.bind(self._device.prepare(plan, module, tensors), buffers)

    def _measure(self, bound: Bound, mode: str) -> Measurement:
        from kbench.measure.timer import time_plan

        # Without the second timer: a graph copies memory in a way of its own, and what follows upon itself runs hotter.
        return time_plan(self._device, bound, rule=_RULE, mode=mode, second=False)

    def _kernels(self) -> Module:
        """All of ceilings.cu, compiled once."""
        if self._module is None:
            from kbench.source import load_source

            self._module = self._device.build(load_source(SOURCE), KERNELS)
        return self._module


KERNELS = (
    *(f"{what}_packets<{count}>" for what in ("copy", "read", "write") for count in _MOVES),
    *(f"read_cached<{loads}>" for loads in _L2_LOADS),
    *(f"turn_pairs<{steps}>" for steps in _FMA_STEPS),
)


def _moving(what: str, count: int, size: int, *tensors: str | Ref) -> Launch:
    """A launch that copies, reads or writes `size` bytes, `count` packets in each thread."""
    packets = size // _PACKET
    blocks = -(-packets // (_BLOCK * count))
    return Launch(f"{what}_packets<{count}>", (blocks,), (_BLOCK,), (*tensors, packets))


def _bytes(size: int) -> str:
    """A power of two, as 8 MiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} bytes"
