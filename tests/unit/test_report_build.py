"""Pairs of rows and their verdicts: what is compared, what cannot be, counts, budgets, and the exit status."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import failed, measured
from gpu_rows import DEVICE, kernel
from kbench.errors import Exit, UsageError
from kbench.report.budget import parse_budget
from kbench.report.build import Settings, build
from kbench.report.config import Config, read_config
from kbench.report.model import Change, Report
from kbench.report.records import load
from kbench.report.self_test import self_test
from kbench.report.sources import Source
from kbench.report.thresholds import Thresholds, parse_fail_on, parse_threshold
from kbench.results.schema import Row
from report_runs import plain, simulated, slower, write_run

BASE = simulated(seed=1)
FIXED = {"family": "layernorm_forward", "sizes": {"B": 8, "C": 768}, "device": DEVICE["name"], "block": 64}


class Reports:
    """Makes reports of rows, through files."""

    def __init__(self, folder: Path):
        self.folder, self.made = folder, 0

    def load(self, rows: Sequence[Row], device: dict[str, Any] | None = None, **header: Any) -> Any:
        self.made += 1
        return load("side", [Source(write_run(self.folder / f"{self.made}.jsonl", rows, device, **header))])

    def __call__(
        self,
        before: Sequence[Row],
        after: Sequence[Row],
        config: Config | None = None,
        fail_on: str = "regression",
        device: dict[str, Any] | None = None,
        **header: Any,
    ) -> Report:
        settings = Settings(config or Config(), parse_fail_on(fail_on))
        return build(self.load(before), self.load(after, device, **header), settings).report


@pytest.fixture
def report(tmp_path: Path) -> Reports:
    return Reports(tmp_path)


def times(found: Report, verdict: str) -> list[Change]:
    return [change for change in found.changes if change.metric.name == "time" and change.verdict == verdict]


def only(found: Report) -> Change:
    (change,) = (change for change in found.changes if change.metric.name == "time")
    return change


# ------------------------------------------------------------------------------------------- times


def test_a_slower_kernel_is_named_and_only_that_one(report: Reports) -> None:
    found = report(BASE, simulated(seed=2, change=slower(1.06, 3)))
    assert found.exit_status == Exit.REGRESSION and found.verdict == "regression"
    assert {(c.subject.version, c.subject.block) for c in times(found, "slower")} == {(3, 64), (3, 128)}
    assert len(times(found, "same")) == 8
    change = found.changes[0]
    assert change.ratio == pytest.approx(1.06, rel=0.01)
    assert change.low is not None and change.high is not None and change.low < change.ratio < change.high
    assert change.subject.file.endswith("layernorm_forward.cu") and change.subject.line > 1
    assert [len(samples) for samples in change.rounds_after] == [20, 20, 20] and change.reproduce


def test_the_same_kernels_twice_are_no_regression(report: Reports) -> None:
    found = report(BASE, simulated(seed=2))
    assert found.exit_status == Exit.OK and found.counts["same"] == len(found.changes)
    assert "noise" in found.limits


def test_rows_whose_code_is_not_known_may_have_become_slower(report: Reports) -> None:
    sides = [simulated(seed=1), simulated(seed=2, change=slower(1.2, 3))]
    found = report(*([replace(row, code="") for row in rows] for rows in sides))
    assert len(times(found, "slower")) == 2 and "noise" not in found.limits


def test_a_faster_kernel_is_no_error(report: Reports) -> None:
    found = report(BASE, simulated(seed=2, change=slower(0.5, 3)), fail_on="regression,unclear,incomparable,gone")
    assert found.exit_status == Exit.OK and len(times(found, "faster")) == 2


def test_one_round_is_unclear_and_an_error_only_where_that_is_asked_for(report: Reports) -> None:
    rows = (simulated(rounds=1), simulated(rounds=1, change=slower(1.2, 3)))
    found = report(*rows)
    assert found.exit_status == Exit.OK and len(times(found, "unclear")) == 2
    assert "1 round and 20 samples before" in times(found, "unclear")[0].reason
    assert report(*rows, fail_on="unclear").exit_status == Exit.REGRESSION


def test_256_regressions_are_exit_status_1(report: Reports) -> None:
    versions, blocks = range(1, 9), range(32, 32 * 38, 32)
    slow = simulated(versions, blocks, seed=2, samples=12, change=slower(1.5, 1, 2, 3, 4, 5, 6, 7))
    found = report(simulated(versions, blocks, seed=1, samples=12), slow)
    assert found.counts["slower"] >= 256 and found.exit_status == 1


def test_a_uniform_shift_is_the_machine(report: Reports) -> None:
    every = range(1, 6)
    found = report(BASE, [replace(row, code="") for row in simulated(seed=2, change=slower(1.3, *every))])
    assert found.counts["slower"] == 0 and len(times(found, "incomparable")) == 10
    assert any("the machine differs" in text for text in found.findings)


def test_small_differences_of_tiny_kernels_do_not_count(report: Reports) -> None:
    def tiny(factor: float) -> Any:
        return lambda row, ms: (replace(row, code=f"{factor}"), 0.0018 * (factor if row.version == 3 else 1.0))

    found = report(simulated(seed=1, change=tiny(1.0)), simulated(seed=2, change=tiny(1.2)))
    assert not times(found, "slower") and found.exit_status == Exit.OK


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([0.0] * 20, "not above zero: 0"),
        ([-1.0] * 20, "not above zero: -1"),
        ([None] * 20, "not a number: null"),
        (["1.2"] * 20, "not a number: '1.2'"),
        ([True] * 20, "not a number: True"),
        ([float("nan")] * 20, "not finite: nan"),
        ([float("inf")] * 20, "not finite: inf"),
        ([10**400] * 20, "too large"),
        ([[1.0]], "not a number: [1.0]"),
        ([], "no samples"),
        (None, "no samples"),
        ("1.2", "not a list"),
        ({"a": 1}, "not a list"),
    ],
)
def test_times_that_are_none_are_not_comparable_with_the_reason(report: Reports, samples: Any, words: str) -> None:
    broken = [
        replace(row, measurement={**(row.measurement or {}), "samples_ms": samples}) if row.version == 3 else row
        for row in BASE
    ]
    for before, after, side in ((broken, BASE, "before"), (BASE, broken, "after")):
        found = report(before, after)
        bad = times(found, "incomparable")
        assert [change.subject.version for change in bad] == [3, 3] and len(times(found, "same")) == 8
        assert words in bad[0].reason and bad[0].reason.startswith(side)
        assert found.to_dict()["verdict"] == "fine"


def test_a_measurement_without_samples_and_missing_keys(report: Reports) -> None:
    kept = ("median_ms", "low_ms", "high_ms")
    broken = [replace(row, measurement={name: (row.measurement or {})[name] for name in kept}) for row in BASE]
    found = report(BASE, broken)
    assert len(times(found, "incomparable")) == 10 and found.exit_status == Exit.OK, "counts are compared"


def test_samples_of_a_graph_may_differ_by_less_than_the_timer_resolves(report: Reports) -> None:
    def graph(factor: float, runs: int) -> list[Row]:
        rows = simulated(
            seed=int(factor * 10), noise=0.001, between=0.0003,
            change=lambda row, ms: (replace(row, code=f"{factor}"), 0.0018 * (factor if row.version == 3 else 1.0)),
        )  # fmt: skip
        return [replace(row, measurement={**(row.measurement or {}), "runs": runs}, cache_mode="graph") for row in rows]

    assert times(report(graph(1.0, 200), graph(1.2, 200)), "slower")
    assert not times(report(graph(1.0, 1), graph(1.2, 1)), "slower")


# ------------------------------------------------------------------------------------------- what can be compared


@pytest.mark.parametrize(
    ("device", "header", "words"),
    [
        ({"driver": "570.1"}, {}, "driver 580.159.04 before, 570.1 after"),
        ({"compiler": "NVRTC 12.8"}, {}, "compiler NVRTC 13.0 before, NVRTC 12.8 after"),
        ({"options": ["-std=c++20"]}, {}, "compiler options --std=c++17 before, -std=c++20 after"),
        ({}, {"kbench": "9.9"}, "kbench 0.1.0 before, 9.9 after"),
    ],
)
def test_times_of_other_surroundings_are_not_compared(
    report: Reports, device: dict[str, Any], header: dict[str, Any], words: str
) -> None:
    found = report(BASE, simulated(seed=2, change=slower(2.0, 3)), device=device, **header)
    bad = times(found, "incomparable")
    assert len(bad) == 10 and words in bad[0].reason
    assert any(words in text and "10 rows" in text for text in found.findings)
    counted = found.counts["same"] > 0
    assert counted == ("compiler" not in words), "counts need the same compiler, and nothing else"
    assert found.exit_status == (Exit.OK if counted else Exit.NOTHING)


def test_limits_and_the_timer_count_where_both_sides_tell_them(report: Reports) -> None:
    def verdicts(before: dict[str, Any], after: dict[str, Any]) -> int:
        sides = report.load(BASE, before), report.load(simulated(seed=2), after)
        return len(times(build(*sides, Settings()).report, "incomparable"))

    assert verdicts({"limits": {"power_limit_w": 700.0}}, {"limits": {"power_limit_w": 500.0}}) == 10
    assert verdicts({"limits": {"sm_clock_mhz": 1980}}, {"limits": {"sm_clock_mhz": 1700}}) == 10
    assert verdicts({"timer": {"version": 1}}, {"timer": {"version": 2}}) == 10
    assert verdicts({}, {"limits": {"power_limit_w": 500.0}, "timer": {"version": 2}}) == 0


def test_libraries_count_where_the_row_uses_them(report: Reports) -> None:
    def rows(seed: int) -> list[Row]:
        found = simulated(seed=seed)
        return [replace(row, steps={"Gemm": 1}) if row.version == 2 else row for row in found]

    found = build(report.load(rows(1), {"cublaslt": 130000}), report.load(rows(2), {"cublaslt": 130100}), Settings())
    bad = times(found.report, "incomparable")
    assert [change.subject.version for change in bad] == [2, 2] and "cuBLASLt 130000 before" in bad[0].reason


def test_another_gpu_is_not_comparable_and_neither_gone_nor_new(report: Reports) -> None:
    found = report(BASE, [replace(row, device="NVIDIA A100") for row in simulated(seed=2)])
    assert found.counts == {"incomparable": 10} and found.exit_status == Exit.NOTHING
    assert "on NVIDIA H200 before, on NVIDIA A100 after" in found.changes[0].reason
    assert found.verdict == "nothing"


def test_each_gpu_is_held_against_itself(report: Reports) -> None:
    other = [replace(row, device="NVIDIA A100") for row in BASE]
    found = report(BASE + other, [*other, *simulated(seed=2, change=slower(1.2, 3))])
    assert {change.subject.device for change in times(found, "slower")} == {"NVIDIA H200"}
    assert report(BASE, BASE + other).counts["new"] == 10


def test_rows_that_are_on_one_side_only(report: Reports) -> None:
    found = report(BASE, [row for row in simulated((1, 2, 3, 4, 6), seed=2) if row.block == 64])
    gone = {(c.subject.version, c.subject.block) for c in times(found, "gone")}
    assert gone == {(5, 64)} | {(version, 128) for version in range(1, 6)}
    assert [change.subject.version for change in times(found, "new")] == [6]
    assert found.exit_status == Exit.OK
    assert report(BASE, BASE[:4], fail_on="gone").exit_status == Exit.REGRESSION


def test_other_parameters_sizes_dtypes_and_modes_are_other_rows(report: Reports) -> None:
    changes: list[dict[str, Any]] = [
        {"params": {"ROWS": 2}}, {"sizes": {"B": 9, "C": 768}}, {"dtype": "bf16"}, {"cache_mode": "hot"},
        {"version": 9}, {"block": 32}, {"family": "gelu_forward"},
    ]  # fmt: skip
    for change in changes:
        found = report([plain(1, 64)], [replace(plain(1, 64), **change)])
        assert found.counts["new"] == found.counts["gone"] == 1, change
    turned = replace(plain(1, 64), sizes={"C": 768, "B": 8})
    assert report([plain(1, 64)], [turned]).counts["new"] == 0, "the order of sizes says nothing"


def test_a_row_by_another_tolerance_is_no_baseline(report: Reports) -> None:
    found = report([replace(row, overridden=True) for row in BASE], simulated(seed=2))
    assert len(times(found, "incomparable")) == 10 and "--rtol or --atol before" in found.changes[0].reason


def test_a_row_that_is_not_timed_any_more_says_why(report: Reports) -> None:
    untimed = replace(plain(1, 64), reason="slow: timed at one block size only")
    found = report([row for row in BASE if (row.version, row.block) == (1, 64)], [untimed])
    assert only(found).verdict == "incomparable" and "not timed after: slow: timed" in only(found).reason


def test_rows_of_the_emulator_have_nothing_to_compare(report: Reports) -> None:
    rows = [replace(plain(version, 64), device="emulator", kernels=[], code="") for version in (1, 2)]
    found = report(rows, rows, device={"name": "CPU emulator"})
    assert found.exit_status == Exit.NOTHING and not found.changes
    assert "2 rows were proven, and without a number to compare: the emulator has no times" in found.findings


# ------------------------------------------------------------------------------------------- wrong rows


@pytest.mark.parametrize(
    ("status", "exit_status"),
    [("fail", 3), ("crashed", 6), ("hung", 6), ("invalid", 6), ("unlaunchable", 6), ("internal", 6)],
)
@pytest.mark.parametrize("was", ["pass", "fail", "refused", "nothing"])
def test_a_wrong_row_stands_first_whatever_it_was(report: Reports, status: str, exit_status: int, was: str) -> None:
    bad = failed(3, status, "3 of 4096 elements", **FIXED)
    before = [] if was == "nothing" else [plain(3, 64) if was == "pass" else failed(3, was, "rule", **FIXED)]
    rest = [row for row in BASE if row.version != 3]
    found = report(rest + before, [row for row in simulated(seed=2, change=slower(1.2, 2)) if row.version != 3] + [bad])
    assert found.exit_status == exit_status and found.verdict == "wrong", "also beside a regression"
    assert (found.changes[0].verdict, found.changes[0].subject.version) == ("wrong", 3)
    assert f"{status}: 3 of 4096 elements" in found.changes[0].reason and found.changes[0].reproduce
    assert ("(before: fail)" in found.changes[0].reason) == (was == "fail")
    assert report(rest + before, [bad], fail_on="none").exit_status == exit_status


def test_one_wrong_round_is_a_wrong_row(report: Reports) -> None:
    after = simulated(seed=2)
    after[-1] = replace(after[-1], status="fail", measurement=None, reason="not the same twice")
    found = report(BASE, after)
    assert found.exit_status == Exit.WRONG and found.counts["wrong"] == 1


@pytest.mark.parametrize(
    ("before", "after", "verdict", "words"),
    [
        ("fail", "pass", "new", "fixed: was fail before"),
        ("refused", "pass", "new", "was refused before"),
        ("pass", "refused", "gone", "is refused now: why"),
        ("pass", "unable", "gone", "could not run: why"),
        ("fail", "skipped", "gone", "is skipped now: why (before: fail)"),
    ],
)
def test_rows_that_pass_on_one_side(report: Reports, before: str, after: str, verdict: str, words: str) -> None:
    rows = [plain(1, 64) if status == "pass" else failed(1, status, "why", **FIXED) for status in (before, after)]
    change = only(report(rows[:1], rows[1:]))
    assert change.verdict == verdict and words in change.reason


def test_what_is_refused_on_both_sides_is_counted_and_no_change(report: Reports) -> None:
    rows = [failed(number, status, "why", **FIXED) for number, status in ((7, "refused"), (8, "skipped"))]
    large = failed(9, "unlaunchable", "too large", **FIXED)
    found = report([*BASE, *rows, large], [*simulated(seed=2), *rows, large])
    assert found.limits["left out"] == "3 rows refused or skipped" and found.exit_status == Exit.OK
    assert report(rows, rows).exit_status == Exit.NOTHING


def test_a_report_about_one_run(report: Reports) -> None:
    side = report.load(BASE)
    found = build(side, side, Settings()).report
    assert "both sides are the same run: nothing can have changed" in found.findings


def test_a_first_run_has_new_rows_only(report: Reports) -> None:
    found = build(None, report.load(BASE), Settings()).report
    assert found.counts == {"new": 10} and found.exit_status == Exit.OK and found.verdict == "fine"
    assert build(None, report.load([failed(1, **FIXED)]), Settings()).report.exit_status == Exit.WRONG


# ------------------------------------------------------------------------------------------- counts


def with_kernel(name: str = "k", block: int = 64, **kernel_facts: Any) -> Row:
    return replace(plain(1, block), kernels=[kernel(name, 1024, block, **kernel_facts)])


def test_counts_of_kernels_and_their_directions(report: Reports) -> None:
    before = with_kernel(registers=40, shared=1024, spill_bytes=0, local_bytes=16)
    after = with_kernel(registers=200, shared=512, spill_bytes=8, local_bytes=16)
    found = {change.metric.name: change for change in report([before], [after]).changes}
    verdicts = {name: change.verdict for name, change in found.items()}
    assert verdicts == {
        "registers": "slower", "spill_bytes": "slower", "stack_bytes": "same", "static_shared": "same",
        "dynamic_shared": "faster", "occupancy": "slower",
    }  # fmt: skip
    assert (found["registers"].before, found["registers"].after) == (40.0, 200.0)
    assert "40 to 200" in found["registers"].reason and found["spill_bytes"].ratio is None
    assert found["registers"].subject.kernel == "k"


def test_a_kernel_that_changed_in_many_rows_is_one_change(report: Reports) -> None:
    before = [with_kernel(block=block, registers=40) for block in (64, 128, 256)]
    after = [with_kernel(block=block, registers=48) for block in (64, 128, 256)]
    found = [c for c in report(before, after).changes if c.metric.name == "registers"]
    assert len(found) == 1 and "40 to 48, in 3 rows" in found[0].reason
    assert (found[0].subject.block, found[0].subject.problem) == (0, "B=8 C=768")


def test_a_kernel_under_another_name_is_the_same_kernel_if_it_is_the_only_one(report: Reports) -> None:
    found = report([with_kernel("old", registers=40)], [with_kernel("new", registers=48)])
    assert {change.metric.name for change in found.changes if change.verdict == "slower"} == {"registers", "occupancy"}
    two = replace(plain(1, 64), kernels=[kernel("x", 8, 64), kernel("y", 8, 64)])
    assert report([with_kernel("old")], [two]).exit_status == Exit.NOTHING


def test_metrics_of_rows_stand_beside_them_and_unknown_ones_are_compared_too(report: Reports) -> None:
    def row(sectors: float, odd: float) -> Row:
        metrics = {"k": {"global_sectors": sectors, "odd_count": odd}}
        return replace(plain(1, 64), device="emulator", cache_mode="counts", kernels=[], metrics=metrics)

    found = report([row(100, 5)], [row(101, 4)])
    assert {change.metric.name: change.verdict for change in found.changes} == {
        "global_sectors": "slower", "odd_count": "faster",
    }  # fmt: skip
    assert found.exit_status == Exit.REGRESSION
    assert report([row(100, 5)], [row(101, 4)], device={"compiler": "g++ 13"}).counts == {"incomparable": 1}
    assert report([row(float("nan"), 5)], [row(1, 5)]).counts["incomparable"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overridden": True}, "judged by --rtol or --atol after"),
        ({"source": "other files"}, "after: the version's files changed between the rounds of one side"),
    ],
)
def test_one_round_of_another_kind_makes_a_row_incomparable(
    report: Reports, change: dict[str, Any], words: str
) -> None:
    """It may be a later round, of which no other number of the report stands."""
    last = max(row.round for row in BASE)
    found = report(BASE, [replace(row, **change) if row.round == last else row for row in BASE])
    assert {c.reason.startswith(words) for c in times(found, "incomparable")} == {True}
    assert not times(found, "same") and not times(found, "slower")


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_rounds_of_different_code_are_not_the_same_code(report: Reports, changed: int) -> None:
    after = simulated(seed=2, change=slower(1.3, 2))
    after = [replace(row, code=row.code if row.round == changed else row.code.removeprefix("other ")) for row in after]
    found = {(c.subject.version, c.subject.block) for c in times(report(BASE, after), "slower")}
    assert found == {(2, 64), (2, 128)}


def test_damaged_kernels_have_no_counts(report: Reports) -> None:
    for kernels in ([{}], [{"registers": 3}], [{"name": "k", "registers": "many", "block": [32]}]):
        row = replace(plain(9, 64), kernels=kernels)
        assert not [c for c in report([row, *BASE], [row, *BASE]).changes if c.subject.version == 9]
    with pytest.raises(UsageError, match=r"jsonl:2 is not a row of results: kernels is \[3\]"):
        report([replace(plain(9, 64), kernels=[3])], BASE)


# ------------------------------------------------------------------------------------------- budgets and limits


def budgets(**lines: str) -> Config:
    return Config(Path("k.toml"), budgets=tuple(parse_budget(key, text, "k.toml") for key, text in lines.items()))


def test_a_broken_budget_is_a_regression_though_nothing_changed(report: Reports) -> None:
    row = with_kernel(registers=48)
    for key in ("layernorm_forward.1.registers", "*.registers", "*.1.registers", "layernorm_forward.*.registers"):
        found = report([row], [row], budgets(**{key: "<= 40"}))
        (change,) = (change for change in found.changes if change.verdict == "over budget")
        assert change.after == 48.0 and f"48 breaks the budget {key} <= 40" in change.reason
        assert found.exit_status == Exit.REGRESSION and change.subject.file.endswith("layernorm_forward.cu")
    assert report([row], [row], budgets(**{"*.registers": "<= 48"})).exit_status == Exit.OK
    assert report([row], [row], budgets(**{"*.registers": "<= 40"}), fail_on="none").exit_status == Exit.OK


def test_a_budget_is_about_its_version_and_one_that_meets_nothing_is_told(report: Reports) -> None:
    found = report(BASE, simulated(seed=2), budgets(**{"layernorm_forward.77.registers": "<= 1"}))
    assert found.exit_status == Exit.OK
    assert any("layernorm_forward.77.registers <= 1 (k.toml) met no row" in text for text in found.findings)


def test_times_have_budgets_too(report: Reports) -> None:
    found = report(BASE, simulated(seed=2), budgets(**{"layernorm_forward.5.time": "<= 0.1 ms"}))
    assert [c.subject.block for c in times(found, "over budget")] == [64, 128]
    assert report(BASE, BASE, budgets(**{"layernorm_forward.5.time": "<= 0.5"})).exit_status == Exit.OK


def in_rounds(*levels: float) -> list[Row]:
    """A row whose rounds lie apart: half a percent within a round."""
    row = replace(plain(3, 64), code="")
    taken = [[level * (1 + 0.0005 * number) for number in range(10)] for level in levels]
    return [
        replace(row, round=number, measurement={**measured(levels[0]), "samples_ms": samples})
        for number, samples in enumerate(taken)
    ]


def test_a_budget_is_held_against_the_median_of_all_rounds(report: Reports) -> None:
    rows = in_rounds(0.1, 0.2, 0.3)
    found = report(rows, rows, budgets(**{"layernorm_forward.3.time": "<= 0.15 ms"}))
    (broken,) = times(found, "over budget")
    assert broken.after == pytest.approx(0.2, rel=0.01)


def test_a_row_that_is_gone_shows_the_median_of_all_rounds(report: Reports) -> None:
    (gone,) = times(report([*BASE, *(replace(row, version=9) for row in in_rounds(0.1, 0.2, 0.3))], BASE), "gone")
    assert gone.before == pytest.approx(0.2, rel=0.01) and gone.after is None


def test_rounds_stand_in_their_order_whatever_that_of_the_file_is(report: Reports) -> None:
    change = only(report(in_rounds(0.1, 0.2, 0.3)[::-1], in_rounds(0.1, 0.2, 0.3)))
    assert [samples[0] for samples in change.rounds_before] == [0.1, 0.2, 0.3]


def test_of_a_kernel_that_is_launched_twice_the_worst_counts(report: Reports) -> None:
    """More registers are worse, and fewer resident warps are."""
    twice = [kernel("k<float>", 1024, 64, 32), kernel("k<float>", 1024, 1024, 64)]
    (experiment,) = next(iter(report.load([replace(plain(3, 64), kernels=twice)]).experiments.values())).values()
    assert experiment.counts["k<float>", "registers"] == 64
    assert experiment.counts["k<float>", "occupancy"] == 32
    (experiment,) = next(iter(report.load([replace(plain(3, 64), kernels=twice[::-1])]).experiments.values())).values()
    assert experiment.counts["k<float>", "occupancy"] == 32


def test_two_kernels_with_new_names_are_not_held_against_any(report: Reports) -> None:
    sides = [
        [replace(plain(3, 64), kernels=[kernel(a, 1024, 64, 20), kernel(b, 1024, 64, 40)])]
        for a, b in (("one", "two"), ("three", "four"))
    ]
    assert [c for c in report(*sides).changes if c.metric.name != "time"] == []


def test_a_budget_is_judged_without_anything_to_compare(report: Reports) -> None:
    new = [replace(row, version=8) for row in BASE]
    assert report([failed(1, "refused", **FIXED)], new, budgets(**{"*.registers": "<= 99"})).exit_status == Exit.OK
    found = report([failed(1, "refused", **FIXED)], new, budgets(**{"*.registers": "<= 9"}))
    assert found.exit_status == Exit.REGRESSION


@pytest.mark.parametrize("limit", ["<= 48", "< 49", "== 48", ">= 48", "> 47", "<=48", " <=  48.0 "])
def test_relations(limit: str) -> None:
    budget = parse_budget("f.registers", limit, "k.toml")
    assert budget.holds(48) and not budget.holds(47 if ">" in limit else 49) and not budget.holds(float("nan"))


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("registers", "<= 40", "no budget's name"),
        ("a.b.c.d", "<= 40", "no budget's name"),
        ("a.-1.registers", "<= 40", "no budget's name"),
        ("a. registers", "<= 40", "no budget's name"),
        ("a.registers", "40", "no limit"),
        ("a.registers", "=< 40", "no limit"),
        ("a.registers", "<= -1", "no limit"),
        ("a.registers", "<= nan", "no limit"),
        ("a.registers", "<= 1e9", "no limit"),
        ("a.registers", 40, "no limit"),
        ("a.registers", "<= 40 bytes", "has no unit"),
        ("a.spill_bytes", "<= 40 ms", "is in bytes"),
    ],
)
def test_budgets_that_are_none_name_file_and_key(key: str, text: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_budget(key, text, "k.toml: report.budgets")
    assert words in str(caught.value) and "k.toml" in str(caught.value) and key in str(caught.value)


def test_thresholds_of_families(report: Reports) -> None:
    after = simulated(seed=2, change=slower(1.06, 3))
    own = Config(thresholds=Thresholds(0.03, {"layernorm_forward": 0.2}))
    assert report(BASE, after, own).exit_status == Exit.OK
    assert report(BASE, after, own).limits["time of layernorm_forward"] == "20%"
    assert report(BASE, after, Config(thresholds=Thresholds(0.2))).exit_status == Exit.OK


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0%", 0.0), ("0.5%", 0.005), ("150%", 1.5)])
def test_the_one_spelling_of_a_threshold(text: str, share: float) -> None:
    assert parse_threshold(text, "--threshold") == pytest.approx(share)


@pytest.mark.parametrize(
    "text", ["5", "0.05", "-5%", "abc", "", "%", "5 %", "nan%", "1e3%", "٣%", "5%%", 5, 0.05, None]
)
def test_every_other_spelling_names_the_one(text: Any) -> None:
    with pytest.raises(UsageError, match="--threshold .*is not a threshold; write a percentage such as 3%"):
        parse_threshold(text, "--threshold")


CONFIG = """
[report]
threshold = "4%"
fail_on = ["regression", "gone"]
[report.thresholds]
layernorm_forward = "5%"
[report.budgets]
"layernorm_forward.6.registers" = "<= 40"
"*.spill_bytes" = "== 0"
gelu_forward.registers = "<= 30"
[another]
tool = 3
"""


def test_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_config(None) == Config()
    Path("kbench.toml").write_text(CONFIG)
    config = read_config(None)
    assert config.thresholds == Thresholds(0.04, {"layernorm_forward": 0.05})
    assert list(map(str, config.budgets)) == [
        "layernorm_forward.6.registers <= 40", "*.spill_bytes == 0 bytes", "gelu_forward.registers <= 30",
    ]  # fmt: skip
    assert config.fail_on == ("regression", "gone")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not toml", "is not TOML"),
        ("report = 3", "report is not a table; write [report]"),
        ("[report]\nthreshhold = '3%'", "report.threshhold means nothing; did you mean threshold?"),
        ("[report]\nthreshold = 3", "report.threshold 3 is not a threshold"),
        ("[report.thresholds]\ngelu_forward = 0.05", "report.thresholds.gelu_forward 0.05 is not a threshold"),
        ("[report]\nthresholds = '3%'", "thresholds is not a table"),
        ("[report.budgets]\n'x' = '<= 3'", "report.budgets: 'x' is no budget's name"),
        ('[report.budgets]\n"a.registers" = "<= 3"\na.registers = "<= 4"', "a.registers stands there twice"),
        ("[report]\nfail_on = 'gone'", "report.fail_on is not a list"),
        ("[report]\nfail_on = ['odd']", "report.fail_on: 'odd' is nothing to fail on"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kbench.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_config(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            {"layernorm_forwrad.registers": "<= 1"},
            "unknown family 'layernorm_forwrad'; did you mean layernorm_forward?",
        ),
        ({"*.registres": "<= 1"}, "unknown metric 'registres'; did you mean registers?"),
    ],
)
def test_limits_on_what_nothing_has(report: Reports, lines: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("?", "[?]")):
        report(BASE, BASE, budgets(**lines))
    with pytest.raises(UsageError, match="thresholds: unknown family 'nope'"):
        report(BASE, BASE, Config(Path("k.toml"), Thresholds(0.03, {"nope": 0.05})))


# ------------------------------------------------------------------------------------------- the gate itself


def test_the_gate_fires_and_says_when_it_does_not(report: Reports) -> None:
    def fires(before: Sequence[Row], after: Sequence[Row], **settings: Any) -> Any:
        return self_test(report.load(before), report.load(after), Settings(**settings))

    found = fires(BASE, simulated(seed=2))
    assert found.fires and "layernorm_forward:1 made 2 times as slow in 2 rows" in found.told
    found = fires(simulated(rounds=1), simulated(rounds=1, seed=2))
    untimed = [plain(1, 64)]
    assert fires(untimed, untimed).fires, "counts alone are a gate too"
    assert not fires(BASE, simulated(seed=2), fail_on=()).fires
    assert "--fail-on does not name regression" in fires(BASE, simulated(seed=2), fail_on=()).told
    wide = fires(BASE, simulated(seed=2), config=Config(thresholds=Thresholds(9.0)))
    assert wide.fires, "counts"
    bare = [[replace(row, kernels=[]) for row in simulated(seed=seed)] for seed in (1, 2)]
    wide = fires(*bare, config=Config(thresholds=Thresholds(9.0)))
    assert not wide.fires and "ends in exit status 0" in wide.told
    one = [[replace(row, kernels=[]) for row in simulated(rounds=1, seed=seed)] for seed in (1, 2)]
    assert "it is unclear: too few" in fires(*one).told
    assert "no row can be compared" in fires(BASE, [replace(row, device="A100") for row in BASE]).told


def test_the_order_of_rows_in_the_files_changes_nothing(report: Reports) -> None:
    after = simulated(seed=2, change=slower(1.06, 3))
    shuffled = random.Random(1).sample(after, len(after))
    first, second = report(BASE, after), report(BASE, shuffled)
    assert [(c.subject, c.metric, c.verdict) for c in first.changes] == [
        (c.subject, c.metric, c.verdict) for c in second.changes
    ]
