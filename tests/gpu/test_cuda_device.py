"""The CUDA device against a real GPU: arguments, limits, memory, GEMMs, graphs and faults."""

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kbench.device.cuda.memory import REDZONE
from kbench.device.dtypes import numpy_dtype
from kbench.errors import CannotRunError, LaunchRefused
from kbench.family import ITEM_SIZES, Copy, Fill, Gemm, Launch, Matrix, Ref, Step, Tensor, kernels_of
from kbench.source import Source, load_source

KERNELS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__global__ void typed(float* out, float f, double d, int i, unsigned u, long l, unsigned long q, bool o, short s,
                      unsigned char y) {
    out[0] = f;
    out[1] = (float)d;
    out[2] = (float)i;
    out[3] = (float)(u >> 16);
    out[4] = (float)(l >> 32);
    out[5] = (float)(q >> 48);
    out[6] = o;
    out[7] = s;
    out[8] = y;
}

template <class T>
__global__ void put(T* out, float value, long index) { out[index] = (T)value; }

__global__ void shared(float* out, int words) {
    extern __shared__ float memory[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = (float)i;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = memory[words - 1];
}

__global__ void both(float* out, int words) {
    extern __shared__ float memory[];
    __shared__ float fixed[256];
    fixed[threadIdx.x] = memory[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = memory[words - 1] + fixed[31];
}

__global__ void __launch_bounds__(128) bounded(float* out) { out[threadIdx.x] = 1.0f; }

// 2^-149 stays what it is: nothing is flushed to zero.
__global__ void denormal(float* out, float tiny) { out[0] = tiny * 1.0f; }
"""
PLAIN = Tensor("out", (64,), "fp32", "scratch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    path = tmp_path_factory.mktemp("Kernel für GPUs") / "kernels.cu"
    path.write_text(KERNELS)
    return load_source(path)


class Bench:
    """Prepares, binds and runs plans; gives the memory back."""

    def __init__(self, device: Any, source: Source):
        self.device, self.source, self.buffers = device, source, {}

    def alloc(self, *tensors: Tensor, byte: int = 0) -> None:
        for tensor in tensors:
            self.buffers[tensor.name] = self.device.alloc(tensor)
            self.device.poison(self.buffers[tensor.name], byte)

    def prepare(self, *plan: Step) -> Any:
        kernels = kernels_of(plan)
        module = self.device.build(self.source, kernels) if kernels else None
        return self.device.prepare(plan, module, [buffer.tensor for buffer in self.buffers.values()])

    def bind(self, *plan: Step) -> Any:
        return self.device.bind(self.prepare(*plan), self.buffers)

    def run(self, *plan: Step) -> None:
        bound = self.bind(*plan)
        with self.device.activate():
            self.device.enqueue(bound)
        self.device.synchronize()

    def read(self, name: str = "out") -> Any:
        return self.device.download(self.buffers[name])


@pytest.fixture
def bench(device: Any, source: Source) -> Any:
    bench = Bench(device, source)
    yield bench
    for buffer in bench.buffers.values():
        device.free(buffer)


# ---------------------------------------------------------------------------------------------- facts


def test_props_and_description_are_those_of_a_gpu(device: Any) -> None:
    props = device.props
    assert props.arch.startswith("sm_") and props.multiprocessors > 0
    assert props.shared_per_block == 48 * 1024 <= props.shared_per_block_optin <= props.shared_per_multiprocessor
    assert props.l2_bytes > 1 << 20 and props.memory_bytes > 1 << 30
    facts = device.describe()
    assert {"kind", "name", "arch", "driver", "compiler", "options", "cupy"} <= set(facts)
    assert all(isinstance(value, str | int | list) for value in facts.values())


def test_resources_agree_with_the_driver(device: Any, source: Source) -> None:
    from cuda.bindings import driver

    kernels = ["typed", "put<float>", "both", "bounded"]
    module = device.build(source, kernels)
    for name in kernels:
        loaded, compiled = module.kernels[name].info, module.cubin.infos[name]
        assert loaded.registers == compiled.registers
        assert loaded.max_threads == compiled.max_threads
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        status, static = driver.cuFuncGetAttribute(attribute, driver.CUfunction(module.kernels[name].function))
        # With or without the KiB that the system reserves in each block.
        assert status == 0 and static in (compiled.static_shared, compiled.static_shared + 1024)


def test_a_version_for_another_gpu_cannot_run(device: Any, source: Source) -> None:
    other = "sm_80" if device.props.arch != "sm_80" else "sm_90"
    with pytest.raises(CannotRunError, match=f"needs {other}"):
        device.build(source, ["bounded"], other)


# ---------------------------------------------------------------------------------------------- launches


def test_every_argument_arrives_as_its_type(bench: Bench) -> None:
    bench.alloc(PLAIN)
    args = ("out", 0.1, 0.3, -7, 0xFFFF0000, -(1 << 33), 0xFFFF << 48, True, -300, 200)
    bench.run(Launch("typed", (1,), (1,), args))
    expected = np.array([0.1, 0.3, -7, 0xFFFF, -2, 0xFFFF, 1, -300, 200], np.float32)
    np.testing.assert_array_equal(bench.read()[:9], expected)


@pytest.mark.parametrize(
    ("c_type", "dtype"), [("float", "fp32"), ("__nv_bfloat16", "bf16"), ("__half", "fp16"), ("int", "int32")]
)
def test_elements_of_every_type_and_an_offset(bench: Bench, c_type: str, dtype: str) -> None:
    bench.alloc(Tensor("out", (10,), dtype, "scratch"))
    bench.run(Launch(f"put<{c_type}>", (1,), (1,), (Ref("out", 3), 5.0, 4)))
    np.testing.assert_array_equal(bench.read().astype(np.float32), [0, 0, 0, 0, 0, 0, 0, 5, 0, 0])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("out", 1.0), "takes 3 arguments"),
        (("out", 1.0, 0.5), "passes the float"),
        ((1, 1.0, 0), "passes the number"),
        (("no", 1.0, 0), "no tensor"),
    ],
)
def test_arguments_that_do_not_fit(bench: Bench, args: tuple[Any, ...], words: str) -> None:
    bench.alloc(PLAIN)
    with pytest.raises(LaunchRefused, match=words):
        bench.prepare(Launch("put<float>", (1,), (1,), args))


def test_nothing_is_flushed_to_zero(bench: Bench) -> None:
    bench.alloc(PLAIN)
    bench.run(Launch("denormal", (1,), (1,), ("out", 2.0**-149)))
    assert bench.read()[0] == np.float32(2.0**-149)


def dynamic(size: int) -> Launch:
    return Launch("shared", (1,), (256,), ("out", size // 4), shared=size)


def test_dynamic_shared_memory_up_to_the_last_byte(bench: Bench, device: Any) -> None:
    bench.alloc(PLAIN)
    for size in (48 * 1024 - 4, 48 * 1024, 48 * 1024 + 4, device.props.shared_per_block_optin):
        bench.run(dynamic(size))
        assert bench.read()[0] == size // 4 - 1
    bench.run(dynamic(48 * 1024 + 4))  # a smaller request afterwards is still allowed


def test_static_and_dynamic_shared_memory_together(bench: Bench, device: Any) -> None:
    bench.alloc(PLAIN)
    limit = device.props.shared_per_block_optin - 1024
    for size in (48 * 1024 - 1024, 48 * 1024 - 1020, limit):
        bench.run(Launch("both", (1,), (256,), ("out", 256), shared=size))
        assert bench.read()[0] == 255 + 31
    with pytest.raises(LaunchRefused, match=f"needs {limit + 1025} bytes of shared memory .1024 static"):
        bench.prepare(Launch("both", (1,), (256,), ("out", 256), shared=limit + 1))


def test_what_the_gpu_does_not_have_is_refused(bench: Bench, device: Any) -> None:
    bench.alloc(PLAIN)
    limit = device.props.shared_per_block_optin
    with pytest.raises(LaunchRefused, match=f"needs {limit + 1} bytes .* can have {limit}"):
        bench.prepare(dynamic(limit + 1))
    with pytest.raises(LaunchRefused, match="129 threads per block; .* it can have 128"):
        bench.prepare(Launch("bounded", (1,), (129,), ("out",)))
    with pytest.raises(LaunchRefused, match="y = 65536"):
        bench.prepare(Launch("bounded", (1, 65_536), (32,), ("out",)))
    bench.run(Launch("bounded", (1,), (64,), ("out",)))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("fp32", 0.0), ("fp32", 1.5), ("bf16", -2.0), ("fp16", 0.25), ("int32", -3), ("uint8", 7), ("fp64", 0.1)],
)
def test_fill_and_copy(bench: Bench, dtype: str, value: float) -> None:
    bench.alloc(Tensor("out", (9,), dtype, "scratch"), Tensor("twin", (9,), dtype, "scratch"), byte=0x11)
    untouched = bench.read()[0]
    bench.run(Fill(Ref("out", 2), value, 5), Copy(Ref("twin", 1), Ref("out", 1), 7))
    expected = np.full(9, untouched)
    expected[2:7] = np.asarray(value).astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(bench.read().view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(bench.read("twin").view(np.uint8), expected.view(np.uint8))


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int32", "uint8"])
def test_values_come_back_and_arrays_are_views(bench: Bench, device: Any, dtype: str) -> None:
    tensor = Tensor("out", (3, 5), dtype, "scratch")
    bench.alloc(tensor)
    buffer = bench.buffers["out"]
    values = np.arange(15).reshape(3, 5).astype(numpy_dtype(dtype))
    device.upload(buffer, values)
    assert buffer.address % 256 == 0 and buffer.array.shape == (3, 5) and buffer.array.dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(bench.read(), values)
    with device.activate():
        np.testing.assert_array_equal(device.xp.asnumpy(buffer.array.view("uint8")), values.view(np.uint8))
    with pytest.raises(ValueError, match="not"):
        device.upload(buffer, values.astype(np.float64))


def test_bf16_arrays_can_be_computed_with(bench: Bench, device: Any) -> None:
    bench.alloc(Tensor("out", (4,), "bf16", "scratch"))
    device.upload(bench.buffers["out"], np.array([1, 2, 3, 4], ml_dtypes.bfloat16))
    with device.activate():
        assert float(bench.buffers["out"].array.astype("float64").sum()) == 10.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_poison_and_fresh_memory_are_nan(bench: Bench, device: Any, dtype: str) -> None:
    tensor = Tensor("out", (33,), dtype, "scratch")
    bench.buffers["out"] = device.alloc(tensor)
    assert np.isnan(bench.read().astype(np.float32)).all()
    device.poison(bench.buffers["out"], 0)
    assert not bench.read().astype(np.float32).any()
    device.poison(bench.buffers["out"], 0xFF)
    assert np.isnan(bench.read().astype(np.float32)).all()
    assert device.damage(bench.buffers["out"]) is None


@pytest.mark.parametrize(("dtype", "c_type"), [("fp32", "float"), ("bf16", "__nv_bfloat16")])
def test_a_write_beside_a_tensor_is_found_and_mended(bench: Bench, device: Any, dtype: str, c_type: str) -> None:
    bench.alloc(Tensor("out", (10,), dtype, "scratch"))
    item, zone = ITEM_SIZES[dtype], REDZONE // ITEM_SIZES[dtype]
    for index in (10, -1, 10 + zone - 1, -zone):
        bench.run(Launch(f"put<{c_type}>", (1,), (1,), ("out", 0.0, index)))
        damage = device.damage(bench.buffers["out"])
        assert damage is not None
        assert (damage.tensor, damage.offset, damage.count) == ("out", index * item, item)
        assert device.damage(bench.buffers["out"]) is None
    bench.run(Launch(f"put<{c_type}>", (1,), (1,), ("out", 0.0, 9)))
    assert device.damage(bench.buffers["out"]) is None


def test_too_large_a_tensor_names_both_sizes(device: Any) -> None:
    count = 2 * device.props.memory_bytes // 4
    with pytest.raises(CannotRunError, match=r"tensor huge needs [\d,]+ bytes, [\d,]+ are free"):
        device.alloc(Tensor("huge", (count,), "fp32", "scratch"))
    before = device.free_memory()
    buffer = device.alloc(Tensor("large", (1 << 26,), "fp32", "scratch"))
    assert before - device.free_memory() >= 1 << 28
    device.free(buffer)
    assert device.free_memory() >= before - (4 << 20)  # the driver gives memory out in pieces of 2 MiB


# ---------------------------------------------------------------------------------------------- GEMMs

# Unit roundoff of what the operands are rounded to, plus room for the sum of k = 67 terms in fp32.
TOLERANCE = {"fp32": 2.0**-24 * 67, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-10}
STORED = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def placed(name: str, rows: int, cols: int, *, batch: int, transpose: bool, padding: int, offset: int) -> Matrix:
    if transpose:
        rows, cols = cols, rows
    ld = cols + padding
    return Matrix(name, rows, cols, ld=ld, offset=offset, stride=rows * ld + padding, transpose=transpose)


def members(flat: Any, matrix: Matrix, batch: int) -> list[Any]:
    views = []
    for i in range(batch):
        start = matrix.offset + i * matrix.stride
        rows = [flat[start + r * matrix.leading :][: matrix.cols] for r in range(matrix.rows)]
        views.append(np.stack(rows).T if matrix.transpose else np.stack(rows))
    return views


def check_gemm(bench: Bench, step: Gemm, captured: bool = False) -> None:
    device, dtype = bench.device, STORED[step.compute]
    rng = np.random.default_rng(7)
    matrices = {"a": step.a, "b": step.b, "out": step.out}
    counts = {n: m.offset + (step.batch - 1) * m.stride + m.rows * m.leading for n, m in matrices.items()}
    bench.alloc(*(Tensor(name, (count,), dtype, "scratch") for name, count in counts.items()))
    values = {name: rng.standard_normal(count).astype(numpy_dtype(dtype)) for name, count in counts.items()}
    bound = bench.bind(step)
    for name in counts:  # after prepare: choosing an algorithm must not have written here
        device.upload(bench.buffers[name], values[name])
    with device.activate():
        device.capture(bound).launch(device.stream) if captured else device.enqueue(bound)
    device.synchronize()

    result = bench.read().astype(np.float64)
    wide = {name: array.astype(np.float64) for name, array in values.items()}
    untouched = np.ones(counts["out"], dtype=bool)
    triples = zip(members(wide["a"], step.a, step.batch), members(wide["b"], step.b, step.batch), strict=True)
    for i, (a, b) in enumerate(triples):
        start = step.out.offset + i * step.out.stride
        index = start + np.arange(step.out.rows)[:, None] * step.out.leading + np.arange(step.out.cols)
        untouched[index] = False
        expected = step.alpha * (a @ b) + step.beta * wide["out"][index]
        magnitude = abs(step.alpha) * (abs(a) @ abs(b)) + abs(step.beta * wide["out"][index])
        assert (abs(result[index] - expected) <= 2 * TOLERANCE[step.compute] * magnitude + 1e-30).all()
    np.testing.assert_array_equal(result[untouched], wide["out"][untouched])
    assert all(device.damage(buffer) is None for buffer in bench.buffers.values())


@pytest.mark.parametrize("compute", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("transpose_a", "transpose_b", "batch", "beta"),
    list(itertools.product([False, True], [False, True], [1, 3], [0.0, 1.0])),
)
def test_gemm(bench: Bench, compute: str, transpose_a: bool, transpose_b: bool, batch: int, beta: float) -> None:
    m, n, k = 33, 65, 67
    a = placed("a", m, k, batch=batch, transpose=transpose_a, padding=5, offset=3)
    b = placed("b", k, n, batch=batch, transpose=transpose_b, padding=1, offset=0)
    out = placed("out", m, n, batch=batch, transpose=False, padding=2, offset=7)
    check_gemm(bench, Gemm(a, b, out, compute, alpha=0.5, beta=beta, batch=batch))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 64, 64), (64, 1, 64), (128, 128, 128), (17, 1, 5)])
@pytest.mark.parametrize("compute", ["fp32", "tf32"])
def test_gemm_of_odd_sizes(bench: Bench, compute: str, m: int, n: int, k: int) -> None:
    check_gemm(bench, Gemm(Matrix("a", m, k), Matrix("b", k, n), Matrix("out", m, n), compute))


def test_fp32_is_not_silently_tf32(bench: Bench) -> None:
    """1 + 2^-20 is representable in fp32 and rounds to 1 in tf32."""
    size = 512  # large enough that no algorithm without tensor cores is the fastest
    step = {
        c: Gemm(Matrix("a", size, size), Matrix("b", size, size), Matrix("out", size, size), c)
        for c in ("fp32", "tf32")
    }
    bench.alloc(*(Tensor(name, (size, size), "fp32", "scratch") for name in ("a", "b", "out")))
    bench.device.upload(bench.buffers["a"], np.full((size, size), 1 + 2.0**-20, np.float32))
    bench.device.upload(bench.buffers["b"], np.eye(size, dtype=np.float32))
    bench.run(step["fp32"])
    assert (bench.read() == np.float32(1 + 2.0**-20)).all()
    bench.run(step["tf32"])
    assert (bench.read() == 1).all()


def test_beta_zero_does_not_read_the_output(bench: Bench) -> None:
    bench.alloc(Tensor("a", (8, 8), "fp32", "scratch"), Tensor("b", (8, 8), "fp32", "scratch"))
    bench.alloc(Tensor("out", (8, 8), "fp32", "scratch"), byte=0xFF)
    bench.run(Gemm(Matrix("a", 8, 8), Matrix("b", 8, 8), Matrix("out", 8, 8), "fp32"))
    assert (bench.read() == 0).all()


def test_the_algorithm_is_taken_from_the_cache_the_second_time(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kbench.device.cuda import tune

    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "_chosen", {})
    bench.alloc(*(Tensor(name, (256, 256), "fp32", "scratch") for name in ("a", "b", "out")))
    step = Gemm(Matrix("a", 256, 256), Matrix("b", 256, 256), Matrix("out", 256, 256), "tf32")
    (first,) = bench.prepare(step).native
    assert len(list((tmp_path / "gemm").iterdir())) == 1
    monkeypatch.setattr(tune, "_chosen", {})
    monkeypatch.setattr(tune, "_measure", lambda *args: pytest.fail("measured again"))
    (second,) = bench.prepare(step).native
    assert (first.algo == second.algo).all() and first.workspace == second.workspace


# ---------------------------------------------------------------------------------------------- graphs


def test_a_captured_gemm_computes_the_same(bench: Bench) -> None:
    check_gemm(
        bench, Gemm(Matrix("a", 48, 40), Matrix("b", 40, 56), Matrix("out", 48, 56), "tf32", beta=1.0), captured=True
    )


def test_a_captured_plan_runs_only_when_launched(bench: Bench, device: Any) -> None:
    bench.alloc(*(Tensor(name, (16, 16), "fp32", "scratch") for name in ("a", "b", "out")))
    device.upload(bench.buffers["b"], np.eye(16, dtype=np.float32))
    plan = (
        Fill(Ref("a"), 3.0),
        Gemm(Matrix("a", 16, 16), Matrix("b", 16, 16), Matrix("out", 16, 16), "fp32", beta=1.0),
        Launch("put<float>", (1,), (1,), ("out", -1.0, 5)),
        Copy(Ref("b", 1), Ref("out"), 1),
    )
    graph = device.capture(bench.bind(*plan))
    assert not bench.read().any()
    for _ in range(2):
        graph.launch(device.stream)
    device.synchronize()
    result = bench.read().ravel()
    # The second run's first row of `out` also has what the first run copied into `b`.
    assert result[5] == -1 and result[255] == 6
    assert bench.read("b").ravel()[1] == result[0]


def test_work_on_another_stream(bench: Bench, device: Any) -> None:
    bench.alloc(PLAIN)
    bound = bench.bind(Launch("put<float>", (1,), (1,), ("out", 4.0, 1)))
    device.synchronize()
    with device.activate():
        other = device.xp.cuda.Stream(non_blocking=True)
        device.enqueue(bound, other)
        other.synchronize()
    assert bench.read()[1] == 4


# ---------------------------------------------------------------------------------------------- faults

FAULTS = {
    "illegal-access": "__global__ void k(float* a) { a[1L << 40] = 1.0f; }",
    "misaligned": "__global__ void k(float* a) { *(float4*)(a + 1) = float4{}; }",
    "assert": "__global__ void k(float* a) { assert(a == nullptr); }",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named_and_costs_only_its_process(tmp_path: Path, kind: str) -> None:
    (tmp_path / "k.cu").write_text(FAULTS[kind] + "\n")
    program = f"""
    from pathlib import Path
    from kbench.device.cuda.device import CudaDevice
    from kbench.errors import KernelFault
    from kbench.family import Launch, Tensor
    from kbench.source import load_source

    device = CudaDevice()
    tensor = Tensor("a", (64,), "fp32", "scratch")
    module = device.build(load_source(Path({str(tmp_path / "k.cu")!r})), ["k"])
    prepared = device.prepare((Launch("k", (1,), (1,), ("a",)),), module, (tensor,))
    bound = device.bind(prepared, {{"a": device.alloc(tensor)}})
    for attempt in range(2):  # the context is lost: the second attempt fails in the same way
        try:
            device.enqueue(bound)
            device.synchronize()
        except KernelFault as fault:
            print(fault.kind, fault.context_lost, fault.row_status)
    device.close()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120
    )
    status = {"misaligned": "fail"}.get(kind, "crashed")
    assert result.stdout.splitlines() == [f"{kind} True {status}"] * 2, result.stderr
