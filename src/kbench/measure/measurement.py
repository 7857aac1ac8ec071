"""The result of timing one plan: raw samples, their statistics, and how they were taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kbench.measure.statistics import confidence_interval, median, quartiles, valid_samples

# Digits of a millisecond that are kept: 1 ns, far below the resolution of an event.
_DIGITS = 6
# Raw samples that a record keeps: enough to resample a winner, few enough that a sweep's file stays readable.
MAX_KEPT = 64


@dataclass(frozen=True)
class Measurement:
    """Times of one plan in milliseconds, all steps of the plan in each sample.

    low_ms, high_ms: interval of the median, which covers it with `confidence`. q1_ms, q3_ms: quartiles.
    overhead_ms: what two events with nothing between them show on this device; it is not subtracted.
    warmups: launches before the first sample. mode: see `kbench.measure.timer`. count: how many samples were taken, of
    which `samples_ms` keeps at most 64. runs: of the plan in each sample, whose time is divided by it.
    stopped: why sampling ended. note: what a reader must know beside the number; "" if nothing.
    conditions: clocks, temperature, power and throttling (`kbench.measure.clocks.conditions`).
    second: what a second timer says (`kbench.measure.replay.Second`); None where none was asked.
    """

    samples_ms: tuple[float, ...]
    median_ms: float
    low_ms: float
    high_ms: float
    confidence: float
    q1_ms: float
    q3_ms: float
    warmups: int
    overhead_ms: float
    mode: str
    stopped: str
    note: str = ""
    count: int = 0
    runs: int = 1
    conditions: dict[str, Any] = field(default_factory=dict)
    second: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `Row.measurement` holds it; every number is finite."""
        return {**asdict(self), "samples_ms": list(self.samples_ms)}


def summarise(
    samples: Sequence[float],
    *,
    confidence: float,
    warmups: int,
    overhead_ms: float,
    mode: str,
    stopped: str,
    notes: Sequence[str] = (),
    runs: int = 1,
    conditions: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
) -> Measurement:
    """Statistics of the valid ones among `samples`. Raises ValueError if none is valid."""
    valid = valid_samples(samples)
    interval = confidence_interval(valid, confidence)
    first, third = quartiles(valid)
    return Measurement(
        samples_ms=tuple(round(sample, _DIGITS) for sample in kept(valid)),
        median_ms=round(median(valid), _DIGITS),
        low_ms=round(interval.low, _DIGITS),
        high_ms=round(interval.high, _DIGITS),
        confidence=round(interval.confidence, _DIGITS),
        q1_ms=round(first, _DIGITS),
        q3_ms=round(third, _DIGITS),
        warmups=warmups,
        overhead_ms=round(overhead_ms, _DIGITS),
        mode=mode,
        stopped=stopped,
        note="; ".join(note for note in notes if note),
        count=len(valid),
        runs=runs,
        conditions=conditions or {},
        second=second,
    )


def kept(samples: Sequence[float]) -> list[float]:
    """The samples that a record keeps: all, or as many as fit, evenly spread over the time that they took."""
    if len(samples) <= MAX_KEPT:
        return list(samples)
    return [samples[i * len(samples) // MAX_KEPT] for i in range(MAX_KEPT)]
