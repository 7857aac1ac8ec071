"""Warp operations, cooperative groups, atomics, memory and the language itself, through the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from header_support import CACHED, SHUFFLED, TILES, launch, line_of, module_of, try_launch
from runtime_support import needs_compiler

from kbench.device.arguments import parse_signature

pytestmark = [pytest.mark.emulator, needs_compiler]

LANES = np.arange(32)
schedules = pytest.mark.parametrize("schedule", ("forward", "reverse", "random"))


# ---------------------------------------------------------------------------------------------- warps


def shuffled(value: Any, argument: int, width: int) -> list[Any]:
    """What each lane gets: out of its own segment of `width` lanes, or its own value."""
    first, rank = LANES & -width, LANES & (width - 1)
    up = np.where(rank >= argument, LANES - argument, LANES)
    down = np.where(rank + argument < width, LANES + argument, LANES)
    xor = np.where((LANES ^ argument) < first + width, LANES ^ argument, LANES)
    return [value[source] for source in (first + argument % width, up, down, xor, 31 - LANES)]


@schedules
@pytest.mark.parametrize("name", SHUFFLED)
def test_shuffles(name: str, schedule: str) -> None:
    kind = SHUFFLED[name]
    rng = np.random.default_rng(1)
    value = rng.integers(1, 255, 32 * np.dtype(kind).itemsize, dtype=np.uint8).view(kind)  # all bytes differ
    for argument, width in ((0, 32), (3, 32), (16, 32), (1, 16), (5, 8), (2, 4), (1, 2)):
        out = np.zeros((5, 32), kind)
        launch("warp", f"shuffles<{name}>", 1, 32, out, value, argument, width, schedule=schedule)
        bits = f"u{np.dtype(kind).itemsize}"
        for row, expected in enumerate(shuffled(value, argument, width)):
            np.testing.assert_array_equal(out[row].view(bits), expected.view(bits), err_msg=f"{row} {argument} {width}")


@schedules
def test_partial_masks(schedule: str) -> None:
    value = np.arange(32, dtype=np.int32) ** 2
    out = np.zeros(32, np.int32)
    launch("warp", "partial", 1, 32, out, value, schedule=schedule)
    low = value[:16] + value[np.arange(16) ^ 8]
    low = low + low[np.where(np.arange(16) + 4 < 16, np.arange(16) + 4, np.arange(16))]
    np.testing.assert_array_equal(out, [*low, *[31**2] * 16])


def test_votes_matches_and_reductions() -> None:
    rng = np.random.default_rng(3)
    value = rng.integers(-100, 100, 32).astype(np.int32)
    real = rng.integers(0, 3, 32).astype(np.float32)
    out = np.zeros((21, 32), np.uint32)
    launch("warp", "votes", 1, 32, out, value, real)

    def mask(lanes: Any) -> int:
        return int((lanes.astype(np.uint64) << LANES.astype(np.uint64)).sum())

    def equal_lanes(keys: Any) -> list[int]:
        return [mask(keys == key) for key in keys]

    unsigned = value.astype(np.uint32)
    full = 2**32 - 1
    expected = [
        mask(value > 0), (value > 90).any(), (value > -101).all(), (value > 0).all() or (value <= 0).all(),
        equal_lanes((value / 40).astype(int)), equal_lanes(real), equal_lanes(value >> 2), full, 1, 0, 0,
        *(int(number) % 2**32 for number in (value.sum(), value.min(), value.max(), unsigned.sum())), unsigned.min(),
        unsigned.max(), np.bitwise_and.reduce(unsigned), np.bitwise_or.reduce(unsigned),
        np.bitwise_xor.reduce(unsigned), full,
    ]  # fmt: skip
    for row, wanted in enumerate(expected):
        every_lane = np.broadcast_to(np.array(wanted).astype(np.uint32), 32)
        np.testing.assert_array_equal(out[row], every_lane, err_msg=f"row {row}")


# ---------------------------------------------------------------------------------------------- groups


def test_groups_know_who_they_are() -> None:
    out = np.zeros((21, 160), np.uint32)
    launch("groups", "identities", (2, 1), (20, 4), out)  # 80 threads: two warps and a half
    block, rank = np.divmod(np.arange(160), 80)
    expected: list[Any] = [
        rank, 80, 80, rank // 20, block, 20, np.arange(160), 160, block, 2, rank % 32, 32, rank // 32, 3, rank % 8, 8,
        rank % 32 // 8, 4, rank % 32 // 8, rank, 8,
    ]  # fmt: skip
    for row, wanted in enumerate(expected):
        np.testing.assert_array_equal(out[row], np.broadcast_to(wanted, 160), err_msg=f"row {row}")


def butterfly(value: Any, size: int, operation: Any) -> Any:
    """The GPU's order of a reduction, in the type of `value`."""
    value, lane = value.copy(), np.arange(len(value))
    while size > 1:
        size //= 2
        value = operation(value, value[lane ^ size])
    return value


def doubling(tiles: Any, operation: Any) -> Any:
    """The GPU's order of a scan; one tile a row."""
    tiles, distance = tiles.copy(), 1
    while distance < tiles.shape[1]:
        before = tiles.copy()
        tiles[:, distance:] = operation(before[:, distance:], before[:, :-distance])
        distance *= 2
    return tiles


@schedules
@pytest.mark.parametrize("size", TILES)
def test_tiles(size: int, schedule: str) -> None:
    threads = 96
    value = np.random.default_rng(size).normal(0, 1, threads).astype(np.float32)
    out = np.zeros((18, threads), np.float32)
    launch("groups", f"tiles<{size}>", 1, threads, out, value, schedule=schedule)
    thread, key = np.arange(threads), (value * 2).astype(np.int32)
    rank, first = thread % size, thread - thread % size
    tiles, keys = value.reshape(-1, size), key.reshape(-1, size)
    scanned = doubling(tiles, np.add)
    exclusive = np.concatenate([np.zeros((len(tiles), 1), np.float32), scanned[:, :-1]], axis=1)
    bits = 1 << np.arange(size)
    total = butterfly(value, size, np.add)

    def per_tile(values: Any) -> Any:
        return np.repeat(values, size)

    expected = [
        total, per_tile(tiles.max(1)), per_tile(tiles.min(1)), per_tile(tiles.max(1)), total,
        per_tile(np.bitwise_xor.reduce(keys, axis=1)), scanned.ravel(), exclusive.ravel(),
        np.maximum.accumulate(keys, axis=1).ravel(), value[first + size - 1],
        value[np.where(rank > 0, thread - 1, thread)], value[np.where(rank < size - 1, thread + 1, thread)],
        value[first + (rank ^ size // 2)], per_tile((tiles > 0.9).any(1)), per_tile((tiles > np.float32(0.1)).all(1)),
        per_tile(((tiles > 0) * bits).sum(1) & 0xFFFF),
        np.array([((keys[t // size] == key[t]) * bits).sum() & 0xFFFF for t in thread]),
        per_tile(np.full(len(tiles), (2**size - 1 & 0xFFFF) + 1)),
    ]  # fmt: skip
    for row, wanted in enumerate(expected):
        np.testing.assert_array_equal(out[row], wanted.astype(np.float32), err_msg=f"row {row}")


def test_structures_are_shuffled_whole() -> None:
    out = np.zeros((3, 32), np.float32)
    launch("groups", "structures", 1, 32, out)
    source = np.minimum(LANES + 1, 31)
    np.testing.assert_array_equal(out, [source, source * 2, source * 0.5])


@schedules
def test_coalesced_groups_count_ranks_not_lanes(schedule: str) -> None:
    value = np.random.default_rng(5).integers(-50, 50, 32).astype(np.int32)
    out = np.zeros((8, 32), np.int32)
    launch("groups", "coalesced", 1, 32, out, value, schedule=schedule)
    odd = value[1::2]
    expected = [np.arange(16), 16, odd.sum(), odd[2], odd[[0, *range(15)]], int(((odd > 0) << np.arange(16)).sum())]
    for row, wanted in enumerate(expected):
        np.testing.assert_array_equal(out[row, 1::2], np.broadcast_to(wanted, 16), err_msg=f"row {row}")
        assert (out[row, ::2] == -1).all()
    scans = np.zeros(32, np.int32)
    for third in range(3):
        scans[third::3] = np.cumsum(value[third::3])
    np.testing.assert_array_equal(out[6], scans)
    np.testing.assert_array_equal(out[7], LANES % 3 * 10 + 3)


def test_a_full_coalesced_group_reduces_like_a_warp() -> None:
    value = np.random.default_rng(6).normal(0, 1, 32).astype(np.float32)
    out = np.zeros(32, np.float32)
    launch("groups", "whole_warp_coalesced", 1, 32, out, value)
    np.testing.assert_array_equal(out, butterfly(value, 32, np.add))


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", CACHED)
def test_cached_loads_and_stores(name: str) -> None:
    source = np.random.default_rng(7).integers(0, 256, 1024 + 16, dtype=np.uint8)
    start = -source.ctypes.data % 16
    source = source[start : start + 1024]
    target = np.zeros(1024 + 16, np.uint8)
    start = -target.ctypes.data % 16
    target = target[start : start + 1024]
    launch("memory", f"copy<{name}>", 1, 32, target, source, 1024)
    np.testing.assert_array_equal(target, source)


def test_vectors() -> None:
    out = np.zeros(8, np.float32)
    launch("memory", "vectors", 1, 1, out)
    assert out.tolist() == [41, 7, 255, 91, 0, 255, 2.5, 3]


@schedules
def test_contended_atomics(schedule: str) -> None:
    blocks, threads = 24, 64
    n = blocks * threads
    words = np.array([0, 0, 0, 0, 0, 0, 0, 0, 2**32 - 1, 7, 1], np.uint32)
    words[5] = 150  # above the limit of atomicDec, which starts it over
    floats, doubles = np.zeros(4, np.float32), np.zeros(1)
    halves, bfloats = np.zeros(4, np.uint16), np.zeros(4, np.uint16)
    wide = np.zeros(3, np.uint64)
    launch("atomics", "contended", blocks, threads, words, floats, doubles, halves, bfloats, wide, schedule=schedule)
    result = words.view(np.int32)
    down = 150
    for _ in range(n):
        down = 99 if down == 0 or down > 99 else down - 1
    chain = 1
    for _ in range(n):
        chain = (chain * 3 + 1) % 2**32
    assert result[:8].tolist() == [n, -2 * n, n - 1, -(n - 1), n % 100, down, 0, -1]
    assert words[8:].tolist() == [1 << 31, 7, chain]
    assert floats.tolist() == [n, 0, n, 2 * n]
    assert doubles.tolist() == [n / 2]
    assert halves.view(np.float16).tolist() == [n, 0, n, -n]
    # 0.25 added until it is half a unit in the last place of the bfloat16 sum: there the sum stays.
    assert (bfloats.astype(np.uint32) << 16).view(np.float32).tolist() == [64, 0, 64, -64]
    assert wide.tolist() == [n << 33, (n - 1) << 40, 2**64 - ((n - 1) << 40)]


def test_atomics_return_what_was_there() -> None:
    cell, word, wide = np.array([10], np.int32), np.array([2], np.uint32), np.array([5], np.uint64)
    real, narrow = np.array([2.5], np.float32), np.array([3], np.uint16)
    out = np.zeros(24, np.int64)
    launch("atomics", "returned", 1, 1, out, cell, word, wide, real, narrow)
    expected = [10, 15, 8, 40, 30, 50, 2, 11, 14, 77, 77, 2, 3, 0, 9, 8, 5, 2**50, 3, 2, 4, 8, 3, 9]
    assert out.tolist() == expected


# ---------------------------------------------------------------------------------------------- language


@schedules
def test_words_and_shared_memory(schedule: str) -> None:
    out = np.zeros(64, np.int32)
    launch("language", "words", 1, 64, out, 1000, shared=64 * 8, schedule=schedule)
    other = 63 - np.arange(64)
    np.testing.assert_array_equal(out, 1000 + (2 * (other + 1)) ** 2 + other % 4 + 1 + other + 100)


def test_each_block_has_its_own_shared_memory() -> None:
    wrong = np.zeros(1, np.int32)
    launch("language", "private_to_the_block", 400, 32, wrong, 50)
    assert wrong[0] == 0


@schedules
def test_block_votes(schedule: str) -> None:
    out = np.zeros((4, 70), np.int32)
    launch("language", "barriers", 1, 70, out, schedule=schedule)
    for row, wanted in enumerate((24, 2, 2, 1)):
        assert (out[row] == wanted).all(), row


def test_indices() -> None:
    grid, block = (3, 2, 4), (5, 3, 2)
    out = np.zeros((24, 30), np.uint32)
    launch("language", "indices", grid, block, out)
    np.testing.assert_array_equal(out, np.arange(24)[:, None] * 1000 + np.arange(30))


@pytest.mark.parametrize(
    "kernel, kind, extra, expected",
    [
        ("static_cast<void (*)(float*)>(overloaded)", "f4", (), 1),
        ("(void (*)(int*))overloaded", "i4", (), 2),
        ("templated<float>", "f4", (), 5),
        ("templated<int, 3>", "i4", (), 3),
        ("templated<4>", "f4", (6,), 10),
        ("inner::scoped<true>", "f4", (), 7),
        ("c_linkage", "f4", (), 9),
        ("internal", "f4", (), 10),
    ],
)
def test_every_kind_of_name_can_be_launched(kernel: str, kind: str, extra: tuple[int, ...], expected: int) -> None:
    out = np.zeros(1, kind)
    launch("language", kernel, 1, 1, out, *extra)
    assert out[0] == expected


def test_signatures_and_parameters() -> None:
    parameters = module_of("language").kernels["many"].parameters
    assert parameters == parse_signature("*f f d l y o s&i x")
    out, g = np.zeros(1, np.float32), np.array([64], np.int32)
    h = (ctypes.c_float * 4)(0, 0, 0, 128)
    launch("language", "many", 1, 1, out, 1.0, 2.0, 4, 8, True, 32, g, h)
    assert out[0] == 1 + 2 + 4 + 8 + 1 + 32 + 64 + 128


@pytest.mark.parametrize(
    "kernel, args, threads, kind, words, line",
    [
        ("asserts", (0,), 32, "assert", "n > 0", "assert(n > 0"),
        ("traps", (), 1, "trap", "__trap", "    __trap();"),
        ("grid_barrier", (), 32, "trap", "gpu_only", "this_grid().sync()"),
        ("divergent_group", (np.zeros(64, np.float32),), 64, "barrier-divergence", "sync", "groups::sync(block)"),
    ],
)
def test_faults_name_the_line_of_the_call(
    kernel: str, args: Any, threads: int, kind: str, words: str, line: str
) -> None:
    report = try_launch("language", kernel, 1, threads, *args)
    assert report is not None
    assert report.kind.decode() == kind
    assert words in report.message.decode()
    assert report.file.decode().endswith("language.cu")
    expected = line_of("language", line)
    assert report.line == expected or f"language.cu:{expected}" in report.message.decode(), report.message.decode()


def test_printf(capfd: pytest.CaptureFixture[str]) -> None:
    launch("language", "prints", 1, 32, 42)
    captured = capfd.readouterr()
    assert "value 42 of printf" in captured.err
    assert captured.out == ""  # standard output belongs to --json
