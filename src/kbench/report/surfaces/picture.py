"""A small picture of one row: the samples of both sides round by round, the estimates, and where the interval lies."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kbench.axis import Axis
from kbench.report.model import Change
from kbench.report.surfaces import words

WIDTH = 440  # narrow, so that its letters stay readable when a telephone shrinks it
LEFT, RIGHT, TOP, BOTTOM = 54, 26, 14, 24
LANE, BAND = 6.0, 42.0  # pixels of one round, and the most that all rounds of a side get
GAP = 14  # between the sides; the bar of the interval lies in it
LETTER = 7.0  # pixels that a letter takes, about
DOTS = 600  # of one side: more cannot be told apart, and a page holds many pictures
# The share of a side's samples at each end that may lie outside: one disturbed sample would squeeze all others.
TAIL = 0.02

EXPLAINED = (
    "each dot is a sample and each row of dots a round; the upright lines are the estimates. The bar between the sides "
    "is the interval in which the change lies, and the dashed line the limit that it is held against."
)
STYLE = """
.dots { stroke: var(--own); stroke-width: 3.4; stroke-linecap: round; stroke-opacity: .5 }
.estimate { stroke: var(--own); stroke-width: 2 } .reach { stroke: var(--ink); stroke-width: 2.4 }
.limit { stroke: var(--faint); stroke-dasharray: 3 3; stroke-width: 1.4 }
"""
# The colours of the style sheet: before is blue; after is red where it is worse, green where it is better.
_BEFORE, _AFTER = "c0", {"slower": "c1", "wrong": "c1", "over budget": "c1", "faster": "c2"}
_OTHERWISE = "c3"


def picture(change: Change) -> str:
    """The picture as SVG with a caption; "" where there are not two samples of a side to draw."""
    sides = [_side(change.rounds_before), _side(change.rounds_after)]
    if any(sum(map(len, rounds)) < 2 for rounds in sides):
        return ""
    marks = _marks(change)
    axis = Axis.over(
        [*(value for rounds in sides for value in _inner(rounds)), *marks.values()], LEFT + 4, WIDTH - RIGHT - 4
    )
    heights = [min(BAND, LANE * len(rounds)) for rounds in sides]
    tops = [TOP, TOP + heights[0] + GAP]
    bottom = tops[1] + heights[1] + 6
    parts = [_frame(axis, bottom, words.plain(change.metric.unit, 4))]
    if "limit" in marks:
        parts.append(f'<path class="limit" d="M{axis.pixel(marks["limit"]):.1f} {TOP - 4}V{bottom:.1f}"/>')
    beyond = step = 0
    colours = (_BEFORE, _AFTER.get(change.verdict, _OTHERWISE))
    for name, rounds, top, height, colour in zip(("before", "after"), sides, tops, heights, colours, strict=True):
        band = _Band(axis, top, height, colour)
        parts.append(f'<text x="{LEFT - 6}" y="{top + height / 2 + 4:.1f}" text-anchor="end">{name}</text>')
        dots, outside, every = band.dots(rounds)
        beyond, step = beyond + outside, max(step, every)
        parts.append(dots)
        if name in marks:
            parts.append(band.estimate(marks[name]))
    if "low" in marks and "high" in marks:
        parts.append(_bar(axis, marks["low"], marks["high"], tops[1] - GAP / 2))
    told = html.escape(f"{words.title(change)}: {words.told(change)}")
    svg = f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}" role="img" aria-label="{told}">'
    notes = [f"{words.counted(beyond, 'sample')} beyond the edges" if beyond else ""]
    notes.append(f"one sample of {step} drawn" if step > 1 else "")
    caption = "; ".join(note for note in notes if note)
    return "\n".join([svg, *parts, "</svg>"]) + (f'<p class="faint">{caption}</p>' if caption else "")


def _side(rounds: Sequence[Sequence[float]]) -> list[list[float]]:
    """Its rounds that have samples, without what is no time: a damaged record is no reason to lose the page."""
    kept = [[float(value) for value in samples if math.isfinite(value) and value > 0] for samples in rounds]
    return [samples for samples in kept if samples]


def _inner(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Between what the samples lie, but for the tails."""
    values = sorted(value for samples in rounds for value in samples)
    cut = math.ceil(TAIL * len(values)) if len(values) >= 10 else 0
    return values[cut], values[-1 - cut]


def _marks(change: Change) -> dict[str, float]:
    """The estimates, the ends of the interval and the limit, in the metric's unit; those that are known."""
    marks = {"before": change.before, "after": change.after}
    if change.before is not None:
        marks["low"] = change.before * change.low if change.low is not None else None
        marks["high"] = change.before * change.high if change.high is not None else None
        if change.threshold > 0:
            # The limit lies on the side to which the row moved; both would halve the room for the samples.
            up = change.after is None or change.after >= change.before
            marks["limit"] = change.before * (1 + change.threshold) ** (1 if up else -1)
    return {name: value for name, value in marks.items() if value is not None and math.isfinite(value) and value > 0}


@dataclass(frozen=True)
class _Band:
    """The place of one side, its rounds below each other."""

    axis: Axis
    top: float
    height: float
    colour: str

    def dots(self, rounds: Sequence[Sequence[float]]) -> tuple[str, int, int]:
        """The dots, how many lie outside the axis, and of how many samples one is drawn."""
        step = math.ceil(sum(map(len, rounds)) / DOTS)
        lane = self.height / len(rounds)
        drawn = []
        beyond = 0
        for index, samples in enumerate(rounds):
            down = self.top + lane * (index + 0.5)
            for value in samples[::step]:
                beyond += not self.axis.low <= value <= self.axis.high
                drawn.append(f"M{self.axis.pixel(min(max(value, self.axis.low), self.axis.high)):.1f} {down:.1f}h0")
        return f'<path class="dots {self.colour}" d="{"".join(drawn)}"/>', beyond, step

    def estimate(self, value: float) -> str:
        line = f"M{self.axis.pixel(value):.1f} {self.top - 4:.1f}v{self.height + 8:.1f}"
        return f'<path class="estimate {self.colour}" d="{line}"/>'


def _bar(axis: Axis, low: float, high: float, down: float) -> str:
    left, right = axis.pixel(low), axis.pixel(high)
    bar = f"M{left:.1f} {down - 3:.1f}v6m0 -3H{right:.1f}m0 -3v6"
    return f'<path class="reach" d="{bar}"/>'


def _frame(axis: Axis, bottom: float, unit: str) -> str:
    """The line below with its numbers, and the unit before them."""
    names = [f"{tick:.{axis.decimals}f}" for tick in axis.ticks]
    room = (axis.end - axis.start) / max(1, len(names) - 1)
    every = max(1, math.ceil(LETTER * (max(map(len, names)) + 1) / room))
    parts = [f'<path class="axis" d="M{LEFT} {bottom:.1f}H{WIDTH - RIGHT}"/>']
    for tick, name in list(zip(axis.ticks, names, strict=True))[::every]:
        at = axis.pixel(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP - 4}V{bottom:.1f}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="0" y="{bottom + 16:.1f}">{html.escape(unit)}</text>')
    return "\n".join(parts)
