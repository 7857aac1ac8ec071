"""The contract of residual_forward: its reference bit for bit, what the check tells apart, its plans."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.probe import probe
from kbench.device.dtypes import store
from kbench.family import ErrorModel, Launch, Problem, Props, Tensor

FAMILY = load_catalog()["residual_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_reference_is_the_rounded_sum(dtype: str) -> None:
    """Against the type's own rounding, of numbers with ties and far apart, both signs of zero included."""
    count = 5000
    rng = np.random.default_rng(0)
    stored = Tensor("x", (count,), dtype, "scratch")
    scales = 2.0 ** rng.integers(-9, 9, (2, count))
    inp1, inp2 = (store(stored, rng.normal(0.0, 1.0, count) * scale).astype(np.float64) for scale in scales)
    inp1[:2], inp2[:2] = (0.0, -0.0), (-0.0, -0.0)
    inp2[2] = -inp1[2]
    problem = Problem({"N": count}, dtype)
    value = FAMILY.reference(problem, {"inp1": inp1, "inp2": inp2}, ErrorModel(dtype), np)["out"].value
    direct = store(stored, inp1 + inp2).astype(np.float64)
    np.testing.assert_array_equal(value.view(np.uint64), direct.view(np.uint64))


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("count", [1, 2, 300])
def test_the_check_tells_right_from_wrong(count: int, dtype: str) -> None:
    of = probe(FAMILY, Problem({"N": count}, dtype), seed=3)["out"]
    assert of.rounded == 0.0
    assert of.zeros > 3 and of.stale > 3 and (of.slip > 3 or count == 1)


@pytest.mark.parametrize("count", [1, 13, 1025, 8 * 1024 * 768, 2**33 + 5])
def test_grids_cover_all_elements_once(count: int) -> None:
    """2^33 elements do not fit into 32-bit indices, their blocks do."""
    for dtype, packet in (("bf16", 8), ("fp32", 4)):
        problem = Problem({"N": count}, dtype)
        for version, per_thread in ((1, 1), (2, 2 * packet)):
            for block in FAMILY.by_number[version].blocks:
                (launch,) = FAMILY.by_number[version].plan(problem, block, PROPS)
                assert isinstance(launch, Launch) and launch.block == (block,)
                per_block = block * per_thread
                assert 0 <= launch.grid[0] * per_block - count < per_block and launch.grid[0] < 2**31


def test_large_moves_a_gibibyte() -> None:
    traffic = FAMILY.least_traffic(Problem(FAMILY.presets["large"], FAMILY.dtypes[0]))
    assert 2**30 <= traffic <= 2.5 * 2**30
