"""Memory that several plans of one family share, so that each can run in the very place of the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kbench.check.buffers import Buffers
from kbench.device.base import Buffer, Device
from kbench.family import Tensor


@contextmanager
def shared_place(device: Device, plans: Sequence[Buffers]) -> Iterator[None]:
    """Memory for all that the plans touch, filled in as each one's `by_name`, and freed at the end.

    plans: buffers that hold no memory of their own (they are not entered). Tensors that are the same for several plans
    are the same memory; scratch of one name and two shapes is not.
    """
    owned: list[Buffer] = []
    try:
        for tensor in _distinct(plans):
            buffer = device.alloc(tensor)
            owned.append(buffer)
            for plan in plans:
                if any(_same(tensor, other) for other in plan.tensors):
                    plan.by_name[tensor.name] = buffer
        yield
    finally:
        for plan in plans:
            plan.by_name.clear()
        for buffer in owned:
            device.free(buffer)


def place_bytes(plans: Sequence[Buffers]) -> int:
    """Bytes of the tensors of a place, without redzones."""
    return sum(tensor.nbytes for tensor in _distinct(plans))


def _distinct(plans: Sequence[Buffers]) -> list[Tensor]:
    found: list[Tensor] = []
    for plan in plans:
        found += [tensor for tensor in plan.tensors if not any(_same(tensor, other) for other in found)]
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    # Not by equality: their draws are functions, made anew whenever the family is asked.
    return (one.name, one.shape, one.dtype, one.role) == (other.name, other.shape, other.dtype, other.role)
