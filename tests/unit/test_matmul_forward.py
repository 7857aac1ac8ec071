"""The contract of matmul_forward: its reference against sums written out, its bound, its plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.family import Array, ErrorModel, Gemm, Launch, Problem, Props, Version

FAMILY = load_catalog()["matmul_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


def problem(B: int, T: int, C: int, OC: int, gelu: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "C": C, "OC": OC, "gelu": gelu}, dtype)


def gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("with_gelu", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 4)])
def test_reference_agrees_with_the_sums_written_out(sizes: tuple[int, ...], with_gelu: int) -> None:
    B, T, C, OC = sizes
    rng = np.random.default_rng(1)
    inp, weight, bias = rng.normal(size=(B, T, C)), rng.normal(size=(OC, C)), rng.normal(size=OC)
    inputs = {"inp": inp, "weight": weight, "bias": bias}
    got = FAMILY.reference(problem(*sizes, with_gelu), inputs, ErrorModel("fp32"), np)["out"].value
    for b, t, o in np.ndindex(B, T, OC):
        expected = sum(inp[b, t, c] * weight[o, c] for c in range(C)) + bias[o]
        assert got[b, t, o] == pytest.approx(gelu(expected) if with_gelu else expected, abs=1e-13)


def test_slices_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(2, 9, 6, 5, 1, "tf32")
    case = make_case(FAMILY, of, 1)
    whole = case.expected["out"]
    monkeypatch.setitem(FAMILY.reference.__globals__, "SLICE", 20)  # four rows at a time
    parts = make_case(FAMILY, of, 1).expected["out"]
    np.testing.assert_allclose(parts.value, whole.value, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(parts.bound, whole.bound, rtol=1e-5)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(2, 5, 3, 7, 0), (1, 33, 13, 35, 1)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, ...], dtype: str) -> None:
    for name, shares in probe(FAMILY, problem(*sizes, dtype), seed=3).items():
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
    for sizes in (*(tuple(s.sizes.values()) for s in FAMILY.check_shapes), (32, 1024, 768, 3072, 0)):
        of = problem(*sizes)
        for block in version.blocks:
            for launch in version.plan(of, block, PROPS):
                if isinstance(launch, Launch):
                    assert math.prod(launch.block) == block and len(launch.grid) == 1
                    outputs = of["B"] * of["T"] * of["OC"]
                    assert outputs <= launch.grid[0] * per_block[version.number](block)


def test_version_3_is_one_gemm_with_the_epilogue_that_is_asked_for() -> None:
    for with_gelu in (0, 1):
        (step,) = FAMILY.by_number[3].plan(problem(2, 3, 4, 5, with_gelu, "bf16"), 256, PROPS)
        assert isinstance(step, Gemm)
        assert (step.bias, step.gelu, step.beta, step.mnk, step.compute) == (
            "bias",
            bool(with_gelu),
            0,
            (6, 5, 4),
            "bf16",
        )


def test_tf32_is_only_for_versions_with_a_gemm() -> None:
    assert [version.number for version in FAMILY.versions if "tf32" in version.dtypes] == [2, 3]


def test_gelu_by_the_error_function_is_not_taken_for_gelu_by_tanh() -> None:
    case = make_case(FAMILY, problem(1, 40, 200, 50, 1, "fp32"), 1)
    sums = np.float64(case.inputs["inp"]).reshape(40, 200) @ np.float64(case.inputs["weight"]).T + case.inputs["bias"]
    other = 0.5 * sums * (1.0 + np.vectorize(math.erf)(sums / math.sqrt(2.0)))
    assert used_share(case, case.tensors["out"], np.float32(other.reshape(case.tensors["out"].shape))) > 5.0
