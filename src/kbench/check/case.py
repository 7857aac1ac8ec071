"""Cases: drawn inputs with the reference's answer, made once per problem and seed."""

from __future__ import annotations

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

    family: its name. inputs: "in" and "inout" tensors as stored (numpy). expected: "out" and "inout" tensors, in
    float64. judge: the module that computed the reference, "numpy" or "cupy".
    """

    family: str
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
        """Bytes of main memory that the case holds: what a cache of cases counts."""
        answers = [array for expected in self.expected.values() for array in (expected.value, expected.bound)]
        return sum(array.nbytes for array in (*self.inputs.values(), *answers) if isinstance(array, np.ndarray))

    @property
    def on_gpu(self) -> bool:
        """Whether the answers are in GPU memory."""
        return self.judge != np.__name__

    @property
    def uploaded(self) -> int:
        """Bytes of GPU memory that copies of the inputs, and masks, take."""
        return self._on_device[1].nbytes if self._on_device is not None else 0

    def on(self, device: Device) -> DeviceCase:
        """The case on a device, uploaded at first use and kept until `release`."""
        if self._on_device is None or self._on_device[0] is not device:
            self._on_device = (device, DeviceCase(device, self.tensors, self.inputs, self.expected))
        return self._on_device[1]

    def release(self) -> None:
        """Give the device's copies back; the next use uploads them again."""
        self._on_device = None


def make_case(
    family: Family, problem: Problem, seed: int, structured: bool = False, xp: Any = np, generator: Any = None
) -> Case:
    """Draw the inputs of a problem and ask the family's reference.

    structured: patterned inputs in place of random ones. xp: numpy, or cupy for problems that are too large
    for numpy (inside the device's `activate()`). generator: as of `draw_inputs`.
    Raises KbenchError, naming family, tensor and element, for anything that makes the case unusable as a
    judge: an output that the reference lacks, another shape, a value or bound that is not finite.
    """
    tensors = {tensor.name: tensor for tensor in family.tensors(problem)}
    stored, exact = draw_inputs(family.name, list(tensors.values()), seed, structured, generator)
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
    return Case(family.name, problem, seed, structured, tensors, stored, expected, xp.__name__)


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


ProblemKey = tuple[Any, ...]


def problem_key(family: Family, problem: Problem) -> ProblemKey:
    """What tells one problem from another: families may have sizes of the same names and values."""
    return family.name, tuple(sorted(problem.sizes.items())), problem.dtype


class CaseCache:
    """Cases by family, problem and seed, each computed once, in a thread of its own, so that references
    overlap compilation.

    One problem is in use: that of the last `use` or `submit`. Its cases alone hold GPU memory, and are never dropped:
    every row of the problem needs them. Of others the least recently used are dropped while all together hold over
    `limit_bytes` of main memory. For one thread's use.
    """

    def __init__(self, limit_bytes: int, make: Callable[[Family, Problem, int, bool], Case] = make_case):
        self._limit = limit_bytes
        self._make = make
        self._in_use: ProblemKey = ()
        self._cases: OrderedDict[tuple[ProblemKey, int, bool], Future[Case]] = OrderedDict()
        # One at a time: references use all cores themselves, and two at once would double the peak of memory.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reference")

    def use(self, family: Family, problem: Problem) -> None:
        """Make this problem the one in use; the one before gives its GPU memory back.

        Waits for references that are under way: what they will hold has to be given back too.
        """
        key = problem_key(family, problem)
        if key == self._in_use:
            return
        self._in_use = key
        for name, future in list(self._cases.items()):
            if name[0] == key:
                continue
            # A failure's traceback holds what the reference had made by then; and memory may be there the next time.
            failed = future.exception() is not None  # waits
            if not failed:
                future.result().release()
            if failed or future.result().on_gpu:  # answers on the host may be wanted again
                del self._cases[name]

    def submit(self, family: Family, problem: Problem, seed: int, structured: bool = False) -> Future[Case]:
        """The case, or the error that making it raised, when it is there."""
        self.use(family, problem)
        name = (self._in_use, seed, structured)
        if name not in self._cases:
            self._cases[name] = self._pool.submit(self._make, family, problem, seed, structured)
        self._cases.move_to_end(name)
        self._trim()
        return self._cases[name]

    def made(self, family: Family, problem: Problem, seed: int, structured: bool = False) -> Case | None:
        """The case if it is there, waiting for it if it is under way; None if not, or if making it failed."""
        future = self._cases.get((problem_key(family, problem), seed, structured))
        return future.result() if future is not None and future.exception() is None else None

    def _finished(self) -> list[tuple[tuple[ProblemKey, int, bool], Case]]:
        done = [(name, future) for name, future in self._cases.items() if future.done()]
        return [(name, future.result()) for name, future in done if future.exception() is None]

    def _trim(self) -> None:
        finished = self._finished()
        total = sum(case.nbytes for _, case in finished)
        for name, case in finished:
            if total <= self._limit:
                return
            if name[0] != self._in_use:
                total -= case.nbytes
                del self._cases[name]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cases.clear()
