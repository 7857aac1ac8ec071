"""Inputs: drawn in order from one seed, rounded to the types that kernels see."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kbench.check.arrays import first_where
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

    def begin(self, tensor: Tensor) -> None:
        """The next values are those of `tensor`."""

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


class ChunkedGenerator:
    """Draws large arrays in chunks, on all cores; small ones, and by any other method, as a numpy Generator does.

    A chunk has a generator of its own, seeded by its place, so values do not depend on the number of cores.
    dtype: of large arrays of floats. float32 unless the tensor to be drawn holds more, because it takes half the time
    and memory; `begin` sets it.
    """

    CHUNK = 1 << 20

    def __init__(self, seed: int):
        self.dtype: Any = np.float32
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._seed = seed
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)

    def begin(self, tensor: Tensor) -> None:
        """The next values are those of `tensor`."""
        self.dtype = np.float64 if tensor.dtype == "fp64" else np.float32

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        if not self._is_large(size):
            return self._rng.normal(loc, scale, size)
        values = self._filled(size, lambda rng, out: rng.standard_normal(dtype=self.dtype, out=out))
        return self._scaled(values, scale, loc)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        if out is not None or not self._is_large(size):
            return self._rng.standard_normal(size, dtype, out)
        return self.normal(0.0, 1.0, size)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        if not self._is_large(size):
            return self._rng.uniform(low, high, size)
        if np.any(np.less(high, low)):
            raise ValueError("high - low < 0")  # as the small draw does
        values = self._filled(size, lambda rng, out: rng.random(dtype=self.dtype, out=out))
        values = self._scaled(values, np.subtract(high, low), low)
        # Rounding carries the largest of them to `high` and beyond, which is no value of [low, high): not an index,
        # not a probability below 1.
        below = np.nextafter(np.asarray(high, self.dtype), np.asarray(low, self.dtype))
        return np.minimum(values, below, out=values)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        if out is not None or not self._is_large(size):
            return self._rng.random(size, dtype, out)
        return self.uniform(0.0, 1.0, size)

    def _is_large(self, size: Any) -> bool:
        return size is not None and math.prod(_as_shape(size)) > self.CHUNK

    def _scaled(self, values: Array, scale: Any, shift: Any) -> Array:
        """values * scale + shift in their own type, without a temporary as large as they are."""
        values *= np.asarray(scale, values.dtype)
        values += np.asarray(shift, values.dtype)
        return values

    def _filled(self, size: Any, fill: Callable[[np.random.Generator, Array], Any]) -> Array:
        values = np.empty(_as_shape(size), self.dtype)
        flat = values.reshape(-1)
        call = self._calls
        self._calls += 1

        def one(chunk: int) -> None:
            seed = np.random.SeedSequence(self._seed, spawn_key=(call, chunk))
            fill(np.random.Generator(np.random.PCG64(seed)), flat[chunk * self.CHUNK : (chunk + 1) * self.CHUNK])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(one, range(-(-flat.size // self.CHUNK))))
        return values


def _as_shape(size: Any) -> tuple[int, ...]:
    if size is None:
        return ()
    return tuple(size) if isinstance(size, Sequence) else (int(size),)


class Exact(Mapping[str, Array]):
    """Stored tensors as float64, each converted when it is first asked for, and read only."""

    def __init__(self, stored: Mapping[str, Array]):
        self._stored = stored
        self._converted: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._converted:
            values = self._stored[name].astype(np.float64)
            values.flags.writeable = False
            self._converted[name] = values
        return self._converted[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def draw_inputs(
    family: str, tensors: Sequence[Tensor], seed: int, structured: bool, generator: Any = None
) -> tuple[dict[str, Array], Mapping[str, Array]]:
    """The "in" and "inout" tensors as stored, and the stored values as float64.

    generator: draws them in place of the usual ones; it has the methods of a numpy Generator, and `begin(tensor)`.
    Raises KbenchError, naming the family and the tensor, where a draw fails or makes a value that is not
    finite in the tensor's type.
    """
    rng: Any = generator or (PatternedGenerator(seed) if structured else ChunkedGenerator(seed))
    stored: dict[str, Array] = {}
    drawn = Exact(stored)
    for tensor in tensors:
        if tensor.draw is None or tensor.role not in ("in", "inout"):
            continue
        where = f"family {family}: the draw of tensor {tensor.name}"
        rng.begin(tensor)
        try:
            # Rounding an out-of-range value to Inf is reported below, with its place.
            with np.errstate(over="ignore", invalid="ignore"):
                raw = tensor.draw(rng, tensor.shape, drawn)
                values = store(tensor, raw)
            if tensor.dtype in INTEGERS and not np.array_equal(values, np.asarray(raw)):
                raise ValueError(f"not all of its values are {tensor.dtype}")
        except Exception as error:
            raise KbenchError(f"{where} fails: {type(error).__name__}: {error}", FAMILY_FAULT) from error
        bad = first_where(lambda part: ~np.isfinite(part), values.reshape(-1), np)
        if bad is not None:
            index = [int(i) for i in np.unravel_index(bad, tensor.shape)]
            raise KbenchError(
                f"{where} makes {float(values.reshape(-1)[bad])} at {index}, stored as {tensor.dtype}",
                FAMILY_FAULT,
            )
        # Read only: a reference that works in place would spoil what later references and versions get.
        values.flags.writeable = False
        stored[tensor.name] = values
    return stored, drawn
