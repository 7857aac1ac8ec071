"""Transpose of a four-dimensional array: out[i4, i3, i1, i2] = inp[i1, i2, i3, i4]."""

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
    Launch,
    Param,
    Problem,
    Props,
    Rule,
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")
ACCESS_BYTES = 16

# Sides of tiles in elements. In fp32 they are multiples of 128 bytes: reads and writes fill whole cache lines.
SIDE = Param(default=64, values=(32, 64, 96), meaning="side of a tile in large problems")
SMALL = 32
# Large tiles per multiprocessor from which on small ones would not share out the work any better.
ENOUGH = 4


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    D1, D2, D3, D4 = (problem[name] for name in ("D1", "D2", "D3", "D4"))
    dtype = problem.storage
    return (
        Tensor("inp", (D1, D2, D3, D4), dtype, "in", ("i1", "i2", "i3", "i4"), draw=normal(0.1, 0.7)),
        Tensor("out", (D4, D3, D1, D2), dtype, "out", ("i4", "i3", "i1", "i2"), exact=True),
    )


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    return {"out": Expected(xp.ascontiguousarray(inputs["inp"].transpose(3, 2, 0, 1)))}


def _width(row: int, dtype: str) -> int:
    """Elements per access: 16 bytes where rows of this length begin at multiples of that, else one element."""
    packet = ACCESS_BYTES // ITEM_SIZES[dtype]
    return packet if row % packet == 0 else 1


def _side(R: int, K: int, large: int, props: Props) -> int:
    """Of a tile."""
    return large if _tiles(R, K, large) >= ENOUGH * props.multiprocessors else SMALL


def _tiles(R: int, K: int, side: int) -> int:
    return ceil_div(R, side) * ceil_div(K, side)


def _plan1(problem: Problem, block: int, props: Props, SIDE: int) -> tuple[Step, ...]:
    D1, D2, D3, D4 = (problem[name] for name in ("D1", "D2", "D3", "D4"))
    R, K = D1 * D2, D3 * D4
    read, write = _width(K, problem.storage), _width(R, problem.storage)
    side = _side(R, K, SIDE, props)
    kernel = f"permute1<{problem.c_type}, {read}, {write}, {side}>"
    return (Launch(kernel, (_tiles(R, K, side),), (block,), ("out", "inp", D3, D4, R, K)),)


def _shape(D1: int, D2: int, D3: int, D4: int, why: str, block: int = 0) -> CheckShape:
    return CheckShape({"D1": D1, "D2": D2, "D3": D3, "D4": D4}, why, None, (block,) if block else None)


FAMILY = Family(
    name="permute",
    summary="transpose of four dimensions: (d1, d2, d3, d4) to (d4, d3, d1, d2)",
    sizes={f"D{i}": f"size of dimension {i} of the input" for i in range(1, 5)},
    dtypes=DTYPES,
    presets={
        "default": {"D1": 24, "D2": 42, "D3": 20, "D4": 32},
        "small": {"D1": 8, "D2": 21, "D3": 10, "D4": 16},
        "large": {"D1": 96, "D2": 168, "D3": 80, "D4": 128},  # each side of the default four times as long
    },
    check_shapes=(
        _shape(1, 1, 1, 1, "one element"),
        _shape(3, 5, 7, 2, "odd sizes, less than a tile"),
        _shape(3, 11, 3, 1, "one row past a tile, three columns"),
        _shape(1, 2, 11, 3, "two rows, one column past a tile"),
        _shape(8, 9, 4, 18, "aligned both ways, parts of tiles"),
        _shape(3, 4, 5, 4, "rows of 12 and of 20: aligned in fp32, at half a packet in 16 bits"),
        _shape(8, 8, 5, 13, "rows of the output aligned, those of the input not", 128),
        _shape(5, 13, 8, 9, "rows of the input aligned, those of the output not", 128),
        _shape(8, 8, 8, 8, "whole tiles", 256),
        _shape(5, 13, 107, 3, "large tiles on the emulator, parts of them, neither side aligned", 512),
        _shape(5, 13, 41, 8, "large tiles, rows of the input aligned", 64),
        _shape(16, 12, 53, 5, "large tiles, rows of the output aligned", 1024),
        _shape(16, 12, 64, 4, "whole large tiles", 128),
        _shape(12, 17, 145, 4, "tiles of 96 on the emulator, parts of them, both sides aligned in fp32", 256),
    ),
    tensors=_tensors,
    reference=_reference,
    rules=(
        Rule(
            "D1 * D2 and D3 * D4 below 2^31",
            lambda problem: max(problem["D1"] * problem["D2"], problem["D3"] * problem["D4"]) < 1 << 31,
        ),
    ),
    versions=(
        Version(
            1,
            "square tiles through shared memory: reads and writes both coalesce",
            _plan1,
            DTYPES,
            params={"SIDE": SIDE},
        ),
    ),
)
