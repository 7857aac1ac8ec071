"""Backward pass of a linear layer: gradients of its input, weight and bias from the gradient of its output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kbench.family import (
    PACKET_BYTES,
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
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
)

DTYPES = ("fp32", "tf32", "bf16", "fp16")

# Elements of a gradient that the reference works on at once: 32 MB in float64, so temporaries are small.
SLICE = 1 << 22

BLOCK = 256  # threads of both kernels
# Of a stretch, at least: 8 warps with two batches of 4 rows each. Shorter ones would make the second stage the longer.
LEAST_ROWS = 64


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, OC = (problem[name] for name in ("B", "T", "C", "OC"))
    dtype = problem.storage
    role = "inout" if problem["accumulate"] else "out"
    scale = _gradient_scale(B * T)
    return (
        Tensor("dout", (B, T, OC), dtype, "in", ("b", "t", "o"), draw=normal(0.02 * scale, 0.3 * scale)),
        Tensor("inp", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1, 0.7)),
        Tensor("weight", (OC, C), dtype, "in", ("o", "c"), draw=normal(0.01, 1.0 / math.sqrt(C))),
        Tensor("dinp", (B, T, C), dtype, "out", ("b", "t", "c")),
        Tensor("dweight", (OC, C), dtype, role, ("o", "c"), draw=normal(0.1, 1.0)),
        Tensor("dbias", (OC,), dtype, role, ("o",), draw=normal(-0.3, 1.0)),
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
    before = {name: inputs[name] if problem["accumulate"] else None for name in ("dweight", "dbias")}
    dinp, dinp_bound = _product(dout, weight, None, error, xp)
    dweight = _product(dout.T, inp, before["dweight"], error, xp)
    dbias = dout.sum(axis=0)
    magnitude = abs(dout).sum(axis=0)
    if before["dbias"] is not None:
        dbias += before["dbias"]
        magnitude += abs(before["dbias"])
    return {
        "dinp": Expected(dinp.reshape(B, T, C), dinp_bound.reshape(B, T, C)),
        "dweight": Expected(*dweight),
        "dbias": Expected(dbias, error.accumulation(N + 1) * magnitude),
    }


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
    rounding = 8.0 * error.gemm
    for rows in _slices(*value.shape):
        xp.matmul(a[rows], b, out=value[rows])
        a_size = abs(a[rows]).astype(xp.float32)
        part = bound[rows]
        xp.matmul(a_size, b_size, out=part)
        if rounding and error.structured:
            part *= accumulated + rounding
        else:
            part *= accumulated
            if rounding:
                part += rounding * xp.sqrt(xp.matmul(a_size * a_size, b_size * b_size))
        if rounding:
            part += 2.0 * error.gemm * abs(value[rows])
        if before is not None:
            # cuBLASLt may round the product to the type of the output before it adds what was there.
            part += accumulated * abs(before[rows]) + error.storage * abs(value[rows])
            value[rows] += before[rows]
    return value, bound


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
    return (Tensor("partials", (_stretches(problem, props)[0], problem["OC"]), "fp32", "scratch"),)


def _plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N, C, OC, accumulate = _rows(problem), problem["C"], problem["OC"], problem["accumulate"]
    packet, strips = _strips(problem)
    stretches, rows = _stretches(problem, props)
    aligned = str(OC % packet == 0).lower()
    dout, weight = Matrix("dout", N, OC), Matrix("weight", OC, C)
    turned = Matrix("dout", N, OC, transpose=True)
    return (
        Launch(
            f"sum_stretches<{problem.c_type}, {aligned}>", (stretches * strips,), (block,),
            ("partials", "dout", N, OC, rows),
        ),
        Launch(
            f"add_stretches<{problem.c_type}>", (ceil_div(OC, WARP),), (block,),
            ("dbias", "partials", stretches, OC, accumulate),
        ),
        Gemm(dout, weight, Matrix("dinp", N, C), problem.dtype),
        Gemm(turned, Matrix("inp", N, C), Matrix("dweight", OC, C), problem.dtype, beta=float(accumulate)),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- family


def _shape(B: int, T: int, C: int, OC: int, accumulate: int, why: str) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C, "OC": OC, "accumulate": accumulate}, why)


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
)

FAMILY = Family(
    name="matmul_backward",
    summary="backward pass of a linear layer: gradients of input, weight and bias",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "C": "input channels",
        "OC": "output channels",
        "accumulate": "1: add to dweight and dbias, 0: replace them",
    },
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "C": 768, "OC": 3072, "accumulate": 1},
        "small": {"B": 2, "T": 256, "C": 64, "OC": 192, "accumulate": 1},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1, "two GEMMs; column sums in two stages, coalesced, without atomics", _plan, DTYPES, fixed=BLOCK,
            scratch=_scratch,
        ),
    ),
    # Two products, and the sums.
    flops=lambda problem: _rows(problem) * problem["OC"] * (4.0 * problem["C"] + 1.0),
    flags=("accumulate",),
)  # fmt: skip
