"""numpy's names for the element types, bf16 included."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kbench.family import Array, Tensor

_NUMPY = {
    "fp32": np.float32, "fp64": np.float64, "fp16": np.float16, "bf16": ml_dtypes.bfloat16,
    "int32": np.int32, "uint32": np.uint32, "uint8": np.uint8,
}  # fmt: skip


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype in which a tensor of `dtype` is stored."""
    return np.dtype(_NUMPY[dtype])


def store(tensor: Tensor, values: Array) -> Array:
    """`values` rounded to the tensor's dtype and shape, contiguous (numpy)."""
    rounded = np.ascontiguousarray(np.asarray(values).astype(numpy_dtype(tensor.dtype)))
    if rounded.shape != tensor.shape:
        raise ValueError(f"tensor {tensor.name} has shape {tensor.shape}, its `draw` made {rounded.shape}")
    return rounded
