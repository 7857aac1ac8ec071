"""__half and __nv_bfloat16: every conversion exhaustively, arithmetic against exact fractions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from header_support import elementwise, launch
from rounding_model import DOWN, FORMATS, NEAREST, UP, ZERO, Format
from runtime_support import needs_compiler

pytestmark = [pytest.mark.emulator, needs_compiler]

ALL_BITS = np.arange(65536, dtype=np.uint16)
SPECIAL = (0x0000, 0x8000, 0x0001, 0x8001, 0x7FFF, 0xFFFF)

formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def finite_bits(format: Format, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.integers(0, format.infinity, count) | rng.integers(0, 2, count) << 15).astype(np.uint16)


def fractions_of(format: Format, bits: Any) -> list[Fraction]:
    return [Fraction(float(value)) for value in format.widen(bits)]


def is_nan(format: Format, bits: Any) -> Any:
    return (bits & 0x7FFF) > format.infinity


@formats
def test_widening_all_bit_patterns(format: Format) -> None:
    out = elementwise("low_precision", f"widen<{format.name}>", 3, np.float32, ALL_BITS)
    expected = format.widen(ALL_BITS)
    for row in out:
        np.testing.assert_array_equal(row, expected)  # NaN equals NaN here
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(row.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])  # -0, too
    assert np.isnan(out[:, is_nan(format, ALL_BITS)]).all()


@formats
def test_narrowing_keeps_every_value(format: Format) -> None:
    numbers = ALL_BITS[~is_nan(format, ALL_BITS)]
    out = elementwise("low_precision", f"narrow<{format.name}>", 5, np.uint16, format.widen(numbers))
    for row in out:
        np.testing.assert_array_equal(row, numbers)


@formats
def test_narrowing_rounds_to_nearest_even(format: Format) -> None:
    """All halfway points with their neighbours, and random floats of every size."""
    values = np.array([*format.magnitudes[:-1], format.magnitudes[-1]], np.float64)
    halfway = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    infinity = np.float32(np.inf)
    x = np.concatenate([halfway, np.nextafter(halfway, infinity), np.nextafter(halfway, -infinity), anything])
    x = np.concatenate([x, -x, np.array([np.nan, np.inf, -np.inf], np.float32)])
    out = elementwise("low_precision", f"narrow<{format.name}>", 5, np.uint16, x)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(format.dtype).view(np.uint16)
    expected[np.isnan(x)] = 0x7FFF  # the GPU's NaN
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[4], expected)


@formats
@pytest.mark.parametrize("row, mode", list(enumerate((NEAREST, ZERO, UP, DOWN))))
def test_narrowing_in_every_direction(format: Format, row: int, mode: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 2**32, 3000, dtype=np.uint32).view(np.float32)
    between = format.widen(finite_bits(format, 500, 3)) * np.float32(1.001)
    extremes = np.array([1e-45, -1e-45, 3.4e38, -3.4e38], np.float32)
    x = np.concatenate([x, between, extremes])
    x = x[np.isfinite(x)]
    out = elementwise("low_precision", f"narrow<{format.name}>", 5, np.uint16, x)
    assert [hex(b) for b in out[row]] == [hex(format.round(Fraction(float(v)), mode, bool(np.signbit(v)))) for v in x]


@formats
def test_narrowing_a_double_rounds_once(format: Format) -> None:
    """Just beside a halfway point, where going through float would first round onto it."""
    values = np.array(format.magnitudes, np.float64)
    halfway = (values[1:] + values[:-1])[::7] / 2
    rng = np.random.default_rng(4)
    x = np.concatenate([halfway, halfway * (1 + 2.0**-50), halfway * (1 - 2.0**-50), rng.normal(0, 1e3, 1000)])
    x = np.concatenate([x, -x])
    out = elementwise("low_precision", f"narrow_double<{format.name}>", 2, np.uint16, x)
    expected = np.array([format.round(Fraction(float(v)), NEAREST, bool(np.signbit(v))) for v in x], np.uint16)
    np.testing.assert_array_equal(out[0], expected)
    np.testing.assert_array_equal(out[1], expected)


def rounded(value: float, mode: str) -> int:
    functions: dict[str, Callable[[float], int]] = {NEAREST: round, ZERO: math.trunc, UP: math.ceil, DOWN: math.floor}
    return functions[mode](value)


@formats
def test_integers(format: Format) -> None:
    infinities = (format.infinity, format.infinity | 0x8000)
    bits = np.concatenate([finite_bits(format, 3000, 5), np.array([*SPECIAL, *infinities], np.uint16)])
    rng = np.random.default_rng(6)
    whole = rng.integers(-(2**63), 2**63 - 1, len(bits)) >> rng.integers(0, 63, len(bits))
    to = np.zeros((9, len(bits)), np.int64)
    back = np.zeros((7, len(bits)), np.uint16)
    launch("low_precision", f"integers<{format.name}>", -(-len(bits) // 256), 256, to, back, bits, whole, len(bits))

    kinds = [("i4", NEAREST), ("i4", ZERO), ("u4", UP), ("i2", DOWN), ("u2", NEAREST), ("i8", ZERO), ("u8", DOWN)]
    kinds += [("i1", ZERO), ("u1", ZERO)]
    for row, (kind, mode) in zip(to, kinds, strict=True):
        limits = np.iinfo(kind)
        for value, result in zip(format.widen(bits).tolist(), row.tolist(), strict=True):
            if math.isnan(value):
                expected = -(2**63) if limits.bits == 64 else 0
            elif math.isinf(value):
                expected = int(limits.max if value > 0 else limits.min)
            else:
                expected = min(max(rounded(value, mode), int(limits.min)), int(limits.max))
            assert result == expected - (2**64 if expected >= 2**63 else 0), (kind, mode, value)

    kinds = [("i4", NEAREST), ("i4", ZERO), ("u4", UP), ("i2", DOWN), ("u2", NEAREST), ("i8", NEAREST), ("u8", NEAREST)]
    for result_row, (kind, mode) in zip(back, kinds, strict=True):
        for value, result in zip(whole.astype(kind).tolist(), result_row.tolist(), strict=True):
            assert result == format.round(Fraction(value), mode), (kind, mode, value)


Exact = Callable[[Fraction, Fraction, Fraction], Fraction]
ARITHMETIC: dict[int, Exact] = {
    0: lambda x, y, z: x + y, 1: lambda x, y, z: x - y, 2: lambda x, y, z: x * y, 3: lambda x, y, z: x / y,
    4: lambda x, y, z: x + y, 5: lambda x, y, z: x - y, 6: lambda x, y, z: x * y, 7: lambda x, y, z: x / y,
    8: lambda x, y, z: x * y + z, 9: lambda x, y, z: x + y, 10: lambda x, y, z: x - y, 11: lambda x, y, z: x * y,
    12: lambda x, y, z: x / y, 13: lambda x, y, z: -x, 14: lambda x, y, z: -x, 15: lambda x, y, z: abs(x),
    16: lambda x, y, z: max(x, y), 17: lambda x, y, z: min(x, y), 18: lambda x, y, z: max(x, y),
    19: lambda x, y, z: min(x, y), 20: lambda x, y, z: min(max(x + y, Fraction(0)), Fraction(1)),
    21: lambda x, y, z: min(max(x * y, Fraction(0)), Fraction(1)), 22: lambda x, y, z: max(x * y + z, Fraction(0)),
    23: lambda x, y, z: x + 1, 24: lambda x, y, z: x - 1,
}  # fmt: skip


def operands(format: Format) -> tuple[Any, Any, Any]:
    """Random ones, and ones of like size whose sums cancel or end halfway; c far below a * b, too."""
    rng = np.random.default_rng(7)
    count = 1500
    a, b, c = (finite_bits(format, count, seed) for seed in (8, 9, 10))
    near = (a & 0x7FFF).astype(np.int64) + rng.integers(-2000, 2000, count)
    b[::2] = (np.clip(near, 1, format.infinity - 1) | (b & 0x8000))[::2]
    one = int(format.round(Fraction(1)))
    a[::3], b[::3] = one + rng.integers(0, 128, len(a[::3])), one + rng.integers(0, 128, len(b[::3]))
    b[(b & 0x7FFF) == 0] = one
    return a, b, c


@formats
def test_arithmetic_is_correctly_rounded(format: Format) -> None:
    a, b, c = operands(format)
    out = elementwise("low_precision", f"arithmetic<{format.name}>", 26, np.uint16, a, b, c)
    exact = [fractions_of(format, bits) for bits in (a, b, c)]
    for row, operation in ARITHMETIC.items():
        for i, (x, y, z) in enumerate(zip(*exact, strict=True)):
            expected = format.round(operation(x, y, z))
            if expected & 0x7FFF == 0:  # the sign of a zero is not what this is about
                assert out[row, i] & 0x7FFF == 0, (row, x, y, z)
            else:
                assert out[row, i] == expected, (row, float(x), float(y), float(z), hex(out[row, i]), hex(expected))


@formats
def test_arithmetic_with_nan_and_infinity(format: Format) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0], np.float32)
    a, b, c = (grid.ravel() for grid in np.meshgrid(values, values, values))
    bits = [x.astype(format.dtype).view(np.uint16) for x in (a, b, c)]
    out = format.widen(elementwise("low_precision", f"arithmetic<{format.name}>", 26, np.uint16, *bits))
    with np.errstate(all="ignore"):
        expected = {0: a + b, 1: a - b, 2: a * b, 3: a / b, 8: a * b + c, 16: np.fmax(a, b), 17: np.fmin(a, b),
                    18: np.maximum(a, b), 19: np.minimum(a, b), 15: np.abs(a), 25: np.sqrt(a),
                    20: np.nan_to_num(np.clip(a + b, 0, 1), nan=0.0)}  # fmt: skip
    for row, value in expected.items():
        np.testing.assert_array_equal(out[row], value, err_msg=f"row {row}")
    zeros = (a == 0) & (b == 0)
    np.testing.assert_array_equal(np.signbit(out[16][zeros]), (np.signbit(a) & np.signbit(b))[zeros])
    np.testing.assert_array_equal(np.signbit(out[17][zeros]), (np.signbit(a) | np.signbit(b))[zeros])


@formats
def test_pairs_do_what_numbers_do(format: Format) -> None:
    a, b, c = operands(format)
    out = elementwise("low_precision", f"pairs<{format.name}>", 132, np.uint16, a, b, c)
    functions = out[:112].reshape(28, 4, -1)
    np.testing.assert_array_equal(functions[:, 0], functions[:, 1])
    np.testing.assert_array_equal(functions[:, 2], functions[:, 3])
    assert len({row.tobytes() for row in functions[:, 0]}) >= 21  # all but the aliases differ
    u, v = a[::-1], b[::-1]
    moved = [(a, a), (u, u), (a, b), (u, v), (b, b), (a, u), (u, a), (u, u), (u, b), (u, a)]
    for i, (low, high) in enumerate(moved):
        np.testing.assert_array_equal(out[112 + 2 * i], low, err_msg=f"pair {i}")
        np.testing.assert_array_equal(out[113 + 2 * i], high, err_msg=f"pair {i}")


@formats
def test_comparisons(format: Format) -> None:
    special = np.array([*SPECIAL, format.infinity, format.infinity | 0x8000, 0x3C00, 0xBC01], np.uint16)
    a, b = (grid.ravel() for grid in np.meshgrid(special, special))
    a, b = np.concatenate([a, finite_bits(format, 500, 11)]), np.concatenate([b, finite_bits(format, 500, 12)])
    out = elementwise("low_precision", f"compare<{format.name}>", 32, np.uint32, a, b)
    x, y = format.widen(a), format.widen(b)
    nan = np.isnan(x) | np.isnan(y)
    ordered = [x == y, (x != y) & ~nan, x < y, x <= y, x > y, x >= y]
    infinite = np.where(np.isinf(x), np.where(x > 0, 1, -1), 0).astype(np.int32).view(np.uint32)
    less, not_equal = (x < y) * 0xFFFF + (y < x) * 0xFFFF0000, ((x != y) | nan) * 0xFFFFFFFF
    one = int(format.round(Fraction(1)))
    expected = [
        x == y, (x != y) | nan, x < y, x <= y, x > y, x >= y, *ordered, *(test | nan for test in ordered), np.isnan(x),
        infinite, x != 0, less, not_equal, x == y, ((x <= y) | nan) & ((y <= x) | nan), x == y, (x != y) | nan,
        (x > y) * one, (y > x) * one, ((x == y) | nan) * one,
        2 * ((x <= y) & (x == x)) + 8 * ((x >= y) & (x == x)), np.zeros(len(x)),  # a pair is less when both are
    ]  # fmt: skip
    for row, (result, wanted) in enumerate(zip(out, expected, strict=True)):
        np.testing.assert_array_equal(result, np.asarray(wanted).astype(np.uint32), err_msg=f"row {row}")


@formats
def test_functions(format: Format) -> None:
    """To the last bit but one, for all bit patterns."""
    out = elementwise("low_precision", f"functions<{format.name}>", 17, np.float32, ALL_BITS)
    with np.errstate(all="ignore"):
        x = format.widen(ALL_BITS).astype(np.float64)
        expected = [
            np.exp(x), np.exp2(x), 10.0**x, np.log(x), np.log2(x), np.log10(x), np.sin(x), np.cos(x), np.tanh(x),
            np.sqrt(x), 1 / np.sqrt(x), 1 / x, np.trunc(x), np.ceil(x), np.floor(x), np.rint(x), np.tanh(x),
        ]  # fmt: skip
        for row, (result, wanted) in enumerate(zip(out, expected, strict=True)):
            nearest = wanted.astype(np.float32).astype(format.dtype)
            np.testing.assert_array_equal(np.isnan(result), np.isnan(wanted), err_msg=f"row {row}")
            numbers = ~np.isnan(wanted)
            got = result[numbers].astype(format.dtype).view(np.int16).astype(np.int32)
            want = nearest[numbers].view(np.int16).astype(np.int32)
            assert np.abs((got & 0x7FFF) - (want & 0x7FFF)).max() <= 1, f"row {row}"


def test_classes() -> None:
    out = np.zeros(8, np.float32)
    launch("low_precision", "classes", 1, 1, out)
    assert out.tolist() == [np.float32(0x40003C00), 3.0, 0x4200, 5.0, 1.0, -2.0, 255.0, 4244.0]
