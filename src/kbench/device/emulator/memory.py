"""Tensors in memory of their own, between redzones and beyond them pages that fault when touched.

    | guard: faults | front redzone | the tensor | back redzone, up to 15 bytes | guard: faults |

The tensor ends at the guard as closely as 16-byte alignment allows, so that the first access past its end is
caught on the spot; what the redzones catch is found afterwards.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.device.base import Buffer, Damage
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator.runtime import Runtime
from kbench.device.host_memory import available_memory
from kbench.device.redzone import next_pattern, pattern
from kbench.errors import CannotRunError
from kbench.family import Array, Tensor

_ALIGNMENT = 16  # of a tensor: the widest load that a kernel may do on it
# A guard costs address space only. As wide as its tensor, it catches being off by a whole row or plane; within
# limits, so that a tensor of a few bytes is not the neighbour of another, and a huge one does not use up the space.
_MIN_GUARD = 1 << 20
_MAX_GUARD = 1 << 30


@dataclass(frozen=True)
class Place:
    """Where a tensor lies. `base`, `size`: of the readable memory; `start`, `nbytes`: of the tensor within it."""

    base: int
    size: int
    start: int
    nbytes: int
    guard: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def surrounds(self, address: int) -> bool:
        """Whether `address` lies in the memory or one of its guards."""
        return self.base - self.guard <= address < self.base + self.size + self.guard


class Memory:
    """All buffers of one device."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._lock = threading.Lock()
        self._buffers: dict[int, Buffer] = {}

    def alloc(self, tensor: Tensor) -> Buffer:
        """Raises CannotRunError if there is not enough memory."""
        dtype = numpy_dtype(tensor.dtype)
        place = self._reserve(tensor.name, tensor.count * dtype.itemsize)
        array = _bytes_at(place.start, place.nbytes).view(dtype).reshape(tensor.shape)
        buffer = Buffer(tensor, array, place.start, place, next_pattern())
        for zone, whole in _redzones(buffer):
            zone[...] = whole
        with self._lock:
            self._buffers[place.start] = buffer
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give the memory back. Arrays that still view it must not be touched any more."""
        with self._lock:
            known = self._buffers.pop(buffer.address, None)
        if known is not None:
            place: Place = buffer.handle
            buffer.array = None
            self._runtime.release(place.base, place.size, place.guard)

    def free_all(self) -> None:
        for buffer in list(self._buffers.values()):
            self.free(buffer)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All that are allocated, in the order of their addresses."""
        with self._lock:
            return tuple(buffer for _, buffer in sorted(self._buffers.items()))

    def poison(self, buffer: Buffer, byte: int) -> None:
        _bytes_at(buffer.address, buffer.handle.nbytes)[...] = byte

    def damage(self, buffer: Buffer) -> Damage | None:
        """The first redzone that changed; all are repaired."""
        first: Damage | None = None
        for (zone, whole), offset in zip(_redzones(buffer), _zone_offsets(buffer.handle), strict=True):
            changed = np.flatnonzero(zone != whole)
            if changed.size and first is None:
                first = Damage(buffer.tensor.name, offset + int(changed[0]), int(changed.size))
            if changed.size:
                zone[...] = whole
        return first

    def describe(self, address: int, is_write: bool | None) -> str:
        """What an access to `address`, which faulted, was out of; "" if no tensor is near."""
        with self._lock:
            near = [buffer for buffer in self._buffers.values() if buffer.handle.surrounds(address)]
        if not near:
            return ""
        buffer = min(near, key=lambda b: _distance(b.handle, address))
        return _out_of_bounds(buffer, address, is_write)

    def _reserve(self, name: str, nbytes: int) -> Place:
        page = self._runtime.page_size
        body = _round_up(nbytes, _ALIGNMENT)
        size = _round_up(body, page) + page  # at least a page of redzone before the tensor
        guard = min(max(_round_up(nbytes, page), _MIN_GUARD), _MAX_GUARD)
        # Linux hands out address space freely and kills who then uses it, so ask for what is there first.
        free = available_memory()
        base = self._runtime.reserve(size, guard) if size <= free else None
        if not base:
            raise CannotRunError(
                f"tensor {name} needs {nbytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free", "try smaller sizes"
            )
        return Place(base, size, base + size - body, nbytes, guard)


def _out_of_bounds(buffer: Buffer, address: int, is_write: bool | None) -> str:
    tensor, place = buffer.tensor, buffer.handle
    access = {True: "write", False: "read", None: "access"}[is_write]
    offset = address - place.start
    size = numpy_dtype(tensor.dtype).itemsize
    where = "past the end" if address >= place.end else "before the start"
    element = f"element {offset // size} (byte {offset}) of {math.prod(tensor.shape)} elements"
    return f"{access} {where} of tensor {tensor.name}: {element}"


def _distance(place: Place, address: int) -> int:
    return max(place.start - address, address - place.end, 0)


def _redzones(buffer: Buffer) -> tuple[tuple[Array, Array], ...]:
    """The zone before and the zone behind the tensor, each with what it must hold."""
    place: Place = buffer.handle
    zones = (_bytes_at(place.base, place.start - place.base), _bytes_at(place.end, place.base + place.size - place.end))
    starts = _zone_offsets(place)
    return tuple((zone, pattern(buffer.redzone, start, zone.size)) for zone, start in zip(zones, starts, strict=True))


def _zone_offsets(place: Place) -> tuple[int, int]:
    return place.base - place.start, place.nbytes


def _bytes_at(address: int, count: int) -> Array:
    memory: Any = (ctypes.c_uint8 * count).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
