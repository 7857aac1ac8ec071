"""Which card it is: its UUID and power limit, from a driver and an NVML that are made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kbench.device.cuda import card

BYTES = bytes([0, *range(1, 16)])  # a zero first: it must not end the text


class NVMLError(Exception):
    pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card on bus 0000:1B:00.0 that may draw 650 W, of two whose order is not NVML's."""

    def handle(bus: bytes) -> str:
        return {b"0000:1B:00.0": "right", b"0000:2C:00.0": "wrong"}[bus]

    nvml = SimpleNamespace(
        NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByPciBusId=handle,
        nvmlDeviceGetEnforcedPowerLimit={"right": 650_000, "wrong": 300_000}.__getitem__,
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


def test_a_card_has_a_uuid_and_a_limit(machine: Any) -> None:
    assert card.identity(1) == {"uuid": "00010203-0405-0607-0809-0a0b0c0d0e0f", "power_limit_w": 650.0}


def test_what_a_machine_does_not_say_is_none(machine: Any) -> None:
    def refuses(*_: Any) -> Any:
        raise NVMLError("not supported")

    machine.nvml.nvmlDeviceGetEnforcedPowerLimit = refuses
    assert card.identity(1)["power_limit_w"] is None
    machine.patch.setitem(sys.modules, "pynvml", None)
    machine.driver.cuDeviceGetUuid = lambda device: (999, None)
    assert card.identity(1) == {"uuid": None, "power_limit_w": None}


def test_an_instance_of_a_divided_card_is_told_apart_with_cuda_12(machine: Any) -> None:
    other = SimpleNamespace(bytes=bytes(16))
    machine.driver.cuDeviceGetUuid_v2 = lambda device: (0, other)
    assert card.identity(1)["uuid"] == "00000000-0000-0000-0000-000000000000"
