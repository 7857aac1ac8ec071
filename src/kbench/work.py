"""What a plan does, counted: its steps by kind, and the memory that they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kbench.family import ITEM_SIZES, Copy, Fill, Launch, Step, Tensor, tensors_of

# Steps that a library computes: a version's own idea is not in them.
LIBRARY_STEPS = ("Gemm", "Sdpa", "SdpaBackward", "AllReduce")


def steps_of(plan: Sequence[Step]) -> dict[str, int]:
    """How many steps of each kind a plan has: {"Launch": 2, "Fill": 1}."""
    return dict(Counter(type(step).__name__ for step in plan))


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
