"""Gradients of the embeddings: dwte[inp[b, t], :] += dout[b, t, :] and dwpe[t, :] += dout[b, t, :] over all b and t."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
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
    ),
    traffic=_traffic,
)
