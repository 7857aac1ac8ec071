"""The contract of fused_residual_forward: its reference against the two operations apart, its bound, its plans."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import store
from kbench.family import Array, Launch, Problem, Props, Tensor

CATALOG = load_catalog()
FAMILY = CATALOG["fused_residual_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)

Sizes = tuple[int, int, int]  # B, T, C


def problem(sizes: Sizes, dtype: str = "bf16") -> Problem:
    return Problem(dict(zip(("B", "T", "C"), sizes, strict=True)), dtype)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 3), (1, 4, 50)])
def test_reference_is_the_layernorm_of_the_stored_residual(sizes: Sizes, dtype: str) -> None:
    case = make_case(FAMILY, problem(sizes, dtype), seed=2)
    inputs = {name: values.astype(np.float64) for name, values in case.inputs.items()}
    residual = store(Tensor("x", sizes, dtype, "scratch"), inputs["inp1"] + inputs["inp2"]).astype(np.float64)
    np.testing.assert_array_equal(case.expected["residual"].value, residual)
    for index in np.ndindex(*sizes[:2]):
        row = [float(x) for x in residual[index]]
        mean = math.fsum(row) / len(row)
        rstd = (math.fsum((x - mean) ** 2 for x in row) / len(row) + 1e-5) ** -0.5
        normed = [(x - mean) * rstd * w + b for x, w, b in zip(row, inputs["weight"], inputs["bias"], strict=True)]
        assert case.expected["mean"].value[index] == pytest.approx(mean, rel=1e-13)
        assert case.expected["rstd"].value[index] == pytest.approx(rstd, rel=1e-11)
        np.testing.assert_allclose(case.expected["normed"].value[index], normed, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [tuple(s.sizes.values()) for s in FAMILY.check_shapes if s.sizes["C"] < 5000])
def test_the_check_tells_right_from_wrong(sizes: Sizes, dtype: str) -> None:
    for name, of in probe(FAMILY, problem(sizes, dtype), seed=3).items():
        assert of.rounded <= 1.0, name
        faults = {"zeros": of.zeros, "stale": of.stale, "slip": of.slip}
        if sizes[2] == 1 and name == "rstd":
            del faults["stale"]  # a row of one element has always the same
        if math.prod(sizes) == 1 or (name in ("mean", "rstd") and sizes[0] * sizes[1] == 1):
            del faults["slip"]
        assert min(faults.values()) >= 3.0, (name, faults)


def test_statistics_of_the_unrounded_sum_are_wrong() -> None:
    """A separate LayerNorm would see the residual as it is stored, and so must every version."""
    case = make_case(FAMILY, problem((1, 4, 768)), seed=1)
    unrounded = np.float64(case.inputs["inp1"]) + np.float64(case.inputs["inp2"])
    mean = unrounded.mean(axis=2).astype(np.float32)
    assert used_share(case, case.tensors["mean"], mean) > 3.0


def test_one_thread_may_add_up_a_long_row_of_16_bit_numbers() -> None:
    """Their squared deviations take few values, so roundings do not cancel as random ones do."""
    case = make_case(FAMILY, problem((1, 4, 65537)), seed=10)

    def mean_in_order(values: Array) -> Array:
        return np.add.accumulate(values, axis=2, dtype=np.float32)[..., -1] / np.float32(65537)

    x = np.float32(case.expected["residual"].value)
    mean = mean_in_order(x)
    rstd = 1 / np.sqrt(mean_in_order((x - mean[..., None]) ** 2) + np.float32(1e-5))
    assert 0.2 < used_share(case, case.tensors["rstd"], rstd) < 0.6


def launch_of(number: int, of: Problem, block: int, props: Props = PROPS) -> Launch:
    (launch,) = FAMILY.by_number[number].plan(of, block, props)
    assert isinstance(launch, Launch) and launch.block == (block,)
    return launch


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 37, 8), (8, 1024, 768), (1, 9, 50000)])
def test_persistent_blocks_fit_at_once_and_get_rows(sizes: Sizes) -> None:
    """No more blocks than the GPU can hold, and none without a row; teams split the warps of a block evenly."""
    of = problem(sizes)
    for multiprocessors in (3, 132):
        props = replace(PROPS, multiprocessors=multiprocessors)
        for block in FAMILY.by_number[6].blocks:
            launch = launch_of(6, of, block, props)
            if launch.kernel.startswith("fused_residual_forward4"):
                assert sizes[2] == 50000
                continue
            per_row = launch.args[-1]
            assert isinstance(per_row, int) and block // 32 % per_row == 0
            teams = block // 32 // per_row
            assert launch.grid[0] * block <= multiprocessors * max(1024, block)
            assert (launch.grid[0] - 1) * teams < sizes[0] * sizes[1]


def test_versions_5_and_6_fall_back_where_shared_memory_is_too_small() -> None:
    """32 warps keep 34 rows, 16 teams of two warps 18 rows, and two arrays of a float per warp: bf16, C = 768."""
    of = problem((8, 1024, 768))
    assert launch_of(5, of, 1024).shared == 34 * 768 * 2
    assert launch_of(6, of, 1024).shared == 18 * 768 * 2
    for number, needed in ((5, 34 * 768 * 2), (6, 18 * 768 * 2 + 256)):
        enough, less = (replace(PROPS, shared_per_block_optin=size) for size in (needed, needed - 1))
        assert launch_of(number, of, 1024, enough).kernel.startswith(f"fused_residual_forward{number}")
        assert launch_of(number, of, 1024, less) == launch_of(4, of, 1024)


def test_large_moves_a_gibibyte() -> None:
    assert 2**30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], "bf16")) <= 2.5 * 2**30
