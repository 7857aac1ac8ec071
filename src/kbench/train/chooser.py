"""Which versions a training step runs: an answer to every need of its slots, from data.

`best` takes what is fastest in best.json, `naive` the lowest numbers, and FAMILY=N fixes a family's version. Where
there are no times, as on the emulator, the highest number stands for the fastest: ladders are in rising order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbench.catalog import Catalog
from kbench.errors import UsageError
from kbench.family import Family, Problem, Version
from kbench.train.slots import Need, Slot, Way
from kbench.train.step import Pick

# Fills every GPU's multiprocessors, and is what most kernels are written for: where nothing was measured.
_USUAL_BLOCK = 256


@dataclass(frozen=True)
class Wanted:
    """What `--use` says. rule: "best" or "naive". fixed: versions by family."""

    rule: str = "best"
    fixed: Mapping[str, int] = field(default_factory=dict)


def parse_use(text: str, catalog: Catalog) -> Wanted:
    """ "best", "naive", "FAMILY=N,..." or a rule and such parts together. Raises UsageError."""
    rule, fixed = "", dict[str, int]()
    for part in (part.strip() for part in text.split(",")):
        name, separator, number = part.partition("=")
        if not separator and part in ("best", "naive"):
            if rule and rule != part:
                raise UsageError(f"--use {text}: it is either best or naive")
            rule = part
        elif separator and number.isdecimal():
            catalog.version(name, int(number))
            if fixed.setdefault(name, int(number)) != int(number):
                raise UsageError(f"--use {text}: {name} is named twice")
        else:
            raise UsageError(f"--use {text}: {part!r} is none of best, naive, FAMILY=VERSION")
    return Wanted(rule or "best", fixed)


@dataclass(frozen=True)
class Timed:
    """Milliseconds of a version at one block size and parameters."""

    block: int
    params: Mapping[str, int]
    ms: float


class Times:
    """Medians in milliseconds of proven rows, as best.json has them for one GPU: each version's best block size and
    parameters.

    source: the fingerprint of a version's files; times of other files are none of this version.
    """

    def __init__(self, document: Mapping[str, Any], device: str, source: Callable[[str, int], str]):
        self._families = document.get("gpus", {}).get(device, {})
        self._source = source

    def of(self, need: Need) -> dict[int, Timed]:
        """What was measured by version; empty where nothing was at this very problem."""
        entries = self._families.get(need.family, {}).get(need.dtype, {}).get("cold", {}).get(need.problem, {})
        rows = {int(number): entry["row"] for number, entry in entries.items()}
        return {
            number: Timed(row["block"], row.get("params", {}), row["measurement"]["median_ms"])
            for number, row in rows.items()
            if row.get("source") == self._source(need.family, number)
        }


@dataclass(frozen=True)
class Candidate:
    """A version that can answer a need. params: a value for each that the version declares. ms: of one launch with
    them, None where it was not measured."""

    need: Need
    version: Version
    block: int
    ms: float | None
    params: Mapping[str, int] = field(default_factory=dict)

    @property
    def pick(self) -> Pick:
        return Pick(self.need, self.version.number, self.block, tuple(sorted(self.version.chosen(self.params).items())))

    @property
    def cost(self) -> float:
        """Milliseconds in a micro-step; infinite where unknown."""
        return math.inf if self.ms is None else self.ms * self.need.times


@dataclass(frozen=True)
class Answer:
    """One way of covering a slot, with a version for each need."""

    slot: Slot
    way: Way
    candidates: tuple[Candidate, ...]

    @property
    def cost(self) -> float:
        return sum(candidate.cost for candidate in self.candidates)

    @property
    def saved(self) -> tuple[str, ...]:
        """Intermediates that the step has to keep for it, layer by layer."""
        if not self.way.pair:
            return ()
        forward, backward = (candidate.version for candidate in self.candidates)
        return tuple(name for name in forward.saves if name in backward.needs)


class Chooser:
    """Answers to slots. times: None on the emulator, which has none and runs no GPU-only versions.
    deterministic: only versions that give the same bits at every launch."""

    def __init__(self, catalog: Catalog, wanted: Wanted, times: Times | None, deterministic: bool = False):
        self._catalog, self._wanted, self._times = catalog, wanted, times
        self._deterministic = deterministic

    def answers(self, slot: Slot) -> list[Answer]:
        """All ways of covering a slot, the preferred one first. Raises UsageError where there is none."""
        found = [answer for way in self._ways(slot) for answer in self._covers(slot, way)]
        if not found:
            raise UsageError(f"no choice of versions covers {slot.name}", self._why_not(slot))
        return sorted(found, key=self._preference)

    def alternatives(self, slot: Slot) -> Iterator[Answer]:
        """Ways of covering a slot with any version that was measured, each need at its best block size."""
        for way in self._ways(slot):
            options = [[c for c in self._candidates(need) if c.ms is not None] for need in way.needs]
            for candidates in itertools.product(*options):
                if not way.pair or set(candidates[1].version.needs) <= set(candidates[0].version.saves):
                    yield Answer(slot, way, candidates)

    def named(
        self, need: Need, family: str, number: int, block: int, params: Mapping[str, int] | None = None
    ) -> Candidate | None:
        """A version by its number, block size and parameters, None where it cannot answer the need. params: what is
        left open, as where they were chosen before the version declared any, has its default."""
        version = next((v for v in self.eligible(need) if v.number == number), None)
        if version is None or family != need.family:
            return None
        problem, chosen = Problem(need.sizes, need.dtype), version.chosen(params or {})
        if self._catalog[family].refusal(version, problem, block, chosen):
            return None
        timed = (self._times.of(need) if self._times is not None else {}).get(number)
        same = timed is not None and timed.block == block and version.chosen(timed.params) == chosen
        return Candidate(need, version, block, timed.ms if timed is not None and same else None, chosen)

    def eligible(self, need: Need) -> list[Version]:
        """Versions that take a need's problem and can run here, in rising order."""
        family = self._catalog[need.family]
        fixed = self._wanted.fixed.get(need.family)
        return [v for v in family.versions if fixed in (None, v.number) and not self._refusal(family, v, need)]

    # ------------------------------------------------------------------------------------------ inside

    def _ways(self, slot: Slot) -> Sequence[Way]:
        """Only those with a family that the user named, if there are any."""
        shared = set.intersection(*(set(way.families) for way in slot.ways))  # says nothing about the way
        fixed = set(self._wanted.fixed) - shared
        return [way for way in slot.ways if fixed.intersection(way.families)] or slot.ways

    def _covers(self, slot: Slot, way: Way) -> Iterator[Answer]:
        options = [self._candidates(need) for need in way.needs]
        if way.pair:
            forward, backward = options
            for one in forward:
                for other in backward:
                    if set(other.version.needs) <= set(one.version.saves):
                        yield Answer(slot, way, (one, other))
        elif all(options):
            yield Answer(slot, way, tuple(min(choices, key=self._rank) for choices in options))

    def _candidates(self, need: Need) -> list[Candidate]:
        measured = self._times.of(need) if self._times is not None else {}
        found = []
        for version in self.eligible(need):
            if version.number in measured:
                timed = measured[version.number]
                found.append(Candidate(need, version, timed.block, timed.ms, timed.params))
            else:
                blocks = self._catalog[need.family].taken_blocks(version, Problem(need.sizes, need.dtype))
                found.append(Candidate(need, version, usual_block(blocks), None, version.defaults))
        return found

    def _rank(self, candidate: Candidate) -> tuple[float, int]:
        number = candidate.version.number
        if self._wanted.rule == "naive":
            return (0.0, number)
        return (candidate.cost, -number)

    def _preference(self, answer: Answer) -> tuple[float, ...]:
        plain = answer.slot.ways.index(answer.way)
        numbers = [candidate.version.number for candidate in answer.candidates]
        if self._wanted.rule == "naive":
            return (plain, sum(numbers), *numbers)
        return (answer.cost, -plain, *(-number for number in numbers))

    def _refusal(self, family: Family, version: Version, need: Need) -> str:
        if version.gpu_only and self._times is None:
            return f"version {version.number} needs a GPU: {version.gpu_only}"
        if self._deterministic and not version.claims_deterministic:
            return f"version {version.number} is not deterministic"
        missing = [name for name in need.saves if name not in version.saves]
        if missing:
            return f"version {version.number} does not save {missing[0]}"
        if need.alias is not None and need.alias not in version.aliases:
            return f"version {version.number} does not work in place"
        problem = Problem(need.sizes, need.dtype)
        if not family.taken_blocks(version, problem):
            return f"version {version.number}: {family.refusal(version, problem, version.blocks[0])}"
        return ""

    def _why_not(self, slot: Slot) -> str:
        for way in self._ways(slot):
            for need in way.needs:
                if not self.eligible(need):
                    family = self._catalog[need.family]
                    fixed = self._wanted.fixed.get(need.family)
                    versions = [v for v in family.versions if fixed in (None, v.number)]
                    reasons = [self._refusal(family, version, need) for version in versions]
                    return f"{need.family}: {'; '.join(reasons)}"
        return "the versions named do not fit together: what the backward pass needs, the forward pass must save"


def usual_block(blocks: Sequence[int]) -> int:
    """The block size for a version that was not measured, of those that it takes."""
    return min(blocks, key=lambda block: abs(math.log2(block / _USUAL_BLOCK)))
