"""Sdpa steps against numpy, over a cuDNN that does in numpy what its documentation says."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kbench.device.cuda import sdpa
from kbench.device.cuda.sdpa import Cudnn, PreparedSdpa
from kbench.errors import CannotRunError, KernelFault, LaunchRefused, LibraryMissing
from kbench.family import Array, Heads, Sdpa, Tensor

B, NH, T, HS = 2, 3, 5, 8
C = NH * HS
SHAPE = (B, NH, T, HS)


def packed(part: int) -> Heads:
    return Heads("inp", T * 3 * C, HS, 3 * C, part * C)


STEP = Sdpa(packed(0), packed(1), packed(2), Heads("out", T * C, HS, C), SHAPE, scale=0.3)
TENSORS = (
    Tensor("inp", (B, T, 3 * C), "fp16", "scratch"),
    Tensor("out", (B, T, C), "fp16", "scratch"),
    Tensor("lse", (B, NH, T), "fp32", "scratch"),
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

    def build(self, modes: list[str]) -> None:
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
        q, k, v = (self.operation[name].view(pointers[self.operation[name]]).astype(np.float64) for name in "qkv")
        scores = np.where(np.tri(T, dtype=bool), self.operation["attn_scale"] * q @ k.swapaxes(2, 3), -np.inf)
        sums = np.exp(scores).sum(axis=3, keepdims=True)
        self.out.view(pointers[self.out])[...] = np.exp(scores) / sums @ v
        if self.stats is not None:
            assert self.stats.facts["output"]
            self.stats.view(pointers[self.stats])[...] = np.log(sums)


class FakeCudnn:
    """The package nvidia-cudnn-frontend, as far as it is used."""

    data_type = SimpleNamespace(HALF="half", BFLOAT16="bfloat16", FLOAT="float")
    heur_mode = SimpleNamespace(A="a", FALLBACK="fallback")
    cudnnGraphNotSupportedError = NotSupported

    def __init__(self, version: Any = "9.14.0", handle: Any = "handle"):
        self._version, self._handle = version, handle
        self.fault: Exception | None = None
        self.stream = 0
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
    ],
)
def test_what_does_not_fit_is_refused(library: Cudnn, step: Sdpa, tensors: tuple[Tensor, ...], words: str) -> None:
    with pytest.raises(LaunchRefused, match=words):
        PreparedSdpa(library, step, tensors)


def test_an_address_that_cudnn_cannot_load_from_is_refused(library: Cudnn) -> None:
    prepared = PreparedSdpa(library, STEP, TENSORS)
    with pytest.raises(LaunchRefused, match="q of causal attention B=2 NH=3 T=5 HS=8 begins at 0x1008, not at"):
        prepared.bind(lambda name: 0x1008, 0)


def test_what_cudnn_does_not_support_is_refused_in_its_own_words(library: Cudnn) -> None:
    library.api.fault = NotSupported("head_dim should be\n  a multiple of 8")
    with pytest.raises(LaunchRefused, match="has no causal attention .* HS=8: head_dim should be a multiple of 8"):
        PreparedSdpa(library, STEP, TENSORS)


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
