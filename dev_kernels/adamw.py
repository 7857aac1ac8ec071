"""One step of AdamW, in place. For every parameter with its gradient g and its moments m and v:

m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
param -= rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * param)

With training = 1 as a training step needs it: gradients are multiplied by a scale, every GROUP parameters have a weight
decay of their own, and 16-bit parameters are what stochastic rounding makes of a master in fp32. Where the scale is 0,
nothing changes; that is tested apart, because parameters that are only written have no value to keep in the check.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
    UNIT_ROUNDOFF,
    Array,
    CheckShape,
    Draw,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Rule,
    Step,
    Tensor,
    Version,
    ceil_div,
    integers,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")
PER_THREAD = 4  # parameters, of versions 2 and 3
GROUP = 128  # parameters with the same weight decay


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
    groups = (ceil_div(problem["N"], GROUP),)
    training, master = bool(problem["training"]), has_master(problem)
    # As small as weights are: else bf16 would round the update away, and nobody would notice if it were missing.
    weights = normal(0.01, 0.02)
    tensors = [
        Tensor("params", shape, dtype, "out" if master else "inout", axes, draw=weights),
        Tensor("grads", shape, dtype, "in", axes, draw=_with_small(-1.0, 1.0, 3e-8)),
        Tensor("m", shape, "fp32", "inout", axes, draw=_with_small(-1.0, 1.0, 1e-8)),
        Tensor("v", shape, "fp32", "inout", axes, draw=_with_small(0.0, 1.0, 1e-16)),
        # rate, beta1, beta2, correction1, correction2, epsilon, scale of the gradients, and nothing
        Tensor("scalars", (8,), "fp32", "in", ("k",), draw=_drawn_scalars if training else _same_scalars),
        Tensor("decays", groups, "fp32", "in", ("group",), draw=_drawn_decays if training else _same_decays),
    ]
    if master:
        tensors.append(Tensor("master", shape, "fp32", "inout", axes, draw=weights))
        tensors.append(Tensor("seed", (1,), "uint32", "in", ("k",), draw=integers(0, 1 << 32)))
    return tuple(tensors)


def has_master(problem: Problem) -> bool:
    """Whether exact weights stand in fp32, beside parameters of 16 bits."""
    return bool(problem["training"]) and problem.storage != "fp32"


def _same_scalars(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """What versions 1 and 2 have as arguments."""
    import numpy as np

    return np.array([RATE, BETA1, BETA2, *CORRECTIONS, EPSILON, 1.0, 0.0])


def _drawn_scalars(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    import numpy as np

    rate, beta1 = rng.uniform(5e-4, 2e-3), _fp32(float(rng.uniform(0.85, 0.95)))
    beta2, step = _fp32(float(rng.uniform(0.93, 0.999))), int(rng.integers(5, 50))
    scale = rng.uniform(0.2, 0.6)  # gradients were clipped
    return np.array([rate, beta1, beta2, 1.0 - beta1**step, 1.0 - beta2**step, EPSILON, scale, 0.0])


def _same_decays(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    import numpy as np

    return np.full(shape, DECAY)


def _drawn_decays(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """None for some groups, as for biases."""
    decays: Array = rng.integers(0, 2, shape) * DECAY
    return decays


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
    """In units of the fp32 roundoff, whether moments are sums of products or interpolations; s is 1 where gradients are
    scaled, which rounds them once more, else 0:

    - m has an error of 4 + s times |beta1 m| + |(1 - beta1) g|: two products, or two FMAs, and a sum. What is left of
      it where the two cancel is made larger by the division by sqrt(v), which may be small.
    - v has a relative error of 6 + 2 s, since both its terms are positive: at most three products and a sum.
    - The direction m / c1 / (sqrt(v / c2) + epsilon) has, besides that of m, a relative error of 22 + s: five for c1,
      its inverse with 2 ulp and the product with it, half of the 6 + 2 s of v and five for c2 likewise, five for a root
      by way of rsqrtf with 2 ulp, two for the sum with epsilon, four for a quotient with 2 ulp.
    - The update has three roundings more (decay * param, the sum, the product with the rate), the new parameter two: of
      the last sum, or of param * (1 - rate * decay) and the last sum.
    """
    unit, scaled = error.fp32, problem["training"]
    rate, beta1, beta2, correction1, correction2, epsilon, scale = (float(inputs["scalars"][k]) for k in range(7))
    grads = scale * inputs["grads"]
    terms = [beta1 * inputs["m"], (1.0 - beta1) * grads]
    m = terms[0] + terms[1]
    m_bound = xp.abs(terms[0])
    m_bound += xp.abs(terms[1])
    m_bound *= (4.0 + scaled) * unit
    del terms
    v = grads * grads
    del grads
    v *= 1.0 - beta2
    v += beta2 * inputs["v"]

    root = xp.sqrt(v / correction2)
    root += epsilon
    direction = m / root
    direction /= correction1
    bound = m_bound / root
    bound /= correction1
    del root
    weights = inputs["master" if has_master(problem) else "params"]
    decay = xp.repeat(inputs["decays"], GROUP)[: problem["N"]]
    decay *= weights
    bound += ((25.0 + scaled) * unit) * xp.abs(direction)
    bound += (3.0 * unit) * xp.abs(decay)
    bound *= rate
    direction += decay
    direction *= -rate
    direction += weights
    bound += (2.0 * unit) * xp.abs(direction)
    single = xp.float32
    answers = {
        "m": Expected(m, m_bound.astype(single)),
        "v": Expected(v, ((6.0 + 2.0 * scaled) * unit * v).astype(single)),
        "params": Expected(direction, bound.astype(single)),
    }
    if has_master(problem):
        answers["master"] = answers["params"]
        # Either neighbour: with the half ulp that the check adds, a whole one.
        bound += _half_ulp(xp.abs(direction) + bound, problem.storage, xp)
        answers["params"] = Expected(direction, bound.astype(single))
    return answers


def _half_ulp(magnitude: Array, storage: str, xp: Any) -> Array:
    """Half the distance between neighbours of a type at each magnitude; none at 0, which stochastic rounding keeps."""
    _, exponent = xp.frexp(magnitude)
    return xp.ldexp(xp.where(magnitude > 0, 0.5 * UNIT_ROUNDOFF[storage], 0.0), exponent)


# ------------------------------------------------------------------------------------------------ plans


def _plan(
    kernel: str, per_thread: int, corrections: tuple[float, float]
) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    hyperparameters = (RATE, BETA1, BETA2, *corrections, EPSILON, DECAY)

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        N = problem["N"]
        blocks = ceil_div(N, block * per_thread)
        args = ("params", "grads", "m", "v", N, *hyperparameters)
        return (Launch(f"{kernel}<{problem.c_type}>", (blocks,), (block,), args),)

    return plan


def _plan3(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    blocks = ceil_div(problem["N"], block * PER_THREAD)
    rest = ("grads", "m", "v", problem["N"], "scalars", "decays")
    if has_master(problem):
        return (Launch("adamw3_master", (blocks,), (block,), ("params", "master", *rest, "seed")),)
    return (Launch(f"adamw3<{problem.c_type}>", (blocks,), (block,), ("params", *rest)),)


def _traffic(problem: Problem) -> float:
    """The gradient and twice each moment, which are fp32; then twice the parameter, or twice its master and once the
    parameter. What tells one step from another is small, or an argument of the kernel."""
    item = ITEM_SIZES[problem.storage]
    weights = 2 * ITEM_SIZES["fp32"] + item if has_master(problem) else 2 * item
    return float(problem["N"] * (item + 4 * ITEM_SIZES["fp32"] + weights))


# ----------------------------------------------------------------------------------------------- family


NOT_TRAINING = Rule("training = 0: only version 3 trains", lambda problem: not problem["training"])
# A master's parameters are rounded to the upper half of fp32, which fp16 is not.
NOT_FP16 = Rule("fp32 or bf16 where training = 1", lambda problem: not problem["training"] or problem.dtype != "fp16")


def _shapes(N: int, why: str) -> tuple[CheckShape, CheckShape]:
    return CheckShape({"N": N, "training": 0}, why), CheckShape({"N": N, "training": 1}, why, versions=(3,))


FAMILY = Family(
    name="adamw",
    summary="one step of the AdamW optimiser",
    sizes={"N": "number of parameters", "training": "1: scaled gradients, weight decay by group, fp32 master"},
    dtypes=DTYPES,
    presets={
        "default": {"N": 1 << 20, "training": 0},
        "small": {"N": 16 * 1024, "training": 0},
        "large": {"N": 48 << 20, "training": 0},
    },
    check_shapes=(
        *_shapes(1, "one parameter"),
        *_shapes(3, "fewer than a thread of version 2 has"),
        *_shapes(64, "whole packets, fewer than a block has threads"),
        *_shapes(1031, "prime, past the largest block"),
        *_shapes(4101, "a whole block of every size, then a part of one"),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1,
            "one thread per parameter: the formulas as they stand, moments updated in memory",
            _plan("adamw1", 1, CORRECTIONS),
            DTYPES,
            rules=(NOT_TRAINING,),
        ),
        Version(
            2,
            "as 1, everything in registers, four parameters per thread; moments as two FMAs each",
            _plan("adamw2", PER_THREAD, INVERSES),
            DTYPES,
            rules=(NOT_TRAINING,),
        ),
        Version(
            3,
            "as 2, as a training step calls it: scalars by pointer, weight decay by group, fp32 master weights, "
            "stochastic rounding, all tensors in one launch",
            _plan3,
            DTYPES,
            rules=(NOT_FP16,),
        ),
    ),
    traffic=_traffic,
    flags=("training",),
)
