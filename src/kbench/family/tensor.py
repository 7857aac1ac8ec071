"""The arrays of a problem, and how their values are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kbench.family.checked import are_sizes, require
from kbench.family.problem import ITEM_SIZES, Array

Draw = Callable[[Any, tuple[int, ...], Mapping[str, Array]], Array]
"""`draw(rng, shape, drawn)`: values for one tensor as a numpy array. `rng` is a numpy Generator, `drawn` holds
the tensors drawn before it (already rounded to their dtype, as float64), so that one may follow from another."""


@dataclass(frozen=True)
class Tensor:
    """One array of a problem.

    role: "in" (read only), "out" (written, `=`), "inout" (has a defined start value), "scratch".
    draw: how values are drawn; needed for "in" and "inout".
    axes: names of the axes, for reports ("b", "h", "t", "t2").
    intermediate: an output that only the versions which materialise it have; it is checked where a plan
        touches it. Every other "out" must be written by every version.
    unspecified: `unspecified(xp)` gives a boolean array, true where an output may hold anything.
    exact: copies and integers: the check is bit for bit.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    axes: tuple[str, ...] = ()
    draw: Draw | None = None
    intermediate: bool = False
    unspecified: Callable[[Any], Array] | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("in", "out", "inout", "scratch"):
            raise ValueError(f"tensor {self.name}: role {self.role!r} is none of in, out, inout, scratch")
        if self.role in ("in", "inout") and self.draw is None:
            raise ValueError(f"tensor {self.name}: role {self.role} needs a `draw`")
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} is none of {', '.join(ITEM_SIZES)}")

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_SIZES[self.dtype]


def checked_tensors(tensors: object) -> tuple[Tensor, ...]:
    """What a family's `tensors`, or a version's `scratch`, returned. Raises TypeError or ValueError if it is no use."""
    require(isinstance(tensors, tuple | list), "tensors are a tuple of Tensor", tensors)
    assert isinstance(tensors, tuple | list)
    for tensor in tensors:
        require(isinstance(tensor, Tensor), "tensors are a tuple of Tensor", tensor)
        require(are_sizes(tensor.shape, 0, 32), f"the shape of {tensor.name} is a tuple of ints", tensor.shape)
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"tensors {', '.join(names)} do not all have names of their own")
    return tuple(tensors)


def normal(mean: float, spread: float) -> Draw:
    """Normal values with this mean and standard deviation: activations, weights, gradients."""
    return lambda rng, shape, drawn: rng.normal(mean, spread, shape)


def uniform(low: float, high: float) -> Draw:
    """Uniform values in [low, high)."""
    return lambda rng, shape, drawn: rng.uniform(low, high, shape)


def integers(low: int, high: int) -> Draw:
    """Uniform integers in [low, high): token ids, targets."""
    return lambda rng, shape, drawn: rng.integers(low, high, shape)


def derived(function: Callable[[Mapping[str, Array]], Array]) -> Draw:
    """A tensor that follows from those drawn before it, such as probabilities from logits."""
    return lambda rng, shape, drawn: function(drawn).reshape(shape)
