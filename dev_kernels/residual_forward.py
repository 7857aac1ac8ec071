"""Residual connection: out = inp1 + inp2, element by element."""

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
    normal,
    rounded,
)

DTYPES = ("bf16", "fp32", "fp16")

# Of each input, of a thread. Two: four loads of 16 bytes are under way in it before it needs the first of them.
PACKETS = Param(default=2, values=(1, 2, 4), meaning="packets of each input, of a thread")


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    shape, dtype = (problem["N"],), problem.storage
    return (
        Tensor("inp1", shape, dtype, "in", ("i",), draw=normal(0.3, 1.2)),
        Tensor("inp2", shape, dtype, "in", ("i",), draw=normal(-0.1, 0.7)),
        # Exact: the correctly rounded sum is one number, and every right version finds it.
        Tensor("out", shape, dtype, "out", ("i",), exact=True),
    )


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    return {"out": Expected(rounded(inputs["inp1"] + inputs["inp2"], problem.storage, xp))}


def _launch(kernel: str, per_block: int, problem: Problem, block: int) -> tuple[Step, ...]:
    count = problem["N"]
    return (Launch(kernel, (-(-count // per_block),), (block,), ("out", "inp1", "inp2", count)),)


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return _launch(f"residual_forward1<{problem.c_type}>", block, problem, block)


def _plan2(problem: Problem, block: int, props: Props, PACKETS: int) -> tuple[Step, ...]:
    per_thread = PACKETS * PACKET_BYTES // ITEM_SIZES[problem.storage]
    kernel = f"residual_forward2<{problem.c_type}, {PACKETS}>"
    return _launch(kernel, block * per_thread, problem, block)


IN_PLACE = (("inp1", "out"), ("inp2", "out"))

FAMILY = Family(
    name="residual_forward",
    summary="residual connection: the sum of two arrays",
    sizes={"N": "number of elements"},
    dtypes=DTYPES,
    presets={
        "default": {"N": 8 * 1024 * 768},
        "small": {"N": 64 * 1024},
        "large": {"N": 256 * 1024 * 768},
    },
    check_shapes=(
        CheckShape({"N": 1}, "a single element"),
        CheckShape({"N": 7}, "less than a packet of eight"),
        CheckShape({"N": 13}, "a packet and a part of one"),
        CheckShape({"N": 509}, "a prime, less than the elements of a small block"),
        CheckShape({"N": 1025}, "one past the largest block, and past a tile of the smallest"),
        CheckShape({"N": 32768}, "whole tiles at every block size: no slow path"),
        CheckShape({"N": 33003}, "a whole tile at every block size, then a part of one"),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(1, "one thread per element", _plan1, DTYPES, aliases=IN_PLACE),
        Version(
            2,
            "as 1, 16 bytes per access, two packets of each input per thread, streaming loads",
            _plan2,
            DTYPES,
            aliases=IN_PLACE,
            params={"PACKETS": PACKETS},
        ),
    ),
)
