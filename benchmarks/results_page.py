"""The page docs/results.md from run files of `kbench sweep` and the figures of benchmarks/families.py.

    python3 benchmarks/results_page.py "Default problems=results/runs/ID.jsonl" [--anchors FILE] > docs/results.md

Each of any number of arguments is a heading and the run whose best versions stand below it. The ceilings are those that
the run itself measured, as far as it did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kbench.ceilings import Ceilings
from kbench.results.store import Run, read_run
from kbench.results.summary import Line, summarise
from kbench.results.tables import milliseconds, percent

INTRODUCTION = """# Results

The fastest proven version of each family, as `kbench sweep` found it: every version at every block size was checked
against the float64 reference, then timed with a cold L2 cache. `GB/s` counts the bytes that any version has to move,
`TFLOP/s` the operations of the family's formula; `of ceiling` is the time at the card's own measured copy bandwidth or
arithmetic rate, or of its launches, whichever is longest, over the measured time. Small problems are bound by latency,
of which launching is only a part.
Written by `benchmarks/results_page.py`.
"""
ANCHORS = """
## Beside PyTorch

`benchmarks/families.py`: each family's fastest version beside the same operation in PyTorch, eager and through
torch.compile, on the same stream under kbench's timer. The ratio is PyTorch's better time over kbench's.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help="HEADING=RUN_FILE")
    parser.add_argument("--anchors", type=Path, action="append", default=[], help="--json of benchmarks/families.py")
    options = parser.parse_args()
    print(INTRODUCTION)
    for text in options.runs:
        heading, _, path = text.rpartition("=")
        print("\n".join(_section(heading, read_run(Path(path)))))
    if options.anchors:
        print(ANCHORS)
        print("\n".join(_beside(options.anchors)))


def _section(heading: str, run: Run) -> Iterator[str]:
    device: dict[str, Any] = run.header["device"]
    ceilings = Ceilings.from_dict(device["ceilings"]) if device.get("ceilings") else Ceilings()
    yield f"## {heading}\n"
    driver = f"driver {device['driver']}, " if device.get("driver") else ""
    yield f"{device['name']}, {driver}{device['compiler']}, {run.header['started'][:10]};"
    yield f"ceilings: {_ceilings(ceilings)}. {len(run.rows)} rows.\n"
    yield from _table(
        ("family", "problem", "dtype", "version", "block", "ms", "GB/s", "TFLOP/s", "of ceiling"),
        [_cells(line) for line in summarise(run.rows, ceilings) if line.version is not None],
    )


def _ceilings(ceilings: Ceilings) -> str:
    known = [f"copy {ceilings.copy_gbs:,.0f} GB/s"] if ceilings.copy_gbs else []
    if ceilings.gemm_tflops:
        known.append(f"GEMM {', '.join(f'{k} {rate:,.0f}' for k, rate in ceilings.gemm_tflops.items())} TFLOP/s")
    return "; ".join([", ".join(known) or "not known", *ceilings.notes])


def _cells(line: Line) -> list[str]:
    assert line.ms is not None
    rates = ["" if rate is None else f"{rate:,.{0 if rate >= 100 else 1}f}" for rate in (line.gbs, line.tflops)]
    ceiling = f"{percent(line.share)} {line.ceiling}" if line.ceiling else ""
    name, place = [line.family, line.problem, line.dtype], [str(line.version), line.place]
    return [*name, *place, milliseconds(line.ms), *rates, ceiling]


def _beside(files: Sequence[Path]) -> Iterator[str]:
    rows = []
    for row in (row for file in files for row in json.loads(file.read_text())):
        problem = " ".join(f"{name}={size}" for name, size in row["sizes"].items())
        times = ["" if row[name] is None else milliseconds(row[name]) for name in ("kbench", "eager", "compiled")]
        rows.append(
            [row["family"], problem, row["dtype"], f"{row['version']} @{row['block']}", *times, f"{row['ratio']:.2f}"]
        )
    yield from _table(("family", "problem", "dtype", "version", "kbench ms", "eager ms", "compiled ms", "ratio"), rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * 3}{' ---: |' * (len(names) - 3)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


if __name__ == "__main__":
    main()
