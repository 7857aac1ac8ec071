"""GEMM, Fill and Copy steps on the CPU, in numpy, on the memory of buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kbench.device.base import Buffer
from kbench.device.gemm_operands import aux_operand, bias_operand, operands, reference
from kbench.errors import LaunchRefused, LibraryMissing
from kbench.family import AllReduce, Array, Copy, Fill, Gemm, Matrix, Ref, Sdpa, SdpaBackward, Tensor

# The steps that are no kernels, but a library's work.
LibraryStep = Gemm | Fill | Copy | Sdpa | SdpaBackward | AllReduce

_TF32_DROPPED = 13  # of fp32's 23 mantissa bits; 10 stay


def check_step(step: LibraryStep, tensors: Mapping[str, Tensor]) -> None:
    """Raises LaunchRefused for what a GPU refuses too: a step that reaches outside a tensor, types that do not go
    together, outputs that overlap. Raises LibraryMissing for a step that only a GPU's library can do."""
    if isinstance(step, Sdpa | SdpaBackward | AllReduce):
        library = "NCCL" if isinstance(step, AllReduce) else "cuDNN's attention"
        raise LibraryMissing(f"the emulator has no {library}")
    if isinstance(step, Gemm):
        operands(step, [*tensors.values()])
        bias_operand(step, [*tensors.values()])
        aux_operand(step, [*tensors.values()])
    elif isinstance(step, Fill):
        _known("Fill", step.target.tensor, tensors)
        _check_range("Fill", step.target, fill_count(step, tensors), tensors)
    else:
        _check_range("Copy", step.target, step.count, tensors)
        _check_range("Copy", step.source, step.count, tensors)
        to, source = tensors[step.target.tensor], tensors[step.source.tensor]
        if to.dtype != source.dtype:
            raise LaunchRefused(f"Copy from {source.name} ({source.dtype}) to {to.name} ({to.dtype}): the types differ")


def run_step(step: LibraryStep, buffers: Mapping[str, Buffer]) -> None:
    """Do what a Gemm, Fill or Copy says. It has been checked."""
    if isinstance(step, Gemm):
        _gemm(step, buffers)
    elif isinstance(step, Fill):
        tensors = {name: buffer.tensor for name, buffer in buffers.items()}
        _elements(buffers, step.target, fill_count(step, tensors))[...] = step.value
    elif isinstance(step, Copy):
        _elements(buffers, step.target, step.count)[...] = _elements(buffers, step.source, step.count)


def fill_count(step: Fill, tensors: Mapping[str, Tensor]) -> int:
    """How many elements a Fill sets."""
    return tensors[step.target.tensor].count - step.target.offset if step.count is None else step.count


def round_to_tf32(values: Array) -> Array:
    """float32 values rounded to 10 mantissa bits, to nearest, ties to even; NaN and infinity stay."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32((1 << (_TF32_DROPPED - 1)) - 1)
    is_odd = (bits >> np.uint32(_TF32_DROPPED)) & np.uint32(1)
    kept = np.uint32(0xFFFFFFFF << _TF32_DROPPED & 0xFFFFFFFF)
    rounded = ((bits + half + is_odd) & kept).view(np.float32)
    return np.where(np.isfinite(values), rounded, values)


def _gemm(step: Gemm, buffers: Mapping[str, Buffer]) -> None:
    out = _view(step.out, step.batch, buffers)
    with np.errstate(all="ignore"):  # a kernel's NaN is for the check to find, not for numpy to warn of
        product = np.matmul(_operand(step.a, step, buffers), _operand(step.b, step, buffers), dtype=np.float32)
        if step.alpha != 1.0:
            product *= np.float32(step.alpha)
        if step.beta != 0.0:  # with beta 0 the output is not read: it may be a NaN
            product += np.float32(step.beta) * out.astype(np.float32)
        if step.bias:
            product += _elements(buffers, reference(step.bias), step.out.cols).astype(np.float32)
        aux = _aux(step, buffers) if step.aux else None
        if step.gelu:
            if aux is not None:
                aux[...] = product[0].astype(aux.dtype)
            product = _gelu(product)
        elif aux is not None:
            product *= _gelu_slope(aux.astype(np.float32))
        out[...] = product.astype(out.dtype)


def _gelu(x: Array) -> Array:
    """x times the normal distribution's function at x, in the form with tanh (Hendrycks and Gimpel, 2016), in fp32."""
    return np.float32(0.5) * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))


def _gelu_slope(x: Array) -> Array:
    """The derivative of `_gelu` at x."""
    slope_of_u = np.float32(math.sqrt(2 / math.pi)) * (1 + np.float32(3 * 0.044715) * x * x)
    tanh = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))
    return np.float32(0.5) * (1 + tanh) + np.float32(0.5) * x * (1 - tanh * tanh) * slope_of_u


def _aux(step: Gemm, buffers: Mapping[str, Buffer]) -> Array:
    """What GELU is, or was, applied to, as a matrix that shares the buffer's memory."""
    shape = (step.out.rows, step.out.cols)
    return _elements(buffers, reference(step.aux), math.prod(shape)).reshape(shape)


def _operand(matrix: Matrix, step: Gemm, buffers: Mapping[str, Buffer]) -> Array:
    """The matrix in float32 as the multiplication sees it, transposed where asked."""
    stored = _view(matrix, step.batch, buffers)
    values = stored.astype(np.float32)
    if step.compute == "tf32":
        values = round_to_tf32(values)
    return values.swapaxes(-1, -2) if matrix.transpose else values


def _view(matrix: Matrix, batch: int, buffers: Mapping[str, Buffer]) -> Array:
    """All members of a batch as one array (batch, rows, cols) that shares the buffer's memory."""
    flat = buffers[matrix.tensor].array.reshape(-1)
    size = flat.itemsize
    return as_strided(
        flat[matrix.offset :],
        shape=(batch, matrix.rows, matrix.cols),
        strides=(matrix.stride * size, matrix.leading * size, size),
    )


def _elements(buffers: Mapping[str, Buffer], ref: Ref, count: int) -> Array:
    return buffers[ref.tensor].array.reshape(-1)[ref.offset : ref.offset + count]


def _check_range(what: str, ref: Ref, count: int, tensors: Mapping[str, Tensor]) -> None:
    tensor = _known(what, ref.tensor, tensors)
    first, last = ref.offset, ref.offset + count - 1
    if first < 0 or count < 0 or last >= tensor.count:
        raise LaunchRefused(
            f"{what} reaches elements {first} to {last} of tensor {tensor.name}, which has {tensor.count} elements"
        )


def _known(what: str, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise LaunchRefused(f"{what}: the family has no tensor {name!r}; it has {', '.join(tensors)}")
    return tensors[name]
