"""The contract of gelu_backward: its reference and bound, what the check tells apart, its plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.probe import probe
from kbench.family import Array, ErrorModel, Expected, Launch, Problem, Props

FAMILY = load_catalog()["gelu_backward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)
S, C = math.sqrt(2.0 / math.pi), 0.044715


def reference(x: Array, dout: Array) -> Expected:
    inputs = {"inp": np.float64(x), "dout": np.float64(dout)}
    return FAMILY.reference(Problem({"N": x.size}, "fp32"), inputs, ErrorModel("fp32"), np)["dinp"]


def test_reference_is_the_slope_of_the_forward_pass() -> None:
    x = np.concatenate([np.linspace(-6.0, 6.0, 1001), [0.0, -12.0, 30.0]])
    dout = np.random.default_rng(0).normal(0.2, 1.0, x.size)

    def gelu(of: Array) -> Array:
        return 0.5 * of * (1.0 + np.tanh(S * (of + C * of**3)))

    step = 1e-6
    slope = (gelu(x + step) - gelu(x - step)) / (2.0 * step)
    np.testing.assert_allclose(reference(x, dout).value, slope * dout, atol=2e-8)


def test_versions_of_the_formula_in_fp32_stay_within_the_bound() -> None:
    """Both ways of computing it, in numpy's fp32."""
    single = np.float32
    x = np.concatenate([np.linspace(-12.0, 12.0, 100_001), [-40.0, 40.0]]).astype(single)
    dout = np.full_like(x, 0.7)
    s, c, one = single(S), single(C), single(1.0)
    u, slope = s * (x + c * x * x * x), s * (one + single(3.0) * c * x * x)
    with np.errstate(over="ignore"):
        sech = one / np.cosh(u)
    e = np.exp(np.minimum(single(-2.0) * u, single(86.0)))
    h = one / (one + e)
    ways = (
        single(0.5) * (one + np.tanh(u)) + single(0.5) * x * sech * sech * slope,
        h * (one + x * (e * h) * (single(2.0) * slope)),
    )
    expected = reference(x, dout)
    for way in ways:
        error = np.abs(np.float64(way * dout) - expected.value) / np.maximum(np.float64(expected.bound), 1e-300)
        assert error.max() <= 0.6


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("count", [2, 300])
def test_the_check_tells_right_from_wrong(count: int, dtype: str) -> None:
    of = probe(FAMILY, Problem({"N": count}, dtype), seed=3)["dinp"]
    assert of.rounded <= 1.0 and of.weakest > 3


@pytest.mark.parametrize("count", [1, 13, 1025, 8 * 1024 * 768, 2**33 + 5])
def test_grids_cover_all_elements_once(count: int) -> None:
    """2^33 elements do not fit into 32-bit indices, their blocks do."""
    for dtype, packet in (("bf16", 8), ("fp32", 4)):
        for version, per_thread in ((1, 1), (2, packet)):
            for block in FAMILY.by_number[version].blocks:
                (launch,) = FAMILY.by_number[version].plan(Problem({"N": count}, dtype), block, PROPS)
                assert isinstance(launch, Launch) and launch.block == (block,)
                per_block = block * per_thread
                assert 0 <= launch.grid[0] * per_block - count < per_block and launch.grid[0] < 2**31


def test_large_moves_a_gibibyte() -> None:
    traffic = FAMILY.least_traffic(Problem(FAMILY.presets["large"], FAMILY.dtypes[0]))
    assert 2**30 <= traffic <= 2.5 * 2**30
