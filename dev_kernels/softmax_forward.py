"""Softmax over rows that may be long: out[r, c] = exp(inp[r, c]) / sum over c2 of exp(inp[r, c2])."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kbench.contracts import row_ring
from kbench.family import (
    ITEM_SIZES,
    POWERS_OF_TWO,
    WARP,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Param,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    ceil_div,
)

DTYPES = ("fp32", "bf16", "fp16")


# ---------------------------------------------------------------------------------------------- tensors

OUTLIERS = 3  # elements per row that are OUTLIER times as large as the others
OUTLIER = 20.0
# The last element of rows r with r % 4 == 2: the largest by far is in the last warp, and exp of it overflows.
LAST = 120.0
# The first element of odd rows: other terms are below half an ulp of a sum of exp(17.5).
FIRST = 17.5
# Added to row r, by r % 4. A softmax does not depend on it, but exp(90) is above all fp32 numbers and exp(-90) below
# all normal ones.
SHIFTS = (0.0, 90.0, 0.0, -90.0)


def _logits(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    import numpy as np  # here, so that `kbench list` need not wait for it

    N, C = shape
    values = rng.uniform(-1.0, 1.0, shape)
    values[np.arange(N)[:, None], rng.integers(0, C, (N, OUTLIERS))] *= OUTLIER
    values[2::4, -1] = LAST
    values[1::2, 0] = FIRST
    values += np.resize(np.float32(SHIFTS), (N, 1))
    return values


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    shape = (problem["N"], problem["C"])
    return (
        Tensor("inp", shape, problem.storage, "in", ("n", "c"), draw=_logits),
        Tensor("out", shape, problem.storage, "out", ("n", "c")),
    )


# -------------------------------------------------------------------------------------------- reference

# Relative error, in units of u, of exp(x - max) as versions compute it, per unit of max - x: 1 from rounding the
# difference, 2.35 from __expf (1.173 ulp per unit of its argument); and apart from that 2 ulp.
EXP_SLOPE = 3.5
EXP_ULPS = 4.0


def _relative(columns: int, error: ErrorModel) -> float:
    """Relative error of the sum of exponentials and of what follows, per element, but for EXP_SLOPE.

    Beside accumulation: a lane of a warp adds columns / 32 numbers by itself. Where it met the largest element first,
    its sum is 1, and smaller ones lose up to half an ulp each, all of the same sign: nothing random. (Threads that add
    more than that by themselves have to compensate.) The mean of max - x over the terms, weighted with the terms, is at
    most log(columns). An online sum is rescaled by an exponential and a product whenever a larger number comes: for
    numbers in random order log(columns) times. Then the numerator, a reciprocal and a product.
    Nothing is stored in the type of `out` before it is final.
    """
    logarithm = math.log(columns)
    rescaled = (EXP_ULPS + 1.0) * (1.0 + logarithm)
    rounded = columns / WARP + EXP_SLOPE * logarithm + rescaled + 2.0 * EXP_ULPS + 3.0
    return error.accumulation(columns) + error.fp32 * rounded


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """In place: it holds the answer and nothing else of its size."""
    inp = inputs["inp"]
    value = inp - inp.max(axis=1, keepdims=True)
    bound = value.astype(xp.float32)
    xp.exp(value, out=value)
    value /= value.sum(axis=1, keepdims=True)
    bound *= -EXP_SLOPE * error.fp32
    bound += _relative(problem["C"], error)
    bound *= value
    return {"out": Expected(value, bound)}


# ------------------------------------------------------------------------------------------------ plans


PlanFunction = Callable[[Problem, int, Props], tuple[Step, ...]]


def _rows_per_block(kernel: str, threads: int) -> PlanFunction:
    """`threads` threads have one row."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        N, C = problem["N"], problem["C"]
        grid = (ceil_div(N, block // threads),)
        return (Launch(f"{kernel}<{problem.c_type}>", grid, (block,), ("out", "inp", N, C)),)

    return plan


def _block_per_row(kernel: str, shared_per_thread: int = 0) -> PlanFunction:
    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        args = ("out", "inp", problem["C"])
        return (Launch(f"{kernel}<{problem.c_type}>", (problem["N"],), (block,), args, shared_per_thread * block),)

    return plan


def _plan7(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """As many blocks as run at the same time, with rows in shared memory; else a block per row."""
    N, C = problem["N"], problem["C"]
    ring = row_ring(C * ITEM_SIZES[problem.storage], block, props)
    if ring is None:
        return _block_per_row("softmax_forward7_long")(problem, block, props)
    blocks, ahead, shared = ring
    grid = (min(N, blocks * props.multiprocessors),)
    return (Launch(f"softmax_forward7<{problem.c_type}, {ahead}>", grid, (block,), ("out", "inp", N, C), shared),)


# Of a lane, under way at the same time. The sum is rescaled once for 16 elements: four packets in fp32.
BATCH = Param(default=4, values=(4, 8), meaning="packets of a lane that are loaded at once")


def _plan8(problem: Problem, block: int, props: Props, BATCH: int) -> tuple[Step, ...]:
    N, C = problem["N"], problem["C"]
    grid = (ceil_div(N, block // WARP),)
    return (Launch(f"softmax_forward8<{problem.c_type}, {BATCH}>", grid, (block,), ("out", "inp", N, C)),)


# ----------------------------------------------------------------------------------------------- family


def _shape(N: int, C: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0) -> CheckShape:
    return CheckShape({"N": N, "C": C}, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, "one of everything"),
    _shape(5, 2, "fewer elements than a packet: rows that have edges only"),
    _shape(9, 13, "fewer elements than lanes, rows with and without a packet of 16-bit numbers"),
    _shape(3, 31, "one element short of a warp"),
    _shape(4, 64, "aligned rows"),
    _shape(2, 257, "one past a block of 256"),
    _shape(67, 33, "more rows than a block of 64 has threads or warps", (1, 5, 6, 8), 64),
    _shape(37, 17, "more short rows than blocks run at the same time", (7,), 1024),
    _shape(7, 9001, "rows shorter than what is loaded ahead, more than blocks run at the same time", (7,), 1024),
    _shape(4, 37003, "long rows, which leave room to load three steps ahead", (7,), 1024),
    _shape(4, 45061, "longer rows, which leave room for one step", (7,), 1024),
    _shape(3, 1031, "prime length: several elements of every thread", None, 64),
    _shape(7, 1096, "aligned rows, more than a batch of packets per thread", (7, 8), 32),
    _shape(16, 8192, "sums of so many terms that they have to be compensated, online", (5,), 32),
    _shape(1, 2053, "a long row", (2, 4, 6, 8), 1024),
    _shape(2, 117001, "rows that do not fit into shared memory in any type", (7,), 1024),
)

EVERY_NUMBER_OF_WARPS = tuple(sorted((*POWERS_OF_TWO, 96, 768)))  # trees need no power of two

FAMILY = Family(
    name="softmax_forward",
    summary="softmax over rows that may be long",
    sizes={"N": "rows", "C": "columns"},
    dtypes=DTYPES,
    presets={
        "default": {"N": 8192, "C": 50257},
        "small": {"N": 48, "C": 1027},
        "large": {"N": 32768, "C": 8192},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1, "one thread per row, three passes; the sum of so many terms is compensated",
            _rows_per_block("softmax_forward1", 1), DTYPES,
        ),
        Version(
            2, "one block per row: trees in shared memory combine the threads' results",
            _block_per_row("softmax_forward2", 4), DTYPES, EVERY_NUMBER_OF_WARPS,
        ),
        Version(
            3, "one warp per row: shuffles in place of trees, no shared memory, no barriers",
            _block_per_row("softmax_forward3"), DTYPES, fixed=WARP,
        ),
        Version(
            4, "one block per row: shuffles within warps, then thread 0 combines the warps' results",
            _block_per_row("softmax_forward4"), DTYPES,
        ),
        Version(
            5, "as 1, online: the largest and the sum in one pass, so two passes in all",
            _rows_per_block("softmax_forward5", 1), DTYPES,
        ),
        Version(
            6, "one warp per row, online: lanes merge pairs of largest and sum",
            _rows_per_block("softmax_forward6", WARP), DTYPES,
        ),
        Version(
            7, "one block per row, online, read once: it waits in shared memory while the next comes", _plan7, DTYPES
        ),
        Version(
            8, "as 6, 16 bytes per access; lanes agree on the largest before they add up their sums",
            _plan8, DTYPES, params={"BATCH": BATCH},
        ),
    ),
)  # fmt: skip
