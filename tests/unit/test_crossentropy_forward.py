"""The contract of crossentropy_forward: its reference, its bound, its plan."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Launch, Problem, Props

FAMILY = load_catalog()["crossentropy_forward"]
ANY_GPU = Props("any", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 80 << 30)


def problem(B: int, T: int, V: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "V": V}, dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (3, 1, 40)])
def test_losses_are_the_logarithms_of_the_targets_probabilities(sizes: tuple[int, int, int]) -> None:
    case = make_case(FAMILY, problem(*sizes), seed=1)
    for b, t in np.ndindex(sizes[:2]):
        p = float(case.inputs["probs"][b, t, case.inputs["targets"][b, t]])
        assert case.expected["losses"].value[b, t] == pytest.approx(math.log(1.0 / p), rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_probabilities_are_probabilities_and_none_is_zero(dtype: str, structured: bool) -> None:
    for seed in range(3):
        probs = np.float64(make_case(FAMILY, problem(2, 3, 50257, dtype), seed, structured).inputs["probs"])
        # Within a rounding to bf16, which may have the same sign for all elements.
        np.testing.assert_allclose(probs.sum(axis=-1), 1.0, rtol=2.0**-8)
        assert (probs > 0.0).all()


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(2, 3, 5), (5, 257, 2)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, int, int], dtype: str) -> None:
    found = probe(FAMILY, problem(*sizes, dtype), seed=3)["losses"]
    assert found.rounded <= 0.6
    assert found.weakest >= 1000.0


def test_a_row_costs_a_sector_or_less() -> None:
    assert FAMILY.least_traffic(problem(2, 3, 1000)) == 6 * (32 + 8)
    assert FAMILY.least_traffic(problem(2, 3, 1000, "bf16")) == 6 * (32 + 8)
    assert FAMILY.least_traffic(problem(2, 3, 8, "bf16")) == 6 * (16 + 8)
    assert FAMILY.least_traffic(Problem(FAMILY.presets["large"], "fp32")) >= 2**30


def test_the_grid_covers_all_rows() -> None:
    for rows, blocks in ((1, 1), (256, 1), (257, 2), (8192, 32)):
        (step,) = FAMILY.by_number[1].plan(problem(1, rows, 3), 256, ANY_GPU)
        assert isinstance(step, Launch) and step.grid == (blocks,)
