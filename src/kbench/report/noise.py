"""The error of each row's log ratio, learnt from all rows of a report together.

A round's midmean deviates for two reasons: its own few samples (`spread` / kept, known from within the round), and what
changes between rounds, `between`, which only the scatter of rounds shows. Three rounds a side say little about that:
four degrees of freedom, whose t quantile for one row in two hundred is thirteen. But all rows were measured on the same
machine at the same times, so they are asked together:

1. `spread` of each side is drawn towards that of the others, as far as sides are alike.
2. `between` is the one value at which the rows' scatter is what it should be (Paule and Mandel's equation, J. Res.
   NBS 87, 1982), each row counted up to a limit, so that one disturbed row does not speak for all.
3. What is left of each row's scatter over the expected one is drawn towards the others' in the same way as in 1.

Drawing towards each other: true variances are taken to vary like an inverse chi-squared with some degrees of freedom,
so that estimates of them vary like F (Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004). The degrees of freedom are found
by maximum likelihood: many where rows are alike, few where each is its own. A row whose scatter does not fit with the
others at all stands for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kbench.report.estimate import Estimates
from kbench.report.quantiles import f_quantile

# Degrees of freedom that a prior may have; the last is as good as "all alike" (t and normal quantiles differ by 1%).
_PRIOR_DF = np.geomspace(0.25, 1000.0, 28)
# Log likelihood that the prior may lose for fewer degrees of freedom. Too few make wide intervals, too many make false
# regressions; doubt is settled in favour of the former, but half a unit (one standard error) would let through one in
# a hundred of the slowdowns that benchmarks/report_simulation.py puts in.
_CAUTION = 0.1
# Rows that a prior is learnt from at most: more make it no better, only slower.
_LEARNT_FROM = 2000
# A scatter that rows like the others have once in a thousand is not like the others.
_UNLIKE = 1e-3
# No clock tells more than a millionth of a time: samples that are all equal have that error, not none.
_FINEST = 1e-12
# Rows of the same machine code that are needed before their ratios say something about the whole report.
MIN_REFERENCE = 8
# Standard errors up to which such a row's deviation counts in full.
_FAR = 3.0


@dataclass(frozen=True)
class Prior:
    """Where variances of many rows lie: near `value`, as closely as estimates of `df` degrees of freedom would."""

    value: float
    df: float


@dataclass(frozen=True)
class Noise:
    """Errors of log ratios. Variances; per row (first axis), per side where there is a second axis.

    round_variance: of one round's midmean about its side's true value, [rows, 2]. sampling: the part of it that more
    samples in a round would lessen. df: degrees of freedom of the rows' variances, 0 if nothing is known of them.
    prior_df: the part of df that comes from other rows. between: the relative standard deviation between rounds
    of all rows together.
    """

    round_variance: np.ndarray
    sampling: np.ndarray
    df: np.ndarray
    prior_df: np.ndarray
    between: float

    def only(self, chosen: np.ndarray) -> Noise:
        """That of some rows."""
        return Noise(
            self.round_variance[chosen], self.sampling[chosen], self.df[chosen], self.prior_df[chosen], self.between
        )

    def variance(self, rounds: np.ndarray) -> np.ndarray:
        """Of each row's log ratio."""
        variance: np.ndarray = (self.round_variance / rounds).sum(axis=1)
        return variance


def noise_of(rows: Estimates) -> Noise:
    """What the scatter of these rows says about their errors."""
    spread = _drawn(rows.spread.ravel(), rows.spread_df.ravel())[0].reshape(-1, 2)
    sampling = spread * rows.per_kept
    df = rows.round_df
    between = _between(rows, sampling)
    expected = np.maximum(between + sampling, _FINEST)
    scale, total_df, prior_df = _drawn((rows.scatter / expected).sum(axis=1) / np.maximum(df, 1), df, outliers=True)
    # Rounds that agree better than their own samples allow do so by chance, or because times come in ticks.
    round_variance = np.maximum(expected * scale[:, None], np.maximum(sampling, _FINEST))
    return Noise(round_variance, sampling * np.maximum(scale, 1.0)[:, None], total_df, prior_df, math.sqrt(between))


def _between(rows: Estimates, sampling: np.ndarray) -> float:
    """The variance between rounds at which the rows' scatter sums up to its degrees of freedom; at least 0."""
    known = rows.round_df > 0
    df = rows.round_df[known]
    scatter, sampling = rows.scatter[known], sampling[known]
    limit = _limits(df, _PRIOR_DF[-1])

    def excess(between: float) -> float:
        found = (scatter / np.maximum(between + sampling, _FINEST)).sum(axis=1)
        return float(np.minimum(found, df * limit).sum() - df.sum())

    if not len(df) or excess(0.0) <= 0.0:
        return 0.0
    return _falling_root(excess, float(scatter.max()))


def _falling_root(function: Callable[[float], float], high: float) -> float:
    """Where a falling function, positive at 0, crosses 0; high: a first guess of the other end, above 0."""
    while function(high) > 0.0:
        high *= 4.0
    low = 0.0
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) > 0.0 else (low, middle)
    return 0.5 * (low + high)


def _limits(df: np.ndarray, df_below: float) -> np.ndarray:
    """The F that is unlike the others, for each row's degrees of freedom."""
    kinds, place = np.unique(df, return_inverse=True)
    limits = np.array([f_quantile(_UNLIKE, float(kind), float(df_below)) if kind else np.inf for kind in kinds])
    found: np.ndarray = limits[place]
    return found


def _drawn(
    variances: np.ndarray, df: np.ndarray, *, outliers: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variances drawn towards each other, the degrees of freedom that they have now, and how many of those are lent.

    outliers: some may be of another kind altogether: they count up to a limit, and stand for themselves.
    """
    known = df > 0
    if not known.any():
        return np.zeros(len(df)), np.zeros(len(df)), np.zeros(len(df))
    counted = np.minimum(variances, _limits(df, _PRIOR_DF[-1])) if outliers else variances
    prior = fit_prior(counted[known], df[known])
    # Others cannot lend more than they have.
    lent = np.minimum(prior.df, df.sum() - df)
    if outliers:
        lent = np.where(variances > prior.value * _limits(df, prior.df), 0.0, lent)
    return (lent * prior.value + df * variances) / np.maximum(lent + df, 1e-9), lent + df, lent


def fit_prior(variances: np.ndarray, df: np.ndarray) -> Prior:
    """The prior under which these estimates, each of df > 0 degrees of freedom, are likeliest, on the cautious side."""
    if len(variances) > _LEARNT_FROM:
        chosen = np.linspace(0, len(variances) - 1, _LEARNT_FROM).astype(np.int64)
        variances, df = variances[chosen], df[chosen]
    positive = variances[variances > 0.0]
    if not len(positive):
        return Prior(0.0, float(_PRIOR_DF[-1]))
    prior_df = _PRIOR_DF[:, None]
    squares, weight = df * variances, (df + prior_df) / 2.0
    # For each number of degrees of freedom, the value at which the likelihood's slope is 0.
    low = np.full(len(_PRIOR_DF), math.log(float(positive.min())) - 10.0)
    high = np.full(len(_PRIOR_DF), math.log(float(positive.max())) + 10.0)
    for _ in range(24):
        value = 0.5 * (low + high)
        slope = (weight * (squares / (prior_df * np.exp(value)[:, None] + squares))).sum(axis=1) - df.sum() / 2.0
        low, high = np.where(slope > 0.0, value, low), np.where(slope > 0.0, high, value)
    value = 0.5 * (low + high)
    likelihood = -(weight * np.log1p(squares / (prior_df * np.exp(value)[:, None]))).sum(axis=1)
    kinds, counts = np.unique(df, return_counts=True)
    likelihood += _constants(kinds, counts) - df.sum() / 2.0 * (np.log(_PRIOR_DF) + value)
    best = int(np.argmax(likelihood >= likelihood.max() - _CAUTION))
    return Prior(math.exp(float(value[best])), float(_PRIOR_DF[best]))


def _constants(kinds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The likelihood's part that depends on degrees of freedom alone, for each of the prior's."""
    return np.array(
        [
            sum(
                int(count) * (math.lgamma((kind + prior_df) / 2.0) - math.lgamma(prior_df / 2.0))
                for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)
            )
            for prior_df in _PRIOR_DF.tolist()
        ]
    )


def session_variance(deviations: np.ndarray, variances: np.ndarray) -> float:
    """What log ratios of rows that did not change vary by beyond their errors: between the two sides' sessions.

    Rounds of one side cannot show it. deviations: such rows' log ratios. 0 for fewer than `MIN_REFERENCE` of them.
    """
    if len(deviations) < MIN_REFERENCE:
        return 0.0
    squares, variances = deviations**2, np.maximum(variances, _FINEST)
    # A row counts up to `_FAR` standard errors, which takes 0.5% off a normal distribution's variance.
    expected = 0.995 * len(squares)

    def excess(session: float) -> float:
        return float(np.minimum(squares / (variances + session), _FAR**2).sum() - expected)

    return _falling_root(excess, float(squares.max())) if excess(0.0) > 0.0 else 0.0
