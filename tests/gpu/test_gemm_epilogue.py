"""Bias, GELU and its derivative as the epilogue of a GEMM, on the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kbench.contracts import EPILOGUE_TANH as TANH
from kbench.device.dtypes import numpy_dtype
from kbench.family import STORAGE, UNIT_ROUNDOFF, Gemm, Matrix, Ref, Tensor

M, N, K = 33, 72, 67
# Relative error per unit of the sum of magnitudes: rounding of the operands, and K additions in fp32.
PRODUCT = {"fp32": 2.0**-24 * K, "tf32": 2.0**-10, "bf16": 2.0**-24 * K, "fp16": 2.0**-24 * K}
STEEPEST = 1.13  # of GELU
SLOPE, CUBIC = np.sqrt(2.0 / np.pi), 0.044715  # of u, which GELU takes the tanh of
HALF_SUBNORMAL = 2.0**-25  # of fp16: what rounding may be off, however small a number is


class Buffers:
    """Tensors by name, each in memory of its own."""

    def __init__(self, device: Any, tensors: list[Tensor], values: dict[str, Any]):
        self.device = device
        self.by_name = {tensor.name: device.alloc(tensor) for tensor in tensors}
        self.write(values)

    def write(self, values: dict[str, Any]) -> None:
        for name, array in values.items():
            self.device.upload(self.by_name[name], array)

    def read(self, name: str = "out") -> Any:
        return self.device.download(self.by_name[name]).astype(np.float64)

    def intact(self) -> bool:
        return all(self.device.damage(buffer) is None for buffer in self.by_name.values())

    def free(self) -> None:
        for buffer in self.by_name.values():
            self.device.free(buffer)


class Gemms:
    """Prepares a GEMM once and binds it to as many sets of buffers as are asked for."""

    def __init__(self, device: Any):
        self.device = device
        self.sets: list[Buffers] = []

    def prepare(self, step: Gemm, out: str = "", offset: int = 0) -> None:
        self.step, stored = step, STORAGE[step.compute]
        out = out or stored
        shapes = {"a": (step.batch, M, K), "b": (step.batch, K, N), "out": (step.batch, M, N), "bias": (offset + N,)}
        dtypes = {"a": stored, "b": stored, "out": out, "bias": out, "aux": out}
        if step.aux:
            first = step.aux.offset if isinstance(step.aux, Ref) else 0
            shapes["aux"] = (first + M * N,)
        self.tensors = [Tensor(name, shape, dtypes[name], "scratch") for name, shape in shapes.items()]
        self.prepared = self.device.prepare((step,), None, self.tensors)

    def bind(self, seed: int) -> tuple[Any, Buffers, dict[str, Any]]:
        rng = np.random.default_rng(seed)
        values = {
            tensor.name: rng.normal(0.1, 0.5, tensor.shape).astype(numpy_dtype(tensor.dtype)) for tensor in self.tensors
        }
        buffers = Buffers(self.device, self.tensors, values)
        self.sets.append(buffers)
        return self.device.bind(self.prepared, buffers.by_name), buffers, values

    def run(self, bound: Any) -> None:
        with self.device.activate():
            self.device.enqueue(bound)
        self.device.synchronize()


@pytest.fixture
def gemms(device: Any) -> Iterator[Gemms]:
    made = Gemms(device)
    yield made
    for buffers in made.sets:
        buffers.free()


def matrices(batch: int) -> tuple[Matrix, Matrix, Matrix]:
    return Matrix("a", M, K, stride=M * K), Matrix("b", K, N, stride=K * N), Matrix("out", M, N, stride=M * N)


def assert_right(step: Gemm, values: dict[str, Any], got: Any, out: str) -> None:
    """Against float64, within what the rounding of operands, sums, tanh and the result may do. With a 16-bit output
    cuBLASLt may round the product to it before the epilogue (seen on an H200 with 13.0)."""
    a, b, before, bias = (values[name].astype(np.float64) for name in ("a", "b", "out", "bias"))
    first = step.bias.offset if isinstance(step.bias, Ref) else 0
    bias = bias[first : first + N] if step.bias else 0.0
    sums = step.alpha * (a @ b) + step.beta * before + bias
    magnitude = abs(step.alpha) * (abs(a) @ abs(b)) + abs(step.beta * before) + abs(bias)
    error, expected = 2 * PRODUCT[step.compute] * magnitude, sums
    if out in ("bf16", "fp16"):
        error = error + UNIT_ROUNDOFF[out] * (abs(step.alpha * (a @ b)) + abs(step.beta * before) + abs(sums))
    if step.gelu:
        expected = 0.5 * sums * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (sums + 0.044715 * sums**3)))
        error = STEEPEST * error + 0.5 * abs(sums) * TANH[out]
    allowed = error + UNIT_ROUNDOFF[out] * (abs(expected) + error)
    share = float((abs(got - expected) / allowed).max())
    assert share <= 1.0, f"{share:.2f} of what is allowed"


COMPUTE = ("fp32", "tf32", "bf16", "fp16")
EPILOGUES = {"BIAS": ("bias", False), "GELU": ("", True), "GELU_BIAS": ("bias", True)}


@pytest.mark.parametrize(
    ("compute", "epilogue", "batch", "beta"), list(itertools.product(COMPUTE, EPILOGUES, [1, 3], [0.0, 1.0]))
)
def test_epilogue(gemms: Gemms, compute: str, epilogue: str, batch: int, beta: float) -> None:
    bias, gelu = EPILOGUES[epilogue]
    step = Gemm(*matrices(batch), compute, alpha=0.5, beta=beta, batch=batch, bias=bias, gelu=gelu)
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(1)
    gemms.run(bound)
    assert_right(step, values, buffers.read(), STORAGE[compute])
    assert buffers.intact()


@pytest.mark.parametrize("transposed", ["a", "b"])
def test_epilogue_of_transposed_operands(gemms: Gemms, transposed: str) -> None:
    """As a linear layer has its weights."""
    a, b, out = matrices(1)
    if transposed == "a":
        a = Matrix("a", K, M, transpose=True)
    else:
        b = Matrix("b", N, K, transpose=True)
    step = Gemm(a, b, out, "tf32", bias="bias", gelu=True)
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(2)
    gemms.run(bound)
    name, shape = ("a", (1, K, M)) if transposed == "a" else ("b", (1, N, K))
    values[name] = values[name].reshape(shape).swapaxes(1, 2)
    assert_right(step, values, buffers.read(), "fp32")


def test_a_bf16_gemm_that_writes_fp32_adds_an_fp32_bias(gemms: Gemms) -> None:
    step = Gemm(*matrices(1), "bf16", bias="bias")
    gemms.prepare(step, out="fp32")
    bound, buffers, values = gemms.bind(3)
    gemms.run(bound)
    assert_right(step, values, buffers.read(), "fp32")


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_bias_in_the_middle_of_a_tensor(gemms: Gemms, compute: str) -> None:
    """8 elements in: 32 bytes, or 16, which is the least that is allowed."""
    step = Gemm(*matrices(1), compute, bias=Ref("bias", 8), gelu=True)
    gemms.prepare(step, offset=8)
    bound, buffers, values = gemms.bind(4)
    gemms.run(bound)
    assert_right(step, values, buffers.read(), STORAGE[compute])


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 72, 67), (33, 1, 67), (33, 72, 1), (5, 7, 3), (33, 65, 67)])
@pytest.mark.parametrize("compute", COMPUTE)
def test_odd_sizes(gemms: Gemms, monkeypatch: pytest.MonkeyPatch, compute: str, size: tuple[int, int, int]) -> None:
    for name, value in zip("MNK", size, strict=True):
        monkeypatch.setitem(globals(), name, value)
    step = Gemm(*matrices(1), compute, bias="bias", gelu=True)
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(5)
    gemms.run(bound)
    assert_right(step, values, buffers.read(), STORAGE[compute])
    assert buffers.intact()


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_two_bindings_of_one_prepared_plan_keep_their_biases(gemms: Gemms, compute: str) -> None:
    step = Gemm(*matrices(1), compute, bias="bias")
    gemms.prepare(step)
    bindings = [gemms.bind(seed) for seed in (6, 7)]
    for _ in range(2):
        for bound, buffers, _ in bindings:
            gemms.device.poison(buffers.by_name["out"], 0xFF)
            gemms.run(bound)
        for _, buffers, values in bindings:
            assert_right(step, values, buffers.read(), STORAGE[compute])


def test_a_captured_epilogue_reads_the_bias_when_it_is_launched(gemms: Gemms) -> None:
    step = Gemm(*matrices(1), "tf32", bias="bias", gelu=True)
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(8)
    graph = gemms.device.capture(bound)
    del bound  # the graph keeps what it needs
    values["bias"] = replace_bias(values["bias"])
    buffers.write({"bias": values["bias"]})
    with gemms.device.activate():
        graph.launch(gemms.device.stream)
    gemms.device.synchronize()
    assert_right(step, values, buffers.read(), "fp32")


def replace_bias(bias: Any) -> Any:
    return (3.0 - bias).astype(bias.dtype)


# ------------------------------------------------------------------------------------ what GELU is applied to


def sums_of(step: Gemm, values: dict[str, Any], out: str) -> tuple[Any, Any]:
    """alpha a b + beta out + bias in float64, and what a 16-bit library may be off before it goes on."""
    a, b, before, bias = (values[name].astype(np.float64) for name in ("a", "b", "out", "bias"))
    bias = bias[:N] if step.bias else 0.0
    product, added = step.alpha * (a @ b), step.beta * before + bias
    error = 2 * PRODUCT[step.compute] * (abs(step.alpha) * (abs(a) @ abs(b)) + abs(added))
    if out in ("bf16", "fp16"):
        error = error + UNIT_ROUNDOFF[out] * (abs(product) + abs(step.beta * before)) + HALF_SUBNORMAL
    return product + added, error


def matrix_of(step: Gemm, values: Any) -> Any:
    """The aux tensor's values as a matrix."""
    first = step.aux.offset if isinstance(step.aux, Ref) else 0
    return values[first : first + M * N].reshape(1, M, N)


def assert_kept(step: Gemm, values: dict[str, Any], got: Any, out: str) -> None:
    sums, error = sums_of(step, values, out)
    allowed = error + UNIT_ROUNDOFF[out] * (abs(sums) + error) + HALF_SUBNORMAL
    share = float((abs(matrix_of(step, got) - sums) / allowed).max())
    assert share <= 1.0, f"{share:.2f} of what is allowed"


def assert_went_back(step: Gemm, values: dict[str, Any], got: Any, out: str) -> None:
    """out = product * gelu'(aux). An error of the tanh moves the derivative by 1/2 + |x tanh(u) u'| times that."""
    product, error = sums_of(step, values, out)
    x = matrix_of(step, values["aux"]).astype(np.float64)
    tanh = np.tanh(SLOPE * (x + CUBIC * x**3))
    lever = SLOPE * x * (1.0 + 3.0 * CUBIC * x * x)
    slope = 0.5 * (1.0 + tanh) + 0.5 * (1.0 - tanh * tanh) * lever
    wrong = TANH[out] * (0.5 + abs(lever * tanh)) + 16 * 2.0**-24 * (1.0 + abs(lever * tanh))
    error = abs(slope) * error + wrong * (abs(product) + error)
    expected = product * slope
    allowed = error + UNIT_ROUNDOFF[out] * (abs(expected) + error) + HALF_SUBNORMAL
    share = float((abs(got - expected) / allowed).max())
    assert share <= 1.0, f"{share:.2f} of what is allowed"


def check_kept(gemms: Gemms, step: Gemm, seed: int) -> None:
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(seed)
    gemms.device.poison(buffers.by_name["aux"], 0xFF)
    gemms.run(bound)
    assert_kept(step, values, buffers.read("aux"), STORAGE[step.compute])
    assert_right(step, values, buffers.read(), STORAGE[step.compute])
    assert buffers.intact()


def check_went_back(gemms: Gemms, step: Gemm, seed: int) -> None:
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(seed)
    values["aux"] = (3.0 * values["aux"].astype(np.float32)).astype(values["aux"].dtype)  # to where GELU is straight
    buffers.write({"aux": values["aux"]})
    gemms.device.poison(buffers.by_name["out"], 0xFF)  # beta is 0: it is not read
    gemms.run(bound)
    assert_went_back(step, values, buffers.read(), STORAGE[step.compute])
    np.testing.assert_array_equal(buffers.read("aux"), values["aux"].astype(np.float64))
    assert buffers.intact()


@pytest.mark.parametrize(("compute", "bias", "beta"), list(itertools.product(COMPUTE, ["", "bias"], [0.0, 1.0])))
def test_what_gelu_is_applied_to_is_kept(gemms: Gemms, compute: str, bias: str, beta: float) -> None:
    check_kept(gemms, Gemm(*matrices(1), compute, alpha=0.5, beta=beta, bias=bias, gelu=True, aux="aux"), 10)


@pytest.mark.parametrize("compute", COMPUTE)
def test_back_through_gelu(gemms: Gemms, compute: str) -> None:
    check_went_back(gemms, Gemm(*matrices(1), compute, alpha=0.5, aux="aux"), 11)


AUX_SIZES = [(1, 8, 1), (1, 72, 67), (33, 8, 67), (33, 72, 1), (5, 16, 3), (200, 264, 40), (2048, 3072, 768)]


@pytest.mark.parametrize("size", AUX_SIZES, ids=str)
@pytest.mark.parametrize("compute", COMPUTE)
def test_sizes_with_aux(gemms: Gemms, monkeypatch: pytest.MonkeyPatch, compute: str, size: tuple[int, ...]) -> None:
    """In the layouts of a linear layer: forward the weight is transposed, backward it is not."""
    for name, value in zip("MNK", size, strict=True):
        monkeypatch.setitem(globals(), name, value)
    a, b, out = matrices(1)
    check_went_back(gemms, Gemm(a, b, out, compute, aux="aux"), 12)
    step = Gemm(a, Matrix("b", N, K, transpose=True), out, compute, bias="bias", gelu=True, aux="aux")
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(13)
    gemms.run(bound)
    values["b"] = values["b"].reshape(1, N, K).swapaxes(1, 2)
    assert_kept(step, values, buffers.read("aux"), STORAGE[compute])
    assert_right(step, values, buffers.read(), STORAGE[compute])
    assert buffers.intact()


@pytest.mark.parametrize("compute", COMPUTE)
def test_an_aux_in_the_middle_of_a_tensor(gemms: Gemms, compute: str) -> None:
    """As the layers of a model have it: 8 elements in are 16 bytes, the least that is allowed, or 32."""
    check_kept(gemms, Gemm(*matrices(1), compute, bias="bias", gelu=True, aux=Ref("aux", 8)), 14)
    check_went_back(gemms, Gemm(*matrices(1), compute, aux=Ref("aux", 8)), 15)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("gelu", [True, False])
def test_two_bindings_of_one_prepared_plan_keep_their_aux(gemms: Gemms, compute: str, gelu: bool) -> None:
    step, out = Gemm(*matrices(1), compute, gelu=gelu, aux="aux"), STORAGE[compute]
    gemms.prepare(step)
    bindings = [gemms.bind(seed) for seed in (16, 17)]
    for _ in range(2):
        for bound, buffers, _ in bindings:
            for name in ("out", *(["aux"] if gelu else [])):
                gemms.device.poison(buffers.by_name[name], 0xFF)
            gemms.run(bound)
        for _, buffers, values in bindings:
            if gelu:
                assert_kept(step, values, buffers.read("aux"), out)
                assert_right(step, values, buffers.read(), out)
            else:
                assert_went_back(step, values, buffers.read(), out)


@pytest.mark.parametrize("gelu", [True, False])
def test_a_captured_epilogue_uses_aux_when_it_is_launched(gemms: Gemms, gelu: bool) -> None:
    step = Gemm(*matrices(1), "bf16", gelu=gelu, aux="aux")
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(18)
    graph = gemms.device.capture(bound)
    del bound  # the graph keeps what it needs
    values["aux"] = replace_bias(values["aux"])
    buffers.write({"aux": values["aux"]})
    with gemms.device.activate():
        graph.launch(gemms.device.stream)
    gemms.device.synchronize()
    if gelu:
        assert_kept(step, values, buffers.read("aux"), "bf16")
    else:
        assert_went_back(step, values, buffers.read(), "bf16")


def test_beta_zero_does_not_read_the_output(gemms: Gemms) -> None:
    step = Gemm(*matrices(1), "fp32", bias="bias", gelu=True)
    gemms.prepare(step)
    bound, buffers, values = gemms.bind(9)
    gemms.device.poison(buffers.by_name["out"], 0xFF)
    gemms.run(bound)
    assert_right(step, values, buffers.read(), "fp32")
