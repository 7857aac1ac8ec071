"""`kbench sweep --counts`: what kernels ask of memory as rows, and what becomes of kernels that do not end well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kbench.cli.app import run_command
from kbench.device.emulator import build
from kbench.device.emulator.compiler import Compiler, find_compiler
from kbench.errors import CannotRunError, Exit
from kbench.results.schema import Row
from kbench.results.store import latest_run, read_run
from toys import Sweep, plant_toy, sweeper

pytestmark = pytest.mark.emulator

SOURCE = """
__global__ void copy(float* y, const float* x, int stride) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i * stride % 8192];
}
__global__ void column(float* y, const float* x) {
    __shared__ float tile[32][32];
    tile[threadIdx.x][blockIdx.x % 32] = x[threadIdx.x];
    __syncthreads();
    atomicAdd(y, tile[threadIdx.x][0]);
}
__global__ void wild(float* y) { ((volatile float*) 16)[threadIdx.x] = 1.f; y[0] = 1.f; }
__global__ void stops(float* y) { y[0] = 1.f; __trap(); }
"""
FUNCTIONS = """
def one(*args, steps=()):
    return lambda problem, block, props: (Launch(args[0], (2,), (block,), args[1:]), *steps)
"""
VERSIONS = """
Version(1, "coalesced", one("copy", "y", "x", 1), ("fp32",), block_sizes=(64, 256)),
Version(2, "every other word", one("copy", "y", "x", 2), ("fp32",), block_sizes=(64, 256)),
Version(3, "a column of a tile", one("column", "y", "x"), ("fp32",), fixed=32),
Version(4, "writes where nothing is", one("wild", "y"), ("fp32",), fixed=32),
Version(5, "stops", one("stops", "y"), ("fp32",), fixed=32),
Version(6, "only on a GPU", one("copy", "y", "x", 1), ("fp32",), fixed=32, gpu_only="it says so"),
Version(7, "nothing of its own", lambda p, b, props: (Fill(Ref("y")),), ("fp32",), fixed=32),
"""


@pytest.fixture(scope="module", autouse=True)
def _gcc() -> None:
    try:
        compiler = find_compiler()
    except CannotRunError as error:
        pytest.skip(str(error))
    if compiler.kind != "gcc":
        pytest.skip(f"accesses are counted with g++ only, and this is {compiler}")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant_toy(tmp_path_factory.mktemp("families"), SOURCE, FUNCTIONS, VERSIONS, default=1 << 40, small=8192)


@pytest.fixture
def sweep(families: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sweep:
    monkeypatch.chdir(tmp_path)
    return sweeper(families, capsys)


def rows() -> list[Row]:
    return read_run(latest_run(Path("results"))).rows


def test_counts_are_those_that_are_known_by_hand(sweep: Sweep) -> None:
    status, out, _ = sweep("toy:1-3 --counts --save counts")
    one, two, three = rows()
    assert status == Exit.OK and {row.outcome for row in rows()} == {"counted"}
    assert (one.device, one.cache_mode, one.block, one.sizes) == ("emulator", "counts", 256, {"N": 8192})
    # Two blocks of 256: 16 warps load and store 128 bytes each, in four sectors.
    assert one.metrics["copy"]["global_sectors"] == 2 * 16 * 4 and one.metrics["copy"]["global_unused"] == 0
    assert two.metrics["copy"]["global_sectors"] == 16 * 4 + 16 * 8 and two.metrics["copy"]["global_unused"] == 16 * 128
    column = three.metrics["column"]
    assert (column["barriers"], column["atomics"]) == (2, 64)
    # Stores and loads of a warp in one bank: 32 turns each in place of one.
    assert (column["shared_wavefronts"], column["shared_conflicts"]) == (2 * 2 * 32, 2 * 2 * 31)
    assert "counted, not judged" in out and " pass " not in out and "seed" not in out
    assert all(len(line) <= 80 for line in out.splitlines() if ":  " not in line)
    facts = {entry["version"]: entry["facts"] for entry in json.loads(sweep("toy:1-3 --counts --json")[1])["rows"]}
    assert (facts[1]["used"], facts[2]["used"], facts[3]["conflicts"]) == (1.0, pytest.approx(2 / 3), 32.0)
    again = Path("results/baselines/counts.jsonl.gz").read_bytes()
    assert sweep("toy:1-3 --counts --save counts")[0] == Exit.OK
    assert Path("results/baselines/counts.jsonl.gz").read_bytes() == again, "the same counts: the same file"
    assert run_command(["report", "counts", "latest", "--results", "results"]) == Exit.OK
    assert "workers" not in read_run(latest_run(Path("results"))).header["device"]


def test_a_kernel_that_ends_badly_costs_its_own_row(sweep: Sweep) -> None:
    status, out, _ = sweep("toy --counts --time-limit 9")
    found = {row.version: row for row in rows()}
    assert status == Exit.CRASHED
    assert {number: row.status for number, row in found.items()} == {
        1: "pass", 2: "pass", 3: "pass", 4: "crashed", 5: "crashed", 6: "skipped", 7: "skipped",
    }  # fmt: skip
    assert "address 0x10" in found[4].reason and not found[4].metrics and "trap" in found[5].reason
    assert "it says so" in found[6].reason and "crashed" in out
    assert "kbench inspect toy --version 4" in found[4].reproduce and "--counts" in found[4].reproduce


def test_another_compiler_cannot_count(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: Compiler(("clang++",), "clang", "clang 19"))
    status, _, err = sweep("toy --counts")
    assert status == Exit.CANNOT and "g++ only" in err and err.count("\n") == 1
    assert not Path("results/runs").exists()
