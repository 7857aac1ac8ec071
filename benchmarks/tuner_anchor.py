"""A sweep of kbench beside Kernel Tuner's brute force, on the same kernel and space. Needs a GPU and kernel-tuner.

    python benchmarks/tuner_anchor.py > beside.json

The kernel adds two vectors; the space is block sizes by elements per thread. Both tools compile every point, check its
result against the right one and time it. The table on stderr shows the wall time of the first run (nothing compiled
before) and of a second one, and how well each knows its times: half the 95% interval of the median, as a share of it,
in the middle of all points. kbench's wall time is that of the whole command, the other's that of `tune_kernel` alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kbench.device.cuda.probe import probe_gpu
from kbench.errors import Exit
from kbench.measure.statistics import confidence_interval
from kbench.results.store import latest_run, read_run

COUNT = 1 << 24  # elements: 64 MiB a vector, which no L2 holds
BLOCKS = (32, 64, 128, 256, 512, 1024)
ITEMS = (1, 2, 4, 8)

BODY = """
template <int EACH>
__device__ void add_items(float* out, const float* a, const float* b, long long count) {
    const long long first = (long long)blockIdx.x * blockDim.x * EACH + threadIdx.x;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const long long i = first + (long long)k * blockDim.x;
        if (i < count) out[i] = a[i] + b[i];
    }
}
"""
FOR_KBENCH = """
template <int ITEMS>
__global__ void tuned_add1(float* out, const float* a, const float* b, long long count) {
    add_items<ITEMS>(out, a, b, count);
}
"""
FOR_KERNEL_TUNER = """
extern "C" __global__ void tuned_add(float* out, const float* a, const float* b, long long count) {
    add_items<ITEMS>(out, a, b, count);
}
"""
CONTRACT = f'''
"""The sum of two vectors: what benchmarks/tuner_anchor.py tunes."""

from kbench.family import CheckShape, Expected, Family, Launch, Param, Tensor, Version, ceil_div, normal


def _tensors(problem):
    draw = normal(0.1, 1.0)
    shape = (problem["N"],)
    return (Tensor("a", shape, "fp32", "in", draw=draw), Tensor("b", shape, "fp32", "in", draw=draw),
            Tensor("out", shape, "fp32", "out"))


def _reference(problem, inputs, error, xp):
    total = inputs["a"] + inputs["b"]
    return {{"out": Expected(total, xp.zeros(total.shape, xp.float32))}}


def _plan(problem, block, props, ITEMS):
    grid = (ceil_div(problem["N"], block * ITEMS),)
    return (Launch(f"tuned_add1<{{ITEMS}}>", grid, (block,), ("out", "a", "b", problem["N"])),)


FAMILY = Family(
    name="tuned_add", summary="the sum of two vectors", sizes={{"N": "elements"}}, dtypes=("fp32",),
    presets={{"default": {{"N": {COUNT}}}, "small": {{"N": 4096}}}},
    check_shapes=(CheckShape({{"N": 1000}}, "a tail"),),
    tensors=_tensors, reference=_reference,
    versions=(Version(1, "some elements a thread", _plan, ("fp32",), params={{"ITEMS": Param(1, {ITEMS})}}),),
)
'''

Run = dict[str, Any]


def main() -> int:
    if reason := probe_gpu():
        print(f"tuner_anchor: needs a GPU: {reason}", file=sys.stderr)
        return Exit.CANNOT
    with tempfile.TemporaryDirectory() as folder:
        runs = [_kbench(Path(folder), "first"), _kbench(Path(folder), "second")]
    try:
        runs += [_kernel_tuner("first"), _kernel_tuner("second")]
    except ImportError as error:
        print(f"tuner_anchor: only kbench's own figures: {error}", file=sys.stderr)
    _show(runs)
    print(json.dumps(runs, indent=2, allow_nan=False))
    return Exit.OK


def _kbench(folder: Path, which: str) -> Run:
    """A whole command, from starting Python to the tables on disk."""
    (folder / "tuned_add.cu").write_text(BODY + FOR_KBENCH, encoding="utf-8")
    (folder / "tuned_add.py").write_text(CONTRACT, encoding="utf-8")
    results = folder / "results"
    command = [sys.executable, "-m", "kbench", "sweep", "tuned_add", "--family-dir", str(folder), "--param",
               f"ITEMS={','.join(map(str, ITEMS))}", "--results", str(results), "--device", "cuda"]  # fmt: skip
    # A cache of its own: the first run compiles everything, and measures the card's ceilings too.
    environment = {**os.environ, "KBENCH_CACHE": str(folder / "cache")}
    started = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    rows = [row for row in read_run(latest_run(results)).rows if row.measurement]
    widths = [
        (row.measurement["high_ms"] - row.measurement["low_ms"]) / 2 / row.measurement["median_ms"]
        for row in rows
        if row.measurement
    ]
    best = min(rows, key=lambda row: row.measurement["median_ms"] if row.measurement else float("inf"))
    ms = best.measurement["median_ms"] if best.measurement else 0.0
    return _run("kbench", which, wall, widths, f"block {best.block} ITEMS {best.params['ITEMS']}", ms)


def _kernel_tuner(which: str) -> Run:
    from kernel_tuner import tune_kernel

    random = np.random.default_rng(0)
    a, b = (random.standard_normal(COUNT, dtype=np.float32) for _ in range(2))
    started = time.perf_counter()
    results, _ = tune_kernel(
        "tuned_add",
        BODY + FOR_KERNEL_TUNER,
        COUNT,
        [np.zeros_like(a), a, b, np.int64(COUNT)],
        {"block_size_x": list(BLOCKS), "ITEMS": list(ITEMS)},
        grid_div_x=["block_size_x", "ITEMS"],
        answer=[a + b, None, None, None],
        lang="CUPY",
        quiet=True,
    )
    wall = time.perf_counter() - started
    widths = [_half_width([float(ms) for ms in point["times"]]) for point in results]
    best = min(results, key=lambda point: float(point["time"]))
    name = f"block {best['block_size_x']} ITEMS {best['ITEMS']}"
    return _run("Kernel Tuner", which, wall, widths, name, float(best["time"]))


def _half_width(times: Sequence[float]) -> float:
    """Of seven samples the interval is from the least to the greatest, which covers the median with 98%."""
    interval = confidence_interval(times)
    return (interval.high - interval.low) / 2 / median(times)


def _run(tool: str, which: str, wall: float, widths: Sequence[float], best: str, ms: float) -> Run:
    return {
        "tool": tool, "run": which, "points": len(widths), "wall_s": wall, "half_width": median(widths), "best": best,
        "best_ms": ms,
    }  # fmt: skip


def _show(runs: Sequence[Run]) -> None:
    print(f"{'tool':14} {'run':7} {'points':>6} {'wall s':>7} {'+-':>7}  best", file=sys.stderr)
    for run in runs:
        figures = f"{run['points']:6} {run['wall_s']:7.2f} {run['half_width']:7.2%}"
        print(f"{run['tool']:14} {run['run']:7} {figures}  {run['best']}: {run['best_ms']:.4f} ms", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
