"""The contract of trimat_forward: its reference against sums written out, its bound, its plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.family import ErrorModel, Gemm, Launch, Problem, Props

FAMILY = load_catalog()["trimat_forward"]
PROPS = (
    Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30),
    Props("b", "emulator", 3, 1536, 1024, 49152, 65536, 65536, 65536, 1 << 20, 1 << 30),
)


def problem(B: int, T: int, C: int, NH: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "C": C, "NH": NH}, dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 5, 6, 3), (3, 2, 4, 1)])
def test_reference_agrees_with_the_sums_written_out(sizes: tuple[int, ...]) -> None:
    B, T, C, NH = sizes
    HS, of = C // NH, problem(*sizes)
    inp = np.random.default_rng(1).normal(size=(B, T, 3, NH, HS))
    got = FAMILY.reference(of, {"inp": inp}, ErrorModel("fp32"), np)["out"].value
    for b, h, t, t2 in np.ndindex(B, NH, T, T):
        expected = sum(inp[b, t, 0, h, d] * inp[b, t2, 1, h, d] for d in range(HS)) / math.sqrt(HS)
        assert got[b, h, t, t2] == pytest.approx(expected, abs=1e-13)


def test_slices_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(2, 20, 12, 3, "tf32")
    inputs = {"inp": np.random.default_rng(2).normal(size=(2, 20, 3, 3, 4))}
    whole = FAMILY.reference(of, inputs, ErrorModel("tf32"), np)["out"]
    monkeypatch.setitem(FAMILY.reference.__globals__, "SLICE", 900)  # two heads at a time
    parts = FAMILY.reference(of, inputs, ErrorModel("tf32"), np)["out"]
    np.testing.assert_allclose(parts.value, whole.value, rtol=1e-13)
    np.testing.assert_allclose(parts.bound, whole.bound, rtol=1e-5)


def test_only_what_is_above_the_diagonal_is_unspecified() -> None:
    out = FAMILY.tensors(problem(2, 3, 4, 2))[1]
    assert out.unspecified is not None
    mask = out.unspecified(np)
    assert mask.shape == (2, 2, 3, 3)
    np.testing.assert_array_equal(mask[1, 0], [[0, 1, 1], [0, 0, 1], [0, 0, 0]])


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 33, 24, 2), (1, 129, 5, 1)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, ...], dtype: str) -> None:
    for name, shares in probe(FAMILY, problem(*sizes, dtype), seed=3).items():
        assert shares.rounded <= 1.0 and shares.weakest > 3.0, (name, shares)


@pytest.mark.parametrize("structured", [False, True])
def test_operands_cut_to_tf32_use_at_most_60_percent(structured: bool) -> None:
    """A tensor core may drop the last 13 bits instead of rounding."""
    of = problem(1, 60, 128, 2, "tf32")
    for seed in range(3):
        case = make_case(FAMILY, of, seed, structured)
        inp = np.ascontiguousarray(case.inputs["inp"], np.float32)
        cut = (inp.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        q, k = (cut[:, :, part].transpose(0, 2, 1, 3) for part in (0, 1))
        got = np.ascontiguousarray(q @ k.transpose(0, 1, 3, 2) * np.float32(1 / 8))
        assert used_share(case, case.tensors["out"], got) <= 0.6


@pytest.mark.parametrize("sizes", [*(tuple(s.sizes.values()) for s in FAMILY.check_shapes), (8, 1024, 768, 12)])
def test_a_block_for_every_tile_of_the_triangle(sizes: tuple[int, ...]) -> None:
    B, T, _, NH = sizes
    of = problem(*sizes)
    tiles = math.ceil(T / 128)
    for version in FAMILY.versions[1:]:
        (launch,) = version.plan(of, 256, PROPS[0])
        assert isinstance(launch, Launch)
        assert version.plan(of, 256, PROPS[1]) == (launch,), "nothing here depends on the device"
        assert launch.grid == (B * NH * sum(range(1, tiles + 1)),)
        assert math.prod(launch.block) == 256


def test_the_aligned_kernel_is_for_aligned_rows_of_both_tensors() -> None:
    for T, C, aligned in ((8, 8, "true"), (9, 8, "false"), (8, 10, "false")):
        (launch,) = FAMILY.by_number[4].plan(problem(1, T, C, 2 if C == 8 else 1), 256, PROPS[0])
        assert launch.kernel == f"trimat_forward4<float, {aligned}>"


def test_version_0_multiplies_whole_heads() -> None:
    of = problem(2, 10, 12, 3, "bf16")
    split, gemm = FAMILY.by_number[0].plan(of, 256, PROPS[0])
    assert isinstance(split, Launch) and split.kernel == "trimat_split_heads<__nv_bfloat16, 4>"
    assert isinstance(gemm, Gemm) and gemm.batch == 6 and gemm.mnk == (10, 10, 4) and gemm.alpha == 0.5
    (heads,) = FAMILY.by_number[0].scratch(of, 256, PROPS[0])
    assert heads.count == 2 * gemm.b.offset == 2 * 2 * 10 * 12


def test_least_traffic_counts_no_values_and_one_triangle() -> None:
    assert FAMILY.least_traffic(problem(2, 3, 8, 2)) == 4 * (2 * 2 * 3 * 8 + 2 * 2 * 6)
    assert FAMILY.least_traffic(problem(2, 3, 8, 2, "fp16")) == 2 * (2 * 2 * 3 * 8 + 2 * 2 * 6)
