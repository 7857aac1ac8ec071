"""NCCL through CuPy: missed by name where it is not installed, and a communicator whose errors are kbench's."""

from __future__ import annotations

import warnings
from typing import Any

from kbench.errors import CannotRunError, KernelFault, LibraryMissing
from kbench.install import install_command

HINT = "NCCL_DEBUG=INFO makes NCCL say why on stderr"

# What NCCL adds up, by the name of CuPy's constant.
TYPES = {
    "fp32": "NCCL_FLOAT32",
    "bf16": "NCCL_BFLOAT16",
    "fp16": "NCCL_FLOAT16",
    "fp64": "NCCL_FLOAT64",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
}


def load_nccl() -> Any:
    """CuPy's binding. Raises LibraryMissing where NCCL's library is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of a library that it does not find: the row says so
        from cupy.cuda import nccl, runtime
    if not getattr(nccl, "available", False):
        extra = f"nccl{runtime.runtimeGetVersion() // 1000}"
        raise LibraryMissing("the library NCCL is not installed", install_command(extra))
    return nccl


def unique_id() -> bytes:
    """What the ranks of one communicator find each other by. Raises CannotRunError."""
    nccl = load_nccl()
    try:
        name: bytes = nccl.get_unique_id()
    except nccl.NcclError as error:
        raise CannotRunError(f"NCCL cannot start: {error}", HINT) from error
    return name


class Communicator:
    """One rank's place in a communicator of `ranks` GPUs; this thread's current GPU is the rank's.

    Making one blocks until all ranks have come, for ever if one never does. Raises CannotRunError.
    """

    def __init__(self, ranks: int, name: bytes, rank: int):
        self._nccl = load_nccl()
        self._types = {dtype: int(getattr(self._nccl, constant)) for dtype, constant in TYPES.items()}
        try:
            self._communicator = self._nccl.NcclCommunicator(ranks, name, rank)
        except self._nccl.NcclError as error:
            gpus = f"{ranks} GPUs" if ranks > 1 else "one GPU"
            raise CannotRunError(f"NCCL cannot make a communicator of {gpus}: {error}", HINT) from error

    def all_reduce(self, source: int, target: int, count: int, dtype: str, stream: int) -> None:
        """Queue the sum of `count` elements at address `source` over all ranks; it comes to `target`."""
        try:
            self._communicator.allReduce(source, target, count, self._types[dtype], self._nccl.NCCL_SUM, stream)
        except self._nccl.NcclError as error:
            raise KernelFault("launch-failed", f"the all-reduce: {error}; {HINT}", context_lost=True) from error

    def abort(self) -> None:
        """Give up what is queued, and the communicator: never waits for other ranks. From any thread."""
        self._communicator.abort()
