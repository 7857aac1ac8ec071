"""Backward pass of a linear layer: gradients of its input, weight and bias from the gradient of its output.

With the flag `gelu` the input came out of GELU, and the pass goes back through that, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kbench.contracts import AUX_DIVISOR, EPILOGUE_TANH, GELU_CUBIC, GELU_SLOPE, rounding
from kbench.family import (
    PACKET_BYTES,
    STORAGE,
    WARP,
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

# Elements of a gradient that the reference works on at once: 32 MB in float64, so temporaries are small.
SLICE = 1 << 22

BLOCK = 256  # threads of all kernels
# Of a stretch, at least: 8 warps with two batches of 4 rows each. Shorter ones would make the second stage the longer.
LEAST_ROWS = 64


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, OC = (problem[name] for name in ("B", "T", "C", "OC"))
    dtype = problem.storage
    role = "inout" if problem["accumulate"] else "out"
    scale = _gradient_scale(B * T)
    # What GELU was applied to. inp need not be GELU of it: nothing here depends on that.
    pre = Tensor("pre", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1, 1.2))
    dbias = Tensor("dbias", (OC,), dtype, role, ("o",), draw=normal(-0.3, 1.0))
    return (
        Tensor("dout", (B, T, OC), dtype, "in", ("b", "t", "o"), draw=normal(0.02 * scale, 0.3 * scale)),
        Tensor("inp", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1, 0.7)),
        Tensor("weight", (OC, C), dtype, "in", ("o", "c"), draw=normal(0.01, 1.0 / math.sqrt(C))),
        *([pre] if problem["gelu"] else []),
        Tensor("dinp", (B, T, C), dtype, "out", ("b", "t", "c")),
        Tensor("dweight", (OC, C), dtype, role, ("o", "c"), draw=normal(0.1, 1.0)),
        *([dbias] if problem["bias"] else []),
    )


def _gradient_scale(rows: int) -> float:
    """Gradients of a mean over many rows are small, so their sums over all rows are numbers of fp16, which ends at
    65504: also of patterned inputs, whose products dout * inp are up to 7.8 before they are scaled."""
    return min(1.0, 4000.0 / rows)


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64 and bounds in float32, some rows at a time."""
    B, T, C, OC = (problem[name] for name in ("B", "T", "C", "OC"))
    N = B * T
    dout, inp, weight = inputs["dout"].reshape(N, OC), inputs["inp"].reshape(N, C), inputs["weight"]
    dinp, dinp_bound = _product(dout, weight, None, error, xp)
    if problem["gelu"]:
        _go_back_through_gelu(dinp, dinp_bound, inputs["pre"].reshape(N, C), error, xp)
    found = {
        "dinp": Expected(dinp.reshape(B, T, C), dinp_bound.reshape(B, T, C)),
        "dweight": Expected(*_product(dout.T, inp, inputs["dweight"] if problem["accumulate"] else None, error, xp)),
    }
    if problem["bias"]:
        found["dbias"] = _column_sums(dout, inputs["dbias"] if problem["accumulate"] else None, error)
    return found


def _column_sums(dout: Array, before: Array | None, error: ErrorModel) -> Expected:
    value, magnitude = dout.sum(axis=0), abs(dout).sum(axis=0)
    if before is not None:
        value += before
        magnitude += abs(before)
    return Expected(value, error.accumulation(dout.shape[0] + 1) * magnitude)


def _slices(rows: int, row: int) -> Iterator[slice]:
    step = max(1, SLICE // row)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _product(a: Array, b: Array, before: Array | None, error: ErrorModel, xp: Any) -> tuple[Array, Array]:
    """a @ b, plus `before`, and its error bound.

    Products, each of which may be rounded before it is added, and what was there before.
    TF32: a tensor core may cut its operands instead of rounding them, so with u = 2^-11 an operand's relative error
    lies in [0, 2u), all of one sign. Its mean shrinks every product alike, hence the result, by at most 2 u of its
    value. What remains is of random sign, with a standard deviation of 0.6 u for the two operands of a product: 8 u
    times the root of the sum of squares is 13 of them, where the extreme of 1e8 elements is 6. For structured inputs,
    where nothing is random, the sum of magnitudes takes the place of that root.
    """
    value = xp.empty((a.shape[0], b.shape[1]))
    bound = xp.empty(value.shape, xp.float32)
    b_size = abs(b).astype(xp.float32)
    accumulated = error.accumulation(a.shape[1] + 1) + 2.0 * error.fp32
    of_operands = 8.0 * error.gemm
    for rows in _slices(*value.shape):
        xp.matmul(a[rows], b, out=value[rows])
        a_size = abs(a[rows]).astype(xp.float32)
        part = bound[rows]
        xp.matmul(a_size, b_size, out=part)
        if of_operands and error.structured:
            part *= accumulated + of_operands
        else:
            part *= accumulated
            if of_operands:
                part += of_operands * xp.sqrt(xp.matmul(a_size * a_size, b_size * b_size))
        if of_operands:
            part += 2.0 * error.gemm * abs(value[rows])
        if before is not None:
            # cuBLASLt may round the product to the type of the output before it adds what was there.
            part += accumulated * abs(before[rows]) + rounding(abs(value[rows]), error)
            value[rows] += before[rows]
    return value, bound


def _go_back_through_gelu(value: Array, bound: Array, pre: Array, error: ErrorModel, xp: Any) -> None:
    """Multiply products by the derivative of GELU at x = pre, and make their bound that of the result.

    The product may be rounded to the type of dinp before. With t = tanh(u) and h = (1 + t) / 2 the derivative is
    h + 2 h (1 - h) x u'. The tanh of an epilogue moves it by its error times 1/2 + |x t u'|. What a kernel does in fp32
    is far less. In units of the roundoff: u is 8 off, h then 16 |u| h (1 - h) < 2, and 5 h + 1 more by its exponential
    and quotient; 1 - h is off by as much as h and a rounding, all of which is multiplied by 2 |x t u'|; products and
    sums give 5 at most. 16 (1 + |x t u'|) covers that. Last comes the product with the derivative.
    """
    tanh_error = EPILOGUE_TANH[STORAGE[error.dtype]]
    for rows in _slices(*value.shape):
        x, product, part = pre[rows], value[rows], bound[rows]
        square = x * x
        lever = GELU_SLOPE * x * (1.0 + 3.0 * GELU_CUBIC * square)  # x u'
        square *= GELU_CUBIC
        square += 1.0
        t = xp.tanh(GELU_SLOPE * x * square)
        slope = 0.5 * (1.0 + t) + 0.5 * (1.0 - t * t) * lever
        lever *= t
        xp.abs(lever, out=lever)
        wrong = tanh_error * (0.5 + lever) + 16.0 * error.fp32 * (1.0 + lever)
        part += rounding(abs(product), error)
        part *= abs(slope) + wrong
        part += wrong * abs(product)
        product *= slope
        part += 2.0 * error.fp32 * abs(product)


# ------------------------------------------------------------------------------------------------ plans


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


def _strips(problem: Problem) -> tuple[int, int]:
    """Elements of a packet, and the number of blocks that share a row of dout: each has 32 packets."""
    packet = PACKET_BYTES // (4 if problem.storage == "fp32" else 2)
    return packet, ceil_div(problem["OC"], WARP * packet)


def _stretches(problem: Problem, props: Props) -> tuple[int, int]:
    """Into how many stretches rows are divided, and how many rows each has: as many as the device can run at once."""
    blocks = props.multiprocessors * (props.threads_per_multiprocessor // BLOCK)
    wanted = min(blocks // _strips(problem)[1], _rows(problem) // LEAST_ROWS)
    rows = ceil_div(_rows(problem), max(1, wanted))
    return ceil_div(_rows(problem), rows), rows


def _scratch(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    if not problem["bias"]:
        return ()
    return (Tensor("partials", (_stretches(problem, props)[0], problem["OC"]), "fp32", "scratch"),)


def _sums(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    if not problem["bias"]:
        return ()
    N, OC = _rows(problem), problem["OC"]
    packet, strips = _strips(problem)
    stretches, rows = _stretches(problem, props)
    aligned = str(OC % packet == 0).lower()
    return (
        Launch(
            f"sum_stretches<{problem.c_type}, {aligned}>", (stretches * strips,), (block,),
            ("partials", "dout", N, OC, rows),
        ),
        Launch(
            f"add_stretches<{problem.c_type}>", (ceil_div(OC, WARP),), (block,),
            ("dbias", "partials", stretches, OC, problem["accumulate"]),
        ),
    )  # fmt: skip


def _gemms(problem: Problem, aux: str = "") -> tuple[Gemm, Gemm]:
    N, C, OC = _rows(problem), problem["C"], problem["OC"]
    dout, weight = Matrix("dout", N, OC), Matrix("weight", OC, C)
    turned, beta = Matrix("dout", N, OC, transpose=True), float(problem["accumulate"])
    return (
        Gemm(dout, weight, Matrix("dinp", N, C), problem.dtype, aux=aux),
        Gemm(turned, Matrix("inp", N, C), Matrix("dweight", OC, C), problem.dtype, beta=beta),
    )


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    of_input, of_weight = _gemms(problem)
    back: tuple[Step, ...] = ()
    if problem["gelu"]:
        count, packet = _rows(problem) * problem["C"], _strips(problem)[0]
        kernel = f"multiply_by_gelu_slope<{problem.c_type}>"
        back = (Launch(kernel, (ceil_div(count, block * packet),), (block,), ("dinp", "pre", count)),)
    return (*_sums(problem, block, props), of_input, *back, of_weight)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (*_sums(problem, block, props), *_gemms(problem, "pre"))


# ----------------------------------------------------------------------------------------------- family


def _shape(B: int, T: int, C: int, OC: int, accumulate: int, why: str, gelu: int = 0, bias: int = 1) -> CheckShape:
    sizes = {"B": B, "T": T, "C": C, "OC": OC, "accumulate": accumulate, "gelu": gelu, "bias": bias}
    return CheckShape(sizes, why)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, 0, "one of everything"),
    _shape(1, 1, 3, 5, 1, "one token, added to what is there"),
    _shape(2, 3, 5, 7, 0, "primes, fewer rows than warps"),
    _shape(1, 33, 12, 132, 1, "aligned, one packet past a strip of 128 channels"),
    _shape(1, 33, 12, 256, 1, "whole strips in fp32: none covers for another"),
    _shape(1, 33, 2, 512, 1, "whole strips in 16 bits"),
    _shape(1, 97, 6, 257, 0, "one past a strip of either width, and a row past three times 32"),
    _shape(3, 67, 4, 37, 1, "three stretches of 67 rows, odd channels"),
    _shape(1, 643, 2, 8, 1, "ten stretches, one shorter than the others, fewer channels than a warp"),
    _shape(1, 2000, 3, 2, 0, "long sums"),
    _shape(2, 3, 5, 7, 0, "no bias", bias=0),
    _shape(1, 1, 1, 1, 1, "one of everything, GELU", gelu=1),
    _shape(2, 5, 8, 6, 0, "GELU, fewer packets than a block has threads", gelu=1),
    _shape(1, 301, 7, 5, 1, "GELU, packets for more than one block, the last one cut", gelu=1),
    _shape(1, 257, 16, 3, 1, "GELU, aligned, no bias", gelu=1, bias=0),
)

FAMILY = Family(
    name="matmul_backward",
    summary="backward pass of a linear layer: gradients of input, weight and bias, through GELU where asked",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "C": "input channels",
        "OC": "output channels",
        "accumulate": "1: add to dweight and dbias, 0: replace them",
        "gelu": "1: inp came out of GELU, and dinp is the gradient of what went into it",
        "bias": "1: with a bias",
    },
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "C": 768, "OC": 3072, "accumulate": 1, "gelu": 0, "bias": 1},
        "small": {"B": 2, "T": 256, "C": 64, "OC": 192, "accumulate": 1, "gelu": 0, "bias": 1},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1, "two GEMMs; column sums in two stages, coalesced, without atomics; GELU's derivative after its GEMM",
            _plan1, DTYPES, fixed=BLOCK, scratch=_scratch,
        ),
        Version(
            2, "as 1, GELU's derivative in the epilogue of the input gradient's GEMM", _plan2, DTYPES, fixed=BLOCK,
            rules=(
                Rule("gelu=1: without GELU it is version 1", lambda problem: problem["gelu"] == 1),
                Rule(f"C divisible by {AUX_DIVISOR}", lambda problem: problem["C"] % AUX_DIVISOR == 0),
            ),
            needs=("pre",),  # from the forward pass; so does version 1 where gelu is 1
            scratch=_scratch,
        ),
    ),
    # Two products, and the sums.
    flops=lambda problem: _rows(problem) * problem["OC"] * (4.0 * problem["C"] + problem["bias"]),
    flags=("accumulate", "gelu", "bias"),
)  # fmt: skip
