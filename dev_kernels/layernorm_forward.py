"""LayerNorm over rows of C elements: out = (x - mean) * rstd * weight + bias. mean and rstd are outputs, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.contracts import layernorm
from kbench.family import (
    ITEM_SIZES,
    PACKET_BYTES,
    UNIT_ROUNDOFF,
    WARP,
    Array,
    CheckShape,
    Draw,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Param,
    PlanFunction,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    dtype = problem.storage
    return (
        Tensor("inp", (B, T, C), dtype, "in", ("b", "t", "c"), draw=_rows_of_three_kinds(dtype)),
        Tensor("weight", (C,), dtype, "in", ("c",), draw=normal(1.1, 0.3)),
        Tensor("bias", (C,), dtype, "in", ("c",), draw=normal(-0.2, 0.5)),
        Tensor("out", (B, T, C), dtype, "out", ("b", "t", "c")),
        Tensor("mean", (B, T), "fp32", "out", ("b", "t")),
        Tensor("rstd", (B, T), "fp32", "out", ("b", "t")),
    )


def _rows_of_three_kinds(dtype: str) -> Draw:
    """Most rows have a mean of 0.1 and a spread of 0.7. Some have a mean of 3 and a spread of 0.1, and some a mean of
    1000 and a spread of 1, or of two units in the last place of 1000 where the type cannot tell less apart."""
    spread = max(1.0, 4.0 * 1000.0 * UNIT_ROUNDOFF[dtype])

    def draw(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        values = rng.normal(0.0, 1.0, shape)
        rows = values.reshape(-1, shape[-1])
        for start, step, row_mean, row_spread in ((0, 2, 0.1, 0.7), (1, 4, 3.0, 0.1), (3, 4, 1000.0, spread)):
            rows[start::step] *= row_spread
            rows[start::step] += row_mean
        return values

    return draw


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    x = inputs["inp"].reshape(B * T, C)
    out, *statistics = layernorm(x, inputs["weight"], inputs["bias"], error, xp)
    mean, rstd = (Expected(part.value.reshape(B, T), part.bound.reshape(B, T)) for part in statistics)
    return {
        "out": Expected(out.value.reshape(B, T, C), out.bound.reshape(B, T, C)),
        "mean": mean,
        "rstd": rstd,
    }


# ------------------------------------------------------------------------------------------------ plans


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


INPUTS = ("inp", "weight", "bias")


def _by_rows(kernel: str, threads_per_row: int) -> PlanFunction:
    """Blocks that hold as many rows as they have groups of this many threads."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        grid = ceil_div(_rows(problem), block // threads_per_row)
        args = ("out", "mean", "rstd", *INPUTS, _rows(problem), problem["C"])
        return (Launch(f"{kernel}<{problem.c_type}>", (grid,), (block,), args),)

    return plan


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    rows, C, element = _rows(problem), problem["C"], problem.c_type
    elements = ("out", "inp", "mean", "rstd", "weight", "bias", rows, C)
    return (
        Launch(f"mean2<{element}>", (rows,), (block,), ("mean", "inp", C)),
        Launch(f"rstd2<{element}>", (rows,), (block,), ("rstd", "inp", "mean", C)),
        Launch(f"normalise2<{element}>", (ceil_div(rows * C, block),), (block,), elements),
    )


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    args = ("out", "mean", "rstd", *INPUTS, problem["C"])
    return (Launch(f"layernorm_forward5<{problem.c_type}>", (_rows(problem),), (block,), args),)


def _plan6(problem: Problem, block: int, props: Props, BATCH: int) -> tuple[Step, ...]:
    """Version 5 where weight, bias and a row per warp do not fit into shared memory."""
    C, warps = problem["C"], block // WARP
    per_packet = PACKET_BYTES // ITEM_SIZES[problem.storage]
    shared = (2 + warps) * ceil_div(C, per_packet) * PACKET_BYTES
    if shared > props.shared_per_block_optin:
        return _plan5(problem, block, props)
    aligned = "true" if C % per_packet == 0 else "false"
    kernel = f"layernorm_forward6<{problem.c_type}, {aligned}, {BATCH}>"
    args = ("out", "mean", "rstd", *INPUTS, _rows(problem), C)
    return (Launch(kernel, (ceil_div(_rows(problem), warps),), (block,), args, shared),)


# By version. Of a lane, under way at the same time: more than three take more registers than two full blocks leave.
PARAMS = {6: {"BATCH": Param(default=3, values=(1, 2, 3), meaning="packets of a lane that are loaded at once")}}

IDEAS: tuple[tuple[str, PlanFunction], ...] = (
    ("one thread per row, three passes: mean, variance, output", _by_rows("layernorm_forward1", 1)),
    ("a kernel each for mean and variance (a block per row) and output: coalesced loads", _plan2),
    (
        "one warp per row, one kernel: shuffles, no shared memory; streaming accesses",
        _by_rows("layernorm_forward3", WARP),
    ),
    ("as 3, mean and variance in a single pass", _by_rows("layernorm_forward4", WARP)),
    ("as 4, one block per row: enough threads for long rows", _plan5),
    ("one warp per row, nothing is read twice: row, weight, bias stay in shared memory", _plan6),
)


# ----------------------------------------------------------------------------------------------- family


def _shape(B: int, T: int, C: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C}, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, "one of everything: the variance is 0, the output is the bias"),
    _shape(2, 3, 5, "odd, rows shorter than a packet of eight"),
    _shape(1, 5, 33, "one past a warp, rows of all kinds, one row past a block of four warps"),
    _shape(1, 37, 8, "more rows than the warps of a block, one aligned packet"),
    _shape(1, 1, 129, "one row, one past 128"),
    _shape(3, 1, 1031, "prime, one pass over the largest block and a bit"),
    _shape(1, 4, 768, "aligned rows of all kinds, several packets per lane"),
    _shape(1, 2, 1288, "aligned, more packets per lane than a batch, the last ones of some lanes missing"),
    _shape(1, 3, 132, "rows of whole halves of a 16-bit packet", (6,), 64),
    _shape(1, 3, 130, "rows of whole halves of an fp32 packet", (6,), 64),
    _shape(1, 2, 3424, "rows too long for the shared memory of 32 warps", (6,), 1024),
)

FAMILY = Family(
    name="layernorm_forward",
    summary="LayerNorm: rows normalised to mean 0 and variance 1, then scaled and shifted",
    sizes={"B": "batch size", "T": "sequence length", "C": "channels"},
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "C": 768},
        "small": {"B": 2, "T": 64, "C": 256},
        "large": {"B": 192, "T": 1024, "C": 768},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=tuple(
        Version(number, idea, plan, DTYPES, params=PARAMS.get(number, {}))
        for number, (idea, plan) in enumerate(IDEAS, start=1)
    ),
)
