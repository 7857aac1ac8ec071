"""Cases: drawn inputs with the reference's answer, made once per problem and seed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from kbench.catalog import describe_fault
from kbench.check.arrays import as_float64, first_where, to_device
from kbench.check.bound import INTEGERS, is_exact
from kbench.check.draw import FAMILY_FAULT, draw_inputs
from kbench.check.expected import DeviceCase
from kbench.device.base import Device
from kbench.errors import KbenchError
from kbench.family import Array, ErrorModel, Expected, Family, Problem, Tensor

# Largest finite number of each output type: a reference beyond it asks for the impossible.
_LARGEST = {
    "fp32": (2.0 - 2.0**-23) * 2.0**127, "bf16": (2.0 - 2.0**-7) * 2.0**127, "fp16": 65504.0,
    "fp64": np.finfo(np.float64).max, "int32": 2.0**31 - 1, "uint32": 2.0**32 - 1, "uint8": 255.0,
}  # fmt: skip


@dataclass
class Case:
    """One problem's inputs and what must come of them.

    inputs: "in" and "inout" tensors as stored (numpy). expected: "out" and "inout" tensors, in float64.
    judge: the module that computed the reference, "numpy" or "cupy".
    """

    problem: Problem
    seed: int
    structured: bool
    tensors: Mapping[str, Tensor]
    inputs: Mapping[str, Array]
    expected: Mapping[str, Expected]
    judge: str = "numpy"
    _on_device: tuple[Device, DeviceCase] | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that the case holds: what a cache of cases counts."""
        answers = [array for expected in self.expected.values() for array in (expected.value, expected.bound)]
        return sum(int(getattr(array, "nbytes", 8)) for array in (*self.inputs.values(), *answers))

    def on(self, device: Device) -> DeviceCase:
        """The case on a device, uploaded at first use and kept until `release`."""
        if self._on_device is None or self._on_device[0] is not device:
            self._on_device = (device, DeviceCase(device, self.tensors, self.inputs, self.expected))
        return self._on_device[1]

    def release(self) -> None:
        """Give the device's copies back; the next use uploads them again."""
        self._on_device = None


def make_case(family: Family, problem: Problem, seed: int, structured: bool = False, xp: Any = np) -> Case:
    """Draw the inputs of a problem and ask the family's reference.

    structured: patterned inputs in place of random ones. xp: numpy, or cupy for problems that are too large
    for numpy (inside the device's `activate()`).
    Raises KbenchError, naming family, tensor and element, for anything that makes the case unusable as a
    judge: an output that the reference lacks, another shape, a value or bound that is not finite.
    """
    tensors = {tensor.name: tensor for tensor in family.tensors(problem)}
    stored, exact = draw_inputs(family.name, list(tensors.values()), seed, structured)
    if xp is not np:
        exact = {
            name: as_float64(to_device(values.reshape(-1), xp), tensors[name].dtype, xp).reshape(values.shape)
            for name, values in stored.items()
        }
    try:
        answers = family.reference(problem, exact, ErrorModel(problem.dtype, structured), xp)
    except MemoryError:
        raise
    except Exception as error:
        # The family's own file, whatever folders add versions to it.
        file = next((path for path in family.sources.values() if Path(path).name == f"{family.name}.cu"), family.name)
        what = describe_fault(error, Path(file).with_suffix(".py"))
        raise KbenchError(f"family {family.name}: the reference fails at {problem}: {what}", FAMILY_FAULT) from error
    if not isinstance(answers, Mapping) or not all(isinstance(answer, Expected | None) for answer in answers.values()):
        raise KbenchError(f"family {family.name}: the reference must return a dict of Expected", FAMILY_FAULT)
    expected = {
        tensor.name: _checked(family.name, tensor, answers.get(tensor.name), xp)
        for tensor in tensors.values()
        if tensor.role in ("out", "inout")
    }
    return Case(problem, seed, structured, tensors, stored, expected, xp.__name__)


def _checked(family: str, tensor: Tensor, answer: Expected | None, xp: Any) -> Expected:
    """The answer for one output, contiguous; raises KbenchError if it cannot judge."""
    where = f"family {family}: the reference of output {tensor.name}"
    if answer is None:
        raise KbenchError(f"{where} is missing", FAMILY_FAULT)
    value = xp.ascontiguousarray(answer.value)
    if tuple(value.shape) != tensor.shape:
        raise KbenchError(f"{where} has shape {tuple(value.shape)}, the tensor {tensor.shape}", FAMILY_FAULT)
    if value.dtype.kind in "iub":
        value = value.astype(xp.float64)
    if value.dtype != xp.float64:
        raise KbenchError(f"{where} is {value.dtype}; it must be float64 to judge {tensor.dtype}", FAMILY_FAULT)
    largest = _LARGEST[tensor.dtype]
    _require(
        f"{where}: the value", tensor, value, lambda part: ~(xp.abs(part) <= largest), f"no finite {tensor.dtype}", xp
    )
    if is_exact(tensor):
        inexact = f"not exactly a {tensor.dtype}"
        _require(f"{where}: the value", tensor, value, lambda part: _rounds(part, tensor, xp), inexact, xp)
    return Expected(value, _checked_bound(where, tensor, answer.bound, xp))


def _checked_bound(where: str, tensor: Tensor, bound: Array | float, xp: Any) -> Array | float:
    if np.ndim(bound) == 0:
        if not isinstance(bound, Real) and not hasattr(bound, "dtype"):
            raise KbenchError(f"{where}: the bound must be a number or an array, not {bound!r}", FAMILY_FAULT)
        number = float(bound)
        if not (np.isfinite(number) and number >= 0):
            raise KbenchError(f"{where}: the bound {number} is not a finite number, 0 or more", FAMILY_FAULT)
        return number
    array = xp.ascontiguousarray(bound)
    if tuple(array.shape) != tensor.shape:
        shapes = f"{tuple(array.shape)}, the tensor {tensor.shape}"
        raise KbenchError(f"{where}: the bound has shape {shapes}", FAMILY_FAULT)
    unusable = "not a finite number, 0 or more"
    _require(f"{where}: the bound", tensor, array, lambda part: ~((part >= 0) & xp.isfinite(part)), unusable, xp)
    return array


def _require(what: str, tensor: Tensor, array: Array, bad: Any, text: str, xp: Any) -> None:
    flat = array.reshape(-1)
    index = first_where(bad, flat, xp)
    if index is not None:
        place = [int(i) for i in np.unravel_index(index, tensor.shape)]
        raise KbenchError(f"{what} at {place} is {float(flat[index])}, {text}", FAMILY_FAULT)


def _rounds(part: Array, tensor: Tensor, xp: Any) -> Array:
    """Where float64 values are not numbers of the exact tensor's own type."""
    if tensor.dtype in INTEGERS:
        return part != xp.rint(part)
    kept = {"fp32": 24, "bf16": 8, "fp16": 11, "fp64": 53}[tensor.dtype]
    significand, _ = xp.frexp(part)
    scaled = significand * 2.0**kept
    return scaled != xp.rint(scaled)


class CaseCache:
    """Cases by family, problem and seed, each computed once, in a thread of its own, so that references
    overlap compilation. The least recently used are dropped while all together hold over `limit_bytes`."""

    def __init__(self, limit_bytes: int, make: Callable[[Family, Problem, int, bool], Case] = make_case):
        self._limit = limit_bytes
        self._make = make
        self._lock = threading.Lock()
        self._cases: OrderedDict[tuple[Any, ...], Future[Case]] = OrderedDict()
        # One at a time: references use all cores themselves, and two at once would double the peak of memory.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reference")

    def submit(self, family: Family, problem: Problem, seed: int, structured: bool = False) -> Future[Case]:
        """The case, or the error that making it raised, when it is there."""
        key = (family.name, tuple(sorted(problem.sizes.items())), problem.dtype, seed, structured)
        with self._lock:
            if key not in self._cases:
                self._cases[key] = self._pool.submit(self._make, family, problem, seed, structured)
            self._cases.move_to_end(key)
            self._trim()
            return self._cases[key]

    def _trim(self) -> None:
        """Drop finished cases, oldest use first, but never the one used last."""
        sizes = {key: _size(future) for key, future in self._cases.items()}
        total = sum(sizes.values())
        for key in list(self._cases)[:-1]:
            if total <= self._limit:
                return
            if sizes[key]:
                total -= sizes[key]
                del self._cases[key]

    def forget(self, unwanted: Callable[[Case], bool]) -> None:
        """Drop the finished cases that are `unwanted`."""
        with self._lock:
            for key, future in list(self._cases.items()):
                if _size(future) and unwanted(future.result()):
                    del self._cases[key]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cases.clear()


def _size(future: Future[Case]) -> int:
    if future.cancelled() or not future.done() or future.exception() is not None:
        return 0
    return future.result().nbytes
