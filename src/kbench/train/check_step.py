"""`--check`: the run's first step, forward and backward, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kbench.family import Array
from kbench.train.gradcheck import Finding, affordable, compare
from kbench.train.model import Model
from kbench.train.options import SCRATCH
from kbench.train.run import Run, batches_of
from kbench.train.trainer import fresh_state

# Spread of what the check adds to parameters that start as constants: far above rounding, and small beside 1.
_VARIATION = 0.1


def check_step(run: Run, note: Callable[[str], None]) -> list[Finding]:
    """Findings for loss and gradients of the first batch. Where the model is too large for the reference, batch and
    sequence are cut down, and a note says so; versions are chosen for those sizes. Weights from scratch are varied
    where they are all 1 or all 0: a LayerNorm that takes another one's gains would not be seen."""
    options, model = run.inputs.options, run.inputs.model
    assert options.seq is not None
    batch, seq = affordable(model, options.batch, options.seq)
    if (batch, seq) != (options.batch, options.seq):
        note(f"the reference takes its time: checking a batch of {batch} with {seq} tokens")
    cut = replace(options, batch=batch, seq=seq, micro_steps=1)
    inputs = replace(run.inputs, options=cut, position=None)
    if options.weights == SCRATCH and inputs.state.step == 0:
        weights = _varied(model, inputs.state.master or inputs.state.params, options.seed)
        inputs.state = fresh_state(weights, inputs.shape.storage)
    run = replace(run, inputs=inputs)
    trainer = run.trainer(run.choose())
    first = next(batches_of(inputs))
    trainer.gradient([first])
    loss = float(trainer.engine.fetch("losses").mean(dtype="float64"))
    return compare(model, options.dtype or "", inputs.state.params, first, loss, trainer.gradients())


def _varied(model: Model, weights: dict[str, Array], seed: int) -> dict[str, Array]:
    """Weights with noise on the parameters that start as constants; the others as they are."""
    rng = np.random.default_rng(seed)
    noise = {p.name: rng.standard_normal(p.shape, np.float32) for p in model.parameters if not p.std}
    return {n: values + np.float32(_VARIATION) * noise[n] if n in noise else values for n, values in weights.items()}
