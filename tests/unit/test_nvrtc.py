"""Compiling without a GPU: cubins, signatures, resources, error messages."""

import re
from pathlib import Path

import pytest

from kbench.device.cuda.compile import Cubin, compile_cubin, nvrtc_version
from kbench.device.cuda.headers import cuda_headers
from kbench.errors import CannotRunError, CompileError
from kbench.source import load_source

try:
    nvrtc_version()
    MISSING = ""
except CannotRunError as error:
    MISSING = str(error)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "NVRTC is there")

SAMPLE = """
#include "common.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace sample {
template <class T, int N>
__global__ void __launch_bounds__(N) scale(const T* __restrict__ in, T* out, float factor, long n) {
    __shared__ float tile[N];
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? twice((float)in[i]) : 0.0f;
    __syncthreads();
    if (i < n) out[i] = (T)(tile[(threadIdx.x + 1) % N] * factor);
}
}  // namespace sample

__global__ void nothing() {}

struct Pair { int a, b; };
__global__ void letters(double d, unsigned u, bool o, unsigned char y, short* s, const __half* h, float4* v, Pair p) {}

// 96 values per thread where 32 registers are allowed.
__global__ void __launch_bounds__(1024, 2) spills(float* a, int n) {
    float r[96];
#pragma unroll
    for (int i = 0; i < 96; i++) r[i] = a[threadIdx.x + i * 1024];
    for (int j = 0; j < n; j++) {
#pragma unroll
        for (int i = 0; i < 96; i++) r[i] = r[i] * r[(i * 7 + 1) % 96] + a[j];
    }
#pragma unroll
    for (int i = 0; i < 96; i++) a[threadIdx.x + i * 1024] = r[i];
}
"""
COMMON = "#pragma once\n__device__ inline float twice(float x) { return x + x; }\n"
KERNELS = ("sample::scale<float, 128>", "sample::scale<__nv_bfloat16,64>", "nothing", "letters", "spills")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KBENCH_CACHE", str(folder))
    return folder


def write(folder: Path, text: str = SAMPLE, name: str = "sample.cu") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "common.cuh").write_text(COMMON)
    (folder / name).write_text(text)
    return folder / name


def compiled(folder: Path, text: str = SAMPLE, kernels: tuple[str, ...] = KERNELS, arch: str = "sm_90") -> Cubin:
    return compile_cubin(load_source(write(folder, text)), kernels, arch)


def message(folder: Path, text: str, kernels: tuple[str, ...] = ("k",)) -> CompileError:
    with pytest.raises(CompileError) as caught:
        compiled(folder, text, kernels)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_resources_and_signatures(tmp_path: Path, arch: str) -> None:
    cubin = compiled(tmp_path / "Größe mit Leerzeichen", arch=arch)
    assert set(cubin.lowered) == set(cubin.signatures) == set(cubin.infos) == set(KERNELS)
    texts = {kernel: ", ".join(map(str, signature)) for kernel, signature in cubin.signatures.items()}
    assert texts == {
        "sample::scale<float, 128>": "const float*, float*, float, int64",
        "sample::scale<__nv_bfloat16,64>": "const bfloat16*, bfloat16*, float, int64",
        "nothing": "",
        "letters": "double, uint32, bool, uint8, int16*, const half*, a struct*, a struct",
        "spills": "float*, int32",
    }
    big, small, spills = (cubin.infos[KERNELS[i]] for i in (0, 1, 4))
    assert (big.static_shared, big.max_threads, big.local_bytes, big.spill_bytes) == (512, 128, 0, 0)
    assert (small.static_shared, small.max_threads) == (256, 64)
    assert spills.registers == 32 and spills.max_threads == 1024
    assert spills.local_bytes and spills.local_bytes >= 4 * (96 - 32)
    assert spills.spill_bytes and spills.spill_bytes >= 2 * 4 * (96 - 32)


def test_the_cubin_agrees_with_the_assemblers_report(tmp_path: Path) -> None:
    cubin = compiled(tmp_path)
    entries = re.split(r"Compiling entry function '", cubin.log)[1:]
    assert len(entries) == len(KERNELS)
    for entry in entries:
        info = next(cubin.infos[k] for k, name in cubin.lowered.items() if entry.startswith(f"{name}'"))
        used = re.search(r"Used (\d+) registers", entry)
        shared = re.search(r"(\d+) bytes smem", entry)
        frame = re.search(r"(\d+) bytes stack frame", entry)
        assert used and info.registers == int(used[1])
        assert info.static_shared == (int(shared[1]) if shared else 0)
        assert frame and info.local_bytes == int(frame[1])


def test_no_fast_math_and_no_flush_to_zero(tmp_path: Path) -> None:
    from kbench.device.cuda.compile import OPTIONS

    assert not [option for option in OPTIONS if "fast" in option or "ftz" in option or "default-device" in option]
    with_line_info = compiled(tmp_path).data
    assert b".debug_line" in with_line_info and b"sample.cu" in with_line_info


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    error = message(tmp_path, "__global__ void k() {\n    int x = y;\n}\n")
    assert str(error) == f'{tmp_path / "sample.cu"}:2: error: identifier "y" is undefined'
    assert "1 error detected" in error.log


def test_the_path_is_shown_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "__global__ void k() { y; }\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r"^sample\.cu:1: error"):
        compile_cubin(load_source(Path("sample.cu")), ("k",), "sm_90")


def test_an_error_in_an_include_names_that_file(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cuh"
    broken.write_text("\n\n__device__ int f() { return z; }\n")
    assert str(message(tmp_path, '#include "broken.cuh"\n__global__ void k() {}\n')).startswith(f"{broken}:3: ")


@pytest.mark.parametrize(
    "text", ["__global__ void k() {\n", "#if 1\n__global__ void k() {}\n", "__global__ void k() {} /*\n"]
)
def test_an_unfinished_file_is_blamed_itself(tmp_path: Path, text: str) -> None:
    error = str(message(tmp_path, text))
    assert error.startswith(str(tmp_path / "sample.cu")) and "plan" not in error and "signature" not in error


def test_an_error_of_the_assembler(tmp_path: Path) -> None:
    text = """__global__ void k(float* a) {
    __shared__ float s[99999];
    s[threadIdx.x] = a[0];
    __syncthreads();
    a[1] = s[3];
}
"""
    assert "too much shared data" in str(message(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("void __global__ k(int* out) {}", "k"),
        ("#define KERN __global__ void\nKERN k(int* out) {}", "k"),
        ("#define MAKE(name) __global__ void name##_made(int* out) {}\nMAKE(k)", "k_made"),
        ("__global__ void __launch_bounds__(((1024)*(1+0))) k(int* out) {}", "k"),
        ("__global__ void __maxnreg__(64) k(int* out) {}", "k"),
        ("__global__ void __cluster_dims__(1,1,1) k(int* out) {}", "k"),
    ],
)
def test_a_kernel_is_found_however_it_is_defined(tmp_path: Path, text: str, kernel: str) -> None:
    assert kernel in compiled(tmp_path, text + "\n", (kernel,)).lowered


def test_a_kernel_made_by_a_macro_is_not_blamed_for_another_that_is_missing(tmp_path: Path) -> None:
    text = "#define KERN __global__ void\nKERN good(int* out) {}\ntemplate <int N> KERN many(int* out) {}\n"
    assert "has no kernel `sett`" in str(message(tmp_path, text, ("good", "sett")))
    assert "has no kernel" not in str(message(tmp_path, text, ("good", "many<nothing>")))


def test_a_missing_kernel_suggests_the_nearest(tmp_path: Path) -> None:
    assert "did you mean nothing?" in str(message(tmp_path, SAMPLE, ("nothin",)))


@pytest.mark.parametrize("kernel", ["sample::scale<float>", "nothing<3>"])
def test_an_expression_that_does_not_fit_is_named(tmp_path: Path, kernel: str) -> None:
    assert f"the plan's kernel `{kernel}` does not fit" in str(message(tmp_path, SAMPLE, ("letters", kernel)))


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("stdint.h", "__CUDACC_RTC__"),
        ("crt/absent.h", "pip install"),
        ("cuda/absent", "nvidia-cuda-cccl"),
        ("my.h", "beside the .cu"),
    ],
)
def test_a_missing_header_names_header_folders_and_remedy(tmp_path: Path, header: str, hint: str) -> None:
    error = message(tmp_path, f"\n#include <{header}>\n__global__ void k() {{}}\n")
    assert f'sample.cu:2: the header "{header}" is not found (searched {tmp_path}' in str(error)
    assert hint in error.hint


def test_a_broken_kernel_does_not_take_its_siblings_along(tmp_path: Path) -> None:
    text = "template <int N> __global__ void k() { static_assert(N < 4); }\n"
    assert compiled(tmp_path, text, ("k<3>",)).infos
    assert "static assertion failed" in str(message(tmp_path, text, ("k<5>",)))


@pytest.mark.parametrize("arch", ["sm_10", "sm_999", "90", "", "compute_90"])
def test_an_unknown_architecture_cannot_be_compiled_for(tmp_path: Path, arch: str) -> None:
    with pytest.raises(CannotRunError):
        compiled(tmp_path, arch=arch)


@pytest.mark.parametrize("value", ["", "/nonexistent", "relative", "/usr"])
def test_a_wrong_cuda_path_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    if not cuda_headers(nvrtc_version()):
        pytest.skip("no CUDA headers here")
    monkeypatch.setenv("CUDA_PATH", value)
    assert not compiled(tmp_path).from_cache


def test_headers_of_another_major_version_are_not_used() -> None:
    major, minor = nvrtc_version()
    assert not cuda_headers((major + 5, minor))


def test_cooperative_groups_compile_without_cccl(tmp_path: Path) -> None:
    text = """#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
__global__ void k(float* a) {
    auto warp = cg::tiled_partition<32>(cg::this_thread_block());
    a[threadIdx.x] = cg::reduce(warp, a[threadIdx.x], cg::plus<float>{});
}
"""
    if not cuda_headers(nvrtc_version()):
        pytest.skip("no CUDA headers here")
    assert compiled(tmp_path, text, ("k",)).infos["k"].registers
