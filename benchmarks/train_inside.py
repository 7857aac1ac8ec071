"""kbench's training inside a Python program: what `kbench train gpt2` does, with its steps at hand.

For scripts that look at gradients, give two programs the same batches, or trace a step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kbench.catalog import load_catalog
from kbench.device.open import open_device
from kbench.results.journal import Journal
from kbench.sweep import Bench, Options
from kbench.train.chooser import parse_use
from kbench.train.options import TrainOptions
from kbench.train.run import Inputs, batches_of, open_inputs
from kbench.train.setup import Chosen, Workshop
from kbench.train.trainer import Report, Trainer

Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Note = Callable[[str], None]


@dataclass
class Training:
    """A step that is ready to run: its memory allocated, the state of the first step loaded."""

    inputs: Inputs
    chosen: Chosen
    trainer: Trainer

    def batches(self, count: int) -> list[Batch]:
        """The first batches of the run."""
        return list(islice(batches_of(self.inputs), count))

    @property
    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """What the run starts from, fp32."""
        state = self.inputs.state
        return state.params if state.master is None else state.master


@contextmanager
def workshop(kind: str, results: Path, note: Note) -> Iterator[Workshop]:
    """kind: "cuda" or "emulator". results: where times of versions are looked up, and kept if they are missing."""
    device = open_device(kind)
    try:
        with Journal(results, device.describe()) as journal:
            yield Workshop(
                device, load_catalog([]), results, lambda: Bench(Options(device=kind), note), journal.keep, note,
                lambda names: nullcontext(lambda: None),
            )  # fmt: skip
    finally:
        device.close()


@contextmanager
def training(shop: Workshop, options: TrainOptions, note: Note) -> Iterator[Training]:
    """Versions chosen and proven, memory allocated; given back at the end, once nothing else holds the Training."""
    inputs = open_inputs(options, shop.device.kind, note)
    chosen = shop.choose(inputs.shape, parse_use(options.use, shop.catalog), options.recompute)
    engine = shop.engine(chosen)
    for line in engine.notes:
        note(line)
    engine.allocate()
    try:
        trainer = Trainer(engine, chosen.shape, inputs.settings)
        trainer.load(inputs.state)
        yield Training(inputs, chosen, trainer)
    finally:
        engine.close()


def run_steps(trainer: Trainer, batches: Iterable[Batch]) -> tuple[list[Report], list[float]]:
    """Steps as the training loop queues them, each report read while the next step runs. Also milliseconds between
    reports; the first is from before the first step."""
    reports: list[Report] = []
    marks = [time.perf_counter()]

    def read() -> None:
        reports.append(trainer.report())
        marks.append(time.perf_counter())

    for batch in batches:
        trainer.step([batch])
        while trainer.pending > trainer.late:
            read()
    while trainer.pending:
        read()
    return reports, [1e3 * (end - start) for start, end in zip(marks, marks[1:], strict=False)]


def release(shop: Workshop) -> None:
    """Give memory that nobody holds any more back to the GPU, for others in this process."""
    gc.collect()
    if shop.device.kind == "cuda":
        shop.device.synchronize()
        shop.device.xp.get_default_memory_pool().free_all_blocks()
        shop.device.xp.get_default_pinned_memory_pool().free_all_blocks()
