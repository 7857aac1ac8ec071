"""The matrices of a GEMM as cuBLASLt sees them, and what it asks of them: pure checks, the same on every device, so
that a plan which the emulator takes can be launched on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kbench.contracts import AUX_DIVISOR
from kbench.errors import LaunchRefused
from kbench.family import DTYPES, ITEM_SIZES, STORAGE, Gemm, Matrix, Ref, Tensor

# What a matrix may be stored in. A GEMM multiplies the storage type of the dtype that it computes in.
MATRIX_TYPES = ("fp32", "bf16", "fp16")

# Every tensor starts at a multiple of this (cudaMalloc promises as much, and `CudaDevice.alloc` keeps it).
BASE_ALIGNMENT = 256
# Of what epilogues read and write, 16 bytes at a time; the heuristic is not asked about it as it is about matrices.
EPILOGUE_ALIGNMENT = 16


@dataclass(frozen=True)
class Operand:
    """One matrix of a GEMM, the one of its epilogue, or its bias as a column, as cuBLASLt sees it. Sizes in elements,
    offset and alignment in bytes."""

    tensor: str
    dtype: str
    rows: int  # column-major: the row-major matrix's columns
    cols: int
    ld: int
    stride: int
    offset: int
    alignment: int
    transpose: bool
    span: int  # bytes from the first element to behind the last one, all batch members included


def operands(step: Gemm, tensors: Sequence[Tensor]) -> tuple[Operand, Operand, Operand]:
    """cuBLASLt's A, B and C = D: our b, a and out. Raises LaunchRefused if types or ranges do not fit."""
    known = {tensor.name: tensor for tensor in tensors}
    if step.compute not in DTYPES:
        raise LaunchRefused(f"a GEMM cannot compute in {step.compute!r}; it can in {', '.join(DTYPES)}")
    if step.batch < 1:
        raise LaunchRefused(f"a GEMM for {step.batch} batch members")
    left, right, out = (_operand(matrix, step.batch, known) for matrix in (step.b, step.a, step.out))
    storage = STORAGE[step.compute]
    for operand in (left, right):
        if operand.dtype != storage:
            raise LaunchRefused(f"a {step.compute} GEMM reads {storage}, tensor {operand.tensor} holds {operand.dtype}")
    if out.dtype not in (storage, "fp32"):
        raise LaunchRefused(f"a {step.compute} GEMM writes {storage} or fp32, tensor {out.tensor} holds {out.dtype}")
    if step.batch > 1 and not _are_apart(step.out, step.batch):
        raise LaunchRefused(f"the batch members of GEMM output {out.tensor} overlap: {out.stride} apart ({step.out})")
    return left, right, out


def _are_apart(out: Matrix, batch: int) -> bool:
    """Whether members follow each other, or lie side by side within the rows, as the heads of a token do."""
    follow = out.stride >= (out.rows - 1) * out.leading + out.cols
    return follow or (out.stride >= out.cols and (batch - 1) * out.stride + out.cols <= out.leading)


def bias_operand(step: Gemm, tensors: Sequence[Tensor]) -> Operand | None:
    """The bias of a GEMM whose operands fit, if it has one. Raises LaunchRefused if it cannot be added."""
    if not step.bias:
        return None
    bias = _epilogue_operand(step, reference(step.bias), 1, tensors, "adds a bias")
    if bias.alignment % EPILOGUE_ALIGNMENT:
        raise LaunchRefused(
            f"a GEMM reads its bias from {bias.offset} bytes into tensor {bias.tensor}, "
            f"which is not a multiple of {EPILOGUE_ALIGNMENT}"
        )
    return bias


def aux_operand(step: Gemm, tensors: Sequence[Tensor]) -> Operand | None:
    """What GELU of a GEMM is, or was, applied to, if the step names it; the GEMM's operands fit.

    Raises LaunchRefused for what cuBLASLt does not take, or does not document.
    """
    if not step.aux:
        return None
    what = "keeps what GELU is applied to" if step.gelu else "goes back through GELU"
    if step.batch > 1:
        raise LaunchRefused(f"a GEMM that {what} has one batch member, not {step.batch}")
    if not step.gelu and step.bias:
        raise LaunchRefused(f"a GEMM that {what} adds no bias, here {reference(step.bias).tensor}")
    if not step.gelu and step.beta:
        raise LaunchRefused(f"a GEMM that {what} does not add to its output (beta {step.beta:g})")
    aux = _epilogue_operand(step, reference(step.aux), step.out.rows, tensors, f"{what} has it")
    if aux.alignment % EPILOGUE_ALIGNMENT:
        raise LaunchRefused(
            f"a GEMM that {what} has it {aux.offset} bytes into tensor {aux.tensor}, "
            f"which is not a multiple of {EPILOGUE_ALIGNMENT}"
        )
    if aux.ld % AUX_DIVISOR:
        raise LaunchRefused(f"a GEMM that {what} needs columns divisible by {AUX_DIVISOR}, {aux.tensor} has {aux.ld}")
    _, _, out = operands(step, tensors)
    if _overlap(aux, out):
        raise LaunchRefused(f"a GEMM that {what} has it in tensor {aux.tensor} where it writes its output")
    return aux


def reference(name: str | Ref) -> Ref:
    """A tensor and an offset, where the offset may be left out."""
    return name if isinstance(name, Ref) else Ref(name)


def _epilogue_operand(step: Gemm, ref: Ref, rows: int, tensors: Sequence[Tensor], what: str) -> Operand:
    """`rows` rows of the output's width, without gaps, of its type."""
    known = {tensor.name: tensor for tensor in tensors}
    operand = _operand(Matrix(ref.tensor, rows, step.out.cols, offset=ref.offset), 1, known)
    out = known[step.out.tensor]
    if operand.dtype != out.dtype:
        raise LaunchRefused(f"a GEMM {what} of its output's type {out.dtype}, {operand.tensor} holds {operand.dtype}")
    return operand


def _overlap(one: Operand, other: Operand) -> bool:
    apart = one.offset + one.span <= other.offset or other.offset + other.span <= one.offset
    return one.tensor == other.tensor and not apart


def _operand(matrix: Matrix, batch: int, tensors: Mapping[str, Tensor]) -> Operand:
    if matrix.tensor not in tensors:
        raise LaunchRefused(f"a GEMM names the tensor {matrix.tensor!r}; the family has {', '.join(tensors)}")
    tensor = tensors[matrix.tensor]
    if tensor.dtype not in MATRIX_TYPES:
        raise LaunchRefused(f"a GEMM cannot use tensor {tensor.name}, which holds {tensor.dtype}")
    if min(matrix.rows, matrix.cols) < 1 or matrix.leading < matrix.cols or min(matrix.offset, matrix.stride) < 0:
        raise LaunchRefused(f"a GEMM describes tensor {tensor.name} as {matrix}, which is no matrix")
    span = (batch - 1) * matrix.stride + (matrix.rows - 1) * matrix.leading + matrix.cols
    if matrix.offset + span > tensor.count:
        raise LaunchRefused(
            f"a GEMM uses elements {matrix.offset} to {matrix.offset + span} of tensor {tensor.name}, "
            f"which has {tensor.count}"
        )
    item = ITEM_SIZES[tensor.dtype]
    return Operand(
        tensor=tensor.name,
        dtype=tensor.dtype,
        rows=matrix.cols,
        cols=matrix.rows,
        ld=matrix.leading,
        stride=matrix.stride,
        offset=matrix.offset * item,
        alignment=math.gcd(BASE_ALIGNMENT, matrix.offset * item),
        transpose=matrix.transpose,
        span=span * item,
    )
