"""The contract of layernorm_forward: its reference against sums written out, its bound, its plans."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import Case, make_case
from kbench.check.probe import probe, used_share
from kbench.family import Array, ErrorModel, Launch, Problem, Props

FAMILY = load_catalog()["layernorm_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)

Sizes = tuple[int, int, int]  # B, T, C


def problem(sizes: Sizes, dtype: str = "fp32") -> Problem:
    return Problem(dict(zip(("B", "T", "C"), sizes, strict=True)), dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 3), (1, 4, 10)])
def test_reference_agrees_with_the_sums_written_out(sizes: Sizes) -> None:
    B, T, C = sizes
    rng = np.random.default_rng(0)
    inputs = {"inp": rng.normal(2.0, 3.0, sizes), "weight": rng.normal(1, 1, C), "bias": rng.normal(0, 1, C)}
    got = FAMILY.reference(problem(sizes), inputs, ErrorModel("fp32"), np)
    for b in range(B):
        for t in range(T):
            row = [float(x) for x in inputs["inp"][b, t]]
            mean = math.fsum(row) / C
            variance = math.fsum((x - y) ** 2 for x in row for y in row) / (2 * C * C)  # needs no mean
            rstd = (variance + 1e-5) ** -0.5
            out = [(x - mean) * rstd * w + b for x, w, b in zip(row, inputs["weight"], inputs["bias"], strict=True)]
            assert got["mean"].value[b, t] == pytest.approx(mean, rel=1e-13)
            assert got["rstd"].value[b, t] == pytest.approx(rstd, rel=1e-12)
            np.testing.assert_allclose(got["out"].value[b, t], out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [tuple(shape.sizes.values()) for shape in FAMILY.check_shapes])
def test_the_check_tells_right_from_wrong(sizes: Sizes, dtype: str) -> None:
    for name, of in probe(FAMILY, problem(sizes, dtype), seed=3).items():
        assert of.rounded <= 1.0, name
        # A row of one element is the bias, its rstd always the same.
        faults = {"zeros": of.zeros, "stale": of.stale, "slip": of.slip}
        if sizes[2] == 1 and name == "rstd":
            del faults["stale"]
        if math.prod(sizes) == 1 or (name != "out" and sizes[0] * sizes[1] == 1):
            del faults["slip"]
        assert min(faults.values()) >= 3.0, (name, faults)


def single_precision(case: Case, shift: Array) -> dict[str, Array]:
    """All outputs in fp32, from the sums of x - shift and of its square."""
    x, weight, bias = (np.float32(case.inputs[name]) for name in ("inp", "weight", "bias"))
    d = x - shift
    first = d.mean(axis=2, dtype=np.float32)
    variance = np.maximum((d * d).mean(axis=2, dtype=np.float32) - first * first, np.float32(0))
    mean = first + shift[..., 0]
    rstd = 1 / np.sqrt(variance + np.float32(1e-5))
    return {"mean": mean, "rstd": rstd, "out": (x - mean[..., None]) * rstd[..., None] * weight + bias}


def used(case: Case, got: dict[str, Array]) -> dict[str, float]:
    return {name: used_share(case, case.tensors[name], np.float32(values)) for name, values in got.items()}


def test_a_single_pass_must_shift() -> None:
    """Rows of mean 1000 and spread 1: E[x^2] - E[x]^2 has no digits left, that of x - x[0] has nearly all."""
    case = make_case(FAMILY, problem((1, 8, 768)), seed=1)
    means = case.expected["mean"].value
    assert means.min() < 0.3 and means.max() > 990, "rows of several kinds"
    assert max(used(case, single_precision(case, np.float32(case.inputs["inp"][..., :1]))).values()) < 0.6
    assert used(case, single_precision(case, np.zeros((1, 8, 1), np.float32)))["rstd"] > 3.0


def test_one_thread_may_add_up_a_long_row_of_16_bit_numbers() -> None:
    """Their squared deviations take few values, so roundings do not cancel as random ones do."""
    case = make_case(FAMILY, problem((1, 4, 16385), "bf16"), seed=56)
    x = np.float32(case.inputs["inp"])

    def mean_in_order(values: Array) -> Array:
        return np.add.accumulate(values, axis=2, dtype=np.float32)[..., -1] / np.float32(16385)

    mean = mean_in_order(x)
    rstd = 1 / np.sqrt(mean_in_order((x - mean[..., None]) ** 2) + np.float32(1e-5))
    assert 0.2 < used(case, {"rstd": rstd})["rstd"] < 0.6


def test_large_moves_a_gibibyte() -> None:
    assert 2**30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], "fp32")) <= 2.5 * 2**30


# Version to the rows that a block of this many threads takes.
PER_BLOCK = {1: lambda block: block, 3: lambda block: block // 32, 4: lambda block: block // 32, 5: lambda block: 1}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 37, 8), (8, 1024, 768), (70000, 40000, 4)])
def test_grids_cover_all_rows(sizes: Sizes) -> None:
    rows = sizes[0] * sizes[1]
    if rows >= 2**31:
        rows = 2**31 - 1
        sizes = (1, rows, 4)
    for number, per_block in PER_BLOCK.items():
        version = FAMILY.by_number[number]
        for block in version.blocks:
            (launch,) = version.plan(problem(sizes), block, PROPS)
            assert isinstance(launch, Launch) and launch.block == (block,)
            assert 0 <= launch.grid[0] * per_block(block) - rows < per_block(block)


def test_version_6_falls_back_where_shared_memory_is_too_small() -> None:
    """32 warps keep 34 rows of 768 floats, 104,448 bytes, in shared memory, where a block may have that much."""
    of, version = problem((8, 1024, 768)), FAMILY.by_number[6]
    small = replace(PROPS, shared_per_block_optin=101376)
    (kept,), (fallen,) = version.plan(of, 1024, PROPS), version.plan(of, 1024, small)
    assert isinstance(kept, Launch) and kept.shared == 34 * 768 * 4
    assert (fallen,) == FAMILY.by_number[5].plan(of, 1024, small)
    (fewer,) = version.plan(of, 512, small)
    assert isinstance(fewer, Launch) and fewer.shared == 18 * 768 * 4
