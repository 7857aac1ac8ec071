"""The contract of step_control: its reference step by step, the situations it draws, what the check tells apart."""

from __future__ import annotations

import math
import statistics
import sys
from types import ModuleType

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import Case, make_case
from kbench.check.probe import probe, used_share
from kbench.family import ErrorModel, Launch, Problem, Props

FAMILY = load_catalog()["step_control"]
MODULE: ModuleType = sys.modules[FAMILY.tensors.__module__]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)
SEED = 6
SHAPES = range(60, 60 + len(MODULE.SITUATIONS))  # one for each situation


def problem(N: int, S: int = 5, W: int = 8) -> Problem:
    return Problem({"N": N, "S": S, "W": W}, "fp32")


def situation(case: Case) -> object:
    return MODULE.situation(case.problem, case.inputs["step"][1])


@pytest.mark.parametrize("N", SHAPES)
def test_reference_is_the_step_in_plain_numbers(N: int) -> None:
    case = make_case(FAMILY, problem(N), SEED)
    weight, max_norm, loss_limit, norm_limit, *betas_and_epsilon, _ = map(float, case.inputs["settings"])
    index, pushed = int(case.inputs["step"][0]), int(case.inputs["filled"][0])
    loss = weight * math.fsum(map(float, case.inputs["losses"]))
    norm = math.sqrt(float(case.inputs["squares"][0]))
    windows, zs = [list(map(float, row)) for row in case.inputs["window"]], [0.0, 0.0]
    for row, value in enumerate((loss, norm)):
        windows[row][pushed % 8] = value
        if pushed >= 8:
            zs[row] = (value - statistics.fmean(windows[row])) / statistics.pstdev(windows[row])
    skipped = 0 < loss_limit < zs[0] or 0 < norm_limit < zs[1]
    scale = 0.0 if skipped else max_norm / norm if 0 < max_norm < norm else 1.0
    rate, *corrections = map(float, case.inputs["schedule"][min(index, 4)])
    direct = {
        "step": [index + 1, case.inputs["step"][1]],
        "filled": [pushed + 1],
        "window": windows,
        "scalars": [rate, *betas_and_epsilon[:2], *corrections, betas_and_epsilon[2], scale, 0.0],
        "report": [loss, norm, rate, scale, *zs, index, float(skipped)],
    }
    for name, values in direct.items():
        np.testing.assert_allclose(case.expected[name].value, values, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_check_shapes_meet_all_situations(seed: int, structured: bool) -> None:
    cases = [make_case(FAMILY, Problem(shape.sizes, "fp32"), seed, structured) for shape in FAMILY.check_shapes]
    assert {situation(case) for case in cases} == set(MODULE.SITUATIONS)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_situations_are_what_they_are_called(seed: int, structured: bool) -> None:
    """No decision hangs on a rounding error: what is tested is further from its limit than its bound."""
    case = make_case(FAMILY, problem(97, W=24), seed, structured)
    found, report = situation(case), case.expected["report"].value
    bounds, limits = np.asarray(case.expected["report"].bound)[4:6], case.inputs["settings"][2:4]
    outlier = found.full and "outlier" in (found.loss, found.norm)
    assert report[7] == outlier
    assert report[3] == pytest.approx(0.0 if outlier else found.clip if 0 < found.clip < 1 else 1.0)
    assert (report[6] >= 5) == found.past_end
    for z, limit, bound in zip(report[4:6], limits, bounds, strict=True):
        assert limit == 0 or abs(z - limit) > 10 * bound


def test_the_seeds_of_the_steps_of_a_run_all_differ() -> None:
    """Those of the mixer's own known answers, too: 0 stays 0."""
    for base in (0, 1, 0xFFFFFFFF):
        seeds = {MODULE.seed_of_step(base, index) for index in range(20000)}
        assert len(seeds) == 20000 and all(0 <= seed < 1 << 32 for seed in seeds)
    assert MODULE.seed_of_step(0, 0) == 0 and MODULE.seed_of_step(1, 0) == 0x514E28B7


@pytest.mark.parametrize("N", SHAPES)
def test_the_check_tells_right_from_wrong(N: int) -> None:
    for name, of in probe(FAMILY, problem(N), SEED).items():
        assert of.rounded <= 1.0 and min(of.zeros, of.stale) > 3
        assert of.slip > 3 or name in ("filled", "seed")  # single elements


@pytest.mark.parametrize("N", (*SHAPES, 65536))
@pytest.mark.parametrize("name", ["report", "scalars", "window"])
def test_each_number_counts(name: str, N: int) -> None:
    """An error of 0.1% of a loss, and of 3% of a z, which is a difference over a spread of 2%, is noticed."""
    case = make_case(FAMILY, problem(N), SEED)
    tensor, right = case.tensors[name], case.expected[name].value
    for index in np.ndindex(tensor.shape):
        wrong = right.astype(np.float32)
        wrong[index] *= 1.03 if name == "report" and index[0] in (4, 5) else 1.001
        assert right[index] == 0 or used_share(case, tensor, wrong) > 3, index


def test_the_error_of_z_holds_for_values_next_to_a_window_without_spread() -> None:
    window = np.full(16, 3.0)
    test = MODULE._Test(window, 2, 3.0, np)
    assert test.z == 0.0 and test.error(1e-6, ErrorModel("fp32")) == 0.0
    test = MODULE._Test(window, 2, 3.0 + 1e-3, np)
    assert test.z == pytest.approx(math.sqrt(15)) and test.error(1e-6, ErrorModel("fp32")) > 1e-6 / 1e-3


def test_the_plan_is_one_block_and_traffic_one_pass() -> None:
    for block in FAMILY.by_number[1].blocks:
        (launch,) = FAMILY.by_number[1].plan(problem(65536), block, PROPS)
        assert isinstance(launch, Launch) and launch.grid == (1,) and launch.block == (block,)
    assert FAMILY.least_traffic(problem(1000, 50, 8)) == 4 * (1000 + 16 + 37)
