"""Inputs: drawn in order from one seed, rounded to the types that kernels see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kbench.check.bound import INTEGERS
from kbench.device.dtypes import store
from kbench.errors import KbenchError
from kbench.family import Array, Tensor

# Standard deviations from the mean of the one large value in a row of a "peak" pattern: far enough to dominate
# a softmax, near enough that no square or exponential of it overflows fp32.
_PEAK = 6.0

FAMILY_FAULT = "a fault of the family, not of a version"  # what to do next: mend NAME.py, not NAME.cu


class PatternedGenerator:
    """Draws inputs with a pattern in place of noise: what a version fitted to random inputs gets wrong.

    The seed picks the pattern: all elements equal, all elements of a row (last axis) equal, or one large
    value at the end of each row. Integers are all equal. Any other method of a numpy Generator draws as usual.
    """

    def __init__(self, seed: int):
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._pattern = ("constant", "rows", "peak")[seed % 3]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return loc + scale * self._shape(size)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self._shape(size).astype(dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (high - low) * (self._shape(size) / (2 * _PEAK) + 0.25)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self.uniform(0.0, 1.0, size).astype(dtype)

    def integers(self, low: Any, high: Any = None, size: Any = None, **options: Any) -> Any:
        return np.full(_as_shape(size), self._rng.integers(low, high), np.int64)

    def _shape(self, size: Any) -> Array:
        """Values of the order of 1, none below -_PEAK / 2 or above _PEAK."""
        shape = _as_shape(size)
        rows = (*shape[:-1], 1)
        if self._pattern == "constant":
            return np.full(shape, self._rng.uniform(0.5, 1.0))
        values = np.broadcast_to(np.clip(self._rng.standard_normal(rows), -_PEAK / 2, _PEAK / 2), shape or (1,)).copy()
        if self._pattern == "peak":
            values[..., -1] = _PEAK
        return values.reshape(shape)


def _as_shape(size: Any) -> tuple[int, ...]:
    if size is None:
        return ()
    return tuple(size) if isinstance(size, Sequence) else (int(size),)


def draw_inputs(
    family: str, tensors: Sequence[Tensor], seed: int, structured: bool
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The "in" and "inout" tensors as stored, and as float64 copies of the stored values.

    Raises KbenchError, naming the family and the tensor, where a draw fails or makes a value that is not
    finite in the tensor's type.
    """
    rng: Any = PatternedGenerator(seed) if structured else np.random.Generator(np.random.PCG64(seed))
    stored: dict[str, Array] = {}
    drawn: dict[str, Array] = {}
    for tensor in tensors:
        if tensor.draw is None or tensor.role not in ("in", "inout"):
            continue
        where = f"family {family}: the draw of tensor {tensor.name}"
        try:
            # Rounding an out-of-range value to Inf is reported below, with its place.
            with np.errstate(over="ignore", invalid="ignore"):
                raw = tensor.draw(rng, tensor.shape, drawn)
                values = store(tensor, raw)
                exact = values.astype(np.float64)
            if tensor.dtype in INTEGERS and not np.array_equal(exact, np.asarray(raw, np.float64)):
                raise ValueError(f"not all of its values are {tensor.dtype}")
        except Exception as error:
            raise KbenchError(f"{where} fails: {type(error).__name__}: {error}", FAMILY_FAULT) from error
        bad = np.flatnonzero(~np.isfinite(exact))
        if bad.size:
            index = tuple(int(i) for i in np.unravel_index(bad[0], tensor.shape))
            raise KbenchError(
                f"{where} makes {float(exact.reshape(-1)[bad[0]])} at {list(index)}, stored as {tensor.dtype}",
                FAMILY_FAULT,
            )
        # Read only: a reference that works in place would spoil what later references and versions get.
        for array in (values, exact):
            array.flags.writeable = False
        stored[tensor.name], drawn[tensor.name] = values, exact
    return stored, drawn
