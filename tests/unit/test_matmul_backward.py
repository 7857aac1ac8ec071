"""The contract of matmul_backward: its reference against sums written out, its bound, its plan."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import store
from kbench.family import STORAGE, UNIT_ROUNDOFF, Array, ErrorModel, Gemm, Launch, Problem, Props

FAMILY = load_catalog()["matmul_backward"]
VERSION = FAMILY.by_number[1]
PROPS = (
    Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30),
    Props("b", "emulator", 3, 1536, 1024, 49152, 65536, 65536, 65536, 1 << 20, 1 << 30),
)


def problem(
    B: int, T: int, C: int, OC: int, accumulate: int, dtype: str = "fp32", gelu: int = 0, bias: int = 1
) -> Problem:
    sizes = {"B": B, "T": T, "C": C, "OC": OC, "accumulate": accumulate, "gelu": gelu, "bias": bias}
    return Problem(sizes, dtype)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 4)])
def test_reference_is_the_slope_of_the_forward_pass(sizes: tuple[int, ...], accumulate: int) -> None:
    """The loss is dout . (inp weight^T + bias), linear in each of them: differences are exact."""
    B, T, C, OC = sizes
    rng = np.random.default_rng(1)
    parameters = {"dinp": rng.normal(size=(B, T, C)), "dweight": rng.normal(size=(OC, C)), "dbias": rng.normal(size=OC)}
    dout, before = rng.normal(size=(B, T, OC)), {"dweight": rng.normal(size=(OC, C)), "dbias": rng.normal(size=OC)}
    inputs = {"dout": dout, "inp": parameters["dinp"], "weight": parameters["dweight"]}
    if accumulate:
        inputs |= before
    got = FAMILY.reference(problem(*sizes, accumulate), inputs, ErrorModel("fp32"), np)

    def loss(changed: dict[str, Array]) -> float:
        inp, weight, bias = changed["dinp"], changed["dweight"], changed["dbias"]
        return float(sum(dout[b, t, o] * (inp[b, t] @ weight[o] + bias[o]) for b, t, o in np.ndindex(B, T, OC)))

    for name, values in parameters.items():
        for index in np.ndindex(values.shape):
            moved = values.copy()
            moved[index] += 1.0
            slope = loss({**parameters, name: moved}) - loss(parameters)
            start = before[name][index] if accumulate and name in before else 0.0
            assert got[name].value[index] == pytest.approx(start + slope, abs=1e-11)


@pytest.mark.parametrize("accumulate", [0, 1])
def test_reference_is_the_slope_of_gelu_and_the_forward_pass(accumulate: int) -> None:
    """Of dout . (gelu(pre) weight^T), by central differences."""
    B, T, C, OC = 2, 3, 5, 4
    rng = np.random.default_rng(2)
    dout, weight = rng.normal(size=(B, T, OC)), rng.normal(size=(OC, C))
    pre = rng.normal(size=(B, T, C)) * 2.0
    inputs = {"dout": dout, "inp": gelu(pre), "weight": weight, "pre": pre}
    if accumulate:
        inputs |= {"dweight": rng.normal(size=(OC, C)), "dbias": rng.normal(size=OC)}
    got = FAMILY.reference(problem(B, T, C, OC, accumulate, gelu=1), inputs, ErrorModel("fp32"), np)
    plain = FAMILY.reference(problem(B, T, C, OC, accumulate), inputs, ErrorModel("fp32"), np)
    step = 1e-5
    slope = (gelu(pre + step) - gelu(pre - step)) / (2.0 * step)
    np.testing.assert_allclose(got["dinp"].value, (dout @ weight) * slope, rtol=1e-8, atol=1e-9)
    for name in ("dweight", "dbias"):
        np.testing.assert_array_equal(got[name].value, plain[name].value)


def test_without_a_bias_there_is_no_gradient_of_one() -> None:
    of = problem(2, 3, 4, 8, 1, bias=0)
    assert "dbias" not in {tensor.name for tensor in FAMILY.tensors(of)}
    assert list(make_case(FAMILY, of, 1).expected) == ["dinp", "dweight"]
    assert VERSION.scratch(of, 256, PROPS[0]) == ()
    assert [type(step) for step in VERSION.plan(of, 256, PROPS[0])] == [Gemm, Gemm]
    back = FAMILY.by_number[2].plan(problem(2, 3, 8, 4, 1, gelu=1, bias=0), 256, PROPS[0])
    assert [type(step) for step in back] == [Gemm, Gemm]


def test_version_2_goes_back_through_gelu_in_the_epilogue() -> None:
    version, of = FAMILY.by_number[2], problem(2, 3, 8, 5, 1, "bf16", gelu=1)
    gemms = [step for step in version.plan(of, 256, PROPS[0]) if isinstance(step, Gemm)]
    assert [(gemm.out.tensor, gemm.aux, gemm.gelu, gemm.beta) for gemm in gemms] == [
        ("dinp", "pre", False, 0.0),
        ("dweight", "", False, 1.0),
    ]
    assert version.needs == ("pre",) and "pre" in {tensor.name for tensor in FAMILY.tensors(of)}
    assert not FAMILY.refusal(version, of, 256)
    assert "without GELU it is version 1" in FAMILY.refusal(version, problem(2, 3, 8, 5, 1), 256)
    assert "C divisible by 8" in FAMILY.refusal(version, problem(2, 3, 12, 5, 1, gelu=1), 256)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_the_kernel_of_version_1_covers_all_elements(dtype: str) -> None:
    for sizes in (*(s.sizes for s in FAMILY.check_shapes), {**FAMILY.presets["default"], "gelu": 1}):
        of = Problem(sizes, dtype)
        for step in VERSION.plan(of, 256, PROPS[0]):
            if isinstance(step, Launch) and step.args[0] == "dinp":
                packet = 4 if of.storage == "fp32" else 8
                assert step.args == ("dinp", "pre", of["B"] * of["T"] * of["C"])
                assert 0 <= step.grid[0] * 256 * packet - step.args[2] < 256 * packet


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_a_coarse_tanh_and_a_rounded_product_use_at_most_60_percent_of_what_is_allowed_for_them(dtype: str) -> None:
    case = make_case(FAMILY, problem(1, 60, 40, 24, 0, dtype, gelu=1), 1)
    dout, weight, pre = (case.inputs[name].astype(np.float64) for name in ("dout", "weight", "pre"))
    product = store(case.tensors["dinp"], dout @ weight).astype(np.float64)
    coarse = 2.0**-17 if STORAGE[dtype] == "fp32" else 2.0**-11
    for sign in (-1.0, 1.0):
        t = np.tanh(np.sqrt(2.0 / np.pi) * (pre + 0.044715 * pre**3)) * (1.0 + sign * coarse)
        slope = 0.5 * (1.0 + t) + 0.5 * pre * (1.0 - t * t) * np.sqrt(2.0 / np.pi) * (1.0 + 3.0 * 0.044715 * pre**2)
        wrong = abs(product * slope - case.expected["dinp"].value)
        # A product that is a tie uses all that its rounding is allowed.
        rounded = UNIT_ROUNDOFF[STORAGE[dtype]] * abs(product * slope)
        assert (np.maximum(wrong - rounded, 0.0) / case.expected["dinp"].bound).max() <= 0.6


def test_gelu_by_the_error_function_is_not_taken_for_gelu_by_tanh() -> None:
    case = make_case(FAMILY, problem(1, 60, 40, 24, 0, gelu=1), 1)
    dout, weight, pre = (case.inputs[name].astype(np.float64) for name in ("dout", "weight", "pre"))
    normal = np.exp(-0.5 * pre**2) / math.sqrt(2.0 * math.pi)
    other = (dout @ weight) * (0.5 * (1.0 + np.vectorize(math.erf)(pre / math.sqrt(2.0))) + pre * normal)
    assert used_share(case, case.tensors["dinp"], np.float32(other)) > 3.0


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("flags", [(0, 1), (1, 1), (1, 0)])
@pytest.mark.parametrize("sizes", [(1, 33, 12, 132, 1), (2, 3, 5, 7, 0)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, ...], flags: tuple[int, int], dtype: str) -> None:
    for name, shares in probe(FAMILY, problem(*sizes, dtype, *flags), seed=3).items():
        assert shares.rounded <= 1.0 and shares.weakest > 3.0, (name, shares)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_over_many_rows_are_numbers_of_fp16(seed: int) -> None:
    """Of each pattern of inputs."""
    case = make_case(FAMILY, problem(1, 16384, 3, 4, 1, "fp16"), seed, True)
    assert max(abs(case.expected[name].value).max() for name in ("dinp", "dweight", "dbias")) < 65504


def cut(values: Array) -> Array:
    """TF32 as a tensor core may take it: the last 13 bits of fp32 dropped."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("structured", [False, True])
def test_operands_cut_to_tf32_use_at_most_60_percent(structured: bool) -> None:
    for seed in range(3):
        case = make_case(FAMILY, problem(1, 300, 60, 40, 1, "tf32"), seed, structured)
        dout, inp, weight = (cut(case.inputs[name]) for name in ("dout", "inp", "weight"))
        dinp = dout @ weight
        dweight = np.float32(case.inputs["dweight"]) + dout[0].T @ inp[0]
        assert used_share(case, case.tensors["dinp"], dinp) <= 0.6
        assert used_share(case, case.tensors["dweight"], dweight) <= 0.6


@pytest.mark.parametrize("props", PROPS, ids=lambda props: props.name)
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_stretches_cover_all_rows_once(dtype: str, props: Props) -> None:
    shapes = [s.sizes for s in FAMILY.check_shapes if s.sizes["bias"]]
    for sizes in (*shapes, FAMILY.presets["default"], problem(1, 9999, 8, 3, 1).sizes):
        of = Problem(sizes, dtype)
        first, second = VERSION.plan(of, 256, props)[:2]
        assert isinstance(first, Launch) and isinstance(second, Launch)
        (partials,) = VERSION.scratch(of, 256, props)
        stretches, rows, N = partials.shape[0], first.args[-1], of["B"] * of["T"]
        assert (stretches - 1) * rows < N <= stretches * rows, "each stretch has a row"
        assert partials.dtype == "fp32" and partials.shape[1] == of["OC"]
        assert first.grid[0] % stretches == 0 and second.args[2] == stretches


def test_the_first_stage_fills_the_gpu_at_the_default_problem() -> None:
    of = Problem(FAMILY.presets["default"], "fp32")
    (blocks,) = VERSION.plan(of, 256, PROPS[0])[0].grid
    assert 0.9 * 132 * 8 < blocks <= 132 * 8


def test_only_the_gradient_of_the_weight_adds_to_what_is_there() -> None:
    for accumulate in (0, 1):
        gemms = [
            step for step in VERSION.plan(problem(2, 3, 4, 5, accumulate), 256, PROPS[0]) if isinstance(step, Gemm)
        ]
        assert [(gemm.out.tensor, gemm.beta) for gemm in gemms] == [("dinp", 0.0), ("dweight", float(accumulate))]
