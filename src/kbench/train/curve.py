"""The loss curve of a run as one SVG file: needs no library, and follows the viewer's light or dark theme."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from kbench.axis import Axis
from kbench.results.store import replace_text
from kbench.train.log import History

WIDTH, HEIGHT = 800, 450
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 52  # margins, with room for the ticks' numbers, the title and the legend
MEAN = 20  # steps in the moving mean; a run of fewer than twice as many shows the losses alone

Point = tuple[float, float]

_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 13px }
.paper { fill: #ffffff } text { fill: #24292f } .title { font-size: 16px; font-weight: 600 }
.grid { stroke: #d8dee4 } .axis { stroke: #57606a } path { fill: none; stroke-linejoin: round; stroke-linecap: round }
.losses { stroke: #8fbff0; stroke-width: 1.2 } .mean { stroke: #0550ae; stroke-width: 2.2 }
.validation { stroke: #bc4c00; stroke-width: 2 } .dots { stroke: #bc4c00; stroke-width: 6 }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #2b323b } .axis { stroke: #8b949e }
.losses { stroke: #3d76b8 } .mean { stroke: #79c0ff } .validation { stroke: #ffa657 } .dots { stroke: #ffa657 }
}
"""


def write_curve(path: Path, history: History, title: str = "Loss") -> None:
    """Writes the picture, replacing an old one in one move. Raises CannotRunError."""
    replace_text(path, loss_curve(history, title))


def loss_curve(history: History, title: str = "Loss") -> str:
    """The picture as SVG text: training losses, their moving mean, validation losses.

    Losses that are not finite leave gaps. A history without any loss gives axes and a line that says so.
    """
    losses: list[Point] = [(record.step, record.loss) for record in history.steps]
    validation: list[Point] = [(step, loss) for step, loss in history.validation]
    finite = [point for point in losses + validation if math.isfinite(point[1])]
    x = Axis.over([point[0] for point in finite], LEFT, WIDTH - RIGHT, whole=True)
    y = Axis.over([point[1] for point in finite], HEIGHT - BOTTOM, TOP)
    mean = moving_mean(losses, MEAN) if len(losses) >= 2 * MEAN else []
    parts = [f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>', _frame(x, y)]
    parts.append(f'<text class="title" x="{LEFT}" y="26">{html.escape(title)}</text>')
    curves = (
        ("training", "losses" if mean else "mean", losses),  # paler where the mean stands before them
        (f"mean of {MEAN} steps", "mean", mean),
        ("validation", "validation", validation),
    )
    at: float = LEFT
    for name, style, points in curves:
        if any(math.isfinite(point[1]) for point in points):
            parts.append(_path(style, points, x, y))
            parts.append(_legend(at, style, label := f"{name} {_last(points):.4f}"))
            at += 60 + 7.5 * len(label)
    if validation:
        parts.append(_path("dots", validation, x, y, joined=False))
    if not finite:
        middle = f'x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}" text-anchor="middle"'
        parts.append(f"<text {middle}>no loss has been measured</text>")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" width="{WIDTH}">'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def moving_mean(points: Sequence[Point], width: int) -> list[Point]:
    """The mean of each `width` values in a row, at the middle of their places; not finite where one of them is not."""
    # At the last place instead, the curve would seem to lag behind the losses while they fall.
    runs = (points[first : first + width] for first in range(len(points) - width + 1))
    return [((run[0][0] + run[-1][0]) / 2, sum(value for _, value in run) / width) for run in runs]


def thinned(points: Iterable[Point]) -> list[Point]:
    """Points in pixels, of which each column keeps the highest and the lowest: what a long curve shows anyway.

    A point that is not finite stays, as the gap that it is.
    """
    kept: list[Point] = []
    column: list[Point] = []

    def flush() -> None:
        kept.extend(sorted({min(column, key=_height), max(column, key=_height)}) if column else ())
        column.clear()

    for point in points:
        gap = not math.isfinite(point[1])
        if gap or (column and int(point[0]) != int(column[0][0])):
            flush()
        if gap:
            kept.append(point)
        else:
            column.append(point)
    flush()
    return kept


def _height(point: Point) -> float:
    return point[1]


def _last(points: Sequence[Point]) -> float:
    """The last value that is finite."""
    return next(value for _, value in reversed(points) if math.isfinite(value))


def _path(style: str, points: Sequence[Point], x: Axis, y: Axis, *, joined: bool = True) -> str:
    commands, pen_down = [], False
    for across, down in thinned((x.pixel(step), y.pixel(value)) for step, value in points):
        if not math.isfinite(down):
            pen_down = False
            continue
        # A line of no length is a dot, because its ends are round: so a lone point is seen.
        commands.append(f"L{across:.1f} {down:.1f}" if pen_down else f"M{across:.1f} {down:.1f}h0")
        pen_down = joined
    return f'<path class="{style}" d="{"".join(commands)}"/>'


def _legend(at: float, style: str, label: str) -> str:
    return f'<path class="{style}" d="M{at:.0f} 44h22"/><text x="{at + 28:.0f}" y="48">{html.escape(label)}</text>'


def _frame(x: Axis, y: Axis) -> str:
    """The grid, its numbers, the axes and their names."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in y.ticks:
        at = y.pixel(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick:.{y.decimals}f}</text>')
    for tick in x.ticks:
        at = x.pixel(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 20}" text-anchor="middle">{tick:,.0f}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:g}" y="{HEIGHT - 10}" text-anchor="middle">step</text>')
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 16 {middle:g})"'
    parts.append(f'<text x="16" y="{middle:g}" text-anchor="middle" {turned}>loss</text>')
    return "\n".join(parts)
