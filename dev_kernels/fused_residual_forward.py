"""Residual connection and LayerNorm in one operation: residual = inp1 + inp2, normed = LayerNorm(residual)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
    rounded,
)

DTYPES = ("bf16", "fp32", "fp16")

MAX_WARPS = 32  # in a block

# Packets of each input that a lane of version 5 loads at once: all of a row of 768 16-bit elements.
AT_ONCE = 3

# Of version 6. Packets of each input whose loads a thread starts a row ahead:
PREFETCHED = 2
# What it may take of a multiprocessor: a kernel for up to 1024 threads has at most 64 registers per thread, there are
# two arrays of a float per warp, and CUDA keeps 1 KB of shared memory per block for itself.
MOST_REGISTERS = 64
ARRAYS = 2 * MAX_WARPS * 4
KEPT_BY_CUDA = 1024


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    dtype, axes = problem.storage, ("b", "t", "c")
    # Most rows of the residual have a mean of 0.1. Some have a mean of 3 and a spread of 0.1; some have a mean of 1000
    # and a spread of 1, or of two units in the last place of 1000 where the type cannot tell less apart.
    spread = max(1.0, 4.0 * 1000.0 * UNIT_ROUNDOFF[dtype])
    stream = _rows_of_three_kinds((0.3, 0.9), (3.02, 0.08), (1000.0, spread))
    branch = _rows_of_three_kinds((-0.2, 0.5), (-0.02, 0.06), (0.1, 0.5))
    return (
        Tensor("inp1", (B, T, C), dtype, "in", axes, draw=stream),
        Tensor("inp2", (B, T, C), dtype, "in", axes, draw=branch),
        Tensor("weight", (C,), dtype, "in", ("c",), draw=normal(1.1, 0.3)),
        Tensor("bias", (C,), dtype, "in", ("c",), draw=normal(-0.2, 0.5)),
        # Exact: the correctly rounded sum is one number, and every right version finds it.
        Tensor("residual", (B, T, C), dtype, "out", axes, exact=True),
        Tensor("normed", (B, T, C), dtype, "out", axes),
        Tensor("mean", (B, T), "fp32", "out", ("b", "t")),
        Tensor("rstd", (B, T), "fp32", "out", ("b", "t")),
    )


def _rows_of_three_kinds(*kinds: tuple[float, float]) -> Draw:
    """Mean and spread of every second row, and of the others in turn."""

    def draw(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        values = rng.normal(0.0, 1.0, shape)
        rows = values.reshape(-1, shape[-1])
        for (mean, spread), start, step in zip(kinds, (0, 1, 3), (2, 4, 4), strict=True):
            rows[start::step] *= spread
            rows[start::step] += mean
        return values

    return draw


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """LayerNorm of the residual, which is rounded to its type first: the same numbers that a version has."""
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    x = rounded(inputs["inp1"] + inputs["inp2"], problem.storage, xp).reshape(B * T, C)
    out, *statistics = layernorm(x, inputs["weight"], inputs["bias"], error, xp)
    mean, rstd = (Expected(part.value.reshape(B, T), part.bound.reshape(B, T)) for part in statistics)
    return {
        "residual": Expected(x.reshape(B, T, C)),
        "normed": Expected(out.value.reshape(B, T, C), out.bound.reshape(B, T, C)),
        "mean": mean,
        "rstd": rstd,
    }


# ------------------------------------------------------------------------------------------------ plans


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


PlanOfVersion = Callable[[Problem, int, Props], tuple[Step, ...]]


def _by_rows(kernel: str, rows_per_block: int, problem: Problem, block: int, shared: int = 0) -> Launch:
    args = ("normed", "residual", "mean", "rstd", "inp1", "inp2", "weight", "bias", _rows(problem), problem["C"])
    return Launch(kernel, (ceil_div(_rows(problem), rows_per_block),), (block,), args, shared)


def _packets(problem: Problem) -> tuple[int, str]:
    """Packets per row, and whether rows are made of whole ones, as C++ spells it."""
    per_packet = PACKET_BYTES // ITEM_SIZES[problem.storage]
    return ceil_div(problem["C"], per_packet), "false" if problem["C"] % per_packet else "true"


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    rows, C, element = _rows(problem), problem["C"], problem.c_type
    add = ("residual", "inp1", "inp2", rows, C)
    normalise = ("normed", "mean", "rstd", "residual", "weight", "bias", rows, C)
    return (
        Launch(f"residual1<{element}>", (ceil_div(rows * C, block),), (block,), add),
        Launch(f"layernorm1<{element}>", (ceil_div(rows, block),), (block,), normalise),
    )


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (_by_rows(f"fused_residual_forward2<{problem.c_type}>", block, problem, block),)


def _plan3(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (_by_rows(f"fused_residual_forward3<{problem.c_type}>", block // WARP, problem, block),)


def _plan4(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    _, aligned = _packets(problem)
    return (_by_rows(f"fused_residual_forward4<{problem.c_type}, {aligned}>", block // WARP, problem, block),)


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """Version 4 where weight, bias and a row per warp do not fit into shared memory."""
    packets, aligned = _packets(problem)
    warps = block // WARP
    shared = (2 + warps) * packets * PACKET_BYTES
    if shared > props.shared_per_block_optin:
        return _plan4(problem, block, props)
    kernel = f"fused_residual_forward5<{problem.c_type}, {aligned}, {AT_ONCE}>"
    return (_by_rows(kernel, warps, problem, block, shared),)


def _plan6(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """As many blocks as can be resident at once. Version 4 where weight, bias and a row per team do not fit into shared
    memory."""
    packets, aligned = _packets(problem)
    warps = block // WARP
    # Enough warps for each thread to have its share of a row prefetched; a power of two divides the warps of any block.
    per_row = 1
    while per_row < warps and per_row * WARP * PREFETCHED < packets:
        per_row *= 2
    teams = warps // per_row
    shared = (2 + teams) * packets * PACKET_BYTES
    if shared + ARRAYS > props.shared_per_block_optin:
        return _plan4(problem, block, props)
    threads = min(props.threads_per_multiprocessor, props.registers_per_multiprocessor // MOST_REGISTERS)
    at_once = min(threads // block, props.shared_per_multiprocessor // (shared + ARRAYS + KEPT_BY_CUDA))
    blocks = min(props.multiprocessors * max(1, at_once), ceil_div(_rows(problem), teams))
    kernel = f"fused_residual_forward6<{problem.c_type}, {aligned}, {PREFETCHED}>"
    launch = _by_rows(kernel, teams, problem, block, shared)
    return (replace(launch, grid=(blocks,), args=(*launch.args, per_row)),)


IDEAS: tuple[tuple[str, PlanOfVersion], ...] = (
    ("two kernels: a thread per element adds, then a thread per row normalises", _plan1),
    ("one kernel: a thread per row does both", _plan2),
    ("one warp per row, so that accesses coalesce; three passes", _plan3),
    ("as 3, mean and variance in a single pass; 16 bytes per access, last pass backwards", _plan4),
    ("one warp per row, nothing is read twice: row, weight, bias stay in shared memory", _plan5),
    ("as 5, persistent blocks, the next row's loads under way; several warps per row", _plan6),
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
    _shape(3, 1, 1031, "prime, one past two packets per lane of the largest block"),
    _shape(1, 4, 768, "aligned rows of all kinds, several packets per lane"),
    _shape(1, 2, 1288, "aligned, more packets per lane than are loaded at once, the last ones of some lanes missing"),
    _shape(1, 3, 132, "rows of whole halves of a 16-bit packet", (4, 5, 6), 128),
    _shape(1, 3, 130, "rows of whole halves of an fp32 packet", (4, 5, 6), 128),
    _shape(1, 2, 3432, "long rows: too long for the shared memory of 32 warps, several packets per thread of a team"),
    _shape(1, 230, 24, "several rounds of persistent blocks, the last with a row for some teams only", (6,), 1024),
    _shape(1, 79, 1032, "several rounds of teams of several warps", (6,), 1024),
    _shape(1, 1, 38760, "a row too long for the shared memory of any block", (5, 6), 32),
)

FAMILY = Family(
    name="fused_residual_forward",
    summary="residual connection fused with the LayerNorm behind it",
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
    versions=tuple(Version(number, idea, plan, DTYPES) for number, (idea, plan) in enumerate(IDEAS, start=1)),
)
