"""What can go wrong, and the exit status that each kind of wrong ends in."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of every command. `worst` says which one wins when several apply."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    WRONG = 3
    NOTHING = 4
    CANNOT = 5
    CRASHED = 6
    INTERNAL = 70
    INTERRUPTED = 130


# A wrong result outranks everything, because a report that hides one is worthless; a crash outranks what
# can be mended on the command line; "nothing was checked" only matters when nothing else went wrong.
_PRECEDENCE = (Exit.WRONG, Exit.CRASHED, Exit.INTERNAL, Exit.USAGE, Exit.CANNOT, Exit.REGRESSION, Exit.NOTHING)


def worst(statuses: "list[Exit]") -> Exit:
    """The exit status of a run in which all of `statuses` occurred."""
    return next((status for status in _PRECEDENCE if status in statuses), Exit.OK)


class KbenchError(Exception):
    """An error with a message for the user: what is wrong, where, and what to do next."""

    exit_status = Exit.USAGE

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(KbenchError):
    """The command line, or a file named on it, cannot be understood."""


class CannotRunError(KbenchError):
    """This machine lacks what the command needs: a GPU, a compiler, memory, a writable folder."""

    exit_status = Exit.CANNOT


class WrongResult(KbenchError):
    """A kernel that a command relies on computes something wrong."""

    exit_status = Exit.WRONG


class LibraryMissing(CannotRunError):
    """An optional library that one version is built on is not installed: the version is skipped by name."""


class GpusMissing(CannotRunError):
    """A step over several GPUs, where there are fewer: such a check shape is skipped by name."""


class CompileError(KbenchError):
    """A `.cu` does not compile, or lacks a kernel that a plan names.

    `message` is one line; `log` is the compiler's whole output, with the user's file and line.
    """

    def __init__(self, message: str, log: str = "", hint: str = ""):
        super().__init__(message, hint)
        self.log = log


class LaunchRefused(KbenchError):
    """A plan asks for more than the device or the compiled kernel allows: known before launch."""

    exit_status = Exit.CRASHED


class KernelFault(KbenchError):
    """A kernel was stopped: an illegal access, a trap, a deadlock, a time limit.

    `kind` is one of FAULT_KINDS. `context_lost` says that the device cannot be used any more in this
    process: the worker has to be replaced.
    """

    exit_status = Exit.CRASHED

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        kernel: str = "",
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        location: str = "",
        context_lost: bool = False,
    ):
        super().__init__(message)
        if kind not in FAULT_KINDS:
            raise ValueError(f"unknown kind of fault: {kind}")
        self.kind = kind
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.location = location
        self.context_lost = context_lost

    def details(self) -> list[str]:
        """Where it happened, as far as it is known: no line or one."""
        parts = (("kernel", self.kernel), ("block", self.block), ("thread", self.thread), ("at", self.location))
        line = ", ".join(f"{name} {value}" for name, value in parts if value)
        return [line] if line else []

    @property
    def row_status(self) -> str:
        """The status of the row that this fault ends: one of `fail`, `crashed`, `hung`."""
        return FAULT_KINDS[self.kind]


# Faults that only a wrong kernel can have are a wrong result; the rest stopped before there was a result.
FAULT_KINDS = {
    "out-of-bounds": "fail",
    "misaligned": "fail",
    "barrier-divergence": "fail",
    "warp-divergence": "fail",
    "inactive-lane": "fail",
    "deadlock": "hung",
    "timeout": "hung",
    "assert": "crashed",
    "trap": "crashed",
    "stack-overflow": "crashed",
    "arithmetic": "crashed",
    "illegal-access": "crashed",
    "launch-failed": "crashed",
    "died": "crashed",
}
