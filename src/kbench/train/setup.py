"""From a shape and a choice of kernels to an engine: what has not been measured or proven is done first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kbench import __version__
from kbench.catalog import Catalog
from kbench.device.base import Device
from kbench.device.cuda import cache
from kbench.errors import CannotRunError, KbenchError, UsageError
from kbench.results.best import load_best
from kbench.results.schema import Row
from kbench.sweep import Bench
from kbench.train.chooser import Answer, Chooser, Times, Wanted
from kbench.train.engine import RESERVE, Engine, Plans
from kbench.train.layout import Layout
from kbench.train.program import Call, Program, Use
from kbench.train.rerank import StepTimer, alternatives, rerank
from kbench.train.slots import RECOMPUTE_LEVELS, Shape, slots
from kbench.train.step import Pick, build
from kbench.train.trials import Trials


@dataclass(frozen=True)
class Chosen:
    """What runs a shape's step: an answer to each slot, and the program that they make."""

    shape: Shape
    answers: tuple[Answer, ...]
    program: Program

    @property
    def picks(self) -> dict[str, Pick]:
        return {c.need.role: c.pick for answer in self.answers for c in answer.candidates}

    def document(self) -> dict[str, Any]:
        """For JSON; `Kernels.from_document` reads it."""
        kernels = {role: [p.need.family, p.version, p.block, dict(p.params)] for role, p in self.picks.items()}
        return {"kernels": kernels, "recompute": self.shape.recompute}


@dataclass(frozen=True)
class Kernels:
    """The choice of a run, as its checkpoints keep it. by_role: family, version, block size and parameters."""

    by_role: Mapping[str, tuple[str, int, int, Mapping[str, int]]]
    recompute: int

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Kernels | None:
        """None where the checkpoint has none that can be read."""
        try:
            return cls(
                {role: _kernel(*kernel) for role, kernel in document["kernels"].items()}, int(document["recompute"])
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def _kernel(family: Any, version: Any, block: Any, params: Any = None) -> tuple[str, int, int, dict[str, int]]:
    """As a document has it; those of runs before versions had parameters have none."""
    return str(family), int(version), int(block), {str(name): int(value) for name, value in (params or {}).items()}


@dataclass
class Workshop:
    """Makes engines on one device.

    open_bench: opens a bench on the same kind of device, where rows have to run first. keep: stores rows of a sweep.
    """

    device: Device
    catalog: Catalog
    results: Path
    open_bench: Callable[[], AbstractContextManager[Bench]]
    keep: Callable[[Sequence[Row]], None]
    note: Callable[[str], None]
    progress: Callable[[Sequence[str]], AbstractContextManager[Callable[[], None]]]
    deterministic: bool = False

    def __post_init__(self) -> None:
        self.plans = Plans(self.catalog, self.device)

    def choose(self, shape: Shape, wanted: Wanted, recompute: int | None = None) -> Chosen:
        """The versions for a shape, measured and proven. recompute: None for the least that memory allows.

        Raises UsageError where a slot cannot be covered, CannotRunError where memory does not suffice, WrongResult
        where a version is wrong.
        """
        levels = RECOMPUTE_LEVELS if recompute is None else (recompute,)
        shape = replace(shape, memory=self.device.props.memory_bytes)
        _require_used(wanted, _families(shape))
        with self._trials() as trials:
            chosen = self._fitting([replace(shape, recompute=level) for level in levels], wanted, trials)
            _require_used(wanted, {use.family for use in self._uses(chosen)})
            trials.prove(self._uses(chosen))
            if self.device.kind == "cuda" and wanted.rule == "best":
                chosen = self._reranked(chosen, wanted, trials)
        return chosen

    def choose_saved(self, shape: Shape, saved: Kernels) -> Chosen | None:
        """The choice of an earlier run, proven; None where this device or these families do not have it.

        A run that goes on takes it, because other versions round in another way. Raises as `choose`.
        """
        shape = replace(shape, memory=self.device.props.memory_bytes, recompute=saved.recompute)
        times = self.times() if self.device.kind == "cuda" else None
        answers = self._named(shape, saved.by_role, Chooser(self.catalog, Wanted(), times))
        if answers is None:
            return None
        chosen = self._built(shape, answers)
        with self._trials() as trials:
            trials.prove(self._uses(chosen))
        return chosen

    def _named(
        self, shape: Shape, by_role: Mapping[str, tuple[str, int, int, Mapping[str, int]]], chooser: Chooser
    ) -> list[Answer] | None:
        """Answers by family, version, block size and parameters of each role; None where one of them cannot be had."""
        answers = []
        for slot in slots(shape, Layout(shape.model).count):
            way = next((way for way in slot.ways if all(need.role in by_role for need in way.needs)), None)
            if way is None:
                return None
            found = [chooser.named(need, *by_role[need.role]) for need in way.needs]
            candidates = tuple(candidate for candidate in found if candidate is not None)
            if len(candidates) < len(found):
                return None
            answers.append(Answer(slot, way, candidates))
        return answers

    def engine(self, chosen: Chosen) -> Engine:
        """Compiled and prepared; memory is not allocated yet."""
        return Engine(self.device, self.plans, chosen.program)

    # ------------------------------------------------------------------------------------------ inside

    @contextmanager
    def _trials(self) -> Iterator[Trials]:
        trials = Trials(self.open_bench, self.device, self.catalog, self.note, self.keep, self.progress)
        try:
            yield trials
        finally:
            trials.close()

    def _fitting(self, shapes: Sequence[Shape], wanted: Wanted, trials: Trials) -> Chosen:
        free = max(0, self.device.free_memory() - RESERVE)
        smallest = 0
        for shape in shapes:
            total = Layout(shape.model).count
            chooser = self._chooser(shape, total, wanted, trials)
            options = [chooser.answers(slot) for slot in slots(shape, total)]
            for answers in _by_memory(options):
                chosen = self._built(shape, answers)
                needed = self._needed(chosen.program)
                if needed <= free:
                    return chosen
                smallest = min(smallest or needed, needed)
        raise CannotRunError(
            f"{shapes[0].model} with batch {shapes[0].batch} and sequences of {shapes[0].seq} needs "
            f"{smallest / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            self._what_fits(shapes[-1], wanted, free),
        )

    def _reranked(self, chosen: Chosen, wanted: Wanted, trials: Trials) -> Chosen:
        """With close choices decided inside the step, which is remembered."""
        chooser = Chooser(self.catalog, wanted, self.times(), self.deterministic)
        others = list(alternatives(chosen.answers, chooser))
        if not others:
            return chosen
        steps = [chosen, *(self._built(chosen.shape, _with(chosen.answers, *other)) for other in others)]
        uses = list(dict.fromkeys(use for step in steps for use in self._uses(step)))
        key = {
            "kbench": __version__,
            "shape": str(replace(chosen.shape, steps=1)),
            "uses": [trials.proof_key(use) for use in uses],
        }
        if (known := cache.load("rerank", key)) is not None:
            kernels = Kernels.from_document(known[0])
            answers = self._named(chosen.shape, kernels.by_role, chooser) if kernels is not None else None
            if answers is not None:
                return self._built(chosen.shape, answers)
        trials.prove(uses)
        self.note(f"timing {len(others)} close {'choice' if len(others) == 1 else 'choices'} inside the step")
        best = rerank(chosen, others, lambda answers: self._built(chosen.shape, answers), StepTimer(self, chosen.shape))
        cache.store("rerank", key, best.document())
        return best

    def _chooser(self, shape: Shape, total: int, wanted: Wanted, trials: Trials) -> Chooser:
        if self.device.kind != "cuda":
            return Chooser(self.catalog, wanted, None, self.deterministic)
        chooser = Chooser(self.catalog, wanted, self.times(), self.deterministic)
        if wanted.rule == "best" and (missing := trials.missing(shape, total, chooser, self.times())):
            trials.sweep(shape, total, chooser, missing)
            chooser = Chooser(self.catalog, wanted, self.times(), self.deterministic)
        return chooser

    def times(self) -> Times:
        """What best.json knows of this GPU."""
        return Times(load_best(self.results), self.device.row_name, self.catalog.fingerprint)

    def _built(self, shape: Shape, answers: Sequence[Answer]) -> Chosen:
        picks = {c.need.role: c.pick for answer in answers for c in answer.candidates}
        return Chosen(shape, tuple(answers), build(shape, picks, self.plans.touches))

    def _what_fits(self, shape: Shape, wanted: Wanted, free: int) -> str:
        """The largest power of two as batch that would fit, as far as sums of tensors tell."""
        batch = shape.batch // 2
        while batch:
            smaller = replace(shape, batch=batch)
            total = Layout(shape.model).count
            times = None if self.device.kind != "cuda" else self.times()
            chooser = Chooser(self.catalog, wanted, times, self.deterministic)
            try:
                answers = [min(chooser.answers(slot), key=_kept_bytes) for slot in slots(smaller, total)]
                needed = self._needed(self._built(smaller, answers).program)
            except KbenchError:
                break
            if needed <= free:
                return f"--batch {batch} fits"
            batch //= 2
        return "not even a batch of 1 fits: choose a smaller --model or a shorter --seq"

    def _needed(self, program: Program) -> int:
        """Bytes of a program, but for the workspaces of libraries, which are known when it is prepared."""
        calls = [action for action in program.actions if isinstance(action, Call)]
        sizes = {tensor.name: tensor.nbytes for tensor in program.tensors}
        scratch = [(call.arena, self.plans.of(call.use).transient_bytes(call.views)) for call in calls]
        return sum(sizes.values()) + max((size for arena, size in scratch if size > sizes.get(arena, 0)), default=0)

    def _uses(self, chosen: Chosen) -> list[Use]:
        return [action.use for action in chosen.program.actions if isinstance(action, Call)]


def _with(answers: Sequence[Answer], number: int, other: Answer) -> tuple[Answer, ...]:
    """Answers with another one for one slot."""
    return (*answers[:number], other, *answers[number + 1 :])


def _families(shape: Shape) -> set[str]:
    """All that a step may be made of."""
    found = slots(shape, Layout(shape.model).count)
    return {family for slot in found for way in slot.ways for family in way.families}


def _require_used(wanted: Wanted, families: set[str]) -> None:
    """Raises UsageError for a family that the user named and that takes no part."""
    for name, number in wanted.fixed.items():
        if name not in families:
            others = ", ".join(sorted(families))
            raise UsageError(f"--use {name}={number}: no part of this step is of that family", f"they are {others}")


def _by_memory(options: Sequence[Sequence[Answer]]) -> Iterator[list[Answer]]:
    """First what each slot prefers; then, slot by slot, what keeps least in memory instead."""
    preferred = [answers[0] for answers in options]
    yield preferred
    smallest = [min(answers, key=_kept_bytes) for answers in options]
    if smallest != preferred:
        yield smallest


def _kept_bytes(answer: Answer) -> int:
    """Bytes per layer of the intermediates that an answer keeps, in elements of 1: their order is all that counts."""
    if not answer.way.pair:
        return 0
    sizes: Mapping[str, int] = answer.candidates[0].need.sizes
    square = sizes["B"] * sizes["NH"] * sizes["T"] * sizes["T"]
    weights = {"att": square, "qkvr": 3 * sizes["B"] * sizes["T"] * sizes["C"], "lse": 1}
    return sum(weights.get(name, 0) for name in answer.saved)
