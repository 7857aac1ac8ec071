"""Every family's fastest version beside PyTorch, eager and compiled, in one run on one GPU under one timer.

    kbench sweep                                  # first: finds the fastest version and block size of each family
    python3 benchmarks/families.py [FAMILY...] [--dtype bf16] [--preset default] [--json FILE]

kbench's rows are proved and timed anew, through the same code as `kbench run`. PyTorch's operations
(benchmarks/anchors.py) run on the same stream under kbench's own timer: cold L2, held stream, median. The claim is the
ratio of the two medians. A family that has no row in best.json, or whose row fails now, is told in a line; the others
go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kbench.errors import UsageError
from kbench.grammar import Target
from kbench.results.best import load_best
from kbench.results.schema import Row
from kbench.selection import Selection
from kbench.sweep import Bench, Options


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help="all that PyTorch has, if none is named")
    parser.add_argument("--dtype", help="each family's default, if left out")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the sweep wrote best.json")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    try:
        import torch
        from anchors import ANCHORS, DTYPES
    except ImportError:
        raise SystemExit("this benchmark needs PyTorch and Triton: pip install torch") from None
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    names = options.families or list(ANCHORS)
    if unknown := [name for name in names if name not in ANCHORS]:
        raise SystemExit(f"there is nothing in PyTorch to compare {unknown[0]} with; there is for {', '.join(ANCHORS)}")

    lines = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cold L2, ms; ratio: best of PyTorch / kbench")
    print(f"{'family':30s} {'dtype':5s} {'ver':>3s} {'kbench':>9s} {'eager':>9s} {'compiled':>9s} {'ratio':>6s}")
    rows, gaps = [], 0
    # All of kbench's rows first: its worker process has the GPU for itself until then.
    for name, found in _fastest(names, options.dtype, options.preset, options.results):
        if isinstance(found, Row) and found.measurement is not None:
            rows.append(found)
        else:
            gaps += 1
            print(f"{name:30s} {f'{found.dtype} {found.status}: {found.reason}' if isinstance(found, Row) else found}")
    device = _device()
    for row in rows:
        assert row.measurement is not None
        # A float32 product of PyTorch's stays in float32 unless it is told otherwise, as kbench's does.
        torch.backends.cuda.matmul.allow_tf32 = row.dtype == "tf32"
        operation = ANCHORS[row.family](row.sizes, DTYPES[row.dtype])
        eager, compiled = _torch_ms(device, torch, operation), _torch_ms(device, torch, torch.compile(operation))
        ours = row.measurement["median_ms"]
        taken = [time for time in (eager, compiled) if time is not None]
        ratio = min(taken) / ours if taken else None
        gaps += ratio is None
        cells = "".join(f" {'-' if time is None else f'{time:.4f}':>9s}" for time in (ours, eager, compiled))
        print(f"{row.family:30s} {row.dtype:5s} {row.version:3d}{cells} {ratio or float('nan'):6.2f}", flush=True)
        figures = {"kbench": ours, "eager": eager, "compiled": compiled, "ratio": ratio, "version": row.version}
        lines.append({"family": row.family, "dtype": row.dtype, "sizes": row.sizes, "block": row.block, **figures})
        if options.json:  # after each line: what has been measured survives whatever ends this program
            options.json.write_text(json.dumps(lines, indent=1))
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return 1 if gaps else 0


def _fastest(names: list[str], dtype: str | None, preset: str, results: Path) -> Iterator[tuple[str, Row | str]]:
    """The fastest version of each family, as the last sweep found it, proved and timed again; or why there is none."""
    with Bench(Options(device="cuda"), lambda line: print(line, file=sys.stderr)) as bench:
        kept = load_best(results)["gpus"].get(bench.device_name, {})
        for name in names:
            try:
                jobs = bench.jobs(Selection([Target(name)], "sweep", dtype=dtype, preset=preset, whole=True))
            except UsageError as error:
                yield name, str(error)
                continue
            entries: Any = kept.get(name, {}).get(jobs[0].dtype, {}).get("cold", {}).get(_problem(jobs[0].sizes), {})
            proven = sorted((entry["row"] for entry in entries.values()), key=_median)
            places = [(row["version"], row["block"], row.get("params", {})) for row in proven[:1]]
            wanted = [job for job in jobs if (job.version, job.block, job.params) in places]
            wanted = [job for job in wanted if job.dtype == jobs[0].dtype]
            if not wanted:
                yield name, f"{results}/best.json has no row of {jobs[0].dtype} {preset}: first `kbench sweep`"
            for row in bench.rows(wanted):
                yield name, row


def _median(row: dict[str, Any]) -> float:
    return float(row["measurement"]["median_ms"])


def _problem(sizes: Any) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _device() -> Any:
    from kbench.device.cuda.device import CudaDevice

    return CudaDevice()


def _torch_ms(device: Any, torch: Any, operation: Any) -> float | None:
    """Median milliseconds of a PyTorch operation under kbench's timer; None where PyTorch cannot do or compile it."""
    from kbench.device.base import Bound, Prepared
    from kbench.measure.timer import time_plan

    with torch.cuda.stream(torch.cuda.ExternalStream(device.stream.ptr)), torch.no_grad():
        try:
            for _ in range(3):  # compiles, and fills PyTorch's own cache of memory
                operation()
            torch.cuda.synchronize()
        except Exception as error:  # whatever PyTorch raises: torch.compile has no fused AdamW, for one
            print(f"PyTorch: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            return None
        runners = (lambda stream: operation(),)
        bound = Bound(Prepared((), (), ()), SimpleNamespace(runners=runners))
        return float(time_plan(device, bound).median_ms)


if __name__ == "__main__":
    sys.exit(main())
