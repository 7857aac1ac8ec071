"""The memory that a plan works on: allocated, filled, poisoned, and inspected for damage afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kbench.check.arrays import count_different, first_different, words
from kbench.check.case import Case
from kbench.device.base import Bound, Buffer, Damage, Device, Prepared
from kbench.device.dtypes import numpy_dtype
from kbench.errors import KbenchError
from kbench.family import Family, Problem, Step, Tensor, Version, tensors_of


@dataclass(frozen=True)
class ChangedInput:
    """An input that a launch wrote to. before, after: values of the first changed element."""

    tensor: Tensor
    count: int
    index: tuple[int, ...]
    before: float
    after: float


class Buffers:
    """Buffers of all tensors that a plan touches, freed on exit.

    by_name: the buffers to bind. case: the one that was loaded last.
    Raises KbenchError if the plan cannot be judged: it leaves a required output alone, or names a tensor
    that neither the family nor the version has.
    """

    def __init__(
        self,
        device: Device,
        family: Family,
        version: Version,
        problem: Problem,
        block: int,
        plan: Sequence[Step],
        params: Mapping[str, int] | None = None,
    ):
        self.device = device
        self.version = version
        self.block = block
        self.tensors = touched_tensors(family, version, problem, block, plan, device, params or {})
        self.by_name: dict[str, Buffer] = {}
        self.case: Case | None = None

    def __enter__(self) -> Buffers:
        try:
            for tensor in self.tensors:
                self.by_name[tensor.name] = self.device.alloc(tensor)
        except BaseException:
            self._free()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._free()

    def _free(self) -> None:
        for buffer in self.by_name.values():
            self.device.free(buffer)
        self.by_name.clear()

    # ------------------------------------------------------------------------------------------ before a launch

    def aliases(self) -> tuple[tuple[str, str], ...]:
        """The pairs (input, output) that the version allows to be the same memory and that the plan touches.

        Raises KbenchError for a pair that cannot share memory.
        """
        pairs = tuple(pair for pair in self.version.aliases if all(name in self.by_name for name in pair))
        for pair in pairs:
            source, target = (self.by_name[name].tensor for name in pair)
            if (source.shape, source.dtype) != (target.shape, target.dtype) or target.role != "out":
                raise KbenchError(
                    f"version {self.version.number}: {target.name} cannot be the same memory as {source.name}: "
                    f"an alias is a pair (input, output) of one shape and dtype"
                )
        return pairs

    def bind(self, prepared: Prepared, alias: tuple[str, str] | None = None) -> Bound:
        """The plan bound to these buffers; with an alias, its output lies in its input's memory."""
        if alias is None:
            return self.device.bind(prepared, self.by_name)
        source, target = alias
        shared = self.by_name[source]
        # The view keeps the output's own tensor, so that the device types its arguments as the plan means them.
        view = Buffer(self.by_name[target].tensor, shared.array, shared.address, shared.handle)
        return self.device.bind(prepared, {**self.by_name, target: view})

    def reset(self, case: Case, byte: int) -> None:
        """Inputs and start values as the case has them; outputs and scratch filled with `byte`."""
        self.case = case
        with self.device.activate():
            pristine = case.on(self.device)
            for name, buffer in self.by_name.items():
                if buffer.tensor.role in ("in", "inout"):
                    words(buffer.array, self.device.xp)[...] = pristine.pristine(name)
                else:
                    self.device.poison(buffer, byte)

    def restore(self, stream: Any = None) -> None:
        """Queue copies of the start values of the "inout" tensors: for launches that are timed one after another."""
        if self.case is None:
            raise RuntimeError("restore before the first reset")
        with stream if stream is not None else self.device.activate():
            for name in self._inouts():
                words(self.by_name[name].array, self.device.xp)[...] = self.case.on(self.device).pristine(name)

    def _inouts(self) -> list[str]:
        return [name for name, buffer in self.by_name.items() if buffer.tensor.role == "inout"]

    # ------------------------------------------------------------------------------------------ after a launch

    def damages(self) -> list[Damage]:
        """Redzones that were written to; they are repaired."""
        found = [self.device.damage(buffer) for buffer in self.by_name.values()]
        return [damage for damage in found if damage is not None]

    def changed_inputs(self, but: str = "") -> list[ChangedInput]:
        """Inputs that no longer hold what was loaded, apart from the one named `but` (an aliased input)."""
        assert self.case is not None
        xp, found = self.device.xp, []
        with self.device.activate():
            for name, buffer in self.by_name.items():
                if buffer.tensor.role != "in" or name == but:
                    continue
                now, before = words(buffer.array, xp), self.case.on(self.device).pristine(name)
                first = first_different(now, before, xp)
                if first is not None:
                    found.append(_changed(buffer.tensor, now, before, first, count_different(now, before, None, xp)))
        return found


def _changed(tensor: Tensor, now: Any, before: Any, first: int, count: int) -> ChangedInput:
    dtype = numpy_dtype(tensor.dtype)
    bits = np.array([int(before[first]), int(now[first])], f"u{dtype.itemsize}")
    values = bits.view(dtype).astype(np.float64)
    index = tuple(int(i) for i in np.unravel_index(first, tensor.shape))
    return ChangedInput(tensor, count, index, float(values[0]), float(values[1]))


def touched_tensors(
    family: Family,
    version: Version,
    problem: Problem,
    block: int,
    plan: Sequence[Step],
    device: Device,
    params: Mapping[str, int],
) -> tuple[Tensor, ...]:
    """The tensors that a plan uses, the family's first. Raises KbenchError as `Buffers` does."""
    where = f"{family.name} version {version.number}, block {block}"
    own = version.scratch(problem, block, device.props, **params) if version.scratch is not None else ()
    known: dict[str, Tensor] = {tensor.name: tensor for tensor in family.tensors(problem)}
    for tensor in own:
        if tensor.name in known or tensor.role != "scratch":
            raise KbenchError(f"{where}: scratch {tensor.name} must have a name of its own and the role scratch")
        known[tensor.name] = tensor
    touched = tensors_of(plan)
    _require_known(where, touched, known)
    _require_outputs(where, touched, known)
    return tuple(tensor for name, tensor in known.items() if name in touched)


def _require_known(where: str, touched: Sequence[str], known: Mapping[str, Tensor]) -> None:
    unknown = [name for name in touched if name not in known]
    if unknown:
        raise KbenchError(f"{where}: the plan names a tensor {unknown[0]!r}", f"there are {', '.join(known)}")


def _require_outputs(where: str, touched: Sequence[str], known: Mapping[str, Tensor]) -> None:
    for tensor in known.values():
        if tensor.role in ("out", "inout") and not tensor.intermediate and tensor.name not in touched:
            raise KbenchError(
                f"{where}: the plan never touches the output {tensor.name}",
                "every version must compute every required output",
            )
