"""An all-reduce without GPUs: ranks are processes, their memory is numpy's, and files in a folder carry the rows.

As NCCL does, a rank waits for ever for others that never come. The number of a rank's "GPU" says how it misbehaves.
"""

import ctypes
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from check_fakes import FakeDevice
from kbench.device.cuda.peers import Peer, SharedMemory
from kbench.device.dtypes import numpy_dtype
from kbench.errors import CannotRunError, KernelFault
from kbench.family import ITEM_SIZES

DIES_AT_START, HANGS_AT_START, DIES_JOINING, NEVER_JOINS, CANNOT_JOIN = 101, 102, 103, 104, 105
DIES_LAUNCHING, HANGS_LAUNCHING, LAUNCH_FAILS, WRITES_NOTHING, WRITES_TOO_MUCH, NO_MEMORY = 106, 107, 108, 109, 110, 111
LAUNCH_RAISES = 112


class FileCommunicator:
    """Ranks meet in the folder that the name spells; each sum is a file per rank."""

    def __init__(self, ranks, name, rank, gpu=0):
        self.ranks, self.folder, self.rank, self.gpu = ranks, Path(name.decode()), rank, gpu
        self.sums, self.aborted = 0, False
        if gpu == DIES_JOINING:
            os._exit(7)
        if gpu == NEVER_JOINS:
            time.sleep(600)
        if gpu == CANNOT_JOIN:
            raise CannotRunError("no link to the other GPUs")
        self._meet("joined", b"")

    def all_reduce(self, source, target, count, dtype, stream):
        if self.gpu == DIES_LAUNCHING:
            os._exit(7)
        if self.gpu == HANGS_LAUNCHING:
            time.sleep(600)
        if self.gpu == LAUNCH_FAILS:
            raise KernelFault("launch-failed", "an internal error", context_lost=True)
        if self.gpu == LAUNCH_RAISES:
            raise ZeroDivisionError("by zero")  # as CuPy raises errors of its own kinds
        self.sums += 1
        row = ctypes.string_at(source, count * ITEM_SIZES[dtype])
        rows = [np.frombuffer(data, numpy_dtype(dtype)) for data in self._meet(f"sum{self.sums}", row)]
        total = sum(row.astype(np.float32) for row in rows).astype(numpy_dtype(dtype))
        if self.gpu == WRITES_TOO_MUCH:
            total = np.append(total, total[-1])
        if self.gpu != WRITES_NOTHING:
            ctypes.memmove(target, total.ctypes.data, total.nbytes)

    def abort(self):
        self.aborted = True

    def _meet(self, what, data):
        """Every rank's data, once all are there."""
        mine = self.folder / f"{what}-{self.rank}"
        mine.with_suffix(".part").write_bytes(data)
        mine.with_suffix(".part").rename(mine)
        all_of_them = [self.folder / f"{what}-{rank}" for rank in range(self.ranks)]
        while not all(path.exists() for path in all_of_them):
            if self.aborted:
                raise KernelFault("launch-failed", "the communicator was aborted", context_lost=True)
            time.sleep(0.005)
        return [path.read_bytes() for path in all_of_them]


class PeerDevice(FakeDevice):
    def __init__(self, gpu):
        super().__init__()
        self.gpu, self.stream = gpu, SimpleNamespace(ptr=0)

    def alloc(self, tensor):
        if self.gpu == NO_MEMORY:
            raise CannotRunError(f"not enough GPU memory: tensor {tensor.name} needs much", "use smaller sizes")
        return super().alloc(tensor)


def serve(channel, *, rank, ordinal, memory):
    if ordinal == DIES_AT_START:
        os._exit(7)
    if ordinal == HANGS_AT_START:
        time.sleep(600)
    return Peer(
        PeerDevice(ordinal), 0, rank, SharedMemory(memory), lambda *names: FileCommunicator(*names, gpu=ordinal)
    )
