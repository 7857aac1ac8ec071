"""Emptying the L2 cache of a kernel's data, so that it starts from memory as it would in a real program."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kbench.errors import CannotRunError

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# L2 does not replace lines strictly by age and hashes addresses over its slices: writing exactly its size
# leaves part of the old contents behind. Four times the size leaves none that a timing could show.
FLUSH_FACTOR = 4
# For a GPU that reports no L2 size, or a wrong one: the largest known, a B200's, is 126 MB.
FLUSH_AT_LEAST = 128 * 1024 * 1024


def flush_bytes(l2_bytes: int) -> int:
    """How many bytes to write, for an L2 of this size."""
    return max(FLUSH_FACTOR * l2_bytes, FLUSH_AT_LEAST)


class Flush:
    """A buffer to write over, and the reset of lines that a kernel asked to persist.

    Raises CannotRunError if there is no memory for the buffer.
    """

    def __init__(self, device: CudaDevice, nbytes: int | None = None):
        self.nbytes = flush_bytes(device.props.l2_bytes) if nbytes is None else nbytes
        self._memset: Callable[..., None] = device.xp.cuda.runtime.memsetAsync
        self._reset = _persisting_reset()
        with device.activate():
            try:
                self._buffer = device.xp.empty(self.nbytes, dtype="uint8")
            except device.xp.cuda.memory.OutOfMemoryError as error:
                raise CannotRunError(
                    f"no memory for the {self.nbytes >> 20} MiB that flush the L2 cache before each launch",
                    "use smaller sizes, or free memory of the GPU",
                ) from error

    def __call__(self, stream: Any) -> None:
        """Queue the flush. The stream must be idle: persisting lines are reset at once, not in its order."""
        self._reset()
        self.write(stream)

    def write(self, stream: Any, whole: bool = True) -> None:
        """Queue the write alone, which a graph may hold; of one word only unless `whole`."""
        self._memset(self._buffer.data.ptr, 0, self.nbytes if whole else 4, stream.ptr)


def _persisting_reset() -> Callable[[], object]:
    """The call that makes persisting lines ordinary ones; does nothing where cuda-bindings is not installed.

    A write does not evict a persisting line, so a kernel that set such a window would be timed hot.
    """
    try:
        from cuda.bindings import runtime
    except ImportError:
        return lambda: None
    reset: Callable[[], object] = runtime.cudaCtxResetPersistingL2Cache
    return reset
