"""What a report compares beside times, and where a row has it. A new metric is one line of `COUNTS`.

Names that stand in `Row.metrics` and not here are compared too, with no unit, more being worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kbench.report.model import TIME as TIME
from kbench.report.model import Metric
from kbench.results.facts import Card, resident_of
from kbench.results.schema import Row

Kernel = Mapping[str, Any]
"""A kernel of `Row.kernels`."""
Values = Mapping[tuple[str, str], float]
"""Counts by kernel and metric; the kernel is "" for those of the whole row."""


@dataclass(frozen=True)
class Count:
    """A count that is exact for its compiler. of: reads it from a kernel of a row, None where it is not known; without
    it the count stands in `Row.metrics` only."""

    metric: Metric
    of: Callable[[Kernel, Card], float | None] | None = None


def _count(
    name: str, unit: str = "", worse: int = 1, of: Callable[[Kernel, Card], float | None] | None = None
) -> Count:
    return Count(Metric(name, unit, worse, exact=True), of)


def _warps(kernel: Kernel, card: Card) -> float | None:
    resident = resident_of(kernel, card)
    return None if resident is None else resident.warps


COUNTS = {
    count.metric.name: count
    for count in (
        _count("registers", of=lambda kernel, card: kernel.get("registers")),
        _count("spill_bytes", "bytes", of=lambda kernel, card: kernel.get("spill_bytes")),
        _count("stack_bytes", "bytes", of=lambda kernel, card: kernel.get("local_bytes")),
        _count("static_shared", "bytes", of=lambda kernel, card: kernel.get("static_shared")),
        _count("dynamic_shared", "bytes", of=lambda kernel, card: kernel.get("shared")),
        _count("occupancy", "warps", -1, of=_warps),
        _count("instructions"),
        _count("global_bytes", "bytes"),
        _count("global_sectors"),
        _count("shared_wavefronts"),
        _count("barriers"),
        _count("atomics"),
    )
}


def metric_of(name: str) -> Metric:
    """The metric of a name, also of one that only `Row.metrics` has."""
    if name == TIME.name:
        return TIME
    known = COUNTS.get(name)
    return known.metric if known is not None else Metric(name, "", exact=True)


class Reader:
    """Reads the counts of rows of one device. Rows of one plan have equal kernels: what was read once is kept."""

    def __init__(self, card: Card):
        self._card = card
        self._known: dict[object, Values] = {}

    def read(self, row: Row) -> Values:
        """The counts of a row. What stands in `Row.metrics` goes before what its kernels say."""
        # Of a file that somebody edited, kernels may be anything: then there are no counts.
        try:
            key = (*map(_key, row.kernels), str(row.metrics) if row.metrics else "")
            if key not in self._known:
                self._known[key] = self._read(row)
            return self._known[key]
        except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError):
            return {}

    def _read(self, row: Row) -> Values:
        found: dict[tuple[str, str], float] = {}
        for kernel in row.kernels:
            # Without registers no compiler for a GPU has seen it: on the emulator the rest means nothing.
            if kernel.get("registers") is None:
                continue
            for name, count in COUNTS.items():
                value = count.of(kernel, self._card) if count.of is not None else None
                if value is not None:
                    place = (str(kernel["name"]), name)
                    # A kernel may be launched several times, with other blocks: the worst counts.
                    found[place] = _worse(count.metric, found[place], value) if place in found else value
        for name, counts in row.metrics.items():
            found |= {(name, metric): value for metric, value in counts.items()}
        return found


def _key(kernel: Kernel) -> object:
    return (
        kernel["name"], tuple(kernel.get("block") or ()), kernel.get("shared"), kernel.get("registers"),
        kernel.get("static_shared"), kernel.get("local_bytes"), kernel.get("spill_bytes"), kernel.get("max_threads"),
    )  # fmt: skip


def _worse(metric: Metric, one: float, other: float) -> float:
    return max(one, other) if metric.worse > 0 else min(one, other)
