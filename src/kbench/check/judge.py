"""Which array module computes a reference: numpy, or for large problems the GPU, once the two have agreed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kbench.check.arrays import to_host
from kbench.check.bound import final_bound
from kbench.check.case import Case, make_case
from kbench.check.memory import device_memory_of_reference
from kbench.device.base import Device
from kbench.errors import KbenchError
from kbench.family import Family, Problem, Tensor

# Above this many elements in all tensors numpy takes seconds for a reference, which a GPU does in milliseconds.
_NUMPY_ELEMENTS = 1 << 25
# How far the two may be apart, as a share of what a version is allowed: both work in float64, so they differ by some
# 1e-16 of the values and by less than this even where the bound is all rounding to fp32.
_AGREEMENT = 1e-3
_SEED = 20  # of the problem that they have to agree on; any would do


class Judges:
    """Makes cases for one device. A family's reference runs on the GPU, in float64, at problems too large for numpy,
    if it gave the same answers as numpy at the family's largest check shape; `Case.judge` says which it was."""

    def __init__(self, device: Device):
        self._device = device
        self._agreed: dict[tuple[str, str], bool] = {}

    def make_case(self, family: Family, problem: Problem, seed: int, structured: bool) -> Case:
        """As `check.case.make_case`. Raises KbenchError likewise."""
        if not self._on_gpu(family, problem):
            return make_case(family, problem, seed, structured)
        with self._device.activate():
            return make_case(family, problem, seed, structured, self._device.xp)

    def _on_gpu(self, family: Family, problem: Problem) -> bool:
        if self._device.kind != "cuda":
            return False
        tensors = family.tensors(problem)
        if not is_large(tensors) or device_memory_of_reference(tensors) > self._device.free_memory():
            return False
        key = (family.name, problem.dtype)
        if key not in self._agreed:
            with self._device.activate():
                self._agreed[key] = agree(family, problem.dtype, self._device.xp)
        return self._agreed[key]


def is_large(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a reference over these tensors is better computed on a GPU."""
    return sum(tensor.count for tensor in tensors) > _NUMPY_ELEMENTS


def agree(family: Family, dtype: str, xp: Any) -> bool:
    """Whether numpy and `xp` compute the same reference and bound at the family's largest check shape that takes the
    dtype. False, too, where the reference cannot run on `xp`."""
    problems = (Problem(shape.sizes, dtype) for shape in family.check_shapes)
    problem = max(problems, key=lambda one: sum(tensor.count for tensor in family.tensors(one)))
    try:
        host, device = (make_case(family, problem, _SEED, False, module) for module in (np, xp))
    except KbenchError:
        return False  # numpy will be asked, and says what is wrong
    return all(_same(host, device, name) for name in host.expected)


def _same(host: Case, device: Case, name: str) -> bool:
    expected, other = host.expected[name], device.expected[name]
    allowed = final_bound(host.tensors[name], expected.value, expected.bound, np, None)
    other_bound = to_host(other.bound) if hasattr(other.bound, "shape") else other.bound
    same_value = np.abs(expected.value - to_host(other.value)) <= _AGREEMENT * allowed
    # A bound is an estimate of three digits.
    same_bound = np.abs(np.subtract(expected.bound, other_bound)) <= 0.01 * np.asarray(allowed)
    return bool(np.all(same_value) and np.all(same_bound))
