"""The closing summary of a sweep over several families, as text of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from kbench.ceilings import Ceilings
from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.results.summary import Line, ceilings_text, rate_text
from kbench.results.tables import milliseconds, percent

COLUMNS = (
    Column("best proven version of", flexible=True),
    Column("ver", "right"),
    Column("block", "right", drop=1),
    Column("ms", "right"),
    Column("GB/s", "right", drop=2),
    Column("TFLOP/s", "right", short="TF/s", drop=3),
    Column("of ceiling", "right", short="ceiling"),
)


def show_summary(lines: Sequence[Line], ceilings: Ceilings, screen: Screen) -> None:
    """The best proven version of each problem, and the ceilings that it is measured against."""
    screen.say()
    screen.table(COLUMNS, [_cells(line) for line in lines])
    screen.say()
    for text in ceilings_text(ceilings):
        screen.prose(text, rest="  ")


def _cells(line: Line) -> list[str]:
    name = f"{line.family}\n  {line.problem} {line.dtype}"
    if line.version is None or line.ms is None:
        return [name, "none", "", "", "", "", ""]
    rates = ["" if rate is None else rate_text(rate) for rate in (line.gbs, line.tflops)]
    near = f"{percent(line.share)} {line.ceiling}" if line.ceiling else ""
    return [name, str(line.version), line.place, milliseconds(line.ms), *rates, near]
