"""What the counters are added up to, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from kbench.profile import metrics as m
from kbench.profile.raw import Profiled
from kbench.profile.summary import attribute, reading, stalls_of, summarise


def launch(name: str, us: float | None = 10.0, grid: int = 8, **more: float) -> Profiled:
    """A launch with counters by the names of `metrics`, such as DRAM=50."""
    values = {getattr(m, key)[0]: value for key, value in more.items()}
    if us is not None:
        values[m.TIME[0]] = us * 1e3
    return Profiled(f"void {name}<float>(float *)", (grid, 1, 1), (256, 1, 1), values)


def planned(name: str, **more: Any) -> dict[str, Any]:
    return {"name": f"{name}<float>", "block": [256], "registers": 40, "static_shared": 0, "shared": 0, **more}


def test_launches_that_are_alike_are_one_kernel() -> None:
    parts = [
        launch("a", 10, READ=100, WRITTEN=1, DRAM=50),
        launch("b", 5),
        launch("a", 30, READ=300, WRITTEN=1, DRAM=90),
    ]
    summary = summarise(parts, [planned("a"), planned("b"), planned("a")], "sm_90")
    first, second = summary.kernels
    assert (first.name, first.launches, first.us, first.ours) == ("a<float>", 2, 40, True)
    assert (first.read_bytes, first.moved_bytes, first.dram) == (400, 402, pytest.approx(0.8))  # (10*50 + 30*90) / 40
    assert (second.us, second.read_bytes, second.dram) == (5, None, None)
    assert (summary.us, summary.seen, summary.planned) == (45, 3, 3)
    assert summary.moved_bytes is None, "b's are not known: what a's add up to is not the plan's"


def test_launches_of_another_grid_are_kernels_of_their_own() -> None:
    summary = summarise([launch("a"), launch("a", grid=9)], [planned("a"), planned("a")], "sm_90")
    assert [kernel.launches for kernel in summary.kernels] == [1, 1]


def test_occupancy_is_ours_for_kernels_of_the_plan_and_ncus_for_others() -> None:
    parts = [launch("a", ACHIEVED=60, POSSIBLE=1), launch("gemm", ACHIEVED=20, POSSIBLE=25)]
    mine, librarys = summarise(parts, [planned("a", registers=128)], "sm_90").kernels
    assert (mine.possible, mine.limiters, mine.achieved) == (0.25, ("registers",), pytest.approx(0.6))
    assert (librarys.possible, librarys.limiters, librarys.ours) == (0.25, (), False)
    (unknown,) = summarise([launch("a", POSSIBLE=75)], [planned("a")], "sm_75").kernels
    assert (unknown.possible, unknown.limiters) == (0.75, ())


def test_ratios_are_of_sums() -> None:
    parts = [launch("a", LOAD_SECTORS=40, LOAD_REQUESTS=10), launch("a", LOAD_SECTORS=320, LOAD_REQUESTS=20)]
    (kernel,) = summarise(parts, [planned("a")] * 2, "sm_90").kernels
    assert (kernel.load_sectors, kernel.store_sectors, kernel.conflict_share) == (12, None, None)
    (kernel,) = summarise([launch("a", CONFLICTS=0, WAVEFRONTS=0)], [planned("a")], "sm_90").kernels
    assert (kernel.conflicts, kernel.conflict_share) == (0, None)


@pytest.mark.parametrize(
    ("names", "launched", "positions"),
    [
        (["a", "b"], ["a", "b"], [0, 1]),
        (["a", "lib", "b"], ["a<int>", "b"], [0, None, 1]),
        (["b"], ["a", "b"], [1]),  # ncu missed one
        (["a", "a"], ["a"], [0, None]),
        (["n::a"], ["a"], [0]),
        ([], ["a"], []),
    ],
)
def test_kernels_are_found_in_the_plan(names: list[str], launched: list[str], positions: list[int | None]) -> None:
    assert attribute(names, launched) == positions


def test_stalls_are_shares_of_a_warps_time() -> None:
    def stalled(us: float, **reasons: float) -> Profiled:
        values = {f"{m.STALL}{reason}_per_issue_active.ratio": value for reason, value in reasons.items()}
        return Profiled("k", values={**values, m.TIME[0]: us})

    one = stalled(1, long_scoreboard=6, selected=1, barrier=3, wait=0, long_scoreboard_not_issued=50)
    assert stalls_of([one]) == (("long_scoreboard", 0.6), ("barrier", 0.3))
    # Three times as long, all of it at barriers.
    assert stalls_of([one, stalled(3, barrier=10)])[0] == ("barrier", pytest.approx(0.825))
    assert stalls_of([Profiled("k")]) == ()


def read(traffic: float | None = 1000, *parts: Profiled, **counters: float) -> list[str]:
    parts = parts or (launch("a", **counters),)
    names = [part.name.split()[1].split("<")[0] for part in parts]
    return reading(summarise(parts, [planned(name) for name in names], "sm_90"), traffic)


def test_the_unit_at_its_limit_is_named() -> None:
    assert read(DRAM=91.2, MULTIPROCESSORS=30) == ["bound by DRAM: 91% of its peak"]
    assert read(DRAM=20, TENSOR=85, MULTIPROCESSORS=83)[0] == "bound by the tensor cores: 85% of their peak"
    (said,) = read(DRAM=79.4, L2=10)
    assert said == "no unit is at its limit (DRAM 79%, the L2 cache 10%)"
    assert read() == []


def test_what_warps_wait_for_is_said_where_no_unit_is_at_its_limit() -> None:
    values = {m.DRAM[0]: 10.0, m.TIME[0]: 5.0, f"{m.STALL}barrier_per_issue_active.ratio": 3.0,
              f"{m.STALL}selected_per_issue_active.ratio": 1.0}  # fmt: skip
    (said,) = reading(summarise([Profiled("a", values=values)], [planned("a")], "sm_90"), None)
    assert said.endswith("; warps spend 75% of their time waiting for other warps at a barrier")


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (1800, "moves 1.80x the bytes that any version has to"),
        (1050, "no more bytes"),
        (500, "0.50x"),
        (950, "no more"),
    ],
)
def test_bytes_beside_what_any_version_has_to_move(moved: float, words: str) -> None:
    assert words in read(READ=moved - 100, WRITTEN=100)[-1]


def test_bytes_are_not_compared_with_nothing() -> None:
    assert read(None, READ=5, WRITTEN=5) == [] == read(0, READ=5, WRITTEN=5)


def test_the_kernel_that_takes_most_of_the_time_is_named() -> None:
    said = read(None, launch("a", 10, DRAM=90), launch("b", 30, DRAM=85))
    assert said == ["b takes 75% of the time; bound by DRAM: 85% of its peak"]
