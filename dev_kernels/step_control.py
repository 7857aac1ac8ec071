"""The numbers of a training step, between the norm of the gradients and the optimiser:

loss = weight * sum of losses,  norm = sqrt(squares),  scale = min(1, max_norm / norm), or 0 to skip the step

where loss or norm is not finite, or too many standard deviations above the mean of its window, which holds it and
those of earlier steps. It reads this step's row of the schedule, makes this step's seed, and advances the step, so that
a step captured once can be replayed without the host. A value that is not finite is reported and kept out of the
windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kbench.family import (
    ITEM_SIZES,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    uniform,
)

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
MICRO_STEPS = 3  # whose losses are added up
SPREAD = 0.02  # of a window, as a share of the value that is tested against it


# ------------------------------------------------------------------------------------------- what is drawn


@dataclass(frozen=True)
class Situation:
    """What a step may find.

    clip: the largest norm as a share of the norm; 0: no clipping. loss, norm: whether the value is "low" or "high" for
    its window, or an "outlier"; "" also high, but not tested. full: whether the windows are. past_end: whether the
    schedule has fewer steps.
    """

    clip: float
    loss: str
    norm: str
    full: bool = True
    past_end: bool = False


# Each seed and each shape has another, so that shapes whose N + W differ see all of them.
SITUATIONS = (
    Situation(0.0, "", ""),
    Situation(0.37, "low", "high"),
    Situation(1.9, "outlier", "low"),
    Situation(0.37, "high", "outlier"),
    Situation(0.61, "outlier", "outlier", full=False),
    Situation(0.61, "high", "low", past_end=True),
)


def situation(problem: Problem, base_seed: float) -> Situation:
    return SITUATIONS[(int(base_seed) + problem["N"] + problem["W"]) % len(SITUATIONS)]


class _Draws:
    """The draws of a problem's tensors; each finds the situation by the base seed, which is drawn first."""

    def __init__(self, problem: Problem):
        self._problem = problem
        self._S, self._W = problem["S"], problem["W"]

    def _situation(self, drawn: Mapping[str, Array]) -> Situation:
        return situation(self._problem, drawn["step"][1])

    def step(self, rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        import numpy as np

        base = int(rng.integers(0, 1 << 32))
        index, more = int(rng.integers(0, self._S)), int(rng.integers(0, 5))
        past_end = situation(self._problem, base).past_end
        return np.array([self._S + more if past_end else index, base])

    def losses(self, rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        """Of a mean that differs from seed to seed: else what an earlier launch has left might pass for right."""
        losses: Array = rng.uniform(0.0, 8.0, shape)
        losses *= MICRO_STEPS * rng.uniform(0.5, 1.5)
        return losses

    def filled(self, rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        more: Array = rng.integers(0, self._W, shape)
        return more + 2 * self._W if self._situation(drawn).full else more

    def window(self, rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        """Values to either side of one and a half spreads below or above what is tested against them. A window that is
        not full holds the like, to show if it is used all the same."""
        found = self._situation(drawn)
        window: Array = rng.uniform(-1.0, 1.0, shape)
        for row, kind in enumerate((found.loss, found.norm)):
            window[row] += 1.5 if kind == "low" else -1.5
            value = _values(drawn, 1.0 / (self._problem["N"] * MICRO_STEPS))[row]
            window[row] = value * (1.0 + SPREAD * window[row])
        return window

    def settings(self, rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        """Limits lie far from what is tested: a decision must not hang on a rounding error."""
        import numpy as np

        found = self._situation(drawn)
        weight = 1.0 / (self._problem["N"] * MICRO_STEPS)
        place, limits = int(drawn["filled"][0]) % self._W, []
        for row, kind in enumerate((found.loss, found.norm)):
            z = float(_Test(drawn["window"][row], place, _values(drawn, weight)[row], np).z)
            beyond = 0.6 * z if z > 0 else 1.0
            limits.append({"": 0.0, "outlier": beyond}.get(kind, max(z, 0.0) + 1.0))
        max_norm = found.clip * _values(drawn, weight)[1]
        return np.array([weight, max_norm, *limits, BETA1, BETA2, EPSILON, 0.0])


def _values(inputs: Mapping[str, Array], weight: float) -> tuple[float, float]:
    """Loss and norm."""
    return weight * float(inputs["losses"].sum()), math.sqrt(float(inputs["squares"][0]))


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    N, S, W = (problem[name] for name in ("N", "S", "W"))
    draws = _Draws(problem)
    return (
        # index of the step, and the seed of the run; the index is advanced
        Tensor("step", (2,), "uint32", "inout", ("k",), draw=draws.step),
        Tensor("losses", (N,), "fp32", "in", ("i",), draw=draws.losses),
        Tensor("squares", (1,), "fp32", "in", ("k",), draw=uniform(0.5, 4.0)),
        # how many losses and norms the windows have been given; ring buffers, whose next place is that modulo W
        Tensor("filled", (1,), "uint32", "inout", ("k",), draw=draws.filled),
        Tensor("window", (2, W), "fp32", "inout", ("value", "place"), draw=draws.window),
        # rate, 1 - beta1^t, 1 - beta2^t of each step
        Tensor("schedule", (S, 3), "fp32", "in", ("step", "k"), draw=uniform(1e-3, 1.0)),
        # weight of a loss, largest norm (0: no clipping), limits of z of loss and norm (0: no test), beta1, beta2,
        # epsilon, and nothing
        Tensor("settings", (8,), "fp32", "in", ("k",), draw=draws.settings),
        # rate, beta1, beta2, 1 - beta1^t, 1 - beta2^t, epsilon, scale, and nothing: as adamw reads them
        Tensor("scalars", (8,), "fp32", "out", ("k",)),
        Tensor("seed", (1,), "uint32", "out", ("k",)),
        # loss, norm, rate, scale, z of the loss, z of the norm, index of the step, 1 if it is skipped
        Tensor("report", (8,), "fp32", "out", ("k",)),
    )


# -------------------------------------------------------------------------------------------- reference


class _Test:
    """How far `value` is above the mean of a full window in which it takes the place of an element.

    value_error: of `value`. With e the elements minus `value`, z = -mean(e) / s, and its error is that of

    - the value: the derivative of z is (1 - 1/W - z^2/W) / s, at most 1 / s, because z^2 < W;
    - the mean: the rounding of each e, a sum, a quotient;
    - s: that of each e, which counts at most as their root mean square by Cauchy-Schwarz; of each deviation and square;
      of the sum, the quotient and the root; of the mean only by its square, since deviations add up to 0;
    - the last quotient.
    """

    def __init__(self, window: Array, place: int, value: float, xp: Any):
        size = window.size
        self._e = xp.where(xp.arange(size) == place, 0.0, window - value)
        self._mean = float(self._e.mean())
        self._s = math.sqrt(float(((self._e - self._mean) ** 2).mean()))
        self.z = -self._mean / self._s if self._s > 0 else 0.0
        self._xp = xp

    def error(self, value_error: float, error: ErrorModel) -> float:
        if self._s == 0:
            return 0.0  # all elements are the value itself
        xp, s, unit, of_sum = self._xp, self._s, error.fp32, error.accumulation(self._e.size)
        of_mean = (of_sum + 2.0 * unit) * float(xp.abs(self._e).mean())
        root_mean_square = math.sqrt(float((self._e**2).mean()))
        of_s = unit * root_mean_square + of_mean**2 / (2.0 * s) + (0.5 * of_sum + 4.0 * unit) * s
        return (value_error + of_mean + abs(self.z) * of_s) / s + 2.0 * unit * abs(self.z)


def seed_of_step(base: int, index: int) -> int:
    """The seed of one step of a run: the finaliser of MurmurHash3 (Appleby, 2011), a bijection, so that all steps of a
    run differ."""
    bits = (base + 0x9E3779B9 * index) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """The loss is a sum and a product more, the norm a root; a quotient by it is rounded twice. What is read and passed
    on is exact."""
    W, unit = problem["W"], error.fp32
    index, base, pushed = (int(inputs[name][k]) for name, k in (("step", 0), ("step", 1), ("filled", 0)))
    weight, max_norm, loss_limit, norm_limit, beta1, beta2, epsilon = (float(inputs["settings"][k]) for k in range(7))
    rate, correction1, correction2 = (float(x) for x in inputs["schedule"][min(index, problem["S"] - 1)])
    loss, norm = _values(inputs, weight)
    loss_error = (error.accumulation(problem["N"]) + 2.0 * unit) * weight * float(xp.abs(inputs["losses"]).sum())
    norm_error = unit * norm
    place = pushed % W
    zs, z_errors = [0.0, 0.0], [0.0, 0.0]
    if pushed >= W:
        for row, (value, value_error) in enumerate(((loss, loss_error), (norm, norm_error))):
            test = _Test(inputs["window"][row], place, value, xp)
            zs[row], z_errors[row] = test.z, test.error(value_error, error)
    skipped = any(0 < limit < z for limit, z in zip((loss_limit, norm_limit), zs, strict=True))
    clipped = max_norm > 0 and norm > max_norm
    scale = 0.0 if skipped else max_norm / norm if clipped else 1.0
    scale_error = 3.0 * unit * scale if clipped else 0.0
    here = xp.arange(W) == place
    pushed_values = xp.asarray([[loss], [norm]])
    pushed_errors = xp.asarray([[loss_error], [norm_error]])

    def answer(values: list[float], errors: list[float] | None = None) -> Expected:
        return Expected(xp.asarray(values, dtype=xp.float64), xp.asarray(errors) if errors else 0.0)

    return {
        "step": answer([float(index + 1), float(base)]),
        "filled": answer([float(pushed + 1)]),
        "window": Expected(xp.where(here, pushed_values, inputs["window"]), xp.where(here, pushed_errors, 0.0)),
        "scalars": answer(
            [rate, beta1, beta2, correction1, correction2, epsilon, scale, 0.0], [0.0] * 6 + [scale_error, 0.0]
        ),
        "seed": answer([float(seed_of_step(base, index))]),
        "report": answer(
            [loss, norm, rate, scale, *zs, float(index), float(skipped)],
            [loss_error, norm_error, 0.0, scale_error, *z_errors, 0.0, 0.0],
        ),
    }


# ------------------------------------------------------------------------------------------- plan and family


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    args = (
        "losses", problem["N"], "squares", "schedule", problem["S"], "settings",
        "step", "window", problem["W"], "filled", "scalars", "seed", "report",
    )  # fmt: skip
    return (Launch("step_control1", (1,), (block,), args),)


def _traffic(problem: Problem) -> float:
    """Losses and windows once, and 37 numbers: of the schedule one row."""
    return float(ITEM_SIZES["fp32"] * (problem["N"] + 2 * problem["W"] + 37))


def _shape(N: int, S: int, W: int, why: str) -> CheckShape:
    return CheckShape({"N": N, "S": S, "W": W}, why)


FAMILY = Family(
    name="step_control",
    summary="the numbers of a training step: clip scale, outlier test, learning rate, next step",
    sizes={"N": "number of losses", "S": "steps of the schedule", "W": "values in a window of the outlier test"},
    dtypes=("fp32",),
    # default: a batch of 64 sequences of 1024 tokens.
    presets={"default": {"N": 65536, "S": 1000, "W": 128}, "small": {"N": 4096, "S": 20, "W": 32}},
    check_shapes=(
        _shape(1, 1, 1, "one loss, a window of one value, which has no spread"),
        _shape(3, 5, 2, "less than a packet of losses, a window of two"),
        _shape(64, 3, 8, "whole packets, fewer than a block has threads"),
        _shape(257, 7, 33, "one past whole packets, a window of one past a warp"),
        _shape(1031, 4, 128, "prime; the window of the default"),
        _shape(4613, 9, 1030, "prime; a window larger than the largest block"),
        _shape(20003, 2, 101, "several packets under way in each thread of every block, and a rest"),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1,
            "one block: packets of losses, four under way; means and deviations afresh from the windows",
            _plan1,
            ("fp32",),
        ),
    ),
    traffic=_traffic,
)
