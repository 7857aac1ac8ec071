"""How often `kbench compare` is wrong: a kernel against itself, and against itself slowed down by 2%. Needs a GPU.

    python benchmarks/compare_noise.py > noise.json

Three contests of 20 comparisons each, with which side is the slower one taking turns:

- layernorm_forward version 6 against a copy of its file: the same machine code, loaded twice. No difference may be
  seen.
- residual connections over 71 million elements, about 0.1 ms of pure memory traffic, against the same with 2% more
  blocks: the slower one has to be found every time.
- a kernel that waits for 100 us by the GPU's clock against one that waits for 102 us: likewise.

The table on stderr shows the verdicts and, of all comparisons of a contest, the ratios (slower over faster), half the
median interval, and the seconds of one comparison with all of its proofs.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from kbench.catalog import kernel_folder
from kbench.compare import CompareBench
from kbench.device.cuda.probe import probe_gpu
from kbench.errors import Exit
from kbench.measure.ab_statistics import Rule
from kbench.selection import Selection
from kbench.sides import Side
from kbench.sweep import Options

RUNS = 20

# Versions of residual_forward. Blocks beyond `tiles` do the first tiles again: the same values, and so much more work.
KERNELS = """
#include "common.cuh"

template <class T>
__device__ inline T sum(T a, T b) {
    return from_float<T>(to_float(a) + to_float(b));
}

template <class T>
__global__ void residual_tiles(T* out, const T* inp1, const T* inp2, int tiles) {
    constexpr int kPacket = Packet<T>::size;
    const Offset tile = blockIdx.x < tiles ? blockIdx.x : blockIdx.x - tiles;
    const Offset first = (tile * blockDim.x + threadIdx.x) * kPacket;
    Packet<T> a = load_packet_streaming(inp1 + first);
    const Packet<T> b = load_packet_streaming(inp2 + first);
#pragma unroll
    for (int i = 0; i < kPacket; ++i) a[i] = sum(a[i], b[i]);
    store_packet(out + first, a);
}

__device__ inline unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

template <class T>
__global__ void residual_spin(T* out, const T* inp1, const T* inp2, Offset count, unsigned long long duration) {
    const unsigned long long start = nanoseconds();
    while (nanoseconds() - start < duration) {
    }
    const Offset i = Offset(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = sum(inp1[i], inp2[i]);
}
"""
CONTRACT = """
from kbench.family import ITEM_SIZES, PACKET_BYTES, Launch, Rule, Version

def packets(problem):
    return PACKET_BYTES // ITEM_SIZES[problem.storage]

def tiles(more):
    def plan(problem, block, props):
        count = problem["N"] // (packets(problem) * block)
        kernel = f"residual_tiles<{problem.c_type}>"
        return (Launch(kernel, (count + int(more * count),), (block,), ("out", "inp1", "inp2", count)),)
    return plan

def spin(nanoseconds):
    def plan(problem, block, props):
        arguments = ("out", "inp1", "inp2", problem["N"], nanoseconds)
        return (Launch(f"residual_spin<{problem.c_type}>", (-(-problem["N"] // block),), (block,), arguments),)
    return plan

WHOLE = (Rule("N divisible by 65536", lambda problem: problem["N"] % 65536 == 0),)
CLOCK = "it waits for the GPU's clock"
versions = (
    Version(901, "a packet per thread", tiles(0.0), ("bf16",), rules=WHOLE),
    Version(902, "a packet per thread, 2% of them twice", tiles(0.02), ("bf16",), rules=WHOLE),
    Version(911, "waits for 100 us", spin(100_000), ("bf16",), gpu_only=CLOCK),
    Version(912, "waits for 102 us", spin(102_000), ("bf16",), gpu_only=CLOCK),
)
"""


@dataclass(frozen=True)
class Contest:
    """Two sides of which the second is the slower one by `slower`; 0 for a kernel against itself."""

    name: str
    sides: tuple[Side, Side]
    sizes: dict[str, list[int]]
    slower: float


def contests(folder: Path) -> tuple[Contest, ...]:
    """The contests, with what they need planted in `folder`."""
    (folder / "residual_forward.noise.cu").write_text(KERNELS, encoding="utf-8")
    (folder / "residual_forward.noise.py").write_text(CONTRACT, encoding="utf-8")
    copied = folder / "a_copy.cu"
    shutil.copy(kernel_folder() / "layernorm_forward.cu", copied)

    def residual(number: int) -> Side:
        return Side("residual_forward", number, 256)

    itself = Side("layernorm_forward", 6, 256), Side("layernorm_forward", 6, 256, str(copied))
    return (
        Contest("layernorm_forward:6, itself", itself, {}, 0.0),
        Contest("memory, 2% more blocks", (residual(901), residual(902)), {"N": [68 << 20]}, 0.02),
        Contest("100 us and 102 us", (residual(911), residual(912)), {"N": [1 << 16]}, 0.02),
    )


def main() -> int:
    if reason := probe_gpu():
        print(f"compare_noise: needs a GPU: {reason}", file=sys.stderr)
        return Exit.CANNOT
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planted = contests(folder)
        options = Options(device="cuda", family_dirs=(folder,))
        with CompareBench(options, lambda note: print(f"compare_noise: {note}", file=sys.stderr)) as bench:
            found = [_compare(bench, contest, folder, RUNS) for contest in planted]
            document = {"device": bench.device, "runs": RUNS, "contests": found}
    print(_table(found), file=sys.stderr)
    print(json.dumps(document, indent=1))
    return Exit.OK if all(contest["right"] == contest["runs"] for contest in found) else Exit.REGRESSION


def _compare(bench: CompareBench, contest: Contest, results: Path, runs: int) -> dict[str, Any]:
    estimates = []
    started = time.perf_counter()
    for number in range(runs):
        # The slower one comes second, then first: a preference for a side would show.
        order = contest.sides if number % 2 == 0 else contest.sides[::-1]
        planned = bench.sides(order, Selection([], "run", sizes=contest.sizes, dtype="bf16"), results)
        answer = bench.compare(planned, Rule(), contest.name)
        if answer.comparison is None:
            reasons = [row.reason for row in answer.rows if row.reason]
            raise SystemExit(f"compare_noise: {contest.name}: {'; '.join(reasons)}")
        estimates.append(_estimate(answer.comparison, swapped=number % 2 == 1))
    differs = [one["differs"] and (one["ratio"] > 1 or not contest.slower) for one in estimates]
    return {
        "name": contest.name,
        "runs": runs,
        "slower": contest.slower,
        "differences": sum(differs),
        "right": sum(differs) if contest.slower else runs - sum(differs),
        "seconds": (time.perf_counter() - started) / runs,
        "estimates": estimates,
    }


def _estimate(comparison: dict[str, Any], swapped: bool) -> dict[str, Any]:
    """With the ratio as time of the slower over time of the faster side."""
    found = dict(comparison["estimate"])
    low, high = (1 / found["high"], 1 / found["low"]) if not swapped else (found["low"], found["high"])
    found |= {"ratio": found["ratio"] if swapped else 1 / found["ratio"], "low": low, "high": high}
    medians = [side["median_ms"] for side in comparison["sides"]]
    return {**found, "same_code": comparison["same_code"], "ms": medians, "thrown_away": len(comparison["thrown_away"])}


def _table(found: Sequence[dict[str, Any]]) -> str:
    head = f"{'contest':28} {'seen':>6} {'ratios':>15} {'+-':>7} {'visible':>8} {'pairs':>6} {'ms':>7} {'s':>5}"
    lines = [head]
    for contest in found:
        ratios = [one["ratio"] for one in contest["estimates"]]
        half = median((one["high"] - one["low"]) / 2 for one in contest["estimates"])
        visible = median(one["visible"] for one in contest["estimates"])
        pairs = median(one["pairs"] for one in contest["estimates"])
        ms = median(one["ms"][0] for one in contest["estimates"])
        seen = f"{contest['differences']}/{contest['runs']}"
        lines.append(
            f"{contest['name']:28} {seen:>6} {min(ratios):7.4f}..{max(ratios):.4f} {half:7.3%} {visible:8.3%} "
            f"{pairs:6.0f} {ms:7.4f} {contest['seconds']:5.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
