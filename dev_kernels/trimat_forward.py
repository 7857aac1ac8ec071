"""Scores of causal attention: the lower triangle of q k^T / sqrt(HS) for every batch and head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kbench.family import (
    STORAGE,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Gemm,
    Launch,
    Matrix,
    Problem,
    Props,
    Rule,
    Step,
    Tensor,
    Version,
    normal,
)

DTYPES = ("fp32", "tf32", "bf16", "fp16")

# Elements of out that the reference works on at once: 8 MB in float64, so temporaries stay in the cache.
SLICE = 1 << 20

TILE = 128  # rows and columns per block of versions 1 to 4
THREADS = 256  # per block: 8 x 8 elements each
QUAD = 4  # elements that move together in versions 3 and 4


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    square = (B, NH, T, T)
    return (
        Tensor("inp", (B, T, 3, NH, C // NH), problem.storage, "in", ("b", "t", "part", "h", "d"), normal(-0.1, 0.9)),
        Tensor(
            "out", square, problem.storage, "out", ("b", "h", "t", "t2"),
            unspecified=lambda xp: xp.broadcast_to(xp.arange(T)[None, :] > xp.arange(T)[:, None], square),
        ),
    )  # fmt: skip


def _scratch(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    """Queries and keys, head by head."""
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    return (Tensor("heads", (2, B, NH, T, C // NH), problem.storage, "scratch"),)


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64 and bounds in float32, a few heads at a time."""
    B, T, NH = (problem[name] for name in ("B", "T", "NH"))
    HS, heads = problem["C"] // NH, B * NH
    scale = 1.0 / math.sqrt(HS)
    q, k = (
        xp.ascontiguousarray(inputs["inp"][:, :, part].transpose(0, 2, 1, 3)).reshape(heads, T, HS) for part in (0, 1)
    )
    value, bound = xp.empty((heads, T, T)), xp.empty((heads, T, T), xp.float32)
    for h in _slices(heads, T):
        turned = k[h].transpose(0, 2, 1)
        xp.matmul(q[h], turned, out=value[h])
        value[h] *= scale
        bound[h] = _bound(abs(q[h]).astype(xp.float32), abs(turned).astype(xp.float32), value[h], scale, error, xp)
    return {"out": Expected(value.reshape(B, NH, T, T), bound.reshape(B, NH, T, T))}


def _slices(heads: int, T: int) -> Iterator[slice]:
    step = max(1, SLICE // (T * T))
    return (slice(start, min(start + step, heads)) for start in range(0, heads, step))


def _bound(q: Array, k: Array, value: Array, scale: float, error: ErrorModel, xp: Any) -> Array:
    """Error of `value` = scale * q @ k, given the magnitudes of q and k.

    HS products, each of which may be rounded before it is added; then the scale, itself rounded, times the sum.
    TF32: a tensor core may cut its operands instead of rounding them, so with u = 2^-11 an operand's relative error
    lies in [0, 2u), all of one sign. Its mean shrinks every product alike, hence the result, by at most 2 u of its
    value. What remains is of random sign, with a standard deviation of 0.6 u for the two operands of a product: 8 u
    times the root of the sum of squares is 13 of them, where the extreme of 1e8 elements is 6. For structured inputs,
    where nothing is random, the sum of magnitudes takes the place of that root.
    """
    bound = xp.matmul(q, k)
    rounding = 8.0 * error.gemm * scale
    if rounding and error.structured:
        bound *= scale * (error.accumulation(q.shape[2]) + 4.0 * error.fp32) + rounding
    else:
        bound *= scale * (error.accumulation(q.shape[2]) + 4.0 * error.fp32)
        if rounding:
            bound += rounding * xp.sqrt(xp.matmul(q * q, k * k))
    if rounding:
        bound += 2.0 * error.gemm * abs(value)
    return bound


# ------------------------------------------------------------------------------------------------ plans


def _scale(problem: Problem) -> float:
    return 1.0 / math.sqrt(problem["C"] // problem["NH"])


def _plan0(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS = C // NH
    access = QUAD if HS % QUAD == 0 else 1
    split = Launch(
        f"trimat_split_heads<{problem.c_type}, {access}>", (B * T,), (block,), ("heads", "inp", B, T, NH, HS)
    )
    q = Matrix("heads", T, HS, stride=T * HS)
    k = Matrix("heads", T, HS, stride=T * HS, offset=B * T * C, transpose=True)
    out = Matrix("out", T, T, stride=T * T)
    return (split, Gemm(q, k, out, problem.dtype, alpha=_scale(problem), batch=B * NH))


def _tiles(kernel: str, block: tuple[int, ...], by_alignment: bool) -> Any:
    """A block for every tile at or below the diagonal of every head."""

    def plan(problem: Problem, threads: int, props: Props) -> tuple[Step, ...]:
        B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
        HS = C // NH
        tiles = -(-T // TILE)
        aligned = f", {str(HS % QUAD == 0 and T % QUAD == 0).lower()}" if by_alignment else ""
        args = ("out", "inp", T, NH, HS, _scale(problem))
        name = f"{kernel}<{problem.c_type}{aligned}>"
        return (Launch(name, (B * NH * (tiles * (tiles + 1) // 2),), block, args),)

    return plan


SQUARE = (16, 16)
_STORED = tuple(dtype for dtype in DTYPES if STORAGE[dtype] == dtype)  # tf32 is something that only a GEMM computes in

VERSIONS = (
    Version(
        0, "the library, to compare with: heads laid out for one GEMM, which does both triangles", _plan0, DTYPES,
        fixed=THREADS, scratch=_scratch,
    ),
    Version(
        1, "by hand: one thread per 8 x 8 elements, one dot product after the other",
        _tiles("trimat_forward1", SQUARE, False), _STORED, fixed=THREADS,
    ),
    Version(
        2, "as 1, the 64 sums in registers: 16 loads serve 64 products",
        _tiles("trimat_forward2", SQUARE, False), _STORED, fixed=THREADS,
    ),
    Version(
        3, "as 2, four elements per load and store",
        _tiles("trimat_forward3", SQUARE, True), _STORED, fixed=THREADS,
    ),
    Version(
        4, "as 3, tiles staged in shared memory, transposed, the next slab under way meanwhile",
        _tiles("trimat_forward4", (THREADS,), True), _STORED, fixed=THREADS,
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- family


def _shape(B: int, T: int, C: int, NH: int, why: str, versions: tuple[int, ...] | None = None) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C, "NH": NH}, why, versions)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, "one of everything"),
    _shape(3, 2, 10, 2, "two tokens, odd head size"),
    _shape(2, 7, 15, 3, "prime length, less than the elements of a thread"),
    _shape(1, 33, 24, 2, "rows that are not aligned, heads that are: head size 12 is one slab and a half"),
    _shape(2, 36, 12, 1, "aligned rows, fewer than a tile has"),
    _shape(2, 36, 12, 2, "aligned rows, head size 6: half a packet"),
    _shape(2, 34, 8, 2, "rows at half a packet, aligned heads"),
    _shape(1, 129, 5, 1, "one past a tile, odd head size"),
    _shape(1, 132, 16, 2, "aligned, four past a tile"),
    _shape(1, 259, 9, 1, "six tiles, not aligned", (0, 2, 3, 4)),
    _shape(1, 260, 8, 1, "six tiles, aligned", (3, 4)),
    _shape(1, 256, 1, 1, "whole tiles: none covers for another", (1, 2, 3, 4)),
    _shape(1, 3, 1030, 2, "a long sum: head size 515"),
)

FAMILY = Family(
    name="trimat_forward",
    summary="lower triangle of queries times keys",
    sizes={"B": "batch size", "T": "sequence length", "C": "channels", "NH": "number of heads"},
    dtypes=DTYPES,
    presets={"default": {"B": 8, "T": 1024, "C": 768, "NH": 12}, "small": {"B": 1, "T": 160, "C": 64, "NH": 2}},
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    rules=(Rule("C divisible by NH", lambda problem: problem["C"] % problem["NH"] == 0),),
    # The diagonal and what is below it.
    flops=lambda problem: float(problem["B"] * problem["T"] * (problem["T"] + 1) * problem["C"]),
    traffic=lambda problem: float(_touched(problem) * (4 if problem.storage == "fp32" else 2)),
)


def _touched(problem: Problem) -> int:
    """Elements that any version has to move: queries and keys, but not values, and one triangle of out."""
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    return 2 * B * T * C + B * NH * T * (T + 1) // 2
