"""The comparison: what must fail fails, what is right passes, and the words say which is which."""

from __future__ import annotations

import json
import math
import time

import ml_dtypes
import numpy as np
import pytest

from kbench.check.arrays import count_different, first_different, words
from kbench.check.bound import Tolerance, final_bound, half_ulp
from kbench.check.compare import compare
from kbench.check.expected import DeviceExpected
from kbench.check.explain import Clues
from kbench.device.dtypes import numpy_dtype, store
from kbench.errors import KbenchError, UsageError
from kbench.family import Expected, Tensor


def output(shape, dtype="fp32", axes=(), **more):
    return Tensor("out", shape, dtype, "out", axes, **more)


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def judge(tensor, got, value, bound=0.0, tolerance=None, **clues):
    return compare(tensor, got, Expected(value, bound), np, tolerance, clues=Clues(**clues))


@pytest.fixture
def square(rng):
    """A 32 x 64 output, its reference and the right result."""
    tensor = output((32, 64), axes=("r", "c"))
    value = rng.normal(0.5, 1.0, (32, 64))
    return tensor, value, store(tensor, value)


def test_the_rounded_reference_passes_and_uses_at_most_its_bound(square):
    tensor, value, right = square
    verdict = judge(tensor, right, value)
    assert verdict.passed and verdict.compared == 2048
    assert 0.9 < verdict.used <= 1.0  # nothing but the rounding was allowed, and nothing else happened


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0, 0), (31, 63)])
def test_one_element_that_is_not_finite_fails(square, bad, where):
    tensor, value, right = square
    right[where] = bad
    verdict = judge(tensor, right, value, bound=1e30)
    assert verdict.wrong == 1 and verdict.used is None
    assert verdict.kind == ("nan" if math.isnan(bad) else "infinite")
    assert verdict.first.index == verdict.worst.index == where
    text = f"out: 1 of 2048 elements wrong ({verdict.kind}), worst at [r={where[0]}, c={where[1]}]: reference "
    assert verdict.reason().startswith(text) and verdict.reason().endswith(f"got {bad}")
    json.dumps(verdict.to_dict(), allow_nan=False)


def test_all_nan_fails_everywhere(square):
    tensor, value, right = square
    verdict = judge(tensor, np.full_like(right, np.nan), value, bound=1e30)
    assert (verdict.wrong, verdict.kind, verdict.notes) == (2048, "nan", ("all elements are wrong",))


def test_nan_under_a_tolerance_fails(square):
    tensor, value, right = square
    right[3, 3] = np.nan
    assert judge(tensor, right, value, tolerance=Tolerance(1e30, 1e30)).wrong == 1


def test_errors_that_cancel_fail(square):
    tensor, value, right = square
    right[0, 0] += 1
    right[0, 1] -= 1
    verdict = judge(tensor, right, value)
    assert verdict.wrong == 2 and verdict.used > 1e6
    assert "r 0 of 0..31" in verdict.notes[1] and "elements 0 to 1 in memory" in verdict.notes[0]


def test_zeros_are_recognised(square):
    tensor, value, right = square
    right[5] = 0
    verdict = judge(tensor, right, value)
    assert verdict.kind == "zeros" and verdict.wrong == 64
    assert "1 whole rows of 32, all others right" in verdict.notes


@pytest.mark.parametrize("poison", [0xFF, 0x5A])
def test_an_unwritten_tail_is_recognised(square, poison):
    tensor, value, right = square
    right.view(np.uint8).reshape(-1)[-4 * 128 :] = poison
    verdict = judge(tensor, right, value, poison=poison, block=128)
    assert verdict.kind == "unwritten" and verdict.wrong == 128
    assert "only the last 128 elements in memory, from 15 times the block size 128 on" in verdict.notes


def test_unwritten_and_nan_are_told_apart(square):
    tensor, value, right = square
    right[0, :3] = np.nan
    right.view(np.uint32)[1, :5] = 0xFFFFFFFF
    verdict = judge(tensor, right, value, poison=0xFF)
    assert verdict.kind == "" and verdict.notes[0] == "of the 8 wrong elements 5 unwritten, 3 NaN"


@pytest.mark.parametrize(
    ("distance", "words"), [(1, "1 element before"), (-1, "1 element after"), (64, "1 step of r before")]
)
def test_a_shift_is_recognised(square, distance, words):
    tensor, value, right = square
    shifted = np.roll(right.reshape(-1), distance).reshape(right.shape)
    verdict = judge(tensor, shifted, value)
    assert verdict.kind == "shifted" and words in verdict.notes[0]


def test_a_shift_by_a_block_is_recognised(rng):
    tensor, value = output((5000,)), rng.normal(0, 1, 5000)
    verdict = judge(tensor, np.roll(store(tensor, value), 256), value, block=256)
    assert verdict.kind == "shifted" and "1 block (256 elements) before" in verdict.notes[0]


def test_results_of_other_inputs_are_stale(square, rng):
    tensor, value, right = square
    earlier = rng.normal(0.5, 1.0, value.shape)
    stale = store(tensor, earlier)
    previous = DeviceExpected(tensor, Expected(earlier), np)
    assert judge(tensor, stale, value, previous=previous).kind == "stale"
    assert judge(tensor, stale, value).kind == ""


def test_a_factor_is_named(square):
    tensor, value, right = square
    verdict = judge(tensor, right * np.float32(1.004), value)
    assert verdict.kind == "scaled" and "times 1.004" in verdict.notes[0]


def test_a_thousandth_of_the_elements_fails(rng):
    tensor, value = output((1_000_000,)), rng.normal(0, 1, 1_000_000)
    got = store(tensor, value)
    got[::1000] *= 2
    verdict = judge(tensor, got, value)
    assert verdict.wrong == 1000 and not verdict.passed


def test_a_small_tensor_is_judged_by_its_own_scale(rng):
    small, large = output((64,)), output((64,))
    value = rng.uniform(0.5, 1.0, 64)
    assert judge(small, store(small, 1.5 * 1e-3 * value), 1e-3 * value).wrong == 64
    assert judge(large, store(large, 1e2 * value), 1e2 * value).passed


def test_one_side_of_the_diagonal_is_named(rng):
    tensor = output((2, 16, 16), axes=("h", "t", "t2"))
    value = rng.normal(1, 0.1, (2, 16, 16))
    got = store(tensor, value)
    got[0][np.triu_indices(16, 1)] = 9
    notes = judge(tensor, got, value).notes
    assert "only above the diagonal" in notes and any("h 0 of 0..1" in note for note in notes)
    got = store(tensor, value)
    got[1][np.diag_indices(16)] = 9
    assert "only on the diagonal" in judge(tensor, got, value).notes


def test_ranges_along_an_axis_are_named(rng):
    tensor = output((128, 2, 4), axes=("t", "h", "d"))
    value = rng.normal(0, 1, (128, 2, 4))
    got = store(tensor, value)
    got[96:, 1, :] += 1
    assert "wrong at t 96..127 of 0..127, h 1 of 0..1" in judge(tensor, got, value).notes


def test_unspecified_elements_are_not_compared_and_counted(square):
    tensor, value, right = square
    masked = output((32, 64), unspecified=lambda xp: xp.arange(64) >= 60)
    right[:, 60:] = np.nan
    verdict = judge(masked, right, value)
    assert verdict.passed and (verdict.compared, verdict.total) == (32 * 60, 2048)
    right[7, 59] = np.nan
    assert judge(masked, right, value).wrong == 1


def test_a_mask_that_does_not_fit_is_the_familys_fault(square):
    _, value, right = square
    for mask in (lambda xp: xp.zeros(63, bool), lambda xp: xp.zeros(64)):
        with pytest.raises(KbenchError, match="fault of the family"):
            judge(output((32, 64), unspecified=mask), right, value)


def test_shapes_are_never_broadcast(rng):
    with pytest.raises(KbenchError, match=r"shape \(8, 1\), expected \(8, 8\)"):
        judge(output((8, 8)), np.zeros((8, 1), np.float32), np.zeros((8, 8)))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint8"])
def test_integers_are_exact_whatever_the_tolerance(dtype):
    tensor = output((9,), dtype)
    value = np.arange(9.0)
    got = store(tensor, value)
    assert judge(tensor, got, value, bound=5.0).used == 0.0
    got[4] += 1
    verdict = judge(tensor, got, value, bound=5.0, tolerance=Tolerance(1.0, 1.0))
    assert verdict.wrong == 1 and verdict.used is None
    assert "reference 4, got 5" in verdict.reason()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_copies_are_exact_to_the_bit(dtype):
    tensor = output((4,), dtype, exact=True)
    value = np.array([0.0, 1.0, -2.0, 0.5])
    got = store(tensor, value)
    assert judge(tensor, got, value).passed
    got[0] = -0.0
    assert judge(tensor, got, value).wrong == 1


# ---------------------------------------------------------------------------------------------- bounds by type


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_half_an_ulp_is_half_the_distance_to_the_next_number(dtype):
    """Against the type itself: the neighbour above, at every exponent and among subnormal numbers."""
    kind = numpy_dtype(dtype)
    bits = np.arange(1, 0x7C00 if dtype == "fp16" else 0x7F80, dtype=np.uint16)
    if dtype == "fp32":
        numbers = (bits.astype(np.uint32) << 16).view(np.float32)
        following = ((bits.astype(np.uint32) << 16) + 1).view(np.float32)
    else:
        numbers, following = bits[:-1].view(kind), bits[1:].view(kind)
    exact = numbers.astype(np.float64)
    assert np.array_equal(half_ulp(exact, dtype, np), (following.astype(np.float64) - exact) / 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rounding_passes_and_a_step_more_fails(dtype, rng):
    tensor = output((20_000,), dtype)
    value = rng.normal(0, 1, 20_000) * 10.0 ** rng.integers(-6, 3, 20_000)
    right = store(tensor, value)
    assert judge(tensor, right, value).passed
    kind = right.dtype
    away = (right.view(f"u{kind.itemsize}") + 2).view(kind)  # two numbers further from zero
    assert judge(tensor, away, value).wrong == 20_000


def test_bf16_scaled_by_five_percent_fails_and_by_a_fraction_of_a_step_may_pass(rng):
    tensor, value = output((4096,), "bf16"), rng.normal(0, 1, 4096)
    assert judge(tensor, store(tensor, 1.05 * value), value).wrong > 4000
    # 0.4% is one bf16 step at the most: elements that round across it are wrong by half a step or more.
    assert judge(tensor, store(tensor, 1.004 * value), value).wrong > 0
    assert judge(tensor, store(tensor, value), value).passed


def test_the_familys_bound_adds_to_the_rounding(rng):
    tensor, value = output((1000,)), np.full(1000, 1.0)
    off = store(tensor, value + 1e-3)
    assert judge(tensor, off, value, bound=0.9e-3).wrong == 1000
    assert judge(tensor, off, value, bound=np.full(1000, 1.1e-3)).passed
    used = judge(tensor, off, value, bound=np.full(1000, 2e-3, np.float32)).used
    assert used == pytest.approx(0.5, rel=1e-3)


def test_a_tolerance_replaces_the_bound():
    tensor, value = output((2,)), np.array([1.0, 100.0])
    got = np.array([1.05, 105.0], np.float32)
    assert judge(tensor, got, value, tolerance=Tolerance(rtol=0.051)).passed
    assert judge(tensor, got, value, tolerance=Tolerance(atol=0.051)).wrong == 1
    assert judge(tensor, got, value, bound=1e9, tolerance=Tolerance()).wrong == 2
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="--rtol"):
            Tolerance(rtol=bad)


def test_bf16_is_read_exactly():
    bits = np.arange(65536, dtype=np.uint16)
    every = bits[~np.isnan(bits.view(ml_dtypes.bfloat16).astype(np.float32))].view(ml_dtypes.bfloat16)
    finite = every[np.isfinite(every.astype(np.float32))]
    tensor = output(finite.shape, "bf16", exact=True)
    assert judge(tensor, finite, finite.astype(np.float64)).passed


# ---------------------------------------------------------------------------------------------- cost and portability


def test_ten_million_elements_take_well_under_a_second(rng):
    tensor = output((10_000_000,))
    value = rng.standard_normal(10_000_000)
    got = store(tensor, value)
    started = time.perf_counter()
    assert judge(tensor, got, value, bound=1e-6).passed
    # Some 0.2 s on one core; the limit only catches a change of order on a busy machine.
    assert time.perf_counter() - started < 2.0


class Recorder:
    """numpy, remembering which of its names were used."""

    def __init__(self, used):
        self._used = used

    def __getattr__(self, name):
        self._used.add(name)
        return getattr(np, name)


def test_only_functions_that_cupy_has_are_used(square):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    tensor, value, right = square
    masked = output((32, 64), unspecified=lambda xp: xp.arange(64) >= 60)
    used = set()
    bad = np.roll(right.reshape(-1), 1).reshape(right.shape)
    for one, got in ((masked, bad), (tensor, np.full_like(right, np.nan)), (output((32, 64), exact=True), bad)):
        assert not compare(one, got, Expected(value, np.abs(value)), Recorder(used)).passed
    assert used and [name for name in sorted(used) if not hasattr(cupy, name)] == []


def test_parts_do_not_change_the_verdict(rng, monkeypatch):
    tensor = output((50, 41), axes=("r", "c"))
    value = rng.normal(0, 1, (50, 41))
    got = store(tensor, value)
    got[11:13, 7] = np.nan
    got[49, 40] += 5
    whole = judge(tensor, got, value)
    monkeypatch.setattr("kbench.check.arrays._CPU_PART", 37)
    assert judge(tensor, got, value).to_dict() == whole.to_dict()
    assert whole.wrong == 3 and whole.first.index == (11, 7)
    bits, before = words(got, np), words(store(tensor, value), np)
    assert count_different(bits, before, None, np) == 3 and first_different(bits, before, np) == 11 * 41 + 7
    assert count_different(bits, before, np.arange(2050) < 2049, np) == 1


def test_a_tensor_without_elements_passes():
    verdict = judge(output((0, 4)), np.zeros((0, 4), np.float32), np.zeros((0, 4)))
    assert verdict.passed and verdict.compared == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_results_below_the_smallest_normal_number_may_be_flushed_and_no_others(dtype: str) -> None:
    """Seen on an H200: a right kernel's -1.17e-38 read as -0 by CuPy's comparison."""
    tensor = Tensor("out", (4,), dtype, "out")
    value = np.array([-1.17e-38, 1e-40, 0.0, 3e-38])
    bound = final_bound(tensor, value, 1e-7 * np.abs(value), np, None)
    error = np.abs(value - np.array([0.0, 0.0, 1e-40, 0.0]))
    assert (error <= bound).tolist() == [True, True, False, False]
    # The smallest normal number is 1.17549435e-38: what lies just above it was computed just below, and flushed.
    assert final_bound(tensor, np.array([-1.175494454e-38]), 0.0 * value[:1] + 1e-45, np, None)[0] >= 1.175494454e-38
