"""The contract of matmul_backward_bias: its reference against plain loops, its bound, its plans."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Array, ErrorModel, Launch, Problem, Props, Tensor, Version, tensors_of

FAMILY = load_catalog()["matmul_backward_bias"]
MODULE = sys.modules[FAMILY.tensors.__module__]

H200 = Props("H200", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 140 << 30)
SMALL = Props("small", "sm_89", 3, 1536, 1024, 48 << 10, 99 << 10, 100 << 10, 65536, 1 << 20, 1 << 30)
DEFAULT = FAMILY.presets["default"]


def problem(B: int, T: int, OC: int, accumulate: int = 1, dtype: str = "bf16") -> Problem:
    return Problem({"B": B, "T": T, "OC": OC, "accumulate": accumulate}, dtype)


def draw(of: Problem) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {t.name: t.draw(rng, t.shape, {}) for t in FAMILY.tensors(of) if t.draw is not None}


@pytest.mark.parametrize("accumulate", (0, 1))
@pytest.mark.parametrize("sizes", ((1, 1, 1), (2, 3, 5), (3, 7, 4)))
def test_reference_is_the_sum_over_all_rows(
    sizes: tuple[int, int, int], accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "SLICE", 8)  # a few rows at a time
    B, T, OC = sizes
    of = problem(B, T, OC, accumulate)
    inputs = draw(of)
    assert ("dbias" in inputs) == bool(accumulate)
    wanted = [float(inputs["dbias"][o]) if accumulate else 0.0 for o in range(OC)]
    for b in range(B):
        for t in range(T):
            for o in range(OC):
                wanted[o] += inputs["dout"][b, t, o]
    answer = FAMILY.reference(of, inputs, ErrorModel("bf16"), np)["dbias"]
    np.testing.assert_allclose(answer.value, wanted, rtol=1e-13)
    assert np.shape(answer.bound) == (OC,) and (np.asarray(answer.bound) > 0).all()


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("of", (problem(1, 7, 5, 1), problem(5, 13, 33, 0)), ids=str)
def test_the_bound_tells_right_from_wrong(of: Problem, dtype: str) -> None:
    found = probe(FAMILY, replace(of, dtype=dtype), seed=5)["dbias"]
    assert found.rounded <= 1.0 and found.weakest > 100


def test_sums_of_many_rows_are_numbers_of_fp16() -> None:
    """Of patterned inputs, too, the largest of which are six standard deviations from the mean."""
    rows = FAMILY.presets["large"]["B"] * FAMILY.presets["large"]["T"]
    assert (0.02 + 6.0 * 0.1) * rows < 65504
    for structured in (False, True):
        case = make_case(FAMILY, problem(1, 400009, 2, 1, "fp16"), 2, structured)
        assert abs(case.expected["dbias"].value).max() < 65504


# ------------------------------------------------------------------------------------------------ plans


def own_kernel(version: Version, of: Problem, block: int, props: Props) -> Launch:
    """The launch that reads dout: exactly one in every plan."""
    plan = version.plan(of, block, props)
    (own,) = [step for step in plan if isinstance(step, Launch) and "dout" in step.args]
    return own


def scratch_of(version: Version, of: Problem, block: int, props: Props) -> dict[str, Tensor]:
    tensors = version.scratch(of, block, props) if version.scratch is not None else ()
    return {tensor.name: tensor for tensor in tensors}


@pytest.mark.parametrize("props", (H200, SMALL), ids=lambda props: props.name)
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("version", FAMILY.versions, ids=lambda version: f"v{version.number}")
def test_plans_have_the_block_size_asked_for_and_scratch_for_their_grid(
    version: Version, dtype: str, props: Props
) -> None:
    for sizes in (*(shape.sizes for shape in FAMILY.check_shapes), *FAMILY.presets.values()):
        of = Problem(sizes, dtype)
        for block in version.blocks:
            own, scratch = own_kernel(version, of, block, props), scratch_of(version, of, block, props)
            assert own.block == (block,)
            assert len(own.grid) == 1 or own.grid[1] <= 65535
            assert set(tensors_of(version.plan(of, block, props))) <= {"dout", "dbias", *scratch}
            if version.number in (9, 10) and len(own.grid) > 1 and own.grid[1] > 1:
                assert scratch["partials"].shape == (own.grid[1], of["OC"])


def test_all_blocks_of_the_fastest_version_are_resident_at_once() -> None:
    """With 64 registers each, 1024 of the 2048 threads that a multiprocessor could have."""
    version = FAMILY.by_number[9]
    grids = {block: own_kernel(version, Problem(DEFAULT, "bf16"), block, H200).grid for block in version.blocks}
    assert grids[256] == (48, 11) and grids[128] == (48, 22)
    assert all(0.6 <= x * y * block / (132 * 1024) <= 1.0 for block, (x, y) in grids.items())


def test_versions_8_and_9_write_dbias_at_once_where_nothing_is_left_to_join() -> None:
    for number in (8, 9):
        plan = FAMILY.by_number[number].plan(problem(1, 3, 8), 256, SMALL)
        assert [step.kernel for step in plan if isinstance(step, Launch)] == [
            "matmul_backward_bias10<__nv_bfloat16, true, 8>"
        ]


@pytest.mark.parametrize(
    "of, block, props, kernel",
    [
        (Problem(DEFAULT, "bf16"), 1024, H200, "10<__nv_bfloat16, true, 4>"),
        (Problem(DEFAULT, "bf16"), 512, H200, "10<__nv_bfloat16, true, 4>"),
        (problem(8, 1024, 3071), 512, H200, "10<__nv_bfloat16, false, 4>"),
        (Problem(DEFAULT, "bf16"), 256, H200, "9<__nv_bfloat16, true, 8>"),  # too few threads
        (Problem(DEFAULT, "fp32"), 512, H200, "9<float, true, 8>"),  # larger than L2
        (Problem(DEFAULT, "fp32"), 1024, H200, "10<float, true, 8>"),  # as 9 does
        (Problem(FAMILY.presets["large"], "bf16"), 256, H200, "9<__nv_bfloat16, true, 8>"),
    ],
)
def test_version_10_reads_half_lines_where_dout_is_small(of: Problem, block: int, props: Props, kernel: str) -> None:
    assert own_kernel(FAMILY.by_number[10], of, block, props).kernel == f"matmul_backward_bias{kernel}"


def test_rows_beyond_int_are_refused() -> None:
    assert "2^31" in FAMILY.refusal(FAMILY.by_number[1], problem(1 << 16, 1 << 15, 1), 256)


def test_the_large_preset_does_not_fit_into_caches() -> None:
    assert 1 << 30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], FAMILY.dtypes[0])) <= 2.5 * (1 << 30)
