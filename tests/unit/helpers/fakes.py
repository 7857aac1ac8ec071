"""Rows made by hand, and a bench that hands them out: the command line without a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kbench.errors import KbenchError
from kbench.jobs import Job
from kbench.results.schema import Row
from kbench.selection import Selection


def make_row(version: int = 1, **changes: Any) -> Row:
    """A row that passed on a GPU without a measurement, with `changes`; `median_ms` gives it one."""
    median_ms = changes.pop("median_ms", None)
    used = changes.pop("used", 0.12)
    fields: dict[str, Any] = {
        "family": "toy",
        "version": version,
        "idea": f"idea number {version}",
        "sizes": {"N": 64},
        "dtype": "fp32",
        "block": 256,
        "device": "Test GPU",
        "status": "pass",
        "seed": 7,
        "reproduce": f"kbench run toy --version {version}",
        "verdict": {
            "outputs": [{"name": "out", "compared": 4096, "wrong": 0, "used": used}],
            "deterministic": True,
            "judge": "numpy",
            "launches": 2,
        },
    }
    if median_ms is not None:
        fields["measurement"] = measured(median_ms)
    return Row(**{**fields, **changes})


def failed(version: int = 1, status: str = "fail", reason: str = "out: 3 of 4096 elements wrong", **more: Any) -> Row:
    """A row that did not pass."""
    return make_row(version, status=status, reason=reason, verdict=None, **more)


def measured(median_ms: float, half_width: float = 0.01) -> dict[str, Any]:
    """A measurement with an interval of +-1% around its median, or another share."""
    low, high = median_ms * (1 - half_width), median_ms * (1 + half_width)
    return {
        "median_ms": median_ms,
        "low_ms": low,
        "high_ms": high,
        "q1_ms": low,
        "q3_ms": high,
        "samples_ms": [low, median_ms, high],
        "warmups": 2,
        "overhead_ms": 0.001,
        "note": "",
    }


class FakeBench:
    """Stands in for kbench.sweep.Bench: hands out `script`, rows or errors, one for each job.

    asked: the last selection given to `jobs`, as a dict. before_row: called with the position of each row.
    fallback: why there is no GPU, as of a bench that took the emulator instead.
    """

    script: Iterable[Row | BaseException] = ()
    kind = "cuda"
    fallback = ""
    jobs_error: KbenchError | None = None
    card: dict[str, Any] | None = None  # its ceilings
    asked: ClassVar[dict[str, Any]] = {}
    asked_mode: ClassVar[str] = ""
    before_row: Callable[[int], None] = staticmethod(lambda position: None)

    def __init__(self, options: Any, note: Callable[[str], None]):
        self.options, self.note, self.seed = options, note, 7
        type(self).took = options
        self.device_kind = self.kind
        name = "Test GPU" if self.kind == "cuda" else "emulator"
        self.device = {
            "kind": self.kind, "name": name, "arch": "sm_90", "driver": "580.1", "compiler": "NVRTC 13.0"
        }  # fmt: skip

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(self, *error: object) -> None:
        type(self).closed_with = error[0]

    closed_with: Any = None
    ran: ClassVar[list[Job]] = []  # the jobs of the last command
    took: Any = None  # its options

    def ceilings(self) -> dict[str, Any] | None:
        return self.card

    def timer(self) -> dict[str, Any] | None:
        return None

    def jobs(self, selection: Selection) -> list[Job]:
        type(self).asked = vars(selection)
        type(self).asked_mode = self.options.mode
        if self.jobs_error is not None:
            raise self.jobs_error
        # An error stands where a row of the version before it would have been.
        jobs: list[Job] = []
        for row in self.script:
            if isinstance(row, Row):
                more = {"params": row.params, "source": row.source}
                jobs.append(Job(row.family, row.version, row.idea, row.sizes, row.dtype, row.block, **more))
            else:
                jobs.append(replace(jobs[-1]) if jobs else Job("toy", 1, "", {"N": 64}, "fp32", 256))
        self.scripted = {id(job): row for job, row in zip(jobs, self.script, strict=True)}
        return jobs

    def rows(self, jobs: list[Job], earlier: Sequence[Row] = (), again: bool = False) -> Iterator[Row]:
        type(self).ran = jobs
        for position, job in enumerate(jobs):
            row = self.scripted[id(job)]
            self.before_row(position)
            if isinstance(row, BaseException):
                raise row
            yield row
