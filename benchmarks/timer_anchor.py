"""kbench's timer beside nvbench and triton.testing.do_bench, on the very same launches. Needs a GPU.

    python benchmarks/timer_anchor.py > anchor.json

The table on stderr shows cold medians in microseconds and kbench's figure over each other's, which should be near 1:
all of them flush L2 and time by events. nvbench (the package cuda-bench) holds the stream as kbench does; do_bench
(PyTorch and Triton) does not, so that its figures of kernels of a few microseconds hold the host's launching too.
What is not installed has no column. `second` is kbench's own second timer (see `kbench.measure.replay`) over its first.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.catalog import kernel_folder, load_catalog
from kbench.device.base import Bound
from kbench.device.cuda.device import CudaDevice
from kbench.device.cuda.probe import probe_gpu
from kbench.errors import Exit
from kbench.family import Launch, Problem, Step, Tensor, kernels_of, tensors_of
from kbench.measure.timer import time_plan
from kbench.source import Source, load_source

ADD = """
__global__ void add(float* sum, const float* a, const float* b, long long count) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) sum[i] = a[i] + b[i];
}
"""
# Elements: mostly launching; inside L2; far beyond it; ten milliseconds.
ADD_COUNTS = (65_536, 1_048_576, 6_291_456, 268_435_456, 3_221_225_472)
BLOCK = 256
# Family, version, dtype: one kernel, a reduction, a library's GEMM, and plans of several kernels; at the default sizes.
FAMILIES = (
    ("layernorm_forward", 6, "bf16"),
    ("softmax_forward", 1, "fp32"),
    ("matmul_forward", 2, "bf16"),
    ("attention_backward", 7, "tf32"),
    ("attention_backward", 5, "tf32"),
)
# nvbench stops by its own rule, which for noisy kernels may take long; seconds a case.
NVBENCH_SECONDS = 4

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A bound plan with a name."""

    name: str
    bound: Bound


@dataclass(frozen=True)
class _At:
    """A stream of nvbench's, as far as queueing a plan needs one."""

    ptr: int


def main() -> int:
    if reason := probe_gpu():
        print(f"timer_anchor: needs a GPU: {reason}", file=sys.stderr)
        return Exit.CANNOT
    device = CudaDevice()
    cases = _cases(device)
    rows = [_ours(device, case) for case in cases]
    for add in (_do_bench, _nvbench):  # nvbench last: it may end the process's work on the GPU
        try:
            add(device, cases, rows)
        except ImportError as error:
            print(f"timer_anchor: no column of {add.__name__.strip('_')}: {error}", file=sys.stderr)
    _show(rows)
    print(json.dumps({"device": device.describe(), "unit": "us", "rows": rows}, indent=2, allow_nan=False))
    return Exit.OK


def _cases(device: CudaDevice) -> list[Case]:
    cases = []
    for count in ADD_COUNTS:
        tensors = tuple(Tensor(name, (count,), "fp32", "scratch") for name in ("sum", "a", "b"))
        step = Launch("add", (math.ceil(count / BLOCK),), (BLOCK,), ("sum", "a", "b", count))
        source = Source(Path("timer_anchor.cu"), ADD, ())
        cases.append(Case(f"add, {count:,} elements", _bound(device, source, (step,), tensors)))
    catalog = load_catalog()
    for name, number, dtype in FAMILIES:
        family = catalog[name]
        problem = Problem(family.presets["default"], dtype)
        version = family.by_number[number]
        block = version.fixed or (BLOCK if BLOCK in version.blocks else version.blocks[-1])
        plan = tuple(version.plan(problem, block, device.props))
        scratch = tuple(version.scratch(problem, block, device.props)) if version.scratch else ()
        source = load_source(Path(family.sources[number]), (kernel_folder(),))
        bound = _bound(device, source, plan, (*family.tensors(problem), *scratch))
        cases.append(Case(f"{name}:{number} {dtype}", bound))
    return cases


def _bound(device: CudaDevice, source: Source, plan: tuple[Step, ...], tensors: Sequence[Tensor]) -> Bound:
    used = [tensor for tensor in tensors if tensor.name in tensors_of(plan)]
    kernels = kernels_of(plan)
    prepared = device.prepare(plan, device.build(source, kernels) if kernels else None, used)
    buffers = {tensor.name: device.alloc(tensor) for tensor in used}
    for buffer in buffers.values():
        device.poison(buffer, 0x3C)  # 0.0115 in every float: neither zero nor a NaN
    return device.bind(prepared, buffers)


def _ours(device: CudaDevice, case: Case) -> Row:
    taken = time_plan(device, case.bound)
    second = (taken.second or {}).get("ms")
    return {
        "case": case.name, "kbench_us": 1e3 * taken.median_ms, "samples": taken.count,
        "second_us": None if second is None else 1e3 * second, "conditions": taken.conditions, "note": taken.note,
    }  # fmt: skip


def _do_bench(device: CudaDevice, cases: Sequence[Case], rows: Sequence[Row]) -> None:
    import torch
    from triton.testing import do_bench

    # do_bench records its events and writes its flush on PyTorch's current stream: make that the device's.
    with torch.cuda.stream(torch.cuda.ExternalStream(device.stream.ptr)), device.activate():
        for case, row in zip(cases, rows, strict=True):
            launch = functools.partial(device.enqueue, case.bound, device.stream)
            row["do_bench_us"] = 1e3 * float(do_bench(launch, return_mode="median"))


def _nvbench(device: CudaDevice, cases: Sequence[Case], rows: Sequence[Row]) -> None:
    from cuda import bench

    def register(case: Case, name: str) -> None:
        def run(state: Any) -> None:
            def launch(at: Any) -> None:
                stream = _At(at.get_stream().addressof())
                device.enqueue(case.bound, stream)

            state.exec(launch, batched=False)

        run.__name__ = name
        bench.register(run)

    for position, case in enumerate(cases):
        register(case, f"case{position}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nvbench.json"
        with device.activate():
            bench.run_all_benchmarks(
                ["timer_anchor", "--quiet", "--json", str(path), "--timeout", str(NVBENCH_SECONDS), "--devices", "0"]
            )
        document = json.loads(path.read_text(encoding="utf-8"))
    found = {one["name"]: _gpu_seconds(one) for one in document["benchmarks"]}
    for position, row in enumerate(rows):
        if (seconds := found.get(f"case{position}")) is not None:
            row["nvbench_us"] = 1e6 * seconds


def _gpu_seconds(benchmark: dict[str, Any]) -> float | None:
    """The cold GPU time of nvbench: its median, or its mean where it gives none."""
    summaries = {summary["tag"]: summary for summary in benchmark["states"][0]["summaries"]}
    for kind in ("median", "mean"):
        if (summary := summaries.get(f"nv/cold/time/gpu/{kind}")) is not None:
            return float(next(item["value"] for item in summary["data"] if item["name"] == "value"))
    return None


def _show(rows: Sequence[Row]) -> None:
    others = [name for name in ("second", "nvbench", "do_bench") if any(f"{name}_us" in row for row in rows)]
    heads = "".join(f" {name:>9} {'ratio':>6}" for name in others)
    print(f"{'case':32} {'kbench':>9}{heads}   (us)", file=sys.stderr)
    for row in rows:
        ours, line = row["kbench_us"], ""
        for name in others:
            theirs = row.get(f"{name}_us")
            if theirs is None:
                line += f" {'':9} {'':6}"
                continue
            row[f"over_{name}"] = ours / theirs
            line += f" {theirs:9.2f} {ours / theirs:6.3f}"
        print(f"{row['case']:32} {ours:9.2f}{line}   {row['note']}".rstrip(), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
