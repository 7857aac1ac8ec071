"""The processes of an all-reduce's further ranks, each with a GPU and with rows of its own.

Rank 0 is kbench's worker process, which holds the whole tensors. It tells the others what to do, and copies their
rows to and from them through host memory, outside of what is timed. A peer ends when rank 0 closes its pipe or dies,
in whatever way and whatever the peer is waiting for (see `kbench.device.worker`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Protocol

import numpy as np

from kbench.device.base import Buffer, Device
from kbench.device.cuda.nccl import Communicator
from kbench.device.worker import Channel, Message, Worker, WorkerError, WorkerLost
from kbench.errors import KbenchError, KernelFault
from kbench.family import Array, Tensor

# Importing CuPy and making a context take seconds; with eight GPUs on a busy host, tens of them.
START_SECONDS = 120.0
# A copy of a row, or queueing an all-reduce: a second at most. Beyond this the peer hangs.
ANSWER_SECONDS = 60.0


class SharedMemory:
    """Host memory that two processes see. It has no name in any file system, so it goes when both have gone,
    however they end. descriptor: of an existing one, in the process that inherited it."""

    def __init__(self, descriptor: int | None = None):
        self.descriptor = os.memfd_create("kbench-rows") if descriptor is None else descriptor
        self._mapped: mmap.mmap | None = None

    def view(self, nbytes: int) -> Array:
        """The first `nbytes` as an array of bytes; the memory grows to hold them."""
        if self._mapped is None or len(self._mapped) < nbytes:
            if os.fstat(self.descriptor).st_size < nbytes:
                os.ftruncate(self.descriptor, nbytes)
            self._mapped = mmap.mmap(self.descriptor, nbytes)
        return np.frombuffer(self._mapped, np.uint8, nbytes)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
        self._mapped = None


class Peers:
    """Rank 0's side: a process for each rank from 1 on, all of which are told the same and answer together.

    ordinals: their GPUs. target: what runs in them (see `Worker`). Raises KbenchError, with the rank in its message.
    """

    def __init__(self, ordinals: Sequence[int], target: str = "kbench.device.cuda.peers:serve"):
        self.memory = [SharedMemory() for _ in ordinals]
        self._workers: list[Worker] = []
        self._waiting: dict[int, Worker] = {}  # by rank: those that have not answered yet
        try:
            for rank, (ordinal, memory) in enumerate(zip(ordinals, self.memory, strict=True), start=1):
                options = {"rank": rank, "ordinal": ordinal, "memory": memory.descriptor}
                self._workers.append(Worker(target, options, _ignore, (memory.descriptor,)))
            self.call({"do": "start"}, START_SECONDS, "the start of its process")
        except BaseException:
            self.close()
            raise

    def post(self, request: Message) -> None:
        """Tell all peers something; `answers` must follow."""
        for rank, worker in enumerate(self._workers, start=1):
            try:
                worker.post(request)
            except WorkerLost as lost:
                raise _of_rank(rank, lost) from lost
            self._waiting[rank] = worker

    def answers(self, seconds: float, doing: str) -> None:
        """Wait until all have done what they were told. Raises the first error that one of them has."""
        first: Exception | None = None
        deadline = time.monotonic() + seconds
        # All answers are fetched, whatever the first ones are: the next request's must not be mistaken for them.
        while self._waiting:
            try:
                if self.gather(max(0.0, deadline - time.monotonic())):
                    break
                if time.monotonic() >= deadline:
                    first = first or self._late(doing)
            except KbenchError as error:
                first = first or error
        if first is not None:
            raise first

    def gather(self, seconds: float) -> bool:
        """Take the answers that come within some seconds: whether now all are there. Raises the first error."""
        ready = wait([worker.connection for worker in self._waiting.values()], seconds)
        for rank, worker in list(self._waiting.items()):
            if worker.connection in ready:
                del self._waiting[rank]
                try:
                    worker.answer()
                except WorkerLost as lost:
                    raise _of_rank(rank, lost) from lost
                except WorkerError as error:
                    raise KernelFault("died", f"rank {rank}: internal error: {error}", context_lost=True) from error
                except KbenchError as error:
                    error.message = f"rank {rank}: {error.message}"
                    raise
        return not self._waiting

    def _late(self, doing: str) -> KernelFault:
        """End the peers that have not answered in time; what to say of it."""
        ranks, kind = list(self._waiting), "timeout"
        for worker in self._waiting.values():
            worker.kill()
        self._waiting.clear()
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        text = f"{who} of the all-reduce: {doing} did not end within the time limit"
        return KernelFault(kind, text, context_lost=True)

    def call(self, request: Message, seconds: float = ANSWER_SECONDS, doing: str = "") -> None:
        self.post(request)
        self.answers(seconds, doing or f"the request {request['do']!r}")

    def fault(self) -> KernelFault | None:
        """What became of the first peer that is no longer there."""
        for rank, worker in enumerate(self._workers, start=1):
            if not worker.alive:
                return _of_rank(rank, WorkerLost(worker.epitaph()))
        return None

    def close(self) -> None:
        """End the processes at once: they hold nothing that would have to be saved."""
        for worker in self._workers:
            worker.kill()
        for memory in self.memory:
            memory.close()
        self._workers, self.memory, self._waiting = [], [], {}


def _ignore(note: str) -> None:
    """Peers have nothing to tell the user that rank 0 does not tell."""


def _of_rank(rank: int, lost: WorkerLost) -> KernelFault:
    # The communicator is of no use without it, and this process may be inside NCCL, waiting for it: as good as lost.
    return KernelFault(lost.fault.kind, f"rank {rank} of the all-reduce: {lost.fault.message}", context_lost=True)


# ---------------------------------------------------------------------------------------------- in a peer's process


class Joined(Protocol):
    """A rank's communicator, as `kbench.device.cuda.nccl.Communicator` is one."""

    def all_reduce(self, source: int, target: int, count: int, dtype: str, stream: int) -> None: ...


@dataclass(frozen=True)
class _Rows:
    """A rank's rows in one binding: a single one, `target` too, where the sum replaces what is added up."""

    source: Buffer
    target: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.source,) if self.source is self.target else (self.source, self.target)


class Peer:
    """What runs in the process of one rank. device: its GPU. join: makes its communicator, as `Communicator` does."""

    def __init__(self, device: Device, stream: int, rank: int, memory: SharedMemory, join: Callable[..., Joined]):
        self._device, self._stream, self._rank, self._memory, self._join = device, stream, rank, memory, join
        self._joined: Joined | None = None
        self._rows: dict[int, _Rows] = {}

    def handle(self, request: Message) -> None:
        match request["do"]:
            case "start":
                pass  # that this process answers is all that rank 0 wants to know
            case "join":
                with self._device.activate():
                    self._joined = self._join(request["ranks"], bytes.fromhex(request["name"]), self._rank)
            case "bind":
                self._bind(request["binding"], request["count"], request["dtype"], request["in_place"])
            case "free":
                for buffer in self._rows.pop(request["binding"]).buffers:
                    self._device.free(buffer)
            case "load":
                self._load(self._rows[request["binding"]])
            case "launch":
                self._launch(self._rows[request["binding"]])
            case "store":
                self._store(self._rows[request["binding"]])
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _bind(self, binding: int, count: int, dtype: str, in_place: bool) -> None:
        names = ("row",) if in_place else ("source row", "target row")
        buffers = [self._device.alloc(Tensor(name, (count,), dtype, "scratch")) for name in names]
        self._rows[binding] = _Rows(buffers[0], buffers[-1])

    def _load(self, rows: _Rows) -> None:
        """Both rows as rank 0 has them: the target's poison too, so that a row that is not written shows."""
        for buffer, part in self._parts(rows):
            self._device.upload(buffer, part.view(buffer.array.dtype).reshape(buffer.tensor.shape))

    def _launch(self, rows: _Rows) -> None:
        assert self._joined is not None
        tensor = rows.source.tensor
        addresses = rows.source.address, rows.target.address
        try:
            with self._device.activate():
                self._joined.all_reduce(*addresses, tensor.count, tensor.dtype, self._stream)
        except Exception as error:
            # The other ranks wait for this one, which has queued nothing: whatever it was, the group is lost.
            why = str(error) if isinstance(error, KbenchError) else f"{type(error).__name__}: {error}"
            raise KernelFault("launch-failed", why, context_lost=True) from error

    def _store(self, rows: _Rows) -> None:
        """Both rows for rank 0, as the launch left them."""
        self._device.synchronize()
        for buffer, part in self._parts(rows):
            if damage := self._device.damage(buffer):
                where = f"{damage.count} bytes changed at byte {damage.offset} of it"
                raise KernelFault("out-of-bounds", f"the all-reduce writes outside a {damage.tensor}: {where}")
            part[...] = self._device.download(buffer).view(np.uint8)

    def _parts(self, rows: _Rows) -> list[tuple[Buffer, Array]]:
        """The rows, with the part of the shared memory that holds each."""
        size = rows.source.tensor.nbytes
        memory = self._memory.view(len(rows.buffers) * size)
        return [(buffer, memory[i * size : (i + 1) * size]) for i, buffer in enumerate(rows.buffers)]


def serve(channel: Channel, *, rank: int, ordinal: int, memory: int) -> Peer:
    """The entry of a peer's process: see `kbench.device.worker`."""
    from kbench.device.cuda.device import CudaDevice

    device = CudaDevice(ordinal)
    return Peer(device, device.stream.ptr, rank, SharedMemory(memory), Communicator)
