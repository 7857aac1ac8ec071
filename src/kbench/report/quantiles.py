"""Quantiles of Student's t and of F, far out in the tails: a report of many rows asks for one in a million.

Both tails are the regularised incomplete beta function, summed as the continued fraction of DLMF 8.17.22.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import NormalDist

# The fraction needs about the root of its larger parameter, which callers keep below a million.
_MAX_TERMS = 5000
_TINY = 1e-300
# From here on t and the normal differ by less than 1e-5 at any tail that is asked for.
_AS_GOOD_AS_NORMAL = 1e7


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for 0 <= x <= 1 and a, b > 0, to about ten digits."""
    if not (0.0 <= x <= 1.0 and a > 0.0 and b > 0.0):
        raise ValueError(f"needs 0 <= x <= 1 and a, b > 0, not {x}, {a}, {b}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction is quick on the other side only
        return 1.0 - incomplete_beta(1.0 - x, b, a)
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    return front / _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)), front to back: numerator and denominator grow by one term at a time."""
    value = above = 1.0
    below = 0.0
    for term in range(1, _MAX_TERMS):
        m, odd = divmod(term, 2)
        if odd:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        above = 1.0 + step / above or _TINY
        below = 1.0 / (1.0 + step * below or _TINY)
        value *= above * below
        if abs(above * below - 1.0) < 1e-13:
            break
    return value


def t_tail(t: float, df: float) -> float:
    """How often Student's t with df degrees of freedom lies above t >= 0."""
    return 0.5 * incomplete_beta(df / (df + t * t), df / 2.0, 0.5)


def f_tail(value: float, df: float, df_below: float) -> float:
    """How often F with df and df_below degrees of freedom lies above value >= 0."""
    return incomplete_beta(df_below / (df_below + df * value), df_below / 2.0, df / 2.0)


@functools.lru_cache(maxsize=4096)
def t_quantile(tail: float, df: float) -> float:
    """The t that is exceeded with probability `tail`, 0 < tail < 0.5; df > 0, infinity for the normal distribution."""
    if not (0.0 < tail < 0.5 and df > 0.0):
        raise ValueError(f"needs 0 < tail < 0.5 and df > 0, not {tail}, {df}")
    normal = -NormalDist().inv_cdf(tail)
    if df > _AS_GOOD_AS_NORMAL:
        return normal
    return _solve(lambda t: t_tail(t, df), tail, normal)


@functools.lru_cache(maxsize=4096)
def f_quantile(tail: float, df: float, df_below: float) -> float:
    """The value that F exceeds with probability `tail`."""
    return _solve(lambda value: f_tail(value, df, df_below), tail, 1e-6)


def _solve(tail_above: Callable[[float], float], tail: float, low: float) -> float:
    """Where a falling function reaches `tail`: bisection between `low` and the first power of two times it beyond."""
    high = low
    while tail_above(high) > tail:
        low, high = high, 2.0 * high
    while high - low > 1e-10 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if tail_above(middle) > tail else (low, middle)
    return 0.5 * (low + high)
