"""The contract of softmax_forward: its reference against sums written out, its bound, its plans."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import Case, make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import store
from kbench.family import Array, ErrorModel, Launch, Problem, Props

FAMILY = load_catalog()["softmax_forward"]
H200 = Props("H200", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 140 << 30)
SMALL_GPU = replace(H200, multiprocessors=10, shared_per_block_optin=99 << 10, shared_per_multiprocessor=100 << 10)


def problem(N: int, C: int, dtype: str = "fp32") -> Problem:
    return Problem({"N": N, "C": C}, dtype)


@pytest.mark.parametrize("N, C", [(1, 1), (4, 2), (5, 7), (3, 40)])
def test_reference_agrees_with_the_sums_written_out(N: int, C: int) -> None:
    # Without subtracting the largest: in float64 nothing overflows here.
    inp = np.random.default_rng(1).normal(3.0, 5.0, (N, C))
    got = FAMILY.reference(problem(N, C), {"inp": inp}, ErrorModel("fp32"), np)["out"].value
    for n in range(N):
        total = math.fsum(math.exp(x) for x in inp[n])
        np.testing.assert_allclose(got[n], [math.exp(x) / total for x in inp[n]], rtol=1e-12)


def test_the_reference_changes_no_input() -> None:
    inp = np.random.default_rng(1).normal(0.0, 1.0, (3, 9))
    kept = inp.copy()
    FAMILY.reference(problem(3, 9), {"inp": inp}, ErrorModel("fp32"), np)
    np.testing.assert_array_equal(inp, kept)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("N, C", [(5, 2), (9, 13), (4, 64), (3, 1031), (2, 50257)])
def test_the_bound_tells_right_from_wrong(N: int, C: int, dtype: str) -> None:
    found = probe(FAMILY, problem(N, C, dtype), seed=3)["out"]
    assert found.rounded <= (0.6 if dtype == "fp32" else 1.0)
    assert found.weakest >= 3.0


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_typical_elements_tell_zero_from_right(dtype: str) -> None:
    """Not only the largest element of a row: nine in ten are far from zero, those below the type's numbers apart."""
    case = make_case(FAMILY, problem(4, 50257, dtype), seed=2)
    expected = case.expected["out"]
    share = expected.value / np.maximum(expected.bound, 1e-30)
    likely = expected.value > 1e-6
    assert likely.any() and np.quantile(share[likely], 0.1) > 10.0


def lane_by_lane(case: Case) -> Array:
    """Every lane of a warp adds its numbers one after the other in fp32, as versions 3 and 6 do."""
    inp = np.float32(case.inputs["inp"])
    N, C = inp.shape
    exps = np.exp(inp - inp.max(axis=1, keepdims=True))
    padded = np.zeros((N, -(-C // 32) * 32), np.float32)
    padded[:, :C] = exps
    sums = np.cumsum(padded.reshape(N, -1, 32), axis=1, dtype=np.float32)[:, -1]
    return exps * (np.float32(1.0) / sums.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("largest", [0.0, 15.0, 16.0, 17.0])
def test_sums_of_single_lanes_use_at_most_60_percent(largest: float, structured: bool) -> None:
    """Where one element is e^15 to e^17 times as large as the others, they are about half an ulp of its lane's sum."""
    case = make_case(FAMILY, problem(6, 50257), seed=4, structured=structured)
    if largest:
        inp = np.random.default_rng(5).uniform(-1.0, 1.0, (6, 50257)).astype(np.float32)
        inp[np.arange(6), [0, 1, 31, 32, 50256, 7]] = largest
        expected = FAMILY.reference(case.problem, {"inp": np.float64(inp)}, ErrorModel("fp32", structured), np)
        case = replace(case, inputs={"inp": inp}, expected=expected)
    assert used_share(case, case.tensors["out"], store(case.tensors["out"], lane_by_lane(case))) <= 0.6


def launch(number: int, of: Problem, block: int, props: Props = H200) -> Launch:
    (step,) = FAMILY.by_number[number].plan(of, block, props)
    assert isinstance(step, Launch)
    return step


def test_version_7_keeps_a_row_in_shared_memory_where_it_fits() -> None:
    default = Problem(FAMILY.presets["default"], "fp32")
    assert (launch(7, default, 1024).grid, launch(7, default, 1024).shared) == ((132,), 14 * 1024 * 16)
    assert launch(7, default, 1024, SMALL_GPU).kernel == "softmax_forward7_long<float>"
    assert launch(7, default, 1024, SMALL_GPU).grid == (8192,)
    # In 16 bits two rows fit side by side, and blocks of a row never outnumber rows.
    assert launch(7, Problem(FAMILY.presets["default"], "bf16"), 256).grid == (264,)
    assert launch(7, problem(3, 64), 32).grid == (3,)


@pytest.mark.parametrize("block, ahead", [(1024, 1), (512, 3), (256, 6)])
def test_version_7_loads_as_far_ahead_as_shared_memory_has_room(block: int, ahead: int) -> None:
    step = launch(7, Problem(FAMILY.presets["default"], "fp32"), block)
    assert (step.kernel, step.shared) == (f"softmax_forward7<float, {ahead}>", 229376)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("C", [1, 1000, 8192, 14000, 50257])
def test_all_blocks_of_version_7_run_at_the_same_time(C: int, dtype: str) -> None:
    for block in FAMILY.by_number[7].blocks:
        step = launch(7, problem(100000, C, dtype), block)
        blocks = step.grid[0] // H200.multiprocessors
        assert step.grid[0] == blocks * H200.multiprocessors
        assert blocks * (step.shared + 2048) <= H200.shared_per_multiprocessor
        assert blocks * block * 64 <= H200.registers_per_multiprocessor


def test_check_shapes_reach_every_distance_of_loading_ahead() -> None:
    kernels = set()
    for shape in FAMILY.check_shapes:
        if shape.versions is None or 7 in shape.versions:
            for block in shape.block_sizes or FAMILY.by_number[7].blocks:
                kernels.add(launch(7, Problem(shape.sizes, "fp32"), block).kernel)
    assert kernels == {f"softmax_forward7<float, {ahead}>" for ahead in (1, 3, 6)} | {"softmax_forward7_long<float>"}


@pytest.mark.parametrize("sizes", [*FAMILY.presets.values(), *(shape.sizes for shape in FAMILY.check_shapes)])
def test_grids_reach_all_rows(sizes: dict[str, int]) -> None:
    of = Problem(sizes, "fp32")
    rows_per_block = {1: lambda block: block, 5: lambda block: block, 6: lambda block: block // 32,
                      8: lambda block: block // 32}  # fmt: skip
    for version in FAMILY.versions:
        for block in version.blocks:
            step = launch(version.number, of, block)
            assert step.block == (block,)
            if version.number != 7:
                per_block = rows_per_block.get(version.number, lambda block: 1)(block)
                assert of["N"] <= step.grid[0] * per_block < of["N"] + per_block
