"""Which declarations of a source an exported program keeps."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from kbench.catalog import kernel_folder
from kbench.errors import UsageError
from kbench.export.prune import device_code, expand, split
from kbench.source import Source, load_source


def source(text: str, **includes: str) -> Source:
    files = tuple((f"{name}.h", Path(f"{name}.h"), body) for name, body in includes.items())
    return Source(Path("k.cu"), text, files)


def kept(text: str, *kernels: str) -> str:
    return device_code(source(text), kernels or ("k",))[1]


# Declarations of `wanted` in all forms; `k` uses it, and `other` is used by nobody.
FORMS = [
    "__device__ inline float wanted(float x) { return x; }",
    "template <class T = X<int>, int N = (3 > 2), int M = 4>\n__device__ T wanted(T x) { if (x) { f(); } return {}; }",
    "template <>\n__device__ float wanted<float>(float x) { return x; }",
    "__device__ float wanted(float x);",
    "struct alignas(16) wanted { float x; __device__ wanted() : x{1.0f} {} };",
    "template <class T> class wanted { static void f(); public: int g() { return 1; } };",
    "enum Colours { red, wanted, blue };",
    "enum class wanted : int { red };",
    "struct Named { int x; } const wanted = {1};",
    "constexpr int wanted = 4;",
    "__constant__ float wanted[] = {1.0f, 2.0f};",
    "extern __shared__ float wanted[];",
    "using wanted = float;",
    "typedef long long wanted;",
    "auto wanted = [](int x) { return x; };",
    "__device__ wanted::wanted() : x{1}, y{2} {}",
    "float Type::wanted() { return 1; }",
    "__device__ __forceinline__ auto wanted(int (&values)[4]) -> int { return values[0]; }",
    "#define wanted(x) \\\n    (x + 1)",
    "#if defined(A)\nint wanted() { return 1; }\n#else\nint wanted() { return 2; }\n#endif",
    "namespace n { __device__ int wanted() { return 1; } }",
    '__device__ const char* wanted() { return "}{;" R"x(")}; )x"; }',
    "__device__ int wanted() { return 1'000 + '{'; }",
    "DEFINE_FUNCTION(wanted)",
]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_kernel_uses_stays_whatever_form_it_has(form: str) -> None:
    other = re.sub(r"\b(Colours|Named|Type|red|blue)\b", r"\g<1>2", form.replace("wanted", "other"))
    text = f"{other}\n\n{form}\n\n__global__ void k() {{ wanted; }}\n\n__global__ void k2() {{ other; }}\n"
    found = kept(text)
    assert form in found and "__global__ void k() { wanted; }" in found and "k2" not in found
    # What is not understood stays, too.
    understood = not form.startswith(("#", "namespace", "DEFINE"))
    assert ("other" not in found) == understood
    assert found.count("{") == found.count("}") or "}{" in found or "'{'" in found


def test_what_is_used_by_way_of_others_stays_and_order_too() -> None:
    first, second = "int a() { return 1; }\n", "// of b\nint b() { return a(); }  // behind b\n"
    kernel = "__global__ void k() { b(); }\n"
    assert kept(f"{first}int unused();\n{second}int c;\n{kernel}") == first + second + kernel


def test_braces_that_close_in_another_branch_leave_all_of_it() -> None:
    text = "int a;\n#ifdef X\nvoid f(int x) {\n#else\nvoid f() {\n#endif\n}\nint b;\n__global__ void k() {}\n"
    assert kept(text).endswith("}\nint b;\n__global__ void k() {}\n")


def test_system_headers_are_gathered_and_comments_of_files_left_out() -> None:
    includes = '#include <cuda_fp16.h>  // halves\n#include "common.h"\n#include "cub/cub.cuh"\n'
    text = f"// About the file.\n{includes}\n// Of k.\n__global__ void k() {{ f(); }}\n"
    common = "// About the header.\n#pragma once\n#include <cuda_fp16.h>\n\nint f();\nint g();\n"
    headers, code = device_code(source(text, common=common), ["k"])
    assert headers == ("<cuda_fp16.h>", '"cub/cub.cuh"')
    assert code == "int f();\n\n// Of k.\n__global__ void k() { f(); }\n"


def test_an_include_is_read_as_often_as_a_compiler_would() -> None:
    once = expand(
        source('#include "a.h"\n#include "b.h"\n', a='#pragma once\nint a;\n#include "b.h"', b="#pragma once\nint b;")
    )
    assert once.split() == ["int", "a;", "int", "b;"]
    twice = expand(source('#include "a.h"\n#include "a.h"\n', a="X(1)"))
    assert twice.split() == ["X(1)", "X(1)"]
    guarded = expand(source('#include "a.h"\n#include "a.h"\n', a="// A\n#ifndef A_H\n#define A_H\nint a;\n#endif"))
    assert guarded.count("int a;") == 1
    with pytest.raises(UsageError, match="a.h includes itself"):
        expand(source('#include "a.h"', a='#include "b.h"', b='#include "a.h"'))


def test_nothing_is_lost_between_the_parts() -> None:
    text = expand(load_source(kernel_folder() / "attention_backward.cu", (kernel_folder(),)))
    joined = "".join(part.text for part in split(text))
    code = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("//")]
    assert all(line in joined for line in code)


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings, and with it NVRTC, is not installed"
)
@pytest.mark.parametrize("name, kernel", [("fused_residual_forward", "fused_residual_forward6<__half, true, 2>")])
def test_what_stays_compiles_to_the_same_code(name: str, kernel: str) -> None:
    from kbench.device.cuda.compile import compile_ptx

    whole = load_source(kernel_folder() / f"{name}.cu", (kernel_folder(),))
    headers, code = device_code(whole, [kernel])
    alone = Source(whole.path, "".join(f"#include {header}\n" for header in headers) + code, ())
    assert len(code) < 0.7 * len(expand(whole))
    texts = [compile_ptx(each, [kernel], "sm_90").text for each in (whole, alone)]
    instructions = [
        [line.split("//")[0].strip() for line in text.splitlines() if not line.strip().startswith(".")]
        for text in texts
    ]
    assert [line for line in instructions[0] if line] == [line for line in instructions[1] if line]
