"""Which card it is, beyond its model: two of one model may be cooled, or allowed to draw power, differently."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from kbench.device.cuda.steps import driver_api


def identity(ordinal: int) -> dict[str, Any]:
    """The card's UUID and its power limit in watts, as it is set now; None for what this machine does not say."""
    return {"uuid": _uuid(ordinal), "power_limit_w": _power_limit(ordinal)}


def _uuid(ordinal: int) -> str | None:
    driver = driver_api()
    # CUDA 12's bindings have a second form, which tells the instances of a divided card apart; CUDA 13's only that.
    ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    failed, device = driver.cuDeviceGet(ordinal)
    if failed:
        return None
    failed, answer = ask(device)
    return None if failed else str(uuid.UUID(bytes=bytes(answer.bytes)))


def _power_limit(ordinal: int) -> float | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        from cupy.cuda import runtime

        pynvml.nvmlInit()
        try:
            # CUDA's ordinals depend on $CUDA_VISIBLE_DEVICES, NVML's do not: the place on the bus is the same.
            card = pynvml.nvmlDeviceGetHandleByPciBusId(runtime.deviceGetPCIBusId(ordinal).encode())
            return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(card)) / 1e3
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except (pynvml.NVMLError, RuntimeError):  # cards without a limit, drivers that do not tell
        return None
