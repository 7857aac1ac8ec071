"""Sdpa steps by cuDNN on the GPU against float64. Skipped where cuDNN is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kbench.device.dtypes import numpy_dtype
from kbench.errors import LaunchRefused, LibraryMissing
from kbench.family import Array, Heads, Sdpa, Tensor

# B, NH, T, HS: a length that no tile divides, and one that all do.
SHAPES = [(2, 3, 97, 64), (1, 4, 256, 128)]
# Largest difference from float64: probabilities and the result are rounded to the type.
ATOL = {"bf16": 0.03, "fp16": 0.004}


@pytest.fixture(scope="module", autouse=True)
def cudnn() -> None:
    """Loads the library: that alone says whether it is there."""
    from kbench.device.cuda.sdpa import Cudnn

    try:
        Cudnn().close()
    except LibraryMissing as error:
        pytest.skip(str(error))


def packed(shape: tuple[int, int, int, int], stats: str = "") -> Sdpa:
    """q, k and v interleaved as (B, T, 3, NH, HS), out as (B, T, NH, HS): no dimension but the last is contiguous."""
    B, NH, T, HS = shape
    C = NH * HS
    parts = [Heads("inp", T * 3 * C, HS, 3 * C, part * C) for part in range(3)]
    return Sdpa(*parts, Heads("out", T * C, HS, C), shape, 1.0 / math.sqrt(HS), stats)


def tensors_of(step: Sdpa, dtype: str) -> list[Tensor]:
    B, NH, T, HS = step.shape
    plain = [Tensor("inp", (B, T, 3, NH, HS), dtype, "scratch"), Tensor("out", (B, T, NH, HS), dtype, "scratch")]
    return [*plain, Tensor("lse", (B, NH, T), "fp32", "scratch")] if step.stats else plain


class Run:
    """Buffers with drawn inputs and poisoned outputs, and a bound step."""

    def __init__(self, device: Any, step: Sdpa, dtype: str):
        self.device = device
        tensors = tensors_of(step, dtype)
        self.buffers = {tensor.name: device.alloc(tensor) for tensor in tensors}
        self.bound = device.bind(device.prepare([step], None, tensors), self.buffers)

    def draw(self, seed: int) -> tuple[Array, Array]:
        """New inputs; what attention makes of them, (B, T, NH, HS), and the log-sum-exp."""
        inp = self.buffers["inp"].tensor
        values = np.random.default_rng(seed).normal(0.1, 1.1, inp.shape).astype(numpy_dtype(inp.dtype))
        self.device.upload(self.buffers["inp"], values)
        for name in self.buffers.keys() - {"inp"}:
            self.device.poison(self.buffers[name], 0xFF)
        q, k, v = np.float64(values).transpose(2, 0, 3, 1, 4)
        T, HS = q.shape[2:]
        scores = np.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / math.sqrt(HS), -np.inf)
        sums = np.exp(scores).sum(axis=3)
        return (np.exp(scores) / sums[..., None] @ v).transpose(0, 2, 1, 3), np.log(sums)

    def check(self, expected: tuple[Array, Array]) -> None:
        out = self.buffers["out"]
        got = self.device.download(out).astype(np.float64)
        np.testing.assert_allclose(got, expected[0], atol=ATOL[out.tensor.dtype])
        assert all(self.device.damage(buffer) is None for buffer in self.buffers.values())
        if "lse" in self.buffers:
            np.testing.assert_allclose(self.device.download(self.buffers["lse"]), expected[1], atol=1e-3)

    def close(self) -> None:
        for buffer in self.buffers.values():
            self.device.free(buffer)


@pytest.fixture(params=SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def shape(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int, int]]:
    yield request.param


@pytest.mark.parametrize("stats", ["", "lse"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_against_float64(device: Any, shape: tuple[int, int, int, int], dtype: str, stats: str) -> None:
    run = Run(device, packed(shape, stats), dtype)
    for seed in range(2):
        expected = run.draw(seed)
        with device.activate():
            device.enqueue(run.bound)
        device.synchronize()
        run.check(expected)
    assert device.describe()["cudnn"]
    run.close()


def test_in_a_cuda_graph(device: Any, shape: tuple[int, int, int, int]) -> None:
    run = Run(device, packed(shape, "lse"), "bf16")
    captured = device.capture(run.bound)
    for seed in range(2):
        expected = run.draw(seed)
        with device.activate():
            captured.launch(device.stream)
        device.synchronize()
        run.check(expected)
    run.close()


def test_what_cudnn_does_not_support_is_refused(device: Any) -> None:
    step = packed((1, 2, 16, 12))  # a head size that is no multiple of 8
    with pytest.raises(LaunchRefused, match="cuDNN has no causal attention B=1 NH=2 T=16 HS=12"):
        device.prepare([step], None, tensors_of(step, "bf16"))
