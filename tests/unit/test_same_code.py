"""Plans that are the same work, and plans that only look alike: real machine code, compiled here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kbench.device.cuda.same_code import code_hash, same_code
from kbench.family import AllReduce, Fill, Launch, Ref
from kbench.source import Source

has_nvrtc = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
pytestmark = pytest.mark.skipif(not has_nvrtc, reason="cuda-bindings, and with it NVRTC, is not installed")

SOURCE = """
__constant__ float table[2] = {1.f, 2.f};
__global__ void scale(float* y, const float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.5f * x[i] / table[n & 1];
}
"""
STEP = Launch("scale", (4,), (128,), ("y", "x", 512))


@cache
def compiled(text: str, kernel: str = "scale", path: str = "one.cu") -> Any:
    from kbench.device.cuda.compile import compile_cubin

    return compile_cubin(Source(Path(path), text, ()), [kernel], "sm_90")


def same(text: str, step: Launch = STEP) -> bool:
    one, two = ((STEP,), compiled(SOURCE)), ((step,), compiled(text, step.kernel, "two.cu"))
    alike = same_code(*one, *two)
    assert (code_hash(*one) == code_hash(*two)) == alike and len(code_hash(*one)) == 64
    return alike


def test_names_comments_layout_and_paths_do_not_count() -> None:
    assert same(SOURCE)
    renamed = "// another text\n\n\n" + SOURCE.replace("scale", "multiply").replace("int i", "int index").replace(
        "i < n", "index < n"
    ).replace("[i]", "[index]")
    assert same(renamed, replace(STEP, kernel="multiply"))


@pytest.mark.parametrize(
    ("before", "after"),
    [("2.5f *", "2.25f *"), ("{1.f, 2.f}", "{1.f, 4.f}"), ("i < n", "i <= n - 1 && i != 7"), ("x[i] /", "x[i] *")],
)
def test_another_instruction_or_constant_is_other_code(before: str, after: str) -> None:
    assert not same(SOURCE.replace(before, after))


@pytest.mark.parametrize(
    "change", [{"grid": (5,)}, {"block": (64,)}, {"shared": 16}, {"args": ("y", "x", 511)}, {"args": ("x", "y", 512)}]
)
def test_another_launch_is_other_work(change: dict[str, Any]) -> None:
    assert not same(SOURCE, replace(STEP, **change))


def test_lists_and_tuples_are_the_same_launch() -> None:
    assert same(SOURCE, replace(STEP, grid=[4], block=[128], args=["y", "x", 512]))  # type: ignore[arg-type]  # as families write


def test_steps_of_libraries_count() -> None:
    fill = Fill(Ref("y"))
    assert same_code((fill,), None, (fill,), None)
    assert code_hash((fill,), None) not in ("", code_hash((Fill(Ref("x")),), None))
    assert code_hash((STEP, AllReduce("y", "y", 4, 1)), compiled(SOURCE)) == "", "which code it runs is not known"
    assert not same_code((fill,), None, (Fill(Ref("x")),), None)
    assert not same_code((STEP,), compiled(SOURCE), (STEP, fill), compiled(SOURCE))
    assert not same_code((STEP,), compiled(SOURCE), (fill,), None)
