"""The contract of classifier_fused: its reference against formulas written out, its bound, padding, its plans."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Array, ErrorModel, Expected, Launch, Problem, Props

FAMILY = load_catalog()["classifier_fused"]
H200 = Props("H200", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 140 << 30)


def problem(B: int, T: int, V: int, P: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "V": V, "P": P}, dtype)


def inputs(of: Problem, seed: int = 0) -> dict[str, Array]:
    case = make_case(FAMILY, of, seed)
    return {name: np.float64(values) for name, values in case.inputs.items()}


def reference(of: Problem, given: dict[str, Array]) -> dict[str, Expected]:
    return FAMILY.reference(of, given, ErrorModel(of.dtype), np)


def loss(logits: Array, target: int) -> float:
    """log of sum over j of exp(z[j] - z[target]): exponentials of differences, without the largest."""
    return math.log(math.fsum(math.exp(z - logits[target]) for z in logits))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 8), (1, 4, 7, 7), (3, 1, 2, 9)])
def test_losses_and_gradients_are_those_written_out(sizes: tuple[int, int, int, int]) -> None:
    of = problem(*sizes)
    given = inputs(of)
    got = reference(of, given)
    B, T, V, P = sizes
    for b, t in np.ndindex(B, T):
        logits, target = given["logits"][b, t, :V], int(given["targets"][b, t])
        assert got["losses"].value[b, t] == pytest.approx(loss(logits, target), rel=1e-11, abs=1e-13)
        for v in range(P):
            wanted = 0.0
            if v < V:
                # The probability of v is exp of minus the loss that v would have as the target.
                wanted = (math.exp(-loss(logits, v)) - (v == target)) * given["dlosses"][b, t]
            assert got["dlogits"].value[b, t, v] == pytest.approx(wanted, rel=1e-11, abs=1e-13)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    of = problem(1, 1, 6, 6)
    given = inputs(of)
    given["logits"] = np.random.default_rng(1).normal(0.0, 1.0, (1, 1, 6))
    given["dlosses"][...] = 1.0
    slopes = reference(of, given)["dlogits"].value[0, 0]
    logits, target = given["logits"][0, 0], int(given["targets"][0, 0])
    for v in range(6):
        step = np.eye(6)[v] * 1e-5
        difference = loss(logits + step, target) - loss(logits - step, target)
        assert slopes[v] == pytest.approx(difference / 2e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_padding_holds_junk_that_no_result_depends_on_and_has_no_gradient(dtype: str) -> None:
    of = problem(2, 3, 13, 20, dtype)
    given = inputs(of)
    assert (given["logits"][..., 13:] > 2.0 * given["logits"][..., :13].max()).all()
    got = reference(of, given)
    assert (got["dlogits"].value[..., 13:] == 0.0).all()
    assert (np.asarray(got["dlogits"].bound)[..., 13:] == 0.0).all()
    likely = np.abs(got["dlogits"].value) > 1e-30  # what is less may have a bound below all numbers of float32
    assert likely[..., :13].mean() > 0.5 and (np.asarray(got["dlogits"].bound)[likely] > 0.0).all()
    given["logits"][..., 13:] = 0.0
    np.testing.assert_array_equal(reference(of, given)["losses"].value, got["losses"].value)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 3, 2, 5), (2, 2, 13, 13), (1, 3, 33, 40), (1, 2, 50257, 50304)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, int, int, int], dtype: str) -> None:
    for name, found in probe(FAMILY, problem(*sizes, dtype), seed=3).items():
        assert found.rounded <= (0.6 if dtype == "fp32" else 1.0), name
        assert found.weakest >= 3.0, name


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_typical_gradients_tell_zero_from_right(dtype: str) -> None:
    """Gradients are of the order of 2e-5 at this vocabulary: nine in ten that the type can hold are far from zero."""
    expected = make_case(FAMILY, problem(1, 4, 50257, 50304, dtype), seed=2).expected["dlogits"]
    size = np.abs(expected.value)
    likely = size > 1e-6
    assert likely.any()
    assert np.quantile(size[likely] / np.asarray(expected.bound)[likely], 0.1) > 10.0


def launch(number: int, of: Problem, block: int = 1024) -> Launch:
    (step,) = FAMILY.by_number[number].plan(of, block, H200)
    assert isinstance(step, Launch) and step.block == (block,)
    return step


def test_rows_that_are_not_aligned_take_the_kernels_for_them() -> None:
    assert launch(2, problem(1, 1, 9, 12)).kernel == "classifier_fused2<float, true>"
    assert launch(2, problem(1, 1, 9, 10)).kernel == "classifier_fused2<float, false>"
    assert launch(4, problem(1, 1, 9, 12, "bf16")).kernel == "classifier_fused4<__nv_bfloat16, false>"
    assert launch(4, problem(1, 1, 9, 16, "bf16")).kernel == "classifier_fused4<__nv_bfloat16, true>"


@pytest.mark.parametrize("number", [5, 6])
def test_a_row_stays_in_shared_memory_where_it_fits(number: int) -> None:
    default = Problem(FAMILY.presets["default"], "fp32")
    assert (launch(number, default).grid, launch(number, default).shared) == ((132,), 14 * 1024 * 16)
    assert [launch(number, default, block).kernel for block in (1024, 512, 256)] == [
        f"classifier_fused{number}<float, {ahead}>" for ahead in (1, 3, 6)
    ]
    longer = problem(1, 500, 60000, 60000)
    kernel = f"classifier_fused_long<float, {str(number == 6).lower()}>"
    assert (launch(number, longer).kernel, launch(number, longer).grid) == (kernel, (500,))
    smaller = replace(H200, shared_per_block_optin=99 << 10, shared_per_multiprocessor=100 << 10)
    (step,) = FAMILY.by_number[number].plan(default, 1024, smaller)
    assert isinstance(step, Launch) and step.kernel == kernel and step.shared == 0


@pytest.mark.parametrize("number", [5, 6])
def test_check_shapes_reach_every_distance_of_loading_ahead(number: int) -> None:
    kernels = set()
    for shape in FAMILY.check_shapes:
        if shape.versions is None or number in shape.versions:
            for block in shape.block_sizes or FAMILY.by_number[number].blocks:
                kernels.add(launch(number, Problem(shape.sizes, "fp32"), block).kernel)
    assert kernels == {f"classifier_fused{number}<float, {ahead}>" for ahead in (1, 3, 6)} | {
        f"classifier_fused_long<float, {str(number == 6).lower()}>"
    }


def test_every_version_may_work_in_place() -> None:
    assert all(version.aliases == (("logits", "dlogits"),) for version in FAMILY.versions)


def test_rows_must_have_room_for_the_vocabulary() -> None:
    assert "P at least V" in FAMILY.refusal(FAMILY.by_number[2], problem(1, 1, 9, 8), 256)
    assert not FAMILY.refusal(FAMILY.by_number[2], problem(1, 1, 9, 9), 256)


def test_padding_of_the_logits_is_no_traffic() -> None:
    assert FAMILY.least_traffic(problem(2, 3, 10, 16)) == 6 * (10 + 16 + 3) * 4
    assert FAMILY.least_traffic(problem(2, 3, 10, 16, "fp16")) == 6 * ((10 + 16) * 2 + 3 * 4)
