"""benchmarks/train_idle.py: what it reads from a trace, and the ways that fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train_idle.py"


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_train_idle", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_train_idle", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def step_at(start: float) -> Iterator[tuple[str, str, float, float]]:
    """Category, name, start and duration of a step of 100 us: 80 us are busy, 15 us of them twice."""
    yield "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start + 15.0, 15.0
    yield "kernel", "void big<float>(int)", start + 5.0, 45.0
    yield "kernel", "void small<float>(int)", start + 52.0, 10.0
    yield "kernel", "void small<float>(int)", start + 62.0, 20.0
    yield "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 95.0, 5.0


def trace_of(steps: int) -> str:
    events = [event for step in range(steps) for event in step_at(1e9 + 100.0 * step)]
    made = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in reversed(events)]
    made += [{"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 1e9 + 84.0, "dur": 9.0}]
    made += [{"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1e9}, {"ph": "M", "name": "process_name"}]
    return json.dumps({"traceEvents": made})


def test_a_step_is_what_kernels_and_copies_leave(idle: Any) -> None:
    use = idle.usage(idle.read_trace(trace_of(4)), 3)
    assert (use.steps, use.span, use.busy) == (3, pytest.approx(0.1), pytest.approx(0.08))
    assert use.idle == pytest.approx(0.2), "overlaps count once, and what the host does not at all"
    names = list(use.kernels)
    assert names[0] == "void big<float>(int)" and use.kernels[names[0]] == (pytest.approx(0.045), 1.0)
    assert use.kernels["void small<float>(int)"] == (pytest.approx(0.03), 2.0)
    largest = use.gaps[0]
    assert (largest.us, largest.before, largest.after) == (
        pytest.approx(13.0), "void small<float>(int)", "Memcpy DtoH (Device -> Pinned)"
    )  # fmt: skip
    assert {(gap.before[:6], gap.after[:8]) for gap in use.gaps} == {
        ("Memcpy", "void big"), ("void b", "void sma"), ("void s", "Memcpy D")
    }  # fmt: skip
    assert [round(number, 3) for _, number, _ in use.groups] == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert sum(ms for _, _, ms in use.groups) == pytest.approx(use.span - use.busy)


def test_a_trace_that_shows_too_little_is_no_figure(idle: Any) -> None:
    with pytest.raises(ValueError, match="shows 2 copies of a step's report, 4 are needed"):
        idle.usage(idle.read_trace(trace_of(2)), 3)
    with pytest.raises(ValueError, match="shows 0 copies"):
        idle.usage([], 1)


def test_fewer_events_than_calls_are_no_figure_either(idle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(calls: int) -> Any:
        actions = tuple(range(calls))
        program = SimpleNamespace(forward=actions[:1], first=actions[1:-1], update=actions[-1:])
        ways = idle._Found(SimpleNamespace(engine=SimpleNamespace(program=program)), iter(()), 3, 1)
        monkeypatch.setattr(ways, "_run", lambda steps: None)
        return ways

    monkeypatch.setattr(idle, "traced", lambda run: idle.read_trace(trace_of(5)))
    assert found(5).graphs().span == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match=r"shows 5.0 events a step, which has 6 calls"):
        found(6).graphs()
    monkeypatch.setattr(idle, "traced", lambda run: [])
    with pytest.raises(RuntimeError, match="0 events in all"):
        found(5).early()


def test_the_next_way_is_tried_and_all_is_told(idle: Any) -> None:
    told: list[str] = []

    def attempt(way: str) -> dict[str, Any]:
        if way in ("graphs", "early"):
            raise RuntimeError("CUPTI is not there")
        return {"way": way}

    assert idle.try_ways(idle.WAYS, attempt, told.append) == {"way": "eager"}
    assert told == ["graphs: CUPTI is not there", "early: CUPTI is not there"]
    assert idle.try_ways(("graphs",), attempt, told.append) is None


@pytest.mark.parametrize("way", ["graphs", "early", "eager", "events"])
def test_what_is_shown(way: str, idle: Any) -> None:
    use = idle.usage(idle.read_trace(trace_of(4)), 3)
    number = count()
    use.kernels |= {f"void kernel_with_a_long_name<{'float, ' * 9}{next(number)}>()": (0.001, 1.0) for _ in range(20)}
    found = json.loads(json.dumps({"way": way, "untraced": 0.09, "calls": 5, "usage": idle.asdict(use)}))
    lines = idle.lines_of(found)
    text = "\n".join(lines)
    assert ("idle 20.00%" in text) == (way in ("graphs", "early")) and "idle 11.11%" in text
    assert "big<float>" in text and "9 others" in text and all(len(line) <= 100 for line in lines)
    assert text.count("kernel_with_a_long_name") == 11
    assert "13.0 us at most, 13.0 us a step (3x in 3 steps)" in text


def test_a_process_that_fails_or_hangs_is_one_line(idle: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    monkeypatch.setattr(idle, "__file__", str(script))
    script.write_text("import sys; sys.exit('no GPU')")
    with pytest.raises(RuntimeError, match="exit status 1"):
        idle.in_process({}, 60.0)
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="not done after 0.2 s"):
        idle.in_process({}, 0.2)
    script.write_text("print('a library says something'); print('{\"way\": \"early\"}')")
    assert idle.in_process({}, 60.0) == {"way": "early"}
