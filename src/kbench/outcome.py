"""From an exception to what a row says of it."""

from __future__ import annotations

import traceback

from kbench.errors import (
    CannotRunError,
    CompileError,
    GpusMissing,
    KbenchError,
    KernelFault,
    LaunchRefused,
    LibraryMissing,
)


def outcome_of(error: Exception, purpose: str = "time") -> tuple[str, str, list[str]]:
    """The status, reason and details of a row that `error` ended. purpose: the job's."""
    match error:
        case KernelFault():
            return error.row_status, str(error), error.details()
        case LaunchRefused():
            return "unlaunchable", str(error), []
        case CompileError():
            return "invalid", str(error), error.log.splitlines()
        case LibraryMissing():
            return "skipped", str(error), []
        case GpusMissing() if purpose == "check":  # a family's check shapes are for machines of any size
            return "skipped", str(error), []
        case CannotRunError():
            return "unable", str(error), []
        case MemoryError():
            return "unable", "not enough main memory for the reference; try smaller sizes", []
        case KbenchError():
            return "invalid", str(error), []
    return "internal", f"internal error: {type(error).__name__}: {error}", traceback.format_exception(error)
