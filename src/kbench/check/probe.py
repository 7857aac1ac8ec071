"""Does a family's bound tell right from wrong? For the tests of families."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kbench.check.bound import Tolerance
from kbench.check.case import Case, make_case
from kbench.check.compare import compared_parts
from kbench.check.expected import DeviceExpected
from kbench.device.dtypes import store
from kbench.family import Array, Family, Problem, Tensor


@dataclass(frozen=True)
class Probe:
    """Largest error over bound that an output would have if it were: the reference rounded to its type (1 would be
    a failure), all zeros, the answer to other inputs, or displaced by one element (each should be far above 1).
    Inf where the bound is 0 and there is any error; slip is 0 for a single element."""

    rounded: float
    zeros: float
    stale: float
    slip: float

    @property
    def weakest(self) -> float:
        """The fault that comes nearest to passing."""
        return min(self.zeros, self.stale, self.slip)


def probe(family: Family, problem: Problem, seed: int) -> dict[str, Probe]:
    """A Probe of every output of a family at one problem. Raises KbenchError as `make_case` does."""
    case, other = make_case(family, problem, seed), make_case(family, problem, seed + 1)
    return {name: _probe(case, other, case.tensors[name]) for name in case.expected}


def _probe(case: Case, other: Case, tensor: Tensor) -> Probe:
    right = store(tensor, case.expected[tensor.name].value)
    stale = store(tensor, other.expected[tensor.name].value)
    slipped = np.roll(right.reshape(-1), 1).reshape(tensor.shape)
    used = [used_share(case, tensor, got) for got in (right, np.zeros_like(right), stale, slipped)]
    return Probe(*used)


def used_share(case: Case, tensor: Tensor, got: Array, tolerance: Tolerance | None = None) -> float:
    """Largest error over bound of `got` as output `tensor` of a case; Inf for a NaN."""
    expected = DeviceExpected(tensor, case.expected[tensor.name], np)
    largest = 0.0
    with np.errstate(all="ignore"):
        for part in compared_parts(tensor, got, expected, np, tolerance):
            largest = max(largest, float(part.share(np).max()))
    return largest
