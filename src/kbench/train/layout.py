"""Where parameters lie in device memory: one flat array for all 16 tensors, so that one launch updates them all.

The order is that of files (`Model.parameters`), layer after layer within a tensor. Each layer's part begins at a
multiple of GROUP elements, so that kernels and cuBLASLt find it aligned whatever the number of channels; what lies
between is 0 and stays 0, because its gradients are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kbench.family import Array
from kbench.train.model import Model, Parameter

# Elements. 256 bytes in 16 bits, as every GPU allocation is aligned; weight decay is given per group of as many.
GROUP = 128


@dataclass(frozen=True)
class Part:
    """One layer's part of a parameter (layer 0 where it has no layers), in elements of the flat array."""

    parameter: Parameter
    layer: int
    offset: int
    count: int


@dataclass(frozen=True)
class Layout:
    """The flat array of a model's parameters; gradients and moments are laid out alike."""

    model: Model

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(self._parts())

    @cached_property
    def _offsets(self) -> dict[tuple[str, int], int]:
        return {(part.parameter.name, part.layer): part.offset for part in self.parts}

    @cached_property
    def count(self) -> int:
        """Elements of the flat array, a multiple of GROUP."""
        last = self.parts[-1]
        return _aligned(last.offset + last.count)

    def offset(self, name: str, layer: int = 0) -> int:
        """The first element of one layer's part."""
        return self._offsets[name, layer]

    def pack(self, weights: Mapping[str, Array], dtype: np.dtype[np.generic]) -> Array:
        """The flat array, from one array per parameter."""
        flat = np.zeros(self.count, dtype)
        for part, values in self._with_values(weights):
            flat[part.offset : part.offset + part.count] = values.reshape(-1)
        return flat

    def unpack(self, flat: Array) -> dict[str, Array]:
        """One array of its full shape per parameter, of flat's dtype."""
        weights = {p.name: np.empty(p.shape, flat.dtype) for p in self.model.parameters}
        for part, values in self._with_values(weights):
            values[...] = flat[part.offset : part.offset + part.count].reshape(values.shape)
        return weights

    def decays(self, weight_decay: float) -> Array:
        """Weight decay of each group of GROUP elements: of matrices and embeddings, not of biases and LayerNorms."""
        decays = np.zeros(self.count // GROUP, np.float32)
        for part in self.parts:
            if part.parameter.decay:
                decays[part.offset // GROUP : _aligned(part.offset + part.count) // GROUP] = weight_decay
        return decays

    def _parts(self) -> Iterator[Part]:
        offset = 0
        for parameter in self.model.parameters:
            for layer in range(parameter.slices):
                count = parameter.count // parameter.slices
                yield Part(parameter, layer, offset, count)
                offset = _aligned(offset + count)

    def _with_values(self, weights: Mapping[str, Array]) -> Iterator[tuple[Part, Array]]:
        for part in self.parts:
            whole = weights[part.parameter.name]
            yield part, whole[part.layer] if part.parameter.layered else whole


def _aligned(count: int) -> int:
    return -(-count // GROUP) * GROUP
