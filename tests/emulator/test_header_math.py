"""Integer and floating-point intrinsics against Python's integers, exact fractions and numpy's float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from header_support import elementwise, launch
from rounding_model import DOWN, NEAREST, UP, ZERO, root_float, round_float
from runtime_support import needs_compiler

pytestmark = [pytest.mark.emulator, needs_compiler]

EDGES = (0, 1, 2, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF)
MODES = (NEAREST, ZERO, UP, DOWN)


def words(seed: int) -> Any:
    """Random 32-bit words of every size, and all pairs of edges."""
    rng = np.random.default_rng(seed)
    random = rng.integers(0, 2**32, 1000, dtype=np.uint64) >> rng.integers(0, 32, 1000).astype(np.uint64)
    edges = np.meshgrid(EDGES, EDGES, EDGES)[seed].ravel()
    return np.concatenate([random, edges.astype(np.uint64)]).astype(np.uint32)


def signed(x: int, bits: int = 32) -> int:
    return x - 2**bits if x >> (bits - 1) else x


def bytes_of(x: int, is_signed: bool) -> list[int]:
    return [signed(x >> 8 * i & 0xFF, 8) if is_signed else x >> 8 * i & 0xFF for i in range(4)]


def dot4(x: int, y: int, z: int, is_signed: bool) -> int:
    return z + sum(a * b for a, b in zip(bytes_of(x, is_signed), bytes_of(y, is_signed), strict=True))


def byte_perm(x: int, y: int, selector: int) -> int:
    result = 0
    for i in range(4):
        digit = selector >> 4 * i & 15
        byte = (y << 32 | x) >> 8 * (digit & 7) & 0xFF
        result |= (byte if digit < 8 else 255 * (byte >> 7)) << 8 * i
    return result


def nth_set(mask: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if mask >> base & 1 else 2**32 - 1
    inside = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [i for i in inside if mask >> i & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else 2**32 - 1


Integers = list[Callable[[int, int, int], int]]
INTEGERS: Integers = [
    lambda x, y, z: bin(x).count("1"),
    lambda x, y, z: 32 - x.bit_length(),
    lambda x, y, z: (x & -x).bit_length(),
    lambda x, y, z: int(f"{x:032b}"[::-1], 2),
    lambda x, y, z: x * y >> 32,
    lambda x, y, z: signed(x) * signed(y) >> 32,
    lambda x, y, z: (x & 0xFFFFFF) * (y & 0xFFFFFF),
    lambda x, y, z: signed(x & 0xFFFFFF, 24) * signed(y & 0xFFFFFF, 24),
    lambda x, y, z: abs(x - y) + z,
    lambda x, y, z: abs(signed(x) - signed(y)) + z,
    lambda x, y, z: (signed(x) + signed(y)) >> 1,
    lambda x, y, z: (signed(x) + signed(y) + 1) >> 1,
    lambda x, y, z: (x + y) >> 1,
    lambda x, y, z: (x + y + 1) >> 1,
    byte_perm,
    lambda x, y, z: (y << 32 | x) << (z & 31) >> 32,
    lambda x, y, z: (y << 32 | x) >> (z & 31),
    lambda x, y, z: (y << 32 | x) << min(z, 32) >> 32,
    lambda x, y, z: (y << 32 | x) >> min(z, 32),
    lambda x, y, z: dot4(x, y, z, True),
    lambda x, y, z: dot4(x, y, z, False),
    lambda x, y, z: min(x, y),
    lambda x, y, z: max(x, y),
    lambda x, y, z: min(signed(x), signed(y)),
    lambda x, y, z: max(signed(x), signed(y)),
    lambda x, y, z: min(x, y),
    lambda x, y, z: max(x, y),
    lambda x, y, z: x,
    lambda x, y, z: x,
    lambda x, y, z: x,
    lambda x, y, z: y,
    lambda x, y, z: nth_set(x, z & 31, y % 7 - 3),
]


def test_integers() -> None:
    a, b, c = (words(seed) for seed in range(3))
    out = elementwise("integers", "integers", len(INTEGERS), np.uint32, a, b, c)
    for row, function in enumerate(INTEGERS):
        expected = [function(*xyz) & 0xFFFFFFFF for xyz in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
        np.testing.assert_array_equal(out[row], np.array(expected, np.uint32), err_msg=f"row {row}")


WIDE: list[Callable[[int, int], int]] = [
    lambda x, y: bin(x).count("1"),
    lambda x, y: 64 - x.bit_length(),
    lambda x, y: (x & -x).bit_length(),
    lambda x, y: int(f"{x:064b}"[::-1], 2),
    lambda x, y: x * y >> 64,
    lambda x, y: signed(x, 64) * signed(y, 64) >> 64,
    lambda x, y: min(x, y),
    lambda x, y: max(x, y),
    lambda x, y: min(signed(x, 64), signed(y, 64)),
    lambda x, y: max(signed(x, 64), signed(y, 64)),
    lambda x, y: x,
]


def test_wide_integers() -> None:
    a = words(0).astype(np.uint64) << np.uint64(32) | words(1)
    b = words(2).astype(np.uint64) << np.uint64(32) | words(0)[::-1]
    a[:4] = 0, 1, 2**64 - 1, 2**63
    out = elementwise("integers", "wide_integers", len(WIDE), np.uint64, a, b)
    for row, function in enumerate(WIDE):
        expected = [function(*xy) % 2**64 for xy in zip(a.tolist(), b.tolist(), strict=True)]
        np.testing.assert_array_equal(out[row], np.array(expected, np.uint64), err_msg=f"row {row}")


# ---------------------------------------------------------------------------------------------- floats

DIRECTED: list[Callable[[Fraction, Fraction, Fraction], Fraction]] = [
    lambda x, y, z: x + y,
    lambda x, y, z: x - y,
    lambda x, y, z: x * y,
    lambda x, y, z: x / y,
    lambda x, y, z: x * y + z,
    lambda x, y, z: 1 / x,
]


def test_arithmetic_in_every_direction() -> None:
    rng = np.random.default_rng(1)
    n = 600
    a, b, c = ((rng.normal(0, 1, n) * 2.0 ** rng.integers(-20, 20, n)).astype(np.float32) for _ in range(3))
    a[:100] = np.float32(1) + rng.integers(1, 9, 100) * np.float32(2**-23)  # products near halfway
    b[:100] = np.float32(1) + rng.integers(1, 9, 100) * np.float32(2**-23)
    c[:50] = c[:50] * np.float32(2.0**-80)  # far below the product, yet it decides
    a = np.abs(a)
    out = elementwise("floats", "directed", 28, np.float32, a, b, c)
    exact = [[Fraction(float(v)) for v in values] for values in (a, b, c)]
    for operation, function in enumerate(DIRECTED):
        for k, mode in enumerate(MODES):
            expected = [round_float(function(*xyz), mode) for xyz in zip(*exact, strict=True)]
            np.testing.assert_array_equal(out[4 * operation + k], expected, err_msg=f"operation {operation} {mode}")
    for k, mode in enumerate(MODES):
        np.testing.assert_array_equal(out[24 + k], [root_float(x, mode) for x in exact[0]], err_msg=f"sqrt {mode}")


def rounded(value: float, mode: str) -> int:
    functions: dict[str, Callable[[float], int]] = {NEAREST: round, ZERO: math.trunc, UP: math.ceil, DOWN: math.floor}
    return functions[mode](value)


def to_integer(value: float, mode: str, kind: str) -> int:
    limits = np.iinfo(kind)
    if math.isnan(value):
        result = -(2**63) if limits.bits == 64 else 0
    elif math.isinf(value):
        result = int(limits.max if value > 0 else limits.min)
    else:
        result = min(max(rounded(value, mode), int(limits.min)), int(limits.max))
    return result - 2**64 if result >= 2**63 else result


def test_conversions() -> None:
    rng = np.random.default_rng(2)
    n = 800
    double = rng.normal(0, 1, n) * 2.0 ** rng.integers(-3, 70, n)
    double[:10] = 0.5, 1.5, -2.5, np.nan, np.inf, -np.inf, 2.0**31, -(2.0**31), 2.0**63, 4294967295.5
    single = double.astype(np.float32)
    whole = rng.integers(-(2**63), 2**63 - 1, n) >> rng.integers(0, 62, n)
    whole[:6] = 2**24 + 1, 2**24 + 3, -(2**24) - 1, (1 << 53) + 1, (1 << 62) + (1 << 38) + 1, -1
    whole[whole == 0] = 7
    to, back = np.zeros((20, n), np.int64), np.zeros((15, n), np.float32)
    launch("floats", "conversions", -(-n // 128), 128, to, back, single, double, whole, n)

    rows = [(single, kind, mode) for kind in ("i4", "u4", "i8") for mode in MODES]
    rows += [(double, "i4", mode) for mode in MODES]
    rows += [(single, "u8", ZERO), (double, "u8", NEAREST), (double, "i8", DOWN), (double, "u4", ZERO)]
    for row, (values, kind, mode) in enumerate(rows):
        assert to[row].tolist() == [to_integer(float(v), mode, kind) for v in values], (row, kind, mode)

    sources: list[tuple[Any, str]] = [(whole.astype(np.int32), mode) for mode in MODES]
    sources += [(whole, mode) for mode in MODES]
    sources += [(whole.astype(np.uint64), NEAREST), (whole.astype(np.uint64), UP), (whole.astype(np.uint32), ZERO)]
    for row, (values, mode) in enumerate(sources):
        expected = [np.float32(0) if v == 0 else round_float(Fraction(v), mode) for v in values.tolist()]
        np.testing.assert_array_equal(back[row], expected, err_msg=f"row {row} {mode}")
    for row, mode in enumerate(MODES):
        finite = np.isfinite(double)
        expected = [round_float(Fraction(v), mode) for v in double[finite].tolist()]
        np.testing.assert_array_equal(back[11 + row][finite], expected, err_msg=f"double {mode}")


def test_functions() -> None:
    x = np.linspace(0.01, 7.99, 4000).astype(np.float32)
    out, wide = np.zeros((50, len(x)), np.float32), np.zeros((14, len(x)))
    launch("floats", "functions", 32, 128, out, wide, x, len(x))
    d = x.astype(np.float64)
    erf = np.array([math.erf(v) for v in d])
    normcdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in d])
    erfc = np.array([math.erfc(v) for v in d])
    sinpi = np.array([math.sin(math.pi * math.remainder(v, 2)) for v in d])
    cospi = np.array([math.cos(math.pi * math.remainder(v, 2)) for v in d])
    expected = [
        d**-0.5, d**-0.5, d**0.5, np.exp(d), np.exp2(d), np.log(d), np.log2(d), np.log10(d), np.log1p(d), np.expm1(d),
        np.sin(d), np.cos(d), np.tanh(d), erf, erfc, normcdf, np.cbrt(d) ** -1.0, np.cbrt(d), sinpi, cospi, d**1.5,
        d * d + 1, np.hypot(d, 2), np.sqrt(d * d + 5), d / 3, np.clip(d - 3, 0, 1), np.exp(d), np.log(d), np.log2(d),
        np.log10(d), d**1.5, np.sin(d), np.cos(d), np.tan(d), 10.0**d, d / 3, d**-0.5, np.sin(d), np.cos(d),
        np.sin(d), np.cos(d), 10.0**d, np.minimum(d, 2), np.maximum(d, 2), np.trunc(d), np.rint(d), -d,
        np.fmod(d, 1.5), np.minimum(d, 2), np.maximum(d, 2),
    ]  # fmt: skip
    fast = set(range(26, 37)) | {39, 40}  # their errors are many ulps, as on the GPU
    for row, value in enumerate(expected):
        relative = 3e-6 if row in fast else 3e-7
        np.testing.assert_allclose(out[row], value, rtol=relative, atol=3e-7, err_msg=f"row {row}")
    doubles = [
        d**-0.5, d**0.5, np.exp(d), np.log(d), erf, normcdf, sinpi, 1 / np.cbrt(d), d + 1, d * d, d * d + 1, d / 3,
        np.minimum(d, 2), np.maximum(d, 2),
    ]  # fmt: skip
    for row, value in enumerate(doubles):
        np.testing.assert_allclose(wide[row], value, rtol=1e-14, atol=1e-14, err_msg=f"double row {row}")


def test_special_values() -> None:
    out = np.zeros(17, np.float32)
    launch("floats", "special", 1, 1, out)
    expected = [1, 1, -np.inf, np.inf, 2, 0, np.nan, 1, 1, 1, 0, np.inf, 0, np.float32(np.pi), 1, 1, 2]
    np.testing.assert_array_equal(out, np.array(expected, np.float32))
