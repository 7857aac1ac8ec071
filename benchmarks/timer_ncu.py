"""kbench's cold median beside Nsight Compute's gpu__time_duration, kernel by kernel from 4 us to 10 ms.

    python benchmarks/timer_ncu.py [--ncu PATH] [--caches ours|ncu] [--seed N] > timer_ncu.json

Needs a GPU, ncu and leave to read its counters. Each case is proved and timed as `kbench run` does, then launched some
times under one ncu that measures nothing but the time, so in a single pass: with `--caches ours`, the default, from the
L2 that kbench's own flush left, as the timer's launches; with `ncu`, from caches that ncu emptied before each kernel.

The table on stderr has microseconds. ncu's figure is the sum over a plan's kernels, without the gaps between them,
without fills and copies, and without what events take; so kbench's should be the larger, by what two events with
nothing between them show. `near`: without that, within 5% or 1 us.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kbench.device.cuda.probe import probe_gpu
from kbench.errors import CannotRunError, Exit, KbenchError
from kbench.grammar import Target
from kbench.jobs import Job
from kbench.profile.launch import MARKER, Spec
from kbench.profile.metrics import TIME
from kbench.profile.ncu import find_ncu, profile
from kbench.profile.raw import Profiled, read_raw, split_at
from kbench.results.schema import Row
from kbench.selection import Selection
from kbench.sweep import Bench, Options

# Family, version, sizes (the default preset's where left out): from launching to ten milliseconds; one kernel and
# several; kernels of our own and of libraries. All small enough for numpy to judge in about a second.
CASES: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("residual_forward", 2, {"N": 65_536}),
    ("permute", 1, {}),
    ("gelu_forward", 2, {}),
    ("layernorm_forward", 6, {}),
    ("softmax_forward", 7, {"N": 4096, "C": 4096}),
    ("attention_backward", 7, {"B": 2, "T": 512}),
    ("attention_backward", 5, {"B": 2, "T": 512}),
    ("matmul_forward", 3, {"B": 6}),
    ("matmul_forward", 1, {"B": 6}),
)
REPEATS = 7  # odd: the median is one of them
NEAR_SHARE, NEAR_US = 0.05, 1.0
NCU_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ncu", type=Path)
    parser.add_argument("--caches", choices=("ours", "ncu"), default="ours")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        if reason := probe_gpu():
            raise CannotRunError(f"needs a GPU: {reason}")
        tool = find_ncu(options.ncu)
        with Bench(Options(device="cuda", seed=options.seed), _note) as bench:
            jobs = [job for case in CASES for job in bench.jobs(_selection(*case))]
            rows = list(bench.rows(jobs))
            device = bench.device
        timed = [(job, row) for job, row in zip(jobs, rows, strict=True) if row.may_win]
        for row in rows:
            if not row.may_win:
                _note(f"{row.family} version {row.version} {row.status}: {row.reason}")
        times, steps = ncu_times(tool, [job for job, _ in timed], options.seed, options.caches)
    except KbenchError as error:
        _note(str(error))
        return int(error.exit_status)
    figures = [figure(row, *rest) for (_, row), *rest in zip(timed, times, steps, strict=True)]
    show(figures)
    about = {"device": device, "ncu": tool.version, "caches": options.caches, "unit": "us", "rows": figures}
    print(json.dumps(about, indent=2, allow_nan=False))
    return int(Exit.OK)


def _note(text: str) -> None:
    print(f"timer_ncu: {text}", file=sys.stderr)


def _selection(family: str, version: int, sizes: Mapping[str, int]) -> Selection:
    return Selection([Target(family, (version,))], "run", sizes={name: [size] for name, size in sizes.items()})


def ncu_times(
    tool: Any, jobs: Sequence[Job], seed: int, caches: str
) -> tuple[list[list[Profiled]], list[Mapping[str, int]]]:
    """For each job the kernels of its launches in order, all of them under one ncu, and the steps of its plan."""
    with tempfile.TemporaryDirectory(prefix="kbench-") as name:
        folder = Path(name)
        spec = Spec(tuple(jobs), seed, str(folder / "answer.json"), repeats=REPEATS, marked=True)
        found = profile(
            tool, spec, folder, NCU_SECONDS, cache_control="all" if caches == "ncu" else "none", sections=(),
            metrics=TIME,
        )  # fmt: skip
    launches = split_at(MARKER, read_raw(found.raw))
    if len(launches) != len(jobs) * REPEATS:
        raise CannotRunError(f"ncu saw {len(launches)} launches of {len(jobs) * REPEATS}")
    groups = [launches[start : start + REPEATS] for start in range(0, len(launches), REPEATS)]
    # The launch of the middle time stands for its job.
    return [sorted(group, key=_sum)[REPEATS // 2] for group in groups], [job["steps"] for job in found.answer["jobs"]]


def _sum(kernels: Sequence[Profiled]) -> float:
    return sum(kernel.values.get(TIME[0], 0.0) for kernel in kernels) / 1e3


def figure(row: Row, kernels: Sequence[Profiled], steps: Mapping[str, int]) -> dict[str, Any]:
    """One line: kbench's and ncu's times of a plan, in microseconds."""
    taken = row.measurement or {}
    ours, theirs = 1e3 * median(taken["samples_ms"]), _sum(kernels)
    apart = abs(ours - 1e3 * taken["overhead_ms"] - theirs)
    unseen = sum(steps.get(name, 0) for name in ("Fill", "Copy"))
    return {
        "case": f"{row.family}:{row.version}", "sizes": row.sizes, "dtype": row.dtype, "block": row.block,
        "kernels": len(kernels), "unseen_steps": unseen, "kbench_us": ours, "ncu_us": theirs,
        "difference_us": ours - theirs, "ratio": ours / theirs if theirs else None,
        "near": apart <= max(NEAR_SHARE * theirs, NEAR_US),
        "overhead_us": 1e3 * taken["overhead_ms"], "samples": len(taken["samples_ms"]), "note": taken["note"],
    }  # fmt: skip


def show(figures: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{'case':24} {'kernels':>7} {'kbench':>10} {'ncu':>10} {'diff':>8} {'ratio':>6}  near  (us)", file=sys.stderr
    )
    for row in figures:
        times = f"{row['kbench_us']:10.2f} {row['ncu_us']:10.2f} {row['difference_us']:8.2f}"
        ratio = f"{row['ratio']:6.3f}" if row["ratio"] is not None else f"{'':6}"
        near = f"{'yes' if row['near'] else 'NO':4}"
        unseen = f"{row['unseen_steps']} fills or copies not in ncu's" if row["unseen_steps"] else ""
        remarks = "; ".join(filter(None, (unseen, row["note"])))
        print(f"{row['case']:24} {row['kernels']:>7} {times} {ratio}  {near}  {remarks}".rstrip(), file=sys.stderr)
    overheads = sorted(row["overhead_us"] for row in figures)
    if overheads:
        print(f"two events with nothing between them show {median(overheads):.2f} us", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
