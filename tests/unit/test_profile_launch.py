"""What runs under ncu: wrong versions never, and between start and stop of the profiler the plan alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from check_fakes import COUNT, PLAN, FakeDevice, double, doubling_family
from kbench.check.judge import Judges
from kbench.jobs import Job
from kbench.measure import flush
from kbench.params import Param
from kbench.profile import launch
from kbench.profile.launch import Spec, launch_profiled, launched

JOB = Job("doubling", 1, "", {"N": COUNT}, "fp32", 128)


class Card(FakeDevice):
    """Runs `kernel` in place of what was compiled."""

    def __init__(self, kernel: Any):
        super().__init__()
        self.kernel = kernel

    def build(self, source: Any, kernels: Any, arch: str = "") -> dict[str, Any]:
        return {"double": self.kernel}


class Families(dict[str, Any]):
    """As much of a catalog as it takes."""

    def version(self, name: str, number: int) -> Any:
        return self[name].by_number[number]


def answer(kernel: Any, tmp_path: Path) -> tuple[dict[str, Any], int]:
    """What is said of a version with this kernel, and how often it was handed on."""
    source = tmp_path / "doubling.cu"
    source.write_text("")
    family = replace(doubling_family(PLAN), sources={1: str(source)})
    device, handed = Card(kernel), list[Any]()
    families: Any = Families(doubling=family)
    found = launched(device, families, JOB, 1, Judges(device), lambda bound, restore: handed.append(bound))
    assert device.live == 0
    return found, len(handed)


def test_a_version_that_is_wrong_is_not_launched(tmp_path: Path) -> None:
    found, handed = answer(lambda schedule, *arrays: None, tmp_path)
    assert not found["passed"] and "elements wrong" in found["reason"] and handed == 0
    found, handed = answer(double, tmp_path)
    assert found["passed"] and found["steps"] == {"Launch": 1} and handed == 1


def test_plan_and_scratch_are_those_of_the_parameters(tmp_path: Path) -> None:
    asked: list[int] = []

    def own(problem: Any, block: int, props: Any, ROWS: int) -> tuple[()]:
        asked.append(ROWS)
        return ()

    def plan(problem: Any, block: int, props: Any, ROWS: int) -> Any:
        asked.append(ROWS)
        return PLAN

    family = doubling_family(PLAN)
    version = replace(family.versions[0], plan=plan, scratch=own, params={"ROWS": Param(2, (1, 2))})
    source = tmp_path / "doubling.cu"
    source.write_text("")
    families: Any = Families(doubling=replace(family, versions=(version,), sources={1: str(source)}))
    device = Card(double)
    for params, value in (({"ROWS": 1}, 1), ({}, 2)):
        asked.clear()
        job = replace(JOB, params=params)
        assert launched(device, families, job, 1, Judges(device), lambda bound, restore: None)["passed"]
        assert set(asked) == {value} and len(asked) == 3


@pytest.mark.parametrize("cold", [True, False])
def test_between_start_and_stop_of_the_profiler_is_the_plan(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    device = SimpleNamespace(
        activate=nullcontext, stream=None, enqueue=said.append, synchronize=lambda: said.append("wait")
    )
    monkeypatch.setattr(flush, "Flush", lambda device: lambda stream: said.append("flush"))
    monkeypatch.setattr(launch, "_switch_profiler", lambda on: said.append("on" if on else "off"))
    monkeypatch.setattr(launch, "WARMUP_S", 0.0)
    spec = Spec((JOB,), 1, "", cold=cold, repeats=2, marked=True)
    fakes: Any = device, "plan", lambda stream: said.append("restore"), spec, "marker"
    launch_profiled(*fakes)
    emptied = ["flush", "wait"] if cold else []
    assert said == ["restore", "wait", *emptied, "on", "marker", "plan", "wait", "off"] * 2
