"""AllReduce steps through NCCL: this process is rank 0, each further rank has a GPU and a process of its own.

Rank 0 holds the whole tensors. `distribute` gives the other ranks their rows before a launch, `collect` brings the
rows back after it; both go through host memory, and neither is timed. The launch itself is one call of NCCL in every
process, all of which are queued before rank 0's `enqueue` returns. So what is timed on rank 0 is the all-reduce with
all its waiting for ranks that come late on their GPUs, but no delay of a host.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from kbench.device.cuda.memory import copy_in, copy_out
from kbench.device.cuda.nccl import HINT, TYPES, Communicator, load_nccl, unique_id
from kbench.device.cuda.peers import ANSWER_SECONDS, Peers
from kbench.device.cuda.steps import Address, driver_api, tensors_by_name
from kbench.errors import GpusMissing, KbenchError, KernelFault, LaunchRefused
from kbench.family import ITEM_SIZES, AllReduce, Tensor

# Ranks that are all there find each other in a few seconds; NCCL itself would wait for ever.
JOIN_SECONDS = 120.0
# How soon a rank that has died is noticed.
_WATCH_SECONDS = 0.1


class Group:
    """The ranks of an all-reduce: a communicator, and the processes of all ranks but this one.

    Raises KernelFault if a rank dies or does not come, CannotRunError if NCCL refuses.
    """

    def __init__(self, ranks: int, ordinals: Sequence[int], make_peers: Callable[[Sequence[int]], Peers] = Peers):
        self.ranks = ranks
        self._ordinal = ordinals[0]
        self._fault: KernelFault | None = None
        self._closed = threading.Event()
        self._numbers = itertools.count()
        self._unused: list[int] = []  # bindings whose rows the peers can free
        try:
            self._peers = make_peers(ordinals[1:])
            self.communicator = self._form()
        except KernelFault as fault:
            # Nothing was launched. At most a thread of this process waits in NCCL for ranks that never come, and that
            # disturbs no other work; in a new process, every further row would wait as long as this one did.
            fault.context_lost = False
            raise
        if ranks > 1:
            threading.Thread(target=self._watch, daemon=True, name="all-reduce watch").start()

    def bind(self, count: int, dtype: str, in_place: bool) -> int:
        """Let the peers make rows; the number to name them by."""
        self.require_whole()
        while self._unused:
            self._peers.call({"do": "free", "binding": self._unused.pop()})
        number = next(self._numbers)
        rows = {"count": count, "dtype": dtype, "in_place": in_place}
        self._peers.call({"do": "bind", "binding": number, **rows}, ANSWER_SECONDS, "allocation of its rows")
        return number

    def release(self, number: int) -> None:
        """The rows of a binding are not needed any more. Called by the garbage collector, amid anything."""
        self._unused.append(number)

    def memory(self, nbytes: int) -> list[Any]:
        """The host memory shared with each peer, in the order of ranks from 1 on."""
        return [memory.view(nbytes) for memory in self._peers.memory]

    def call(self, action: str, number: int, doing: str) -> None:
        self.require_whole()
        self._peers.call({"do": action, "binding": number}, ANSWER_SECONDS, doing)

    def launch(self, number: int, queue: Callable[[], None]) -> None:
        """Let all ranks queue the all-reduce, this one by `queue`."""
        self.require_whole()
        self._peers.post({"do": "launch", "binding": number})
        try:
            try:
                # A first launch connects the ranks, so it waits for theirs, as theirs do for this one. A rank that
                # fails ends, and `_watch` then ends this wait.
                queue()
            finally:
                # What a rank says is wrong comes first: that this one was given up follows from it.
                self._peers.answers(ANSWER_SECONDS, "queueing its all-reduce")
        except KernelFault as fault:
            self._fault = fault
            raise

    def require_whole(self) -> None:
        """Raises KernelFault if a rank is gone."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        self._closed.set()
        self.communicator.abort()
        self._peers.close()

    def _form(self) -> Communicator:
        try:
            return self._join()
        except BaseException:
            self._peers.close()
            raise

    def _join(self) -> Communicator:
        """NCCL's call comes back when all ranks have come, so it has a thread of its own, and a time limit."""
        name = unique_id()
        mine: Future[Communicator] = Future()

        def join() -> None:
            try:
                self._use_gpu()
                mine.set_result(Communicator(self.ranks, name, 0))
            except BaseException as error:
                mine.set_exception(error)

        self._peers.post({"do": "join", "ranks": self.ranks, "name": name.hex()})
        threading.Thread(target=join, daemon=True, name="all-reduce join").start()
        deadline = time.monotonic() + JOIN_SECONDS
        while not (mine.done() and self._peers.gather(0.0)):
            if mine.done():
                mine.result()  # raises where NCCL refused
            self._peers.gather(_WATCH_SECONDS)  # raises as soon as one of them fails
            if time.monotonic() > deadline:
                late = f"the ranks of an all-reduce over {self.ranks} GPUs did not find each other"
                raise KernelFault("timeout", f"{late} in {JOIN_SECONDS:g} s; {HINT}", context_lost=True)
        return mine.result()

    def _watch(self) -> None:
        """NCCL waits for ever for a rank that has died, so the launches are given up as soon as one has."""
        self._use_gpu()
        while not self._closed.wait(_WATCH_SECONDS):
            if fault := self._peers.fault():
                self._fault = self._fault or fault
                self.communicator.abort()
                return

    def _use_gpu(self) -> None:
        from cupy.cuda import runtime

        runtime.setDevice(self._ordinal)


class Groups:
    """The groups of one process, by their number of ranks. ordinal: the GPU of rank 0."""

    def __init__(self, ordinal: int):
        self._ordinal = ordinal
        self._made: dict[int, Group] = {}
        self._failed: dict[int, KbenchError] = {}  # forming one again would fail again, after minutes

    def of(self, ranks: int) -> Group:
        """Raises GpusMissing, LibraryMissing, or what `Group` raises, which it raises again for as many ranks."""
        if ranks in self._failed:
            raise self._failed[ranks].with_traceback(None)
        if ranks not in self._made:
            from cupy.cuda import runtime

            visible = int(runtime.getDeviceCount())
            if ranks > visible:
                raise GpusMissing(f"needs {ranks} GPUs, this process sees {visible}")
            load_nccl()
            try:
                self._made[ranks] = Group(ranks, [(self._ordinal + rank) % visible for rank in range(ranks)])
            except KbenchError as error:
                self._failed[ranks] = error
                raise
        return self._made[ranks]

    def close(self) -> None:
        for group in self._made.values():
            group.close()
        self._made.clear()


class PreparedAllReduce:
    """An all-reduce whose tensors fit, and the group that runs it. Raises LaunchRefused where they do not fit."""

    def __init__(self, step: AllReduce, tensors: Sequence[Tensor], group_of: Callable[[int], Group]):
        known = tensors_by_name(tensors)
        for name in (step.source, step.target):
            if name not in known:
                raise LaunchRefused(f"an all-reduce names the tensor {name!r}; the family has {', '.join(known)}")
        source, target = known[step.source], known[step.target]
        if source.dtype != target.dtype:
            names = f"{source.name} ({source.dtype}) to {target.name} ({target.dtype})"
            raise LaunchRefused(f"all-reduce of {names}: types differ")
        if source.dtype not in TYPES:
            raise LaunchRefused(f"NCCL cannot add up tensor {source.name}, which holds {source.dtype}")
        if step.ranks < 1 or step.count < 1:
            raise LaunchRefused(f"an all-reduce of {step.count} elements over {step.ranks} ranks: both must be over 0")
        for tensor in (source, target):
            if tensor.count != step.ranks * step.count:
                rows = f"{step.ranks} rows of {step.count} elements"
                raise LaunchRefused(f"all-reduce: tensor {tensor.name} of {tensor.count} elements is not {rows}")
        self._source, self._target, self._dtype = source.name, target.name, source.dtype
        self._count = step.count
        self._group = group_of(step.ranks)

    def bind(self, address: Address) -> BoundAllReduce:
        return BoundAllReduce(self._group, address(self._source), address(self._target), self._count, self._dtype)


class BoundAllReduce:
    """Queues the all-reduce of all ranks on rank 0's stream and on theirs; moves their rows, outside of what is timed.

    source, target: addresses of the whole tensors.
    """

    def __init__(self, group: Group, source: int, target: int, count: int, dtype: str):
        self._group, self._dtype, self._count = group, dtype, count
        self._tensors = (source,) if source == target else (source, target)
        self._row = count * ITEM_SIZES[dtype]
        if group.ranks > 1:
            self._number = group.bind(count, dtype, in_place=source == target)
            # At the end of this process the peers end too, and everything of theirs with them.
            weakref.finalize(self, group.release, self._number).atexit = False

    def __call__(self, stream: int) -> None:
        def queue() -> None:
            self._group.communicator.all_reduce(self._tensors[0], self._tensors[-1], self._count, self._dtype, stream)

        if self._group.ranks == 1:
            queue()
            return
        _refuse_capture(stream, self._group.ranks)
        self._group.launch(self._number, queue)

    def distribute(self, stream: Any) -> None:
        """Give every other rank its rows as rank 0 has them. `stream`: CuPy's, current in this thread."""
        for row, part in self._rows_of_peers():
            copy_out(row, part, stream)
        if self._group.ranks > 1:
            self._group.call("load", self._number, "taking its rows")

    def collect(self, stream: Any) -> None:
        """Bring the rows of every other rank back, after a launch."""
        if self._group.ranks > 1:
            self._group.call("store", self._number, "its all-reduce, or giving back its rows,")
        for row, part in self._rows_of_peers():
            copy_in(row, part, stream)

    def _rows_of_peers(self) -> list[tuple[int, np.ndarray[Any, Any]]]:
        """Address of each row that another rank has too, with the host memory through which it goes."""
        size = self._row
        return [
            (tensor + rank * size, memory[i * size : (i + 1) * size])
            for rank, memory in enumerate(self._group.memory(len(self._tensors) * size), start=1)
            for i, tensor in enumerate(self._tensors)
        ]


def _refuse_capture(stream: int, ranks: int) -> None:
    status, capturing = driver_api().cuStreamIsCapturing(stream)
    if not status and int(capturing):
        others = "the other ranks queue theirs when they are told, which a graph does not do"
        raise LaunchRefused(f"an all-reduce over {ranks} GPUs cannot be captured into a CUDA graph: {others}")
