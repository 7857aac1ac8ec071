"""The contract of gelu_forward: its reference and bound, what the check tells apart, its plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.probe import probe
from kbench.family import ErrorModel, Launch, Problem, Props

FAMILY = load_catalog()["gelu_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


def test_reference_is_x_times_a_logistic_function() -> None:
    """The tanh form and x / (1 + exp(-2 u)) are the same function."""
    x = np.concatenate([np.linspace(-6.0, 6.0, 1001), [0.0, -12.0, 30.0]])
    got = FAMILY.reference(Problem({"N": x.size}, "fp32"), {"inp": x}, ErrorModel("fp32"), np)["out"]
    u = [math.sqrt(2.0 / math.pi) * (value + 0.044715 * value**3) for value in x]
    direct = [value / (1.0 + math.exp(-2.0 * of_value)) for value, of_value in zip(x, u, strict=True)]
    np.testing.assert_allclose(got.value, direct, rtol=1e-12, atol=1e-14)


def test_versions_of_the_formula_in_fp32_stay_within_the_bound() -> None:
    """Both ways of computing it, in numpy's fp32."""
    single = np.float32
    x = np.concatenate([np.linspace(-12.0, 12.0, 100_001), [-40.0, 40.0]]).astype(single)
    expected = FAMILY.reference(
        Problem({"N": x.size}, "fp32"), {"inp": np.float64(x)}, ErrorModel("fp32"), np
    )["out"]  # fmt: skip
    u = single(math.sqrt(2.0 / math.pi)) * (x + single(0.044715) * x * x * x)
    with np.errstate(over="ignore"):
        ways = (single(0.5) * x * (single(1.0) + np.tanh(u)), x / (single(1.0) + np.exp(single(-2.0) * u)))
    for way in ways:
        error = np.abs(np.float64(way) - expected.value) / np.maximum(np.float64(expected.bound), 1e-300)
        assert error.max() <= 0.6


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("count", [2, 300])
def test_the_check_tells_right_from_wrong(count: int, dtype: str) -> None:
    of = probe(FAMILY, Problem({"N": count}, dtype), seed=3)["out"]
    assert of.rounded <= 1.0 and of.weakest > 3


@pytest.mark.parametrize("count", [1, 13, 1025, 8 * 1024 * 768, 2**33 + 5])
def test_grids_cover_all_elements_once(count: int) -> None:
    """2^33 elements do not fit into 32-bit indices, their blocks do."""
    for dtype, packet in (("bf16", 8), ("fp32", 4)):
        for version in FAMILY.versions:
            for block in version.blocks:
                (launch,) = version.plan(Problem({"N": count}, dtype), block, PROPS)
                assert isinstance(launch, Launch) and launch.block == (block,)
                packets = 2 if launch.kernel.endswith(", 2>") else 1
                per_block = block * (packet * packets if version.number == 2 else 1)
                assert 0 <= launch.grid[0] * per_block - count < per_block and launch.grid[0] < 2**31


def test_a_thread_has_one_packet_while_there_are_threads_for_all_packets() -> None:
    resident = PROPS.multiprocessors * PROPS.threads_per_multiprocessor
    for count, packets in ((8 * resident, 1), (8 * resident + 1, 2)):
        (launch,) = FAMILY.by_number[2].plan(Problem({"N": count}, "bf16"), 256, PROPS)
        assert isinstance(launch, Launch) and launch.kernel == f"gelu_forward2<__nv_bfloat16, {packets}>"


def test_large_moves_a_gibibyte() -> None:
    traffic = FAMILY.least_traffic(Problem(FAMILY.presets["large"], FAMILY.dtypes[0]))
    assert 2**30 <= traffic <= 2.5 * 2**30
