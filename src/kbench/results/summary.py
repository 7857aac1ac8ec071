"""The summary of a sweep: for each problem of each family the best proven version, and how near it is to the card's
ceilings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kbench.ceilings import Ceilings, share_of_ceiling
from kbench.params import params_text
from kbench.results.best import median, winners
from kbench.results.schema import Row
from kbench.results.tables import write_table

if TYPE_CHECKING:
    import pandas as pd

NAME = "summary"


@dataclass(frozen=True)
class Line:
    """What became of one problem. version and all after it are None where no version was proven and timed.

    gbs: the bytes that any version has to move, in 1e9 a second. tflops: None where the family counts no operations.
    share, ceiling: of the card's ceiling that the problem meets first, and which that is: see `share_of_ceiling`.
    """

    family: str
    problem: str
    dtype: str
    version: int | None = None
    block: int | None = None
    ms: float | None = None
    gbs: float | None = None
    tflops: float | None = None
    share: float | None = None
    ceiling: str | None = None
    params: str | None = None  # of the version, where it has any: "ROWS=2"

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return " ".join(filter(None, (str(self.block), self.params)))


def summarise(rows: Iterable[Row], ceilings: Ceilings) -> list[Line]:
    """A line for each family, problem and dtype, in the order in which they came."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.family, row.problem, row.dtype), []).append(row)
    return [_line(group, ceilings) for group in groups.values()]


def _line(rows: Sequence[Row], ceilings: Ceilings) -> Line:
    first = rows[0]
    best = min(winners(rows).values(), key=median, default=None)
    if best is None:
        return Line(first.family, first.problem, first.dtype)
    ms = median(best)
    near = share_of_ceiling(best.traffic, best.flops, best.dtype, ms, ceilings, launches=least_launches(best))
    return Line(
        best.family, best.problem, best.dtype, best.version, best.block, ms,
        gbs=best.traffic / ms / 1e6 if best.traffic else None,
        tflops=best.flops / ms / 1e9 if best.flops else None,
        share=near[0] if near else None,
        ceiling=near[1] if near else None,
        params=params_text(best.params) or None,
    )  # fmt: skip


def least_launches(row: Row) -> int:
    """How often the version launches at least: its kernels are known, those of the libraries that it calls are not.
    None are counted in a CUDA graph, where a launch costs less than the ceiling says."""
    return 0 if row.cache_mode == "graph" else max(1, len(row.kernels))


def frame(lines: Sequence[Line]) -> pd.DataFrame:
    """One line a problem, one column a fact."""
    import pandas as pd

    # As objects: beside a line without a version, pandas would make floats of the others'.
    return pd.DataFrame([asdict(line) for line in lines], dtype=object)


def write_summary(folder: Path, run_id: str, lines: Sequence[Line]) -> list[Path]:
    """Write `tables/ID/summary.csv` and `.md`; returns the paths. Raises CannotRunError."""
    return write_table(folder, run_id, NAME, frame(lines))


def ceilings_text(ceilings: Ceilings) -> list[str]:
    """What the card can do at most, and what of it is not known or not to be trusted."""
    known = []
    if ceilings.copy_gbs:
        known.append(f"copy {rate_text(ceilings.copy_gbs)} GB/s, read and written")
    others = (("read", ceilings.read_gbs), ("write", ceilings.write_gbs), ("L2 read", ceilings.l2_gbs))
    if bandwidths := [f"{name} {rate_text(rate)}" for name, rate in others if rate]:
        known.append(f"{', '.join(bandwidths)} GB/s")
    if ceilings.gemm_tflops:
        rates = ", ".join(f"{dtype} {rate_text(rate)}" for dtype, rate in ceilings.gemm_tflops.items())
        known.append(f"gemm {rates} TFLOP/s")
    if ceilings.fma_tflops:
        known.append(f"fma fp32 {rate_text(ceilings.fma_tflops)} TFLOP/s")
    if ceilings.launch_us:
        known.append(f"launch {rate_text(ceilings.launch_us)} us")
    lines = [f"ceilings of this card: {'; '.join(known) or 'not known'}"]
    return [*lines, *ceilings.notes]


def rate_text(value: float) -> str:
    """Three digits or more, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
