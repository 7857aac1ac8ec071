"""A linear layer: out = inp weight^T + bias (unless the flag `bias` is 0), with GELU behind it where `gelu` is 1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kbench.contracts import AUX_DIVISOR, EPILOGUE_TANH, GELU_CUBIC, GELU_SLOPE, rounding
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
    Rule,
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
    dtype, out = problem.storage, ("b", "t", "o")
    bias = Tensor("bias", (OC,), dtype, "in", ("o",), draw=normal(0.1, 0.5))
    pre = Tensor("pre", (B, T, OC), dtype, "out", out, intermediate=True)  # what GELU is applied to
    return (
        Tensor("inp", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1, 0.7)),
        # So that outputs have a spread of about 1, whatever C is: where GELU bends.
        Tensor("weight", (OC, C), dtype, "in", ("o", "c"), draw=normal(0.01, 1.0 / math.sqrt(C))),
        *([bias] if problem["bias"] else []),
        *([pre] if problem["gelu"] else []),
        Tensor("out", (B, T, OC), dtype, "out", out),
    )


# -------------------------------------------------------------------------------------------- reference

GELU_STEEPEST = 1.13  # largest |derivative|, near x = 1.5


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64 and bounds in float32, some rows at a time."""
    B, T, C, OC = (problem[name] for name in ("B", "T", "C", "OC"))
    N = B * T
    inp, weight = inputs["inp"].reshape(N, C), inputs["weight"].T
    weight_size = abs(weight).astype(xp.float32)
    found = {name: (xp.empty((N, OC)), xp.empty((N, OC), xp.float32)) for name in ("out", "pre")[: 1 + problem["gelu"]]}
    value, bound = found["out"]
    for rows in _slices(N, OC):
        xp.matmul(inp[rows], weight, out=value[rows])
        bound[rows] = _product_bound(abs(inp[rows]).astype(xp.float32), weight_size, abs(value[rows]), error, xp)
        if problem["bias"]:
            _add_bias(value[rows], bound[rows], inputs["bias"], C, error, xp)
        if problem["gelu"]:
            for kept, of_out in zip(found["pre"], found["out"], strict=True):
                kept[rows] = of_out[rows]
            _apply_gelu(value[rows], bound[rows], error, xp)
    return {name: Expected(*(part.reshape(B, T, OC) for part in parts)) for name, parts in found.items()}


def _slices(rows: int, row: int) -> Iterator[slice]:
    step = max(1, SLICE // row)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _accumulation(C: int, error: ErrorModel) -> float:
    """Relative error of a sum of C products, each of which may be rounded before it is added, and the bias."""
    return error.accumulation(C + 1) + 2.0 * error.fp32


def _product_bound(inp: Array, weight: Array, product: Array, error: ErrorModel, xp: Any) -> Array:
    """Error of inp @ weight, given magnitudes; `product` is that of inp @ weight.

    TF32: a tensor core may cut its operands instead of rounding them, so with u = 2^-11 an operand's relative error
    lies in [0, 2u), all of one sign. Its mean shrinks every product alike, hence the result, by at most 2 u of its
    value. What remains is of random sign, with a standard deviation of 0.6 u for the two operands of a product: 8 u
    times the root of the sum of squares is 13 of them, where the extreme of 1e8 elements is 6. For structured inputs,
    where nothing is random, the sum of magnitudes takes the place of that root.
    """
    accumulated = _accumulation(inp.shape[1], error)
    of_operands = 8.0 * error.gemm
    bound = xp.matmul(inp, weight)
    if of_operands and error.structured:
        bound *= accumulated + of_operands
    else:
        bound *= accumulated
        if of_operands:
            bound += of_operands * xp.sqrt(xp.matmul(inp * inp, weight * weight))
    if of_operands:
        bound += 2.0 * error.gemm * product
    return bound


def _add_bias(value: Array, bound: Array, bias: Array, C: int, error: ErrorModel, xp: Any) -> None:
    """Add the bias to products. These may be stored in the type of out before (version 2)."""
    bound += rounding(abs(value), error)
    bound += _accumulation(C, error) * abs(bias)
    value += bias


def _apply_gelu(value: Array, bound: Array, error: ErrorModel, xp: Any) -> None:
    """Replace sums by GELU of them, and their bound by that of GELU: x (1 + tanh(u)) / 2.

    Sums may be stored in the type of out before GELU is applied (`pre`, or version 2 without a bias).
    In fp32 the argument of tanh is some four roundings off, which moves tanh by less than two of them, since u times
    its slope there is below 0.45. The remaining steps round numbers that are not larger than x.
    """
    bound += rounding(abs(value), error)
    bound *= GELU_STEEPEST
    bound += (0.5 * EPILOGUE_TANH[STORAGE[error.dtype]] + 10.0 * error.fp32) * abs(value)
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


def _bool(value: int) -> str:
    return str(bool(value)).lower()


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    side = math.isqrt(block)
    blocks = ceil_div(N, side) * ceil_div(OC, side)
    args = ("out", "inp", "weight", _bias(problem) or "weight", N, C, OC, problem["bias"], problem["gelu"])
    return (Launch(f"matmul_forward1<{problem.c_type}>", (blocks,), (side, side), args),)


def _bias(problem: Problem) -> str:
    return "bias" if problem["bias"] else ""


def _gemm(problem: Problem, bias: str, gelu: bool, aux: str = "") -> Gemm:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    inp, weight = Matrix("inp", N, C), Matrix("weight", OC, C, transpose=True)
    return Gemm(inp, weight, Matrix("out", N, OC), problem.dtype, bias=bias, gelu=gelu, aux=aux)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    gemm, with_bias, with_gelu = _gemm(problem, "", False), problem["bias"], problem["gelu"]
    if not (with_bias or with_gelu):
        return (gemm,)
    OC, packet = problem["OC"], PACKET_BYTES // (4 if problem.storage == "fp32" else 2)
    blocks = _rows(problem) * ceil_div(OC, block * packet)
    kernel = f"add_bias<{problem.c_type}, {_bool(OC % packet == 0)}>"
    args = ("out", _bias(problem) or "weight", OC, with_bias, with_gelu)
    return (gemm, Launch(kernel, (blocks,), (block,), args))


def _plan3(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (_gemm(problem, _bias(problem), bool(problem["gelu"])),)


def _plan4(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    aligned = C % QUAD == 0 and OC % QUAD == 0
    kernel = f"matmul_forward4<{problem.c_type}, {_bool(aligned)}, {_bool(problem['bias'])}, {_bool(problem['gelu'])}>"
    blocks = ceil_div(N, TILE) * ceil_div(OC, TILE)
    args = ("out", "inp", "weight", _bias(problem) or "weight", N, C, OC)
    return (Launch(kernel, (blocks,), (block,), args),)


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (_gemm(problem, _bias(problem), True, "pre"),)


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
    Version(
        5,
        "as 3, and keeps what GELU is applied to, which the backward pass needs",
        _plan5,
        DTYPES,
        fixed=TILE_THREADS,
        rules=(
            Rule("gelu=1: there is nothing to keep without GELU", lambda problem: problem["gelu"] == 1),
            # Through twelve layers of GPT-2 the library's tanh makes gradients twice as wrong as PyTorch's.
            Rule("tf32, bf16 or fp16: the library's GELU is too coarse for fp32", lambda p: p.dtype != "fp32"),
            Rule(f"OC divisible by {AUX_DIVISOR}", lambda problem: problem["OC"] % AUX_DIVISOR == 0),
        ),
        saves=("pre",),
    ),
)


# ----------------------------------------------------------------------------------------------- family


def _shape(
    B: int,
    T: int,
    C: int,
    OC: int,
    gelu: int,
    why: str,
    versions: tuple[int, ...] | None = None,
    block: int = 0,
    bias: int = 1,
) -> CheckShape:
    sizes = {"B": B, "T": T, "C": C, "OC": OC, "gelu": gelu, "bias": bias}
    return CheckShape(sizes, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, 0, "one of everything"),
    _shape(1, 1, 2, 3, 1, "one token, GELU"),
    _shape(2, 5, 3, 7, 0, "primes"),
    _shape(1, 33, 13, 35, 1, "one past a warp of rows, nothing aligned, GELU"),
    _shape(3, 11, 12, 40, 1, "aligned: C is one slab and a half; GELU"),
    _shape(1, 5, 8, 6, 1, "C aligned, OC at half a packet of fp32"),
    _shape(1, 6, 6, 8, 1, "OC aligned, C at half a packet of fp32"),
    _shape(2, 3, 5, 7, 0, "no bias", bias=0),
    _shape(1, 7, 8, 16, 1, "no bias, aligned, GELU", bias=0),
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
    summary="linear layer: product with a weight matrix, bias and GELU where asked",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "C": "input channels",
        "OC": "output channels",
        "gelu": "1: GELU follows",
        "bias": "1: with a bias",
    },
    dtypes=DTYPES,
    presets={
        "default": {"B": 32, "T": 1024, "C": 768, "OC": 3072, "gelu": 0, "bias": 1},
        "small": {"B": 2, "T": 64, "C": 64, "OC": 160, "gelu": 0, "bias": 1},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    flops=lambda problem: 2.0 * _rows(problem) * problem["C"] * problem["OC"],
    flags=("gelu", "bias"),
)
