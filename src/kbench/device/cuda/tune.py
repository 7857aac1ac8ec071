"""Which of cuBLASLt's algorithms runs a GEMM: measured once per GPU, library and shape, then remembered.

The heuristic's first choice is often not the fastest (8% slower than the best in a bf16 GEMM of GPT-2 on an
H200). The candidates are timed on memory of their own, cold like everything that kbench times, and none of it
touches the tensors of the plan.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from kbench.device.cuda import cache as disk
from kbench.device.cuda.gemm import Addresses, Operand, PreparedGemm
from kbench.device.cuda.steps import Runner, driver_api
from kbench.device.dtypes import numpy_dtype
from kbench.errors import LaunchRefused

# How many algorithms the heuristic is asked for: those behind the eighth have not been seen to win.
CANDIDATES = 8
# The most workspace an algorithm may ask for. cuBLAS itself keeps 32 MiB on Hopper; split-k over a long sum (a
# weight gradient) takes up to twice that.
WORKSPACE_LIMIT = 64 << 20
# Launches per candidate. The median of seven is not moved by three outliers.
_REPEATS = 7
# A later candidate replaces an earlier one only if it is faster by more than the noise of such a short measurement.
_CLEARLY_FASTER = 0.98
# Elements drawn at random; larger operands repeat them. Zeros would draw less power, and so run at a higher clock.
_TILE = 1 << 20
# Writing twice the L2 pushes everything else out, and holds the stream while the host queues what is timed.
_FLUSH_FACTOR = 2

_chosen: dict[str, tuple[Any, int]] = {}  # this process's choices, by key


def choose(gemm: PreparedGemm, gpu: str, l2_bytes: int, free_memory: Callable[[], int], stream: Any) -> str:
    """Set `gemm.algo` and `gemm.workspace`. Returns a note for the user, "" if there is nothing to say.

    `stream` is a CuPy stream, current in this thread. Raises LaunchRefused if there is no algorithm.
    """
    key = {**gemm.key, "gpu": gpu, "cublaslt": gemm.lt.version, "workspace": WORKSPACE_LIMIT}
    name = json.dumps(key, sort_keys=True)
    if name not in _chosen and (stored := _from_disk(gemm, key)) is not None:
        _chosen[name] = stored
    if name in _chosen:
        gemm.algo, gemm.workspace = _chosen[name]
        return ""
    candidates = gemm.candidates(CANDIDATES, WORKSPACE_LIMIT)
    gemm.algo, gemm.workspace = candidates[0]
    if len(candidates) > 1:
        needed = _scratch_bytes(gemm, candidates, l2_bytes)
        if needed > (free := free_memory()):
            return f"{gemm}: took cuBLASLt's first algorithm; measuring needs {needed:,} bytes, {free:,} are free"
        times = _measure(gemm, candidates, l2_bytes, stream)
        gemm.algo, gemm.workspace = candidates[fastest(times)]
    _chosen[name] = gemm.algo, gemm.workspace
    disk.store("gemm", key, {"workspace": gemm.workspace}, gemm.algo.tobytes())
    return ""


def fastest(times: list[float]) -> int:
    """Index of the fastest candidate; of those that are as good as equal, the heuristic's earlier one."""
    best = 0
    for index, time in enumerate(times):
        if time < times[best] * _CLEARLY_FASTER:
            best = index
    if times[best] == float("inf"):
        raise LaunchRefused("none of cuBLASLt's algorithms for a GEMM can be launched")
    return best


def _from_disk(gemm: PreparedGemm, key: dict[str, Any]) -> tuple[Any, int] | None:
    entry = disk.load("gemm", key)
    dtype = gemm.lt.api.matmul_algo_dtype
    if entry is None or len(entry[1]) != np.dtype(dtype).itemsize:
        return None
    algo = np.frombuffer(bytearray(entry[1]), dtype=dtype)
    workspace = int(entry[0]["workspace"])
    return (algo, workspace) if gemm.accepts(algo, workspace) else None


# ---------------------------------------------------------------------------------------------- measuring


def _scratch_bytes(gemm: PreparedGemm, candidates: list[tuple[Any, int]], l2_bytes: int) -> int:
    spans = sum(operand.span + operand.alignment for operand in gemm.operands.values())
    return spans + max(workspace for _, workspace in candidates) + _FLUSH_FACTOR * l2_bytes


def _measure(gemm: PreparedGemm, candidates: list[tuple[Any, int]], l2_bytes: int, stream: Any) -> list[float]:
    """Median milliseconds of each candidate, infinite for one that cannot be launched."""
    import cupy

    rng = np.random.default_rng(0)
    scratch = {name: _Scratch(operand, rng, stream) for name, operand in gemm.operands.items()}
    places = Addresses(**{name: memory.address for name, memory in scratch.items()})
    workspace = cupy.cuda.alloc(max(1, *(size for _, size in candidates)))
    flush = cupy.cuda.alloc(_FLUSH_FACTOR * l2_bytes)
    runners: list[Runner | None] = [gemm.runner(places, algo, workspace.ptr, size) for algo, size in candidates]
    samples: list[list[tuple[Any, Any]]] = [[] for _ in candidates]
    for _ in range(1 + _REPEATS):  # the first round warms up
        for index, runner in enumerate(runners):
            flush.memset_async(0, flush.mem.size, stream)
            before, after = cupy.cuda.Event(), cupy.cuda.Event()
            if runner is None:
                continue
            try:
                before.record(stream)
                runner(stream.ptr)
                after.record(stream)
                samples[index].append((before, after))
            except LaunchRefused:
                runners[index] = None
    stream.synchronize()
    return [
        statistics.median(cupy.cuda.get_elapsed_time(*pair) for pair in pairs[1:]) if runner else float("inf")
        for pairs, runner in zip(samples, runners, strict=True)
    ]


class _Scratch:
    """Memory of an operand's size and alignment, filled with normal values."""

    def __init__(self, operand: Operand, rng: np.random.Generator, stream: Any):
        import cupy

        self._memory = cupy.cuda.alloc(operand.span + operand.alignment)
        # As badly aligned as the real one: allocations are multiples of 256 or better.
        self.address: int = self._memory.ptr + operand.alignment % 256
        count = min(_TILE, operand.span // numpy_dtype(operand.dtype).itemsize)
        tile = rng.standard_normal(count, dtype=np.float32).astype(numpy_dtype(operand.dtype))
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(self.address, tile.ctypes.data, tile.nbytes, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()  # the tile is freed when this returns
        filled = tile.nbytes
        while filled < operand.span:
            part = min(filled, operand.span - filled)
            driver_api().cuMemcpyDtoDAsync(self.address + filled, self.address, part, stream.ptr)
            filled += part
