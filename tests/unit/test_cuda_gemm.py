"""GEMM steps against numpy, over a cuBLASLt that does in numpy what the library's documentation says."""

import gc
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from column_major import DESC, EPILOGUE, FakeApi, fake_library
from kbench.device.base import Buffer
from kbench.device.cuda.gemm import Addresses, PreparedGemm
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator.steps import check_step, run_step
from kbench.device.gemm_operands import aux_operand, bias_operand, operands
from kbench.errors import KernelFault, LaunchRefused
from kbench.family import Gemm, Matrix, Ref, Tensor


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
    gemm.runner(Addresses(left, right, result), gemm.algo, 0, 0)(0)

    expected = before.copy()
    views = (members(memory["a"], a, batch), members(memory["b"], b, batch), members(expected, out, batch))
    for x, y, z in zip(*views, strict=True):
        z[...] = 2.0 * (x @ y) + (beta * z if beta else 0.0)
    np.testing.assert_allclose(memory["out"], expected, rtol=1e-5, atol=1e-5)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("bias", "with_gelu", "batch"),
    list(itertools.product(["", "bias", Ref("bias", 8)], [False, True], [1, 3])),
)
def test_epilogues_against_numpy_and_the_emulator(bias: str | Ref, with_gelu: bool, batch: int) -> None:
    m, n, k = 5, 7, 3
    a, b, out = (stored(*shape, False, name, batch) for shape, name in (((m, k), "a"), ((k, n), "b"), ((m, n), "out")))
    rng = np.random.default_rng(2)
    memory = {name: rng.standard_normal(400).astype(np.float32) for name in ("a", "b", "out", "bias")}
    step = Gemm(a, b, out, "fp32", alpha=2.0, beta=-0.5, batch=batch, bias=bias, gelu=with_gelu)
    tensors = {name: tensor(name, 400) for name in memory}

    expected, emulated = memory["out"].copy(), {name: array.copy() for name, array in memory.items()}
    first = 0 if not bias else bias.offset if isinstance(bias, Ref) else 0
    views = (members(memory["a"], a, batch), members(memory["b"], b, batch), members(expected, out, batch))
    for x, y, z in zip(*views, strict=True):
        sums = 2.0 * (x @ y) - 0.5 * z + (memory["bias"][first : first + n] if bias else 0.0)
        z[...] = gelu(sums) if with_gelu else sums

    check_step(step, tensors)
    run_step(step, {name: Buffer(tensors[name], emulated[name], 0) for name in memory})
    np.testing.assert_allclose(emulated["out"], expected, rtol=1e-5, atol=1e-5)

    gemm = PreparedGemm(fake_library(), step, list(tensors.values()))
    addresses = [memory[o.tensor].ctypes.data + o.offset for o in (gemm.left, gemm.right, gemm.out)]
    address = memory["bias"].ctypes.data + gemm.bias.offset if gemm.bias else 0
    gemm.runner(Addresses(*addresses, address), gemm.algo, 0, 0)(0)
    np.testing.assert_allclose(memory["out"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bias", "with_gelu"), [("", False), ("", True), ("bias", True)])
@pytest.mark.parametrize("aux", ["aux", Ref("aux", 12)])
def test_what_gelu_is_applied_to_against_numpy_and_the_emulator(bias: str, with_gelu: bool, aux: str | Ref) -> None:
    """Kept with GELU, and gone back through without."""
    m, n, k = 5, 16, 3
    a, b, out = (stored(*shape, False, name, 1) for shape, name in (((m, k), "a"), ((k, n), "b"), ((m, n), "out")))
    rng = np.random.default_rng(3)
    memory = {name: rng.standard_normal(400).astype(np.float32) for name in ("a", "b", "out", "bias", "aux")}
    step = Gemm(a, b, out, "fp32", alpha=2.0, bias=bias, gelu=with_gelu, aux=aux)
    tensors = {name: tensor(name, 400) for name in memory}

    first = aux.offset if isinstance(aux, Ref) else 0
    expected = {name: array.copy() for name, array in memory.items()}
    ((x,), (y,), (z,)) = (members(expected[matrix.tensor], matrix, 1) for matrix in (a, b, out))
    pre = expected["aux"][first : first + m * n].reshape(m, n)
    sums = 2.0 * (x @ y) + (memory["bias"][:n] if bias else 0.0)
    if with_gelu:
        pre[...], z[...] = sums, gelu(sums)
    else:
        step_of = 1e-5
        z[...] = sums * (gelu(np.float64(pre) + step_of) - gelu(np.float64(pre) - step_of)) / (2.0 * step_of)

    emulated = {name: array.copy() for name, array in memory.items()}
    check_step(step, tensors)
    run_step(step, {name: Buffer(tensors[name], emulated[name], 0) for name in memory})
    gemm = PreparedGemm(fake_library(), step, list(tensors.values()))
    places = {name: memory[operand.tensor].ctypes.data + operand.offset for name, operand in gemm.operands.items()}
    gemm.runner(Addresses(**places), gemm.algo, 0, 0)(0)
    for name in memory:
        np.testing.assert_allclose(emulated[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(memory[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_emulator_rounds_what_it_keeps_and_not_what_gelu_is_applied_to(dtype: str) -> None:
    step = Gemm(Matrix("a", 2, 3), Matrix("b", 3, 8), Matrix("out", 2, 8), dtype, gelu=True, aux="aux")
    tensors = {name: tensor(name, count, dtype) for name, count in (("a", 6), ("b", 24), ("out", 16), ("aux", 16))}
    rng = np.random.default_rng(4)
    memory = {name: rng.standard_normal(t.count).astype(numpy_dtype(dtype)) for name, t in tensors.items()}
    run_step(step, {name: Buffer(tensors[name], memory[name], 0) for name in memory})
    sums = np.float32(memory["a"]).reshape(2, 3) @ np.float32(memory["b"]).reshape(3, 8)
    np.testing.assert_array_equal(memory["aux"].reshape(2, 8), sums.astype(numpy_dtype(dtype)))
    np.testing.assert_allclose(np.float32(memory["out"]).reshape(2, 8), gelu(sums), rtol=2.0**-7)


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
def test_what_does_not_fit_is_refused_on_either_device(step: Gemm, tensors: list[Tensor], words: str) -> None:
    with pytest.raises(LaunchRefused, match=words):
        operands(step, tensors)
    with pytest.raises(LaunchRefused, match=words):
        check_step(step, {tensor.name: tensor for tensor in tensors})


BIASED = replace(STEP, bias="bias")


@pytest.mark.parametrize(
    ("bias", "dtype", "words"),
    [
        (Ref("other"), "fp32", "names the tensor 'other'"),
        (Ref("bias", 16), "fp32", "elements 16 to 18 of tensor bias, which has 17"),
        (Ref("bias", 2), "fp32", "8 bytes into tensor bias, which is not a multiple of 16"),
        (Ref("bias"), "bf16", "output's type fp32, bias holds bf16"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias: Ref, dtype: str, words: str) -> None:
    tensors = [*TENSORS, tensor("bias", 17, dtype)]
    with pytest.raises(LaunchRefused, match=words):
        bias_operand(replace(STEP, bias=bias), tensors)
    with pytest.raises(LaunchRefused, match=words):  # and where no GPU is, too
        check_step(replace(STEP, bias=bias), {tensor.name: tensor for tensor in tensors})


KEEPING = Gemm(Matrix("a", 4, 4), Matrix("b", 4, 8), Matrix("out", 4, 8), "fp32", gelu=True, aux="aux")
BACK = replace(KEEPING, gelu=False)
WIDE = [tensor("a", 32), tensor("b", 64), tensor("out", 64)]


@pytest.mark.parametrize(
    ("step", "dtype", "words"),
    [
        (replace(KEEPING, aux="other"), "fp32", "names the tensor 'other'"),
        (replace(KEEPING, aux=Ref("aux", 16)), "fp32", "elements 16 to 48 of tensor aux, which has 40"),
        (
            replace(KEEPING, aux=Ref("aux", 2)),
            "fp32",
            "keeps .* 8 bytes into tensor aux, which is not a multiple of 16",
        ),
        (replace(BACK, aux=Ref("aux", 2)), "fp32", "goes back .* 8 bytes into tensor aux"),
        (KEEPING, "bf16", "keeps what GELU is applied to .*output's type fp32, aux holds bf16"),
        (
            replace(KEEPING, b=Matrix("b", 4, 9), out=Matrix("out", 4, 9)),
            "fp32",
            "needs columns divisible by 8, aux has 9",
        ),
        (replace(KEEPING, batch=2, out=replace(KEEPING.out, stride=32)), "fp32", "one batch member, not 2"),
        (replace(BACK, bias="bias"), "fp32", "goes back through GELU adds no bias, here bias"),
        (replace(BACK, beta=1.0), "fp32", r"does not add to its output \(beta 1\)"),
        (replace(KEEPING, aux="out"), "fp32", "in tensor out where it writes its output"),
        (replace(BACK, aux=Ref("out", 28)), "fp32", "in tensor out where it writes its output"),
    ],
)
def test_an_aux_that_does_not_fit_is_refused_on_either_device(step: Gemm, dtype: str, words: str) -> None:
    tensors = [*WIDE, tensor("bias", 8), tensor("aux", 40, dtype)]
    with pytest.raises(LaunchRefused, match=words):
        aux_operand(step, tensors)
    with pytest.raises(LaunchRefused, match=words):
        check_step(step, {tensor.name: tensor for tensor in tensors})
    with pytest.raises(LaunchRefused, match=words):
        PreparedGemm(fake_library(), step, tensors)


def test_an_aux_behind_the_output_in_the_same_tensor_is_taken() -> None:
    assert aux_operand(replace(BACK, aux=Ref("out", 32)), WIDE) is not None


def test_each_binding_has_its_own_aux() -> None:
    """As the layers of a model have: one prepared GEMM, many addresses."""
    library = fake_library()
    gemm = PreparedGemm(library, KEEPING, [*WIDE, tensor("aux", 32)])
    memory = {name: np.full(64, value, np.float32) for name, value in (("a", 1.0), ("b", 2.0), ("out", 0.0))}
    kept = [np.zeros(32, np.float32) for _ in range(2)]
    parts = [memory[operand.tensor].ctypes.data for operand in (gemm.left, gemm.right, gemm.out)]
    runners = [gemm.runner(Addresses(*parts, aux=aux.ctypes.data), gemm.algo, 0, 0) for aux in kept]
    for run, aux in zip(runners, kept, strict=True):
        run(0)
        np.testing.assert_array_equal(aux, 8.0)
        aux[...] = 0.0
    assert len(library.api.objects) == 4 + 2
    del run, runners
    gc.collect()
    assert len(library.api.objects) == 4


@pytest.mark.parametrize(
    ("step", "name"), [(KEEPING, "GELU_AUX"), (replace(KEEPING, bias="bias"), "GELU_AUX_BIAS"), (BACK, "DGELU")]
)
def test_the_heuristic_is_told_of_aux_and_how_it_is_aligned(step: Gemm, name: str) -> None:
    library = fake_library()
    step = replace(step, aux=Ref("aux", 12))
    gemm = PreparedGemm(library, step, [*WIDE, tensor("bias", 8), tensor("aux", 44)])
    (desc,) = [fields for fields in library.api.objects.values() if "EPILOGUE" in fields]
    assert (desc["EPILOGUE"], desc["EPILOGUE_AUX_POINTER"], desc["EPILOGUE_AUX_LD"]) == (EPILOGUE[name], 16, 8)
    assert str(gemm).endswith(f"epilogue {name}")


def test_a_misplaced_aux_buffer_is_refused_when_it_is_bound() -> None:
    gemm = PreparedGemm(fake_library(), BACK, [*WIDE, tensor("aux", 32)])
    gemm.bind(lambda name: 4096, 0)
    with pytest.raises(LaunchRefused, match="tensor aux is not aligned to 256 bytes"):
        gemm.bind(lambda name: 4096 + 16 * (name == "aux"), 0)


def test_the_key_tells_of_aux() -> None:
    library = fake_library()

    def key(step: Gemm) -> dict[str, Any]:
        return PreparedGemm(library, step, [*WIDE, tensor("bias", 8), tensor("aux", 100)]).key

    steps = [replace(KEEPING, aux=""), KEEPING, replace(KEEPING, bias="bias"), BACK, replace(BACK, aux="")]
    steps.append(replace(KEEPING, aux=Ref("aux", 4)))
    keys = [key(step) for step in steps]
    assert all(keys.count(each) == 1 for each in keys)
    assert key(replace(KEEPING, aux=Ref("aux", 64))) == key(KEEPING)


def test_each_binding_has_its_own_bias() -> None:
    """The address of the bias is part of a descriptor: bindings must not share one."""
    library = fake_library()
    gemm = PreparedGemm(library, BIASED, [*TENSORS, tensor("bias", 2)])
    memory = {name: np.full(32, value, np.float32) for name, value in (("a", 1.0), ("b", 2.0), ("out", 0.0))}
    biases = [np.array([10.0, 20.0], np.float32), np.array([-1.0, -2.0], np.float32)]
    parts = [memory[operand.tensor].ctypes.data for operand in (gemm.left, gemm.right, gemm.out)]
    runners = [gemm.runner(Addresses(*parts, bias.ctypes.data), gemm.algo, 0, 0) for bias in biases]
    for _ in range(2):
        for run, bias in zip(runners, biases, strict=True):
            run(0)
            np.testing.assert_array_equal(memory["out"][:8].reshape(4, 2), 16.0 + np.tile(bias, (4, 1)))
    assert len(library.api.objects) == 4 + 2
    del run, runners
    gc.collect()
    assert len(library.api.objects) == 4


def test_bindings_without_a_bias_share_the_descriptor() -> None:
    library = fake_library()
    gemm = PreparedGemm(library, replace(STEP, gelu=True), TENSORS)
    gemm.bind(lambda name: 4096, 0)
    assert len(library.api.objects) == 4
    assert [fields["EPILOGUE"] for fields in library.api.objects.values() if "EPILOGUE" in fields] == [EPILOGUE.GELU]


def test_the_heuristic_is_told_of_the_epilogue_and_how_the_bias_is_aligned() -> None:
    library = fake_library()
    gemm = PreparedGemm(library, replace(STEP, bias=Ref("bias", 4), gelu=True), [*TENSORS, tensor("bias", 6)])
    (desc,) = [fields for fields in library.api.objects.values() if "EPILOGUE" in fields]
    assert (desc["EPILOGUE"], desc["BIAS_POINTER"]) == (EPILOGUE.GELU_BIAS, 16)
    assert str(gemm).endswith("batch=1 epilogue GELU_BIAS")


def test_a_misplaced_bias_buffer_is_refused_when_it_is_bound() -> None:
    gemm = PreparedGemm(fake_library(), BIASED, [*TENSORS, tensor("bias", 2)])
    gemm.bind(lambda name: 4096, 0)
    with pytest.raises(LaunchRefused, match="tensor bias is not aligned to 256 bytes"):
        gemm.bind(lambda name: 4096 + 16 * (name == "bias"), 0)


def test_the_librarys_own_names_and_types() -> None:
    """What the fake stands for: nvmath's enums, which need no GPU."""
    api = pytest.importorskip("nvmath.bindings.cublasLt")
    assert {member.name for member in EPILOGUE} <= {member.name for member in api.Epilogue}
    assert {member.name for member in DESC} <= {member.name for member in api.MatmulDescAttribute}
    assert {"MASK", "COMPUTE_TYPE"} <= {member.name for member in api.ReductionScheme}
    sizes = {"EPILOGUE": 4, "BIAS_DATA_TYPE": 4, "BIAS_POINTER": 8, "EPILOGUE_AUX_LD": 8, "EPILOGUE_AUX_POINTER": 8}
    for name, size in sizes.items():
        attribute = api.MatmulDescAttribute[name]
        assert np.dtype(api.get_matmul_desc_attribute_dtype(attribute)).itemsize == size


@pytest.mark.parametrize(("out", "mask"), [("fp32", "MASK"), ("bf16", "COMPUTE_TYPE")])
def test_parts_of_a_split_sum_are_not_added_up_in_16_bits(out: str, mask: str) -> None:
    library = fake_library()
    tensors = [tensor("a", 32, "bf16"), tensor("b", 16, "bf16"), tensor("out", 8, out)]
    PreparedGemm(library, replace(STEP, compute="bf16"), tensors).candidates(8, 4096)
    assert library.api.preferred["REDUCTION_SCHEME_MASK"] == library.api.ReductionScheme[mask]


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
    mask = {"REDUCTION_SCHEME_MASK": library.api.ReductionScheme.MASK}
    assert library.api.preferred == {"MAX_WORKSPACE_BYTES": 4096, **alignments, **mask}


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
        return PreparedGemm(library, step, [replace(t, shape=(400,)) for t in (*TENSORS, tensor("bias", 2))]).key

    same = replace(STEP, a=replace(STEP.a, offset=64), alpha=3.0)
    assert key(same) == key(STEP)
    assert key(BIASED) == key(replace(BIASED, bias=Ref("bias", 64)))
    assert key(BIASED) != key(replace(BIASED, bias=Ref("bias", 4)))
    keys = [key(replace(STEP, bias=bias, gelu=gelu)) for bias in ("", "bias") for gelu in (False, True)]
    assert all(keys.count(each) == 1 for each in keys)
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
