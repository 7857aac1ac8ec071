"""What a CUDA status means to the user. Driver and runtime use the same numbers for what a kernel can do wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kbench.errors import CannotRunError, KbenchError, KernelFault, LaunchRefused

_SANITIZER = "compute-sanitizer names the place"

# Status to kind of fault and meaning. All of these end the context: every later call fails with the same status
# ("sticky" errors; CUDA Driver API, CUresult: "the process must be terminated and relaunched").
_STICKY = {
    700: ("illegal-access", f"illegal memory access: a kernel touched memory that is not allocated; {_SANITIZER}"),
    702: ("timeout", "the display driver's time limit stopped a kernel"),
    710: ("assert", "a device-side assert failed; its message stands on stderr"),
    714: ("stack-overflow", "a kernel's call stack or stack memory is corrupt"),
    715: ("trap", "a kernel ran into a trap or an illegal instruction"),
    716: ("misaligned", f"a kernel used an address that is not a multiple of the access size; {_SANITIZER}"),
    717: ("illegal-access", f"an instruction for one memory space was given an address of another; {_SANITIZER}"),
    718: ("launch-failed", "a kernel jumped outside its code"),
    719: ("launch-failed", f"a kernel trapped, or went outside its shared or local memory; {_SANITIZER}"),
    721: ("launch-failed", "a kernel ended without giving back its tensor memory"),
    214: ("launch-failed", "the GPU's memory has an uncorrectable ECC error"),
    999: ("launch-failed", "the driver reports an unknown error"),
}
# Statuses that a launch itself returns, with nothing lost.
_REFUSALS = {
    1: "the driver calls a launch parameter invalid",
    701: "the launch needs more registers or shared memory than a block can have",
    720: "more blocks than fit on the GPU at once for a cooperative launch",
    209: "the module holds no code for this GPU",
}
_OUT_OF_MEMORY = 2


def error_of(status: int, doing: str, kernel: str = "") -> KbenchError:
    """The error for a CUDA status other than 0. `doing`: what failed, as a clause: "launch of k"."""
    if status in _STICKY:
        kind, meaning = _STICKY[status]
        return KernelFault(kind, f"{doing}: {meaning} (CUDA error {status})", kernel=kernel, context_lost=True)
    if status == _OUT_OF_MEMORY:
        return CannotRunError(f"{doing}: not enough GPU memory", "use smaller sizes")
    if status in _REFUSALS:
        return LaunchRefused(f"{doing}: {_REFUSALS[status]} (CUDA error {status})")
    return KernelFault("launch-failed", f"{doing}: CUDA error {status}", kernel=kernel)


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn the exceptions of CuPy's runtime and driver calls, and of its memory pool, into kbench's."""
    from cupy import cuda  # cuda.driver and cuda.runtime are attributes of it, not modules to import

    try:
        yield
    except cuda.memory.OutOfMemoryError as error:  # a MemoryError, which would be taken for one of main memory
        raise error_of(_OUT_OF_MEMORY, doing) from error
    except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
        raise error_of(int(error.status), doing) from error
