"""Holding a stream, so that everything is queued before the first of it runs.

Queueing a launch takes the host longer than a short kernel runs. If the GPU may start at once, it waits for
the host between two events and that waiting is timed. So a kernel that spins on a flag in host memory goes
first; the host queues the events and the plan behind it and then sets the flag.

Caveat: whatever makes the host wait for the GPU meanwhile (an allocation, the lazy loading of a module,
a launch queue that is full) waits for the hold. The hold then gives up by itself, `timed_out` says so, and
the sample must be thrown away.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.device.base import Buffer
from kbench.family import Launch, Tensor
from kbench.source import load_source

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# Queueing a plan takes under 10 ms, even on a host that is busy with other work; a second is far above
# that, and far below the time limit after which the worker would be taken for hung.
HOLD_LIMIT_S = 1.0


class Hold:
    """The holding kernel of one device, with its flag. One stream can be held at a time."""

    def __init__(self, device: CudaDevice, limit_s: float = HOLD_LIMIT_S):
        self._device = device
        # With unified addressing, host memory from cudaHostAlloc has the same address on the device.
        cuda = device.xp.cuda
        self._memory = cuda.PinnedMemory(2 * ctypes.sizeof(ctypes.c_uint32), cuda.runtime.hostAllocMapped)
        self._words = (ctypes.c_uint32 * 2).from_address(self._memory.ptr)
        words = Tensor("words", (2,), "uint32", "scratch")
        plan = (Launch("hold", (1,), (1,), ("words", int(limit_s * 1e9))),)
        module = device.build(load_source(Path(__file__).with_name("hold.cu")), ["hold"])
        prepared = device.prepare(plan, module, (words,))
        self._bound = device.bind(prepared, {"words": Buffer(words, self._words, self._memory.ptr)})

    def begin(self, stream: Any) -> None:
        """Queue the holding kernel. What was held before must have ended."""
        self._words[0] = 0
        self._words[1] = 0
        self._device.enqueue(self._bound, stream)

    def release(self) -> None:
        """Let the stream go on. Harmless if it is not held."""
        self._words[0] = 1

    @property
    def timed_out(self) -> bool:
        """The last hold ended by itself, before `release`. Valid once the stream has been synchronised."""
        return bool(self._words[1])
