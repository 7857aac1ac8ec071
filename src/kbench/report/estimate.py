"""From raw samples to one estimate a side: midmeans of the logarithms of each round, averaged over rounds.

The logarithm, because a report asks for ratios. The midmean (the mean of the middle half) of a round, because times of
a kernel have a long tail. The median would ignore it too; but where times come in ticks of the timer it jumps from
tick to tick, and its error is zero once half of the samples share one. The midmean moves smoothly, and its error is
known: Tukey and McLaughlin's, from the winsorised squares (Sankhya A 25, 1963; Yuen, Biometrika 61, 1974).
The plain mean over rounds, because no round is better than another, and a disturbed one is to be seen in the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TRIM = 0.25  # of a round's samples, at each end


@dataclass(frozen=True)
class Estimates:
    """Of each row (first axis) and side (second axis: before, after); logarithms throughout.

    location: mean over the rounds' midmeans. scatter: the sum of squares of the rounds' midmeans about it.
    spread: variance of a sample as the midmean feels it: a midmean of h kept samples has the error spread / h;
    spread_df: its degrees of freedom, 0 where no round has two kept samples.
    per_kept: the mean of 1 / h over rounds. rounds, samples: counts.
    """

    location: np.ndarray
    scatter: np.ndarray
    spread: np.ndarray
    spread_df: np.ndarray
    per_kept: np.ndarray
    rounds: np.ndarray
    samples: np.ndarray

    def __len__(self) -> int:
        return len(self.location)

    @property
    def round_df(self) -> np.ndarray:
        """Degrees of freedom of a row's scatter, both sides together."""
        return (self.rounds - 1).sum(axis=1)


def estimate(values: np.ndarray, sizes: Sequence[int] | np.ndarray, rounds: Sequence[int] | np.ndarray) -> Estimates:
    """Estimates of rows from samples in one flat array.

    values: samples above zero: those of the first row's first round before, and so on, all rounds after, then the next
    row. sizes: samples of each round, at least 1. rounds: rounds of each side, before and after in turn, at least 1.
    """
    sizes, rounds = np.asarray(sizes, dtype=np.int64), np.asarray(rounds, dtype=np.int64)
    middle, squares, kept = midmeans(np.log(values), sizes)
    first = np.cumsum(rounds) - rounds

    def total(of_rounds: np.ndarray) -> np.ndarray:
        return np.add.reduceat(of_rounds, first) if len(first) else np.empty(0)

    location = total(middle) / rounds
    spread_df = total(kept - 1)
    sides = (
        location,
        total((middle - np.repeat(location, rounds)) ** 2),
        total(squares) / np.maximum(spread_df, 1),
        spread_df,
        total(1.0 / kept) / rounds,
        rounds,
        total(sizes),
    )
    return Estimates(*(side.reshape(-1, 2) for side in sides))


def midmeans(values: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each round: its midmean, the winsorised sum of squares about it, and how many samples the midmean keeps."""
    middle, squares = np.empty(len(sizes)), np.empty(len(sizes))
    first = np.cumsum(sizes) - sizes
    for size in np.unique(sizes):
        chosen = np.flatnonzero(sizes == size)
        cut = int(TRIM * size)
        if len(chosen) == len(sizes):
            matrix = values.reshape(-1, size)
        else:
            matrix = values[first[chosen, None] + np.arange(size)]
        matrix = np.sort(matrix, axis=1)
        middle[chosen] = matrix[:, cut : size - cut].mean(axis=1)
        matrix[:, :cut] = matrix[:, cut, None]
        matrix[:, size - cut :] = matrix[:, size - cut - 1, None]
        matrix -= matrix.mean(axis=1, keepdims=True)
        squares[chosen] = np.einsum("ij,ij->i", matrix, matrix)
    return middle, squares, sizes - 2 * (TRIM * sizes).astype(np.int64)
