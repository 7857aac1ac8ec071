"""What `kbench inspect --counts` counts on the emulator, beside what Nsight Compute counts on a GPU.

    python benchmarks/counts_ncu.py [--ncu PATH] [--seed N] > counts_ncu.json

Needs a GPU, ncu, leave to read its counters, and g++. Each case is launched once under one ncu, on the same problem and
with the same threads per block. The table on stderr has, for each kernel, sectors of 32 bytes that its loads and stores
of global memory touch (l1tex__t_sectors_pipe_lsu_mem_global_op_ld and _st) and wavefronts of loads and stores of shared
memory (l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld and _st: the sum without _op has shuffles and more in it).

Plans that cut their work by the number of multiprocessors have other grids on the emulator, and are no cases here;
`grid` shows that both ran the same. nvcc and g++ may merge and hoist accesses differently: this is where one sees by
how much. Where lanes of a warp go round a loop unequally often, nvcc's unrolled loops let them run apart, which takes
sectors that a warp in step would not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kbench.cpus import usable_cpus
from kbench.device.cuda.probe import probe_gpu
from kbench.errors import CannotRunError, Exit, KbenchError
from kbench.grammar import Target
from kbench.inspect.counts import Counts, KernelCounts, count_apart
from kbench.jobs import Job
from kbench.profile.launch import MARKER, Spec
from kbench.profile.metrics import LOAD_SECTORS, STORE_SECTORS
from kbench.profile.ncu import find_ncu, profile
from kbench.profile.raw import Profiled, plain_name, read_raw, split_at
from kbench.selection import Selection
from kbench.sweep import Bench, Options

# Family, version, block size: coalesced and not, short and long packets, shared memory without and with conflicts, at
# the preset `small`; none of them asks the card how many multiprocessors it has.
CASES: tuple[tuple[str, int, int], ...] = (
    ("residual_forward", 1, 256),
    ("gelu_forward", 1, 256),
    ("gelu_backward", 2, 128),
    ("encoder_forward", 2, 256),
    ("layernorm_forward", 1, 64),
    ("layernorm_forward", 3, 256),
    ("layernorm_forward", 5, 128),
    ("layernorm_forward", 6, 128),
    ("softmax_forward", 1, 64),
    ("softmax_forward", 4, 128),
    ("crossentropy_forward", 1, 128),
    ("permute", 1, 256),
    ("trimat_forward", 1, 256),
    ("trimat_forward", 2, 256),
    ("matmul_forward", 1, 256),
    ("matmul_backward_bias", 2, 256),
    ("matmul_backward_bias", 4, 256),
    ("attention_forward", 1, 128),
)
SHARED = tuple(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{way}.sum" for way in ("ld", "st"))
COUNTERS = {"loads": LOAD_SECTORS, "stores": STORE_SECTORS, "wavefronts": SHARED}
NCU_SECONDS = 300.0
EMULATOR_SECONDS = 60.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ncu", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        if reason := probe_gpu():
            raise CannotRunError(f"needs a GPU: {reason}")
        tool = find_ncu(options.ncu)
        with Bench(Options(device="cuda", seed=options.seed), _note) as bench:
            jobs = [job for case in CASES for job in bench.jobs(_selection(*case))]
            device = bench.device
        with ThreadPoolExecutor(usable_cpus()) as pool:  # of processes, which compile for seconds
            counts = list(pool.map(emulator_counts, jobs))
        launches = ncu_counts(tool, jobs, options.seed)
        rows = [
            figure(job, *pair)
            for job, ours, theirs in zip(jobs, counts, launches, strict=True)
            for pair in paired(ours.kernels, theirs)
        ]
    except KbenchError as error:
        _note(str(error))
        return int(error.exit_status)
    show(rows)
    print(json.dumps({"device": device, "ncu": tool.version, "rows": rows}, indent=2, allow_nan=False))
    return int(Exit.OK)


def _note(text: str) -> None:
    print(f"counts_ncu: {text}", file=sys.stderr)


def _selection(family: str, version: int, block: int) -> Selection:
    return Selection([Target(family, (version,))], "run", block_sizes=[block], preset="small")


def emulator_counts(job: Job) -> Counts:
    request = {
        "name": job.family, "number": job.version, "sizes": job.sizes, "dtype": job.dtype, "block": job.block,
        "params": job.params, "time_limit": EMULATOR_SECONDS,
    }  # fmt: skip
    return count_apart(request, (), _note)


def ncu_counts(tool: Any, jobs: Sequence[Job], seed: int) -> list[list[Profiled]]:
    """For each job the kernels of one launch of its plan, in order."""
    with tempfile.TemporaryDirectory(prefix="kbench-") as name:
        folder = Path(name)
        spec = Spec(tuple(jobs), seed, str(folder / "answer.json"), marked=True)
        found = profile(
            tool, spec, folder, NCU_SECONDS, cache_control="all", sections=(), metrics=sum(COUNTERS.values(), ())
        )
    launches = split_at(MARKER, read_raw(found.raw))
    if len(launches) != len(jobs):
        raise CannotRunError(f"ncu saw {len(launches)} launches of {len(jobs)}")
    return launches


def paired(ours: Sequence[KernelCounts], theirs: Sequence[Profiled]) -> list[tuple[KernelCounts, Sequence[Profiled]]]:
    """Each of our kernels with its launches under ncu, told by its name."""
    return [
        (kernel, [each for each in theirs if plain_name(each.name) == plain_name(kernel.kernel)]) for kernel in ours
    ]


def figure(job: Job, ours: KernelCounts, theirs: Sequence[Profiled]) -> dict[str, Any]:
    """One line: counts of one kernel of a plan, here and under ncu."""
    loads = ours.sum(lambda place: bool(place.tensor) and place.kind == "load").sectors
    stores = ours.sum(lambda place: bool(place.tensor) and place.kind == "store").sectors
    shared = ours.totals["shared_wavefronts"]
    seen = {
        name: sum(kernel.values.get(counter, 0.0) for kernel in theirs for counter in counters)
        for name, counters in COUNTERS.items()
    }
    return {
        "case": f"{job.family}:{job.version}", "kernel": ours.kernel, "sizes": dict(job.sizes), "dtype": job.dtype,
        "block": job.block, "blocks": ours.blocks, "ncu_blocks": sum(math.prod(kernel.grid) for kernel in theirs),
        "ours": {"loads": loads, "stores": stores, "wavefronts": shared}, "ncu": seen,
    }  # fmt: skip


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{'case':24} {'kernel':28} {'grid':4}" + "".join(f" {name:>10} {'ncu':>10} {'x':>6}" for name in COUNTERS),
        file=sys.stderr,
    )
    for row in rows:
        same = "same" if row["blocks"] == row["ncu_blocks"] else "OTHER"
        cells = "".join(_cells(row["ours"][name], row["ncu"][name]) for name in COUNTERS)
        print(f"{row['case']:24} {row['kernel'][:28]:28} {same:4}{cells}", file=sys.stderr)


def _cells(ours: int, theirs: float) -> str:
    ratio = f"{ours / theirs:6.3f}" if theirs else f"{'':6}"
    return f" {ours:10,} {theirs:10,.0f} {ratio}"


if __name__ == "__main__":
    sys.exit(main())
