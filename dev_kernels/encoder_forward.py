"""Token and position embedding: out[b, t, :] = wte[inp[b, t], :] + wpe[t, :]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
    PACKET_BYTES,
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
    integers,
    normal,
    rounded,
)

DTYPES = ("bf16", "fp32", "fp16")


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, V = (problem[name] for name in ("B", "T", "C", "V"))
    dtype = problem.storage
    return (
        Tensor("inp", (B, T), "int32", "in", ("b", "t"), draw=integers(0, V)),
        Tensor("wte", (V, C), dtype, "in", ("v", "c"), draw=normal(0.1, 0.8)),
        Tensor("wpe", (T, C), dtype, "in", ("t", "c"), draw=normal(-0.2, 0.6)),
        # Exact: the correctly rounded sum of two numbers is one number, and every right version finds it.
        Tensor("out", (B, T, C), dtype, "out", ("b", "t", "c"), exact=True),
    )


def _traffic(problem: Problem) -> float:
    """One row of wte is read for each position, but no more rows than there are; the rest once."""
    B, T, C, V = (problem[name] for name in ("B", "T", "C", "V"))
    rows = B * T + min(B * T, V) + T
    return float(rows * C * ITEM_SIZES[problem.storage] + B * T * ITEM_SIZES["int32"])


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    out = inputs["wte"][inputs["inp"].astype(xp.int64)]
    out += inputs["wpe"]
    return {"out": Expected(rounded(out, problem.storage, xp))}


# ------------------------------------------------------------------------------------------------ plans


def _launch(kernel: str, threads: int, block: int, *sizes: int) -> tuple[Step, ...]:
    return (Launch(kernel, (ceil_div(threads, block),), (block,), ("out", "inp", "wte", "wpe", *sizes)),)


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    positions, T, C = problem["B"] * problem["T"], problem["T"], problem["C"]
    return _launch(f"encoder_forward1<{problem.c_type}>", positions, block, positions, T, C)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    positions, T, C = problem["B"] * problem["T"], problem["T"], problem["C"]
    return _launch(f"encoder_forward2<{problem.c_type}>", positions * C, block, positions, T, C)


# Of the batch, in version 3 at large sizes: four rows and the position's are five loads under way in a thread.
ROWS = Param(default=4, values=(2, 4, 8), meaning="batch rows of a thread in large problems")


def _plan3(problem: Problem, block: int, props: Props, ROWS: int) -> tuple[Step, ...]:
    """Single elements in place of packets where rows do not begin at multiples of 16 bytes. Several rows of the batch
    per thread, so that enough bytes are under way, unless there are threads for one row each."""
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    packet = PACKET_BYTES // ITEM_SIZES[problem.storage]
    width = packet if C % packet == 0 else 1
    per_row = T * (C // width)
    few = B * per_row <= props.multiprocessors * props.threads_per_multiprocessor
    rows = 1 if few or B < ROWS else ROWS
    threads = ceil_div(B, rows) * per_row
    index = "unsigned" if threads + block <= 1 << 32 else "Offset"
    return _launch(f"encoder_forward3<{problem.c_type}, {width}, {rows}, {index}>", threads, block, B, T, C)


# ----------------------------------------------------------------------------------------------- family


def _shape(
    B: int, T: int, C: int, V: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0
) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C, "V": V}, why, versions, (block,) if block else None)


FAMILY = Family(
    name="encoder_forward",
    summary="token and position embedding",
    sizes={"B": "batch size", "T": "sequence length", "C": "channels", "V": "vocabulary size"},
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "C": 768, "V": 50257},
        "small": {"B": 4, "T": 64, "C": 128, "V": 1000},
        "large": {"B": 48, "T": 1024, "C": 6144, "V": 50257},
    },
    check_shapes=(
        _shape(1, 1, 1, 1, "one of everything"),
        _shape(3, 5, 7, 11, "odd sizes: rows are not aligned"),
        _shape(1, 33, 8, 2, "one batch row, aligned rows, ids that repeat"),
        _shape(2, 37, 24, 50, "aligned rows, one past a warp of positions"),
        _shape(2, 5, 12, 50, "rows of whole halves of a 16-bit packet", (3,)),
        _shape(2, 5, 6, 50, "rows of whole halves of an fp32 packet", (3,)),
        _shape(1, 9, 1, 50257, "ids beyond 15 bits", block=64),
        _shape(5, 61, 33, 300, "prime length, one channel past 32: several blocks"),
        _shape(7, 51, 264, 90, "four rows per thread on the emulator, three left over", (3,), 256),
        _shape(5, 49, 43, 90, "four rows per thread, not aligned, one left over", (3,), 64),
        _shape(1, 53, 127, 90, "one batch row, many elements", (3,), 64),
        _shape(9, 43, 264, 90, "more batch rows than a thread may have at most, one left over", (3,), 128),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(1, "one thread per position, which walks over the channels", _plan1, DTYPES),
        Version(2, "one thread per element: a warp reads and writes neighbouring channels", _plan2, DTYPES),
        Version(
            3,
            "as 2, 16 bytes per access; in large problems four batch rows per thread",
            _plan3,
            DTYPES,
            params={"ROWS": ROWS},
        ),
    ),
    traffic=_traffic,
)
