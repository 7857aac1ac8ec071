"""Why the winner of a contest is faster than the next best version: one sentence, of facts that the rows hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kbench.results.best import contest, median, ties
from kbench.results.columns import bytes_text
from kbench.results.facts import Card, Facts, facts_of
from kbench.results.schema import Row
from kbench.results.tables import milliseconds, percent

# Differences below these explain no difference in time worth a sentence.
LEAST_BYTES = 0.05  # of the other's: what a kernel touches beside its main tensors comes and goes with less
LEAST_OCCUPANCY = 0.1  # of the warps that fit: one block of many more or less
LEAST_REGISTERS = 8  # of a thread: they are handed out in lots of 256 a warp, which is 8 a thread
LEAST_WAVES = 0.1  # of the time of whole waves that blocks are idle in
LEAST_SHARED = 1024  # bytes of a block: what fewer hold are sums, not data that would be read again
REASONS = 3  # in one sentence: those further down explain less


@dataclass(frozen=True)
class Why:
    """The winner beside the fastest row of any other version. low, high: of the ratio of their times, from the
    intervals of both medians. reasons: what the winner has in its favour, the weightiest first. shares: of the card's
    ceiling, both of them; "" where it is not known."""

    winner: Row
    other: Row
    ratio: float
    low: float
    high: float
    tied: bool
    reasons: tuple[str, ...]
    shares: str = ""

    def __str__(self) -> str:
        """One sentence."""
        factor = f"{_factor(self.ratio)} ({_factor(self.low)}..{_factor(self.high)})"
        best = f"{milliseconds(median(self.other))} ms at block size {self.other.place}"
        than = f"version {self.other.version} (its best: {best})"
        if self.tied:
            text = f"version {self.winner.version} is within noise of {than}: {factor} as fast"
            return f"{text}; they differ in: {', '.join(self.reasons)}" if self.reasons else text
        near = f", {self.shares}" if self.shares else ""
        head = f"version {self.winner.version} is {factor} as fast as {than}{near}"
        idea = f'; its idea: "{self.winner.idea}"' if self.winner.idea else ""
        if not self.reasons:
            return f"{head}: nothing that is recorded explains it{idea}"
        return f"{head}: {', '.join(self.reasons)}{idea}"


def why(winner: Row, rows: Iterable[Row], card: Card) -> Why | None:
    """What tells the winner from the next best version; None where no other version was proven and timed."""
    others = [row for row in rows if row.may_win and row.version != winner.version and contest(row) == contest(winner)]
    other = min(others, key=median, default=None)
    if other is None or not winner.measurement or not other.measurement:
        return None
    mine, its = winner.measurement, other.measurement
    if not mine["low_ms"] > 0:
        return None
    facts, others_facts = facts_of(winner, card), facts_of(other, card)
    found = tuple(reasons(winner, facts, other, others_facts))
    return Why(
        winner, other, its["median_ms"] / mine["median_ms"], its["low_ms"] / mine["high_ms"],
        its["high_ms"] / mine["low_ms"], ties(other, winner), found[:REASONS], _shares(facts, others_facts),
    )  # fmt: skip


def reasons(winner: Row, mine: Facts, other: Row, its: Facts) -> Iterator[str]:
    """What speaks for the winner, the weightiest first. A difference that speaks against it explains nothing."""
    yield from _steps(winner, mine, other, its)
    if mine.touched and its.touched and mine.touched < its.touched * (1 - LEAST_BYTES):
        yield f"its steps take {bytes_text(mine.touched)} of tensors in place of {bytes_text(its.touched)}"
    if mine.library or its.library:
        return  # what is known of a kernel is not known of a library's
    for name, what in (("spill_bytes", "of spilled registers"), ("local_bytes", "of local memory")):
        few, many = getattr(mine, name), getattr(its, name)
        if few is not None and many is not None and few < many:
            yield f"{few or 'no'} bytes {what} a thread in place of {many}"
            break  # spills are local memory
    if mine.occupancy and its.occupancy and mine.occupancy >= its.occupancy + LEAST_OCCUPANCY:
        limit = f", limited by {its.limiter}" if its.limiter else ""
        yield f"occupancy {percent(mine.occupancy)} in place of {percent(its.occupancy)}{limit}"
    elif mine.registers and its.registers and mine.registers <= its.registers - LEAST_REGISTERS:
        yield f"{mine.registers} registers a thread in place of {its.registers}"
    more, less = _shared(mine), _shared(its)
    if more >= 2 * less + LEAST_SHARED:
        yield f"{bytes_text(more)} of shared memory a block in place of {bytes_text(less) if less else 'none'}"
    idle, others_idle = _idle(mine), _idle(its)
    if idle is not None and others_idle is not None and idle <= others_idle - LEAST_WAVES:
        yield f"blocks idle in {percent(idle)} of the waves in place of {percent(others_idle)}"


def _steps(winner: Row, mine: Facts, other: Row, its: Facts) -> Iterator[str]:
    if mine.library and not its.library:
        yield f"{_library(winner)} in place of kernels of its own"
    elif its.library and not mine.library:
        yield f"kernels of its own in place of {_library(other)}"
    if mine.launches and its.launches and mine.launches < its.launches:
        yield f"{mine.launches} {'step' if mine.launches == 1 else 'steps'} in place of {its.launches}"


def _library(row: Row) -> str:
    if row.steps.get("Gemm"):
        return "a library's GEMM"
    return "a library's all-reduce" if row.steps.get("AllReduce") else "a library's attention"


def _shared(facts: Facts) -> int:
    return (facts.static_shared or 0) + (facts.dynamic_shared or 0)


def _shares(mine: Facts, its: Facts) -> str:
    if mine.share is None or its.share is None or mine.ceiling is None or mine.ceiling != its.ceiling:
        return ""
    return f"{percent(mine.share)} of the {mine.ceiling} ceiling in place of {percent(its.share)}"


def _idle(facts: Facts) -> float | None:
    """The share of the whole waves in which the last one leaves room: 0.5 waves of 1, 2.5 of 3."""
    if facts.waves is None or facts.tail is None:
        return None
    whole = facts.waves - facts.tail + 1
    return (1 - facts.tail) / whole


def _factor(factor: float) -> str:
    return f"{factor:.2f}x" if factor < 10 else f"{factor:.1f}x" if factor < 100 else f"{factor:,.0f}x"


def tied_rows(winner: Row, rows: Sequence[Row]) -> str:
    """The rows that are not told apart from the winner, such as "version 4 at 128, 256; version 6 at 64"."""
    found: dict[int, list[str]] = {}
    for row in rows:
        if ties(row, winner):
            found.setdefault(row.version, []).append(row.place)
    return "; ".join(f"version {version} at {', '.join(places)}" for version, places in found.items())
