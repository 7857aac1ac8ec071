"""The pictures of a page that need axes: time over block size, and the roofline; each is one SVG element.

Colours, and with them the light and the dark theme, come from the page's style sheet.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from kbench.axis import Axis, LogAxis
from kbench.ceilings import Ceilings, arithmetic_rate
from kbench.plot.contest import Contest, Series, label
from kbench.results.best import median
from kbench.results.schema import Row
from kbench.results.summary import Line, rate_text
from kbench.results.tables import interval, milliseconds, percent

# Narrow, so that its letters stay readable when a telephone shrinks it to 350 pixels.
WIDTH, HEIGHT = 440, 330
LEFT, RIGHT, TOP, BOTTOM = 66, 58, 16, 46  # room for the numbers of the ticks, the series' names and the axes' names
LETTER = 7.0  # pixels that a letter takes, about
NAME_RISE, NAME_HEIGHT = 9, 11  # pixels that a name reaches above its line of writing, and in all
FAR = 20  # pixels from its point at which a name needs a line to it
LINE = 13  # pixels between the names of two series
TICK_ROOM = 30  # pixels between the numbers of two block sizes
COLOURS = 10  # of the style sheet; after these the same ones come again, dashed


def times(contest: Contest) -> str:
    """The time over the block size: a line for each version, each point with its 95% interval, the winner ringed.

    contest: with at least one timed row.
    """
    reach = [row.measurement[end] for row in contest.timed if row.measurement for end in ("low_ms", "high_ms")]
    x = LogAxis.over(contest.blocks, LEFT + 12, WIDTH - RIGHT - 12, pad=1.05)
    y = LogAxis.over(reach, HEIGHT - BOTTOM, TOP)
    parts = [frame(x, y, _spaced(contest.blocks, x), "block size (threads)", "median, ms")]
    ends = []
    for index, (series, rows) in enumerate(contest.series.items()):
        proven = [row for row in rows.values() if row.may_win]
        if proven:
            style = _style(index)
            parts.append(stroke(style, [(x.pixel(row.block), y.pixel(median(row))) for row in proven]))
            parts += [_measured(style, series, row, x, y) for row in proven]
            ends.append(_Named(label(series), style, x.pixel(proven[-1].block), y.pixel(median(proven[-1]))))
    if contest.winner is not None:
        at = f'cx="{x.pixel(contest.winner.block):.1f}" cy="{y.pixel(median(contest.winner)):.1f}"'
        parts.append(f'<circle class="ring" {at} r="7"/>')
    parts += _names(ends)
    return svg(f"{contest.name}: time over block size", parts)


def roofline(lines: Sequence[Line], ceilings: Ceilings) -> str:
    """The best version of each problem by its arithmetic intensity, below what the card does at most.

    lines: those that have both a bandwidth and an arithmetic rate, at least one; others are not drawn.
    """
    points = [(line, line.tflops / line.gbs * 1e3, line.tflops) for line in lines if line.tflops and line.gbs]
    dtypes = sorted({line.dtype for line, _, _ in points})
    roofs = {dtype: ceilings.gemm_tflops[dtype] for dtype in dtypes if ceilings.gemm_tflops.get(dtype)}
    named = {dtype: f"{dtype} {rate_text(roof)}" for dtype, roof in roofs.items()}
    best = arithmetic_rate("fp32", ceilings) if "fp32" in dtypes else None
    if best is not None and best[1] == "fma":
        roofs["fp32"], named["fp32"] = best[0], f"fp32 FMA {rate_text(best[0])}"
    copy = (ceilings.copy_gbs or 0.0) / 1e3  # TFLOP/s at an intensity of one operation a byte
    ridges = [roof / copy for roof in roofs.values()] if copy else []
    x = LogAxis.over([at for _, at, _ in points] + ridges, LEFT, WIDTH - 16, pad=5)
    y = LogAxis.over([rate for _, _, rate in points] + list(roofs.values()), HEIGHT - BOTTOM, TOP, pad=1.8)
    parts = [frame(x, y, x.ticks, "operations a byte", "TFLOP/s", right=WIDTH - 16)]
    taken: list[_Box] = []
    # The slope ends at the highest roof, or at the edge of the picture, and begins where it comes into it.
    if copy:
        top = min(max(roofs.values(), default=y.high), y.high, copy * x.high)
        start = max(x.low, y.low / copy)
        if start < top / copy:
            corners = [(x.pixel(at), y.pixel(copy * at)) for at in (start, top / copy)]
            parts.append(stroke("roof", corners))
            taken += _covered(*corners)
            name = f"{rate_text(copy * 1e3)} GB/s"  # above the slope, where no point can be
            left, height = corners[1][0] - 12 - LETTER * len(name), corners[1][1] + 2
            parts.append(_beside(max(LEFT + 4, left), height, name, taken))
    for dtype, roof in roofs.items():
        start = max(x.low, roof / copy) if copy else x.low
        corners = [(x.pixel(start), y.pixel(roof)), (x.end, y.pixel(roof))]
        parts.append(stroke(f"roof c{dtypes.index(dtype)}", corners))
        taken += _covered(*corners)
        parts.append(_beside(x.end - LETTER * len(named[dtype]), y.pixel(roof) - 6, named[dtype], taken))
    for line, at, rate in points:
        across, down = x.pixel(at), y.pixel(rate)
        near = f", {percent(line.share)} of {line.ceiling}" if line.ceiling else ""
        told = f"{line.family} {line.problem} {line.dtype}: {rate_text(rate)} TFLOP/s at {rate_text(at)} a byte{near}"
        circle = f'<circle class="dot c{dtypes.index(line.dtype)}" cx="{across:.1f}" cy="{down:.1f}" r="4.5">'
        parts.append(f"{circle}<title>{html.escape(told)}</title></circle>")
        taken.append(_Box(across - 5, down - 5, 10, 10))
    labels = [
        _Named(f"{line.family} v{line.version}", f"c{dtypes.index(line.dtype)}", x.pixel(at), y.pixel(rate))
        for line, at, rate in points
    ]
    parts += _names_of_points(labels, taken)
    return svg("roofline of the run", parts)


@dataclass
class _Named:
    """A point, such as the right end of a line, and the name that belongs beside it."""

    name: str
    style: str
    across: float
    down: float


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    width: float
    height: float

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.top < other.top + other.height
            and other.top < self.top + self.height
        )


def _measured(style: str, series: Series, row: Row, x: LogAxis, y: LogAxis) -> str:
    """A point and its interval."""
    assert row.measurement is not None
    across, low, high = x.pixel(row.block), y.pixel(row.measurement["low_ms"]), y.pixel(row.measurement["high_ms"])
    told = f"{label(series)} at block size {row.block}: {milliseconds(median(row))} ms ({interval(row)})"
    bar = f"M{across - 4:.1f} {low:.1f}h8M{across:.1f} {low:.1f}V{high:.1f}M{across - 4:.1f} {high:.1f}h8"
    dot = f'<circle class="dot" cx="{across:.1f}" cy="{y.pixel(median(row)):.1f}" r="2.6"/>'
    return f'<g class="{style}"><title>{html.escape(told)}</title><path class="interval" d="{bar}"/>{dot}</g>'


def _names(ends: list[_Named]) -> list[str]:
    """The names of lines beside their ends, moved up and down until none stands on another."""
    ends = sorted(ends, key=lambda end: end.down)
    line = min(LINE, (HEIGHT - TOP - BOTTOM) / max(1, len(ends)))
    places: list[float] = []
    for end in ends:
        places.append(max(end.down, places[-1] + line if places else TOP))
    lowest: float = HEIGHT - BOTTOM
    for index in reversed(range(len(places))):
        places[index] = min(places[index], lowest)
        lowest = places[index] - line
    at = WIDTH - RIGHT + 8
    parts = []
    for end, down in zip(ends, places, strict=True):
        # A thin line leads to a name that does not stand beside its point.
        parts.append(f'<path class="leader" d="M{end.across + 5:.1f} {end.down:.1f}L{at - 3} {down:.1f}"/>')
        parts.append(f'<text class="name {end.style}" x="{at}" y="{down + 4:.1f}">{html.escape(end.name)}</text>')
    return parts


def _beside(left: float, bottom: float, name: str, taken: list[_Box], style: str = "") -> str:
    """A name at a place, which is remembered as taken."""
    taken.append(_Box(left, bottom - NAME_RISE, LETTER * len(name), NAME_HEIGHT))
    return f'<text class="own {style}" x="{left:.1f}" y="{bottom:.1f}">{html.escape(name)}</text>'


def _names_of_points(points: list[_Named], taken: list[_Box]) -> list[str]:
    """Names about their points, as few as can be standing on something else."""
    # Whoever comes first has the best place, so that several orders are tried.
    orders = [sorted(points, key=lambda point: (a * point.across, b * point.down)) for a in (1, -1) for b in (1, -1)]
    orders += [sorted(points, key=lambda point: sign * point.down) for sign in (1, -1)]
    tried = []
    for order in orders:
        boxes, names, total = [*taken], [], 0
        for point in order:
            left, bottom, cost = _place(point, boxes)
            if abs(bottom - point.down) > FAR:
                middle, edge = left + LETTER * len(point.name) / 2, bottom - (NAME_RISE if bottom > point.down else -2)
                names.append(f'<path class="leader" d="M{point.across:.1f} {point.down:.1f}L{middle:.1f} {edge:.1f}"/>')
            names.append(_beside(left, bottom, point.name, boxes, point.style))
            total += cost
        tried.append((total, names))
    return min(tried, key=lambda one: one[0])[1]


def _place(point: _Named, taken: list[_Box]) -> tuple[float, float, int]:
    """Where a name goes, and how bad it is: near its point is better than far, and anything than on other things."""
    width = LETTER * len(point.name)
    offsets = [(9, 4), (-9 - width, 4), (-width / 2, 18), (-width / 2, -10), (9, 18), (-9 - width, 18), (9, -10)]
    offsets += [(-width / 2, away) for away in (32, 46, -24, -38)]
    places = [(point.across + dx, point.down + dy) for dx, dy in offsets]
    inside = [(left, bottom) for left, bottom in places if left >= LEFT + 2 and left + width <= WIDTH - 4] or places

    def cost(index: int) -> int:
        left, bottom = inside[index]
        own = _Box(left, bottom - NAME_RISE, width, NAME_HEIGHT)
        return index + len(offsets) * sum(own.meets(box) for box in taken)

    best = min(range(len(inside)), key=cost)
    return *inside[best], cost(best)


def _covered(start: tuple[float, float], end: tuple[float, float]) -> list[_Box]:
    """Small boxes along a line, for names to keep off it."""
    steps = 40
    places = [[a + (b - a) * step / steps for a, b in zip(start, end, strict=True)] for step in range(steps + 1)]
    return [_Box(across - 2, down - 2, 4, 4) for across, down in places]


def _style(index: int) -> str:
    return f"c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


def _spaced(values: Sequence[int], axis: LogAxis) -> list[float]:
    """Those values whose numbers have room; powers of two come first, because block sizes mostly are."""
    shown: list[float] = []
    for value in sorted(values, key=lambda value: (value.bit_count() > 1, value)):
        if all(abs(axis.pixel(value) - axis.pixel(other)) >= TICK_ROOM for other in shown):
            shown.append(value)
    return shown


def stroke(style: str, points: Sequence[tuple[float, float]]) -> str:
    """A line through points, in pixels."""
    return f'<path class="line {style}" d="M{"L".join(f"{across:.1f} {down:.1f}" for across, down in points)}"/>'


def frame(
    x: Axis | LogAxis,
    y: Axis | LogAxis,
    x_ticks: Sequence[float],
    x_name: str,
    y_name: str,
    right: float = WIDTH - RIGHT,
    x_names: Sequence[str] | None = None,
) -> str:
    """The axes with their ticks. x_names: what stands at the ticks in place of their numbers."""
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in y.ticks:
        at = y.pixel(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick, y)}</text>')
    for tick, name in zip(x_ticks, x_names or [f"{tick:g}" for tick in x_ticks], strict=True):
        at = x.pixel(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{name}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2:g}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>')
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 13 {middle:g})"'
    parts.append(f'<text x="13" y="{middle:g}" text-anchor="middle" {turned}>{y_name}</text>')
    return "\n".join(parts)


def _number(tick: float, axis: Axis | LogAxis) -> str:
    """Of evenly spaced ticks all with as many decimals: 0.070 beside 0.075."""
    return f"{tick:.{axis.decimals}f}" if isinstance(axis, Axis) else f"{tick:g}"


def svg(title: str, parts: Sequence[str]) -> str:
    """The picture: one SVG element. title: plain text, for those who hear it."""
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])
