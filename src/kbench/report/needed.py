"""How much more has to be measured before an unclear row is settled."""

from __future__ import annotations

import numpy as np

from kbench.report.noise import Noise
from kbench.report.quantiles import t_quantile

MAX_ROUNDS = 1000  # beyond, nobody waits for it
NEVER = -1  # in the arrays of this file

# t falls smoothly with 1/df: between these it is interpolated, because thousands of rows ask for one each.
_DF = np.geomspace(0.5, 10000.0, 48)
_STEPS = 30


def needed_rounds(
    noise: Noise, rounds: np.ndarray, width: np.ndarray, fixed: float, tail: float, rerun_before: bool = True
) -> np.ndarray:
    """Further rounds a side until half the interval is `width`, if the estimate stays where it is; NEVER if none do.

    width: per row, of the log ratio. fixed: a variance that no number of rounds lessens. rerun_before: both sides may
    be measured again; else the first one stays as it is.
    """
    quantiles = np.log([t_quantile(tail, float(df)) for df in _DF])

    def t(df: np.ndarray) -> np.ndarray:
        quantile: np.ndarray = np.exp(np.interp(-1.0 / np.maximum(df, _DF[0]), -1.0 / _DF, quantiles))
        return quantile

    before, after = noise.round_variance.T
    stays = fixed if rerun_before else fixed + before / rounds[:, 0]
    lessened = before + after if rerun_before else after
    most = MAX_ROUNDS + rounds.max(axis=1)

    def df_at(number: np.ndarray) -> np.ndarray:
        other = np.maximum(number, rounds[:, 0]) if rerun_before else rounds[:, 0]
        total: np.ndarray = noise.prior_df + other + np.maximum(number, rounds[:, 1]) - 2
        return total

    # More rounds mean more degrees of freedom, hence a smaller t, hence fewer rounds: bisection on the number.
    low, high = np.ones(len(rounds)), most.astype(np.float64)

    def wide(number: np.ndarray) -> np.ndarray:
        answer: np.ndarray = t(df_at(number)) * np.sqrt(stays + lessened / number) > width
        return answer

    hopeless = wide(high) | ~(width > 0.0)
    for _ in range(_STEPS):
        middle = 0.5 * (low + high)
        too_few = wide(middle)
        low, high = np.where(too_few, middle, low), np.where(too_few, high, middle)
    there = rounds.min(axis=1) if rerun_before else rounds[:, 1]
    return np.where(hopeless, NEVER, np.maximum(np.ceil(high - 1e-6) - there, 1)).astype(np.int64)


def needed_samples(
    noise: Noise,
    rounds: np.ndarray,
    samples: np.ndarray,
    quantile: np.ndarray,
    width: np.ndarray,
    fixed: float,
    rerun_before: bool = True,
) -> np.ndarray:
    """Further samples a side in the rounds there are, as `needed_rounds`. quantile: t of each row, as it is now."""
    lessened = noise.sampling / rounds
    if not rerun_before:
        lessened[:, 0] = 0.0
    stays = fixed + noise.variance(rounds) - lessened.sum(axis=1)
    room = (width / quantile) ** 2 - stays
    factor = lessened.sum(axis=1) / np.where(room > 0.0, room, np.inf)
    more = np.ceil((factor - 1.0) * samples.max(axis=1))
    possible = (room > 0.0) & (width > 0.0) & (factor <= MAX_ROUNDS)
    return np.where(possible, np.maximum(more, 1), NEVER).astype(np.int64)
