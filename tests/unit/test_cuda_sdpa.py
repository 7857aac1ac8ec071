"""Sdpa and SdpaBackward steps against numpy, over a cuDNN that does in numpy what its documentation says."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kbench.device.cuda import sdpa
from kbench.device.cuda.sdpa import Cudnn, PreparedAttention, PreparedSdpa
from kbench.device.cuda.sdpa_backward import PreparedSdpaBackward
from kbench.device.emulator.steps import check_step
from kbench.errors import CannotRunError, KernelFault, LaunchRefused, LibraryMissing
from kbench.family import Array, Heads, Sdpa, SdpaBackward, Tensor

B, NH, T, HS = 2, 3, 5, 8
C = NH * HS
SHAPE = (B, NH, T, HS)


def packed(part: int, tensor: str = "inp") -> Heads:
    return Heads(tensor, T * 3 * C, HS, 3 * C, part * C)


def plain(tensor: str) -> Heads:
    return Heads(tensor, T * C, HS, C)


STEP = Sdpa(packed(0), packed(1), packed(2), plain("out"), SHAPE, scale=0.3)
BACKWARD = SdpaBackward(
    *(packed(part) for part in range(3)), plain("out"), plain("dout"), *(packed(part, "dinp") for part in range(3)),
    SHAPE, scale=0.3, stats="lse",
)  # fmt: skip
TENSORS = (
    Tensor("inp", (B, T, 3 * C), "fp16", "scratch"),
    Tensor("out", (B, T, C), "fp16", "scratch"),
    Tensor("lse", (B, NH, T), "fp32", "scratch"),
    Tensor("dout", (B, T, C), "fp16", "scratch"),
    Tensor("dinp", (B, T, 3 * C), "fp16", "scratch"),
)


class NotSupported(Exception):
    """cudnnGraphNotSupportedError."""


class FakeTensor:
    def __init__(self, **facts: Any):
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        def setter(value: Any) -> FakeTensor:
            self.facts[name.removeprefix("set_")] = value
            return self

        return setter

    def view(self, address: int) -> Array:
        """The array that lies at an address."""
        dtype = np.dtype({"half": np.float16, "float": np.float32}[self.facts["data_type"]])
        dim, stride = self.facts["dim"], self.facts["stride"]
        last = sum((d - 1) * s for d, s in zip(dim, stride, strict=True))
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(address)).view(dtype)
        return np.lib.stride_tricks.as_strided(flat, dim, [s * dtype.itemsize for s in stride])


class FakeGraph:
    def __init__(self, owner: FakeCudnn, **options: Any):
        self.owner, self.options = owner, options

    def tensor(self, **facts: Any) -> FakeTensor:
        return FakeTensor(**facts)

    def sdpa(self, **options: Any) -> tuple[FakeTensor, FakeTensor | None]:
        self.operation = options
        self.out, self.stats = FakeTensor(), FakeTensor() if options["generate_stats"] else None
        return self.out, self.stats

    def sdpa_backward(self, **options: Any) -> list[FakeTensor]:
        self.operation = options
        self.gradients = [FakeTensor() for _ in range(3)]
        return self.gradients

    def build(self, modes: list[str]) -> None:
        self.owner.built += 1
        assert modes == ["a", "fallback"]
        if self.owner.fault is not None:
            raise self.owner.fault

    def get_workspace_size(self) -> int:
        return 640

    def execute(self, pointers: dict[FakeTensor, int], workspace: int, handle: str) -> None:
        self.owner.calls.append((workspace, handle, self.owner.stream))
        if self.owner.fault is not None:
            raise self.owner.fault
        assert self.operation["diagonal_band_right_bound"] == 0
        if "dO" in self.operation:
            self.run_backward(pointers)
            return
        q, k, v = (self.operation[name].view(pointers[self.operation[name]]).astype(np.float64) for name in "qkv")
        scores = np.where(np.tri(T, dtype=bool), self.operation["attn_scale"] * q @ k.swapaxes(2, 3), -np.inf)
        sums = np.exp(scores).sum(axis=3, keepdims=True)
        self.out.view(pointers[self.out])[...] = np.exp(scores) / sums @ v
        if self.stats is not None:
            assert self.stats.facts["output"]
            self.stats.view(pointers[self.stats])[...] = np.log(sums)

    def run_backward(self, pointers: dict[FakeTensor, int]) -> None:
        assert self.operation["use_deterministic_algorithm"] is True
        q, k, v, out, dout, stats = (
            self.operation[name].view(pointers[self.operation[name]]).astype(np.float64)
            for name in ("q", "k", "v", "o", "dO", "stats")
        )
        scale = self.operation["attn_scale"]
        att = np.where(np.tri(T, dtype=bool), np.exp(scale * q @ k.swapaxes(2, 3) - stats), 0.0)
        dpreatt = scale * att * (dout @ v.swapaxes(2, 3) - (dout * out).sum(axis=3, keepdims=True))
        results = (dpreatt @ k, dpreatt.swapaxes(2, 3) @ q, att.swapaxes(2, 3) @ dout)
        for gradient, result in zip(self.gradients, results, strict=True):
            assert gradient.facts["output"]
            gradient.view(pointers[gradient])[...] = result


class FakeCudnn:
    """The package nvidia-cudnn-frontend, as far as it is used."""

    data_type = SimpleNamespace(HALF="half", BFLOAT16="bfloat16", FLOAT="float")
    heur_mode = SimpleNamespace(A="a", FALLBACK="fallback")
    cudnnGraphNotSupportedError = NotSupported

    def __init__(self, version: Any = "9.14.0", handle: Any = "handle"):
        self._version, self._handle = version, handle
        self.fault: Exception | None = None
        self.stream = 0
        self.built = 0
        self.calls: list[tuple[int, str, int]] = []

    def backend_version_string(self) -> str:
        return str(raise_or_return(self._version))

    def create_handle(self) -> Any:
        return raise_or_return(self._handle)

    def destroy_handle(self, handle: str) -> None:
        assert handle == "handle"
        self._handle = "destroyed"

    def set_stream(self, handle: str, stream: int) -> None:
        assert handle == "handle"
        self.stream = stream

    def pygraph(self, **options: Any) -> FakeGraph:
        assert options["handle"] == "handle" and options["compute_data_type"] == "float"
        return FakeGraph(self, **options)


def raise_or_return(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Cudnn:
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn())
    return Cudnn()


def attention(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """Row by row, and the log of the sums of exponentials."""
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, h, t in np.ndindex(*q.shape[:3]):
        weights = np.exp([scale * float(q[b, h, t] @ k[b, h, t2]) for t2 in range(t + 1)])
        out[b, h, t] = weights / weights.sum() @ v[b, h, : t + 1]
        lse[b, h, t] = np.log(weights.sum())
    return out, lse


def aligned(values: Array) -> Array:
    """A copy that begins at a multiple of 256 bytes."""
    room = np.zeros(values.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 256
    copy = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


@pytest.mark.parametrize("stats", ["", "lse"])
def test_reads_packed_tensors_and_writes_where_it_is_told(library: Cudnn, stats: str) -> None:
    rng = np.random.default_rng(1)
    memory = {
        "inp": aligned(rng.normal(0.1, 1.0, (B, T, 3, NH, HS)).astype(np.float16)),
        "out": aligned(np.full((B, T, NH, HS), np.nan, np.float16)),
        "lse": aligned(np.full((B, NH, T), np.nan, np.float32)),
    }
    prepared = PreparedSdpa(library, replace(STEP, stats=stats), TENSORS)
    assert prepared.workspace == 640
    prepared.bind(lambda name: memory[name].ctypes.data, 0xABC00)(77)

    out, lse = attention(*np.float64(memory["inp"]).transpose(2, 0, 3, 1, 4), 0.3)
    np.testing.assert_allclose(memory["out"].transpose(0, 2, 1, 3), out, atol=2e-3)
    if stats:
        np.testing.assert_allclose(memory["lse"], lse, rtol=1e-6)
    else:
        assert np.isnan(memory["lse"]).all()
    assert library.api.calls == [(0xABC00, "handle", 77)]


def slopes(inp: Array, dout: Array, scale: float) -> Array:
    """The gradient of sum(out dout) by differences, (B, T, 3, NH, HS)."""
    result, step = np.zeros(inp.shape), 1e-5
    for index in np.ndindex(*inp.shape):
        sums = []
        for sign in (1.0, -1.0):
            moved = inp.copy()
            moved[index] += sign * step
            out, _ = attention(*moved.transpose(2, 0, 3, 1, 4), scale)
            sums.append(float((out.transpose(0, 2, 1, 3) * dout).sum()))
        result[index] = (sums[0] - sums[1]) / (2 * step)
    return result


def test_backward_reads_packed_tensors_and_writes_packed_gradients(library: Cudnn) -> None:
    rng = np.random.default_rng(2)
    memory = {
        "inp": aligned(rng.normal(0.1, 1.0, (B, T, 3, NH, HS)).astype(np.float16)),
        "dout": aligned(rng.normal(0.1, 0.7, (B, T, NH, HS)).astype(np.float16)),
        "dinp": aligned(np.full((B, T, 3, NH, HS), np.nan, np.float16)),
    }
    inp, dout = np.float64(memory["inp"]), np.float64(memory["dout"])
    out, lse = attention(*inp.transpose(2, 0, 3, 1, 4), 0.3)
    memory["out"] = aligned(out.transpose(0, 2, 1, 3).astype(np.float16))
    memory["lse"] = aligned(lse.astype(np.float32))
    prepared = PreparedSdpaBackward(library, BACKWARD, TENSORS)
    assert prepared.workspace == 640
    prepared.bind(lambda name: memory[name].ctypes.data, 0xABC00)(77)

    np.testing.assert_allclose(memory["dinp"], slopes(inp, dout, 0.3), atol=4e-3)
    assert library.api.calls == [(0xABC00, "handle", 77)]


@pytest.mark.parametrize("step", [replace(STEP, stats="lse"), BACKWARD], ids=["forward", "backward"])
def test_one_graph_is_bound_to_the_buffers_of_every_layer(library: Cudnn, step: Sdpa | SdpaBackward) -> None:
    rng = np.random.default_rng(3)
    prepared = prepare(library, step)
    layers, runs = [], []
    for _ in range(3):
        memory = {
            tensor.name: aligned(rng.normal(0.1, 0.5, tensor.shape).astype({"fp16": "f2", "fp32": "f4"}[tensor.dtype]))
            for tensor in TENSORS
        }
        layers.append(memory)
        runs.append(prepared.bind(lambda name, memory=memory: memory[name].ctypes.data, 0xABC00))
    for run in runs:  # only now: a later binding must not move an earlier one
        run(5)
    written = "out" if isinstance(step, Sdpa) else "dinp"
    results = [memory[written].copy() for memory in layers]
    for memory, result in zip(layers, results, strict=True):
        memory[written][...] = np.nan if written == "dinp" else memory[written]
        prepare(library, step).bind(lambda name, memory=memory: memory[name].ctypes.data, 0xABC00)(5)
        np.testing.assert_array_equal(memory[written], result)
    assert not np.array_equal(results[0], results[1])
    assert library.api.built == 1 + len(layers)


def prepare(library: Cudnn, step: Sdpa | SdpaBackward, tensors: tuple[Tensor, ...] = TENSORS) -> PreparedAttention:
    if isinstance(step, Sdpa):
        return PreparedSdpa(library, step, tensors)
    return PreparedSdpaBackward(library, step, tensors)


OUT = STEP.out


@pytest.mark.parametrize(
    ("step", "tensors", "words"),
    [
        (replace(STEP, q=replace(STEP.q, tensor="x")), TENSORS, "names the tensor 'x'"),
        (STEP, (replace(TENSORS[0], dtype="fp32"), *TENSORS[1:]), "bf16 or fp16; inp is fp32, out is fp16"),
        (STEP, (TENSORS[0], replace(TENSORS[1], dtype="bf16")), "takes tensors of one type"),
        (replace(STEP, v=packed(3)), TENSORS, "v of an Sdpa reaches element 743 of tensor inp, which has 720"),
        (replace(STEP, k=replace(packed(1), offset=-1)), TENSORS, "no such thing"),
        (replace(STEP, shape=(B, NH, 0, HS)), TENSORS, "no such thing"),
        (replace(STEP, out=replace(OUT, row_stride=C - 1, head_stride=HS - 1)), TENSORS, "overlaps itself"),
        (replace(STEP, out=replace(OUT, batch_stride=0)), TENSORS, "overlaps itself"),
        (replace(STEP, stats="out"), TENSORS, "30 elements of fp32, tensor out holds 240 of fp16"),
        (replace(STEP, stats="lse"), (*TENSORS[:2], replace(TENSORS[2], shape=(29,))), "holds 29 of fp32"),
        (replace(BACKWARD, stats=""), TENSORS, "an SdpaBackward needs the statistics of the forward pass"),
        (replace(BACKWARD, stats="x"), TENSORS, "an SdpaBackward names the tensor 'x'"),
        (BACKWARD, (*TENSORS[:4], replace(TENSORS[4], dtype="fp32")), "dout is fp16, dinp is fp32"),
        (replace(BACKWARD, dk=packed(3, "dinp")), TENSORS, "dk of an SdpaBackward reaches element 743 of tensor dinp"),
        (replace(BACKWARD, dq=replace(packed(0, "dinp"), row_stride=0)), TENSORS, "output dq .* overlaps itself"),
        (replace(BACKWARD, dout=plain("lse")), TENSORS, "takes tensors of one type"),
    ],
)
def test_what_does_not_fit_is_refused(
    library: Cudnn, step: Sdpa | SdpaBackward, tensors: tuple[Tensor, ...], words: str
) -> None:
    with pytest.raises(LaunchRefused, match=words):
        prepare(library, step, tensors)


@pytest.mark.parametrize("step", [STEP, BACKWARD], ids=["forward", "backward"])
def test_the_emulator_has_none_of_it(step: Sdpa | SdpaBackward) -> None:
    with pytest.raises(LibraryMissing, match="the emulator has no cuDNN's attention"):
        check_step(step, {tensor.name: tensor for tensor in TENSORS})


def test_an_address_that_cudnn_cannot_load_from_is_refused(library: Cudnn) -> None:
    prepared = PreparedSdpa(library, STEP, TENSORS)
    with pytest.raises(LaunchRefused, match="q of causal attention B=2 NH=3 T=5 HS=8 begins at 0x1008, not at"):
        prepared.bind(lambda name: 0x1008, 0)


def test_what_cudnn_does_not_support_is_refused_in_its_own_words(library: Cudnn) -> None:
    library.api.fault = NotSupported("head_dim should be\n  a multiple of 8")
    with pytest.raises(LaunchRefused, match="has no causal attention .* HS=8: head_dim should be a multiple of 8"):
        PreparedSdpa(library, STEP, TENSORS)
    with pytest.raises(LaunchRefused, match="has no backward pass of causal attention .*: head_dim should be"):
        PreparedSdpaBackward(library, BACKWARD, TENSORS)


def test_a_failing_execution_is_refused_or_the_fault_of_a_kernel_before(
    library: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PreparedSdpa(library, STEP, TENSORS).bind(lambda name: 0x1000, 0)
    library.api.fault = RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
    monkeypatch.setattr(sdpa, "raise_if_lost", lambda stream, doing: None)
    with pytest.raises(LaunchRefused, match="refuses causal attention .*: CUDNN_STATUS_EXECUTION_FAILED"):
        run(5)

    def lost(stream: int, doing: str) -> None:
        raise KernelFault("illegal-access", f"{doing} on {stream}", context_lost=True)

    monkeypatch.setattr(sdpa, "raise_if_lost", lost)
    with pytest.raises(KernelFault, match="launch of causal attention .* on 5"):
        run(5)


def test_a_missing_package_or_library_skips_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(LibraryMissing, match=r"nvidia-cudnn-frontend is missing; pip install .*\[cudnn13\]"):
        Cudnn()
    fake = FakeCudnn(version=RuntimeError("Unable to find symbol cudnnGetVersion"))
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    with pytest.raises(LibraryMissing, match="the library cuDNN .* is missing"):
        Cudnn()


def test_a_library_that_does_not_start_is_no_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCudnn(handle=RuntimeError("CUDNN_STATUS_NOT_INITIALIZED"))
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    with pytest.raises(CannotRunError, match="cannot start: CUDNN_STATUS_NOT_INITIALIZED") as caught:
        Cudnn()
    assert not isinstance(caught.value, LibraryMissing)


def test_the_handle_is_given_back(library: Cudnn) -> None:
    library.close()
    assert library.api.create_handle() == "destroyed"
