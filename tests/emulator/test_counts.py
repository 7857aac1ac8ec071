"""Counting accesses on the emulator, against kernels whose sectors, wavefronts and barriers are known by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.cli.app import run_command
from kbench.device.emulator.compiler import find_compiler
from kbench.device.emulator.counter import CountingDevice, LaunchCounts, PlaceCounts
from kbench.errors import CannotRunError, Exit, KernelFault, UsageError
from kbench.family import Launch, Problem, Tensor, normal
from kbench.inspect import counts as counting
from kbench.inspect.counts import Counts, Tally, count, kernel_counts
from kbench.source import load_source

pytestmark = pytest.mark.emulator

HERE = Path(__file__).parent / "kernels"
SOURCE = load_source(HERE / "counts.cu", (kernel_folder(),))
KERNELS = (
    "copy", "strided", "packets", "structures", "column<32>", "column<33>", "wide_rows", "bytes_in_words", "atomics",
    "barriers", "triangle", "checkered", "calls", "rows_of_8", "long_way", "beyond",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _gcc() -> None:
    try:
        compiler = find_compiler()
    except CannotRunError as error:
        pytest.skip(str(error))
    if compiler.kind != "gcc":
        pytest.skip(f"accesses are counted with g++ only, and this is {compiler}")


def launch(kernel: str, grid: Any, block: Any, *numbers: int, shared: int = 0, **device: Any) -> LaunchCounts:
    """One launch with tensors y and x of 8192 floats, and then integers."""
    machine = CountingDevice(**device)
    try:
        tensors = [Tensor(name, (8192,), "fp32", "inout", draw=normal(0, 1)) for name in "yx"]
        prepared = machine.prepare(
            [Launch(kernel, grid, block, ("y", "x", *numbers), shared)], machine.build(SOURCE, KERNELS), tensors
        )
        buffers = {tensor.name: machine.alloc(tensor) for tensor in tensors}
        for buffer in buffers.values():
            buffer.array[...] = 1
        machine.enqueue(machine.bind(prepared, buffers))
        return machine.launches[-1]
    finally:
        machine.close()


def only(found: LaunchCounts, kind: str, tensor: str) -> PlaceCounts:
    (place,) = (place for place in found.places if (place.kind, place.tensor) == (kind, tensor))
    return place


def test_a_coalesced_copy_takes_four_sectors_an_access() -> None:
    found = launch("copy", (2,), (256,))
    assert (found.blocks, found.counted) == (2, 2) and len(found.places) == 2
    for place in (only(found, "load", "x"), only(found, "store", "y")):
        # 16 warps; each asks for 128 bytes in one piece.
        assert (place.accesses, place.lanes, place.bytes, place.used, place.sectors) == (16, 512, 2048, 2048, 64)
        assert (place.size, place.wavefronts, place.ideal) == (4, 0, 0)


@pytest.mark.parametrize(
    ("load", "store", "shift", "loaded", "used", "stored"),
    [
        (2, 1, 0, 8, 128, 4),  # every other word: twice the sectors
        (32, 1, 0, 32, 128, 4),  # a sector for each lane
        (0, 1, 0, 1, 4, 4),  # all lanes one word
        (1, 1, 1, 4, 128, 5),  # begins in the middle of a sector
        (1, 8, 0, 4, 128, 32),
    ],
)
def test_sectors_follow_the_stride(load: int, store: int, shift: int, loaded: int, used: int, stored: int) -> None:
    found = launch("strided", (2,), (64,), load, store, shift)
    read, written = only(found, "load", "x"), only(found, "store", "y")
    assert (read.accesses, read.sectors, read.used) == (4, 4 * loaded, 4 * used)
    assert (written.accesses, written.sectors) == (4, 4 * stored)


def test_a_packet_is_one_access_of_16_bytes_at_the_line_that_asks_for_it() -> None:
    found = launch("packets", (1,), (64,))
    for place in (only(found, "load", "x"), only(found, "store", "y")):
        assert (place.size, place.accesses, place.sectors, place.used) == (16, 2, 32, 1024)
    read = counting._place(only(found, "load", "x"), SOURCE)
    written = counting._place(only(found, "store", "y"), SOURCE)
    assert (read.file, read.line) == ("counts.cu", line_of("load_packet(x"))
    assert (written.file, written.line) == ("counts.cu", line_of("store_packet(y"))
    assert read.helper.startswith("common.cuh:") and written.helper.startswith("common.cuh:")


def test_structures_move_whole_or_in_words() -> None:
    loads = [place for place in launch("structures", (1,), (32,)).places if place.kind == "load"]
    pair, *_ = (place for place in loads if place.size == 8)
    assert (pair.accesses, pair.sectors, pair.used) == (1, 8, 256)
    threes = [place for place in loads if place.size == 4]  # 12 bytes are three words, each on 12 sectors
    assert sum(place.accesses for place in threes) == 3 and sum(place.sectors for place in threes) == 36


@pytest.mark.parametrize(("kernel", "ways"), [("column<32>", 32), ("column<33>", 1)])
def test_a_column_of_shared_memory_conflicts_unless_it_is_padded(kernel: str, ways: int) -> None:
    found = launch(kernel, (1,), (64,))
    read, written = only(found, "load", ""), only(found, "store", "")
    assert (written.accesses, written.wavefronts, written.ideal) == (32, 32, 32)
    assert (read.accesses, read.wavefronts, read.ideal, read.sectors) == (2, 2 * ways, 2, 0)


@pytest.mark.parametrize(
    ("step", "turns", "ideal"),
    [
        (1, 4, 4),  # 16 bytes a lane: a quarter of the warp at once
        (2, 8, 4),  # every other quad: eight lanes on 16 banks twice
        (0, 2, 2),  # all lanes one quad: neighbours agree, half of the warp at once
    ],
)
def test_wide_accesses_of_shared_memory_go_by_quarters(step: int, turns: int, ideal: int) -> None:
    read = only(launch("wide_rows", (1,), (32,), step, shared=512), "load", "")
    assert (read.size, read.wavefronts, read.ideal) == (16, turns, ideal)


def test_two_lanes_in_one_word_do_not_conflict() -> None:
    found = launch("bytes_in_words", (1,), (64,))
    for kind in ("load", "store"):
        place = only(found, kind, "")
        assert (place.size, place.accesses, place.wavefronts, place.ideal) == (2, 2, 2, 2)


def test_an_atomic_operation_is_one_access() -> None:
    found = launch("atomics", (2,), (64,))
    together, apart = (place for place in found.places if place.kind == "atomic" and place.tensor == "y")
    assert (together.accesses, together.lanes, together.sectors) == (4, 128, 4)
    assert (apart.accesses, apart.lanes, apart.sectors) == (4, 128, 16)
    assert only(found, "atomic", "").lanes == 128
    assert {place.kind for place in found.places if place.tensor == "y"} == {"atomic"}


def test_barriers_are_counted_by_block_and_found_in_helpers() -> None:
    found = launch("barriers", (4,), (64,))
    places = [(counting._place(place, SOURCE), place) for place in found.places if place.kind == "barrier"]
    by_line: dict[int, int] = {}
    for place, counts in places:
        by_line[place.line] = by_line.get(place.line, 0) + counts.accesses
    loop = line_of("__syncthreads();", 3)
    assert by_line.pop(loop) == 4 * 3
    assert list(by_line.values()) == [4 * 2]  # block_sum's two, at the line of the kernel that calls it
    assert all(place.helper.startswith("common.cuh:") for place, _ in places if place.line != loop)


def test_lanes_that_leave_a_loop_early_do_not_shift_the_others() -> None:
    read = only(launch("triangle", (1,), (32,)), "load", "x")
    assert (read.accesses, read.lanes) == (31, 31 * 32 // 2)
    # Turn i is of lanes i + 1 to 31: the sectors from that lane's to the last.
    assert read.sectors == sum(4 - (i + 1) // 8 for i in range(31))


def test_lanes_of_different_turns_are_not_taken_for_one_access() -> None:
    read = only(launch("checkered", (1,), (32,)), "load", "x")
    assert (read.accesses, read.lanes, read.sectors) == (4, 64, 16)


def test_a_function_that_is_called_counts_at_its_own_line_by_call() -> None:
    found = [place for place in launch("calls", (1,), (32,)).places if place.kind == "load"]
    assert [(place.accesses, place.lanes, place.sectors) for place in found] == [(1, 32, 4), (1, 16, 1)]
    assert {counting._place(place, SOURCE).line for place in found} == {line_of("return x[i];")}


def test_warps_of_two_dimensional_blocks_and_partial_ones() -> None:
    read = only(launch("rows_of_8", (1,), (8, 8)), "load", "x")
    assert (read.accesses, read.sectors) == (2, 8)  # four rows of 32 bytes each
    read = only(launch("copy", (1,), (40,)), "load", "x")
    assert (read.accesses, read.lanes, read.sectors) == (2, 40, 5)


def test_some_blocks_stand_for_a_large_grid() -> None:
    found = launch("copy", (100,), (32,), blocks=8)
    assert (found.blocks, found.counted) == (100, 8)
    assert only(found, "load", "x").accesses == 8
    firsts = launch("strided", (256,), (32,), 1, 0, 0, blocks=1)
    assert firsts.counted == 1


def test_threads_that_run_on_for_too_long_are_an_error_not_a_wrong_count() -> None:
    with pytest.raises(CannotRunError, match="long_way: its threads run on for too long.*choose smaller sizes"):
        launch("long_way", (1,), (32,), 1000, events=10_000)
    assert only(launch("long_way", (1,), (32,), 10), "load", "x").accesses == 10


def test_a_kernel_that_is_stopped_is_a_fault_and_the_next_is_counted_right() -> None:
    with pytest.raises(KernelFault, match="tensor x: element 8192"):
        launch("beyond", (1,), (32,), 8192)
    assert only(launch("copy", (1,), (32,)), "load", "x").sectors == 4


def test_two_runs_count_the_same() -> None:
    assert launch("atomics", (4,), (64,)) == launch("atomics", (4,), (64,))


def line_of(text: str, nth: int = 1) -> int:
    """The number of the nth line of counts.cu that holds `text`."""
    return [i for i, line in enumerate(SOURCE.text.splitlines(), 1) if text in line][nth - 1]


# ---------------------------------------------------------------------------------------------- versions of families


def test_totals_of_a_version_are_plain_data_and_repeat() -> None:
    catalog = load_catalog()
    problem = Problem({"N": 65536 * 2}, "bf16")
    found = kernel_counts(catalog, "gelu_forward", 2, problem, 256)
    ((name, totals),) = found["kernels"].items()
    assert name.startswith("gelu_forward2<") and "g++" in found["compiler"]
    sectors = 2 * problem["N"] // 16  # of two bytes an element: read once, written once
    assert (totals["global_sectors"], totals["global_bytes"], totals["efficiency"]) == (sectors, 32 * sectors, 1.0)
    assert (totals["shared_wavefronts"], totals["barriers"], totals["atomics"], totals["scaled"]) == (0, 0, 0, False)
    assert json.loads(json.dumps(found)) == found == kernel_counts(catalog, "gelu_forward", 2, problem, 256)


def test_counts_of_a_sample_are_scaled_and_say_so() -> None:
    problem = Problem({"N": 65536 * 2}, "bf16")
    whole = count(load_catalog(), "gelu_forward", 2, problem, 256)
    part = count(load_catalog(), "gelu_forward", 2, problem, 256, blocks=7)
    assert part.kernels[0].totals == {**whole.kernels[0].totals, "counted_blocks": 7, "scaled": True}
    assert Counts.from_dict(json.loads(json.dumps(part.to_dict()))).to_dict() == part.to_dict()


def test_what_is_counted_is_of_the_parameters_that_are_chosen() -> None:
    problem = Problem({"N": 4096}, "bf16")
    for params, packets in (({"PACKETS": 4}, 4), ({}, 2)):
        found = count(load_catalog(), "residual_forward", 2, problem, 64, params=params)
        assert found.kernels[0].kernel == f"residual_forward2<__nv_bfloat16, {packets}>"
        assert found.kernels[0].blocks == problem["N"] // (8 * 64 * packets) and found.params == {"PACKETS": packets}
        assert Counts.from_dict(json.loads(json.dumps(found.to_dict()))).params == found.params


def test_what_cannot_be_counted_says_why() -> None:
    catalog = load_catalog()
    small = catalog["attention_backward"].presets["small"]
    with pytest.raises(CannotRunError, match="the emulator cannot run it: it is cuDNN"):
        count(catalog, "attention_backward", 10, Problem(small, "bf16"), 128)
    with pytest.raises(UsageError, match="block size 100 is not supported"):
        count(catalog, "gelu_forward", 1, Problem({"N": 64}, "fp32"), 100)
    with pytest.raises(CannotRunError, match="GiB are free; choose smaller sizes"):
        count(catalog, "gelu_forward", 1, Problem({"N": 10**13}, "fp32"), 256)
    with pytest.raises(CannotRunError, match=r"takes longer than 0.01 s here; choose smaller sizes"):
        count(catalog, "softmax_forward", 1, Problem({"N": 2048, "C": 1027}, "fp32"), 256, time_limit=0.01)


def test_scaling_rounds_to_whole_numbers() -> None:
    assert Tally(3, 10, 0, 1, 5, 2, 1).scaled(7, 2) == Tally(11, 35, 0, 4, 18, 7, 4)
    assert Tally().efficiency is None and Tally().conflicts is None


TOY = """
#include "common.cuh"
__global__ void twice(float* y, const float* x, int n) {
    __shared__ float tile[64][32];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x % 64][0] = x[i % n];
    __syncthreads();
    y[i % n] = 2 * tile[threadIdx.x % 64][0]; // a comment that goes on for so long that no table of 80 columns holds it
}
"""
CONTRACT = """
from kbench.family import CheckShape, Family, Fill, Launch, Ref, Tensor, Version, normal
toy = Family(
    name="toy", summary="doubles", sizes={"N": "how many"}, dtypes=("fp32",),
    presets={"default": {"N": 4096}, "small": {"N": 256}}, check_shapes=(CheckShape({"N": 64}, "tiny"),),
    tensors=lambda problem: (
        Tensor("x", (problem["N"],), "fp32", "in", draw=normal(0, 1)),
        Tensor("y", (problem["N"],), "fp32", "out"),
    ),
    reference=lambda problem, inputs, error, xp: {},
    versions=(
        Version(1, "by tiles", lambda problem, block, props: (
            Launch("twice", (problem["N"] // block,), (block,), ("y", "x", problem["N"])), Fill(Ref("y"))),
            ("fp32",), block_sizes=(64, 128)),
        Version(2, "a library", lambda problem, block, props: (Fill(Ref("y")),), ("fp32",), fixed=32),
        Version(3, "tensor cores", lambda problem, block, props: (Fill(Ref("y")),), ("fp32",), fixed=32,
            gpu_only="it needs wgmma"),
    ),
)
"""


@pytest.fixture
def inspect(tmp_path: Path) -> Callable[..., int]:
    (tmp_path / "toy.cu").write_text(TOY)
    (tmp_path / "toy.py").write_text(CONTRACT)
    return lambda *words: run_command(["inspect", *words, "--counts", "--family-dir", str(tmp_path)])


def test_the_table_names_the_lines_in_80_columns(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy:1", "--block-size", "64") == Exit.OK
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "twice, 4 blocks\n" in out and "1 x Fill (not counted)" in out
    assert "global: 2 KiB asked for, 64 sectors, 100% of their bytes used" in out
    assert "shared: 2 KiB, 512 wavefronts, 32.00x the least" in out and "4 block barriers" in out
    assert re.search(r"^ +6 +32 +4\.0 +100% +256 +32\.0 +tile\[threadIdx", out, re.MULTILINE)
    assert re.search(r"^ +7 +4 +__syncthreads\(\);$", out, re.MULTILINE)
    assert re.search(r"^ +8 +32 .*\.\.\.$", out, re.MULTILINE)


def test_json_holds_all_places_and_debug_shows_them(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy", "--block-size", "64,128", "--version", "1", "--json") == Exit.OK
    found = json.loads(capsys.readouterr().out)["counts"]
    assert [each["block"] for each in found] == [64, 128]
    (kernel,) = found[0]["kernels"]
    assert {(p["line"], p["kind"], p["tensor"]) for p in kernel["places"]} == {
        (6, "load", "x"), (6, "store", ""), (7, "barrier", ""), (8, "load", ""), (8, "store", "y")
    }  # fmt: skip
    assert inspect("toy:1", "--debug") == Exit.OK
    assert "4 B load of x, 32 lanes" in capsys.readouterr().out


def test_versions_that_only_a_gpu_runs(inspect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("toy:3") == Exit.CANNOT
    assert "toy version 3 cannot be counted: the emulator cannot run it: it needs wgmma" in capsys.readouterr().err
    assert inspect("toy:2,3") == Exit.OK
    captured = capsys.readouterr()
    assert "left out: toy version 3" in captured.err and "no kernel to count" in captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("toy:1 --block-size 96", "block size 96 is not supported"),
        ("toy:1 --arch sm_90", "--arch says nothing with --counts"),
        ("toy:1 --ptx", "--ptx and --counts are two different reports"),
        ("toy:1 --line-info", "--line-info belongs to --sass"),
        ("toy:9", "no version 9"),
    ],
)
def test_bad_input(inspect: Any, words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(*words.split()) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_another_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.device.emulator import build

    class Clang:
        kind, version, command, options = "clang", "clang 14", ("clang++",), ()

        def __str__(self) -> str:
            return "clang++"

    monkeypatch.setattr(build, "build_runtime", lambda: Path("runtime.so"))
    monkeypatch.setattr(build, "find_compiler", Clang)
    with pytest.raises(CannotRunError, match=r"in code of g\+\+ only"):
        build.build_kernels(SOURCE, ["copy"], counts=True)


def test_without_addr2line_totals_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kbench.device.emulator import symbols

    monkeypatch.setattr(symbols, "_tool", lambda: "")
    found = count(load_catalog(), "gelu_forward", 2, Problem({"N": 4096}, "bf16"), 256)
    assert not found.lines_known and found.kernels[0].totals["global_sectors"] == 512
