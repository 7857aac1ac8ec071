"""Searches: spaces and budgets, what strategies may ask for, and `kbench sweep --strategy` from end to end."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fakes import FakeBench, failed, make_row
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, KbenchError, UsageError
from kbench.jobs import Job
from kbench.results.schema import Row
from kbench.results.store import latest_run, read_run
from kbench.search.run import Search, Searched
from kbench.search.space import LEAST_ROWS, spaces
from kbench.search.strategies import STRATEGIES, require_strategy, search

has_package = pytest.mark.skipif(
    importlib.util.find_spec("kernel_tuner") is None, reason="kernel-tuner is not installed (kbench[tuner])"
)

AXES = {"block": [32, 64, 128, 256, 512, 1024], "PACKETS": [1, 2, 4, 8], "ROWS": [1, 2, 3]}
SIZE = math.prod(map(len, AXES.values()))


def jobs(
    blocks: Sequence[int] = (32, 64, 128), values: Sequence[int] = (1, 2), version: int = 1, n: int = 64
) -> list[Job]:
    return [
        Job("toy", version, "", {"N": n}, "fp32", block, "time", {"ROWS": value, "FIXED": 7})
        for block in blocks
        for value in values
    ]


# -------------------------------------------------------------------------------------------------- spaces


def test_a_space_is_one_version_at_one_problem() -> None:
    mixed = [*jobs(), *jobs(version=2), *jobs(n=128), *(replace(job, dtype="bf16") for job in jobs())]
    found = spaces(mixed)
    names = ["toy:1 N=64 fp32", "toy:2 N=64 fp32", "toy:1 N=128 fp32", "toy:1 N=64 bf16"]
    assert [space.name for space in found] == names
    assert [job for space in found for job in space.jobs] == mixed
    assert found[0].axes == {"block": [32, 64, 128], "ROWS": [1, 2]}, "what has one value is no axis"
    assert found[0].by_place[64, 2] == jobs()[3] and len(found[0].by_place) == len(jobs())


def test_the_budget_is_a_quarter_or_what_a_population_needs_and_never_more_than_there_is() -> None:
    small, large = spaces(jobs())[0], spaces(jobs(range(1, 101), range(4)))[0]
    assert (small.budget(None), small.budget(4), small.budget(1000)) == (6, 4, 6)
    assert (large.budget(None), large.budget(4), large.budget(1000)) == (100, 4, 400)
    middle = spaces(jobs(range(1, 41), range(1)))[0]
    assert middle.budget(None) == LEAST_ROWS


# ---------------------------------------------------------------------------------------------- strategies


def test_an_unknown_strategy_and_a_missing_package_are_one_line_that_names_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UsageError, match=r"unknown strategy 'psso'; strategies: brute_force, .*, pso, .*kbench\[tuner\]"
    ):
        require_strategy("psso")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotRunError, match=r"not installed; pip install 'kbench\[tuner\]'"):
        require_strategy("pso")
    require_strategy("brute_force")


class Stop(Exception):
    """Stands in for the package's own."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that looks like Kernel Tuner, with one strategy: a function of the space, a runner and options."""

    class Budget:
        def __init__(self, max_fevals: int):
            self.max_fevals, self.spent = max_fevals, 0

        def add_evaluations(self, count: int) -> None:
            self.spent += count

    class Options(dict):
        __getattr__ = dict.__getitem__

    def space(axes: Any, rules: Any, max_threads: int) -> Any:
        return SimpleNamespace(axes=axes, size=math.prod(map(len, axes.values())))

    made = SimpleNamespace(tune=None)
    strategy = SimpleNamespace(tune=lambda *arguments: made.tune(*arguments))
    parts = {
        "kernel_tuner": {},
        "kernel_tuner.interface": {"Options": Options, "strategy_map": {"pso": strategy}},
        "kernel_tuner.searchspace": {"Searchspace": space},
        "kernel_tuner.util": {
            "RuntimeFailedConfig": lambda: "failed", "StopCriterionReached": Stop, "TuningBudget": Budget,
        },
    }  # fmt: skip
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_no_place_is_measured_twice_and_none_beyond_the_budget(package: Any) -> None:
    asked: list[Any] = []
    answers: list[Any] = []

    def tune(space: Any, runner: Any, options: Any) -> None:
        answers.append(runner.run([[32, 1], [64, 1], [32, 1]], options))
        answers.append(runner.run([[32, 1], [128, 2], [256, 2]], options))
        assert options.budget.spent == 3 == options.budget.max_fevals and options.strategy_options["max_fevals"] == 3

    def objective(places: Sequence[Any]) -> list[float | None]:
        asked.extend(places)
        return [None if place[0] == 64 else float(place[0]) for place in places]

    package.tune = tune
    search("pso", {"block": [32, 64, 128, 256], "ROWS": [1, 2]}, 3, 1, objective)
    assert asked == [(32, 1), (64, 1), (128, 2)]
    first, second = answers
    assert first[0] == first[2] == {"block": 32, "ROWS": 1, "time": 32.0}
    assert first[1] == {"block": 64, "ROWS": 1, "__error__": "failed"}, "a row that fails is worth nothing"
    assert second[1]["time"] == 128.0 and second[2] is None


def test_a_strategy_that_only_comes_back_is_ended(package: Any) -> None:
    def tune(space: Any, runner: Any, options: Any) -> None:
        while True:
            runner.run([[32, 1]], options)

    package.tune = tune
    search("pso", {"block": [32, 64], "ROWS": [1, 2]}, 3, 1, lambda places: [1.0 for _ in places])


def test_a_strategy_that_settles_early_begins_again_until_it_had_its_rows(package: Any) -> None:
    """Each start settles on one place. The fourth and later ones know it already; one of them cannot even begin."""
    starts: list[int] = []

    def tune(space: Any, runner: Any, options: Any) -> None:
        starts.append(options.max_fevals)
        place = min(len(starts), 3)
        if options.max_fevals == refused:
            raise IndexError("no population of this size")
        while True:
            runner.run([[32 * place, 1]], options)

    package.tune = tune
    asked: list[Any] = []
    refused, axes = 0, {"block": [32, 64, 96, 128], "ROWS": [1, 2]}
    search("pso", axes, 3, 1, lambda places: asked.extend(places) or [1.0])
    assert asked == [(32, 1), (64, 1), (96, 1)] and starts == [3, 2, 1]
    starts.clear()
    search("pso", axes, 5, 1, lambda places: [1.0])
    assert starts == [5, 4, 3, 2, 2, 2, 2, 2], "given up once it brings nothing new"
    starts.clear()
    refused = 4
    search("pso", axes, 5, 1, lambda places: [1.0])
    assert starts == [5, 4], "what was found stands"


@pytest.mark.parametrize("error", [KbenchError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("swallows", [True, False])
def test_what_the_objective_raises_ends_the_search_and_comes_out(
    package: Any, error: BaseException, swallows: bool
) -> None:
    def tune(space: Any, runner: Any, options: Any) -> None:
        try:
            runner.run([[32, 1]], options)
        except BaseException:
            if not swallows:
                raise
            runner.run([[64, 1]], options)

    def objective(places: Sequence[Any]) -> list[float | None]:
        raise error

    package.tune = tune
    with pytest.raises(type(error)) as caught:
        search("pso", AXES, 3, 1, objective)
    assert caught.value is error


def test_a_strategy_that_fails_is_named_unless_it_has_had_its_rows(package: Any) -> None:
    def tune(space: Any, runner: Any, options: Any) -> None:
        runner.run([[32, 1], [64, 1]], options)
        raise IndexError("list index out of range")

    package.tune = tune
    axes = {"block": [32, 64, 128], "ROWS": [1, 2]}
    search("pso", axes, 2, 1, lambda places: [1.0 for _ in places])
    with pytest.raises(CannotRunError, match="strategy pso fails in this space of 6 rows: IndexError: .*; choose"):
        search("pso", axes, 3, 1, lambda places: [1.0 for _ in places])
    with pytest.raises(CannotRunError, match=r"strategy mls cannot be used: KeyError.*kbench\[tuner\]"):
        search("mls", axes, 3, 1, lambda places: [1.0 for _ in places])


def test_generators_are_seeded_and_left_as_they_were_and_stdout_stays_clean(package: Any, capsys: Any) -> None:
    drawn: list[Any] = []

    def tune(space: Any, runner: Any, options: Any) -> None:
        print("Generation 1")
        drawn.append((random.random(), float(np.random.random())))

        runner.run([[32, 1], [64, 1], [128, 1]], options)  # all its rows: it is not begun again

    package.tune = tune
    random.seed(99)
    np.random.seed(99)
    expected = (random.random(), float(np.random.random()))
    random.seed(99)
    np.random.seed(99)
    search("pso", AXES, 3, 5, lambda places: [1.0 for _ in places])
    assert (random.random(), float(np.random.random())) == expected
    for seed in (5, 2**63 - 1):  # from other states of the generators
        search("pso", AXES, 3, seed, lambda places: [1.0 for _ in places])
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[1], drawn[2], strict=True))
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------ the package itself


def milliseconds(place: Sequence[int]) -> float | None:
    """A bowl with its lowest point at 256 threads, 4 packets, 2 rows; the largest blocks with most packets fail."""
    block, packets, rows = place
    if block == 1024 and packets == 8:
        return None
    return 1.0 + abs(math.log2(block / 256)) + abs(packets - 4) + 0.3 * abs(rows - 2)


@has_package
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_keeps_to_its_budget_and_to_its_seed(name: str) -> None:
    def run(seed: int, budget: int) -> list[Sequence[int]]:
        asked: list[Sequence[int]] = []

        def objective(places: Sequence[Sequence[int]]) -> list[float | None]:
            asked.extend(places)
            return [milliseconds(place) for place in places]

        search(name, AXES, budget, seed, objective)
        assert len(set(asked)) == len(asked) <= budget
        assert all(value in AXES[axis] for place in asked for axis, value in zip(AXES, place, strict=True))
        return asked

    first = run(3, 24)
    assert run(3, 24) == first and run(4, 24) != first
    assert len(run(3, SIZE // 2)) >= 4
    times = [time for place in first if (time := milliseconds(place)) is not None]
    assert min(times) < 4.0, "better than most places of the space"


@has_package
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_lives_with_rows_that_all_fail(name: str) -> None:
    search(name, AXES, 24, 1, lambda places: [None for _ in places])


# ------------------------------------------------------------------------------------------ kbench sweep


class Bench(FakeBench):
    """Rows of a space, as slow as `milliseconds` says."""

    ran: list[Job] = []
    options_given: Any = None

    def jobs(self, selection: Any) -> list[Job]:
        type(self).asked, type(self).options_given, type(self).ran = vars(selection), self.options, []
        return [
            Job("toy", version, "", {"N": 64}, "fp32", block, "time", {"PACKETS": packets, "ROWS": rows})
            for version in (1, 2)
            for block in AXES["block"]
            for packets in AXES["PACKETS"]
            for rows in AXES["ROWS"]
        ]

    def rows(self, jobs: Sequence[Job]) -> Iterator[Row]:  # type: ignore[override]  # not the rows of a script
        for job in jobs:
            self.ran.append(job)
            time = milliseconds((job.block, *job.params.values()))
            more = {"block": job.block, "params": job.params}
            yield make_row(job.version, median_ms=time, **more) if time else failed(job.version, **more)


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> Any:
    def run(options: str, kind: str = "cuda") -> tuple[int, str, str, Path]:
        monkeypatch.setattr("kbench.sweep.Bench", type("Own", (Bench,), {"kind": kind, "ran": []}))
        status = run_command(["sweep", "toy", "--results", str(tmp_path / "results"), *options.split()])
        captured = capsys.readouterr()
        return status, captured.out, captured.err, tmp_path / "results"

    return run


def random_tune(space: Any, runner: Any, options: Any) -> None:
    places = [[random.choice(values) for values in space.axes.values()] for _ in range(500)]
    for place in places:
        if runner.run([place], options) == [None]:
            raise Stop


@pytest.fixture
def strategy(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    package.tune = random_tune
    monkeypatch.setattr("kbench.search.strategies.require_strategy", lambda name: None)
    monkeypatch.setattr("kbench.search.run.require_strategy", lambda name: None)


def test_a_search_measures_a_part_and_says_which(sweep: Any, strategy: None) -> None:
    _, out, _, results = sweep("--strategy pso --max-rows 10 --json")
    document = json.loads(out)
    assert document["planned"] == 20 == len(document["rows"])
    assert document["searched"] == [
        {"space": f"toy:{v} N=64 fp32", "strategy": "pso", "rows": 10, "size": SIZE} for v in (1, 2)
    ]
    assert len(read_run(latest_run(results)).rows) == 20
    _, out, _, _ = sweep("--strategy pso --max-rows 10")
    assert "search:  toy:1 N=64 fp32: pso measured 10 of 72 rows" in out and "* fastest" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("records", "tables", "best")))


def test_rows_that_may_not_win_are_worth_nothing(sweep: Any, strategy: None, package: Any) -> None:
    answers: list[Any] = []
    package.tune = lambda space, runner, options: answers.extend(runner.run([[1024, 8, 1], [256, 4, 2]], options))
    sweep("--strategy pso --max-rows 2")
    assert [("__error__" in answer, answer.get("time")) for answer in answers] == [(True, None), (False, 1.0)] * 2


def test_a_time_without_a_proof_is_worth_nothing(package: Any, strategy: None) -> None:
    package.tune = lambda space, runner, options: answers.extend(runner.run([[32, 1], [64, 1]], options))
    answers: list[Any] = []
    rows = [make_row(median_ms=1.0, status="fail"), make_row(median_ms=2.0)]
    bench = SimpleNamespace(seed=1, rows=lambda jobs: iter(rows))
    list(Search("pso", 2).run(bench, jobs(), lambda row: None))
    assert [answer.get("time") for answer in answers] == [None, 2.0]


def test_a_search_takes_all_values_and_times_slow_rows_too(sweep: Any, strategy: None, monkeypatch: Any) -> None:
    import kbench.sweep

    sweep("--strategy pso --max-rows 3")
    own: Any = kbench.sweep.Bench
    assert own.asked["whole"] is True and own.options_given.full is True and len(own.ran) == 6
    sweep("")
    own = kbench.sweep.Bench
    assert own.asked["whole"] is False and own.options_given.full is False and len(own.ran) == 2 * SIZE
    sweep("--strategy brute_force")
    own = kbench.sweep.Bench
    assert own.asked["whole"] is True and len(own.ran) == 2 * SIZE


def test_a_budget_that_covers_the_space_needs_no_strategy(sweep: Any, strategy: None, package: Any) -> None:
    package.tune = None
    _, out, _, _ = sweep("--strategy pso --max-rows 72")
    assert "search:  toy:1 N=64 fp32: all 72 rows were measured" in out


def test_a_search_without_times_is_refused_before_anything_is_written(sweep: Any, strategy: None) -> None:
    status, out, err, results = sweep("--strategy pso", kind="emulator")
    assert status == 5 and out == "" and not results.exists()
    assert "--strategy pso looks for the shortest time, and the emulator has none" in err
    assert sweep("--strategy brute_force", kind="emulator")[0] == 3


@pytest.mark.parametrize(
    "options, status, words",
    [
        ("--max-rows 3", 2, "--max-rows is for a search; name one with --strategy"),
        ("--strategy brute_force --max-rows 3", 2, "--max-rows is for a search"),
        ("--strategy pso --max-rows 0", 2, "--max-rows '0' is not a whole number in range"),
        ("--strategy pso --max-rows 2.5", 2, "--max-rows '2.5'"),
        ("--strategy nothing", 2, "unknown strategy 'nothing'; strategies: brute_force"),
    ],
)
def test_options_that_make_no_search(sweep: Any, options: str, status: int, words: str) -> None:
    found, out, err, results = sweep(options)
    assert found == status and out == "" and words in err and not results.exists()


@pytest.mark.parametrize("option", ["--rtol 1", "--atol 0"])
def test_a_search_among_rows_that_cannot_win_is_refused(sweep: Any, strategy: None, option: str) -> None:
    found, out, err, results = sweep(f"--strategy pso {option}")
    assert found == 2 and out == "" and "no row judged by --rtol or --atol can be one" in err and not results.exists()
    assert sweep(f"--strategy brute_force {option}")[0] == 3


def test_an_interrupted_search_keeps_its_rows_and_its_count(sweep: Any, package: Any, strategy: None) -> None:
    def tune(space: Any, runner: Any, options: Any) -> None:
        random_tune(space, SimpleNamespace(run=lambda *a: count(runner, *a)), options)

    calls: list[int] = []

    def count(runner: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return runner.run(*arguments)

    package.tune = tune
    status, out, err, results = sweep("--strategy pso --max-rows 10")
    rows = read_run(latest_run(results)).rows
    assert status == 130 and 1 <= len(rows) <= 4
    assert f"pso measured {len(rows)} of 72 rows" in out and f"interrupted after {len(rows)} of 20 rows" in err
    assert "--resume" not in err, "which rows are left depends on their times"
    options = read_run(latest_run(results)).header["options"]
    assert (options["strategy"], options["max_rows"]) == ("pso", 10)
    assert run_command(["sweep", "--resume", "--results", str(results)]) == 2


@has_package
def test_the_package_itself_finds_what_brute_force_finds(sweep: Any) -> None:
    _, out, _, _ = sweep("--strategy greedy_ils --max-rows 40 --seed 1 --json")
    winners = json.loads(out)["winners"]
    assert min(milliseconds((w["block"], w["PACKETS"], w["ROWS"])) or 9.0 for w in winners) < 1.5


def test_searched_says_what_was_left_out() -> None:
    assert Searched("x", "pso", 1, 2).rows == 1 and Search("brute_force").planned(jobs()) == jobs()
