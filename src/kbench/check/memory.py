"""How much memory a check needs, known before any of it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kbench.check.arrays import GPU_PART
from kbench.check.case import Case
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

# Inputs of two cases: the one that is timed, and the one that is checked afterwards.
_CASES = 2


@dataclass(frozen=True)
class Memory:
    """Bytes that a row needs beyond what its problem holds already."""

    device: int
    host: int


def memory_needed(tensors: Sequence[Tensor], judge_on_gpu: bool = False, made: Sequence[Case] = ()) -> Memory:
    """What checking a plan over these tensors takes. Pure arithmetic: no size is too large for it.

    judge_on_gpu: the references are computed there, and their answers stay there. made: those of the row's two cases
    that there are already.
    """
    inputs = [tensor for tensor in tensors if tensor.role in ("in", "inout")]
    outputs = [tensor for tensor in tensors if tensor.role in ("out", "inout")]
    missing = _CASES - len(made)
    # Kept: inputs as stored; values and bounds of the answers in float64; masks.
    stored = sum(tensor.nbytes for tensor in inputs)
    answers = missing * sum(16 * tensor.count for tensor in outputs)
    masks = sum(tensor.count for tensor in outputs if tensor.unspecified is not None)
    # While a reference runs: inputs in float64, which other draws may ask for too, and its temporaries.
    exact = sum(8 * tensor.count for tensor in inputs) if missing else 0
    largest = max((tensor.count for tensor in tensors), default=0) if missing else 0
    reference = exact + _REFERENCE_TEMPORARIES * 8 * largest
    launches = _for_launches(tensors, outputs) + _CASES * (stored + masks) - sum(case.uploaded for case in made)
    if judge_on_gpu:
        # References come before all that launches need, and their working memory is free again by then.
        return Memory(answers + max(launches, reference), missing * stored + exact)
    return Memory(launches, missing * stored + answers + reference)


def _for_launches(tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Buffers, the first launch's outputs, which later ones are compared with bit by bit, and a comparison."""
    buffers = sum(tensor.nbytes + _PER_BUFFER for tensor in tensors)
    first = sum(tensor.nbytes for tensor in outputs)
    largest = max((tensor.count for tensor in outputs), default=0)
    return buffers + first + min(_COMPARISON, 80 * largest)


def require_memory(
    device: Device,
    family: Family,
    version: Version,
    problem: Problem,
    tensors: Sequence[Tensor],
    judge_on_gpu: bool = False,
    made: Sequence[Case] = (),
) -> None:
    """Raise CannotRunError, with what is needed and what is free, if the check would not fit.

    tensors: the family's and the version's scratch. judge_on_gpu, made: as of `memory_needed`. Nothing is allocated.
    """
    needed = memory_needed(tensors, judge_on_gpu, made)
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
