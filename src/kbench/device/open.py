"""Opening a device by its kind."""

from __future__ import annotations

from kbench.device.base import Device
from kbench.errors import CannotRunError, UsageError


def open_device(kind: str, time_limit: float = 30.0, workers: int | None = None) -> Device:
    """kind: "cuda" or "emulator". time_limit: seconds that a launch may take on the emulator; workers: its CPU threads.
    Raises CannotRunError where the device cannot be used."""
    if kind == "cuda":
        from kbench.device.cuda.device import CudaDevice

        return CudaDevice()
    from kbench.device.emulator.device import EmulatorDevice

    return EmulatorDevice(workers=workers, time_limit=time_limit)


def choose_kind(wanted: str) -> tuple[str, str]:
    """The kind that a word of --device stands for, and for auto without a GPU the reason why there is none.

    Raises CannotRunError for "cuda" without a usable GPU, UsageError for another word."""
    from kbench.device.cuda.probe import probe_gpu

    if wanted not in ("auto", "cuda", "emulator"):
        raise UsageError(f"unknown device {wanted!r}", "devices: auto, cuda, emulator")
    if wanted == "emulator":
        return wanted, ""
    reason = probe_gpu()
    if not reason:
        return "cuda", ""
    if wanted == "cuda":
        raise CannotRunError(f"no GPU can be used: {reason}", "run `kbench doctor`, or use --device emulator")
    return "emulator", reason
