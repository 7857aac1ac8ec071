"""GEMM steps against numpy, over a cuBLASLt that does in numpy what the library's documentation says."""

import gc
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from column_major import FakeApi, fake_library
from kbench.device.cuda.gemm import PreparedGemm, operands
from kbench.errors import KernelFault, LaunchRefused
from kbench.family import Gemm, Matrix, Tensor


def tensor(name: str, count: int, dtype: str = "fp32") -> Tensor:
    return Tensor(name, (count,), dtype, "scratch")


def stored(rows: int, cols: int, transpose: bool, name: str, batch: int) -> Matrix:
    """Odd placement on purpose: leading dimension 3 more than needed, batches 7 apart, offset 5."""
    if transpose:
        rows, cols = cols, rows
    stride = rows * (cols + 3) + 7 if batch > 1 else 0
    return Matrix(name, rows, cols, ld=cols + 3, offset=5, stride=stride, transpose=transpose)


def members(memory: Any, matrix: Matrix, batch: int) -> list[Any]:
    strides = (4 * matrix.leading, 4)
    offsets = (matrix.offset + i * matrix.stride for i in range(batch))
    shape = (matrix.rows, matrix.cols)
    views = [np.lib.stride_tricks.as_strided(memory[start:], shape, strides) for start in offsets]
    return [view.T if matrix.transpose else view for view in views]


@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "batch", "beta"),
    list(itertools.product([False, True], [False, True], [1, 3], [0.0, 1.0, -0.5])),
)
def test_against_numpy(transpose_a: bool, transpose_b: bool, batch: int, beta: float) -> None:
    m, n, k = 5, 7, 3
    a, b = stored(m, k, transpose_a, "a", batch), stored(k, n, transpose_b, "b", batch)
    out = stored(m, n, False, "out", batch)
    rng = np.random.default_rng(1)
    memory = {name: rng.standard_normal(400).astype(np.float32) for name in ("a", "b", "out")}
    before = memory["out"].copy()
    step = Gemm(a, b, out, "fp32", alpha=2.0, beta=beta, batch=batch)
    gemm = PreparedGemm(fake_library(), step, [tensor(name, 400) for name in memory])
    # Aligned addresses are the device's business; here any will do.
    addresses = {name: array.ctypes.data for name, array in memory.items()}
    left, right, result = (addresses[o.tensor] + o.offset for o in (gemm.left, gemm.right, gemm.out))
    gemm.runner(left, right, result, gemm.algo, 0, 0)(0)

    expected = before.copy()
    views = (members(memory["a"], a, batch), members(memory["b"], b, batch), members(expected, out, batch))
    for x, y, z in zip(*views, strict=True):
        z[...] = 2.0 * (x @ y) + (beta * z if beta else 0.0)
    np.testing.assert_allclose(memory["out"], expected, rtol=1e-5, atol=1e-5)


STEP = Gemm(Matrix("a", 4, 8), Matrix("b", 8, 2), Matrix("out", 4, 2), "fp32")
TENSORS = [tensor("a", 32), tensor("b", 16), tensor("out", 8)]


@pytest.mark.parametrize(
    ("step", "tensors", "words"),
    [
        (replace(STEP, compute="fp64"), TENSORS, "cannot compute in 'fp64'"),
        (replace(STEP, a=Matrix("x", 4, 8)), TENSORS, "names the tensor 'x'"),
        (replace(STEP, a=Matrix("a", 4, 8, offset=1)), TENSORS, "elements 1 to 33 of tensor a, which has 32"),
        (replace(STEP, batch=2), TENSORS, "overlap"),
        (replace(STEP, batch=0), TENSORS, "0 batch members"),
        (replace(STEP, a=Matrix("a", 4, 8, ld=7)), TENSORS, "no matrix"),
        (replace(STEP, compute="bf16"), TENSORS, "reads bf16, tensor b holds fp32"),
        (STEP, [*TENSORS[:2], tensor("out", 8, "fp16")], "writes fp32"),
        (STEP, [tensor("a", 32, "int32"), *TENSORS[1:]], "holds int32"),
    ],
)
def test_what_does_not_fit_is_refused(step: Gemm, tensors: list[Tensor], words: str) -> None:
    with pytest.raises(LaunchRefused, match=words):
        operands(step, tensors)


def test_bf16_may_be_written_as_fp32() -> None:
    step = replace(STEP, compute="bf16")
    operands(step, [tensor("a", 32, "bf16"), tensor("b", 16, "bf16"), tensor("out", 8)])


def test_the_alignment_that_is_promised_is_that_of_the_offset() -> None:
    library = fake_library()
    step = replace(STEP, b=Matrix("b", 8, 2, offset=2), out=Matrix("out", 4, 2, offset=16))
    gemm = PreparedGemm(library, step, [tensor("a", 32), tensor("b", 18), tensor("out", 24)])
    gemm.candidates(8, 4096)
    # cuBLASLt's A is our b.
    alignments = {f"MIN_ALIGNMENT_{k}_BYTES": v for k, v in {"A": 8, "B": 256, "C": 64, "D": 64}.items()}
    assert library.api.preferred == {"MAX_WORKSPACE_BYTES": 4096, **alignments}


def test_a_tensor_that_is_not_aligned_is_refused() -> None:
    gemm = PreparedGemm(fake_library(), STEP, TENSORS)
    with pytest.raises(LaunchRefused, match="not aligned to 256 bytes"):
        gemm.bind(lambda name: 4096 + 16, 0)


def test_candidates_in_the_librarys_order_without_those_that_fail() -> None:
    library = fake_library()
    library.api.offers = [(11, 100, 0), (12, 0, 15), (13, 200, 0)]
    found = PreparedGemm(library, STEP, TENSORS).candidates(8, 4096)
    assert [(int(algo["data_"][0, 0]), workspace) for algo, workspace in found] == [(11, 100), (13, 200)]


@pytest.mark.parametrize("offers", [[], [(1, 0, 15)]])
def test_no_algorithm_is_a_refusal(offers: list[tuple[int, int, int]]) -> None:
    library = fake_library()
    library.api.offers = offers
    with pytest.raises(LaunchRefused, match="no algorithm for the fp32 GEMM m=4 n=2 k=8"):
        PreparedGemm(library, STEP, TENSORS).candidates(8, 4096)


def test_a_stored_algorithm_is_asked_about() -> None:
    library = fake_library()
    library.api.offers = [(21, 100, 0)]
    gemm = PreparedGemm(library, STEP, TENSORS)
    algo = np.zeros(1, FakeApi.matmul_algo_dtype)
    algo["data_"][0, 0] = 21
    assert gemm.accepts(algo, 100) and not gemm.accepts(algo, 99)
    algo["data_"][0, 0] = 22
    assert not gemm.accepts(algo, 1000)


def test_the_key_tells_what_matters() -> None:
    library = fake_library()

    def key(step: Gemm) -> dict[str, Any]:
        return PreparedGemm(library, step, [replace(t, shape=(400,)) for t in TENSORS]).key

    same = replace(STEP, a=replace(STEP.a, offset=64), alpha=3.0)
    assert key(same) == key(STEP)
    for other in (
        replace(STEP, compute="tf32"),
        replace(STEP, beta=1.0),
        replace(STEP, a=replace(STEP.a, offset=1)),
        replace(STEP, a=replace(STEP.a, ld=9)),
        replace(STEP, a=Matrix("a", 8, 4, transpose=True)),
    ):
        assert key(other) != key(STEP)


def test_descriptors_go_with_the_gemm() -> None:
    library = fake_library()
    gemm = PreparedGemm(library, STEP, TENSORS)
    assert len(library.api.objects) == 4
    del gemm
    gc.collect()
    assert not library.api.objects


def test_an_override_of_tf32_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = PreparedGemm(fake_library(), STEP, TENSORS)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert gemm.notes == []
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert "NVIDIA_TF32_OVERRIDE=1" in gemm.notes[0]


@pytest.mark.parametrize(("stream_status", "error"), [(0, LaunchRefused), (600, LaunchRefused), (700, KernelFault)])
def test_a_failing_call_may_be_the_messenger_of_an_earlier_fault(
    monkeypatch: pytest.MonkeyPatch, stream_status: int, error: type[Exception]
) -> None:
    driver = SimpleNamespace(cuStreamQuery=lambda stream: (stream_status,))
    monkeypatch.setattr("kbench.device.cuda.steps.driver_api", lambda: driver)
    library = fake_library()

    def fail(*args: int) -> None:
        raise library.api.cuBLASLtError("execution failed")

    library.api.matmul = fail
    run = PreparedGemm(library, STEP, TENSORS).bind(lambda name: 4096, 0)
    with pytest.raises(error):
        run(7)
