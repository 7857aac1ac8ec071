"""`kbench inspect`: what it prints and says in JSON, for kernels of known properties, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.inspect.counts import KernelCounts, Place, Tally

has_nvrtc = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason="cuda-bindings, and with it NVRTC, is not installed")

SOURCE = """
extern __shared__ float scratch[];
__global__ void stage(float* y, const float4* x, int n) {
    __shared__ float tile[256];
    tile[threadIdx.x % 256] = x[blockIdx.x].w;
    __syncthreads();
    scratch[threadIdx.x] = tile[(threadIdx.x + 1) % 256];
    atomicAdd(y, scratch[threadIdx.x] * n);
}
template <int kBlock>
__global__ void __launch_bounds__(kBlock) sized(float* y) { y[kBlock * blockIdx.x + threadIdx.x] = kBlock; }
__global__ void clear(float* y) { y[threadIdx.x] = 0.f; }
"""
CONTRACT = """
from kbench.family import CheckShape, Family, Fill, Launch, Ref, Rule, Tensor, Version, normal

def plan(problem, block, props):
    n = problem["N"]
    return (
        Launch("clear", [1], [32], ["y"]),
        Launch("stage", (n // 4,), (block,), ("y", "x", n), 4 * block),
        Launch(f"sized<{block}>", (props.multiprocessors,), (block,), ("y",)),
        Fill(Ref("y")),
    )

toy = Family(
    name="toy", summary="stages", sizes={"N": "how many"}, dtypes=("fp32",),
    presets={"default": {"N": 4096}, "small": {"N": 8}}, check_shapes=(CheckShape({"N": 4}, "tiny"),),
    tensors=lambda problem: (
        Tensor("x", (problem["N"],), "fp32", "in", draw=normal(0, 1)),
        Tensor("y", (problem["N"],), "fp32", "out"),
    ),
    reference=lambda problem, inputs, error, xp: {},
    versions=(
        Version(1, "in a [shared] tile", plan, ("fp32",), block_sizes=(64, 256), rules=(
            Rule("N divisible by 4", lambda p: p["N"] % 4 == 0),)),
        Version(2, "nothing of its own", lambda problem, block, props: (Fill(Ref("y")),), ("fp32",), fixed=32),
        Version(3, "a kernel that is missing", lambda problem, block, props: (
            Launch("stagee", (1,), (block,), ("y",)),), ("fp32",), fixed=32),
        Version(4, "a plan that fails", lambda problem, block, props: problem["M"], ("fp32",), fixed=32),
        Version(5, "for one GPU", lambda problem, block, props: (
            Launch("clear", (1,), (block,), ("y",)),), ("fp32",), fixed=32, arch="sm_90a"),
    ),
)
"""


@pytest.fixture
def inspect(tmp_path: Path) -> Any:
    """A function that inspects the toy family with further words."""
    (tmp_path / "toy.cu").write_text(SOURCE)
    (tmp_path / "toy.py").write_text(CONTRACT)
    return lambda *words: run_command(["inspect", *words, "--family-dir", str(tmp_path)])


@needs_nvrtc
def test_kernels_and_their_numbers(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy:1", "--arch", "sm_80", "--json") == Exit.OK
    (found,) = json.loads(capsys.readouterr().out)["inspections"]
    assert (found["arch"], found["card"]) == ("sm_80", {"name": "A100", "multiprocessors": 108})
    assert re.fullmatch(r"NVRTC \d+\.\d+", found["compiler"]) and found["other_steps"] == {"Fill": 1}
    kernels = {(kernel["kernel"], kernel["block"]): kernel for kernel in found["kernels"]}
    assert list(kernels) == [
        ("clear", 64), ("clear", 256), ("stage", 64), ("stage", 256), ("sized<64>", 64), ("sized<256>", 256),
    ]  # fmt: skip
    stage = kernels["stage", 256]
    assert (stage["threads"], stage["grid"], stage["static_shared"]) == ([256], [1024], 1024)
    assert (stage["dynamic_shared"], stage["spill_bytes"], stage["stack_bytes"]) == (1024, 0, 0)
    assert (stage["blocks_per_multiprocessor"], stage["occupancy"]) == (8, 1.0) and "threads" in stage["limiters"]
    assert stage["waves"] == pytest.approx(1024 / (8 * 108)) and 0 < stage["registers"] <= 32
    # 164 KiB for eight blocks: 20.5 KiB each, one of them the system's, in lots of 128 bytes.
    (shared,) = (cliff for cliff in stage["cliffs"] if cliff["resource"] == "shared memory")
    assert (shared["change"], shared["blocks_per_multiprocessor"]) == (20_992 - 1024 + 1 - 2048, 7)
    assert kernels["sized<64>", 64]["grid"] == [108] and kernels["sized<64>", 64]["max_threads"] == 64
    assert kernels["clear", 64]["threads"] == [32] and kernels["clear", 64]["limiters"] == ["blocks"]
    mix = found["instructions"]["stage"]
    assert mix["block barriers"] == 1 and mix["shared loads, 32 bits"] >= 1
    assert {name for name in mix if name.startswith("global")} == {"global loads, 32 bits", "global atomics"}


@needs_nvrtc
def test_the_report_fits_80_columns_and_says_what_there_is(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy", "--versions", "1,2") == Exit.OK
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    for words in ("in a [shared] tile", "sm_90, NVRTC", "H100 SXM: 132 multiprocessors", "sized<...>", "sized<256>"):
        assert words in out
    assert re.search(r"^ +64\.\.256 +32 +1 ", out, re.MULTILINE)  # clear: launched alike at both block sizes
    assert "no spills, no stack" in out and "dynamic" in out and re.search(r"block barriers +1\b", out)
    assert "1 x fill (not inspected)" in out and "no kernel to inspect" in out


@needs_nvrtc
def test_ptx_is_what_the_compiler_made(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # compiled, then from the cache
        assert inspect("toy:1", "--block-sizes", "64", "--ptx", "--arch", "sm_86") == Exit.OK
        out = capsys.readouterr().out
        assert out.startswith("// toy version 1, N=4096, fp32\n") and ".target sm_86" in out
        assert out.count(".entry") == 3 and "kbench_signature" not in out
    assert inspect("toy:1", "--block-sizes", "64", "--ptx", "--json") == Exit.OK
    assert json.loads(capsys.readouterr().out)["inspections"][0]["ptx"].count(".entry") == 3


@needs_nvrtc
def test_block_sizes_that_are_refused_stand_beside_others(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy:1", "--block-sizes", "64,96") == Exit.OK
    assert "refused  block size 96 is not supported" in capsys.readouterr().out


@needs_nvrtc
def test_a_version_for_one_architecture_is_compiled_for_it(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--arch", "sm_90"), ("--arch", "sm_90a")):
        assert inspect("toy:5", "--json", *words) == Exit.OK
        assert json.loads(capsys.readouterr().out)["inspections"][0]["arch"] == "sm_90a"
    assert inspect("toy:5", "--arch", "sm_80") == Exit.USAGE
    assert "compiled for sm_90a only, not for sm_80" in capsys.readouterr().err


BAD = [
    ("nosuch", "unknown family 'nosuch'"),
    ("toy:9", "no version 9"),
    ("toy:1 --arch sm_77", "known here: sm_80"),
    ("toy:1 --arch hopper", "'hopper'"),
    ("toy:1 --block-sizes 96", "block size 96 is not supported"),
    ("toy:1 --block-sizes 2048", "2048"),
    ("toy:1 --size N=7", "needs N divisible by 4"),
    ("toy:1 --size M=8", "no size 'M'"),
    ("toy:1 --dtype fp64", "'fp64'"),
    ("toy:1 --preset huge", "'huge'"),
    ("toy:4", "the plan of toy version 4 fails"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_line(inspect: Any, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(*words.split()) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


@needs_nvrtc
def test_a_kernel_that_is_missing_is_named(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy:3") == Exit.USAGE
    assert "no kernel `stagee`" in capsys.readouterr().err


def test_without_nvrtc_it_says_how_to_get_it(
    inspect: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert inspect("toy:1") == Exit.CANNOT
    captured = capsys.readouterr()
    assert captured.out == "" and "cuda-bindings is missing" in captured.err and "pip install" in captured.err
    assert inspect("toy:2") == Exit.OK  # steps of libraries need no compiler


def test_totals_tell_loads_and_stores_from_atomics_and_shared_memory_from_barriers() -> None:
    def place(kind: str, tensor: str) -> Place:
        return Place("k.cu", 1, "", kind, tensor, 4)

    places = {
        place("load", "inp"): Tally(1, 32, 128, 128, 4),
        place("store", "out"): Tally(2, 64, 256, 200, 16),
        place("atomic", "sum"): Tally(3, 7, 28, 4, 3),
        place("load", ""): Tally(4, 128, 512, 512, 0, 8, 4),
        place("atomic", ""): Tally(5, 11, 44, 44, 0, 5, 1),
        place("barrier", ""): Tally(6),
    }
    totals = KernelCounts("k", 1, 2, 2, places).totals
    assert (totals["global_accesses"], totals["global_bytes"], totals["global_sectors"]) == (3, 384, 20)
    assert totals["efficiency"] == pytest.approx(328 / 640)
    assert (totals["shared_accesses"], totals["shared_bytes"]) == (9, 556)
    assert (totals["shared_wavefronts"], totals["shared_ideal"]) == (13, 5)
    assert (totals["barriers"], totals["atomics"], totals["atomic_sectors"]) == (6, 18, 3)
