"""The contract of global_norm: its reference against an exact sum, its bound, its plans."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.bound import final_bound
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Array, ErrorModel, Fill, Launch, Problem, Props, Version

FAMILY = load_catalog()["global_norm"]

H200 = Props("H200", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 140 << 30)
SMALL = Props("small", "sm_89", 3, 1536, 1024, 48 << 10, 99 << 10, 100 << 10, 65536, 1 << 20, 1 << 30)


def problem(N: int, dtype: str = "bf16") -> Problem:
    return Problem({"N": N}, dtype)


@pytest.mark.parametrize("N", (1, 2, 37, 1000))
def test_reference_is_the_exact_sum(N: int) -> None:
    data = np.random.default_rng(N).normal(0.1, 0.7, N)
    answer = FAMILY.reference(problem(N), {"data": data}, ErrorModel("bf16"), np)["out"]
    exact = float(sum(Fraction(float(value)) ** 2 for value in data))
    np.testing.assert_allclose(answer.value, [exact], rtol=1e-14)
    assert np.shape(answer.bound) == (1,)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("N", (7, 4613))
def test_the_bound_tells_right_from_wrong(N: int, dtype: str) -> None:
    found = probe(FAMILY, problem(N, dtype), seed=5)["out"]
    assert found.rounded <= 0.5 and min(found.zeros, found.stale) > 100


def share(N: int, structured: bool, total: float) -> float:
    """What a result uses of the bound."""
    case = make_case(FAMILY, problem(N, "fp32"), 2, structured)
    expected = case.expected["out"]
    allowed = final_bound(case.tensors["out"], expected.value, expected.bound, np, None)
    return float((np.abs(total - expected.value) / allowed)[0])


def data_of(N: int, structured: bool) -> Array:
    return make_case(FAMILY, problem(N, "fp32"), 2, structured).inputs["data"]


@pytest.mark.parametrize("structured", (False, True))
def test_sums_in_two_levels_are_right_and_a_missing_element_is_not(structured: bool) -> None:
    """Strided running sums in fp32, then one over them: the least exact way that a version may take."""
    N = 40000
    data = data_of(N, structured)
    chains = np.zeros(200, np.float32)
    for row in data.reshape(-1, 200):
        chains += row * row
    total = np.float32(0)
    for chain in chains:
        total += chain
    assert share(N, structured, float(total)) < 0.6
    typical = float(np.mean(np.float64(data) ** 2))
    assert share(N, structured, float(np.sum(np.float64(data) ** 2)) - 8 * typical) > 1.0


def test_what_an_earlier_launch_left_does_not_pass_at_the_default_size() -> None:
    """The scale of the data differs from seed to seed; all else being equal, sums would differ by 1 / sqrt(N)."""
    N = FAMILY.presets["default"]["N"]
    bound = 4 * math.sqrt(N) * 2.0**-24
    sums = [float(np.sum(make_case(FAMILY, problem(5000), seed).inputs["data"].astype(np.float64) ** 2))
            for seed in range(4)]  # fmt: skip
    gaps = [abs(a - b) / max(a, b) for i, a in enumerate(sums) for b in sums[:i]]
    assert min(gaps) > 3 * bound


# ------------------------------------------------------------------------------------------------ plans


@pytest.mark.parametrize("props", (H200, SMALL), ids=lambda props: props.name)
@pytest.mark.parametrize("version", FAMILY.versions, ids=lambda version: f"v{version.number}")
def test_grids_fill_the_device_and_no_more(version: Version, props: Props) -> None:
    threads = props.multiprocessors * props.threads_per_multiprocessor
    for block in version.blocks:
        plan = version.plan(problem(70778880), block, props)
        own = next(step for step in plan if isinstance(step, Launch))
        assert own.block == (block,) and own.grid == (threads // block,)
        tiny = next(step for step in version.plan(problem(1), block, props) if isinstance(step, Launch))
        assert tiny.grid == (1,)


def test_atomics_start_from_a_cleared_output() -> None:
    for number in (1, 2, 3):
        first, _ = FAMILY.by_number[number].plan(problem(1000), 256, H200)
        assert isinstance(first, Fill) and first.target.tensor == "out" and first.value == 0.0
        assert not FAMILY.by_number[number].claims_deterministic


@pytest.mark.parametrize("props", (H200, SMALL), ids=lambda props: props.name)
def test_version_4_has_room_for_every_partial_sum(props: Props) -> None:
    version = FAMILY.by_number[4]
    assert version.scratch is not None and version.claims_deterministic
    for N in (1, 5000, 70778880):
        for block in version.blocks:
            own, join = version.plan(problem(N), block, props)
            assert isinstance(own, Launch) and isinstance(join, Launch)
            (partials,) = version.scratch(problem(N), block, props)
            assert partials.shape == own.grid == join.args[2:]


@pytest.mark.parametrize("props", (H200, SMALL), ids=lambda props: props.name)
def test_version_5_counts_the_blocks_from_0_in_every_launch(props: Props) -> None:
    """A replayed graph finds the counter as the launch before has left it."""
    version = FAMILY.by_number[5]
    assert version.scratch is not None and version.claims_deterministic
    for N in (1, 5000, 70778880):
        for block in version.blocks:
            clear, own = version.plan(problem(N), block, props)
            assert isinstance(clear, Fill) and clear.target.tensor == "counter" and clear.value == 0.0
            assert isinstance(own, Launch)
            partials, counter = version.scratch(problem(N), block, props)
            assert partials.shape == own.grid and counter.name == "counter" and counter.dtype == "uint32"


def test_the_large_preset_does_not_fit_into_caches() -> None:
    assert 1 << 30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], FAMILY.dtypes[0])) <= 2.5 * (1 << 30)
