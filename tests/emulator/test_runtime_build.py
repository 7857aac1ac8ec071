"""Compiling: messages that name the user's line, and a cache that survives what happens to caches."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_support import needs_compiler

from kbench.device.emulator import cache
from kbench.device.emulator.build import build_kernels, find_compiler
from kbench.device.emulator.device import EmulatorDevice
from kbench.errors import CannotRunError, CompileError, Exit, UsageError
from kbench.family import Launch, Tensor
from kbench.source import load_source

pytestmark = needs_compiler

GOOD = "__global__ void set(int* out, int value) { out[threadIdx.x] = value; }\n"


@pytest.fixture(autouse=True)
def _fresh_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels go to a cache of the test's own; what was found out about the machine is asked again."""
    runtimes = list(cache.folder().glob("libkbench-emulator-*.so"))
    for variable in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):  # zig compiles its C++ library for minutes
        monkeypatch.setenv(variable, str(cache.folder() / "zig"))
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "emulator").mkdir(parents=True)
    for runtime in runtimes:  # the runtime takes seconds to compile
        (tmp_path / "cache" / "emulator" / runtime.name).write_bytes(runtime.read_bytes())
    for function in (cache.folder, find_compiler):
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in (cache.folder, find_compiler):
        function.cache_clear()


def write(folder: Path, text: str, name: str = "user file.cu") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def compile_error(path: Path, *kernels: str) -> CompileError:
    with pytest.raises(CompileError) as caught:
        build_kernels(load_source(path), kernels)
    assert "\n" not in caught.value.message
    assert caught.value.exit_status == Exit.USAGE
    return caught.value


def launch(path: Path, kernel: str, threads: int, shared: int, *numbers: int) -> list[int]:
    """`kernel(out, numbers...)` with one block; out has an int32 per thread."""
    device = EmulatorDevice()
    module = device.build(load_source(path), [kernel])
    out = Tensor("out", (threads,), "int32", "out")
    buffer = device.alloc(out)
    step = Launch(kernel, (1,), (threads,), ("out", *numbers), shared)
    device.enqueue(device.bind(device.prepare([step], module, [out]), {"out": buffer}))
    values: list[int] = buffer.array.tolist()
    device.free(buffer)
    return values


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "emulator").glob("user*.so"))


# ------------------------------------------------------------------------------------------------ messages


def test_syntax_error_has_the_users_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "\n__global__ void bad(int* out) {\n    out[0] = 1\n}\n")
    error = compile_error(path, "set")
    assert error.message.startswith(f"{path}:") and "expected" in error.message
    assert error.message.split(":")[1] in ("4", "5")  # compilers differ on which side the semicolon is missing
    assert "out[0] = 1" in error.log


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "int x = y;\n", os.fsdecode(b"\xff.cu"))
    assert compile_error(path, "set").message.startswith(f"{path}:2: ")
    build_kernels(load_source(write(tmp_path, GOOD, os.fsdecode(b"\xff.cu"))), ["set"])


def test_error_inside_an_include(tmp_path: Path) -> None:
    header = write(tmp_path, "// first line\n__device__ int broken() { return missing; }\n", "part.cuh")
    path = write(tmp_path, '#include "part.cuh"\n' + GOOD)
    assert compile_error(path, "set").message.startswith(f"{header}:2:")


def test_missing_include(tmp_path: Path) -> None:
    path = write(tmp_path, '\n#include "nowhere.cuh"\n' + GOOD)
    message = compile_error(path, "set").message
    assert message.startswith(f"{path}:2:") and "nowhere.cuh" in message


def test_missing_kernel_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    error = compile_error(path, "sett")
    assert "has no kernel `sett`" in error.message and error.log == "", "the log is of macros that nobody wrote"
    assert compile_error(write(tmp_path, GOOD + "broken"), "set").log
    assert not cached(tmp_path)


def test_kernel_name_that_does_not_instantiate(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "template <int N> __global__ void many(int* out) { out[0] = N; }\n")
    message = compile_error(path, "set", "many<float>").message
    assert "`many<float>`" in message and path.name in message


def test_error_inside_an_instantiation(tmp_path: Path) -> None:
    path = write(tmp_path, "template <class T> __global__ void fill(T* out) {\n    out[0] = T::nothing;\n}\n")
    assert compile_error(path, "fill<float>").message.startswith(f"{path}:2:")


def test_a_kernel_made_by_a_macro_is_not_blamed_for_another_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, "#define KERN __global__ void\nKERN good(int*) {}\ntemplate <int N> KERN many(int*) {}\n")
    assert "has no kernel `sett`" in compile_error(path, "good", "sett").message
    message = compile_error(path, "good", "many<nothing>").message
    assert "has no kernel" not in message and "`many<nothing>`" in message


def test_a_device_function_is_not_taken_for_a_kernel(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "__device__ void helper(int* out) { out[0] = 1; }\n")
    assert "`helper`, which the plan names, is a __device__ function" in compile_error(path, "helper").message


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("void __global__ k(int* out) { out[0] = 7; }", "k"),
        ("#define KERN __global__ void\nKERN k(int* out) { out[0] = 7; }", "k"),
        ("#define MAKE(name) __global__ void name##_made(int* out) { out[0] = 7; }\nMAKE(k)", "k_made"),
        ("__global__ void __launch_bounds__(((1024)*(1+0))) k(int* out) { out[0] = 7; }", "k"),
        ("__global__ void __maxnreg__(64) k(int* out) { out[0] = 7; }", "k"),
        ("__global__ void __cluster_dims__(1,1,1) k(int* out) { out[0] = 7; }", "k"),
        ("__global__ void __block_size__((32,1,1)) k(int* out) { out[0] = 7; }", "k"),
        ("template <class T> void __global__ k(T* out) { out[0] = 7; }", "k<int>"),
    ],
)
def test_a_kernel_is_found_however_it_is_defined(tmp_path: Path, text: str, kernel: str) -> None:
    assert launch(write(tmp_path, text + "\n"), kernel, 1, 1)[0] == 7


# ------------------------------------------------------------------------------------------------ translation


def test_forms_of_dynamic_shared_memory(tmp_path: Path) -> None:
    forms = [
        "extern __shared__ float a[];",
        "extern __shared__ __align__(16) unsigned char a[];",
        "extern __shared__ __align__(sizeof(int) * 4) unsigned char a[];",
        "extern __shared__ alignas(16) float4 a[];",
        "extern  __shared__\n    float a [ ] ;",
        "extern __shared__ unsigned long long a[];",
        "extern volatile __shared__ int a[];",
        "extern __shared__ Pair<int, float> a[];",
    ]
    kernels = "".join(
        f"__global__ void k{i}(int* out) {{ {form} out[0] = sizeof(a[0]); }}\n" for i, form in enumerate(forms)
    )
    text = "template <class A, class B> struct Pair { A a; B b; };\n" + kernels + "#error line check\n"
    path = write(tmp_path, text)
    lines = text.count("\n")
    error = compile_error(path, "k0")
    assert error.message.startswith(f"{path}:{lines}:"), error.log  # nothing else is wrong, and lines have not moved


def test_dynamic_shared_memory_declared_outside_of_functions(tmp_path: Path) -> None:
    text = """
    namespace n { extern "C" { // a brace in a comment: {
    extern __shared__ char raw[];
    } }
    extern __shared__ float typed[];
    __device__ float first(const float* values) { return values[0]; }
    __global__ void set(int* out, int value) {
        typed[threadIdx.x] = value;
        __syncthreads();
        float* same = (float*)n::raw;
        *(typed + threadIdx.x) += 1;
        out[threadIdx.x] = same[threadIdx.x] - first(typed) + *typed + ('{' - '{');
    }
    """
    assert launch(write(tmp_path, text), "set", 32, 128, 6) == [7] * 32


@pytest.mark.parametrize(
    ("declaration", "use"),
    [
        ("extern __shared__ unsigned char raw[];", "reinterpret_cast<float*>(raw)"),
        ("extern __shared__ __align__(16) float raw[];", "raw"),
        ("extern __align__(16) __shared__ float raw[];", "&raw[0]"),
        ("extern __shared__ double raw[]; extern __shared__ double raw[];", "(float*)raw"),
        ("extern __shared__ float4 raw[]; extern __shared__ int other[];", "reinterpret_cast<float*>(other)"),
        ("extern volatile __shared__ float raw[];", "const_cast<float*>(raw)"),
    ],
)
def test_uses_of_dynamic_shared_memory_declared_outside_of_functions(
    tmp_path: Path, declaration: str, use: str
) -> None:
    text = (
        declaration
        + f"""
    template <class T> __device__ void put(T* at, T value) {{ *at = value; }}
    __global__ void set(int* out, int value) {{
        float* values = {use};
        put(values + threadIdx.x, float(value));
        __syncthreads();
        out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x] + threadIdx.x;
    }}
    """
    )
    assert launch(write(tmp_path, text), "set", 32, 128, 6) == [6 + i for i in range(32)]


def test_dynamic_shared_memory_in_an_include(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "__device__ float* scratch() { extern __shared__ float s[]; return s; }\n", "sub/part.cuh")
    path = write(
        tmp_path,
        '#include "sub/part.cuh"\n__global__ void use(float* out) { scratch()[0] = 1; out[0] = scratch()[0]; }\n',
    )
    assert build_kernels(load_source(path), ["use"]).exists()


# ------------------------------------------------------------------------------------------------ cache

SCRIPT = """
import logging, sys
from pathlib import Path
import numpy as np
from kbench.device.emulator.device import EmulatorDevice
from kbench.family import Launch, Tensor
from kbench.source import load_source
device = EmulatorDevice()
module = device.build(load_source(Path(sys.argv[1])), ["set"])
out = Tensor("out", (32,), "int32", "out")
buffer = device.alloc(out)
device.enqueue(device.bind(device.prepare([Launch("set", (1,), (32,), ("out", 7))], module, [out]), {"out": buffer}))
print(int(buffer.array.sum()))
"""


def start(path: Path, **environment: str) -> subprocess.Popen[str]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, f"{32 * 7}\n"), err
    return err


def test_two_processes_at_once_share_one_library(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    processes = [start(path) for _ in range(4)]
    assert [finish(process) for process in processes] == [""] * 4
    assert len(cached(tmp_path)) == 1
    assert not [p for p in (tmp_path / "cache" / "emulator").iterdir() if p.name.startswith(".")]  # no leftovers


def test_two_threads_at_once_compile_once(tmp_path: Path) -> None:
    source = load_source(write(tmp_path, GOOD))
    device = EmulatorDevice()
    modules: list[object] = []
    threads = [threading.Thread(target=lambda: modules.append(device.build(source, ["set"]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(modules) == 4 and len({id(module) for module in modules}) == 1


@pytest.mark.parametrize(
    "spoil", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:5000] + b"\x55" * 64 + b[5064:]]
)
def test_a_damaged_library_is_compiled_again_with_a_warning(tmp_path: Path, spoil) -> None:
    path = write(tmp_path, GOOD)
    assert finish(start(path)) == ""
    library = cached(tmp_path)[0]
    library.write_bytes(spoil(library.read_bytes()))
    assert f"{library.name} in the cache is damaged: compiling it again" in finish(start(path))
    assert finish(start(path)) == ""


def test_a_library_that_does_not_load_is_compiled_again(tmp_path: Path) -> None:
    """Whole, but not for this machine: as after moving a cache between computers."""
    path = write(tmp_path, GOOD)
    finish(start(path))
    library = cached(tmp_path)[0]
    library.unlink()

    def make(fresh: Path) -> None:
        fresh.write_bytes(b"\x7fELF of another kind")

    cache.library(library.name, make)
    assert "cannot be loaded" in finish(start(path))
    assert finish(start(path)) == ""


def test_an_unwritable_cache_is_no_obstacle(tmp_path: Path) -> None:
    blocked = write(tmp_path, "not a folder", "file")
    errors = finish(start(write(tmp_path, GOOD), KBENCH_CACHE=str(blocked)))
    assert "cannot be written" in errors


def test_what_a_stopped_compilation_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "emulator"
    old, recent, library = folder / ".old-1.so-abcd", folder / ".recent-1.so-abcd", folder / "mine.so"
    for work in (old, recent):
        work.mkdir()
        (work / "kernels.cpp").write_text("// half")
    library.write_text("a library")
    for path in (old, library):
        os.utime(path, (time.time() - 3700,) * 2)
    cache.folder.cache_clear()
    cache.folder()
    assert not old.exists() and recent.exists() and library.exists()


def test_a_full_disk_is_no_fault_of_the_source(tmp_path: Path) -> None:
    def make(fresh: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CannotRunError, match="cannot write to the cache folder .*: No space left on device"):
        cache.library("some.so", make)


def test_what_goes_into_a_library_decides_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    first = build_kernels(load_source(path), ["set"])
    assert build_kernels(load_source(path), ["set"]) == first
    path.write_text(GOOD + "// changed\n")
    assert build_kernels(load_source(path), ["set"]) != first
    part = write(tmp_path, "// one\n", "part.cuh")
    path.write_text('#include "part.cuh"\n' + GOOD)
    second = build_kernels(load_source(path), ["set"])
    part.write_text("// two\n")
    assert build_kernels(load_source(path), ["set"]) != second


# ------------------------------------------------------------------------------------------------ compilers


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KBENCH_CXX", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CannotRunError) as caught:
        find_compiler()
    assert "apt install g++" in str(caught.value) and "[compiler]" in str(caught.value)
    assert caught.value.exit_status == Exit.CANNOT


@pytest.mark.parametrize("variable", ["KBENCH_CXX", "CXX"])
def test_a_named_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("KBENCH_CXX", raising=False)
    monkeypatch.setenv(variable, "no-such-compiler -x")
    with pytest.raises(CannotRunError, match=rf"`no-such-compiler` that \${variable} names"):
        find_compiler()


def test_a_named_compiler_is_taken_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBENCH_CXX", raising=False)
    found = find_compiler()
    if len(found.command) != 1:
        pytest.skip("the compiler found is not one program")
    find_compiler.cache_clear()
    monkeypatch.setenv("KBENCH_CXX", f"{found.command[0]} -DSOMETHING=1")
    assert find_compiler().command == (found.command[0], "-DSOMETHING=1")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """A compiler, which $KBENCH_CXX names, that answers --version and otherwise runs `body`."""
    path = folder / "cxx"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ printf "cxx 1\\351 test\\n"; exit 0; }}\n{body}\n')
    path.chmod(0o755)
    monkeypatch.setenv("KBENCH_CXX", str(path))
    find_compiler.cache_clear()
    return path


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 0", "has written no file"),
        ("kill -9 $$", "was killed by signal 9"),
        ("echo \"collect2: fatal error: cannot find 'ld'\" >&2; exit 1", "cannot find 'ld'"),
        ("echo \"cxx: error: cannot find 'as'\" >&2; exit 1", "cannot find 'as'"),
        ('echo "/tmp/a.s: Fatal error: can\'t close a.o: No space left on device" >&2; exit 1', "No space left"),
        ("echo 'cxx: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "signal terminated"),
        ("echo \"cxx: fatal error: cannot execute 'cc1plus': execvp: No such file\" >&2; exit 1", "cannot execute"),
    ],
)
def test_a_broken_compiler_is_not_the_fault_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    path = stand_in(tmp_path, monkeypatch, body)
    with pytest.raises(CannotRunError, match=words) as caught:
        build_kernels(load_source(write(tmp_path, GOOD)), ["set"])
    assert str(path) in caught.value.message and "\n" not in str(caught.value)
    assert find_compiler().version == "cxx 1\ufffd test"


def test_a_compiler_that_went_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stand_in(tmp_path, monkeypatch, "exit 1")
    find_compiler()
    path.unlink()
    with pytest.raises(CannotRunError, match=f"{path} .*cannot be started"):
        build_kernels(load_source(write(tmp_path, GOOD)), ["set"])


def test_words_of_a_broken_compiler_in_the_source_are_the_sources_fault(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + 'int x = missing; const char* y = "No space left on device"; int z = missing;\n')
    assert compile_error(path, "set").message.startswith(f"{path}:2:")


@pytest.mark.parametrize("variable", ["KBENCH_CXX", "CXX"])
@pytest.mark.parametrize("value", ["g++ '-DX", 'g++ "', "g++ \\"])
def test_a_compiler_variable_with_an_unbalanced_quote(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv("KBENCH_CXX", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=rf"\${variable} is not a command line"):
        find_compiler()
