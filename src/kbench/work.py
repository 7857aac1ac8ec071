"""What a plan does, counted: its steps by kind, and the memory that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kbench.family import ITEM_SIZES, Copy, Fill, Launch, Step, Tensor, tensors_of

if TYPE_CHECKING:  # it brings numpy, and every command loads this file
    from kbench.device.base import KernelInfo

# Steps that a library computes: a version's own idea is not in them.
LIBRARY_STEPS = ("Gemm", "Sdpa", "SdpaBackward", "AllReduce")


def steps_of(plan: Sequence[Step]) -> dict[str, int]:
    """How many steps of each kind a plan has: {"Launch": 2, "Fill": 1}."""
    return dict(Counter(type(step).__name__ for step in plan))


def kernel_rows(plan: Sequence[Step], infos: Iterable[KernelInfo]) -> list[dict[str, Any]]:
    """The launches of a plan as rows have them: how each is launched, and what its kernel takes as compiled."""
    by_name = {info.name: info for info in infos}
    rows = []
    for step in plan:
        if isinstance(step, Launch):
            info = by_name[step.kernel]
            rows.append(
                {
                    "name": step.kernel,
                    "grid": list(step.grid),
                    "block": list(step.block),
                    "shared": step.shared,
                    "registers": info.registers,
                    "static_shared": info.static_shared,
                    "local_bytes": info.local_bytes,
                    "spill_bytes": info.spill_bytes,
                    "max_threads": info.max_threads,
                }  # fmt: skip
            )
    return rows


def touched_bytes(plan: Sequence[Step], tensors: Sequence[Tensor]) -> float:
    """Bytes of the tensors that the steps of a plan name, each tensor once for each kernel.

    What a kernel takes of a tensor is not known before it runs: the whole tensor counts, and counts once for a kernel
    that is launched in pieces. So it says how often a plan goes through memory, not what it moves to the byte.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    taken: dict[tuple[object, str], int] = {}
    for step in plan:
        for name in tensors_of((step,)):
            tensor = by_name.get(name)
            if tensor is None:
                continue
            size = tensor.nbytes
            if isinstance(step, Fill | Copy) and step.count is not None:
                size = min(size, step.count * ITEM_SIZES[tensor.dtype])
            key = (_kernel(step), name)
            taken[key] = max(size, taken.get(key, 0))
    return float(sum(taken.values()))


def _kernel(step: Step) -> object:
    return step.kernel if isinstance(step, Launch) else (type(step).__name__, tensors_of((step,)))
