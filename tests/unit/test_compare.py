"""Two sides compared on a device of numpy, with a timer that is told what launches take: in what order things happen,
what stops a comparison, and whose fault it is."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from check_fakes import COUNT, PLAN, FakeDevice, doubling_family
from check_fakes import double as right
from kbench import evaluate
from kbench.check.case import CaseCache
from kbench.device.base import KernelInfo
from kbench.errors import KernelFault, UsageError
from kbench.evaluate_pair import PairEvaluator
from kbench.jobs import Job
from kbench.measure import ab
from kbench.measure import timer as timer_module
from kbench.measure.ab_statistics import Rule
from kbench.measure.collect import Sample
from kbench.params import Param
from kbench.results.best import BEST, BEST_SCHEMA
from kbench.results.strict_json import dumps
from kbench.selection import Selection
from kbench.sides import Side

QUICK = Rule(minimum=64, maximum=64)


def wrong(schedule, out, ids, state, inp, tags):
    right(schedule, out, ids, state, inp, tags)
    out[20] += 1


class Card(FakeDevice):
    """A fake GPU that knows of each launch whose kernel ran and where its output lay."""

    kind = "cuda"
    row_name = "Card"
    xp = SimpleNamespace(
        **{**vars(np), "__name__": "fake"},
        cuda=None,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )

    def __init__(self):
        super().__init__()
        self.kernels = {1: right, 2: right}
        self.stream = contextlib.nullcontext()

    def build(self, source, kernels, arch=""):
        return {"double": self.kernels[1], "double2": self.kernels[2], "cubin": source.text}

    def prepare(self, plan, module, tensors):
        prepared = super().prepare(plan, module, tensors)
        prepared.infos = (KernelInfo(plan[0].kernel, registers=8, static_shared=0, local_bytes=0),)
        return prepared


class FakeTimer:
    """Runs what it times, and says that it took `ms(kernel)`."""

    overhead_ms, flush_gain = 0.002, 3.0

    def __init__(self, card):
        self.card, self.launches, self.running, self.state = card, [], False, None
        self.ms = lambda kernel: 0.1

    def sample(self, bound, restore, *, hold=True, flush=True):
        assert flush
        restore(self.card.stream)
        state = bound.native["state"].array
        self.state = state.copy() if self.state is None else self.state
        assert np.array_equal(state, self.state), "the launch before has left its mark"
        kernel = bound.prepared.plan[0].kernel
        self.launches.append((kernel, bound.native["out"].address))
        self.running = True
        self.card.enqueue(bound)
        self.running = False
        return Sample(self.ms(kernel), self.ms(kernel) + 0.01)


class Channel:
    def __init__(self):
        self.notes, self.restarts = [], 0
        self.note = self.notes.append

    @contextlib.contextmanager
    def limit(self, seconds, doing):
        def restart():
            self.restarts += 1

        yield restart


class Families(dict):
    names = ("doubling",)

    def version(self, name, number):
        if number not in self[name].by_number:
            raise UsageError(f"no version {number}")
        return self[name].by_number[number]

    def fingerprint(self, name, number):
        return f"files of {name} {number}"


class Pair:
    """An evaluator of a family of two versions, "double" and "double2"."""

    def __init__(self, monkeypatch, folder):
        self.card, self.channel, self.folder = Card(), Channel(), folder
        source = folder / "doubling.cu"
        source.write_text("// both versions\n")
        plain = doubling_family(PLAN)
        second = replace(
            plain.versions[0], number=2, plan=lambda problem, block, props: (replace(PLAN[0], kernel="double2"),)
        )
        self.family = replace(
            plain, versions=(*plain.versions, second), sources={1: str(source), 2: str(source)}, check_shapes=()
        )
        monkeypatch.setattr(evaluate, "load_catalog", lambda folders: Families({"doubling": self.family}))
        monkeypatch.setattr(evaluate, "open_device", lambda *options: self.card)
        self.timer = FakeTimer(self.card)
        monkeypatch.setattr(timer_module, "timer_of", lambda device: self.timer)
        monkeypatch.setattr(
            "kbench.device.cuda.same_code.same_code", lambda plan, cubin, other_plan, other_cubin: cubin == "same"
        )
        monkeypatch.setattr("kbench.device.cuda.same_code.code_hash", lambda plan, cubin: "")  # a fake has no code
        monkeypatch.setattr(ab.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(ab, "WARMUP_S", 0.0)
        self.evaluator = PairEvaluator(
            self.channel, device="cuda", family_dirs=[], seed=1, rtol=None, atol=None, time_limit=1, workers=None
        )

    def compare(self, files=("", ""), versions=(1, 2), params=({}, {})):
        jobs = [
            Job("doubling", version, "", {"N": COUNT}, "fp32", 128, params=values)
            for version, values in zip(versions, params, strict=True)
        ]
        answer = self.evaluator.compare(jobs, files, QUICK, "kbench compare again")
        dumps(answer)
        return answer

    def plan(self, *sides, results=None, **options):
        return self.evaluator.sides(sides, Selection([], "run", **options), results or self.folder)


class Modules(dict):
    """A module of fake kernels that has a cubin, as those of a GPU do."""

    @property
    def cubin(self):
        return self["cubin"]


@pytest.fixture
def pair(monkeypatch, tmp_path):
    built = Card.build
    monkeypatch.setattr(Card, "build", lambda *arguments, **more: Modules(built(*arguments, **more)))
    made = Pair(monkeypatch, tmp_path)
    yield made
    assert isinstance(made.evaluator.cases, CaseCache)
    made.evaluator.cases.close()


def statuses(answer):
    return [row["status"] for row in answer["rows"]]


def test_the_faster_side_is_found_and_both_are_proven(pair):
    pair.timer.ms = {"double": 0.15, "double2": 0.1}.get
    answer = pair.compare()
    found = answer["comparison"]
    assert statuses(answer) == ["pass", "pass"]
    assert found["estimate"]["ratio"] == pytest.approx(1.5) and found["estimate"]["differs"]
    assert [side["median_ms"] for side in found["sides"]] == [0.15, 0.1]
    assert found["places"] == 2 and found["same_code"] is False and len(found["rounds"]) == 16
    assert answer["rows"][0]["verdict"]["outputs"]
    assert not any(row["measurement"] for row in answer["rows"]), "times of a comparison are no row's"


def test_both_sides_run_in_the_very_same_places_and_give_all_memory_back(pair):
    pair.compare()
    where = {
        kernel: {address for name, address in pair.timer.launches if name == kernel} for kernel in ("double", "double2")
    }
    assert where["double"] == where["double2"]
    assert len(where["double"]) >= 2
    assert pair.card.live == 0
    assert pair.channel.restarts >= len(pair.timer.launches), "the watchdog would take it for hung"


def test_one_place_where_memory_is_short(pair):
    pair.card.free_bytes = 1 << 29
    assert pair.compare()["comparison"]["places"] == 1


@pytest.mark.parametrize("number", [1, 2])
def test_a_side_that_is_wrong_is_never_timed(pair, number):
    pair.card.kernels[number] = wrong
    answer = pair.compare()
    assert statuses(answer) == ["fail" if number == side else "pass" for side in (1, 2)]
    assert answer["comparison"] is None and pair.timer.launches == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_side_that_wears_out_while_it_is_timed_has_no_ratio(pair, number):
    launches = []

    def wears_out(*arguments):
        launches.append(1)
        (right if len(launches) < 40 else wrong)(*arguments)

    pair.card.kernels[number] = wears_out
    answer = pair.compare()
    assert statuses(answer) == ["fail" if number == side else "pass" for side in (1, 2)]
    assert answer["rows"][number - 1]["reason"].startswith("after the timed launches: ")
    assert answer["comparison"] is None and pair.card.live == 0


@pytest.mark.parametrize("kernel", ["double", "double2"])
def test_a_launch_that_fails_while_it_is_timed_is_its_own_sides_fault(pair, kernel):
    def fails(name):
        if name == kernel and len(pair.timer.launches) > 50:
            raise KernelFault("illegal-access", "an illegal access", context_lost=True)
        return 0.1

    pair.timer.ms = fails
    answer = pair.compare()
    assert statuses(answer) == ["crashed" if name == kernel else "pass" for name in ("double", "double2")]
    assert answer["comparison"] is None and answer["lost"] and pair.card.live == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_fault_of_the_last_proof_is_its_own_sides(pair, number):
    def fails(*arguments):
        if len(pair.timer.launches) > 50 and not pair.timer.running:
            raise KernelFault("illegal-access", "an illegal access", context_lost=True)
        right(*arguments)

    pair.card.kernels[number] = fails
    answer = pair.compare()
    assert statuses(answer) == ["crashed" if number == side else "pass" for side in (1, 2)]
    assert answer["comparison"] is None and pair.card.live == 0


def declare_rows(pair, scratch=None):
    """Version 2 gets a parameter ROWS: 2, or 1."""
    first, second = pair.family.versions
    plan = second.plan
    second = replace(
        second, params={"ROWS": Param(2, (1, 2))}, scratch=scratch,
        plan=lambda problem, block, props, ROWS: plan(problem, block, props),
    )  # fmt: skip
    pair.evaluator.catalog["doubling"] = replace(pair.family, versions=(first, second))


def test_plan_and_scratch_of_a_side_are_those_of_its_parameters(pair):
    asked = []

    def own(problem, block, props, ROWS):
        asked.append(ROWS)
        return ()

    declare_rows(pair, own)
    answer = pair.compare(params=({}, {"ROWS": 1}))
    assert statuses(answer) == ["pass", "pass"] and set(asked) == {1}
    assert answer["rows"][1]["params"] == {"ROWS": 1}


def test_without_times_both_are_still_proven_twice(pair):
    pair.card.kind = "emulator"
    answer = pair.compare()
    assert statuses(answer) == ["pass", "pass"] and answer["comparison"] is None
    assert pair.timer.launches == []


def test_a_file_takes_the_place_of_the_familys_source(pair, tmp_path):
    mine = tmp_path / "mine.cu"
    mine.write_text("same")
    answer = pair.compare(files=("", str(mine)), versions=(1, 1))
    first, second = (row["source"] for row in answer["rows"])
    assert first == "files of doubling 1" and second.endswith(f"+{first}")
    assert answer["rows"][1]["reproduce"] == "kbench compare again" != answer["rows"][0]["reproduce"]


def test_the_same_code_is_named(pair):
    (pair.folder / "doubling.cu").write_text("same")
    assert pair.compare()["comparison"]["same_code"] is True


# --------------------------------------------------------------------------------------------- what is asked


def best(pair, block, source="", version=1, **params):
    row = pair.evaluator._new_row(Job("doubling", version, "", {"N": COUNT}, "fp32", block, params=params))
    row.source = source or f"files of doubling {version}"
    row.measurement = {"median_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1}
    entry = {"run": "x", "row": row.to_dict()}
    problem = {"cold": {f"N={COUNT}": {str(version): entry}}}
    document = {"schema": BEST_SCHEMA, "gpus": {"Card": {"doubling": {"fp32": problem}}}}
    (pair.folder / BEST).write_text(dumps(document))


def test_the_block_size_is_the_given_else_the_best_else_the_usual(pair):
    best(pair, 64)
    found = pair.plan(Side("doubling", 1), Side("doubling", 2))
    assert [(side["job"]["block"], side["job"]["version"]) for side in found] == [(64, 1), (256, 2)]
    assert "best.json" in found[0]["why"] and found[1]["why"] == "the usual one"
    found = pair.plan(Side("doubling", 1, 32), Side("doubling", 1))
    assert [(side["job"]["block"], side["why"]) for side in found][0] == (32, "as given")


def test_a_best_row_of_other_files_decides_nothing(pair):
    best(pair, 64, source="other files")
    assert pair.plan(Side("doubling", 1), Side("doubling", 2))[0]["job"]["block"] == 256


def test_a_best_row_of_other_parameters_decides_nothing(pair):
    best(pair, 64, PACKETS=4)
    assert pair.plan(Side("doubling", 1), Side("doubling", 2))[0]["job"]["block"] == 256


def test_a_side_has_its_own_parameters_and_the_block_size_that_is_best_with_them(pair):
    declare_rows(pair)
    best(pair, 64, version=2, ROWS=1)
    one, default = Side("doubling", 2, params={"ROWS": 1}), Side("doubling", 2)
    first, second = pair.plan(one, default)
    assert [(side["job"]["block"], side["job"]["params"]) for side in (first, second)] == [
        (64, {"ROWS": 1}),
        (256, {"ROWS": 2}),
    ]
    assert "best.json" in first["why"] and second["why"] == "the usual one"
    assert [side["params_from"] for side in (first, second)] == [{"ROWS": "as given"}, {"ROWS": "the default"}]
    both = pair.plan(default, Side("doubling", 1), params={"ROWS": [1]})
    assert [side["job"]["params"] for side in both] == [{"ROWS": 1}, {}]
    assert [side["params_from"] for side in both] == [{"ROWS": "as given"}, {}]


def test_parameters_that_a_version_lacks_are_refused(pair):
    declare_rows(pair)
    for side, message in (
        (Side("doubling", 1, params={"ROWS": 1}), "doubling:1 has no parameter 'ROWS'; it declares none"),
        (Side("doubling", 2, params={"TILE": 1}), "doubling:2 has no parameter 'TILE'; it has ROWS=2 (1, 2)"),
        (Side("doubling", 2, params={"ROWS": 3}), "doubling:2 does not take ROWS=3; it has ROWS=2 (1, 2)"),
    ):
        with pytest.raises(UsageError) as refused:
            pair.plan(Side("doubling", 2), side)
        assert str(refused.value) == message


def test_several_problems_are_refused(pair):
    with pytest.raises(UsageError, match="one problem can be compared at a time"):
        pair.plan(Side("doubling", 1), Side("doubling", 2), sizes={"N": [4, 8]})
    with pytest.raises(UsageError, match="no version 3"):
        pair.plan(Side("doubling", 1), Side("doubling", 3))
