"""The verdicts of all rows at once, on arrays. `kbench.report.decide` puts them into words.

Everything here is a log ratio turned so that above 0 is worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from kbench.report.decision import Verdict
from kbench.report.estimate import Estimates
from kbench.report.family_wise import Shift, reference_rows, shift_of, tail_of
from kbench.report.needed import NEVER, needed_rounds, needed_samples
from kbench.report.noise import MIN_REFERENCE, Noise, noise_of, session_variance
from kbench.report.quantiles import t_quantile

# What an array of verdicts holds is a place in this tuple: numpy makes plain text of an enum's texts.
VERDICTS = (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.UNCLEAR, Verdict.NOT_COMPARABLE)
FASTER, SLOWER, SAME, UNCLEAR, NOT_COMPARABLE = range(len(VERDICTS))

# Differences of logarithms of numbers that are equal on paper: 2 us and 0.5 us more are not more than 0.5 us apart.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Limits:
    """Of each row. See `Rule` for what is not said here.

    sign: 1 where lower is better, else -1. floor: in the metric's unit. kernels: a number for each kernel that rows
    are of.
    """

    sign: np.ndarray
    threshold: np.ndarray
    floor: np.ndarray
    min_rounds: np.ndarray
    min_samples: np.ndarray
    identical: np.ndarray
    kernels: np.ndarray


@dataclass(frozen=True)
class Judgement:
    """Of each row.

    verdict: places in `VERDICTS`. worse: the log ratio. deviation: `worse` less the machine's shift, which is 0 unless
    the machine differs. half: half the interval of either, infinite where unknown. margin: what it has to exceed.
    enough: rounds and samples. needed_rounds, needed_samples: NEVER where they settle nothing or nothing is to be
    settled.
    """

    verdict: np.ndarray
    worse: np.ndarray
    deviation: np.ndarray
    half: np.ndarray
    margin: np.ndarray
    enough: np.ndarray
    needed_rounds: np.ndarray
    needed_samples: np.ndarray
    shift: Shift
    decided: int
    noise: Noise
    session: float


def judge(
    rows: Estimates, limits: Limits, report_error: float, rerun_before: bool = True, noise: Noise | None = None
) -> Judgement:
    """Verdicts of rows: see `docs/report_decisions.md`. noise: that of the rows, where it is known already."""
    worse = limits.sign * (rows.location[:, 1] - rows.location[:, 0])
    margin = np.maximum(np.log1p(limits.threshold), np.log1p(limits.floor / np.exp(rows.location.min(axis=1))))
    enough: np.ndarray = (rows.rounds.min(axis=1) >= limits.min_rounds) & (
        rows.samples.min(axis=1) >= limits.min_samples
    )
    decided = int((enough & ~limits.identical).sum())
    tail = tail_of(decided, report_error)

    noise = noise or noise_of(rows)
    own = noise.variance(rows.rounds)
    known = noise.df > 0
    shift = shift_of(worse, np.where(known, np.sqrt(own), np.nan), limits.identical, limits.kernels)
    moved = shift.log if shift.machine_differs else 0.0
    deviation = worse - moved
    session = _session(deviation, own, known, limits.identical, shift.machine_differs)

    quantile = _quantiles(tail, noise.df)
    # A small shift may be the machine's or not: no row may be a regression by it alone.
    slack = 0.0 if shift.machine_differs else abs(shift.log)
    fixed = session + (shift.error**2 if shift.machine_differs else 0.0)
    half = np.where(known, quantile * np.sqrt(own + fixed) + slack, np.inf)
    verdict = _verdicts(deviation, half, margin, enough, limits.identical, shift.machine_differs)

    width = np.where(np.abs(deviation) > margin, np.abs(deviation), margin - np.abs(deviation)) - slack
    open_rows = (verdict == UNCLEAR) & enough & known
    more_rounds = np.full(len(rows), NEVER)
    more_samples = np.full(len(rows), NEVER)
    if open_rows.any():
        chosen = noise.only(open_rows)
        counts, width = rows.rounds[open_rows], width[open_rows]
        more_rounds[open_rows] = needed_rounds(chosen, counts, width, fixed, tail, rerun_before)
        more_samples[open_rows] = needed_samples(
            chosen, counts, rows.samples[open_rows], quantile[open_rows], width, fixed, rerun_before
        )
    return Judgement(
        verdict, worse, deviation, half, margin, enough, more_rounds, more_samples, shift, decided, noise,
        math.sqrt(session),
    )  # fmt: skip


def _session(
    deviation: np.ndarray, variance: np.ndarray, known: np.ndarray, identical: np.ndarray, differs: bool
) -> float:
    """The variance between sessions, from rows of unchanged code; from all if the machine differs and those are few."""
    if not differs and identical.sum() < MIN_REFERENCE:
        return 0.0
    chosen = reference_rows(identical) & known
    return session_variance(deviation[chosen], variance[chosen])


def _quantiles(tail: float, df: np.ndarray) -> np.ndarray:
    kinds, place = np.unique(np.maximum(df, 1e-9), return_inverse=True)
    # Rows without degrees of freedom get no interval; what stands here is not used.
    normal = -NormalDist().inv_cdf(tail)
    quantiles = np.array([t_quantile(tail, float(kind)) if kind >= 0.25 else normal for kind in kinds])
    found: np.ndarray = quantiles[place]
    return found


def _verdicts(
    deviation: np.ndarray,
    half: np.ndarray,
    margin: np.ndarray,
    enough: np.ndarray,
    identical: np.ndarray,
    machine_differs: bool,
) -> np.ndarray:
    """Places in `VERDICTS`. Only rows that the machine's shift does not explain are decided where there is one."""
    beyond = (np.abs(deviation) > margin + _ROUNDING) & (np.abs(deviation) > half) & enough & ~identical
    within = (np.abs(deviation) + half <= margin) & enough
    verdicts = np.full(len(deviation), NOT_COMPARABLE if machine_differs else UNCLEAR)
    if not machine_differs:
        verdicts[identical | within] = SAME
    verdicts[beyond & (deviation > 0.0)] = SLOWER
    verdicts[beyond & (deviation < 0.0)] = FASTER
    return verdicts
