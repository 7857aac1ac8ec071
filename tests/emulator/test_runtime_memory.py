"""Buffers, redzones, limits, and the steps that are not kernels."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from runtime_support import needs_compiler, source

from kbench.device.base import Buffer, Damage
from kbench.device.emulator.device import EmulatorDevice
from kbench.device.emulator.steps import round_to_tf32
from kbench.errors import CannotRunError, LaunchRefused
from kbench.family import ITEM_SIZES, Copy, Fill, Gemm, Launch, Matrix, Ref, Step, Tensor, normal
from kbench.source import load_source

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def device() -> EmulatorDevice:
    return EmulatorDevice(workers=1)


def tensor(name: str, shape: tuple[int, ...], dtype: str = "fp32") -> Tensor:
    return Tensor(name, shape, dtype, "out")


def poke(address: int, value: int) -> None:
    ctypes.c_uint8.from_address(address).value = value


@pytest.mark.parametrize("dtype", ITEM_SIZES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (7, 0, 2), (4097,), (1 << 20,)])
def test_buffers_of_every_size_and_type(device: EmulatorDevice, dtype: str, shape: tuple[int, ...]) -> None:
    buffer = device.alloc(tensor("x", shape, dtype))
    nbytes = math.prod(shape) * ITEM_SIZES[dtype]
    assert buffer.array.shape == shape and buffer.array.nbytes == nbytes and buffer.array.flags.c_contiguous
    assert buffer.address % 16 == 0 and (not nbytes or buffer.address == buffer.array.ctypes.data)
    values = (np.arange(math.prod(shape)) % 251).reshape(shape).astype(buffer.array.dtype)
    device.upload(buffer, values)
    assert (device.download(buffer) == values).all()
    device.poison(buffer, 0xFF)
    assert (device.download(buffer).reshape(-1).view(np.uint8) == 0xFF).all()
    assert device.damage(buffer) is None
    device.free(buffer)
    device.free(buffer)  # a second time is harmless


@pytest.mark.parametrize("offset", [-4096, -17, -1, 20, 31])
def test_redzone_damage_is_found_once_and_repaired(device: EmulatorDevice, offset: int) -> None:
    buffer = device.alloc(tensor("x", (5,)))
    poke(buffer.address + offset, 0)
    assert device.damage(buffer) == Damage("x", offset, 1)
    assert device.damage(buffer) is None
    device.free(buffer)


@pytest.mark.parametrize("value", [0, 0xFF, 0x7F])
def test_a_zero_a_minus_one_and_a_nan_written_past_the_end_are_all_damage(device: EmulatorDevice, value: int) -> None:
    buffer = device.alloc(Tensor("x", (3,), "int32", "out"))
    ctypes.memset(buffer.address + 12, value, 4)
    damage = device.damage(buffer)
    assert damage is not None and damage.offset == 12


def test_damage_on_both_sides_is_repaired_together(device: EmulatorDevice) -> None:
    buffer = device.alloc(tensor("x", (5,)))
    for offset in (-8, -7, 24):
        poke(buffer.address + offset, 1)
    assert device.damage(buffer) == Damage("x", -8, 2)
    assert device.damage(buffer) is None
    device.free(buffer)


def test_a_tensor_larger_than_memory_is_refused(device: EmulatorDevice) -> None:
    for count in (10**12, 10**18):
        with pytest.raises(CannotRunError, match="tensor x needs .* GiB, .* GiB are free"):
            device.alloc(tensor("x", (count,)))


def test_upload_of_another_shape_or_type_is_refused(device: EmulatorDevice) -> None:
    buffer = device.alloc(tensor("x", (4, 4)))
    for values in (np.zeros(4, np.float32), np.zeros((4, 4))):
        with pytest.raises(ValueError, match="tensor x is fp32"):
            device.upload(buffer, values)
    device.free(buffer)


@pytest.mark.parametrize(("name", "dtype", "count"), [("float", "fp32", 1001), ("__nv_bfloat16", "bf16", 1001)])
@pytest.mark.parametrize(
    ("body", "offset"),
    [
        ("if (i <= n) y[i] = T(3.0f) * x[i];", 1001),
        ("if (i <= n) y[i] = x[i];", 1001),
        ("if (i < n) y[i - 1] = x[i - 1];", -1),
    ],
)
def test_a_redzone_copied_into_another_is_damage(
    device: EmulatorDevice, tmp_path: Path, name: str, dtype: str, count: int, body: str, offset: int
) -> None:
    """A copy keeps the bits of a NaN, and on a CPU a product does."""
    path = tmp_path / "one_off.cu"
    path.write_text(
        f"#include <cuda_bf16.h>\nusing T = {name};\n__global__ void k(T* y, const T* x, int n) {{\n"
        f"    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    {body}\n}}\n"
    )
    module = device.build(load_source(path), ["k"])
    tensors = [tensor("y", (count,), dtype), Tensor("x", (count,), dtype, "in", draw=normal(0, 1))]
    buffers = {t.name: device.alloc(t) for t in tensors}
    assert buffers["x"].redzone != buffers["y"].redzone
    step = Launch("k", (8,), (128,), ("y", "x", count))
    device.enqueue(device.bind(device.prepare([step], module, tensors), buffers))
    damage = device.damage(buffers["y"])
    assert damage is not None and damage.offset == offset * ITEM_SIZES[dtype]
    assert device.damage(buffers["x"]) is None
    for buffer in buffers.values():
        device.free(buffer)


# ------------------------------------------------------------------------------------------------ steps


def run(device: EmulatorDevice, steps: list[Step], arrays: dict[str, tuple[np.ndarray, str]]) -> dict[str, np.ndarray]:
    tensors = [tensor(name, array.shape, dtype) for name, (array, dtype) in arrays.items()]
    buffers: dict[str, Buffer] = {t.name: device.alloc(t) for t in tensors}
    for name, (array, _) in arrays.items():
        device.upload(buffers[name], array)
    try:
        device.enqueue(device.bind(device.prepare(steps, None, tensors), buffers))
        device.synchronize()
        return {name: device.download(buffer) for name, buffer in buffers.items()}
    finally:
        for buffer in buffers.values():
            device.free(buffer)


def random(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).normal(0, 1, shape).astype(dtype)


def test_gemm_fp32(device: EmulatorDevice) -> None:
    a, b = random((5, 7)), random((7, 3))
    out = np.full((5, 3), np.nan, np.float32)  # beta 0: never read
    step = Gemm(Matrix("a", 5, 7), Matrix("b", 7, 3), Matrix("out", 5, 3), "fp32", alpha=0.5)
    got = run(device, [step], {"a": (a, "fp32"), "b": (b, "fp32"), "out": (out, "fp32")})["out"]
    np.testing.assert_allclose(got, 0.5 * a.astype(np.float64) @ b, rtol=1e-5, atol=1e-6)


def test_gemm_with_batches_strides_transposes_offsets_and_beta(device: EmulatorDevice) -> None:
    batch, m, k, n = 3, 4, 6, 5
    a, b, out = random((2 + batch * 50,)), random((batch, k, 9)), random((batch * 40,))
    step = Gemm(
        Matrix("a", k, m, ld=8, offset=2, stride=50, transpose=True), Matrix("b", k, n, ld=9, stride=k * 9),
        Matrix("out", m, n, ld=7, offset=1, stride=40), "fp32", alpha=2.0, beta=0.25, batch=batch,
    )  # fmt: skip
    got = run(device, [step], {"a": (a, "fp32"), "b": (b, "fp32"), "out": (out, "fp32")})["out"]
    expected = out.astype(np.float64)
    for i in range(batch):
        left = np.array([[a[2 + 50 * i + 8 * r + c] for c in range(m)] for r in range(k)], np.float64)
        product = 2.0 * left.T @ b[i, :, :n]
        for r in range(m):
            row = slice(40 * i + 1 + 7 * r, 40 * i + 1 + 7 * r + n)
            expected[row] = product[r] + 0.25 * expected[row]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "numpy_type"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_gemm_of_half_precision_accumulates_in_fp32(device: EmulatorDevice, dtype: str, numpy_type: type) -> None:
    a, b = np.ones((1, 4096), numpy_type), np.ones((4096, 1), numpy_type)
    step = Gemm(Matrix("a", 1, 4096), Matrix("b", 4096, 1), Matrix("out", 1, 1), dtype)
    got = run(device, [step], {"a": (a, dtype), "b": (b, dtype), "out": (np.zeros((1, 1), numpy_type), dtype)})["out"]
    assert got.dtype == numpy_type and float(got[0, 0]) == 4096.0  # bf16 sums would stop at 256


def test_gemm_tf32_rounds_its_operands(device: EmulatorDevice) -> None:
    value = np.float32(1 + 2.0**-11 + 2.0**-13)  # just above half a step of 10 bits
    a, b = np.full((1, 1), value), np.ones((1, 1), np.float32)
    for compute, expected in (("tf32", 1 + 2.0**-10), ("fp32", value)):
        step = Gemm(Matrix("a", 1, 1), Matrix("b", 1, 1), Matrix("out", 1, 1), compute)
        got = run(device, [step], {"a": (a, "fp32"), "b": (b, "fp32"), "out": (np.zeros((1, 1), np.float32), "fp32")})[
            "out"
        ]
        assert got[0, 0] == expected


def test_tf32_rounding_is_to_nearest_even() -> None:
    values = np.concatenate(
        [random((4000,)) * 10.0 ** np.arange(-20, 20).repeat(100), 1 + np.arange(64) * 2.0**-12]
    ).astype(np.float32)
    fraction, exponent = np.frexp(values.astype(np.float64))
    expected = np.ldexp(np.round(np.ldexp(fraction, 11)), exponent - 11)  # numpy rounds ties to even
    assert (round_to_tf32(values) == expected).all()
    special = np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)
    assert (round_to_tf32(special).view(np.uint32) == special.view(np.uint32)).all()
    assert np.isnan(round_to_tf32(np.array([0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32))).all()


def test_fill_and_copy(device: EmulatorDevice) -> None:
    x, y = np.arange(10, dtype=np.float32), np.zeros(10, np.float32)
    steps = [Fill(Ref("x", 7), 5.0), Fill(Ref("x", 1), -1.0, 2), Copy(Ref("y", 2), Ref("x", 0), 4)]
    got = run(device, steps, {"x": (x, "fp32"), "y": (y, "fp32")})
    assert got["x"].tolist() == [0, -1, -1, 3, 4, 5, 6, 5, 5, 5]
    assert got["y"].tolist() == [0, 0, 0, -1, -1, 3, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Fill(Ref("x", 8), 0.0, 3), "Fill reaches elements 8 to 10 of tensor x, which has 10"),
        (Fill(Ref("nothing")), "no tensor 'nothing'"),
        (Copy(Ref("x"), Ref("z"), 3), "the types differ"),
        (Copy(Ref("x", -1), Ref("y"), 3), "Copy reaches"),
        (
            Gemm(Matrix("x", 3, 4), Matrix("y", 4, 2), Matrix("y", 3, 2), "fp32"),
            "a GEMM uses elements 0 to 12 of tensor x, which has 10",
        ),
        (
            Gemm(Matrix("x", 1, 2, stride=4), Matrix("y", 2, 1), Matrix("y", 1, 1), "fp32", batch=4),
            "elements 0 to 14 of tensor x, which has 10",
        ),
        (Gemm(Matrix("x", 2, 2, ld=1), Matrix("y", 2, 1), Matrix("y", 2, 1), "fp32"), "which is no matrix"),
    ],
)
def test_steps_outside_their_tensors_are_refused(device: EmulatorDevice, step: Step, words: str) -> None:
    with pytest.raises(LaunchRefused, match=words):
        device.prepare([step], None, [tensor("x", (10,)), tensor("y", (10,)), tensor("z", (10,), "fp16")])


# ------------------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        ((1,), (1025,), 0, "block dimension x is 1025, allowed is 1 to 1024"),
        ((1,), (32, 33), 0, "1056 threads per block, the device allows 1024"),
        ((1,), (1, 1, 65), 0, "block dimension z is 65"),
        ((0,), (32,), 0, "grid dimension x is 0"),
        ((2**31,), (32,), 0, "grid dimension x is 2147483648"),
        ((1, 65536), (32,), 0, "grid dimension y is 65536, allowed is 1 to 65535"),
        ((1, 1, 65536), (32,), 0, "grid dimension z is 65536"),
        ((1,), (32,), 227 * 1024 + 1, "232449 bytes of dynamic shared memory, the device allows 232448"),
    ],
)
def test_launches_beyond_the_limits_are_refused(
    device: EmulatorDevice, grid: tuple[int, ...], block: tuple[int, ...], shared: int, words: str
) -> None:
    module = device.build(source("runtime_faults.cu"), ["good"])
    with pytest.raises(LaunchRefused, match=words):
        device.prepare([Launch("good", grid, block, ("out",), shared)], module, [tensor("out", (64,), "int32")])


def test_arguments_are_typed_by_the_kernel(device: EmulatorDevice) -> None:
    module = device.build(source("runtime_faults.cu"), ["write_past_end"])
    for arguments, words in (
        (("out",), "takes 2 arguments .*float.*, int32.*passes 1"),
        (("out", 1.5), "int32, the plan passes the float 1.5"),
        ((3, 1), "passes the number 3"),
    ):
        with pytest.raises(LaunchRefused, match=words):
            device.prepare([Launch("write_past_end", (1,), (1,), arguments)], module, [tensor("out", (4,))])


def test_the_most_that_is_allowed_runs(device: EmulatorDevice) -> None:
    module = device.build(source("runtime_faults.cu"), ["dynamic_shared"])
    out = tensor("out", (1,), "int32")
    shared = device.props.shared_per_block_optin
    prepared = device.prepare(
        [Launch("dynamic_shared", (1,), (1024,), ("out", shared // 4 - 1), shared)], module, [out]
    )
    buffer = device.alloc(out)
    device.enqueue(device.bind(prepared, {"out": buffer}))
    device.free(buffer)


def test_what_the_device_says_of_itself(device: EmulatorDevice) -> None:
    described = device.describe()
    assert described["arch"] == "sm_90" and "-std=c++17" in described["options"] and described["compiler"]
    assert device.props.multiprocessors == 3
    assert 2**20 < device.free_memory() <= device.props.memory_bytes
