"""JSON of Google's benchmark library, of Bencher and of github-action-benchmark.

Google's: a context and a list of benchmarks, of which each repetition is an entry of its own; its compare.py takes the
repetitions for its test. Bencher's metric format: by benchmark, by measure, a value with its limits; the measure
`latency` is in nanoseconds. github-action-benchmark's customSmallerIsBetter: a list of names, units and values.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from kbench.results.formats.subject import counted, timed
from kbench.results.store import Run
from kbench.results.strict_json import dumps

_NS = 1e6  # nanoseconds of a millisecond
_DIGITS = 6  # significant ones: a timer tells no more
# Counts of which more is better: a program that takes smaller for better would raise its alarm over a success.
_MORE_IS_BETTER = ("occupancy", "blocks_per_multiprocessor", "efficiency")


def google_benchmark(run: Run) -> str:
    """As --benchmark_format=json writes it, with every sample as a repetition, and the usual aggregates. There is no
    time of a CPU: `cpu_time` repeats `real_time`, because its tools need both."""
    benchmarks: list[dict[str, Any]] = []
    for index, subject in enumerate(timed(run)):
        samples = subject.samples
        common = {
            "family_index": index,
            "per_family_instance_index": 0,
            "run_name": subject.name,
            "repetitions": len(samples),
            "threads": 1,
        }
        for repetition, sample in enumerate(samples):
            benchmarks.append(
                {
                    "name": subject.name,
                    **common,
                    "run_type": "iteration",
                    "repetition_index": repetition,
                    "iterations": subject.per_sample,
                    **_times(sample),
                    "label": subject.row.idea,
                }
            )
        for name, value, unit in _aggregates(samples):
            aggregate = {"run_type": "aggregate", "aggregate_name": name, "aggregate_unit": unit}
            benchmarks.append(
                {"name": f"{subject.name}_{name}", **common, **aggregate, "iterations": len(samples), **_times(value)}
            )
    return _text({"context": _context(run), "benchmarks": benchmarks})


def bencher(run: Run) -> str:
    """Bencher Metric Format, for its adapter `json`: `latency` in nanoseconds with the interval of the median, and the
    counts of a static run as measures of their own."""
    found: dict[str, dict[str, Any]] = {}
    for subject in timed(run):
        ends = {"value": subject.median, "lower_value": subject.low, "upper_value": subject.high}
        found[subject.name] = {"latency": {name: _rounded(ms * _NS) for name, ms in ends.items()}}
    for name, metric, value in counted(run):
        found.setdefault(name, {})[metric.replace("_", "-")] = {"value": value}
    return _text(found)


def github_action_benchmark(run: Run) -> str:
    """For github-action-benchmark's tool `customSmallerIsBetter`: medians in milliseconds, and those counts of a static
    run of which less is better."""
    found: list[dict[str, Any]] = []
    for subject in timed(run):
        reach = max(subject.high - subject.median, subject.median - subject.low) / subject.median
        extra = [subject.row.idea, f"on {subject.row.device}", f"interval {subject.low:g}..{subject.high:g} ms"]
        found.append(
            {
                "name": subject.name,
                "unit": "ms",
                "value": subject.median,
                "range": f"± {reach:.2%}",
                "extra": "\n".join([*extra, subject.row.reproduce]),
            }
        )
    for name, metric, value in counted(run):
        if metric not in _MORE_IS_BETTER:
            found.append({"name": f"{name} {metric}", "unit": metric, "value": value})
    return _text(found)


def _context(run: Run) -> dict[str, Any]:
    """What its tools expect of a machine, as far as it is known; the GPU stands in fields of our own."""
    device = run.header.get("device")
    device = device if isinstance(device, dict) else {}
    known = {
        name: str(device[key])
        for name, key in (("gpu", "name"), ("driver", "driver"), ("compiler", "compiler"))
        if device.get(key)
    }
    return {
        "date": str(run.header.get("started", "")),
        "host_name": "",
        "executable": "kbench",
        "num_cpus": 0,
        "mhz_per_cpu": 0,
        "cpu_scaling_enabled": False,
        "caches": [],
        "load_avg": [],
        "library_build_type": "release",
        "json_schema_version": 1,
        "kbench_version": str(run.header.get("kbench", "")),
        "run": run.id,
        **known,
    }


def _times(ms: float) -> dict[str, Any]:
    return {"real_time": ms, "cpu_time": ms, "time_unit": "ms"}


def _aggregates(samples: list[float]) -> list[tuple[str, float, str]]:
    """Those that the library has of several repetitions: none of a single one."""
    if len(samples) < 2:
        return []
    mean, deviation = statistics.fmean(samples), statistics.stdev(samples)
    return [
        ("mean", mean, "time"),
        ("median", statistics.median(samples), "time"),
        ("stddev", deviation, "time"),
        ("cv", deviation / mean, "percentage"),
    ]


def _rounded(value: float) -> float:
    return round(value, max(0, _DIGITS - 1 - math.floor(math.log10(value)))) if value > 0 else value


def _text(document: Any) -> str:
    return dumps(document, indent=1) + "\n"
