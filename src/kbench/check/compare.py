"""Is an output right? Element by element, in bounded memory, where the data are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.check.arrays import as_float64, parts
from kbench.check.bound import Tolerance, is_exact
from kbench.check.expected import DeviceExpected
from kbench.check.explain import Clues, explain
from kbench.check.verdict import Location, OutputVerdict
from kbench.errors import KbenchError
from kbench.family import Array, Expected, Tensor


@dataclass(frozen=True)
class Part:
    """Some elements of an output beside their reference; all arrays flat, of one length, in float64.

    error is Inf where the output is NaN, and 0 for unspecified elements. bound may be one number.
    """

    where: slice
    got: Array
    value: Array
    error: Array
    bound: Array | float
    wrong: Array

    def share(self, xp: Any) -> Array:
        """Error over bound; where the bound is 0, an error is out of all proportion and no error is 0."""
        if isinstance(self.bound, float) and self.bound > 0:
            return self.error / self.bound
        boundless = xp.where(self.error > 0, math.inf, self.error)
        if isinstance(self.bound, float):
            return boundless
        return xp.where(self.bound > 0, self.error / self.bound, boundless)


def compare(
    tensor: Tensor,
    got: Array,
    expected: Expected | DeviceExpected,
    xp: Any,
    tolerance: Tolerance | None = None,
    *,
    clues: Clues | None = None,
    locate: bool = True,
) -> OutputVerdict:
    """Compare what a version left in an output with the reference.

    got: an array of `xp`, contiguous, of the tensor's shape and dtype. tolerance: replaces the family's bound.
    clues: what else is known, to say what wrong elements look like. locate: find out where they are; costs
    further passes, and only when something is wrong. Raises KbenchError if the shapes differ.
    """
    if tuple(got.shape) != tensor.shape:
        raise KbenchError(f"output {tensor.name} has shape {tuple(got.shape)}, expected {tensor.shape}")
    if isinstance(expected, Expected):
        expected = DeviceExpected(tensor, expected, xp)
    wrong, used = 0, 0.0
    # Dividing by tiny bounds and subtracting infinities is meant here.
    with np.errstate(all="ignore"):
        for part in compared_parts(tensor, got, expected, xp, tolerance):
            wrong += int(xp.count_nonzero(part.wrong))
            used = max(used, float(part.share(xp).max()))
        verdict = OutputVerdict(
            tensor.name, expected.compared, tensor.count, wrong, used if math.isfinite(used) else None
        )
        if wrong == 0 or not locate:
            return verdict
        return _located(verdict, tensor, got, expected, xp, tolerance, clues or Clues())


def compared_parts(
    tensor: Tensor, got: Array, expected: DeviceExpected, xp: Any, tolerance: Tolerance | None
) -> Iterator[Part]:
    """Judge an output part by part: the one place where right and wrong are decided."""
    flat = got.reshape(-1)
    exact = is_exact(tensor)
    for where in parts(tensor.count, xp):
        values = as_float64(flat[where], tensor.dtype, xp)
        value, bound = expected.part(where, tolerance)
        # A NaN must not pass because every comparison with it is false: fmin drops it for the Inf.
        error = xp.fmin(xp.abs(values - value), math.inf)
        if exact:
            # 0.0 and -0.0 are equal and yet not the same bits.
            error = xp.where((error == 0) & (xp.signbit(values) != xp.signbit(value)), math.inf, error)
        if expected.skip is not None:
            error = xp.where(expected.skip[where], 0.0, error)
        yield Part(where, values, value, error, bound, error > bound)


def _located(
    verdict: OutputVerdict,
    tensor: Tensor,
    got: Array,
    expected: DeviceExpected,
    xp: Any,
    tolerance: Tolerance | None,
    clues: Clues,
) -> OutputVerdict:
    """The verdict with the first and the worst element, and what the wrong ones have in common."""
    mask = xp.zeros(tensor.count, dtype=bool)
    first: Location | None = None
    worst: tuple[float, Location] | None = None
    for part in compared_parts(tensor, got, expected, xp, tolerance):
        mask[part.where] = part.wrong
        if not bool(part.wrong.any()):
            continue
        if first is None:
            first = _location(tensor, part, int(part.wrong.argmax()))
        excess = xp.where(part.wrong, part.share(xp), -1.0)
        at = int(excess.argmax())
        if worst is None or float(excess[at]) > worst[0]:
            worst = (float(excess[at]), _location(tensor, part, at))
    kind, notes = explain(tensor, got, expected, mask, verdict.wrong, xp, tolerance, clues)
    if tolerance is None and not kind and expected.unbounded and not is_exact(tensor):
        notes.append(
            f"the family gives {tensor.name} no error bound, so it may only differ by the rounding to {tensor.dtype}: "
            "see ErrorModel in kbench/family/error.py if the kernel rounds more than once"
        )
    return OutputVerdict(
        verdict.name, verdict.compared, verdict.total, verdict.wrong, verdict.used,
        first, worst[1] if worst else None, kind, tuple(notes),
    )  # fmt: skip


def _location(tensor: Tensor, part: Part, at: int) -> Location:
    flat = part.where.start + at
    index = tuple(int(i) for i in np.unravel_index(flat, tensor.shape))
    bound = part.bound if isinstance(part.bound, float) else float(part.bound[at])
    return Location(index, tensor.axes, flat, float(part.value[at]), float(part.got[at]), bound)
