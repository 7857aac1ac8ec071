"""The contract of attention_backward: its reference against independent formulas, its bound, its plans, its source."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.bound import final_bound
from kbench.check.case import Case, make_case
from kbench.check.probe import used_share
from kbench.device.dtypes import numpy_dtype
from kbench.device.gemm_operands import operands
from kbench.family import (
    Array,
    ErrorModel,
    Expected,
    Gemm,
    Heads,
    Launch,
    Matrix,
    Problem,
    Props,
    SdpaBackward,
    Version,
    kernels_of,
    tensors_of,
)
from kbench.source import load_source

FAMILY = load_catalog()["attention_backward"]
MODULE: ModuleType = sys.modules[FAMILY.tensors.__module__]
SOURCE = kernel_folder() / "attention_backward.cu"

Sizes = tuple[int, ...]  # B, T, C, NH

TINY: list[Sizes] = [(1, 1, 1, 1), (2, 1, 4, 2), (1, 2, 3, 1), (2, 5, 6, 3), (1, 9, 8, 2)]
# Sizes at which bounds are probed: head sizes 1 to 64, short and long rows.
PROBED: list[Sizes] = [
    (3, 1, 6, 2), (2, 2, 6, 2), (1, 7, 5, 1), (2, 33, 12, 4), (1, 129, 1, 1), (1, 96, 192, 3), (1, 300, 64, 1),
]  # fmt: skip


def problem(sizes: Sizes, dtype: str = "fp32") -> Problem:
    return Problem(dict(zip(("B", "T", "C", "NH"), sizes, strict=True)), dtype)


def draw(of: Problem, seed: int = 0) -> dict[str, Array]:
    """Inputs rounded to their type, as float64: what the reference gets."""
    rng = np.random.default_rng(seed)
    drawn: dict[str, Array] = {}
    for tensor in FAMILY.tensors(of):
        if tensor.role == "in":
            assert tensor.draw is not None
            values = np.asarray(tensor.draw(rng, tensor.shape, drawn))
            drawn[tensor.name] = values.astype(numpy_dtype(tensor.dtype)).astype(np.float64)
    return drawn


def reference(of: Problem, inputs: dict[str, Array], structured: bool = False) -> dict[str, Expected]:
    return FAMILY.reference(of, inputs, ErrorModel(of.dtype, structured), np)


def attention(q: Array, k: Array) -> Array:
    """The attention matrix of one head in float64, (T, T), row by row."""
    T, HS = q.shape
    att = np.zeros((T, T))
    for t in range(T):
        weights = np.exp(np.array([q[t] @ k[t2] for t2 in range(t + 1)]) / math.sqrt(HS))
        att[t, : t + 1] = weights / weights.sum()
    return att


# -------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("sizes", TINY)
def test_what_the_forward_pass_leaves_is_the_causal_softmax(sizes: Sizes) -> None:
    B, T, C, NH = sizes
    inputs = draw(problem(sizes))
    assert (inputs["att"][..., np.triu(np.ones((T, T), bool), 1)] == 0.0).all()
    for b in range(B):
        for h in range(NH):
            q, k, v = inputs["qkvr"][:, b, h]
            att = attention(q, k)
            np.testing.assert_allclose(inputs["att"][b, h], att, atol=1e-6)
            np.testing.assert_allclose(inputs["out"][b].reshape(T, NH, -1)[:, h], att @ v, atol=1e-6)
            # The first key's probability is the exponential of its score over the sum.
            scores = q @ k[0] / math.sqrt(C // NH)
            np.testing.assert_allclose(np.exp(scores - inputs["lse"][b, h]), att[:, 0], atol=1e-6)
    packed = inputs["inp"].reshape(B, T, 3, NH, C // NH)
    np.testing.assert_array_equal(inputs["qkvr"].transpose(1, 3, 0, 2, 4), packed)


@pytest.mark.parametrize("sizes", TINY)
def test_reference_agrees_with_the_sums_written_out(sizes: Sizes) -> None:
    B, T, C, NH = sizes
    HS = C // NH
    of = problem(sizes)
    inputs = draw(of)
    dinp = np.zeros((B, T, 3, NH, HS))
    dpreatt, datt = np.zeros((2, B, NH, T, T))
    for b in range(B):
        for h in range(NH):
            (q, k, v), att = inputs["qkvr"][:, b, h], inputs["att"][b, h]
            dout = inputs["dout"][b].reshape(T, NH, HS)[:, h]
            for t in range(T):
                for t2 in range(t + 1):
                    datt[b, h, t, t2] = sum(dout[t, d] * v[t2, d] for d in range(HS))
                for t3 in range(t + 1):
                    terms = [att[t, t2] * ((t2 == t3) - att[t, t3]) * datt[b, h, t, t2] for t2 in range(t + 1)]
                    dpreatt[b, h, t, t3] = sum(terms) / math.sqrt(HS)
                    dinp[b, t, 0, h] += dpreatt[b, h, t, t3] * k[t3]
                    dinp[b, t3, 1, h] += dpreatt[b, h, t, t3] * q[t]
                    dinp[b, t3, 2, h] += att[t, t3] * dout[t]
    got = reference(of, inputs)
    below = np.tri(T, dtype=bool)
    np.testing.assert_allclose(got["datt"].value[..., below], datt[..., below], atol=1e-12)
    np.testing.assert_allclose(got["dpreatt"].value, dpreatt, atol=1e-12)
    np.testing.assert_allclose(got["dinp"].value, dinp.reshape(B, T, 3 * C), atol=1e-12)
    np.testing.assert_allclose(got["dqkvr"].value.transpose(1, 3, 0, 2, 4), dinp, atol=1e-12)
    np.testing.assert_array_equal(got["dvaccum"].value.transpose(0, 2, 1, 3), inputs["dout"].reshape(B, T, NH, HS))


def test_reference_is_the_slope_of_the_forward_pass() -> None:
    sizes = (1, 6, 6, 2)
    B, T, C, NH = sizes
    inputs = draw(problem(sizes))
    # In float64: the rounding of att to fp32 would spoil the differences.
    inputs["att"] = np.stack([attention(*inputs["qkvr"][:2, 0, h]) for h in range(NH)])[None]
    dqkvr = reference(problem(sizes), inputs)["dqkvr"].value
    douts = inputs["dout"].reshape(T, NH, C // NH)
    step = 1e-5
    for index in np.ndindex(3, NH, T, C // NH):
        part, h, t, d = index
        losses = []
        for sign in (1.0, -1.0):
            qkv = inputs["qkvr"][:, 0, h].copy()
            qkv[part, t, d] += sign * step
            losses.append(float((attention(*qkv[:2]) @ qkv[2] * douts[:, h]).sum()))
        assert dqkvr[part, 0, h, t, d] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8), index


def test_slices_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem((2, 20, 12, 3), "tf32")
    inputs = draw(of)
    whole = reference(of, inputs)
    monkeypatch.setattr(MODULE, "SLICE", 900)  # two heads at a time
    for name, values in draw(of).items():
        np.testing.assert_array_equal(values, inputs[name])
    for name, expected in reference(of, inputs).items():
        np.testing.assert_allclose(expected.value, whole[name].value, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(expected.bound, whole[name].bound, rtol=1e-5)


def test_reference_takes_little_more_memory_than_its_answer() -> None:
    """4 GB are allowed at B=4 T=1024 C=768 NH=12, of which the answer takes 1.4 and the inputs 0.7."""
    of = problem((1, 1024, 256, 4), "tf32")
    inputs = draw(of)
    tracemalloc.start()
    answer = reference(of, inputs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = sum(np.asarray(part).nbytes for expected in answer.values() for part in (expected.value, expected.bound))
    assert peak < held + 80e6


# ------------------------------------------------------------------------------------------------ bound


def cut(values: Array) -> Array:
    """TF32 as a tensor core may take it: the last 13 bits of fp32 dropped."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def rounded(values: Array) -> Array:
    """TF32 rounded to the nearest."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return cut((bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))).view(np.float32))


OPERANDS: dict[str, list[Callable[[Array], Array]]] = {
    "fp32": [np.ascontiguousarray], "tf32": [cut, rounded], "bf16": [np.ascontiguousarray],
    "fp16": [np.ascontiguousarray],
}  # fmt: skip


def right_version(of: Problem, inputs: dict[str, Array], operand: Callable[[Array], Array]) -> dict[str, Array]:
    """All outputs as stored, term by term in fp32 as versions 1 to 6 do it, GEMM operands as `operand` makes them."""
    B, T, C, NH = (of[name] for name in ("B", "T", "C", "NH"))
    HS = C // NH
    q, k, v = inputs["qkvr"].astype(np.float32)
    att = np.float32(inputs["att"])
    dout = np.ascontiguousarray(np.float32(inputs["dout"]).reshape(B, T, NH, HS).transpose(0, 2, 1, 3))

    def gemm(a: Array, b: Array) -> Array:
        return np.matmul(operand(a), operand(b))

    def stored(a: Array) -> Array:
        return a.astype(numpy_dtype(of.storage)).astype(np.float32)

    def turned(a: Array) -> Array:
        return a.transpose(0, 1, 3, 2)

    datt = stored(gemm(dout, turned(v)))
    products = att * np.tril(datt)
    dpreatt = np.zeros_like(datt)
    for t2 in range(T):  # one running fp32 sum per element, in the order of t2
        indicator = np.float32(np.arange(T) == t2)
        dpreatt += products[..., t2, None] * (indicator - att)
    dpreatt = stored(np.tril(dpreatt) * np.float32(1.0 / math.sqrt(HS)))
    dqkvr = stored(np.stack([gemm(dpreatt, k), gemm(turned(dpreatt), q), gemm(turned(att), dout)]))
    dinp = dqkvr.transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * C)
    return {"dvaccum": dout, "datt": datt, "dpreatt": dpreatt, "dqkvr": dqkvr, "dinp": dinp}


def used(of: Problem, expected: dict[str, Expected], name: str, values: Array) -> float:
    """Largest error of an output over what is allowed, as the check counts it."""
    tensor = next(tensor for tensor in FAMILY.tensors(of) if tensor.name == name)
    value = np.ascontiguousarray(expected[name].value)
    allowed = final_bound(tensor, value, expected[name].bound, np, None)
    error = np.abs(values - value)
    if tensor.unspecified is not None:
        error[tensor.unspecified(np)] = 0.0
    with np.errstate(divide="ignore"):
        return float(np.divide(error, allowed, out=np.zeros_like(error), where=error > 0).max())


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", PROBED)
def test_right_results_use_at_most_60_percent(sizes: Sizes, dtype: str) -> None:
    of = problem(sizes, dtype)
    for seed in range(3):
        inputs = draw(of, seed)
        expected = reference(of, inputs)
        for operand in OPERANDS[dtype]:
            for name, values in right_version(of, inputs, operand).items():
                assert used(of, expected, name, values) <= 0.6, (name, operand.__name__, seed)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", PROBED)
def test_wrong_results_use_far_more_than_all(sizes: Sizes, dtype: str) -> None:
    of = problem(sizes, dtype)
    inputs = draw(of)
    expected = reference(of, inputs)
    right = right_version(of, inputs, OPERANDS[dtype][0])
    stale = right_version(of, draw(of, seed=1), OPERANDS[dtype][0])
    for name in right:
        if name == "dpreatt" and of["T"] == 1:
            continue  # the softmax of one number is constant: zero is the right gradient
        assert used(of, expected, name, np.zeros_like(right[name])) > 5.0, name
        assert used(of, expected, name, stale[name]) > 5.0, name
        assert used(of, expected, name, np.roll(right[name].reshape(-1), 1).reshape(right[name].shape)) > 5.0, name


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_structured_inputs_get_the_larger_bound(dtype: str) -> None:
    """A constant dout: roundings have one sign, so sums of magnitudes count, not roots of sums of squares."""
    of = problem((1, 129, 32, 2), dtype)
    inputs = draw(of)
    inputs["dout"][:] = np.float32(0.3)
    random, structured = reference(of, inputs), reference(of, inputs, structured=True)
    for operand in OPERANDS[dtype]:
        for name, values in right_version(of, inputs, operand).items():
            assert used(of, structured, name, values) <= 0.6, name
    # What is stored in 16 bits may, in a sum of one term, be allowed more where signs are random: four times u, not u.
    larger = np.asarray(structured["dinp"].bound) >= np.asarray(random["dinp"].bound)
    assert larger.all() if of.storage == "fp32" else larger.mean() > 0.9


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_zeros_above_the_diagonal_of_dpreatt_must_be_exact(dtype: str) -> None:
    of = problem((2, 37, 12, 4), dtype)
    expected = reference(of, draw(of))["dpreatt"]
    above = np.triu(np.ones((37, 37), bool), 1)
    assert (expected.value[..., above] == 0.0).all()
    assert (np.asarray(expected.bound)[..., above] == 0.0).all()
    assert (np.asarray(expected.bound)[..., ~above] > 0.0).all()


@pytest.mark.parametrize("dtype", ["tf32", "bf16", "fp16"])
def test_fewer_bits_allow_more(dtype: str) -> None:
    inputs = draw(problem((1, 40, 16, 2)))
    fp32, fewer = (reference(problem((1, 40, 16, 2), name), inputs)["dinp"].bound for name in ("fp32", dtype))
    ratio = np.asarray(fewer) / np.asarray(fp32)
    assert ratio.min() > 1 and np.median(ratio) > 10


def fused(case: Case) -> Array:
    """dinp as a library's fused backward pass computes it: att again from the log-sum-exp, and rounded for dv alone;
    sum(dout out) in place of sum(att datt); dpreatt rounded for its two GEMMs, datt not at all."""
    of = case.problem
    B, T, C, NH = (of[name] for name in ("B", "T", "C", "NH"))
    dtype, scale = numpy_dtype(of.storage), np.float32(1.0 / math.sqrt(C // NH))

    def heads(name: str, parts: int) -> Array:
        by_token = np.float32(case.inputs[name]).reshape(B, T, parts, NH, C // NH)
        return np.ascontiguousarray(by_token.transpose(2, 0, 3, 1, 4))

    (q, k, v), (out,), (dout,) = heads("inp", 3), heads("out", 1), heads("dout", 1)
    att = np.exp(scale * (q @ k.swapaxes(2, 3)) - case.inputs["lse"][..., None])
    att[..., ~np.tri(T, dtype=bool)] = 0.0
    sums = (dout * out).sum(axis=3, keepdims=True)
    dpreatt = np.float32((scale * att * (dout @ v.swapaxes(2, 3) - sums)).astype(dtype))
    rounded_att = np.float32(att.astype(dtype))
    dqkv = np.stack([dpreatt @ k, dpreatt.swapaxes(2, 3) @ q, rounded_att.swapaxes(2, 3) @ dout])
    return dqkv.transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * C).astype(dtype)


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sizes", PROBED)
def test_attention_computed_again_uses_at_most_60_percent(sizes: Sizes, dtype: str, structured: bool) -> None:
    for seed in range(3):
        case = make_case(FAMILY, problem(sizes, dtype), seed, structured)
        assert used_share(case, case.tensors["dinp"], fused(case)) <= 0.6, seed


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_attention_computed_again_from_wrong_statistics_uses_far_more_than_all(dtype: str) -> None:
    case = make_case(FAMILY, problem((2, 33, 12, 4), dtype), 0)
    for name, wrong in (
        ("lse", case.inputs["lse"] / math.log(2.0)),  # to base 2
        ("lse", np.roll(case.inputs["lse"], 1)),
        ("out", np.roll(case.inputs["out"], 1)),
        ("out", np.zeros_like(case.inputs["out"])),
    ):
        broken = replace(case, inputs={**case.inputs, name: wrong})
        assert used_share(case, case.tensors["dinp"], fused(broken)) > 3.0, name


# ------------------------------------------------------------------------------------------------ plans

PROPS = (
    Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30),
    Props("b", "emulator", 3, 1536, 1024, 49152, 65536, 65536, 65536, 1 << 20, 1 << 30),
)
# The last has more heads than a grid's second dimension could hold.
PLANNED: list[Sizes] = [*(tuple(s.sizes.values()) for s in FAMILY.check_shapes), (4, 1024, 768, 12), (70000, 1, 4, 1)]


# By version: memory exists only for these.
WITH_LAYOUTS = {"dout", "qkvr", "att", "dvaccum", "datt", "dpreatt", "dqkvr", "dinp"}
TOUCHED = {
    **dict.fromkeys(range(1, 9), WITH_LAYOUTS),
    9: {"dout", "inp", "att", "dpreatt", "dinp"},
    10: {"dout", "inp", "out", "lse", "dinp"},
}
SAVED = {"qkvr", "att", "lse"}  # what some forward versions leave, and others do not


@pytest.mark.parametrize("version", FAMILY.versions, ids=lambda version: f"v{version.number}")
def test_what_a_version_needs_of_the_forward_pass_is_what_it_reads(version: Version) -> None:
    assert set(version.needs) == SAVED & TOUCHED[version.number]
    forward = load_catalog()["attention_forward"].versions
    assert any(set(version.needs) <= set(other.saves) for other in forward)


def places(part: Matrix | Heads, member: int, T: int, HS: int) -> Array:
    """The elements of a tensor that a GEMM's matrix takes for one member of its batch, or attention for one head."""
    if isinstance(part, Matrix):
        rows, cols = np.arange(part.rows), np.arange(part.cols)
        return part.offset + member * part.stride + rows[:, None] * part.leading + cols
    b, h = divmod(member, 1000)
    rows, cols = np.arange(T), np.arange(HS)
    return part.offset + b * part.batch_stride + h * part.head_stride + rows[:, None] * part.row_stride + cols


@pytest.mark.parametrize("sizes", [(2, 5, 12, 3), (5, 4, 8, 2), (1, 3, 4, 1), (3, 2, 3, 1)])
def test_version_9_takes_every_head_where_it_lies(sizes: Sizes) -> None:
    B, T, C, NH = sizes
    HS = C // NH
    of = problem(sizes, "bf16")
    packed = np.arange(B * T * 3 * C).reshape(B, T, 3, NH, HS)
    plain = np.arange(B * T * C).reshape(B, T, NH, HS)
    square = np.arange(B * NH * T * T).reshape(B, NH, T, T)
    plan = FAMILY.by_number[9].plan(of, 128, PROPS[0])
    gemms, count = [step for step in plan if isinstance(step, Gemm)], min(B, NH)
    assert len(gemms) == 4 * count
    assert isinstance(plan[2 * count], Launch)  # after all of datt, before dq and dk
    dv, datt, dq, dk = (gemms[i * count : (i + 1) * count] for i in range(4))
    names = [[matrix.tensor for matrix in (kind[0].a, kind[0].b, kind[0].out)] for kind in (dv, datt, dq, dk)]
    assert names == [
        ["att", "dout", "dinp"], ["dout", "inp", "dpreatt"], ["dpreatt", "inp", "dinp"], ["dpreatt", "inp", "dinp"],
    ]  # fmt: skip
    turned = [(gemm.a.transpose, gemm.b.transpose) for gemm in (dv[0], datt[0], dq[0], dk[0])]
    assert turned == [(True, False), (False, True), (False, False), (True, False)]
    for b, h in np.ndindex(B, NH):
        i, member = (b, h) if NH >= B else (h, b)
        q, k, v = packed[b, :, :, h].transpose(1, 0, 2)
        one, matrix = plain[b, :, h], square[b, h]
        wanted = [(matrix, one, v), (one, v, matrix), (matrix, k, q), (matrix, q, k)]
        for kind, expected in zip((dv, datt, dq, dk), wanted, strict=True):
            for part, elements in zip((kind[i].a, kind[i].b, kind[i].out), expected, strict=True):
                np.testing.assert_array_equal(places(part, member, T, HS), elements)
    for gemm in gemms:
        operands(gemm, FAMILY.tensors(of))  # cuBLASLt takes heads that lie side by side, as inputs and as outputs


def test_version_9_launches_few_gemms_for_many_sequences() -> None:
    for B in (4, 64):
        plan = FAMILY.by_number[9].plan(problem((B, 1024, 768, 12), "bf16"), 256, PROPS[0])
        assert len(plan) == 4 * min(B, 12) + 1


@pytest.mark.parametrize("sizes", [(2, 5, 48, 3), (1, 3, 8, 1), (4, 2, 32, 2)])
def test_version_10_takes_every_head_where_it_lies(sizes: Sizes) -> None:
    B, T, C, NH = sizes
    HS = C // NH
    (step,) = FAMILY.by_number[10].plan(problem(sizes, "bf16"), 128, PROPS[0])
    assert isinstance(step, SdpaBackward)
    assert step.shape == (B, NH, T, HS) and step.scale == pytest.approx(1.0 / math.sqrt(HS)) and step.stats == "lse"
    packed = np.arange(B * T * 3 * C).reshape(B, T, 3, NH, HS)
    plain = np.arange(B * T * C).reshape(B, T, NH, HS)
    parts = [step.q, step.k, step.v, step.out, step.dout, step.dq, step.dk, step.dv]
    assert [part.tensor for part in parts] == ["inp", "inp", "inp", "out", "dout", "dinp", "dinp", "dinp"]
    for b, h in np.ndindex(B, NH):
        one = plain[b, :, h]
        qkv = list(packed[b, :, :, h].transpose(1, 0, 2))
        for part, elements in zip(parts, [*qkv, one, one, *qkv], strict=True):
            np.testing.assert_array_equal(places(part, 1000 * b + h, T, HS), elements)


def test_version_10_refuses_what_cudnn_does_not_take() -> None:
    version = FAMILY.by_number[10]
    assert not FAMILY.refusal(version, problem((1, 4, 128, 1), "fp16"), 128)
    assert "T of at least 2" in FAMILY.refusal(version, problem((1, 1, 128, 1), "fp16"), 128)
    assert "head size divisible by 8" in FAMILY.refusal(version, problem((1, 4, 12, 1), "fp16"), 128)
    assert "head size of at most 128" in FAMILY.refusal(version, problem((1, 4, 136, 1), "fp16"), 128)
    assert "dtype fp32 is not supported" in FAMILY.refusal(version, problem((1, 4, 8, 1)), 128)


def test_what_any_version_moves_leaves_out_what_can_be_computed_again() -> None:
    of = problem((4, 1024, 768, 12), "bf16")
    assert FAMILY.least_traffic(of) == 2 * 4 * 1024 * 768 * (3 + 1 + 3)


@pytest.mark.parametrize("version", FAMILY.versions, ids=lambda version: f"v{version.number}")
def test_plans_are_pure_data(version: Version) -> None:
    kernels = load_source(SOURCE).kernels
    for sizes in PLANNED:
        for dtype in version.dtypes:
            of = problem(sizes, dtype)
            for block in version.blocks:
                plan = version.plan(of, block, PROPS[0])
                assert plan == version.plan(of, block, PROPS[1]), "nothing here depends on the device"
                json.dumps([asdict(step) for step in plan])
                assert set(tensors_of(plan)) == TOUCHED[version.number]
                assert {kernel.split("<")[0] for kernel in kernels_of(plan)} <= set(kernels)
                assert all(step.compute == dtype for step in plan if isinstance(step, Gemm))


def softmax_of(version: Version, of: Problem, block: int) -> Launch:
    """The launch of a version's own kernel."""
    plan = version.plan(of, block, PROPS[0])
    (softmax,) = [step for step in plan if isinstance(step, Launch) and "softmax" in step.kernel]
    return softmax


def test_the_block_size_is_that_of_the_softmax_kernel() -> None:
    of = problem((1, 97, 8, 2))
    for version in FAMILY.versions[:9]:  # the tenth is a library's
        for block in version.blocks:
            assert softmax_of(version, of, block).block == (block,)


# Version to the columns or rows of one head that a block of this many threads takes.
PER_BLOCK: dict[int, Callable[[int], int]] = {
    2: lambda block: block, 3: lambda block: block // 32, 4: lambda block: block // 4, 5: lambda block: block // 4,
    6: lambda block: 1, 7: lambda block: 1, 8: lambda block: 4, 9: lambda block: 4,
}  # fmt: skip


@pytest.mark.parametrize("sizes", PLANNED)
def test_grids_cover_all_columns_or_rows(sizes: Sizes) -> None:
    """Threads, warps or blocks per head times what each has must reach T, and not by more than one block."""
    of = problem(sizes)
    heads = of["B"] * of["NH"]
    for number, per_block in PER_BLOCK.items():
        for block in FAMILY.by_number[number].blocks:
            (blocks,) = softmax_of(FAMILY.by_number[number], of, block).grid
            assert blocks % heads == 0
            assert of["T"] <= blocks // heads * per_block(block) < of["T"] + per_block(block)


def test_datt_is_unspecified_above_the_diagonal_and_nothing_else_is() -> None:
    of = problem((2, 5, 6, 3))
    masks = {tensor.name: tensor.unspecified for tensor in FAMILY.tensors(of) if tensor.unspecified is not None}
    assert list(masks) == ["datt"]
    mask = masks["datt"](np)
    assert mask.shape == (2, 3, 5, 5)
    np.testing.assert_array_equal(mask, np.broadcast_to(np.triu(np.ones((5, 5), bool), 1), mask.shape))


def test_check_shapes_are_small_and_explained() -> None:
    for shape in FAMILY.check_shapes:
        work = shape.sizes["B"] * shape.sizes["NH"] * shape.sizes["T"] ** 2
        assert shape.why
        # The long rows are for some versions and one block size.
        assert work <= 32768 or (shape.versions and shape.block_sizes and len(shape.block_sizes) == 1)
    lengths = {shape.sizes["T"] for shape in FAMILY.check_shapes}
    assert {1, 2, 257, 1024} <= lengths and any(length % 4 == 0 for length in lengths)


def test_head_count_must_divide_the_channels() -> None:
    refused = Problem({"B": 1, "T": 8, "C": 10, "NH": 4}, "fp32")
    assert "C divisible by NH" in FAMILY.refusal(FAMILY.by_number[5], refused, 256)
    assert not FAMILY.refusal(FAMILY.by_number[5], problem((1, 8, 12, 4)), 256)


# ----------------------------------------------------------------------------------------------- source

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")


def compile_with_nvcc(path: Path, folder: Path, *options: str) -> str:
    """What nvcc has to say about a source that must compile."""
    command = ["nvcc", "-std=c++17", "-arch=sm_90", *options, "-c", str(path), "-o", str(folder / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@needs_nvcc
def test_no_registers_are_spilled_and_all_block_sizes_fit(tmp_path: Path) -> None:
    """Every instantiation of the default problem and of an odd one, as compiled for the H200."""
    names = dict.fromkeys(
        (kernel, block)
        for sizes in ((4, 1024, 768, 12), (1, 97, 2, 1))
        for dtype in ("fp32", "bf16")
        for version in FAMILY.versions
        if dtype in version.dtypes
        for block in version.blocks
        for kernel in kernels_of(version.plan(problem(sizes, dtype), block, PROPS[0]))
    )
    used = "\n".join(f"pointers[{i}] = (const void*)&{name};" for i, (name, _) in enumerate(names))
    text = f'#include "{SOURCE}"\nvoid use(const void** pointers) {{\n{used}\n}}\n'
    (tmp_path / "all.cu").write_text(text)
    report = compile_with_nvcc(tmp_path / "all.cu", tmp_path, "-Xptxas", "-v")
    entries = re.split(r"Compiling entry function '", report)[1:]
    assert len(entries) == len({name for name, _ in names})
    for entry in entries:
        name = entry.split("'")[0]
        spilled = re.search(r"(\d+) bytes spill stores", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        assert spilled is not None and int(spilled[1]) == 0, name
        template = re.search(r"Li(\d+)E", name)
        largest = int(template[1]) if template and "softmax" in name else 1024 if "softmax" in name else 256
        assert registers is not None and int(registers[1]) * largest <= 65536, name
