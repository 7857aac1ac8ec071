"""Which card it is: its UUID and limits, and who uses it, from a driver and an NVML that are made up."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kbench.device.cuda import card

BYTES = bytes([0, *range(1, 16)])  # a zero first: it must not end the text


class NVMLError(Exception):
    pass


def use(percent: int) -> Any:
    return SimpleNamespace(gpu=percent, memory=0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card on bus 0000:1B:00.0 that may draw 650 W, of two whose order is not NVML's."""

    def handle(bus: bytes) -> str:
        return {b"0000:1B:00.0": "right", b"0000:2C:00.0": "wrong"}[bus]

    nvml = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByPciBusId=handle,
        nvmlDeviceGetEnforcedPowerLimit={"right": 650_000, "wrong": 300_000}.__getitem__, NVML_CLOCK_SM=1,
        nvmlDeviceGetMaxClockInfo=lambda card, kind: {("right", 1): 1980, ("wrong", 1): 1410}[card, kind],
        nvmlDeviceGetApplicationsClock=lambda card, kind: {("right", 1): 1830, ("wrong", 1): 1095}[card, kind],
        nvmlDeviceGetComputeRunningProcesses=lambda card: [], nvmlDeviceGetUtilizationRates=lambda card: use(0),
    )  # fmt: skip
    driver = SimpleNamespace(
        cuDeviceGet=lambda ordinal: (0, ordinal), cuDeviceGetUuid=lambda device: (0, SimpleNamespace(bytes=BYTES))
    )
    runtime = SimpleNamespace(deviceGetPCIBusId=["0000:2C:00.0", "0000:1B:00.0"].__getitem__)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(card, "driver_api", lambda: driver)
    return SimpleNamespace(nvml=nvml, driver=driver, patch=monkeypatch)


def test_a_card_has_a_uuid_and_limits(machine: Any) -> None:
    assert card.identity(1) == {
        "uuid": "00010203-0405-0607-0809-0a0b0c0d0e0f", "power_limit_w": 650.0, "sm_clock_mhz": 1980,
        "application_clock_mhz": 1830,
    }  # fmt: skip


def test_what_a_machine_does_not_say_is_none(machine: Any) -> None:
    def refuses(*_: Any) -> Any:
        raise NVMLError("not supported")

    machine.nvml.nvmlDeviceGetEnforcedPowerLimit = machine.nvml.nvmlDeviceGetApplicationsClock = refuses
    found = card.identity(1)
    assert (found["power_limit_w"], found["sm_clock_mhz"], found["application_clock_mhz"]) == (None, 1980, None)
    del machine.nvml.nvmlDeviceGetMaxClockInfo  # as of bindings that do not have it
    assert card.identity(1)["sm_clock_mhz"] is None
    machine.patch.setitem(sys.modules, "pynvml", None)
    machine.driver.cuDeviceGetUuid = lambda device: (999, None)
    assert set(card.identity(1).values()) == {None}


def test_an_instance_of_a_divided_card_is_told_apart_with_cuda_12(machine: Any) -> None:
    other = SimpleNamespace(bytes=bytes(16))
    machine.driver.cuDeviceGetUuid_v2 = lambda device: (0, other)
    assert card.identity(1)["uuid"] == "00000000-0000-0000-0000-000000000000"


# ---------------------------------------------------------------------------------------------- who uses it


@pytest.fixture
def processes(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes NVML list processes, /proc know a few with their parents, and this one be 20."""
    parents = {1: 0, 10: 1, 20: 10, 21: 20, 22: 21, 30: 1, 40: 30}

    def stat(pid: int) -> list[str]:
        return ["S", str(parents[pid])] if pid in parents else []

    monkeypatch.setattr(card, "_stat", stat)
    monkeypatch.setattr("os.getpid", lambda: 20)
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def run(*pids: int) -> None:
        listed = {"right": [SimpleNamespace(pid=pid) for pid in pids], "wrong": [SimpleNamespace(pid=30)]}
        machine.nvml.nvmlDeviceGetComputeRunningProcesses = listed.__getitem__

    return run


@pytest.mark.parametrize(
    ("pids", "expected"),
    [
        ((), ""),
        ((20,), ""),
        ((10, 20, 22), ""),  # what started this process, and what it started
        ((20, 40), "1 other process uses this GPU (pid 40)"),
        ((40, 20, 30, 40), "2 other processes use this GPU (pids 30, 40)"),
        ((30,), "1 other process uses this GPU (pid 30)"),
        ((20, 5000), "1 other process uses this GPU (pid 5000)"),
        ((5000,), ""),  # numbered as the host does: it may be this very process
        ((5000, 5001), "1 other process uses this GPU (pid 5001)"),
    ],
)
def test_other_processes_are_told(processes: Any, pids: tuple[int, ...], expected: str) -> None:
    processes(*pids)
    assert card.busy(1) == expected


def test_a_gpu_is_busy_without_a_process_that_can_be_seen(processes: Any, machine: Any) -> None:
    processes(20)
    looks = iter([use(90), use(80), use(97)])
    machine.nvml.nvmlDeviceGetUtilizationRates = lambda card: next(looks)
    assert card.busy(1) == ""  # its own work may be what keeps it busy
    assert card.busy(1, idle=True) == "others keep this GPU 97% busy"
    looks = iter([use(90), use(3)])  # a driver that has just started
    assert card.busy(1, idle=True) == ""


def test_nobody_is_seen_without_nvml(processes: Any, machine: Any) -> None:
    def refuses(*_: Any) -> Any:
        raise NVMLError("no permission")

    machine.nvml.nvmlDeviceGetComputeRunningProcesses = machine.nvml.nvmlDeviceGetUtilizationRates = refuses
    assert card.busy(1, idle=True) == ""
    machine.nvml.nvmlInit = refuses
    assert card.busy(1, idle=True) == ""
    machine.patch.setitem(sys.modules, "pynvml", None)
    assert card.busy(1, idle=True) == ""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")
def test_this_process_has_a_parent_in_proc() -> None:
    assert card._ancestors(os.getpid())[0] == os.getppid()
    assert card._stat(2**22 + 1) == []
