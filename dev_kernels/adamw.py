"""One step of AdamW, in place. For every parameter with its gradient g and its moments m and v:

m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
param -= rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * param)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from kbench.family import (
    Array,
    CheckShape,
    Draw,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")
PER_THREAD = 4  # parameters, of version 2


def _fp32(value: float) -> float:
    """The number as a kernel gets it. 1 - beta2, for one, differs by 1e-5 of itself from what 0.999 promises."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


STEP = 10  # t: early enough for the corrections to matter
RATE, BETA1, BETA2, EPSILON, DECAY = (_fp32(value) for value in (1e-3, 0.9, 0.999, 1e-8, 0.1))
CORRECTIONS = (_fp32(1.0 - BETA1**STEP), _fp32(1.0 - BETA2**STEP))
INVERSES = (1.0 / CORRECTIONS[0], 1.0 / CORRECTIONS[1])


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    shape, dtype, axes = (problem["N"],), problem.storage, ("i",)
    return (
        # As small as weights are: else bf16 would round the update away, and nobody would notice if it were missing.
        Tensor("params", shape, dtype, "inout", axes, draw=normal(0.01, 0.02)),
        Tensor("grads", shape, dtype, "in", axes, draw=_with_small(-1.0, 1.0, 3e-8)),
        Tensor("m", shape, "fp32", "inout", axes, draw=_with_small(-1.0, 1.0, 1e-8)),
        Tensor("v", shape, "fp32", "inout", axes, draw=_with_small(0.0, 1.0, 1e-16)),
    )


def _with_small(low: float, high: float, factor: float) -> Draw:
    """Between low and high. Every seventh is smaller by a factor that makes the root of v as small as epsilon, which
    counts nowhere else; every eleventh is 0, as of a parameter that has had no gradient yet: 0 / epsilon is 0."""

    def draw(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        values = rng.uniform(low, high, shape)
        values[3::7] *= factor
        values[5::11] = 0.0
        return values

    return draw


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """In units of the fp32 roundoff, whether moments are sums of products or interpolations:

    - m has an error of 4 times |beta1 m| + |(1 - beta1) g|: two products, or two FMAs, and a sum. What is left of it
      where the two cancel is made larger by the division by sqrt(v), which may be small.
    - v has a relative error of 6, since both its terms are positive: at most three products and a sum.
    - The direction m / c1 / (sqrt(v / c2) + epsilon) has, besides that of m, a relative error of 19: three for c1, its
      inverse and the product with it, half of the 6 of v and three for c2 likewise, five for a root by way of rsqrtf
      with 2 ulp, two for the sum with epsilon, four for a quotient with 2 ulp.
    - The update has three roundings more (decay * param, the sum, the product with the rate), the new parameter two: of
      the last sum, or of param * (1 - rate * decay) and the last sum.
    """
    unit = error.fp32
    grads, params = inputs["grads"], inputs["params"]
    terms = [BETA1 * inputs["m"], (1.0 - BETA1) * grads]
    m = terms[0] + terms[1]
    m_bound = xp.abs(terms[0])
    m_bound += xp.abs(terms[1])
    m_bound *= 4.0 * unit
    del terms
    v = grads * grads
    v *= 1.0 - BETA2
    v += BETA2 * inputs["v"]

    root = xp.sqrt(v / CORRECTIONS[1])
    root += EPSILON
    direction = m / root
    direction /= CORRECTIONS[0]
    bound = m_bound / root
    bound /= CORRECTIONS[0]
    decay = DECAY * params
    bound += (22.0 * unit) * xp.abs(direction)
    bound += (3.0 * unit) * xp.abs(decay)
    bound *= RATE
    direction += decay
    direction *= -RATE
    direction += params
    bound += (2.0 * unit) * xp.abs(direction)
    single = xp.float32
    return {
        "params": Expected(direction, bound.astype(single)),
        "m": Expected(m, m_bound.astype(single)),
        "v": Expected(v, (6.0 * unit * v).astype(single)),
    }


# ------------------------------------------------------------------------------------------------ plans


def _plan(
    kernel: str, per_thread: int, corrections: tuple[float, float]
) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    hyperparameters = (RATE, BETA1, BETA2, *corrections, EPSILON, DECAY)

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        N = problem["N"]
        blocks = -(-N // (block * per_thread))
        args = ("params", "grads", "m", "v", N, *hyperparameters)
        return (Launch(f"{kernel}<{problem.c_type}>", (blocks,), (block,), args),)

    return plan


# ----------------------------------------------------------------------------------------------- family


FAMILY = Family(
    name="adamw",
    summary="one step of the AdamW optimiser",
    sizes={"N": "number of parameters"},
    dtypes=DTYPES,
    presets={"default": {"N": 1 << 20}, "small": {"N": 16 * 1024}, "large": {"N": 48 << 20}},
    check_shapes=(
        CheckShape({"N": 1}, "one parameter"),
        CheckShape({"N": 3}, "fewer than a thread of version 2 has"),
        CheckShape({"N": 64}, "whole packets, fewer than a block has threads"),
        CheckShape({"N": 1031}, "prime, past the largest block"),
        CheckShape({"N": 4101}, "a whole block of every size, then a part of one"),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1,
            "one thread per parameter: the formulas as they stand, moments updated in memory",
            _plan("adamw1", 1, CORRECTIONS),
            DTYPES,
        ),
        Version(
            2,
            "as 1, everything in registers, four parameters per thread; moments as two FMAs each",
            _plan("adamw2", PER_THREAD, INVERSES),
            DTYPES,
        ),
    ),
)
