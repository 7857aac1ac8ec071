"""The contract of encoder_backward: its reference and bound, what the check tells apart, its plans and scratch."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Fill, Launch, Problem, Props, kernels_of, tensors_of

FAMILY = load_catalog()["encoder_backward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


def problem(B: int, T: int, C: int, V: int, accumulate: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "C": C, "V": V, "accumulate": accumulate}, dtype)


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 4, 50), (4, 5, 3, 2)])
def test_reference_adds_position_by_position(sizes: tuple[int, int, int, int], accumulate: int) -> None:
    case = make_case(FAMILY, problem(*sizes, accumulate), seed=1)
    B, T, C, V = sizes
    dout, inp = np.float64(case.inputs["dout"]), case.inputs["inp"]
    dwte, dwpe = np.zeros((V, C)), np.zeros((T, C))
    if accumulate:
        dwte, dwpe = np.float64(case.inputs["dwte"]), np.float64(case.inputs["dwpe"])
    for b in range(B):
        for t in range(T):
            dwte[inp[b, t]] += dout[b, t]
            dwpe[t] += dout[b, t]
    np.testing.assert_allclose(case.expected["dwte"].value, dwte, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(case.expected["dwpe"].value, dwpe, rtol=1e-12, atol=1e-12)


def test_rows_of_other_tokens_must_be_exact() -> None:
    """Zero without accumulation, the start value with it: no error is allowed where nothing is added."""
    for accumulate in (0, 1):
        case = make_case(FAMILY, problem(1, 3, 4, 40, accumulate), seed=1)
        others = np.setdiff1d(np.arange(40), case.inputs["inp"])
        assert (np.asarray(case.expected["dwte"].bound)[others] == 0.0).all()
        start = np.float64(case.inputs["dwte"])[others] if accumulate else 0.0
        assert (case.expected["dwte"].value[others] == start).all()


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (5, 7, 16, 3), (3, 33, 4, 200)])
def test_the_check_tells_right_from_wrong(sizes: tuple[int, int, int, int], dtype: str, accumulate: int) -> None:
    for of in probe(FAMILY, problem(*sizes, accumulate, dtype), seed=3).values():
        assert of.rounded <= 1.0 and of.weakest > 3


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("accumulate", [0, 1])
def test_every_sum_starts_from_something_written(accumulate: int, dtype: str) -> None:
    """What kernels add to is cleared by the plan or has a start value."""
    of = problem(3, 5, 8, 11, accumulate, dtype)
    for version in (FAMILY.by_number[1], FAMILY.by_number[2]):
        plan = version.plan(of, 128, PROPS)
        cleared = {step.target.tensor for step in plan if isinstance(step, Fill)}
        assert ("dwte" in cleared) == (not accumulate)
        assert ({"sums", "last"} <= cleared) == (dtype != "fp32")
        assert version.scratch is not None
        scratch = {tensor.name: tensor.dtype for tensor in version.scratch(of, 128, PROPS)}
        assert set(tensors_of(plan)) == {"dout", "inp", "dwte", "dwpe", *scratch}
        assert scratch == ({} if dtype == "fp32" else {"sums": "fp32", "rows": "int32", "last": "int32"})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_over_many_positions_are_numbers_of_fp16(seed: int) -> None:
    """Of each pattern of inputs, which have the same token everywhere."""
    case = make_case(FAMILY, problem(4, 12288, 4, 50257, 1, "fp16"), seed, True)
    assert max(abs(case.expected[name].value).max() for name in ("dwte", "dwpe")) < 65504


def test_scratch_follows_the_positions_not_the_vocabulary() -> None:
    of = Problem(FAMILY.presets["default"], "bf16")
    scratch = FAMILY.by_number[1].scratch
    assert scratch is not None
    assert sum(tensor.nbytes for tensor in scratch(of, 256, PROPS)) < 26e6


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (8, 1024, 768, 50257), (3, 1024, 770, 9), (2, 1 << 20, 8192, 9)])
def test_grids_cover_all_channels_once(sizes: tuple[int, int, int, int]) -> None:
    """The last has over 2^31 elements in dwpe."""
    _, T, C, _ = sizes
    width = 4 if C % 4 == 0 else 1
    for version, threads in ((1, T * (C // width)), (2, C)):
        for dtype in FAMILY.dtypes:
            for block in FAMILY.by_number[version].blocks:
                plan = FAMILY.by_number[version].plan(problem(*sizes, 1, dtype), block, PROPS)
                (own,) = [step for step in plan if isinstance(step, Launch) and "encoder" in step.kernel]
                assert own.block == (block,) and 0 <= own.grid[0] * block - threads < block
                assert all(step.grid[0] < 2**31 for step in plan if isinstance(step, Launch))


def test_only_rounded_gradients_need_more_than_one_kernel() -> None:
    of = {
        dtype: kernels_of(FAMILY.by_number[1].plan(problem(2, 3, 8, 9, 1, dtype), 64, PROPS)) for dtype in FAMILY.dtypes
    }
    assert of["fp32"] == ("encoder_backward1<float, 4>",)
    assert len(of["bf16"]) == len(of["fp16"]) == 4


# ------------------------------------------------------------------------------------- version 3: sorted positions

SORTED = FAMILY.by_number[3]


def launches(of: Problem, block: int = 256, props: Props = PROPS) -> list[Launch]:
    return [step for step in SORTED.plan(of, block, props) if isinstance(step, Launch)]


@pytest.mark.parametrize("V, passes", [(1, 1), (2, 1), (256, 1), (257, 2), (50304, 2), (65536, 2), (65537, 3)])
def test_as_many_passes_as_tokens_have_digits(V: int, passes: int) -> None:
    of = problem(4, 1024, 768, V, 1, "bf16")
    sorts = [step for step in launches(of) if step.kernel.startswith("sort_by_digit")]
    assert len(sorts) == passes and len(launches(of)) == passes + 3
    assert [step.args[-1] for step in sorts] == list(range(passes))
    assert [step.kernel for step in sorts] == [
        f"sort_by_digit<{str(i == 0).lower()}, {str(i == passes - 1).lower()}>" for i in range(passes)
    ]
    for before, after in zip(sorts, sorts[1:], strict=False):
        assert after.args[3:6] == before.args[:3]  # it reads what the one before has written
        assert after.args[0] != after.args[3] and after.args[1] != after.args[4]
    assert launches(of)[-2].args[4:6] == sorts[-1].args[:2]


@pytest.mark.parametrize("accumulate", [0, 1])
def test_all_rows_of_dwte_begin_as_something(accumulate: int) -> None:
    plan = SORTED.plan(problem(2, 9, 8, 11, accumulate), 128, PROPS)
    assert [step.target.tensor for step in plan if isinstance(step, Fill)] == ([] if accumulate else ["dwte"])


@pytest.mark.parametrize("props", [PROPS, Props("b", "sm_80", 7, 1536, 1024, 49152, 1, 1, 65536, 1, 1)], ids=["a", "b"])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 1024, 768, 50304), (64, 1024, 768, 50304), (1, 1 << 20, 100, 1)])
def test_grids_and_scratch_cover_all_positions_and_channels(sizes: tuple[int, int, int, int], props: Props) -> None:
    B, T, C, V = sizes
    for dtype, packet in (("fp32", 4), ("bf16", 8)):
        of = problem(*sizes, 1, dtype)
        assert SORTED.scratch is not None
        scratch = {tensor.name: tensor.shape for tensor in SORTED.scratch(of, 256, props)}
        passes, tiles, digits = scratch["counts"]
        pieces, _, width = scratch["parts"]
        assert tiles <= props.multiprocessors and digits == 256 and width % (32 * packet) == 0 and width >= C
        assert scratch["tokens"] == scratch["rows"] == (2, B * T)
        for block in SORTED.blocks:
            count, *_, own = (step for step in launches(of, block, props) if not step.kernel.startswith("join"))
            tile_bits, length, stripes, place_blocks = count.args[3], *own.args[9:12]
            assert isinstance(tile_bits, int) and (tiles - 1) << tile_bits < B * T <= tiles << tile_bits
            assert isinstance(length, int) and (pieces - 1) * length < B * T <= pieces * length and length <= 32
            assert isinstance(stripes, int) and width == stripes * 32 * packet
            assert isinstance(place_blocks, int) and place_blocks * block >= T * -(-C // packet)
            assert own.block == (block,) and (own.grid[0] - place_blocks) * block >= pieces * stripes * 32


def test_short_problems_have_short_pieces_so_that_the_gpu_is_full() -> None:
    lengths = [launches(problem(B, 1024, 768, 50304, 1, "bf16"))[-2].args[9] for B in (4, 16, 32, 64, 1024)]
    assert lengths == [8, 8, 16, 32, 32]


def test_traffic_counts_the_rows_that_change() -> None:
    """fp32: dout and ids once; with accumulation dwpe and the rows in use twice, else all of both once."""
    assert FAMILY.least_traffic(problem(2, 3, 8, 1000, 1)) == 4 * 8 * (6 + 2 * 3 + 2 * 6) + 4 * 6
    assert FAMILY.least_traffic(problem(2, 3, 8, 4, 1)) == 4 * 8 * (6 + 2 * 3 + 2 * 4) + 4 * 6
    assert FAMILY.least_traffic(problem(2, 3, 8, 1000, 0)) == 4 * 8 * (6 + 3 + 1000) + 4 * 6
    assert 2**30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], "fp32")) <= 2.5 * 2**30
