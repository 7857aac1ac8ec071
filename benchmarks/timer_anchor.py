"""kbench's timer beside triton.testing.do_bench, on the very same launches. Needs a GPU, PyTorch and Triton.

    python benchmarks/timer_anchor.py > anchor.json

The table on stderr shows cold medians in microseconds. `ratio` is kbench's figure over do_bench's; it should be
near 1, since both flush L2 and time by events. For the softmax step of attention_backward version 7, `torch` is
the same mathematics in PyTorch's own operations: another kernel, for orientation.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kbench.catalog import kernel_folder, load_catalog
from kbench.device.cuda.device import CudaDevice
from kbench.device.cuda.probe import probe_gpu
from kbench.errors import Exit
from kbench.family import Launch, Problem, Tensor, tensors_of
from kbench.measure.timer import time_plan
from kbench.source import Source, load_source

ADD = """
__global__ void add(float* sum, const float* a, const float* b, long long count) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) sum[i] = a[i] + b[i];
}
"""
# Elements: mostly launching; inside L2; far beyond it.
ADD_COUNTS = (65_536, 6_291_456, 268_435_456)
BLOCK = 256

DoBench = Callable[[Callable[[], Any]], float]
Row = dict[str, Any]


def main() -> int:
    if reason := probe_gpu():
        return _refuse(f"needs a GPU: {reason}")
    try:
        import torch
        from triton.testing import do_bench
    except ImportError as error:
        return _refuse(f"needs PyTorch with Triton ({error}): pip install torch")
    device = CudaDevice()

    # do_bench records its events and writes its flush on PyTorch's current stream: make that the device's.
    with torch.cuda.stream(torch.cuda.ExternalStream(device.stream.ptr)):
        rows = _rows(device, torch, lambda function: 1e3 * float(do_bench(function, return_mode="median")))
    _show(rows)
    print(json.dumps({"device": device.describe(), "unit": "us", "rows": rows}, indent=2, allow_nan=False))
    return Exit.OK


def _rows(device: CudaDevice, torch: Any, bench: DoBench) -> list[Row]:
    rows = []
    for count in ADD_COUNTS:
        tensors = tuple(Tensor(name, (count,), "fp32", "scratch") for name in ("sum", "a", "b"))
        step = Launch("add", (math.ceil(count / BLOCK),), (BLOCK,), ("sum", "a", "b", count))
        source = Source(Path("timer_anchor.cu"), ADD, ())
        rows.append(_both_timers(device, bench, f"add, {count:,} elements", source, step, tensors))

    step, used, source = _softmax_step(device)
    row = _both_timers(device, bench, "attention_backward v7, softmax step", source, step, used)
    rows.append({**row, "torch_us": bench(_softmax_by_torch(torch, used))})
    return rows


def _softmax_step(device: CudaDevice) -> tuple[Launch, Sequence[Tensor], Source]:
    """The kernel of version 7 that computes dpreatt, at the default preset."""
    family = load_catalog()["attention_backward"]
    problem = Problem(family.presets["default"], "tf32")
    plan = family.by_number[7].plan(problem, BLOCK, device.props)
    step = next(step for step in plan if isinstance(step, Launch) and step.kernel.startswith("softmax"))
    return step, family.tensors(problem), load_source(Path(family.sources[7]), (kernel_folder(),))


def _softmax_by_torch(torch: Any, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """scale * att * (datt - rowsum(att * datt)) on tensors of the family's shape, above the diagonal too."""
    shape = next(tensor.shape for tensor in tensors if tensor.name == "att")
    att, datt = (torch.rand(shape, device="cuda") for _ in range(2))
    scale = 0.125  # 1 / sqrt(head size 64)
    return lambda: scale * att * (datt - (att * datt).sum(-1, keepdim=True))


def _both_timers(
    device: CudaDevice, bench: DoBench, name: str, source: Source, step: Launch, tensors: Sequence[Tensor]
) -> Row:
    """Cold medians of one launch by both timers, in microseconds."""
    used = [tensor for tensor in tensors if tensor.name in tensors_of((step,))]
    prepared = device.prepare((step,), device.build(source, [step.kernel]), used)
    buffers = {tensor.name: device.alloc(tensor) for tensor in used}
    try:
        for buffer in buffers.values():
            device.poison(buffer, 0x3C)  # 0.0115 in every element: neither zero nor a NaN
        bound = device.bind(prepared, buffers)
        ours = time_plan(device, bound)
        with device.activate():
            theirs_us = bench(lambda: device.enqueue(bound, device.stream))
    finally:
        for buffer in buffers.values():
            device.free(buffer)
    ours_us = 1e3 * ours.median_ms
    return {"case": name, "kbench_us": ours_us, "do_bench_us": theirs_us, "ratio": ours_us / theirs_us,
            "samples": len(ours.samples_ms), "overhead_us": 1e3 * ours.overhead_ms, "note": ours.note}  # fmt: skip


def _show(rows: Sequence[Row]) -> None:
    print(f"{'case':38} {'kbench':>9} {'do_bench':>9} {'ratio':>6} {'torch':>9}   (us)", file=sys.stderr)
    for row in rows:
        torch_us = f"{row['torch_us']:9.2f}" if "torch_us" in row else f"{'':9}"
        figures = f"{row['kbench_us']:9.2f} {row['do_bench_us']:9.2f} {row['ratio']:6.3f}"
        print(f"{row['case']:38} {figures} {torch_us}   {row['note']}".rstrip(), file=sys.stderr)


def _refuse(reason: str) -> int:
    print(f"timer_anchor: {reason}", file=sys.stderr)
    return Exit.CANNOT


if __name__ == "__main__":
    sys.exit(main())
