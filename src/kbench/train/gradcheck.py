"""Proof of a whole step: loss and all 16 gradients against a float64 reference, on the run's own weights and data.

A gradient's error is the norm of its difference from the reference, relative to the norm of the reference. In fp32 it
may be twice that of a numpy run in float32, whose rounding errors are of the same origin; or, where sums are long, what
a chain of so many additions leaves: a GPU's GEMM adds in one chain what a CPU's adds in blocks. 16-bit types and TF32
round every stored tensor, or every factor, to u: as errors of random sign do not add up much from layer to layer,
ALLOWED_ROUNDINGS of them are allowed, which is about twice what right kernels show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kbench.family import UNIT_ROUNDOFF, Array
from kbench.train.model import Model
from kbench.train.reference import loss_and_gradients

ALLOWED_ROUNDINGS = 4.0
# In fp32 at least so many: numpy's own error of a small model may happen to be less than two roundings, where right
# kernels of all kinds show up to 4.1.
LEAST_ROUNDINGS = 6.0
# Of sqrt(n) u: a chain of n additions of random sign has a relative error of about 0.1 of it, and so has d6 on an H200.
CHAIN = 0.25
# Floating-point operations that the reference may take, in float64 on a CPU: about a minute on two cores.
MOST_FLOPS = 1e12


@dataclass(frozen=True)
class Finding:
    """One quantity. error: relative. allowed: how large it may be."""

    name: str
    error: float
    allowed: float

    @property
    def right(self) -> bool:
        return bool(self.error <= self.allowed)  # false for NaN


def affordable(model: Model, batch: int, seq: int) -> tuple[int, int]:
    """The largest batch and sequence, halved from the run's, that the reference takes in reasonable time."""
    while model.flops_per_token(seq) * batch * seq > MOST_FLOPS and batch * seq > 1:
        batch, seq = (batch // 2, seq) if batch > 1 else (1, seq // 2)
    return batch, seq


def compare(
    model: Model,
    dtype: str,
    weights: Mapping[str, Array],
    batch: tuple[Array, Array],
    loss: float,
    gradients: Mapping[str, Array],
) -> list[Finding]:
    """Findings for the loss and each of the 16 tensors.

    weights: as the step used them, rounded to its dtype. batch: inputs and targets (B, T). loss, gradients: the step's.
    """
    exact = {name: values.astype(np.float64) for name, values in weights.items()}
    right_loss, _, right = loss_and_gradients(model, exact, *batch, dtype=np.float64)
    if dtype == "fp32":
        single_loss, _, single = loss_and_gradients(model, exact, *batch, dtype=np.float32)
        # A float32 loss may happen to be exact: one unit in the last place is always allowed.
        loss_allowed = 2.0 * abs(float(single_loss) - right_loss) / right_loss + 2.0 * UNIT_ROUNDOFF["fp32"]
        chain = CHAIN * math.sqrt(longest_sum(model, batch[0].size))
        least = max(chain, LEAST_ROUNDINGS) * UNIT_ROUNDOFF["fp32"]
        allowed = {name: max(2.0 * relative_error(single[name], right[name]), least) for name in right}
    else:
        loss_allowed = ALLOWED_ROUNDINGS * UNIT_ROUNDOFF[dtype]
        allowed = dict.fromkeys(right, loss_allowed)
    findings = [Finding("loss", abs(loss - right_loss) / right_loss, loss_allowed)]
    return findings + [Finding(n, relative_error(gradients[n], right[n]), allowed[n]) for n in right]


def longest_sum(model: Model, tokens: int) -> int:
    """Terms of the longest sum of a step: over the vocabulary, the widest layer, or the tokens."""
    return max(model.padded_vocab, 4 * model.channels, tokens)


def relative_error(found: Array, right: Array) -> float:
    """The norm of the difference over the norm of what is right."""
    difference = float(np.linalg.norm((found.astype(np.float64) - right).reshape(-1)))
    size = float(np.linalg.norm(right.reshape(-1)))
    return difference / size if size else difference
