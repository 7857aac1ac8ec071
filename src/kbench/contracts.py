"""What contracts of several families share: LayerNorm's answer, GELU beside a GEMM, rows that wait in shared memory."""

from __future__ import annotations

import math
from typing import Any

from kbench.family import PACKET_BYTES, STORAGE, Array, ErrorModel, Expected, Props, ceil_div

# ------------------------------------------------------------------------------------------------ LayerNorm

EPSILON = 1e-5  # added to the variance


def layernorm(x: Array, weight: Array, bias: Array, error: ErrorModel, xp: Any) -> tuple[Expected, Expected, Expected]:
    """LayerNorm of the rows of x (rows, C), mean and rstd (rows): values in float64, bounds in float32 for the former.

    Besides what it returns it takes one float32 array of the size of x.

    What a right version may do: add up in any order, in one pass or in two, where a single pass shifts by the row's
    first element; it keeps everything between input and output in fp32. With a = the error of a sum of C terms per unit
    of their magnitude:

    mean: a times the root mean square of what is added up, x or x - x[0] (no less than the mean magnitude); 4 more
        roundings for x - x[0], the quotient, and adding x[0] again.
    variance: in two passes a times the variance, plus the square of the mean's error; in a single pass a times the
        mean square of x - x[0], and twice that for the square of its mean, which is no larger. Squared deviations of
        16-bit numbers take few values, so where one thread adds up a whole row, roundings of many terms are the same,
        and their sum grows with C, not its root: a sixteenth of the worst case, C u, is added to a.
    rstd: what the variance's error makes of it, on the side where it makes more, and 8 roundings: rsqrtf is allowed 2
        units in the last place, which are 4, the argument and the epsilon have one each.
    out: the error of the mean times rstd, that of rstd times x - mean, and a rounding for each operation.
    """
    C = x.shape[1]
    mean = x.mean(axis=1)
    out = x - mean[:, None]
    variance = xp.einsum("rc,rc->r", out, out) / C
    rstd = 1.0 / xp.sqrt(variance + EPSILON)

    u = error.fp32
    a = error.accumulation(C) + 4.0 * u
    shifted = variance + (mean - x[:, 0]) ** 2  # mean square of x - x[0]
    mean_error = a * xp.sqrt(xp.maximum(variance + mean * mean, shifted))
    of_squares = a + (C / 16.0 * u if error.storage > u else 0.0)
    variance_error = 3.0 * of_squares * shifted + mean_error * mean_error
    largest = 1.0 / xp.sqrt(xp.maximum(variance - variance_error, 0.0) + EPSILON)
    smallest = 1.0 / xp.sqrt(variance + variance_error + EPSILON)
    rstd_error = xp.maximum(largest - rstd, rstd - smallest) + 8.0 * u * rstd

    single = xp.float32
    bound = out.astype(single)
    xp.abs(bound, out=bound)
    bound *= (rstd_error + 4.0 * u * rstd).astype(single)[:, None]
    bound += (mean_error * (rstd + rstd_error)).astype(single)[:, None]
    bound *= xp.abs(weight).astype(single)
    out *= rstd[:, None]
    out *= weight
    out += bias
    # Adding the bias is one more rounding in fp32.
    magnitude = out.astype(single)
    xp.abs(magnitude, out=magnitude)
    magnitude *= u
    bound += magnitude
    return Expected(out, bound), Expected(mean, mean_error), Expected(rstd, rstd_error)


# ------------------------------------------------------------------------------------------ GELU beside a GEMM

# GELU in its tanh form is x / 2 * (1 + tanh(u)) with u = GELU_SLOPE * (x + GELU_CUBIC * x^3).
GELU_SLOPE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715

# What tanh may be off in the epilogue of a GEMM, by the type of the output. cuBLASLt 13 was seen to be 2^-17 off on an
# H200 with fp32 outputs; for 16-bit ones a library may use tanh.approx, an instruction that is 2^-11 off at most. Twice
# that is allowed, so that it takes half of the bound.
EPILOGUE_TANH = {"fp32": 2.0**-16, "bf16": 2.0**-10, "fp16": 2.0**-10}

# Below the smallest normal number, the spacing of a type stays the same.
SMALLEST_NORMAL = {"fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-14}


def rounding(magnitude: Array, error: ErrorModel) -> Array:
    """What a number may be off after it was stored."""
    return error.storage * (magnitude + SMALLEST_NORMAL[STORAGE[error.dtype]])


# Divides the width of a matrix that cuBLASLt writes or reads beside its output, in elements of any type
# (CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD).
AUX_DIVISOR = 8

# ------------------------------------------------------------------------------- rows that wait in shared memory

# Of rows that pass through shared memory: steps that packets are loaded ahead, the most that has room. Bytes under way
# that keep a multiprocessor's share of memory busy. What a block needs beside: a few static arrays, and 1 KiB that the
# system takes. Registers of a thread, at most: its kernel may have 1024 of them.
AHEAD = (6, 3, 1)
ENOUGH_UNDER_WAY = 32 << 10
STATIC_SHARED = 1024
SYSTEM_SHARED = 1024
REGISTERS = 64


def row_ring(row_bytes: int, block: int, props: Props) -> tuple[int, int, int] | None:
    """For rows that pass through shared memory (`RowRing` in softmax.cuh): blocks at a time on a multiprocessor, steps
    ahead, bytes of a block.

    As much as possible under way up to what is enough, and then as many blocks as possible: while one of them is at the
    end of a row, others are not. None where no row fits.
    """
    step = block * PACKET_BYTES
    row = max(1, ceil_div(row_bytes // PACKET_BYTES, block)) * step
    threads = min(props.threads_per_multiprocessor, props.registers_per_multiprocessor // REGISTERS)
    choices = []
    for blocks in range(1, max(1, threads // block) + 1):
        room = min(props.shared_per_block_optin, props.shared_per_multiprocessor // blocks - SYSTEM_SHARED)
        for ahead in AHEAD:
            if row + ahead * step <= room - STATIC_SHARED:
                choices.append((min(blocks * ahead * step, ENOUGH_UNDER_WAY), blocks, ahead))
    if not choices:
        return None
    _, blocks, ahead = max(choices)
    return blocks, ahead, row + ahead * step
