"""Parameters of versions: declared, typed, swept, recorded, and trained with as they were timed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from check_fakes import FakeDevice
from fakes import FakeBench, failed, make_row
from kbench.catalog import load_catalog
from kbench.check.buffers import touched_tensors
from kbench.cli.app import run_command
from kbench.errors import UsageError
from kbench.evaluate import Evaluator
from kbench.family import LaunchRule, Problem, Rule, Version
from kbench.grammar import Target, parse_params
from kbench.jobs import Job
from kbench.params import Param, combinations, one_at_a_time, place_text
from kbench.plot.contest import contests, label
from kbench.results.best import merge
from kbench.results.schema import Row
from kbench.results.store import Run, row_key
from kbench.results.tables import frame
from kbench.selection import Selection
from kbench.sweep import Bench, Options
from kbench.train.chooser import Chooser, Timed, Times, parse_use
from kbench.train.engine import Plans
from kbench.train.layout import Layout
from kbench.train.model import PRESETS
from kbench.train.setup import Kernels
from kbench.train.slots import Shape, slots

CATALOG = load_catalog()
FAMILY = CATALOG["residual_forward"]
PACKETS = FAMILY.by_number[2].params["PACKETS"]
PROPS = FakeDevice().props
ROWS, TILE = Param(2, (1, 2, 4)), Param(16, (16, 32))


def plan(problem: Any, block: int, props: Any, ROWS: int, TILE: int) -> tuple[Any, ...]:
    return ()


def version(**changes: Any) -> Version:
    fields = {"number": 1, "idea": "", "plan": plan, "dtypes": ("fp32",), "params": {"ROWS": ROWS, "TILE": TILE}}
    return Version(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------ declared


@pytest.mark.parametrize(
    "default, values, words",
    [
        (1, (), "different whole numbers"),
        (1, 1, "different whole numbers"),
        (1, (1, 1), "different whole numbers"),
        (1, (1, -2), "different whole numbers"),
        (1, (1, 2.0), "different whole numbers"),
        (1, (True, 2), "different whole numbers"),
        (1, (1, 1 << 31), "different whole numbers"),
        (3, (1, 2), r"default is one of its values \(1, 2\), not 3"),
        (None, (1, 2), "default is one of its values"),
    ],
)
def test_a_param_that_is_none(default: Any, values: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Param(default, values)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"params": [ROWS]}, "a dict of Param"),
        ({"params": {"ROWS": 2}}, "a dict of Param"),
        ({"params": {"rows": ROWS, "TILE": TILE}}, "upper case, such as ROWS_PER_BLOCK, not 'rows'"),
        ({"params": {"block": ROWS}}, "upper case"),
        ({"params": {"ROWS": ROWS}}, r"plan\(problem, block, props, ROWS\); yours: missing .* 'TILE'"),
        ({"plan": lambda problem, block, props: ()}, "yours: got an unexpected keyword argument 'ROWS'"),
        (
            {"rules": (LaunchRule("few", lambda problem, block, ROWS: True),)},
            r"has a LaunchRule\(problem, block, ROWS, TILE",
        ),
        ({"scratch": lambda problem, block, props: ()}, r"has a scratch\(problem, block, props, ROWS, TILE\)"),
    ],
)
def test_a_version_whose_params_do_not_fit_its_functions(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        version(**changes)


def test_a_file_with_such_a_slip_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "gelu_forward.mine.cu").write_text("")
    (tmp_path / "gelu_forward.mine.py").write_text(
        "from kbench.family import Param, Version\n\ndef plan(problem, block, props):\n    return ()\n\n"
        "versions = (Version(9, 'mine', plan, ('fp32',), params={'ROWS': Param(1, (1, 2))}),)\n"
    )
    with pytest.raises(
        UsageError, match=r"gelu_forward\.mine\.py:6: TypeError: a Version with these params has a plan"
    ):
        load_catalog([tmp_path])["gelu_forward"]


def test_who_calls_a_plan_without_its_parameters_gets_the_defaults() -> None:
    asked: list[tuple[int, int]] = []

    def noted(problem: Any, block: int, props: Any, ROWS: int, TILE: int) -> tuple[Any, ...]:
        asked.append((ROWS, TILE))
        return ()

    of = version(plan=noted, scratch=noted)
    for function in (of.plan, of.scratch, replace(of, number=3).plan):
        assert function is not None
        function(None, 32, None)
        function(None, 32, None, TILE=32)
    assert asked == [(2, 16), (2, 32)] * 3
    assert isinstance(hash(of), int), "a dict of parameters does not keep a version out of sets"


def test_a_size_cannot_hide_behind_a_parameter_of_its_name() -> None:
    sized = replace(FAMILY, versions=(version(params={"N": ROWS}, plan=lambda problem, block, props, N: ()),))
    from kbench.catalog import _validate

    with pytest.raises(UsageError, match=r"x\.py: version 1 has a parameter N, which is a size of the family"):
        _validate(replace(sized, dtypes=("fp32",)), Path("x.py"))


def test_what_a_version_does_not_take_is_said() -> None:
    of = version(
        rules=(LaunchRule("at most 512 rows a block", lambda problem, block, ROWS, TILE: ROWS * block <= 512),)
    )
    problem = Problem({"N": 9}, "fp32")
    family = replace(FAMILY, rules=())
    assert family.refusal(of, problem, 256) == ""
    assert family.refusal(of, problem, 128, {"ROWS": 4}) == ""
    assert family.refusal(of, problem, 256, {"ROWS": 3}) == "ROWS=3 is not supported; it has 1, 2, 4"
    assert family.refusal(of, problem, 256, {"STEPS": 3}) == "parameter STEPS is not declared; it has ROWS, TILE"
    told = "needs at most 512 rows a block (here N=9, block size 256, ROWS=4 TILE=16)"
    assert family.refusal(of, problem, 256, {"ROWS": 4}) == told
    assert family.taken_blocks(of, problem) == (32, 64, 128, 256)
    with pytest.raises(TypeError, match="only versions have block sizes"):
        replace(FAMILY, rules=of.rules)
    assert isinstance(FAMILY.rules, tuple) and all(isinstance(rule, Rule) for rule in FAMILY.rules)


# --------------------------------------------------------------------------------------------------- typed


def test_values_are_typed_like_block_sizes() -> None:
    assert parse_params(["ROWS=1..8", "TILE=32,16", "ROWS=3", "S=2..6:2"]) == {
        "ROWS": [1, 2, 3, 4, 8], "TILE": [16, 32], "S": [2, 4, 6],
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["ROWS", "=1", "ROWS=", "ROWS=a", "ROWS=-1", "ROWS=4..1", "A=1 B=2", "1A=2", "ROWS=1.5"]
)
def test_values_that_cannot_be_read_are_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_params([text])
    assert "param" in str(caught.value) and "\n" not in str(caught.value)


def jobs(*targets: Target, mode: str = "sweep", **select: Any) -> list[Job]:
    return list(Selection(list(targets), mode, **select).jobs(CATALOG, "cuda"))


def test_run_and_sweep_take_the_defaults_where_nothing_is_asked() -> None:
    for mode in ("run", "sweep"):
        found = {(job.version, job.place.partition(" ")[2]) for job in jobs(Target("residual_forward"), mode=mode)}
        assert found == {(1, ""), (2, "PACKETS=2")}, mode


def test_every_value_asked_for_is_a_row_and_a_version_without_the_parameter_runs_once() -> None:
    found = jobs(Target("residual_forward"), params={"PACKETS": [1, 2, 3]}, block_sizes=[64, 128])
    assert [(job.version, job.place) for job in found] == [
        (1, "64"), (1, "128"), *((2, f"{block} PACKETS={n}") for block in (64, 128) for n in (1, 2, 3)),
    ]  # fmt: skip
    assert len(jobs(Target("residual_forward", (2,)), whole=True, block_sizes=[64])) == len(PACKETS.values)
    refused = FAMILY.refusal(FAMILY.by_number[2], Problem({"N": 9}, "bf16"), 64, {"PACKETS": 3})
    assert refused == "PACKETS=3 is not supported; it has 1, 2, 4", "its row says so"


def test_a_name_that_no_chosen_version_declares_is_an_error_that_lists_what_they_do() -> None:
    with pytest.raises(UsageError) as caught:
        jobs(Target("residual_forward"), Target("global_norm", (1, 4)), params={"PACKTS": [1]})
    assert str(caught.value) == (
        "none of the chosen versions has a parameter 'PACKTS'; residual_forward:2 has PACKETS=2 (1, 2, 4); "
        "global_norm:4 has PACKETS=4 (2, 4, 8)"
    )
    with pytest.raises(UsageError, match="they declare none"):
        jobs(Target("residual_forward", (1,)), params={"PACKETS": [1]})
    assert {job.family for job in jobs(params={"SIDE": [32]}, block_sizes=[64])} == set(CATALOG.names)
    with pytest.raises(UsageError, match="no version 7"):  # whatever else is wrong
        jobs(Target("residual_forward", (7,)), params={"PACKETS": [1]})


def test_combinations_and_single_changes() -> None:
    declared = {"ROWS": ROWS, "TILE": TILE}
    assert combinations(declared, {}, False) == [{"ROWS": 2, "TILE": 16}]
    assert combinations(declared, {"TILE": [16, 32], "OTHER": [1]}, False) == [
        {"ROWS": 2, "TILE": 16}, {"ROWS": 2, "TILE": 32},
    ]  # fmt: skip
    assert len(combinations(declared, {}, True)) == 6 and combinations({}, {"ROWS": [1]}, True) == [{}]
    assert list(one_at_a_time(declared)) == [
        {"ROWS": 1, "TILE": 16}, {"ROWS": 4, "TILE": 16}, {"ROWS": 2, "TILE": 32},
    ]  # fmt: skip


def test_check_tries_other_values_at_the_smallest_the_middle_and_the_largest_shape() -> None:
    found = [job for job in jobs(Target("residual_forward"), mode="check") if job.version == 2]
    shapes = sorted({job.sizes["N"] for job in found})
    by_value = {n: {job.sizes["N"] for job in found if job.params == {"PACKETS": n}} for n in PACKETS.values}
    assert by_value[2] == set(shapes) and len(shapes) == 7
    assert by_value[1] == by_value[4] == {shapes[0], shapes[3], shapes[6]}
    assert {job.block for job in found if job.params != {"PACKETS": 2}} == set(FAMILY.by_number[2].blocks)
    chosen = jobs(Target("residual_forward", (2,)), mode="check", params={"PACKETS": [4]})
    assert {job.params["PACKETS"] for job in chosen} == {4} and {job.sizes["N"] for job in chosen} == set(shapes)


def test_check_varies_only_at_shapes_that_the_version_takes() -> None:
    for name in CATALOG.names:
        for of in CATALOG[name].versions:
            if not of.params:
                continue
            found = [job for job in jobs(Target(name, (of.number,)), mode="check") if job.params != of.defaults]
            for value in one_at_a_time(of.params):
                tried = {str(job.sizes) for job in found if job.params == value}
                assert len(tried) == 3, f"{name}:{of.number} {value}"
            for job in found:
                assert not CATALOG[name].refusal(of, Problem(job.sizes, job.dtype), job.block, job.params), job


def test_a_rule_that_raises_stops_no_other_version() -> None:
    broken = LaunchRule("sense", lambda problem, block, PACKETS: problem["M"] > 0)
    versions = (FAMILY.by_number[1], replace(FAMILY.by_number[2], rules=(broken,)))

    class Families(dict[str, Any]):
        def version(self, name: str, number: int) -> Version:
            return self[name].by_number[number]

    catalog = cast(Any, Families(f=replace(FAMILY, versions=versions)))
    found = list(Selection([Target("f")], "check").jobs(catalog, "cuda"))
    assert {job.version for job in found} == {1, 2} and all(job.params in ({}, {"PACKETS": 2}) for job in found)


def test_the_command_of_a_row_names_its_values(kbench: Any) -> None:
    job = jobs(Target("residual_forward", (2,)), params={"PACKETS": [4]}, block_sizes=[64])[0]
    words = shlex.split(job.command(1, "emulator", []))
    assert words[words.index("--param") + 1] == "PACKETS=4"
    kbench(shlex.join(words[1:]), [make_row(2)])
    assert kbench.bench.asked["params"] == {"PACKETS": [4]}


# ----------------------------------------------------------------------------------------- run and recorded


@pytest.fixture
def kbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def runner(command: str, script: list[Any], **settings: Any) -> tuple[int, str, str]:
        bench = type("Bench", (FakeBench,), {"script": script, **settings})
        monkeypatch.setattr("kbench.sweep.Bench", bench)
        runner.bench = bench
        status = run_command(shlex.split(command))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return runner


def evaluator(monkeypatch: pytest.MonkeyPatch) -> Evaluator:
    class Channel:
        note = staticmethod(lambda text: None)

        @contextmanager
        def limit(self, seconds: float, doing: str) -> Iterator[Any]:
            yield lambda: None

    monkeypatch.setattr("kbench.evaluate.open_device", lambda *options: FakeDevice())
    return Evaluator(
        cast(Any, Channel()), device="emulator", family_dirs=[], seed=1, rtol=None, atol=None, time_limit=1, workers=1
    )


def test_the_plan_and_the_scratch_of_a_row_are_those_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    of = evaluator(monkeypatch)
    sizes = {"B": 31, "T": 103, "OC": 264, "accumulate": 0}
    found = {}
    for across in (4, 8, 16):
        job = Job("matmul_backward_bias", 9, "", sizes, "bf16", 32, "prove", {"ACROSS": across})
        subject = of._subject(job)
        own = next(tensor for tensor in subject.tensors if tensor.name == "partials")
        assert subject.plan[0].kernel == f"matmul_backward_bias9<__nv_bfloat16, true, {across}>"
        family, number = CATALOG["matmul_backward_bias"], CATALOG["matmul_backward_bias"].by_number[9]
        touched = touched_tensors(family, number, subject.problem, 32, subject.plan, of.device, job.params)
        assert own in touched, "the buffers are of the same scratch"
        found[across] = own.shape
    assert len(set(found.values())) == 3, "with another value another scratch"


def test_a_row_has_all_values_that_its_version_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    of = evaluator(monkeypatch)
    job = Job("residual_forward", 2, "", {"N": 9}, "bf16", 64, "check", {"PACKETS": 3})
    row = of.row(job)
    assert (row.status, row.reason, row.params) == ("refused", "PACKETS=3 is not supported; it has 1, 2, 4", job.params)
    assert of.row(replace(job, params={}, block=7)).params == {"PACKETS": 2}
    assert "--param PACKETS=3" in row.reproduce


def test_a_row_whose_worker_is_lost_keeps_its_values_and_its_mode() -> None:
    from kbench.errors import KernelFault

    bench = Bench(Options(seed=1, mode="hot"), lambda text: None)
    bench.device_kind, bench.device = "emulator", {"name": "emulator"}
    job = Job("residual_forward", 2, "", {"N": 9}, "bf16", 64, "time", {"PACKETS": 4})
    row = bench._lost_row(job, KernelFault("timeout", "hangs"))
    assert row.params == {"PACKETS": 4} and "--param PACKETS=4" in row.reproduce
    assert row.cache_mode == "hot" and "--hot" in row.reproduce


def test_rows_that_differ_in_a_value_are_different_experiments_and_compete() -> None:
    rows = [make_row(2, params={"ROWS": n}, median_ms=float(n)) for n in (1, 2)]
    assert len({row_key(row) for row in rows}) == 2
    table = frame(rows)
    assert list(table["ROWS"]) == [1, 2] and list(table["mark"] == "*") == [True, False]
    (contest,) = contests(Run(Path("x"), {}, rows))
    assert [label(series) for series in contest.series] == ["v2 ROWS=1", "v2 ROWS=2"]
    assert Row.from_dict(json.loads(json.dumps(rows[1].to_dict()))) == rows[1]


def test_best_keeps_the_values_and_replaces_what_was_measured_with_the_same() -> None:
    def kept() -> tuple[Any, ...]:
        row = document["gpus"]["Test GPU"]["toy"]["fp32"]["cold"]["N=64"]["2"]["row"]
        return row["params"], row["measurement"]["median_ms"], row["source"]

    document: dict[str, Any] = {"gpus": {}}
    merge(document, [make_row(2, params={"ROWS": n}, median_ms=ms) for n, ms in ((1, 2.0), (2, 1.0))], "first")
    assert kept() == ({"ROWS": 2}, 1.0, "")
    merge(document, [make_row(2, params={"ROWS": 1}, median_ms=1.5)], "second")
    assert kept() == ({"ROWS": 2}, 1.0, ""), "the same block size, but other parameters: slower"
    merge(document, [failed(2, params={"ROWS": 1})], "third")
    assert kept() == ({"ROWS": 2}, 1.0, ""), "another value was proven wrong"
    merge(document, [make_row(2, params={"ROWS": 2}, median_ms=1.2)], "fourth")
    assert kept() == ({"ROWS": 2}, 1.2, ""), "the same experiment again"
    merge(document, [make_row(2, block=64, params={"ROWS": 4}, median_ms=9.0, source="new")], "fifth")
    assert kept() == ({"ROWS": 4}, 9.0, "new"), "what was measured of other files is out of date"
    merge(document, [failed(2, block=64, params={"ROWS": 4}, source="new")], "sixth")
    assert document["gpus"] == {}


def test_tables_show_values_where_there_are_any(kbench: Any, tmp_path: Path) -> None:
    rows = [make_row(1, median_ms=2.0)] + [make_row(2, params={"ROWS": n}, median_ms=1.0 / n) for n in (1, 2)]
    status, out, _ = kbench(f"sweep toy --param ROWS=1,2 --results {tmp_path}", rows)
    assert status == 0 and "params" in out and "* fastest: version 2 at block size 256 ROWS=2" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("records", "tables", "best")))
    assert "params" not in kbench(f"sweep toy --results {tmp_path}", [make_row(1, median_ms=2.0)])[1]
    _, out, _ = kbench("run toy:2 --param ROWS=2", rows[2:])
    assert "block size 256 ROWS=2" in out
    _, out, _ = kbench("run toy --param ROWS=1,2", rows)
    assert "params" in out and "ROWS=1" in out
    _, out, _ = kbench("check toy", [make_row(1), failed(2, params={"ROWS": 2})])
    assert "block size 256 ROWS=2" in out
    refused = [make_row(1), failed(2, status="refused", params={"ROWS": 3}, reason="not supported")]
    assert "at block size 256, ROWS=3: not supported" in kbench(f"sweep toy --results {tmp_path}", refused)[1]


def test_list_shows_what_is_declared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", "residual_forward"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "parameter PACKETS=2 of 1,2,4" in out
    assert run_command(["list", "residual_forward:2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["versions"][0]["params"]["PACKETS"]["values"] == [1, 2, 4]


def test_text_of_places() -> None:
    assert place_text(256, {}) == "256" and place_text(64, {"ROWS": 2, "TILE": 8}) == "64 ROWS=2 TILE=8"


# ------------------------------------------------------------------------------------------------- trained

SHAPE = Shape(PRESETS["nano"], 4, 64, "bf16")


def residual_need() -> Any:
    return next(
        need
        for slot in slots(SHAPE, Layout(SHAPE.model).count)
        for way in slot.ways
        for need in way.needs
        if need.family == "residual_forward"
    )


def times_with(params: dict[str, int]) -> Times:
    need, source = residual_need(), "now"
    row = {"block": 64, "params": params, "measurement": {"median_ms": 1.0}, "source": source}
    entries = {need.family: {need.dtype: {"cold": {need.problem: {"2": {"row": row}}}}}}
    return Times({"gpus": {"GPU": entries}}, "GPU", lambda family, number: source)


@pytest.mark.parametrize("packets", PACKETS.values)
def test_a_step_runs_the_very_values_that_were_timed(packets: int) -> None:
    need = residual_need()
    times = times_with({"PACKETS": packets})
    assert times.of(need) == {2: Timed(64, {"PACKETS": packets}, 1.0)}
    chooser = Chooser(CATALOG, parse_use("best", CATALOG), times)
    (candidate,) = [one for one in chooser._candidates(need) if one.ms is not None]
    use = candidate.pick.use()
    assert use.params == (("PACKETS", packets),) and f"PACKETS={packets}" in str(use)
    plans = Plans(CATALOG, cast(Any, SimpleNamespace(props=PROPS)))
    assert plans.of(use).plan[0].kernel == f"residual_forward2<__nv_bfloat16, {packets}>"
    # Saved with a checkpoint, and taken from there again.
    kernels = {"role": [need.family, 2, candidate.pick.block, dict(candidate.pick.params)]}
    saved = Kernels.from_document(json.loads(json.dumps({"kernels": kernels, "recompute": 0})))
    assert saved is not None
    again = chooser.named(need, *saved.by_role["role"])
    assert again is not None and again.pick == candidate.pick and again.ms == 1.0


def test_a_choice_from_before_there_were_parameters_has_their_defaults() -> None:
    need = residual_need()
    chooser = Chooser(CATALOG, parse_use("best", CATALOG), times_with({"PACKETS": 4}))
    old = chooser.named(need, "residual_forward", 2, 64)
    assert old is not None and dict(old.pick.params) == {"PACKETS": 2}
    assert old.ms is None, "what was timed is another value"
    assert chooser.named(need, "residual_forward", 2, 64, {"PACKETS": 3}) is None
    assert chooser.named(need, "residual_forward", 2, 64, {"STEPS": 2}) is None


def test_proofs_are_of_values() -> None:
    from kbench.train.program import Use
    from kbench.train.trials import _prove, _use

    use = Use("residual_forward", 2, 64, (("N", 9),), "bf16", (("PACKETS", 4),))
    job = _prove(use, "")
    assert job.params == {"PACKETS": 4} and job.purpose == "prove"
    row = make_row(2, family=job.family, sizes=job.sizes, dtype=job.dtype, block=job.block, params=job.params)
    assert _use(row) == use
