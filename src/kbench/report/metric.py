"""What a report compares, and which way is better. A new metric is one line of `METRICS`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """exact: a count, the same every time for the same compiler; else measured, with noise."""

    name: str
    unit: str
    higher_is_better: bool = False
    exact: bool = False


TIME = Metric("time", "ms")
BANDWIDTH = Metric("bandwidth", "GB/s", higher_is_better=True)

METRICS = {
    metric.name: metric
    for metric in (
        TIME,
        BANDWIDTH,
        Metric("registers", "registers", exact=True),
        Metric("spills", "bytes", exact=True),
        Metric("stack", "bytes", exact=True),
        Metric("shared", "bytes", exact=True),
        Metric("occupancy", "warps", higher_is_better=True, exact=True),
        Metric("instructions", "instructions", exact=True),
    )
}
