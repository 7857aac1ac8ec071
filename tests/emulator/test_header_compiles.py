"""The header's names are CUDA's: the same files compile with nvcc, and what nvcc refuses is refused here, too."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from header_support import NAMES, source_of
from runtime_support import needs_compiler

from kbench.device.emulator import build
from kbench.device.emulator.compiler import COMMON
from kbench.device.emulator.translate import write_translation
from kbench.source import load_source

pytestmark = pytest.mark.emulator

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
INCLUDE = Path(build.__file__).parent / "include"

# Loop unrolling is asked for by a pragma that g++ does not know.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


def compile_for_cpu(compiler: str, main: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [compiler, *COMMON, "-O1", *options, f"-I{INCLUDE}", "-include", str(INCLUDE / "cuda_emulator.h")]
    command += ["-c", str(main), "-o", str(main) + ".o"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def compile_for_gpu(file: Path) -> subprocess.CompletedProcess[str]:
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-diag-suppress", "177", "-o", str(file) + ".cubin"]
    return subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("file", NAMES)
def test_no_warnings(compiler: str, file: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    done = compile_for_cpu(compiler, write_translation(source_of(file), NAMES[file], tmp_path), *WARNINGS)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@needs_nvcc
@pytest.mark.parametrize("file", NAMES)
def test_nvcc_takes_the_same_kernels(file: str, tmp_path: Path) -> None:
    """With every template instantiated, by host variables that point to them."""
    uses = "\n".join(f"auto* const kbench_use_{i} = {name};" for i, name in enumerate(NAMES[file]))
    copy = tmp_path / f"{file}.cu"
    copy.write_text(f"{source_of(file).text}\n{uses}\n")
    done = compile_for_gpu(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{file}.cu.cubin").read_bytes().count(b".text.") >= len(NAMES[file])


# Code that CUDA refuses. A header that took it would let a kernel pass here that no GPU can run.
REFUSED = {
    "half plus float": "__global__ void f(__half* x) { x[0] = x[0] + 1.0f; }",
    "half compared with int": "__global__ void f(__half* x, bool* y) { y[0] = x[0] == 0; }",
    "float += half": "__global__ void f(__half* x, float* y) { y[0] += x[0]; }",
    "half plus bfloat16": "__global__ void f(__half* x, __nv_bfloat16* y) { x[0] = x[0] + y[0]; }",
    "bfloat16 becomes half unasked": "__global__ void f(__half* x, __nv_bfloat16* y) { x[0] = y[0]; }",
    "shuffle of a structure": "__global__ void f(float2* x) { x[0] = __shfl_xor_sync(~0u, x[0], 1); }",
    "atomicAdd of long long": "__global__ void f(long long* x) { atomicAdd(x, 1ll); }",
    "atomicExch of double": "__global__ void f(double* x) { atomicExch(x, 1.0); }",
    "atomicMax of float": "__global__ void f(float* x) { atomicMax(x, 1.0f); }",
    "__ldg of bool": "__global__ void f(const bool* x, int* y) { y[0] = __ldg(x); }",
    "__ldg of float3": "__global__ void f(const float3* x, float3* y) { y[0] = __ldg(x); }",
    "vector arithmetic": "__global__ void f(float4* x) { x[0] = x[0] + x[0]; }",
    "shuffle without mask": "__global__ void f(float* x) { x[0] = __shfl(x[0], 0); }",
    "reduction of floats": "__global__ void f(float4* x) { x[0].x = __reduce_add_sync(~0u, x[0]); }",
    "assignment to threadIdx": "__global__ void f() { threadIdx.x = 1; }",
    "tile of 24": "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
    "__global__ void f() { cg::tiled_partition<24>(cg::this_thread_block()); }",
    "scan without its header": "#include <cooperative_groups.h>\n#include <cooperative_groups/reduce.h>\n"
    "namespace cg = cooperative_groups;\n"
    "__global__ void f(int* x) { x[0] = cg::inclusive_scan(cg::coalesced_threads(), x[0]); }",
}  # fmt: skip
HEADERS = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
CONTROL = "__global__ void f(__half* x, float* y) { y[0] = y[0] + (float)(x[0] + __half(1.0f)); }"


def refused_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "refused.cu"
    file.write_text(HEADERS + text + "\n")
    return file


@needs_compiler
@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what: str, tmp_path: Path) -> None:
    source = load_source(refused_file(tmp_path, REFUSED[what]))
    compiler = build.find_compiler().command
    done = compile_for_cpu(compiler[0], write_translation(source, ["f"], tmp_path), *compiler[1:])
    assert done.returncode != 0, "this compiles"
    assert "error" in done.stderr


@needs_nvcc
@pytest.mark.parametrize("what", REFUSED)
def test_cuda_does_refuse_it(what: str, tmp_path: Path) -> None:
    assert compile_for_gpu(refused_file(tmp_path, REFUSED[what])).returncode != 0


@needs_compiler
def test_what_is_refused_is_not_everything(tmp_path: Path) -> None:
    source = load_source(refused_file(tmp_path, CONTROL))
    compiler = build.find_compiler().command
    done = compile_for_cpu(compiler[0], write_translation(source, ["f"], tmp_path), *compiler[1:])
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_standard_headers_may_follow(tmp_path: Path) -> None:
    """Names that the header takes over (printf, assert) survive the headers that declare them."""
    headers = ("cstdio", "cassert", "cmath", "cstdint", "climits", "cfloat", "algorithm")
    text = "\n".join(f"#include <{name}>" for name in headers)
    text += '\n__global__ void f(int n) { assert(n); std::printf("%d", std::max(n, 2)); printf("%f", std::sqrt(2.0)); }'
    source = load_source(refused_file(tmp_path, text))
    compiler = build.find_compiler().command
    main = write_translation(source, ["f"], tmp_path)
    done = compile_for_cpu(compiler[0], main, *compiler[1:])
    assert done.returncode == 0, done.stderr
    objects = (tmp_path / (main.name + ".o")).read_bytes()
    assert b"emu_printf" in objects and b"emu_stop" in objects and b"\0printf\0" not in objects


@needs_compiler
def test_the_header_is_quick_to_compile(tmp_path: Path) -> None:
    """It is paid for by every kernel file. About 0.15 s on one 2020s core; the limit leaves room for a busy machine."""
    source = load_source(refused_file(tmp_path, "__global__ void f() {}"))
    compiler = build.find_compiler().command
    main = write_translation(source, ["f"], tmp_path)
    start = time.perf_counter()
    assert compile_for_cpu(compiler[0], main, *compiler[1:]).returncode == 0
    assert time.perf_counter() - start < 3
