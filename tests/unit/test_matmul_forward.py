"""The contract of matmul_forward: its reference against sums written out, its bound, its plans."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import store
from kbench.family import Array, ErrorModel, Gemm, Launch, Problem, Props, Version, tensors_of

FAMILY = load_catalog()["matmul_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


def problem(B: int, T: int, C: int, OC: int, gelu: int, dtype: str = "fp32", bias: int = 1) -> Problem:
    return Problem({"B": B, "T": T, "C": C, "OC": OC, "gelu": gelu, "bias": bias}, dtype)


def gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("with_gelu", "with_bias"), list(itertools.product([0, 1], [0, 1])))
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 4)])
def test_reference_agrees_with_the_sums_written_out(sizes: tuple[int, ...], with_gelu: int, with_bias: int) -> None:
    B, T, C, OC = sizes
    rng = np.random.default_rng(1)
    inp, weight, bias = rng.normal(size=(B, T, C)), rng.normal(size=(OC, C)), rng.normal(size=OC)
    inputs = {"inp": inp, "weight": weight} | ({"bias": bias} if with_bias else {})
    got = FAMILY.reference(problem(*sizes, with_gelu, bias=with_bias), inputs, ErrorModel("fp32"), np)
    assert list(got) == (["out", "pre"] if with_gelu else ["out"])
    for b, t, o in np.ndindex(B, T, OC):
        expected = sum(inp[b, t, c] * weight[o, c] for c in range(C)) + (bias[o] if with_bias else 0.0)
        assert got["out"].value[b, t, o] == pytest.approx(gelu(expected) if with_gelu else expected, abs=1e-13)
        if with_gelu:
            assert got["pre"].value[b, t, o] == pytest.approx(expected, abs=1e-13)


def test_slices_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(2, 9, 6, 5, 1, "tf32")
    case = make_case(FAMILY, of, 1)
    monkeypatch.setitem(FAMILY.reference.__globals__, "SLICE", 20)  # four rows at a time
    parts = make_case(FAMILY, of, 1)
    for name, whole in case.expected.items():
        np.testing.assert_allclose(parts.expected[name].value, whole.value, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(parts.expected[name].bound, whole.bound, rtol=1e-5)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("sizes", [(2, 5, 3, 7, 0), (1, 33, 13, 35, 1)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, ...], bias: int, dtype: str) -> None:
    for name, shares in probe(FAMILY, problem(*sizes, dtype, bias), seed=3).items():
        assert shares.rounded <= 1.0 and shares.weakest > 3.0, (name, shares)


def cut(values: Array) -> Array:
    """TF32 as a tensor core may take it: the last 13 bits of fp32 dropped."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_right_results_use_at_most_60_percent(dtype: str, structured: bool) -> None:
    """Operands cut to TF32, and a tanh as coarse as cuBLASLt's was seen to be, with an error of one sign."""
    for with_gelu in (0, 1):
        for seed in range(3):
            case = make_case(FAMILY, problem(1, 40, 200, 50, with_gelu, dtype), seed, structured)
            inp, weight = (cut(case.inputs[name]) if dtype == "tf32" else np.float32(case.inputs[name])
                           for name in ("inp", "weight"))  # fmt: skip
            sums = inp @ weight.T + np.float32(case.inputs["bias"])
            if with_gelu:
                u = np.float64(math.sqrt(2 / math.pi)) * (sums + 0.044715 * np.float64(sums) ** 3)
                sums = np.float32(0.5 * sums * (1.0 + np.tanh(u) * (1.0 - 2.0**-17)))
            assert used_share(case, case.tensors["out"], sums) <= 0.6


@pytest.mark.parametrize("version", FAMILY.versions, ids=lambda version: f"v{version.number}")
def test_grids_cover_all_outputs(version: Version) -> None:
    per_block = {1: lambda block: block, 2: lambda block: 4 * block, 4: lambda block: 128 * 128}
    for sizes in (*(s.sizes for s in FAMILY.check_shapes), FAMILY.presets["default"]):
        of = Problem(sizes, "fp32")
        for block in version.blocks:
            for launch in version.plan(of, block, PROPS):
                if isinstance(launch, Launch):
                    assert math.prod(launch.block) == block and len(launch.grid) == 1
                    outputs = of["B"] * of["T"] * of["OC"]
                    assert outputs <= launch.grid[0] * per_block[version.number](block)


@pytest.mark.parametrize(("with_gelu", "with_bias"), list(itertools.product([0, 1], [0, 1])))
def test_version_3_is_one_gemm_with_the_epilogue_that_is_asked_for(with_gelu: int, with_bias: int) -> None:
    (step,) = FAMILY.by_number[3].plan(problem(2, 3, 4, 5, with_gelu, "bf16", with_bias), 256, PROPS)
    assert isinstance(step, Gemm)
    bias = "bias" if with_bias else ""
    assert (step.bias, step.gelu, step.aux, step.beta) == (bias, bool(with_gelu), "", 0)
    assert (step.mnk, step.compute) == ((6, 5, 4), "bf16")


def test_version_5_keeps_what_gelu_is_applied_to() -> None:
    version = FAMILY.by_number[5]
    (step,) = version.plan(problem(2, 3, 4, 8, 1, "bf16"), 256, PROPS)
    assert isinstance(step, Gemm) and (step.bias, step.gelu, step.aux) == ("bias", True, "pre")
    assert version.saves == ("pre",)
    assert not FAMILY.refusal(version, problem(2, 3, 4, 8, 1, "tf32"), 256)
    assert "too coarse for fp32" in FAMILY.refusal(version, problem(2, 3, 4, 8, 1), 256)
    assert "nothing to keep" in FAMILY.refusal(version, problem(2, 3, 4, 8, 0), 256)
    assert "OC divisible by 8" in FAMILY.refusal(version, problem(2, 3, 4, 12, 1, "tf32"), 256)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_is_kept_is_held_to_the_bound_of_the_sum(dtype: str) -> None:
    """GELU of it, or the sum without the bias, is not taken for it."""
    case = make_case(FAMILY, problem(1, 40, 20, 16, 1, dtype), 1)
    pre, right = case.tensors["pre"], case.expected["pre"].value
    assert used_share(case, pre, store(pre, right)) <= 1.0
    assert used_share(case, pre, store(pre, case.expected["out"].value)) > 10.0
    assert used_share(case, pre, store(pre, right - case.inputs["bias"].astype(np.float64))) > 10.0


def test_without_bias_and_gelu_version_2_has_no_kernel_and_no_version_names_a_bias() -> None:
    of = problem(2, 3, 4, 8, 0, bias=0)
    assert [type(step) for step in FAMILY.by_number[2].plan(of, 256, PROPS)] == [Gemm]
    for version in FAMILY.versions:
        for gelu in (0, 1):
            assert "bias" not in tensors_of(version.plan(problem(2, 3, 4, 8, gelu, bias=0), version.blocks[-1], PROPS))


def test_rounding_of_tiny_sums_before_gelu_is_allowed_for() -> None:
    """Below the smallest normal number of fp16 it does not shrink with them."""
    of = problem(1, 64, 1, 8, 1, "fp16", bias=0)
    rng = np.random.default_rng(2)
    inputs = {"inp": rng.normal(size=(1, 64, 1)) * 2.0**-16, "weight": rng.normal(size=(8, 1))}
    expected = FAMILY.reference(of, inputs, ErrorModel("fp16"), np)["out"]
    sums = np.float16(inputs["inp"] * inputs["weight"][:, 0]).astype(np.float64)
    assert np.all(abs(0.5 * sums - expected.value) <= expected.bound + 1e-9)
    assert abs(0.5 * sums - expected.value).max() > 2.0**-11 * abs(expected.value).max() / 64


def test_tf32_is_only_for_versions_with_a_gemm() -> None:
    assert [version.number for version in FAMILY.versions if "tf32" in version.dtypes] == [2, 3, 5]


def test_gelu_by_the_error_function_is_not_taken_for_gelu_by_tanh() -> None:
    case = make_case(FAMILY, problem(1, 40, 200, 50, 1, "fp32"), 1)
    sums = np.float64(case.inputs["inp"]).reshape(40, 200) @ np.float64(case.inputs["weight"]).T + case.inputs["bias"]
    other = 0.5 * sums * (1.0 + np.vectorize(math.erf)(sums / math.sqrt(2.0)))
    assert used_share(case, case.tensors["out"], np.float32(other.reshape(case.tensors["out"].shape))) > 5.0
