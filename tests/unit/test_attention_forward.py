"""The contract of attention_forward: its reference against independent formulas, its bound, its plans."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import Case, make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import numpy_dtype
from kbench.device.gemm_operands import operands
from kbench.family import Array, ErrorModel, Expected, Gemm, Launch, Matrix, Problem, Props, Sdpa, tensors_of

FAMILY = load_catalog()["attention_forward"]
MODULE = sys.modules[FAMILY.tensors.__module__]
PROPS = Props("any", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)

Sizes = tuple[int, ...]  # B, T, C, NH
TINY: list[Sizes] = [(1, 1, 1, 1), (2, 1, 4, 2), (2, 5, 6, 3), (1, 9, 8, 2)]
PROBED: list[Sizes] = [(2, 33, 12, 4), (1, 130, 192, 3), (1, 300, 64, 1)]


def problem(sizes: Sizes, dtype: str = "fp32") -> Problem:
    return Problem(dict(zip(("B", "T", "C", "NH"), sizes, strict=True)), dtype)


def reference(of: Problem, inp: Array, structured: bool = False) -> dict[str, Expected]:
    return FAMILY.reference(of, {"inp": inp}, ErrorModel(of.dtype, structured), np)


@pytest.mark.parametrize("sizes", TINY)
def test_reference_agrees_with_the_sums_written_out(sizes: Sizes) -> None:
    B, T, C, NH = sizes
    HS = C // NH
    inp = np.random.default_rng(0).normal(0.1, 1.1, (B, T, 3 * C))
    got = {name: expected.value for name, expected in reference(problem(sizes), inp).items()}
    packed = inp.reshape(B, T, 3, NH, HS)
    for b, h, t in np.ndindex(B, NH, T):
        scores = [float(packed[b, t, 0, h] @ packed[b, t2, 1, h]) for t2 in range(t + 1)]
        weights = [math.exp(score / math.sqrt(HS)) for score in scores]
        out = sum(weights[t2] * packed[b, t2, 2, h] for t2 in range(t + 1)) / sum(weights)
        np.testing.assert_allclose(got["preatt"][b, h, t, : t + 1], scores, atol=1e-12)
        np.testing.assert_allclose(got["att"][b, h, t, : t + 1], np.divide(weights, sum(weights)), atol=1e-12)
        assert (got["att"][b, h, t, t + 1 :] == 0.0).all()
        np.testing.assert_allclose(got["out"][b, t, h * HS : (h + 1) * HS], out, atol=1e-12)
        np.testing.assert_allclose(got["vaccum"][b, h, t], out, atol=1e-12)
        assert got["lse"][b, h, t] == pytest.approx(math.log(sum(weights)), abs=1e-12)
        np.testing.assert_array_equal(got["qkvr"][:, b, h, t], packed[b, t, :, h])


def test_slices_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem((2, 20, 12, 3), "bf16")
    inp = np.random.default_rng(0).normal(0.1, 1.1, (2, 20, 36))
    whole = reference(of, inp)
    monkeypatch.setattr(MODULE, "SLICE", 900)  # two heads at a time
    for name, expected in reference(of, inp).items():
        np.testing.assert_allclose(expected.value, whole[name].value, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(expected.bound, whole[name].bound, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ bound


def cut(values: Array) -> Array:
    """TF32 as a tensor core may take it: the last 13 bits of fp32 dropped."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def parts(case: Case) -> tuple[Array, Array, float]:
    """q, k, v in fp32, (3, B, NH, T, HS); what lies above the diagonal; the scale."""
    B, T, C, NH = (case.problem[name] for name in ("B", "T", "C", "NH"))
    qkv = np.float32(case.inputs["inp"]).reshape(B, T, 3, NH, C // NH).transpose(2, 0, 3, 1, 4)
    return np.ascontiguousarray(qkv), ~np.tri(T, dtype=bool), 1.0 / math.sqrt(C // NH)


def step_by_step(case: Case) -> dict[str, Array]:
    """As version 3 does it: everything is stored, scores twice."""
    dtype = numpy_dtype(case.problem.storage)
    (q, k, v), above, scale = parts(case)
    operand: Callable[[Array], Array] = cut if case.problem.dtype == "tf32" else np.asarray
    preatt = (operand(q) @ operand(k).swapaxes(2, 3)).astype(dtype)
    scaled = (np.float32(preatt) * np.float32(scale)).astype(dtype).astype(np.float32)
    scaled[..., above] = -np.inf
    weights = np.exp(scaled - scaled.max(axis=3, keepdims=True))
    att = (weights / weights.sum(axis=3, keepdims=True)).astype(dtype)
    vaccum = (operand(np.float32(att)) @ operand(v)).astype(dtype)
    return {"preatt": preatt, "att": att, "vaccum": vaccum}


def fused(case: Case) -> dict[str, Array]:
    """As a library's fused attention does it: scores stay in fp32, exponentials are rounded to 16 bits."""
    dtype = numpy_dtype(case.problem.storage)
    (q, k, v), above, scale = parts(case)
    scores = np.float32(scale) * (q @ k.swapaxes(2, 3))
    scores[..., above] = -np.inf
    largest = scores.max(axis=3, keepdims=True)
    weights = np.exp(scores - largest)
    sums = np.float32(weights.astype(dtype)).sum(axis=3, keepdims=True)
    vaccum = (np.float32(weights.astype(dtype)) @ v / weights.sum(axis=3, keepdims=True)).astype(dtype)
    return {"vaccum": vaccum, "lse": (largest + np.log(sums))[..., 0]}


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", PROBED)
def test_right_results_use_at_most_60_percent(sizes: Sizes, dtype: str, structured: bool) -> None:
    for seed in range(3):
        case = make_case(FAMILY, problem(sizes, dtype), seed, structured)
        results = [step_by_step(case), *([] if dtype == "tf32" else [fused(case)])]
        for name, got in ((name, got) for result in results for name, got in result.items()):
            assert used_share(case, case.tensors[name], got) <= 0.6, (name, seed)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(2, 33, 12, 4), (1, 7, 5, 1)])
def test_wrong_results_use_far_more_than_all(sizes: Sizes, dtype: str) -> None:
    for name, probed in probe(FAMILY, problem(sizes, dtype), 3).items():
        assert probed.weakest > 5.0, (name, probed)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_zeros_above_the_diagonal_of_att_must_be_exact(dtype: str) -> None:
    att = make_case(FAMILY, problem((2, 37, 12, 4), dtype), 0).expected["att"]
    above = np.triu(np.ones((37, 37), bool), 1)
    assert (att.value[..., above] == 0.0).all() and (np.asarray(att.bound)[..., above] == 0.0).all()
    likely = att.value > 1e-30  # what is less may have a bound below all numbers of float32
    assert likely[..., ~above].mean() > 0.5 and (np.asarray(att.bound)[likely] > 0.0).all()


# ------------------------------------------------------------------------------------------------ plans


def places(matrix: Matrix, member: int) -> Array:
    rows, cols = np.arange(matrix.rows), np.arange(matrix.cols)
    return matrix.offset + member * matrix.stride + rows[:, None] * matrix.leading + cols


@pytest.mark.parametrize("sizes", [(2, 5, 12, 3), (5, 4, 8, 2), (1, 3, 4, 1), (3, 2, 3, 1)])
def test_version_6_takes_every_head_where_it_lies(sizes: Sizes) -> None:
    B, T, C, NH = sizes
    of = problem(sizes, "bf16")
    inp = np.arange(B * T * 3 * C).reshape(B, T, 3, NH, C // NH)
    square = np.arange(B * NH * T * T).reshape(B, NH, T, T)
    out = np.arange(B * T * C).reshape(B, T, NH, C // NH)
    gemms = [step for step in FAMILY.by_number[6].plan(of, 128, PROPS) if isinstance(step, Gemm)]
    assert len(gemms) == 2 * min(B, NH)
    scores, outputs = gemms[: len(gemms) // 2], gemms[len(gemms) // 2 :]
    for b, h in np.ndindex(B, NH):
        i, member = (b, h) if NH >= B else (h, b)
        found = [scores[i].a, scores[i].b, scores[i].out, outputs[i].a, outputs[i].b, outputs[i].out]
        wanted = [inp[b, :, 0, h], inp[b, :, 1, h], square[b, h], square[b, h], inp[b, :, 2, h], out[b, :, h]]
        for matrix, expected in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(places(matrix, member), expected)
    for gemm in gemms:
        operands(gemm, FAMILY.tensors(of))  # cuBLASLt takes heads that lie side by side, as inputs and as an output


def test_what_a_version_saves_for_the_backward_pass_is_what_it_writes() -> None:
    for version in FAMILY.versions:
        written = tensors_of(version.plan(problem((2, 16, 48, 3), version.dtypes[-1]), version.blocks[0], PROPS))
        assert set(version.saves) == {"qkvr", "att", "lse"} & set(written), version.number


@pytest.mark.parametrize("C", [1, 64, 100, 256])
@pytest.mark.parametrize("block", FAMILY.by_number[2].blocks)
def test_version_2_always_has_a_key_in_the_shared_memory_of_a_block(C: int, block: int) -> None:
    (launch,) = FAMILY.by_number[2].plan(problem((1, 9, C, 1)), block, PROPS)
    assert isinstance(launch, Launch)
    keys = launch.args[-2]
    assert isinstance(keys, int) and 1 <= keys <= 32 and launch.shared <= PROPS.shared_per_block


def test_version_10_is_one_step_for_head_sizes_that_cudnn_takes() -> None:
    version, of = FAMILY.by_number[10], problem((2, 16, 48, 3), "fp16")
    (step,) = version.plan(of, 128, PROPS)
    assert isinstance(step, Sdpa) and step.shape == (2, 3, 16, 16) and step.scale == 0.25
    assert tensors_of((step,)) == ("inp", "out", "lse")
    assert "head size divisible by 8" in FAMILY.refusal(version, problem((1, 4, 12, 1), "fp16"), 128)
    assert "head size of at most 256" in FAMILY.refusal(version, problem((1, 4, 264, 1), "fp16"), 128)
    assert "dtype fp32 is not supported" in FAMILY.refusal(version, problem((1, 4, 8, 1)), 128)
