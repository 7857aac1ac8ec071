"""Weights from scratch: the normal numbers of PyTorch's CPU generator, so that two programs start from one model.

The generator is the Mersenne twister MT19937 (Matsumoto and Nishimura, 1998), whose stream numpy has too; uniforms
become normal numbers by the method of Box and Muller (1958), in groups of 16. What is the same as in PyTorch: every
32-bit number, every uniform and the order. log, sin and cos are numpy's float32 ones, and PyTorch's own depend on the
processor: against PyTorch on a processor with AVX2, one value in eight differs, by at most 2^-26 at std 0.02 (1.5e-8,
less than a millionth of std); on one without, 5e-8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kbench.errors import UsageError
from kbench.train.model import Model

Array = npt.NDArray[Any]

DEFAULT_SEED = 42  # what the programs that people compare with start from
_GROUP = 16  # 8 uniforms for radii, 8 for angles
# Few enough for a chunk's temporaries to stay in a core's L2 cache, many enough for numpy's overhead not to show.
_CHUNK = 1 << 16
_DOUBLE_BITS = 53


class NormalStream:
    """Normal numbers as torch.Tensor.normal_ draws them on a CPU after torch.manual_seed(seed), for float32.

    seed: 0 to 2^32 - 1, which is all that MT19937 takes. Raises UsageError outside.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise UsageError(f"seed {seed} for weights from scratch", "give one from 0 to 4294967295")
        # RandomState, because its seeding is the generator authors' own and frozen; newer numpy interfaces hash seeds.
        self._source = np.random.RandomState(seed)
        self._kept: float | None = None

    def fill(self, out: Array, std: float) -> None:
        """Overwrite `out` (float32, contiguous, any shape) with normal numbers of mean 0."""
        if not out.flags.c_contiguous or out.dtype != np.float32:
            raise ValueError("only contiguous float32 arrays can be filled in place")
        flat = out.reshape(-1)
        if flat.size < _GROUP:
            for index in range(flat.size):
                flat[index] = np.float32(self._single() * std)
            return
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            uniforms = self._uniforms(part.size)
            whole = part.size - part.size % _GROUP
            part[:whole] = _box_muller(uniforms[:whole], std)
        if flat.size % _GROUP:
            # The last 16 overlap numbers that are drawn already, and replace them.
            flat[-_GROUP:] = _box_muller(self._uniforms(_GROUP), std)

    def _bits(self, count: int) -> npt.NDArray[np.uint32]:
        return self._source.randint(0, 2**32, size=count, dtype=np.uint32)

    def _uniforms(self, count: int) -> npt.NDArray[np.float32]:
        """In [0, 1), multiples of 2^-24: the low 24 bits, because a float32 holds no more."""
        return (self._bits(count) & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2.0**-24)

    def _single(self) -> float:
        """One number, for tensors of fewer than 16: pairs in double precision, the second kept for the next call."""
        if self._kept is not None:
            value, self._kept = self._kept, None
            return value
        turn, height = self._double(), self._double()
        radius, angle = math.sqrt(-2.0 * math.log1p(-height)), 2.0 * math.pi * turn
        self._kept = radius * math.sin(angle)
        return radius * math.cos(angle)

    def _double(self) -> float:
        high, low = (int(word) for word in self._bits(2))
        return ((high << 32 | low) & (2**_DOUBLE_BITS - 1)) * 2.0**-_DOUBLE_BITS


def _box_muller(uniforms: npt.NDArray[np.float32], std: float) -> npt.NDArray[np.float32]:
    """Normal numbers of as many uniforms, a multiple of 16."""
    groups = uniforms.reshape(-1, 2, _GROUP // 2)
    # 1 - u, because u may be 0 and never is 1.
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - groups[:, 0]))
    angle = np.float32(2 * math.pi) * groups[:, 1]
    normal = np.empty_like(groups)
    np.multiply(radius, np.cos(angle), out=normal[:, 0])
    np.multiply(radius, np.sin(angle), out=normal[:, 1])
    return (normal * np.float32(std)).reshape(-1)


def initial_weights(model: Model, seed: int = DEFAULT_SEED) -> dict[str, Array]:
    """The 16 tensors of `model` before training: name -> float32 array of the full shape.

    Drawn from one stream: wte (real rows only), wpe, then layer by layer the weights in the order of
    `model.parameters`; all else is constant, and the padding rows of wte are 0. Raises UsageError for a seed out of
    range.
    """
    stream = NormalStream(seed)
    weights = {p.name: np.full(p.shape, p.constant, np.float32) for p in model.parameters}
    drawn = [p for p in model.parameters if p.std]
    for parameter in drawn:
        if not parameter.layered:
            rows = model.vocab if parameter.name == "wte" else parameter.shape[0]
            stream.fill(weights[parameter.name][:rows], parameter.std)
    for layer in range(model.layers):
        for parameter in drawn:
            if parameter.layered:
                stream.fill(weights[parameter.name][layer], parameter.std)
    return weights
