"""Gradients of the embeddings: dwte[inp[b, t], :] += dout[b, t, :] and dwpe[t, :] += dout[b, t, :] over all b and t."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
    PACKET_BYTES,
    POWERS_OF_TWO,
    WARP,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Fill,
    Launch,
    Problem,
    Props,
    Ref,
    Rule,
    Step,
    Tensor,
    Version,
    ceil_div,
    integers,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")
VECTOR = 4  # floats that are added to memory at once

# Of the kernels that only prepare or finish: their blocks are not those of a version.
OTHER_BLOCK = 256


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, V = (problem[name] for name in ("B", "T", "C", "V"))
    dtype = problem.storage
    scale = _gradient_scale(B * T)

    def gradient(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Tensor:
        if problem["accumulate"]:
            return Tensor(name, shape, dtype, "inout", axes, draw=normal(-0.2 * scale, 0.9 * scale))
        return Tensor(name, shape, dtype, "out", axes)

    return (
        Tensor("dout", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1 * scale, 0.7 * scale)),
        Tensor("inp", (B, T), "int32", "in", ("b", "t"), draw=integers(0, V)),
        gradient("dwte", (V, C), ("v", "c")),
        gradient("dwpe", (T, C), ("t", "c")),
    )


def _gradient_scale(positions: int) -> float:
    """Gradients of a mean over many positions are small, so their sums are numbers of fp16, which ends at 65504, even
    where all positions have the same token and the largest gradient of patterned inputs, 4.3 before it is scaled."""
    return min(1.0, 10000.0 / positions)


def _scratch(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    if problem.storage == "fp32":
        return ()
    positions = problem["B"] * problem["T"]
    return (
        Tensor("sums", (positions, problem["C"]), "fp32", "scratch", ("position", "c")),
        Tensor("rows", (positions,), "int32", "scratch", ("position",)),
        Tensor("last", (problem["V"],), "int32", "scratch", ("v",)),
    )


def _traffic(problem: Problem) -> float:
    """dout and inp once, dwpe once or twice. Of dwte, where it accumulates, one row per position is read and written,
    but no more rows than there are; else all rows are written."""
    B, T, C, V = (problem[name] for name in ("B", "T", "C", "V"))
    rows = 2 * (T + min(B * T, V)) if problem["accumulate"] else T + V
    return float((B * T + rows) * C * ITEM_SIZES[problem.storage] + B * T * ITEM_SIZES["int32"])


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """All sums are accumulated in fp32, the start value being one more term; rows that no position has stay as they
    are."""
    B, T, C, V = (problem[name] for name in ("B", "T", "C", "V"))
    tokens = inputs["inp"].astype(xp.int64).reshape(-1)
    dout = inputs["dout"]
    size = xp.abs(dout).astype(xp.float32)
    counts = xp.bincount(tokens, minlength=V)
    if problem["accumulate"]:
        dwte, dwpe = inputs["dwte"].copy(), inputs["dwpe"].copy()
    else:
        dwte, dwpe = xp.zeros((V, C)), xp.zeros((T, C))

    dwte_bound = xp.abs(dwte).astype(xp.float32) * (counts > 0)[:, None].astype(xp.float32)
    xp.add.at(dwte, tokens, dout.reshape(B * T, C))
    xp.add.at(dwte_bound, tokens, size.reshape(B * T, C))
    dwte_bound *= error.accumulation(int(counts.max()) + 1)

    dwpe_bound = (xp.abs(dwpe).astype(xp.float32) + size.sum(axis=0)) * error.accumulation(B + 1)
    dwpe += dout.sum(axis=0)
    return {"dwte": Expected(dwte, dwte_bound), "dwpe": Expected(dwpe, dwpe_bound)}


# ------------------------------------------------------------------------------------------------ plans


def _width(problem: Problem) -> int:
    """Channels per thread."""
    return VECTOR if problem["C"] % VECTOR == 0 else 1


def _steps(problem: Problem, kernel: str, threads: int, block: int) -> tuple[Step, ...]:
    """The version's own kernel, and around it what its sums need."""
    B, T, C, accumulate = (problem[name] for name in ("B", "T", "C", "accumulate"))
    positions = B * T
    clear = () if accumulate else (Fill(Ref("dwte")),)

    def add(sums: str, rows: str) -> Launch:
        args = (sums, "dwpe", "dout", rows, B, T, C, accumulate)
        return Launch(kernel, (ceil_div(threads, block),), (block,), args)

    def other(kernel: str, threads: int, *args: str | int) -> Launch:
        return Launch(kernel, (ceil_div(threads, OTHER_BLOCK),), (OTHER_BLOCK,), args)

    if problem.storage == "fp32":
        return (*clear, add("dwte", "inp"))
    add_rows, width = f"add_rows<{problem.c_type}, {_width(problem)}>", _width(problem)
    return (
        *clear,
        Fill(Ref("sums")),
        Fill(Ref("last"), -1),
        other("find_last", positions, "last", "inp", positions),
        other("find_rows", positions, "rows", "last", "inp", positions),
        add("sums", "rows"),
        other(add_rows, positions * (C // width), "dwte", "sums", "rows", "inp", positions, C),
    )


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    width = _width(problem)
    threads = problem["T"] * (problem["C"] // width)
    return _steps(problem, f"encoder_backward1<{problem.c_type}, {width}>", threads, block)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return _steps(problem, f"encoder_backward2<{problem.c_type}>", problem["C"], block)


# ------------------------------------------------------------------------------------------------ sorted

DIGIT_BITS = 8  # of tokens, sorted by in one pass
DIGITS = 1 << DIGIT_BITS  # and threads of a block that sorts
JOIN_BLOCK = 4 * WARP  # kJoinWarps of encoder_backward.cu

BLOCKS3 = POWERS_OF_TWO[:-1]  # up to kMaxBlock of encoder_backward.cu

# Sorted positions that a warp adds up. Shorter pieces: more parts of runs to be joined; longer ones: more rounds of
# loads that wait for one another, and a warp has a lane for each. A multiprocessor has 25 warps of 80 registers a
# thread at the same time: a few more keep it busy to the end.
SHORTEST_PIECE, LONGEST_PIECE = 8, WARP
WARPS_PER_MULTIPROCESSOR = 32


def _passes(V: int) -> int:
    """Digits that tells tokens apart. At least one: a pass also writes what is read later."""
    return max(1, ceil_div((V - 1).bit_length(), DIGIT_BITS))


def _tile_bits(positions: int, props: Props) -> int:
    """Positions of a block that sorts are 2 to this power: no less than it has threads, and as many as leave no more
    blocks than multiprocessors, since every block adds up the counts of all."""
    bits = DIGIT_BITS
    while ceil_div(positions, 1 << bits) > props.multiprocessors:
        bits += 1
    return bits


def _stripes(problem: Problem) -> int:
    """Parts of a row that a warp has a packet per lane of."""
    return ceil_div(problem["C"] * ITEM_SIZES[problem.storage], PACKET_BYTES * WARP)


def _piece(problem: Problem, props: Props) -> int:
    """Positions in a piece: the most that leave a piece to every warp that runs at the same time."""
    positions, stripes = problem["B"] * problem["T"], _stripes(problem)
    length = LONGEST_PIECE
    while (
        length > SHORTEST_PIECE
        and ceil_div(positions, length) * stripes < WARPS_PER_MULTIPROCESSOR * props.multiprocessors
    ):
        length //= 2
    return length


def _scratch3(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    positions = problem["B"] * problem["T"]
    tiles = ceil_div(positions, 1 << _tile_bits(positions, props))
    pieces, lanes = ceil_div(positions, _piece(problem, props)), _stripes(problem) * WARP
    width = lanes * PACKET_BYTES // ITEM_SIZES[problem.storage]
    return (
        Tensor("tokens", (2, positions), "int32", "scratch", ("order", "position")),
        Tensor("rows", (2, positions), "int32", "scratch", ("order", "position")),
        Tensor("counts", (_passes(problem["V"]), tiles, DIGITS), "int32", "scratch", ("pass", "tile", "digit")),
        Tensor("parts", (pieces, 2, width), "fp32", "scratch", ("piece", "began before", "c")),
    )


def _sort(problem: Problem, props: Props) -> tuple[tuple[Step, ...], int]:
    """The steps that sort, and which of the two orders holds the result."""
    positions, passes = problem["B"] * problem["T"], _passes(problem["V"])
    bits = _tile_bits(positions, props)
    tiles = ceil_div(positions, 1 << bits)
    steps = [Launch("count_digits", (tiles,), (DIGITS,), ("counts", "inp", positions, bits, passes))]
    for number in range(passes):
        source, target = positions * ((number + 1) % 2), positions * (number % 2)
        first, last = number == 0, number == passes - 1
        kernel = f"sort_by_digit<{str(first).lower()}, {str(last).lower()}>"
        args = (
            Ref("tokens", target),
            Ref("rows", target),
            Ref("counts", 0 if last else (number + 1) * tiles * DIGITS),
            "inp" if first else Ref("tokens", source),
            Ref("rows", source),
            Ref("counts", number * tiles * DIGITS),
            positions,
            bits,
            number,
        )
        steps.append(Launch(kernel, (tiles,), (DIGITS,), args))
    return tuple(steps), (passes - 1) % 2


def _plan3(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    B, T, C, accumulate = (problem[name] for name in ("B", "T", "C", "accumulate"))
    positions, stripes, length = B * T, _stripes(problem), _piece(problem, props)
    packet = PACKET_BYTES // ITEM_SIZES[problem.storage]
    types = f"<{problem.c_type}, {'true' if C % packet == 0 else 'false'}>"
    sort, order = _sort(problem, props)
    tokens, rows = (Ref(name, order * positions) for name in ("tokens", "rows"))
    pieces = ceil_div(positions, length)
    place_blocks = ceil_div(T * ceil_div(C, packet), block)
    grid = place_blocks + ceil_div(pieces * stripes, block // WARP)
    args = ("dwte", "dwpe", "parts", "dout", tokens, rows, B, T, C, length, stripes, place_blocks, accumulate)
    add = Launch(f"encoder_backward3{types}", (grid,), (block,), args)
    join_args = ("dwte", "parts", tokens, positions, C, length, stripes, accumulate)
    join = Launch(f"join_parts{types}", (pieces * stripes,), (JOIN_BLOCK,), join_args)
    clear = () if accumulate else (Fill(Ref("dwte")),)
    return (*clear, *sort, add, *((join,) if pieces > 1 else ()))


# ----------------------------------------------------------------------------------------------- family


def _sizes(B: int, T: int, C: int, V: int, accumulate: int = 1) -> dict[str, int]:
    return {"B": B, "T": T, "C": C, "V": V, "accumulate": accumulate}


FAMILY = Family(
    name="encoder_backward",
    summary="gradients of the token and position embeddings",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "C": "channels",
        "V": "vocabulary size",
        "accumulate": "1: add to dwte and dwpe, 0: replace them",
    },
    flags=("accumulate",),
    dtypes=DTYPES,
    presets={
        "default": _sizes(8, 1024, 768, 50257),
        "small": _sizes(4, 64, 64, 1000),
        "large": _sizes(4, 12288, 2048, 50257),
    },
    check_shapes=(
        CheckShape(_sizes(1, 1, 1, 1), "one of everything"),
        CheckShape(_sizes(1, 3, 2, 5, 0), "fewer positions than tokens, replaced: the other rows become 0"),
        CheckShape(_sizes(3, 5, 7, 11), "odd sizes: rows are not aligned; rows that do not occur stay"),
        CheckShape(_sizes(5, 7, 8, 2, 0), "aligned rows, two tokens only, one batch row past a group of two"),
        CheckShape(_sizes(4, 37, 24, 50), "aligned rows, whole groups of two batch rows, tokens that repeat"),
        CheckShape(_sizes(9, 31, 33, 300, 0), "prime length, one channel past 32, few repetitions"),
        CheckShape(_sizes(2, 3, 1032, 4), "more channels than a block has threads"),
        CheckShape(_sizes(3, 263, 1, 300), "two digits, blocks that sort more positions than they have threads", (3,)),
        CheckShape(_sizes(3, 263, 5, 1, 0), "one token, of over 32 parts", (3,), (32, 256)),
        CheckShape(_sizes(2, 171, 16, 3), "few tokens, of several parts each; aligned", (3,), (64, 512)),
        CheckShape(
            _sizes(5, 613, 1, 70), "pieces of as many positions as a warp has lanes, the last one shorter", (3,), (128,)
        ),
        CheckShape(_sizes(2, 150, 2, 70001, 0), "three digits", (3,), (512,)),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1,
            "one thread per four channels of each t: atomic additions to dwte, none to dwpe",
            _plan1,
            DTYPES,
            claims_deterministic=False,
            scratch=_scratch,
        ),
        Version(
            2,
            "one thread per channel, over all positions: deterministic, but slow (only C threads)",
            _plan2,
            DTYPES,
            scratch=_scratch,
        ),
        Version(
            3,
            "positions sorted by token on the device, those of one token added up in registers: deterministic and fast",
            _plan3,
            DTYPES,
            BLOCKS3,
            scratch=_scratch3,
            rules=(Rule("B * T at most 2^30", lambda problem: problem["B"] * problem["T"] <= 1 << 30),),
        ),
    ),
    traffic=_traffic,
)
