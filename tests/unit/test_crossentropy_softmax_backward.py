"""The contract of crossentropy_softmax_backward: its reference, its bound, its plan."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Array, ErrorModel, Launch, Problem, Props

FAMILY = load_catalog()["crossentropy_softmax_backward"]
ANY_GPU = Props("any", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 80 << 30)


def problem(B: int, T: int, V: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "V": V}, dtype)


def test_it_is_the_slope_of_the_loss_after_a_softmax() -> None:
    B, T, V = 2, 2, 5
    rng = np.random.default_rng(1)
    logits, dlosses = rng.normal(0.0, 1.0, (B, T, V)), rng.normal(0.0, 1.0, (B, T))
    targets = rng.integers(0, V, (B, T))

    def total(z: Array) -> float:
        losses = np.log(np.exp(z).sum(axis=-1)) - np.take_along_axis(z, targets[..., None], axis=-1)[..., 0]
        return float((losses * dlosses).sum())

    probs = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    given = {"dlosses": dlosses, "probs": probs, "targets": np.float64(targets)}
    kept = probs.copy()
    got = FAMILY.reference(problem(B, T, V), given, ErrorModel("fp32"), np)["dlogits"].value
    np.testing.assert_array_equal(probs, kept)
    for index in np.ndindex(B, T, V):
        step = np.zeros((B, T, V))
        step[index] = 1e-5
        slope = (total(logits + step) - total(logits - step)) / 2e-5
        assert got[index] == pytest.approx(slope, abs=1e-9)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(3, 5, 3), (1, 4, 257), (1, 2, 50257)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, int, int], dtype: str) -> None:
    found = probe(FAMILY, problem(*sizes, dtype), seed=3)["dlogits"]
    assert found.rounded <= (0.6 if dtype == "fp32" else 1.0)
    assert found.weakest >= 3.0


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_typical_gradients_tell_zero_from_right(dtype: str) -> None:
    expected = make_case(FAMILY, problem(1, 4, 50257, dtype), seed=2).expected["dlogits"]
    size = np.abs(expected.value)
    assert np.quantile(size / np.asarray(expected.bound), 0.1) > 5.0


@pytest.mark.parametrize("dtype, per_thread", [("fp32", 16), ("bf16", 32)])
def test_the_grid_covers_all_elements(dtype: str, per_thread: int) -> None:
    for sizes in (*FAMILY.presets.values(), *(shape.sizes for shape in FAMILY.check_shapes)):
        of = Problem(sizes, dtype)
        (step,) = FAMILY.by_number[1].plan(of, 128, ANY_GPU)
        assert isinstance(step, Launch) and step.block == (128,)
        elements = of["B"] * of["T"] * of["V"]
        assert elements <= step.grid[0] * 128 * per_thread < elements + 128 * per_thread
