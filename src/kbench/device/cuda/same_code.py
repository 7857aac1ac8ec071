"""Whether two plans are the same work: the same machine code, launched alike on the same tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kbench.device.cuda.cubin import CubinFile
from kbench.family import Launch, Step
from kbench.work import LIBRARY_STEPS

if TYPE_CHECKING:
    from kbench.device.cuda.compile import Cubin

# What `device/signature.h` adds to every cubin, in the order of its kernels: no code reads it.
_OURS = ("kbench_signature_", "_ZN6kbench9Parameter")


def same_code(plan: Sequence[Step], cubin: Cubin | None, other_plan: Sequence[Step], other_cubin: Cubin | None) -> bool:
    """True if nothing but the names of kernels tells one plan from the other.

    cubin: what the plan's kernels were compiled to; None for a plan without kernels. Only the bytes that run are
    compared: a cubin also holds a second of the clock, line numbers and paths. Raises CubinError where one cannot be
    read.
    """
    if len(plan) != len(other_plan):
        return False
    code, other_code = _Code(cubin), _Code(other_cubin)
    if code.variables != other_code.variables:
        return False
    return all(
        _shape(step) == _shape(other) and code.of(step.kernel) == other_code.of(other.kernel)
        if isinstance(step, Launch) and isinstance(other, Launch)
        else step == other
        for step, other in zip(plan, other_plan, strict=True)
    )


def code_hash(plan: Sequence[Step], cubin: Cubin | None) -> str:
    """A hash that is the same for two plans exactly where `same_code` is true; "" for a plan with steps of libraries,
    which may run other code each time. Raises CubinError where the cubin cannot be read."""
    if any(type(step).__name__ in LIBRARY_STEPS for step in plan):
        return ""
    code = _Code(cubin)
    digest = hashlib.sha256()
    for step in plan:
        parts = (_shape(step), code.of(step.kernel)) if isinstance(step, Launch) else (step,)
        digest.update(repr(parts).encode())
    digest.update(repr(sorted(code.variables.items())).encode())
    return digest.hexdigest()


class _Code:
    """The machine code of a plan's kernels by their name expressions."""

    def __init__(self, cubin: Cubin | None):
        self._cubin = cubin
        self._file = CubinFile(cubin.data) if cubin is not None else None
        found = self._file.variables if self._file is not None else {}
        self.variables: Mapping[str, bytes] = {n: data for n, data in found.items() if not n.startswith(_OURS)}

    def of(self, kernel: str) -> tuple[bytes, ...]:
        assert self._file is not None and self._cubin is not None
        return self._file.code(self._cubin.lowered[kernel])


def _shape(step: Launch) -> tuple[object, ...]:
    # Families may write lists for tuples.
    return tuple(step.grid), tuple(step.block), step.shared, tuple(step.args)
