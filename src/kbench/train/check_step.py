"""`--check`: the run's first step, forward and backward, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kbench.train.gradcheck import Finding, affordable, compare
from kbench.train.run import Run, batches_of
from kbench.train.trainer import State


def check_step(run: Run, note: Callable[[str], None]) -> list[Finding]:
    """Findings for loss and gradients of the first batch. Where the model is too large for the reference, batch and
    sequence are cut down, and a note says so; versions are chosen for those sizes."""
    options, model = run.inputs.options, run.inputs.model
    assert options.seq is not None
    batch, seq = affordable(model, options.batch, options.seq)
    if (batch, seq) != (options.batch, options.seq):
        note(f"the reference takes its time: checking a batch of {batch} with {seq} tokens")
    inputs = replace(run.inputs, options=replace(options, batch=batch, seq=seq, micro_steps=1), position=None)
    run = replace(run, inputs=inputs)
    trainer = run.trainer(run.choose())
    first = next(batches_of(inputs))
    trainer.gradient([first])
    loss = float(trainer.engine.fetch("losses").mean(dtype="float64"))
    weights: State = inputs.state
    return compare(model, options.dtype or "", weights.params, first, loss, trainer.gradients())
