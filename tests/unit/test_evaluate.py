"""Rows on a device of numpy: in what order they prepare and judge, what they keep and give back, what they record."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from check_fakes import COUNT, PLAN, FakeDevice, doubling_family
from check_fakes import double as right
from kbench import evaluate
from kbench.check import judge, memory
from kbench.device.base import KernelInfo
from kbench.errors import CompileError
from kbench.evaluate import Evaluator
from kbench.family import Problem
from kbench.jobs import Job


class Card(FakeDevice):
    """A fake GPU: an array module that is not numpy, and a description of its memory."""

    kind = "cuda"
    xp = SimpleNamespace(**{**vars(np), "__name__": "fake"})

    def __init__(self):
        super().__init__()
        self.notes: list[str] = []
        self.on_build = self.on_prepare = lambda: None
        self.kernel = right

    def build(self, source, kernels, arch=""):
        self.on_build()
        return {"double": self.kernel}

    def prepare(self, plan, module, tensors):
        self.on_prepare()
        prepared = super().prepare(plan, module, tensors)
        prepared.infos = (KernelInfo("double", registers=8, static_shared=0, local_bytes=0),)
        prepared.notes = self.notes
        return prepared


class Channel:
    def __init__(self):
        self.notes: list[str] = []
        self.note = self.notes.append

    @contextlib.contextmanager
    def limit(self, seconds, doing):
        yield lambda: None


class Families(dict):
    """As much of a catalog as rows need."""

    def version(self, name, number):
        return self[name].by_number[number]

    def fingerprint(self, name, number):
        return f"files of {name} {number}"


class Rows:
    """An evaluator of two families that differ in nothing but their names, and their references as they are made."""

    def __init__(self, monkeypatch, tmp_path):
        self.references: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.card, self.channel = Card(), Channel()
        source = tmp_path / "doubling.cu"
        source.write_text("// version 1\n")
        self.families = {name: self._family(name, source) for name in ("one", "two")}
        monkeypatch.setattr(evaluate, "load_catalog", lambda folders: Families(self.families))
        monkeypatch.setattr(evaluate, "open_device", lambda *options: self.card)
        self.evaluator = Evaluator(
            self.channel, device="cuda", family_dirs=[], seed=1, rtol=None, atol=None, time_limit=1, workers=None
        )

    def _family(self, name, source):
        plain = doubling_family(PLAN)

        def reference(problem, inputs, error, xp):
            assert self.go_on.wait(10)
            self.references.append(name)
            return plain.reference(problem, inputs, error, xp)

        return replace(plain, name=name, reference=reference, sources={1: str(source)}, check_shapes=())

    def row(self, name="one", purpose="check"):
        return self.evaluator.row(Job(name, 1, "", {"N": COUNT}, "fp32", 128, purpose))

    def held(self, name="one"):
        """Bytes of fake GPU memory that the cases of a family's problem hold."""
        family = self.families[name]
        problem = Problem({"N": COUNT}, "fp32")
        cases = [self.evaluator.cases.made(family, problem, *draw) for draw in ((1, False), (2, True))]
        return sum(case.uploaded for case in cases if case is not None)


@pytest.fixture
def rows(monkeypatch, tmp_path):
    made = Rows(monkeypatch, tmp_path)
    yield made
    made.evaluator.cases.close()


def test_references_are_there_before_a_plan_is_prepared(rows):
    """Preparing may measure algorithms on the stream on which a reference would run."""
    finished = []
    rows.go_on.clear()
    rows.card.on_build = threading.Timer(0.1, rows.go_on.set).start
    rows.card.on_prepare = lambda: finished.append(len(rows.references))
    assert rows.row().status == "pass"
    assert finished == [2]


def test_a_build_that_fails_waits_for_its_references(rows):
    def fail():
        threading.Timer(0.1, rows.go_on.set).start()
        raise CompileError("no such kernel")

    rows.go_on.clear()
    rows.card.on_build = fail
    assert rows.row().status == "invalid"
    assert len(rows.references) == 2


def test_rows_of_a_problem_share_its_cases_though_the_cache_is_too_small(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "case_cache_bytes", lambda: 1)
    rows = Rows(monkeypatch, tmp_path)
    assert [rows.row().status for _ in range(3)] == ["pass"] * 3
    assert len(rows.references) == 2


def test_another_family_of_the_same_sizes_gets_the_memory_back(rows):
    rows.row("one")
    assert rows.held("one") > 0
    rows.row("two")
    assert rows.held("one") == 0 and rows.held("two") > 0


def test_memory_is_given_back_before_more_is_asked_for(rows, monkeypatch):
    held = []
    monkeypatch.setattr(rows.card, "free_memory", lambda: held.append(rows.held("one")) or 1 << 40)
    rows.row("one")
    held.clear()
    rows.row("two")
    assert held and not any(held)


def test_later_rows_need_only_what_is_not_there(rows, monkeypatch):
    """Of a problem that the GPU judges: the decision stands, and neither answers nor inputs are asked for twice."""
    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 1)
    monkeypatch.setattr(judge, "disagreement", lambda *anything: "")
    tensors = rows.families["one"].tensors(Problem({"N": COUNT}, "fp32"))
    needed = judge.memory_needed(tensors, judge_on_gpu=True)
    rows.card.free_bytes = needed.device
    monkeypatch.setattr(memory, "available_memory", lambda: needed.host)  # numpy would need more
    assert rows.row().verdict["judge"] == "fake"
    made = [SimpleNamespace(uploaded=rows.held() // 2)] * 2
    assert rows.held() == 2 * 3 * 4 * COUNT
    rows.card.free_bytes = judge.memory_needed(tensors, True, made).device
    assert (rows.row().status, rows.row().verdict["judge"]) == ("pass", "fake")
    rows.card.free_bytes -= 1
    assert (rows.row().status, len(rows.references)) == ("unable", 2)


def test_a_gpu_that_cannot_judge_is_said_once(rows, monkeypatch):
    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 1)
    for _ in range(2):
        assert rows.row().verdict["judge"] == "numpy"
    assert rows.channel.notes == [
        f"one at N={COUNT}: numpy judges, which may take minutes, not the GPU: "
        "no check shape takes fp32, so that the two cannot be compared"
    ]


def test_what_the_device_remarks_is_in_the_row(rows):
    rows.card.notes = ["took the first algorithm", "TF32 is overridden"]
    row = rows.row()
    assert (row.status, row.reason) == ("pass", "took the first algorithm; TF32 is overridden")
    assert row.details == rows.card.notes
    rows.evaluator.builds = evaluate.Builds(rows.card, ThreadPoolExecutor(1))
    rows.card.kernel = lambda schedule, *arguments: None
    row = rows.row()
    assert row.status == "fail" and "took" not in row.reason and row.details[-2:] == rows.card.notes


def test_a_family_that_raises_costs_its_row_and_not_the_announcement(rows, monkeypatch):
    def broken(*anything):
        raise MemoryError

    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 1)
    monkeypatch.setattr(judge, "disagreement", broken)
    rows.evaluator.announce([Job("one", 1, "", {"N": COUNT}, "fp32", 128, "check")])
    assert "not enough main memory" in rows.row().reason


@pytest.mark.parametrize("used", ["", "1 other process uses this GPU (pid 7)"])
def test_a_gpu_that_others_use_is_told_and_recorded(monkeypatch: pytest.MonkeyPatch, used: str) -> None:
    notes: list[str] = []
    channel = SimpleNamespace(note=notes.append, limit=lambda seconds, doing: contextlib.nullcontext())
    evaluator = cast(Evaluator, SimpleNamespace(channel=channel, device=SimpleNamespace(ordinal=3)))
    facts = SimpleNamespace(facts=lambda: {"overhead_ms": 0.001})
    monkeypatch.setattr("kbench.measure.timer.timer_of", lambda device: facts)
    monkeypatch.setattr("kbench.device.cuda.card.busy", lambda ordinal: used if ordinal == 3 else "wrong card")
    assert Evaluator.timer(evaluator) == {"overhead_ms": 0.001, "busy": used}
    assert notes == ([f"{used}: times are of a GPU that is shared"] if used else [])
