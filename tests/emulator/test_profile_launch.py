"""The launcher of `kbench profile` on real kernels: what it hands on was proved, and runs."""

from __future__ import annotations

from typing import Any

import pytest

from kbench.catalog import load_catalog
from kbench.check.judge import Judges
from kbench.device.emulator.device import EmulatorDevice
from kbench.jobs import Job
from kbench.profile.launch import launched

pytestmark = pytest.mark.emulator


def test_a_plan_of_several_steps_and_scratch_is_proved_and_handed_on() -> None:
    device = EmulatorDevice()
    catalog = load_catalog()
    sizes = catalog["global_norm"].presets["small"]
    ran: list[Any] = []

    def act(bound: Any, restore: Any) -> None:
        restore(None)
        device.enqueue(bound)
        ran.append(bound.prepared.plan)

    job = Job("global_norm", 3, "", dict(sizes), "fp32", 256)
    answer = launched(device, catalog, job, 1, Judges(device), act)
    device.close()
    assert answer["passed"] and answer["name"] == "global_norm version 3" and answer["reason"] == ""
    assert sum(answer["steps"].values()) == len(ran[0]) > 1
