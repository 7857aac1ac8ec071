"""Training runs for tests: a workshop on a device that is open already, and runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kbench.catalog import load_catalog
from kbench.device.base import Device
from kbench.sweep import Bench, Options
from kbench.train.layout import Layout
from kbench.train.options import TrainOptions
from kbench.train.run import Run, batches_of, open_inputs
from kbench.train.setup import Chosen, Workshop
from kbench.train.slots import Shape, slots
from kbench.train.step import Pick
from kbench.train.trainer import Report, Trainer

Array = np.ndarray[Any, Any]


def ignore(text: str) -> None:
    """A line that nobody reads."""


def workshop_on(device: Device, folder: Path, deterministic: bool = False, families: Sequence[Path] = ()) -> Workshop:
    """A workshop whose rows run on a device of the same kind. folder: for best.json."""

    def keep(rows: Sequence[Any]) -> None:
        from kbench.results.best import update_best

        update_best(folder, rows, "tests")

    return Workshop(
        device, load_catalog(families), folder, lambda: Bench(Options(device.kind, tuple(families)), ignore), keep,
        ignore, lambda names: nullcontext(lambda: None), deterministic,
    )  # fmt: skip


def run_on(workshop: Workshop, folder: Path | None = None, say: Callable[[str], None] = ignore, **options: Any) -> Run:
    """A run that nothing is kept of unless a folder is given, on kbench's own story."""
    given = TrainOptions(**options)
    return Run(workshop, open_inputs(given, workshop.device.kind, ignore), folder, say, ignore)


@contextmanager
def trainer_of(run: Run) -> Iterator[Trainer]:
    """Its step, ready, with the state loaded; its memory is given back."""
    with chosen_trainer_of(run) as (_, trainer):
        yield trainer


@contextmanager
def chosen_trainer_of(run: Run) -> Iterator[tuple[Chosen, Trainer]]:
    chosen = run.choose()
    trainer = run.trainer(chosen)
    try:
        yield chosen, trainer
    finally:
        trainer.engine.close()


def batches(run: Run, count: int) -> list[tuple[Array, Array]]:
    """Its first batches, inputs and targets."""
    source = batches_of(run.inputs)
    return [next(source) for _ in range(count)]


def train(run: Run, steps: int) -> list[Report]:
    """Reports of its first steps; the loop does not take part."""
    source, reports = batches_of(run.inputs), []
    with trainer_of(run) as trainer:
        for _ in range(steps):
            trainer.step(next(source) for _ in range(trainer.shape.micro_steps))
            while trainer.pending > trainer.late:
                reports.append(trainer.report())
        while trainer.pending:
            reports.append(trainer.report())
    return reports


def gradients(run: Run) -> dict[str, Array]:
    """Of its first update's micro-steps."""
    with trainer_of(run) as trainer:
        trainer.gradient(batches(run, trainer.shape.micro_steps))
        return trainer.gradients()


def same_bits(found: Mapping[str, Array], expected: Mapping[str, Array]) -> list[str]:
    """Names of arrays that differ in any bit."""
    assert list(found) == list(expected)
    return [name for name in expected if found[name].tobytes() != expected[name].tobytes()]


def picks_with(shape: Shape, versions: Mapping[str, int], ways: Mapping[str, str] | None = None) -> dict[str, Pick]:
    """A pick for each need of the ways named by slot, else of each slot's first. versions: by role or by family;
    others take their version 1."""
    found = {}
    catalog = load_catalog()
    for slot in slots(shape, Layout(shape.model).count):
        wanted = (ways or {}).get(slot.name, slot.ways[0].name)
        way = next(way for way in slot.ways if way.name == wanted)
        for need in way.needs:
            number = versions.get(need.role, versions.get(need.family, 1))
            found[need.role] = Pick(need, number, catalog.version(need.family, number).blocks[0])
    return found
