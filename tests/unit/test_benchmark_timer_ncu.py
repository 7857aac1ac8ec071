"""benchmarks/timer_ncu.py without a GPU: whose launches the kernels are that ncu saw, and what stands in the table."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from fakes import make_row
from kbench.jobs import Job
from kbench.results.schema import Row


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "timer_ncu.py"
    spec = importlib.util.spec_from_file_location("benchmark_timer_ncu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "probe_gpu", lambda: "")
    monkeypatch.setattr(module, "find_ncu", lambda given: SimpleNamespace(path="ncu", version="1"))
    monkeypatch.setattr(module, "Bench", Bench)
    monkeypatch.setattr(module, "CASES", (("one", 1, {"N": 8}), ("wrong", 1, {}), ("two", 2, {})))
    monkeypatch.setattr(module, "REPEATS", 3)
    monkeypatch.setattr(sys, "argv", ["timer_ncu.py"])
    return module


class Bench:
    """Every family's version takes 10 us, but `wrong` is."""

    device: ClassVar[dict[str, Any]] = {"name": "Test GPU"}

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None: ...

    def jobs(self, selection: Any) -> list[Job]:
        (target,) = selection.targets
        return [Job(target.family, target.versions[0], "", {"N": 8}, "fp32", 64)]

    def rows(self, jobs: list[Job]) -> Iterator[Row]:
        for job in jobs:
            facts = {k: v for k, v in asdict(job).items() if k not in ("purpose", "idea", "arch")}
            yield make_row(**facts, **({"status": "fail"} if job.family == "wrong" else {"median_ms": 0.010}))


def raw(*times: float) -> str:
    """CSV of launches of one plan after another: each a marker and, as long as `times` say, kernels."""
    lines = ['"ID","Kernel Name","gpu__time_duration.sum"', '"","","ns"']
    for time in times:
        lines.append('"0","kbench_marker(int)","1000"')
        lines += [f'"0","k<float>(float *)","{part}"' for part in (time * 750, time * 250)]
    return "\n".join(lines)


def test_the_table_compares_medians(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def profile(tool: Any, spec: Any, folder: Path, seconds: float, **options: Any) -> Any:
        asked.update(options, spec=spec)
        answer = {"jobs": [{"steps": {"Launch": 2}}, {"steps": {"Launch": 2, "Fill": 1}}]}
        return SimpleNamespace(raw=raw(9.5, 90, 9.2, 7, 8, 2), answer=answer)

    monkeypatch.setattr(script, "profile", profile)
    assert script.main() == 0
    captured = capsys.readouterr()
    assert [job.family for job in asked["spec"].jobs] == ["one", "two"] and asked["spec"].marked
    assert asked["cache_control"] == "none" and asked["metrics"] == ("gpu__time_duration.sum",)
    rows = json.loads(captured.out)["rows"]
    assert [(row["case"], row["ncu_us"], row["kernels"], row["near"]) for row in rows] == [
        ("one:1", 9.5, 2, True), ("two:2", 7, 2, False),
    ]  # fmt: skip
    assert rows[0]["difference_us"] == pytest.approx(0.5) and rows[1]["unseen_steps"] == 1
    assert "wrong version 1 fail" in captured.err and "1 fills or copies not in ncu's" in captured.err
    assert all(len(line) <= 110 for line in captured.err.splitlines())


def test_launches_that_ncu_missed_are_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(raw=raw(1, 2), answer={"jobs": []})
    monkeypatch.setattr(script, "profile", lambda *anything, **options: found)
    assert script.main() == 5
    assert "ncu saw 2 launches of 6" in capsys.readouterr().err


def test_without_a_gpu(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(script, "probe_gpu", lambda: "no driver")
    assert script.main() == 5
    assert capsys.readouterr().err == "timer_ncu: needs a GPU: no driver\n"
