"""Choosing tokens from logits, on the host: with a seed of its own, so that every sampling event draws alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kbench.errors import UsageError

# A new generator with this seed for every sampling event: texts of different steps then differ by the weights alone,
# and sampling leaves no trace in a run that is resumed.
SEED = 1337


def generator(seed: int = SEED) -> np.random.Generator:
    """The source of randomness of one sampling event."""
    return np.random.default_rng(seed)


def choose(
    logits: npt.NDArray[Any], vocab: int, source: np.random.Generator, temperature: float = 1.0
) -> npt.NDArray[np.int64]:
    """A token for each row of logits (..., columns): int64 (...).

    The first `vocab` columns take part; what the padding holds does not matter. Drawn from the softmax of
    logits / temperature, one number of `source` a row; temperature 0 takes the largest, the first of equal ones, and
    draws nothing. Raises UsageError for a temperature below 0, too few columns, and logits with NaN or +infinity.
    """
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise UsageError(f"a sampling temperature of {temperature:g}: it is a finite number, 0 or more")
    if not 1 <= vocab <= logits.shape[-1]:
        raise UsageError(f"{logits.shape[-1]} columns of logits for a vocabulary of {vocab}")
    rows = logits[..., :vocab].astype(np.float64)
    # -infinity rules a token out, which is sound as long as one is left.
    largest = rows.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():
        raise UsageError("logits to sample from are not finite", "the weights are damaged, or training diverged")
    if temperature == 0.0:
        return np.asarray(rows.argmax(axis=-1), dtype=np.int64)
    with np.errstate(over="ignore", under="ignore"):  # at a tiny temperature all but the largest are 0
        powers = np.exp((rows - largest) / temperature)
    coins = source.random(rows.shape[:-1])
    ids = [_drawn(row, coin) for row, coin in zip(powers.reshape(-1, vocab), np.ravel(coins), strict=True)]
    return np.array(ids, dtype=np.int64).reshape(rows.shape[:-1])


def _drawn(weights: npt.NDArray[np.float64], coin: float) -> int:
    """The place where the running sum first passes `coin` of the whole: never one of weight 0."""
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, coin * sums[-1], side="right"))
    # The product may round up to the whole sum, which nothing passes.
    return place if place < len(weights) else int(np.flatnonzero(weights)[-1])


def generate(
    logits_of: Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]],
    start: Sequence[int],
    count: int,
    *,
    vocab: int,
    context: int,
    temperature: float = 1.0,
    seed: int = SEED,
) -> list[int]:
    """`count` tokens that go on from the tokens of `start`, which has at least one.

    logits_of: the logits (columns,) of the token after the ids given, at most `context` of them: of a longer text
    the model sees the end. Raises UsageError as `choose`, and for a start that is empty.
    """
    if not start:
        raise UsageError("no token to sample from: give a text that is not empty")
    source, ids = generator(seed), list(start)
    for _ in range(count):
        seen = np.array(ids[-context:], dtype=np.int64)
        ids.append(int(choose(logits_of(seen), vocab, source, temperature)))
    return ids[len(start) :]
