"""The pictures of a page that need no axes: heat map, bars, the table of the summary, and the rows without a time.

They are HTML, so that their words wrap on a narrow screen, and can be copied.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kbench.ceilings import Ceilings
from kbench.plot.contest import Contest, label, series_of
from kbench.results.best import median
from kbench.results.schema import Row
from kbench.results.summary import Line, rate_text
from kbench.results.tables import WINNER, milliseconds, percent

LINEAR = 20.0  # the largest ratio of two bars that is drawn as it is: shorter ones could not be seen
PALEST = 100.0  # so many times as slow as the fastest is the palest cell of a heat map, unless none is so slow
WHITE = 0.6  # letters on cells at least as strong as this are white
HARMLESS = ("pass", "refused", "skipped")


@dataclass(frozen=True)
class Bar:
    """One bar. name: a word, text: what it stands for. size: its length, None where there is no bar to draw."""

    name: str
    text: str
    size: float | None
    value: str
    best: bool = False


def heat_map(contest: Contest) -> str:
    """Times by version and block size, the faster the stronger; without times, what became of each row."""
    blocks = contest.blocks
    slower = [median(row) / median(contest.winner) for row in contest.timed if contest.winner]
    palest = min(max(2.0, *slower), PALEST) if slower else PALEST  # 2: a tenth slower is not to look like the slowest
    head = "".join(f"<th>{block}</th>" for block in blocks)
    lines = [f"<tr><th>block</th>{head}</tr>"]
    for series, rows in contest.series.items():
        cells = "".join(_cell(rows.get(block), contest.winner, palest) for block in blocks)
        lines.append(f"<tr><th>{html.escape(label(series))}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="heat">{"".join(lines)}</table></div>'


def ladder(contest: Contest) -> str:
    """From the first version to the last: what each gains over the first that is proven and timed."""
    # The fastest of each comes last, and stays.
    best = {series_of(row): row for row in sorted(contest.timed, key=median, reverse=True)}
    first = next((best[series] for series in contest.series if series in best), None)
    found = []
    for series, rows in contest.series.items():
        fastest = best.get(series)
        idea = next(iter(rows.values())).idea
        if fastest is None or first is None:
            found.append(Bar(label(series), idea, None, "no proven time"))
            continue
        factor = median(first) / median(fastest)
        value = f"{_factor(factor)} {milliseconds(median(fastest))} ms @{fastest.block}"
        found.append(Bar(label(series), idea, factor, value, fastest is contest.winner))
    return bars(found)


def bandwidths(lines: Sequence[Line], ceilings: Ceilings) -> str:
    """The bandwidth of each line that has one, beside the card's."""
    found = []
    for line in lines:
        if line.gbs:
            near = f" {percent(line.gbs / ceilings.copy_gbs)}" if ceilings.copy_gbs else ""
            name = f"{line.family} v{line.version}"
            found.append(Bar(name, f"{line.problem} {line.dtype}", line.gbs, f"{rate_text(line.gbs)} GB/s{near}"))
    return bars(found, ceilings.copy_gbs)


def bars(found: Sequence[Bar], mark: float | None = None) -> str:
    """Bars below each other, each with its name before it and its value behind.

    mark: a size that is marked on all of them. Lengths are logarithmic, and it says so, where the largest would hide
    the smallest.
    """
    sizes = [bar.size for bar in found if bar.size] + ([mark] if mark else [])
    low, high = min(sizes, default=1.0), max(sizes, default=1.0)
    logarithmic = mark is None and high / low > LINEAR

    def share(size: float) -> float:
        # Half the smallest is where logarithmic bars begin, so that the smallest is seen.
        return math.log(size / low * 2) / math.log(high / low * 2) if logarithmic else size / high

    at = f'<span class="mark" style="left:{share(mark):.1%}"></span>' if mark else ""
    items = []
    for bar in found:
        style = ' class="best"' if bar.best else ""
        fill = f'<span class="fill" style="width:{share(bar.size):.1%}"></span>{at}' if bar.size else ""
        items.append(
            f"<li{style}><span><b>{html.escape(bar.name)}</b> "
            f"<small>{html.escape(bar.text)}</small></span>"
            f'<span class="track">{fill}</span><span>{html.escape(bar.value)}</span></li>'
        )
    note = '<p class="faint">The lengths of the bars are logarithmic.</p>' if logarithmic else ""
    return f'<ul class="bars">{"".join(items)}</ul>{note}'


def summary(lines: Sequence[Line], links: Mapping[tuple[str, str, str], str]) -> str:
    """The best proven version of each problem. links: by family, problem and dtype, the place that shows it."""
    head = "<th>best proven version of</th><th>ver</th><th>block</th><th>ms</th><th>GB/s</th><th>TFLOP/s</th>"
    rows = [f"<tr>{head}<th>of ceiling</th></tr>"]
    for line in lines:
        link = links[line.family, line.problem, line.dtype]
        name = f'<a href="#{link}">{html.escape(line.family)}</a>'
        cells = [f"{name} <small>{html.escape(f'{line.problem} {line.dtype}')}</small>"]
        if line.ms is None:
            cells += ["none", "", "", "", "", ""]
        else:
            rates = [rate_text(rate) if rate else "" for rate in (line.gbs, line.tflops)]
            near = f"{percent(line.share)} {line.ceiling}" if line.ceiling else ""
            cells += [str(line.version), html.escape(line.place), milliseconds(line.ms), *rates, near]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="scroll"><table class="sums">{"".join(rows)}</table></div>'


def untimed(contest: Contest) -> str:
    """The rows that no picture shows, with their reasons; empty where there are none."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in contest.rows:
        if row.overridden or row.status != "pass":
            status = "judged by another tolerance than the family's" if row.status == "pass" else row.status
            groups.setdefault((label(series_of(row)), status, row.reason), []).append(row.block)
    items = []
    for (name, status, reason), blocks in groups.items():
        style = "" if status in HARMLESS else ' class="bad"'
        where = f"{name} at {', '.join(map(str, sorted(blocks)))}"
        because = f": {html.escape(reason)}" if reason else ""
        items.append(f"<li>{html.escape(where)}: <span{style}>{html.escape(status)}</span>{because}</li>")
    if not items:
        return ""
    return f'<h3>Not compared</h3><ul class="rows">{"".join(items)}</ul>'


def _cell(row: Row | None, winner: Row | None, palest: float) -> str:
    if row is None:
        return "<td></td>"
    if not row.may_win or winner is None:
        style = ' class="ok"' if row.status == "pass" else "" if row.status in HARMLESS else ' class="bad"'
        return f"<td{style}>{html.escape('overridden' if row.overridden else row.status)}</td>"
    slower = median(row) / median(winner)
    strength = max(0.0, 1 - math.log(slower) / math.log(palest)) * 0.95
    styles = ["deep"] * (strength >= WHITE) + ["best"] * (row is winner)
    of_class = f' class="{" ".join(styles)}"' if styles else ""
    told = f"{milliseconds(median(row))} ms, {slower:.2f} times the fastest"
    star = WINNER if row is winner else ""
    return f'<td{of_class} style="--s:{strength:.2f}" title="{told}">{_short(median(row))}{star}</td>'


def _short(ms: float) -> str:
    """Three digits of a time: a cell is narrow, and its colour says the rest."""
    return f"{ms:#.3g}".rstrip(".") if 1e-3 <= ms < 1e3 else f"{ms:.3g}"


def _factor(factor: float) -> str:
    return f"{factor:.2f}x" if factor < 10 else f"{factor:.1f}x" if factor < 100 else f"{factor:,.0f}x"
