"""Batches on their way to the device, and reports on their way back, without the device waiting for the host.

On a GPU the next batch travels on a stream of its own, through pinned memory, while the step before still runs; its
report is read one step late. The emulator has run everything when a call returns, so there both are plain copies.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from kbench.family import Array

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice
    from kbench.train.engine import Engine

# Batches that may be under way: one is read by the GPU while the next arrives.
_SLOTS = 2


class Feed(Protocol):
    """Moves batches in and reports out."""

    def put(self, inputs: Array, targets: Array) -> None:
        """Queue a batch, int32 (B, T) each: what is queued afterwards sees it."""

    def ask(self) -> None:
        """Queue reading the report of what is queued so far."""

    def answer(self) -> Array:
        """The oldest report asked for, fp32 (8,); waits until it is there."""

    @property
    def asked(self) -> int:
        """How many reports are under way."""


class DirectFeed:
    """For a device that has run everything when a call returns."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._reports: deque[Array] = deque()

    def put(self, inputs: Array, targets: Array) -> None:
        self._engine.fill("inputs", inputs)
        self._engine.fill("targets", targets)

    def ask(self) -> None:
        self._reports.append(self._engine.fetch("report"))

    def answer(self) -> Array:
        return self._reports.popleft()

    @property
    def asked(self) -> int:
        return len(self._reports)


class CudaFeed:
    """For a GPU."""

    def __init__(self, engine: Engine):
        import cupy

        self._cuda, self._engine = cupy.cuda, engine
        self._main = cast("CudaDevice", engine.device).stream
        with engine.device.activate():
            self._copies = cupy.cuda.Stream(non_blocking=True)
            names = ("inputs", "targets")
            self._slots = [_Slot(cupy, [engine.buffers[name] for name in names]) for _ in range(_SLOTS)]
            self._reports: deque[tuple[Array, Any, Any]] = deque()
        self._turn = 0

    def put(self, inputs: Array, targets: Array) -> None:
        with self._engine.device.activate():
            slot = self._slots[self._turn % _SLOTS]
            self._turn += 1
            slot.consumed.synchronize()  # long ago, unless the host is two batches ahead
            slot.load((inputs, targets), self._copies, self._main)

    def ask(self) -> None:
        with self._engine.device.activate():
            buffer = self._engine.buffers["report"]
            memory = self._cuda.alloc_pinned_memory(buffer.tensor.nbytes)
            values = np.frombuffer(memory, np.float32, buffer.tensor.count)
            runtime = self._cuda.runtime
            runtime.memcpyAsync(
                values.ctypes.data, buffer.address, buffer.tensor.nbytes, runtime.memcpyDeviceToHost, self._main.ptr
            )
            event = self._cuda.Event(disable_timing=True)
            event.record(self._main)
            self._reports.append((values, event, memory))

    def answer(self) -> Array:
        values, event, _ = self._reports.popleft()
        with self._engine.device.activate():
            event.synchronize()
        return values.copy()

    @property
    def asked(self) -> int:
        return len(self._reports)


class _Slot:
    """One batch under way: pinned on the host, staged on the device, and copied from there when its turn comes."""

    def __init__(self, cupy: Any, targets: list[Any]):
        self._runtime, self._targets = cupy.cuda.runtime, targets
        sizes = [buffer.tensor.nbytes for buffer in targets]
        self._pinned = [cupy.cuda.alloc_pinned_memory(size) for size in sizes]
        self._host = [
            np.frombuffer(memory, np.int32, buffer.tensor.count)
            for memory, buffer in zip(self._pinned, targets, strict=True)
        ]
        self._staged = [cupy.cuda.alloc(size) for size in sizes]
        self._arrived = cupy.cuda.Event(disable_timing=True)
        self.consumed = cupy.cuda.Event(disable_timing=True)

    def load(self, batch: tuple[Array, ...], copies: Any, main: Any) -> None:
        runtime = self._runtime
        for values, host, staged in zip(batch, self._host, self._staged, strict=True):
            host[...] = values.reshape(-1)
            runtime.memcpyAsync(staged.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, copies.ptr)
        self._arrived.record(copies)
        main.wait_event(self._arrived)
        for staged, buffer in zip(self._staged, self._targets, strict=True):
            size = buffer.tensor.nbytes
            runtime.memcpyAsync(buffer.address, staged.ptr, size, runtime.memcpyDeviceToDevice, main.ptr)
        self.consumed.record(main)
