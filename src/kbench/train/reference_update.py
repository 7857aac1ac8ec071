"""AdamW and whole training steps in numpy, for small models: the oracle of several steps in a row.

As in `reference`, every operation is done in the type asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kbench.train.model import Model
from kbench.train.optimizer import BETA1, BETA2, EPSILON
from kbench.train.reference import Array, loss_and_gradients

MAX_NORM = 1.0  # of all gradients together; larger ones are scaled down to it


class State(NamedTuple):
    """What the optimiser carries between steps: means of gradients and of their squares, and the steps done."""

    m: dict[str, Array]
    v: dict[str, Array]
    steps: int


class Steps(NamedTuple):
    """A training run: loss and gradient norm (before clipping) of each step, and the weights after the last."""

    losses: Array
    norms: Array
    weights: dict[str, Array]


def fresh_state(weights: Mapping[str, Array], dtype: npt.DTypeLike = np.float64) -> State:
    """Before the first step: all 0."""
    m, v = ({name: np.zeros(array.shape, dtype) for name, array in weights.items()} for _ in range(2))
    return State(m, v, 0)


def global_norm(gradients: Mapping[str, Array]) -> float:
    """The root of the sum of squares of all gradients."""
    return math.sqrt(sum(float(np.square(gradient).sum()) for gradient in gradients.values()))


def adamw_step(
    model: Model,
    weights: Mapping[str, Array],
    gradients: Mapping[str, Array],
    state: State,
    rate: float,
    *,
    decay: float = 0.0,
    max_norm: float = MAX_NORM,
) -> tuple[dict[str, Array], State, float]:
    """One update (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2).

    Gradients are first scaled so that their norm is at most max_norm. Then for every element, t counting from 1:
    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
    w -= rate (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay w), with decay only where the parameter
    has it.
    Returns new weights, the new state and the norm before clipping; its arguments stay as they are.
    """
    norm = global_norm(gradients)
    scale = max_norm / norm if norm > max_norm else 1.0
    step = state.steps + 1
    correction1, correction2 = 1.0 - BETA1**step, 1.0 - BETA2**step
    new, m, v = {}, {}, {}
    for parameter in model.parameters:
        name = parameter.name
        g, old = gradients[name] * scale, weights[name]
        m[name] = BETA1 * state.m[name] + (1.0 - BETA1) * g
        v[name] = BETA2 * state.v[name] + (1.0 - BETA2) * g * g
        move = (m[name] / correction1) / (np.sqrt(v[name] / correction2) + EPSILON)
        new[name] = old - rate * (move + (decay if parameter.decay else 0.0) * old)
    return new, State(m, v, step), norm


def train_steps(
    model: Model,
    weights: Mapping[str, Array],
    batches: Sequence[tuple[Array, Array]],
    rates: Sequence[float] | Array,
    *,
    decay: float = 0.0,
    max_norm: float = MAX_NORM,
    dtype: npt.DTypeLike = np.float64,
) -> Steps:
    """One step for each of `batches`, pairs of inputs and targets (B, T), at the learning rate of the same place.

    Micro-batches of one step are given as one batch: the mean over all their rows is the same.
    Raises UsageError as loss_and_gradients.
    """
    now = {name: array.astype(dtype) for name, array in weights.items()}
    state = fresh_state(now, dtype)
    losses, norms = [], []
    for (inputs, targets), rate in zip(batches, rates, strict=True):
        loss, _, gradients = loss_and_gradients(model, now, inputs, targets, dtype)
        # float(): a numpy float64 as rate would turn float32 weights into float64.
        now, state, norm = adamw_step(model, now, gradients, state, float(rate), decay=decay, max_norm=max_norm)
        losses.append(loss)
        norms.append(norm)
    return Steps(np.array(losses), np.array(norms), now)
