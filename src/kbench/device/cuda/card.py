"""Which card it is, beyond its model, and who else uses it: two of one model may be cooled, or allowed to draw power,
differently."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kbench.device.cuda.nvml import Nvml
from kbench.device.cuda.steps import driver_api

T = TypeVar("T")

# NVML counts the time in which any kernel ran, over the last second at most. Starting a context shows a few percent.
_BUSY_PERCENT = 20
# A driver that has just been loaded clears the memory's error correction, which counts as use: it has to last.
_LOOKS, _BETWEEN_LOOKS_S = 3, 0.5


def identity(ordinal: int) -> dict[str, Any]:
    """The card's UUID, its power limit in watts and its SM clock limits in MHz as they are set now; None for what this
    machine does not say.

    sm_clock_mhz: the highest clock. application_clock_mhz: the one that it is set to; without it, or where the card may
    exceed it by itself, the first holds. A range of clocks locked with nvidia-smi is in neither: NVML does not tell it.
    """
    return {"uuid": _uuid(ordinal), **limits(ordinal)}


def limits(ordinal: int) -> dict[str, float | int | None]:
    """Those of `identity` that decide how fast any card of the model may run."""
    return {
        "power_limit_w": _ask(ordinal, lambda nvml, card: float(nvml.nvmlDeviceGetEnforcedPowerLimit(card)) / 1e3),
        "sm_clock_mhz": _ask(ordinal, lambda nvml, card: int(nvml.nvmlDeviceGetMaxClockInfo(card, nvml.NVML_CLOCK_SM))),
        "application_clock_mhz": _ask(
            ordinal, lambda nvml, card: int(nvml.nvmlDeviceGetApplicationsClock(card, nvml.NVML_CLOCK_SM))
        ),
    }


def busy(ordinal: int, idle: bool = False) -> str:
    """Who else uses the GPU, as a remark such as "2 other processes use this GPU (pids 312, 977)"; "" where nobody is
    seen to, or NVML is missing.

    This process, those that it comes from and those that come from it are not others. idle: this process has given the
    GPU no work in the last seconds, so that what keeps it busy is somebody else's, also if no process is seen.
    """
    if pids := _others(ordinal):
        count = "1 other process uses" if len(pids) == 1 else f"{len(pids)} other processes use"
        return f"{count} this GPU (pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids))})"
    used = _used_percent(ordinal) if idle else 0
    return f"others keep this GPU {used}% busy" if used > _BUSY_PERCENT else ""


def _uuid(ordinal: int) -> str | None:
    driver = driver_api()
    # CUDA 12's bindings have a second form, which tells the instances of a divided card apart; CUDA 13's only that.
    ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    failed, device = driver.cuDeviceGet(ordinal)
    if failed:
        return None
    failed, answer = ask(device)
    return None if failed else str(uuid.UUID(bytes=bytes(answer.bytes)))


def _ask(ordinal: int, question: Callable[[Any, Any], T]) -> T | None:
    """What NVML answers to `question(nvml, card)`; None where it is missing or does not say."""
    nvml = Nvml(ordinal)
    try:
        return nvml.ask(question)
    finally:
        nvml.close()


# ---------------------------------------------------------------------------------------------- who uses it


def _others(ordinal: int) -> list[int]:
    """The processes with a context on the card that have nothing to do with this one."""
    found = _ask(
        ordinal, lambda nvml, card: [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(card)]
    )
    own = {os.getpid(), *_ancestors(os.getpid())}
    pids = sorted(set(found or ()))
    others = [pid for pid in pids if pid not in own and os.getpid() not in _ancestors(pid)]
    # In a container NVML may number processes as the host does. One of those is then this one, if it has a context; a
    # process that is alone with its card must not take itself for another.
    foreign = [pid for pid in others if not _stat(pid)]
    if foreign and len(others) == len(pids):
        others.remove(foreign[0])
    return others


def _ancestors(pid: int) -> list[int]:
    """The process that started this one, its own, and so on; as far as /proc tells."""
    found: list[int] = []
    while fields := _stat(pid):
        pid = int(fields[1])
        if pid in (0, *found):
            break
        found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """State, parent and more of a process; empty where there is none of this number, or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # its name comes before, and may hold anything


def _used_percent(ordinal: int) -> int:
    """The least of some looks at how much of the time a kernel runs."""
    used = 0
    for look in range(_LOOKS):
        if look:
            time.sleep(_BETWEEN_LOOKS_S)
        used = _ask(ordinal, lambda nvml, card: int(nvml.nvmlDeviceGetUtilizationRates(card).gpu)) or 0
        if used <= _BUSY_PERCENT:
            break
    return used
