"""Sdpa and SdpaBackward steps by cuDNN on the GPU against float64. Skipped where cuDNN is not installed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import Case, make_case
from kbench.check.probe import used_share
from kbench.check.prove import prove
from kbench.device.dtypes import numpy_dtype
from kbench.errors import LaunchRefused, LibraryMissing
from kbench.family import Array, Heads, Problem, Sdpa, Tensor

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


# --------------------------------------------------------------------------------------------- backward

FAMILY = load_catalog()["attention_backward"]
VERSION = FAMILY.by_number[10]
FORWARD = load_catalog()["attention_forward"].by_number[10]
BLOCK = 128  # a number in the table: the plan has no kernel of ours

# Besides those above: two tokens, more sequences than heads and the smallest head, one past a tile of 128.
BACKWARD_SHAPES = [*SHAPES, (1, 1, 2, 8), (5, 2, 37, 8), (1, 2, 129, 40)]


def problem(shape: tuple[int, int, int, int], dtype: str) -> Problem:
    B, NH, T, HS = shape
    return Problem({"B": B, "T": T, "C": NH * HS, "NH": NH}, dtype)


@pytest.mark.parametrize("structured", [False, True], ids=["random", "patterned"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", BACKWARD_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_backward_is_within_the_familys_bound_and_always_the_same(
    device: Any, shape: tuple[int, int, int, int], dtype: str, structured: bool
) -> None:
    of = problem(shape, dtype)
    plan = VERSION.plan(of, BLOCK, device.props)
    for seed in range(3):
        case = make_case(FAMILY, of, seed, structured)
        prepared = device.prepare(plan, None, tuple(case.tensors.values()))
        with Buffers(device, FAMILY, VERSION, of, BLOCK, plan) as buffers:
            assert set(buffers.by_name) == {"dout", "inp", "out", "lse", "dinp"}
            verdict = prove(device, FAMILY, VERSION, prepared, buffers, case)
        assert verdict.passed, (seed, verdict.reason())
        assert verdict.deterministic, seed


def load(device: Any, buffers: dict[str, Any], case: Case) -> None:
    """The case's inputs, and NaNs for all else."""
    for name, buffer in buffers.items():
        if name in case.inputs:
            device.upload(buffer, case.inputs[name])
        else:
            device.poison(buffer, 0xFF)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_backward_prepared_once_is_bound_to_the_buffers_of_several_layers_in_one_graph(device: Any, dtype: str) -> None:
    """As training does it: one plan, a binding per layer, all captured, launched with new inputs each time."""
    of = problem((2, 3, 97, 64), dtype)
    tensors = FAMILY.tensors(of)
    plan = VERSION.plan(of, BLOCK, device.props)
    prepared = device.prepare(plan, None, tensors)
    touched = {"dout", "inp", "out", "lse", "dinp"}
    layers = [{t.name: device.alloc(t) for t in tensors if t.name in touched} for _ in range(3)]
    graphs = [device.capture(device.bind(prepared, buffers)) for buffers in layers]
    for first in (0, 10):
        cases = [make_case(FAMILY, of, first + i) for i in range(len(layers))]
        for buffers, case in zip(layers, cases, strict=True):
            load(device, buffers, case)
        with device.activate():
            for graph in graphs:
                graph.launch(device.stream)
        device.synchronize()
        for buffers, case in zip(layers, cases, strict=True):
            assert used_share(case, case.tensors["dinp"], device.download(buffers["dinp"])) <= 1.0
            assert all(device.damage(buffer) is None for buffer in buffers.values())
    for buffers in layers:
        for buffer in buffers.values():
            device.free(buffer)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_backward_takes_what_the_forward_version_leaves(device: Any, dtype: str) -> None:
    """out and lse are cuDNN's own; the same bound holds, because both are within that of the forward family."""
    of = problem((2, 4, 160, 64), dtype)
    tensors = FAMILY.tensors(of)
    plan = (*FORWARD.plan(of, BLOCK, device.props), *VERSION.plan(of, BLOCK, device.props))
    touched = {"dout", "inp", "out", "lse", "dinp"}
    buffers = {t.name: device.alloc(t) for t in tensors if t.name in touched}
    bound = device.bind(device.prepare(plan, None, tensors), buffers)
    case = make_case(FAMILY, of, 4)
    load(device, buffers, case)
    for name in ("out", "lse"):
        device.poison(buffers[name], 0xFF)
    with device.activate():
        device.enqueue(bound)
    device.synchronize()
    assert used_share(case, case.tensors["dinp"], device.download(buffers["dinp"])) <= 1.0
    np.testing.assert_allclose(device.download(buffers["lse"]), case.inputs["lse"], atol=1e-4)
    for buffer in buffers.values():
        device.free(buffer)


@pytest.mark.parametrize("B", [4, 64])
def test_backward_says_beforehand_how_much_memory_it_needs(device: Any, B: int) -> None:
    """At the sizes of GPT-2: no more than a matrix (T, T) of 16 bits per head, and a few megabytes."""
    of = problem((B, 12, 1024, 64), "bf16")
    prepared = device.prepare(VERSION.plan(of, BLOCK, device.props), None, FAMILY.tensors(of))
    assert prepared.workspace <= 2 * B * 12 * 1024 * 1024 + (64 << 20)


def test_backward_that_cudnn_does_not_support_is_refused(device: Any) -> None:
    of = problem((1, 2, 16, 12), "bf16")  # a head size that is no multiple of 8
    with pytest.raises(LaunchRefused, match="cuDNN has no backward pass of causal attention B=1 NH=2 T=16 HS=12"):
        device.prepare(VERSION.plan(of, BLOCK, device.props), None, FAMILY.tensors(of))
