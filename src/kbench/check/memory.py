"""How much memory a check needs, known before any of it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kbench.check.arrays import GPU_PART
from kbench.device.base import Device
from kbench.device.host_memory import available_memory
from kbench.errors import CannotRunError
from kbench.family import Family, Problem, Tensor, Version

# Redzones and rounding to pages, per buffer: more than either device takes.
_PER_BUFFER = 256 * 1024

# A comparison holds about ten float64 temporaries of one part of an output.
_COMPARISON = 10 * 8 * GPU_PART

# References work in float64 and need about two temporaries as large as their largest tensor.
_REFERENCE_TEMPORARIES = 2


@dataclass(frozen=True)
class Memory:
    """Bytes. device: buffers, pristine inputs of two cases, one launch's outputs kept, a comparison. host: the case."""

    device: int
    host: int


def device_memory_of_reference(tensors: Sequence[Tensor]) -> int:
    """Bytes of GPU memory that two cases take whose reference is computed there: float64 inputs and temporaries while
    it runs, values and bounds as long as the cases are kept."""
    inputs = [tensor for tensor in tensors if tensor.role in ("in", "inout")]
    outputs = [tensor for tensor in tensors if tensor.role in ("out", "inout")]
    largest = max((tensor.count for tensor in tensors), default=0)
    working = sum(8 * t.count for t in inputs) + _REFERENCE_TEMPORARIES * 8 * largest
    return working + 2 * sum(16 * t.count for t in outputs)


def memory_needed(tensors: Sequence[Tensor]) -> Memory:
    """What checking a plan over these tensors takes. Pure arithmetic: no size is too large for it."""
    buffers = sum(tensor.nbytes + _PER_BUFFER for tensor in tensors)
    inputs = [tensor for tensor in tensors if tensor.role in ("in", "inout")]
    outputs = [tensor for tensor in tensors if tensor.role in ("out", "inout")]
    largest_output = max((tensor.count for tensor in outputs), default=0)
    # Inputs of two cases: the one that is timed, and the one that is checked afterwards.
    copies = sum(tensor.nbytes for tensor in (*inputs, *inputs, *outputs))
    device = buffers + copies + min(_COMPARISON, 80 * largest_output)
    # As stored and in float64; reference and bound in float64, and a mask.
    host = sum(t.nbytes + 8 * t.count for t in inputs) + sum(17 * t.count for t in outputs)
    host += _REFERENCE_TEMPORARIES * 8 * max((tensor.count for tensor in tensors), default=0)
    return Memory(device, host)


def require_memory(
    device: Device, family: Family, version: Version, problem: Problem, tensors: Sequence[Tensor]
) -> None:
    """Raise CannotRunError, with what is needed and what is free, if the check would not fit.

    tensors: the family's and the version's scratch. Nothing is allocated here.
    """
    needed = memory_needed(tensors)
    what = f"{family.name} version {version.number} at {problem}"
    hint = f"try smaller sizes: {_smaller(family)}"
    free = device.free_memory()
    if device.kind == "emulator":
        _require(what, needed.device + needed.host, free, "memory", hint)
        return
    _require(what, needed.device, free, "GPU memory", hint)
    _require(what, needed.host, available_memory(), "main memory for the reference", hint)


def _require(what: str, needed: int, free: int, kind: str, hint: str) -> None:
    if needed > free:
        raise CannotRunError(f"{what} needs {gib(needed)} of {kind}, {gib(free)} are free", hint)


def _smaller(family: Family) -> str:
    small = family.presets.get("small", {})
    return f"--preset small ({' '.join(f'{name}={size}' for name, size in small.items())})"


def gib(nbytes: int) -> str:
    """Bytes for a reader: "48.2 GiB", "3.1 MiB"."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
