"""Expected results as a program can hold them: of each element the least and the greatest number that is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.check.arrays import parts, words
from kbench.check.bound import is_exact
from kbench.check.expected import DeviceExpected
from kbench.device.dtypes import numpy_dtype
from kbench.export.inputs import hexadecimal
from kbench.family import Array, Expected, Tensor

# Of an output that is not stored whole: elements at its beginning, at its end, and in all.
_AT_ENDS = 64
SAMPLE = 1024


@dataclass(frozen=True)
class Answer:
    """What an output must be.

    bounds: of each stored element the least and the greatest right number, as words in hexadecimal, one after the
    other; all bits of the least set and none of the greatest say that anything is right. places: which elements,
    eight digits each; "" for all. compared: how many. exact: the very same bits, -0 and 0 told apart. whole: no element
    may hold anything, so none may be NaN or infinite.
    """

    bounds: str
    places: str
    compared: int
    exact: bool
    whole: bool


def answers(
    tensors: Mapping[str, Tensor], expected: Mapping[str, Expected], seed: int, limit: int
) -> dict[str, Answer]:
    """The answers for these outputs. All elements are stored while that takes no more than `limit` characters."""
    size = sum(4 * tensor.nbytes for tensor in tensors.values())
    rng = np.random.Generator(np.random.PCG64(seed))
    return {name: _answer(tensor, expected[name], rng, size <= limit) for name, tensor in tensors.items()}


def _answer(tensor: Tensor, expected: Expected, rng: np.random.Generator, whole: bool) -> Answer:
    known = DeviceExpected(tensor, expected, np)
    exact, all_given = is_exact(tensor), known.skip is None
    if whole or tensor.count <= SAMPLE:
        every = [right_range(tensor, *known.part(part, None)) for part in parts(tensor.count, np)]
        least, greatest = (np.concatenate([pair[side] for pair in every]) for side in (0, 1))
        if known.skip is not None:
            words(least, np)[known.skip] = np.iinfo(words(least, np).dtype).max
            words(greatest, np)[known.skip] = 0
        return Answer(_pairs(least, greatest), "", known.compared, exact, all_given)
    places = _spread(known, rng)
    least, greatest = right_range(tensor, *known.take(places, None))
    return Answer(_pairs(least, greatest), hexadecimal(places, np.uint32), len(places), exact, all_given)


def _spread(known: DeviceExpected, rng: np.random.Generator) -> Array:
    """Places of SAMPLE elements that are specified: the first, the last, and some between, in order."""
    count = known.tensor.count
    ends = np.concatenate([np.arange(_AT_ENDS), np.arange(count - _AT_ENDS, count)])
    # Four times as many as needed: some come twice, and some are unspecified.
    between = rng.integers(0, count, 4 * SAMPLE)
    if known.skip is not None:
        ends, between = ends[~known.skip[ends]], between[~known.skip[between]]
    between = np.setdiff1d(between, ends)
    chosen = rng.permutation(between)[: SAMPLE - len(ends)]
    return np.sort(np.concatenate([ends, chosen]))


def _pairs(least: Array, greatest: Array) -> str:
    return hexadecimal(np.stack([words(least, np), words(greatest, np)], axis=1).reshape(-1))


def right_range(tensor: Tensor, value: Array, bound: Array | float) -> tuple[Array, Array]:
    """The least and the greatest number of the tensor's type that is no more than `bound` away from `value`.

    value: float64, flat. Some number is: the bound has room for rounding to the type.
    """
    dtype = numpy_dtype(tensor.dtype)
    if is_exact(tensor):
        stored = value.astype(dtype)
        return stored, stored.copy()
    with np.errstate(over="ignore"):
        return _at_least(value - bound, dtype), -_at_least(-(value + bound), dtype)


def _at_least(limit: Array, dtype: np.dtype[Any]) -> Array:
    """The least finite number of a floating-point type that is not below `limit`."""
    near = limit.astype(dtype)
    below = near.astype(np.float64) < limit
    return np.where(below, _next(near), near)


def _next(values: Array) -> Array:
    """The next larger number: its bits count up from 0, and down from -0."""
    bits = words(values, np)
    signed = np.dtype(f"i{values.dtype.itemsize}")
    sign = np.signbit(values.astype(np.float64))
    up = np.where(sign, bits.view(signed) - 1, bits.view(signed) + 1)
    up = np.where(values == 0, 1, up)  # above -0 as above 0
    return up.astype(signed).view(values.dtype)
