"""Learning-rate schedules: one rate for each step, known before the first.

All rise linearly over the warm-up, then hold or fall towards final_fraction of the rate. Their last step stands one
short of the end, so that the rate it takes is near the final one and not equal to it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kbench.errors import UsageError

KINDS = ("cosine", "linear", "constant", "wsd")


def rates(kind: str, steps: int, rate: float, warmup: int = 0, final_fraction: float = 0.0) -> npt.NDArray[np.float64]:
    """The learning rate of each of `steps` steps, float64 (steps,).

    kind: `cosine`, half a wave down; `linear`; `constant`, which warms up as the others do when asked to; `wsd`
    (warm-up, stable, decay), constant until 4/5 of all steps, and then down as 1 - sqrt of the part of the rest that
    is done (Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", 2024).
    warmup: steps of the warm-up; step s of it, counted from 0, takes rate (s + 1) / warmup, so that none takes 0.
    final_fraction: what the rate falls to, as a fraction of it; without meaning for `constant`.
    Raises UsageError for an unknown kind and numbers out of range.
    """
    _require(kind, steps, rate, warmup, final_fraction)
    step = np.arange(steps, dtype=np.float64)
    # A warm-up that lasts beyond 4/5 is followed by the decay at once, from the full rate on.
    start = max(4 * steps // 5, warmup) if kind == "wsd" else warmup
    done = (step - start) / max(steps - start, 1)
    done = np.clip(done, 0.0, 1.0)  # the warm-up's steps are before the start; they are overwritten below
    result = rate - _fallen(kind, done) * (rate - rate * final_fraction)
    result[:warmup] = rate * (step[:warmup] + 1.0) / max(warmup, 1)
    return result


def _fallen(kind: str, done: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How much of the way from the full rate to the final one lies behind, where `done` of the decay is done."""
    match kind:
        case "cosine":
            return np.asarray(0.5 * (1.0 - np.cos(np.pi * done)))
        case "linear":
            return done
        case "wsd":
            return np.asarray(np.sqrt(done))
    return np.zeros_like(done)


def _require(kind: str, steps: int, rate: float, warmup: int, final_fraction: float) -> None:
    if kind not in KINDS:
        raise UsageError(f"there is no learning-rate schedule '{kind}'", f"there are {', '.join(KINDS)}")
    if steps < 0:
        raise UsageError(f"{steps} steps: a schedule needs 0 or more")
    if not (math.isfinite(rate) and rate >= 0.0):
        raise UsageError(f"a learning rate of {rate:g}: it is a finite number, 0 or more")
    if not 0 <= warmup <= steps:
        raise UsageError(f"{warmup} steps of warm-up in a run of {steps}: choose 0 to {steps}")
    if not 0.0 <= final_fraction <= 1.0:
        raise UsageError(f"a final learning rate of {final_fraction:g} times the rate: choose 0 to 1")
