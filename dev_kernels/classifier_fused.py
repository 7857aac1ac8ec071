"""Softmax, cross-entropy loss and the gradient of the logits in one kernel, over rows with padding.

losses = -log p[target],  dlogits = (p - onehot(target)) * dlosses,  p = softmax of the first V of P logits
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from kbench.contracts import row_ring
from kbench.family import (
    ITEM_SIZES,
    PACKET_BYTES,
    WARP,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Rule,
    Step,
    Tensor,
    Version,
    ceil_div,
    integers,
    uniform,
)

DTYPES = ("fp32", "bf16", "fp16")


# ---------------------------------------------------------------------------------------------- tensors

OUTLIERS = 3  # logits per row that are OUTLIER times as large as the others
OUTLIER = 20.0
# Of rows r with r % 4 == 2: outliers reach 120, so that probabilities are 0 in fp32, and their logarithms no losses.
FURTHER = 6.0
# Added to row r, by r % 4. No result depends on it, but exp(90) is above all fp32 numbers and exp(-90) below all
# normal ones.
SHIFTS = (0.0, 90.0, 0.0, -90.0)
JUNK = 1e4  # in the padding: larger than all logits, so that one that is read wins the softmax


def _logits(V: int) -> Callable[[Any, tuple[int, ...], Mapping[str, Array]], Array]:
    def draw(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        import numpy as np  # here, so that `kbench list` need not wait for it

        values = rng.uniform(-1.0, 1.0, shape)
        rows = values.reshape(-1, shape[-1])
        count = len(rows)
        rows[np.arange(count)[:, None], rng.integers(0, V, (count, OUTLIERS))] *= OUTLIER
        rows[2::4, :V] *= FURTHER
        rows += np.resize(np.float32(SHIFTS), (count, 1))
        rows[:, V:] = JUNK
        return values

    return draw


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, V, P = (problem[name] for name in ("B", "T", "V", "P"))
    return (
        Tensor("logits", (B, T, P), problem.storage, "in", ("b", "t", "v"), draw=_logits(V)),
        Tensor("targets", (B, T), "int32", "in", ("b", "t"), draw=integers(0, V)),
        Tensor("dlosses", (B, T), "fp32", "in", ("b", "t"), draw=uniform(-1.0, 1.0)),
        Tensor("losses", (B, T), "fp32", "out", ("b", "t")),
        Tensor("dlogits", (B, T, P), problem.storage, "out", ("b", "t", "v")),
    )


# -------------------------------------------------------------------------------------------- reference

# Relative error, in units of u, of exp(z - max) as versions compute it, per unit of max - z: 1 from rounding the
# difference, 2.35 from __expf (1.173 ulp per unit of its argument); and apart from that 2 ulp.
EXP_SLOPE = 3.5
EXP_ULPS = 4.0
SMALLEST_NORMAL = 2.0**-126  # __expf flushes what is below it to 0
LOG_ULPS = 2.0


def _relative(columns: int, error: ErrorModel) -> float:
    """Relative error of the sum of exponentials and of a probability, per element, but for EXP_SLOPE.

    Beside accumulation: a lane of a warp adds columns / 32 numbers by itself. Where it met the largest element first,
    its sum is 1, and smaller ones lose up to half an ulp each, all of the same sign: nothing random. The mean of
    max - z over the terms, weighted with the terms, is at most log(columns). An online sum is rescaled by an
    exponential and a product whenever a larger number comes: for numbers in random order log(columns) times. Then the
    numerator, a reciprocal and a product.
    """
    logarithm = math.log(columns)
    rescaled = (EXP_ULPS + 1.0) * (1.0 + logarithm)
    rounded = columns / WARP + EXP_SLOPE * logarithm + rescaled + 2.0 * EXP_ULPS + 3.0
    return error.accumulation(columns) + error.fp32 * rounded


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """In place: it holds the answer and nothing else of its size."""
    B, T, V, P = (problem[name] for name in ("B", "T", "V", "P"))
    u = error.fp32
    logits = inputs["logits"].reshape(B * T, P)[:, :V]
    targets = inputs["targets"].reshape(-1).astype(xp.int64)
    dlosses = inputs["dlosses"].reshape(-1, 1)
    rows = xp.arange(B * T)

    value = xp.zeros((B * T, P))  # padding has the gradient 0, exactly
    bound = xp.zeros((B * T, P), xp.float32)
    p, p_bound = value[:, :V], bound[:, :V]
    xp.subtract(logits, logits.max(axis=1, keepdims=True), out=p)
    below = -p[rows, targets]
    p_bound[...] = p
    xp.exp(p, out=p)
    sums = p.sum(axis=1, keepdims=True)
    losses = xp.log(sums[:, 0]) + below
    # A loss may be the difference of a logarithm and a logit, or the logarithm of a probability.
    losses_bound = _relative(V, error) + EXP_SLOPE * u * below + (LOG_ULPS + 2.0) * u * losses

    # p - 1 and the product with dlosses are rounded, too. Nothing is stored before it is final.
    p /= sums
    p_bound *= -EXP_SLOPE * u
    p_bound += _relative(V, error) + 3.0 * u
    p_bound *= p
    p[rows, targets] -= 1.0
    p_bound[rows, targets] += 3.0 * u
    p *= dlosses
    p_bound += SMALLEST_NORMAL
    p_bound *= xp.abs(dlosses)
    return {
        "losses": Expected(losses.reshape(B, T), losses_bound.reshape(B, T)),
        "dlogits": Expected(value.reshape(B, T, P), bound.reshape(B, T, P)),
    }


# ------------------------------------------------------------------------------------------------ plans

TENSORS = ("dlogits", "losses", "logits", "targets", "dlosses")


def _launch(problem: Problem, kernel: str, grid: int, block: int, *rows: int, shared: int = 0) -> tuple[Step, ...]:
    return (Launch(kernel, (grid,), (block,), (*TENSORS, *rows, problem["V"], problem["P"]), shared),)


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    rows = problem["B"] * problem["T"]
    return _launch(problem, f"classifier_fused1<{problem.c_type}>", ceil_div(rows, block // WARP), block, rows)


def _in_groups(kernel: str, group: int) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    """A block per row; groups of `group` elements, or as many as fill 16 bytes (0)."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        count = group or PACKET_BYTES // ITEM_SIZES[problem.storage]
        aligned = "true" if problem["P"] % count == 0 else "false"
        return _launch(problem, f"{kernel}<{problem.c_type}, {aligned}>", problem["B"] * problem["T"], block)

    return plan


def _plan3(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return _launch(problem, f"classifier_fused3<{problem.c_type}>", problem["B"] * problem["T"], block)


def _read_once(number: int, backwards: str) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    """As many blocks as run at the same time, with rows in shared memory; else a block per row."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        rows = problem["B"] * problem["T"]
        ring = row_ring(problem["V"] * ITEM_SIZES[problem.storage], block, props)
        if ring is None:
            return _launch(problem, f"classifier_fused_long<{problem.c_type}, {backwards}>", rows, block)
        blocks, ahead, shared = ring
        grid = min(rows, blocks * props.multiprocessors)
        kernel = f"classifier_fused{number}<{problem.c_type}, {ahead}>"
        return _launch(problem, kernel, grid, block, rows, shared=shared)

    return plan


# ----------------------------------------------------------------------------------------------- family


def _traffic(problem: Problem) -> float:
    """The padding of logits need not be read, that of dlogits has to be written."""
    B, T, V, P = (problem[name] for name in ("B", "T", "V", "P"))
    return float(B * T * ((V + P) * ITEM_SIZES[problem.storage] + 3 * 4))


def _shape(
    B: int, T: int, V: int, P: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0
) -> CheckShape:
    return CheckShape({"B": B, "T": T, "V": V, "P": P}, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, "one of everything"),
    _shape(1, 3, 2, 5, "fewer logits than a packet, odd rows, more padding than logits"),
    _shape(2, 2, 13, 13, "odd rows without padding, fewer logits than lanes"),
    _shape(1, 3, 33, 40, "one past a warp; rows are aligned in every type"),
    _shape(1, 3, 33, 42, "rows at half a packet of fp32"),
    _shape(1, 3, 32, 33, "an aligned number of logits in rows that are not"),
    _shape(1, 2, 250, 252, "groups of four are aligned, packets of 16-bit numbers are not; padding in a group"),
    _shape(1, 2, 257, 264, "one past a block of 256, aligned rows"),
    _shape(2, 3, 1, 128, "one logit, all of whose losses are 0, and a lot of padding", None, 128),
    _shape(5, 13, 17, 19, "more rows than a block has warps, an odd number", (1,), 64),
    _shape(3, 7, 17, 19, "more short rows than blocks run at the same time", (5, 6), 1024),
    _shape(1, 7, 9001, 9003, "rows shorter than what is loaded ahead, more than run at the same time", (5, 6), 1024),
    _shape(2, 2, 37003, 37009, "long rows, which leave room to load three steps ahead", (5, 6), 1024),
    _shape(2, 2, 45061, 45064, "longer rows, which leave room for one step", (5, 6), 1024),
    _shape(1, 1, 1031, 1031, "a prime number of logits: several of every thread", None, 64),
    _shape(3, 5, 1093, 1096, "aligned rows, more than a batch of packets per thread", (5, 6), 32),
    _shape(1, 1, 2053, 2056, "a long row", (2, 3, 4), 1024),
    _shape(1, 2, 117001, 117003, "rows that do not fit into shared memory in any type", (5, 6), 1024),
)

IN_PLACE = (("logits", "dlogits"),)

FAMILY = Family(
    name="classifier_fused",
    summary="softmax, cross-entropy and gradient of the logits in one kernel",
    sizes={"B": "batch size", "T": "sequence length", "V": "vocabulary size", "P": "elements per row, with padding"},
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "V": 50257, "P": 50304},
        "small": {"B": 2, "T": 16, "V": 1003, "P": 1024},
        "large": {"B": 8, "T": 1024, "V": 32000, "P": 32000},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1, "one warp per row, online softmax: the largest and the sum in one pass", _plan1, DTYPES,
            aliases=IN_PLACE,
        ),
        Version(
            2, "one block per row, four elements per access; the first pass walks backwards",
            _in_groups("classifier_fused2", 4), DTYPES, aliases=IN_PLACE,
        ),
        Version(3, "as 2, one element per access: to see what wide accesses buy", _plan3, DTYPES, aliases=IN_PLACE),
        Version(
            4, "as 2, 16 bytes per access in every type, streaming",
            _in_groups("classifier_fused4", 0), DTYPES, aliases=IN_PLACE,
        ),
        Version(
            5, "one block per row, read once: it waits in shared memory while copies bring the next",
            _read_once(5, "false"), DTYPES, aliases=IN_PLACE,
        ),
        Version(
            6, "as 5, the last row first and stores that stay in L2: the product after it finds the newest rows there",
            _read_once(6, "true"), DTYPES, aliases=IN_PLACE,
        ),
    ),
    rules=(Rule("P at least V", lambda problem: problem["P"] >= problem["V"]),),
    traffic=_traffic,
)  # fmt: skip
