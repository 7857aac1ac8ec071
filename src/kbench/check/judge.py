"""Which array module computes a reference: numpy, or for large problems the GPU, once the two have agreed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kbench.check.arrays import to_host
from kbench.check.bound import final_bound
from kbench.check.case import Case, ProblemKey, make_case, problem_key
from kbench.check.memory import gib, memory_needed
from kbench.device.base import Device
from kbench.errors import CannotRunError, KbenchError
from kbench.family import Family, Problem, Tensor

# Above this many elements in all tensors numpy takes seconds for a reference, which a GPU does in milliseconds.
_NUMPY_ELEMENTS = 1 << 25
# How far the two may be apart, as a share of what a version is allowed: both work in float64, so they differ by some
# 1e-16 of the values and by less than this even where the bound is all rounding to fp32.
_AGREEMENT = 1e-3
_FLUSHED = 2.0**-126
_SEED = 20  # of the problem that they have to agree on; any would do


class Judges:
    """Makes cases for one device. A family's reference runs on the GPU, in float64, at problems too large for numpy,
    if it gave the same answers as numpy at the family's largest check shape; `Case.judge` says which it was.

    note: called with a line for the user where numpy takes its time because the GPU cannot judge.
    """

    def __init__(self, device: Device, note: Callable[[str], None] = lambda text: None):
        self._device = device
        self._note = note
        self._decided: dict[ProblemKey, bool] = {}
        self._faults: dict[tuple[str, str], str] = {}

    def on_gpu(self, family: Family, problem: Problem) -> bool:
        """Whether the GPU computes the references of this problem: decided when it is first asked, by the memory that
        is free then, so that all cases of a problem have one judge."""
        key = problem_key(family, problem)
        if key not in self._decided:
            self._decided[key] = self._can_judge(family, problem)
        return self._decided[key]

    def make_case(self, family: Family, problem: Problem, seed: int, structured: bool) -> Case:
        """As `check.case.make_case`. Raises KbenchError likewise."""
        if not self.on_gpu(family, problem):
            return make_case(family, problem, seed, structured)
        with self._device.activate():
            return make_case(family, problem, seed, structured, self._device.xp)

    def _can_judge(self, family: Family, problem: Problem) -> bool:
        tensors = family.tensors(problem)
        if self._device.kind != "cuda" or not is_large(tensors):
            return False
        needed, free = memory_needed(tensors, judge_on_gpu=True).device, self._device.free_memory()
        fault = f"that needs {gib(needed)} of GPU memory, {gib(free)} are free" if needed > free else ""
        fault = fault or self._fault(family, problem.dtype)
        if fault:
            self._note(f"{family.name} at {problem}: numpy judges, which may take minutes, not the GPU: {fault}")
        return not fault

    def _fault(self, family: Family, dtype: str) -> str:
        key = (family.name, dtype)
        if key not in self._faults:
            try:
                with self._device.activate():
                    self._faults[key] = disagreement(family, dtype, self._device.xp)
            except CannotRunError as error:  # no GPU memory
                self._faults[key] = str(error)
        return self._faults[key]


def is_large(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a reference over these tensors is better computed on a GPU."""
    return sum(tensor.count for tensor in tensors) > _NUMPY_ELEMENTS


def disagreement(family: Family, dtype: str, xp: Any) -> str:
    """What keeps `xp` from judging: "" if it computes the same reference and bound as numpy at the family's largest
    check shape that takes the dtype."""
    problems = [problem for shape in family.check_shapes if _is_taken(family, problem := Problem(shape.sizes, dtype))]
    if not problems:
        return f"no check shape takes {dtype}, so that the two cannot be compared"
    problem = max(problems, key=lambda one: sum(tensor.count for tensor in family.tensors(one)))
    try:
        host, device = (make_case(family, problem, _SEED, False, module) for module in (np, xp))
    except KbenchError as error:
        return str(error)
    different = [name for name in host.expected if not _same(host, device, name)]
    return f"the two disagree about {different[0]} at {problem}" if different else ""


def _is_taken(family: Family, problem: Problem) -> bool:
    """Whether any version runs at this problem: elsewhere the reference may mean nothing."""
    return any(family.taken_blocks(version, problem) for version in family.versions)


def _same(host: Case, device: Case, name: str) -> bool:
    expected, other = host.expected[name], device.expected[name]
    allowed = final_bound(host.tensors[name], expected.value, expected.bound, np, None)
    other_bound = to_host(other.bound) if hasattr(other.bound, "shape") else other.bound
    same_value = np.abs(expected.value - to_host(other.value)) <= _AGREEMENT * allowed
    # A bound is an estimate of three digits; as float32, CuPy flushes it to 0 below the smallest normal number.
    same_bound = np.abs(np.subtract(expected.bound, other_bound)) <= 0.01 * np.asarray(allowed) + _FLUSHED
    return bool(np.all(same_value) and np.all(same_bound))
