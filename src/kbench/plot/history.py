"""The page of a history: a picture for each series, its runs from left to right."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from kbench.axis import Axis
from kbench.history.series import Point, Series
from kbench.history.words import finding, reach, sentences, when
from kbench.plot import charts
from kbench.plot.document import document
from kbench.results.conditions import mode_name
from kbench.results.store import replace_text
from kbench.results.tables import count_text

STYLE = """
.series { display: grid; gap: 8px 28px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)) }
.series > div { min-width: 0 } .series li { font-size: 13px } .series ul { margin: 2px 0 0; padding-left: 18px }
svg .break { stroke: var(--faint); stroke-dasharray: 2 4; stroke-width: 1.4 }
svg .alone { fill: none; stroke: var(--c3); stroke-width: 1.8 }
svg .turn { fill: none; stroke: var(--c1); stroke-width: 1.8 }
"""
EXPLAINED = (
    "Each dot is a run, with the 95% interval of its median, oldest on the left. Ringed in red: the first run of a new "
    "level, or the last of a creep; in yellow: one that no other run confirms. A dotted line stands between runs that "
    "cannot be compared."
)
_MOST_TICKS = 6
_ROOM = 1.1  # the least that is shown above and below the middle of a series


def write_history(path: Path, title: str, found: Sequence[Series]) -> None:
    """Write the page in one step. Raises CannotRunError where it cannot be written."""
    parts = [f"<h1>{html.escape(title)}</h1>", f'<p class="faint">{EXPLAINED}</p>']
    for heading, group in itertools.groupby(found, _heading):
        mine = list(group)
        parts.append(f"<h2>{html.escape(heading)}</h2>")
        if commits := reach(mine):
            parts.append(f'<p class="faint">{html.escape(commits)}</p>')
        parts += ['<div class="series">', *map(_one, mine), "</div>"]
    text = document(title, parts, STYLE).encode("utf-8", errors="replace").decode("utf-8")
    replace_text(path, text, hint="choose another file with --html FILE.html")


def picture(series: Series) -> str:
    """One series as SVG: at least one point."""
    points = series.points
    x = Axis.over([0.0, float(len(points) - 1)], charts.LEFT + 12, charts.WIDTH - 28, whole=True)
    ends = [value for point in points for value in (point.low, point.high)]
    # Not from zero, where 3% would not be seen; nor from the lowest to the highest, where noise would be mountains.
    middle = median(point.value for point in points)
    y = Axis.over([*ends, middle / _ROOM, middle * _ROOM], charts.HEIGHT - charts.BOTTOM, charts.TOP)
    every = max(1, -(-len(points) // _MOST_TICKS))
    numbers = [float(i) for i in range(0, len(points), every)]
    names = [str(i + 1) for i in range(0, len(points), every)]
    unit = f"{series.metric.name}, {series.metric.unit}" if series.metric.unit else series.metric.name
    parts = [charts.frame(x, y, numbers, "run", unit, right=charts.WIDTH - 16, x_names=names)]
    for at in series.breaks:
        across = (x.pixel(at - 1) + x.pixel(at)) / 2
        parts.append(f'<path class="break" d="M{across:.1f} {charts.TOP}V{charts.HEIGHT - charts.BOTTOM}"/>')
    for stretch in series.stretches:
        parts.append(charts.stroke("c0", [(x.pixel(i), y.pixel(points[i].value)) for i in stretch]))
    parts += [_dot(point, x.pixel(i), y) for i, point in enumerate(points)]
    for change in series.changes:
        style = "alone" if change.kind == "unconfirmed" else "turn"
        centre = f'cx="{x.pixel(change.at):.1f}" cy="{y.pixel(points[change.at].value):.1f}"'
        parts.append(f'<circle class="{style}" {centre} r="6.5"/>')
    return charts.svg(f"{series.family}:{series.key.version} over {len(points)} runs", parts)


def _dot(point: Point, across: float, y: Axis) -> str:
    told = html.escape(f"{when(point)}: {count_text(point.value)}")
    bar = f'<path class="interval" d="M{across:.1f} {y.pixel(point.low):.1f}V{y.pixel(point.high):.1f}"/>'
    dot = f'<circle class="dot" cx="{across:.1f}" cy="{y.pixel(point.value):.1f}" r="3"/>'
    return f'<g class="c0"><title>{told}</title>{bar}{dot}</g>'


def _one(series: Series) -> str:
    items = "".join(f"<li>{html.escape(text)}</li>" for text in sentences(series))
    told = f"<ul>{items}</ul>" if items else ""
    title = html.escape(f"version {series.key.version} at {series.key.place}: {finding(series)}")
    return f"<div><h3>{title}</h3>{picture(series)}{told}</div>"


def _heading(series: Series) -> str:
    key = series.key
    words = [key.problem, key.dtype, mode_name(key.cache_mode), f"on {key.device}", key.kernel]
    return ", ".join(word for word in words if word)
