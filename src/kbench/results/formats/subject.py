"""What the formats share: the rows that have a number to show, and what to call them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kbench.results.merge import parts
from kbench.results.rounds import merged
from kbench.results.schema import Row
from kbench.results.store import Run


@dataclass(frozen=True)
class Timed:
    """A row that was proven and timed, all its rounds together, with the name that it goes by in other programs."""

    name: str
    row: Row
    run: Run

    @property
    def median(self) -> float:
        """Milliseconds, as all below."""
        return float(self._taken["median_ms"])

    @property
    def low(self) -> float:
        return float(self._taken["low_ms"])

    @property
    def high(self) -> float:
        return float(self._taken["high_ms"])

    @property
    def samples(self) -> list[float]:
        return [float(sample) for sample in self._taken.get("samples_ms", ())] or [self.median]

    @property
    def per_sample(self) -> int:
        """Runs of the plan in one sample."""
        return int(self._taken.get("runs") or 1)

    @property
    def _taken(self) -> dict[str, Any]:
        assert self.row.measurement is not None
        return self.row.measurement


def timed(run: Run) -> list[Timed]:
    """The rows that were proven by the family's own bound and timed. Of one experiment in several runs, as a merged
    file may hold it, the last."""
    found: dict[str, Timed] = {}
    several = len({row.device for row in run.rows}) > 1
    for part in parts(run):
        for row in merged(part.rows):
            if row.may_win:
                name = name_of(row, several)
                found[name] = Timed(name, row, part)
    return list(found.values())


def counted(run: Run) -> Iterator[tuple[str, str, float]]:
    """Exact counts of rows: name with the kernel, metric, value."""
    several = len({row.device for row in run.rows}) > 1
    for part in parts(run):
        for row in merged(part.rows):
            if row.status == "pass":
                for kernel, counts in row.metrics.items():
                    for metric, value in counts.items():
                        yield f"{name_of(row, several)}/{kernel}", metric, value


def name_of(row: Row, with_device: bool = False) -> str:
    """Such as "layernorm_forward/6/B:8/T:1024/C:768/bf16/block:256": the parts as Google's benchmark has them, and the
    same from run to run."""
    words = [row.family, str(row.version), *(f"{name}:{size}" for name, size in row.sizes.items()), row.dtype]
    words += [f"block:{row.block}", *(f"{name}:{value}" for name, value in sorted(row.params.items()))]
    words += [row.cache_mode] if row.cache_mode != "cold" else []
    return "/".join([*words, *([row.device] if with_device else [])])


def left_out(run: Run, shown: Sequence[Timed]) -> int:
    """How many experiments of a run have no time to show."""
    return sum(len(merged(part.rows)) for part in parts(run)) - len(shown)
