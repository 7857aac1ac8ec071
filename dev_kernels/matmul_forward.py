"""A linear layer: out = inp weight^T + bias, with GELU behind it where the flag `gelu` is 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kbench.family import (
    PACKET_BYTES,
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
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
)

DTYPES = ("fp32", "tf32", "bf16", "fp16")
STORED = tuple(dtype for dtype in DTYPES if STORAGE[dtype] == dtype)  # tf32 is something that only a GEMM computes in

# Elements of out that the reference works on at once: 32 MB in float64, so temporaries are small beside the answer.
SLICE = 1 << 22

TILE = 128  # rows and channels per block of version 4
TILE_THREADS = 256  # per block: 8 x 8 outputs each
QUAD = 4  # elements that move together there


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, OC = (problem[name] for name in ("B", "T", "C", "OC"))
    dtype = problem.storage
    return (
        Tensor("inp", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1, 0.7)),
        # So that outputs have a spread of about 1, whatever C is: where GELU bends.
        Tensor("weight", (OC, C), dtype, "in", ("o", "c"), draw=normal(0.01, 1.0 / math.sqrt(C))),
        Tensor("bias", (OC,), dtype, "in", ("o",), draw=normal(0.1, 0.5)),
        Tensor("out", (B, T, OC), dtype, "out", ("b", "t", "o")),
    )


# -------------------------------------------------------------------------------------------- reference

GELU_SLOPE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
GELU_STEEPEST = 1.13  # largest |derivative|, near x = 1.5

# What tanh may be off. cuBLASLt 13 was seen to be 2^-17 off on an H200 with fp32 outputs; for 16-bit ones a library may
# use tanh.approx, an instruction that is 2^-11 off at most. Twice that is allowed, so that it takes half of the bound.
TANH = {"fp32": 2.0**-16, "bf16": 2.0**-10, "fp16": 2.0**-10}


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64 and bounds in float32, some rows at a time."""
    B, T, C, OC = (problem[name] for name in ("B", "T", "C", "OC"))
    N = B * T
    inp, weight, bias = inputs["inp"].reshape(N, C), inputs["weight"].T, inputs["bias"]
    weight_size, bias_size = abs(weight).astype(xp.float32), abs(bias).astype(xp.float32)
    value, bound = xp.empty((N, OC)), xp.empty((N, OC), xp.float32)
    for rows in _slices(N, OC):
        xp.matmul(inp[rows], weight, out=value[rows])
        inp_size = abs(inp[rows]).astype(xp.float32)
        bound[rows] = _sum_bound(inp_size, weight_size, bias_size, abs(value[rows]), error, xp)
        value[rows] += bias
        if problem["gelu"]:
            _apply_gelu(value[rows], bound[rows], error, xp)
    return {"out": Expected(value.reshape(B, T, OC), bound.reshape(B, T, OC))}


def _slices(rows: int, row: int) -> Iterator[slice]:
    step = max(1, SLICE // row)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _sum_bound(inp: Array, weight: Array, bias: Array, product: Array, error: ErrorModel, xp: Any) -> Array:
    """Error of inp @ weight + bias, given magnitudes; `product` is that of inp @ weight.

    C products, each of which may be rounded before it is added, and the bias. The product may be stored in the type of
    out before the bias is added (version 2).
    TF32: a tensor core may cut its operands instead of rounding them, so with u = 2^-11 an operand's relative error
    lies in [0, 2u), all of one sign. Its mean shrinks every product alike, hence the result, by at most 2 u of its
    value. What remains is of random sign, with a standard deviation of 0.6 u for the two operands of a product: 8 u
    times the root of the sum of squares is 13 of them, where the extreme of 1e8 elements is 6. For structured inputs,
    where nothing is random, the sum of magnitudes takes the place of that root.
    """
    accumulated = error.accumulation(inp.shape[1] + 1) + 2.0 * error.fp32
    rounding = 8.0 * error.gemm
    bound = xp.matmul(inp, weight)
    if rounding and error.structured:
        bound *= accumulated + rounding
    else:
        bound *= accumulated
        if rounding:
            bound += rounding * xp.sqrt(xp.matmul(inp * inp, weight * weight))
    bound += accumulated * bias
    bound += (error.storage + 2.0 * error.gemm) * product
    return bound


def _apply_gelu(value: Array, bound: Array, error: ErrorModel, xp: Any) -> None:
    """Replace sums by GELU of them, and their bound by that of GELU: x (1 + tanh(u)) / 2.

    In fp32 the argument of tanh is some four roundings off, which moves tanh by less than two of them, since u times
    its slope there is below 0.45. The remaining steps round numbers that are not larger than x.
    """
    bound *= GELU_STEEPEST
    bound += (0.5 * TANH[STORAGE[error.dtype]] + 10.0 * error.fp32) * abs(value)
    factor = value * value  # in place from here on: slices are large
    factor *= GELU_CUBIC
    factor += 1.0
    factor *= value
    factor *= GELU_SLOPE
    xp.tanh(factor, out=factor)
    factor += 1.0
    factor *= 0.5
    value *= factor


# ------------------------------------------------------------------------------------------------ plans


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


def _bool(value: bool) -> str:
    return str(value).lower()


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    side = math.isqrt(block)
    blocks = ceil_div(N, side) * ceil_div(OC, side)
    args = ("out", "inp", "weight", "bias", N, C, OC, problem["gelu"])
    return (Launch(f"matmul_forward1<{problem.c_type}>", (blocks,), (side, side), args),)


def _gemm(problem: Problem, bias: str, gelu: bool) -> Gemm:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    inp, weight = Matrix("inp", N, C), Matrix("weight", OC, C, transpose=True)
    return Gemm(inp, weight, Matrix("out", N, OC), problem.dtype, bias=bias, gelu=gelu)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    OC, packet = problem["OC"], PACKET_BYTES // (4 if problem.storage == "fp32" else 2)
    blocks = _rows(problem) * ceil_div(OC, block * packet)
    kernel = f"add_bias<{problem.c_type}, {_bool(OC % packet == 0)}>"
    return (_gemm(problem, "", False), Launch(kernel, (blocks,), (block,), ("out", "bias", OC, problem["gelu"])))


def _plan3(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (_gemm(problem, "bias", bool(problem["gelu"])),)


def _plan4(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    aligned = C % QUAD == 0 and OC % QUAD == 0
    kernel = f"matmul_forward4<{problem.c_type}, {_bool(aligned)}, {_bool(bool(problem['gelu']))}>"
    blocks = ceil_div(N, TILE) * ceil_div(OC, TILE)
    return (Launch(kernel, (blocks,), (block,), ("out", "inp", "weight", "bias", N, C, OC)),)


SQUARES = (16, 64, 256, 1024)

VERSIONS = (
    Version(
        1,
        "one thread per output, in square blocks: accesses lie a whole row apart",
        _plan1,
        STORED,
        block_sizes=SQUARES,
    ),
    Version(2, "the library's GEMM, then a kernel for bias and GELU", _plan2, DTYPES, block_sizes=SQUARES),
    # No kernel of ours: the block size stands for nothing, but is one.
    Version(3, "as 2, bias and GELU in the epilogue of the library's GEMM", _plan3, DTYPES, fixed=TILE_THREADS),
    Version(
        4,
        "by hand again: 128 x 128 tiles in shared memory, 8 x 8 outputs per thread",
        _plan4,
        STORED,
        fixed=TILE_THREADS,
    ),
)


# ----------------------------------------------------------------------------------------------- family


def _shape(
    B: int, T: int, C: int, OC: int, gelu: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0
) -> CheckShape:
    sizes = {"B": B, "T": T, "C": C, "OC": OC, "gelu": gelu}
    return CheckShape(sizes, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, 0, "one of everything"),
    _shape(1, 1, 2, 3, 1, "one token, GELU"),
    _shape(2, 5, 3, 7, 0, "primes"),
    _shape(1, 33, 13, 35, 1, "one past a warp of rows, nothing aligned, GELU"),
    _shape(3, 11, 12, 40, 1, "aligned: C is one slab and a half; GELU"),
    _shape(1, 5, 8, 6, 1, "C aligned, OC at half a packet of fp32"),
    _shape(1, 6, 6, 8, 1, "OC aligned, C at half a packet of fp32"),
    _shape(1, 129, 7, 130, 0, "one past a tile of rows, two past one of channels", (2, 3, 4)),
    _shape(1, 130, 8, 132, 0, "aligned, four tiles", (3, 4)),
    _shape(1, 130, 8, 132, 0, "more outputs than one block of any size", (1, 2), 256),
    _shape(1, 256, 1, 4, 0, "whole tiles of rows: none covers for another", (4,)),
    _shape(1, 4, 1, 256, 0, "whole tiles of channels", (4,)),
    _shape(1, 2, 1030, 3, 0, "a long sum", None),
    _shape(1, 3, 2, 8200, 0, "rows longer than a block of the largest size has packets", (2,), 1024),
)

FAMILY = Family(
    name="matmul_forward",
    summary="linear layer: product with a weight matrix, bias, GELU where asked",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "C": "input channels",
        "OC": "output channels",
        "gelu": "1: GELU follows",
    },
    dtypes=DTYPES,
    presets={
        "default": {"B": 32, "T": 1024, "C": 768, "OC": 3072, "gelu": 0},
        "small": {"B": 2, "T": 64, "C": 64, "OC": 160, "gelu": 0},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    flops=lambda problem: 2.0 * _rows(problem) * problem["C"] * problem["OC"],
    flags=("gelu",),
)
