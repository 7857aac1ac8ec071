"""`kbench sweep --static`: rows that a compiler makes, for kernels of known properties; and what they never do."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fakes import make_row, measured
from kbench import compiled
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, Exit
from kbench.inspect.instructions import GROUPS
from kbench.results.best import load_best, merge
from kbench.results.facts import Card, facts_of
from kbench.results.schema import Row
from kbench.results.store import find_run, latest_run, read_run
from toys import Sweep, plant_toy, sweeper

has_nvrtc = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason="cuda-bindings, and with it NVRTC, is not installed")

SOURCE = """
extern __shared__ float scratch[];
__global__ void stage(float* y, const float* x, int n) {
    __shared__ float tile[256];
    tile[threadIdx.x % 256] = x[blockIdx.x];
    __syncthreads();
    scratch[threadIdx.x] = tile[(threadIdx.x + 1) % 256];
    atomicAdd(y, scratch[threadIdx.x] * n);
}
__global__ void clear(float* y) { y[threadIdx.x] = 0.f; }
__global__ void __launch_bounds__(1024, 2) spilling(float* y, const float* x, int n) {
    float kept[64];
    for (int i = 0; i < 64; i++) kept[i] = x[i * n + threadIdx.x];
    for (int j = 0; j < n; j++)
        for (int i = 0; i < 64; i++) kept[i] = kept[i] * kept[(i + 7) % 64] + x[j];
    for (int i = 0; i < 64; i++) y[i * n + threadIdx.x] = kept[i];
}
"""
FUNCTIONS = """
def one(name, *args, shared=0):
    return lambda problem, block, props: (Launch(name, (props.multiprocessors,), (block,), args, shared),)

def stage(problem, block, props):
    return (
        Launch("clear", [1], [32], ["y"]),
        Launch("stage", (64,), (block,), ("y", "x", 4), 4 * block),
        Fill(Ref("y")),
        Launch("clear", [1], [64], ["y"]),
    )
"""
VERSIONS = """
Version(1, "in a tile", stage, ("fp32",), block_sizes=(64, 256, 512)),
Version(2, "nothing of its own", lambda problem, block, props: (Fill(Ref("y")),), ("fp32",), fixed=32),
Version(3, "a kernel that is missing", one("stagee", "y"), ("fp32",), fixed=32),
Version(4, "a plan that fails", lambda problem, block, props: problem["M"], ("fp32",), fixed=32),
Version(5, "for one GPU", one("clear", "y"), ("fp32",), fixed=32, arch="sm_90a"),
Version(6, "too much shared memory", one("clear", "y", shared=120 << 10), ("fp32",), fixed=32),
Version(7, "an argument too many", one("clear", "y", 3), ("fp32",), fixed=32),
Version(8, "spills", one("spilling", "y", "x", 4), ("fp32",), fixed=1024),
Version(9, "never", one("clear", "y"), ("fp32",), fixed=32, rules=(Rule("N = 1", lambda p: p["N"] == 1),)),
"""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests: what is compiled once is in the cache."""
    return plant_toy(tmp_path_factory.mktemp("families"), SOURCE, FUNCTIONS, VERSIONS, dtypes=("fp32", "bf16"))


@pytest.fixture
def sweep(families: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sweep:
    monkeypatch.chdir(tmp_path)
    return sweeper(families, capsys)


def rows_of(sweep: Sweep, words: str) -> list[Row]:
    sweep(words)
    return read_run(latest_run(Path("results"))).rows


# ------------------------------------------------------------------------------------------- rows


@needs_nvrtc
def test_a_row_says_what_the_compiler_made_of_each_kernel(sweep: Sweep) -> None:
    (row,) = rows_of(sweep, "toy:1 --static")
    assert (row.device, row.cache_mode, row.status, row.measurement, row.verdict) == (
        "sm_90",
        "static",
        "pass",
        None,
        None,
    )
    assert row.block == 256 and row.sizes == {"N": 4096}, "the usual block size, the problem for a GPU"
    assert [kernel["name"] for kernel in row.kernels] == ["clear", "stage", "clear"] and row.steps["Fill"] == 1
    assert row.source and row.code and row.traffic
    assert row.reproduce.startswith("kbench inspect toy --version 1 --size N=4096 --block-sizes 256 --dtype fp32")
    assert set(row.metrics) == {"clear", "stage"}
    stage, clear = row.metrics["stage"], row.metrics["clear"]
    assert (stage["static_shared"], stage["dynamic_shared"], stage["spill_bytes"], stage["stack_bytes"]) == (
        1024,
        1024,
        0,
        0,
    )
    assert stage["occupancy"] == 64 and 0 < stage["registers"] <= 32
    assert clear["occupancy"] == 32, "of its two launches the one that fills less: 32 blocks of one warp"
    assert stage["instructions_exchange"] == 2, "a barrier and an atomic"
    assert clear["instructions_exchange"] == 0, "nothing of a kind is a number too: the first one is then a change"
    assert 0 < clear["instructions_memory"] < clear["instructions"] and len(GROUPS) == 4


@needs_nvrtc
def test_what_becomes_of_rows_that_do_not_compile_or_could_not_be_launched(sweep: Sweep) -> None:
    found = {row.version: row for row in rows_of(sweep, "toy --static")}
    outcomes = {number: row.status for number, row in found.items()}
    assert outcomes == {
        1: "pass", 2: "skipped", 3: "invalid", 4: "invalid", 5: "pass", 6: "pass", 7: "unlaunchable", 8: "pass",
        9: "refused",
    }  # fmt: skip
    assert "steps of libraries" in found[2].reason and "stagee" in found[3].reason and found[3].details
    assert "toy.py:" in found[4].reason and "KeyError" in found[4].reason
    assert "needs N = 1" in found[9].reason and not found[9].metrics
    assert "spilling spills" in found[8].reason and found[8].metrics["spilling"]["spill_bytes"] > 0
    small = {row.version: row for row in rows_of(sweep, "toy:1,5-6 --static --arch sm_86")}
    assert small[5].status == "skipped" and "sm_90a only" in small[5].reason
    assert small[6].status == "unlaunchable" and "122880 bytes" in small[6].reason and small[6].metrics
    assert small[1].status == "pass"


@needs_nvrtc
def test_exit_status_and_what_the_table_says(sweep: Sweep) -> None:
    status, out, err = sweep("toy --static")
    assert status == Exit.CRASHED, "one row could not be launched: before that it does not compile"
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("records", "tables", "    again")))
    assert "compiled for sm_90 by NVRTC" in out and "H100 SXM:\n  132 multiprocessors" in out
    assert "compiled, not run: nothing here is proven or timed" in out and "seed" not in out
    assert " pass " not in out and out.count(" compiled ") >= 4
    assert "version 8 at block size 1024: spilling spills" in out
    assert "winner" not in out and not Path("results/best.json").exists()
    (csv,) = Path("results/tables").glob("*/toy.csv")
    assert ",compiled," in csv.read_text() and ",pass," not in csv.read_text()
    assert sweep("toy:1 --static")[0] == Exit.OK
    status, _, err = sweep("toy:2,9 --static")
    assert status == Exit.NOTHING and "nothing was compiled: every row was refused or skipped" in err


@needs_nvrtc
def test_several_architectures_dtypes_and_block_sizes(sweep: Sweep) -> None:
    rows = rows_of(sweep, "toy:1 --static --arch sm_80,sm_90,sm_80 --dtype fp32,bf16 --block-sizes all")
    assert [(row.device, row.dtype, row.block, row.status) for row in rows] == [
        (arch, dtype, block, "pass" if dtype == "fp32" else "refused")
        for arch in ("sm_80", "sm_90")
        for dtype, blocks in (("fp32", (64, 256, 512)), ("bf16", (64,)))
        for block in (blocks if dtype == "fp32" else (64, 256, 512))
    ]
    header = read_run(latest_run(Path("results"))).header
    assert header["device"]["archs"] == ["sm_80", "sm_90"] and header["options"]["mode"] == "static"
    assert header["device"]["cards"]["sm_80"] == {"name": "A100", "multiprocessors": 108}
    assert header["device"]["compiler"].count(".") == 2, "to the build: numbers of another one are others"
    assert [row.block for row in rows_of(sweep, "toy:1 --static --block-sizes 64,512")] == [64, 512]


@needs_nvrtc
def test_facts_are_those_of_the_rows_own_architecture(sweep: Sweep) -> None:
    status, out, _ = sweep("toy:1 --static --arch sm_90,sm_86 --json")
    hopper, ampere = json.loads(out)["rows"]
    assert (status, hopper["facts"]["fit"], ampere["facts"]["fit"]) == (Exit.OK, 8, 6)
    assert facts_of(Row.from_dict(ampere), Card()).fit == 6
    assert facts_of(Row.from_dict({**ampere, "device": "sm_999"}), Card()).fit is None, "of a newer kbench"


@needs_nvrtc
def test_a_row_does_not_depend_on_what_else_is_compiled() -> None:
    """Kernels 8 and 9 share helpers: compiled together, both take other registers than alone."""
    from kbench.grammar import parse_targets
    from kbench.selection import Selection
    from kbench.sweep import Options

    def metrics(target: str) -> dict[int, Any]:
        with compiled.CompiledBench(Options(mode="static", archs=("sm_90",)), print) as bench:
            jobs = bench.jobs(Selection(parse_targets([target]), "sweep", dtype="fp32", usual=True))
            return {row.version: row.metrics for row in bench.rows(jobs)}

    both = metrics("layernorm_backward:8-9")
    assert both[8] == metrics("layernorm_backward:8")[8] and both[9] == metrics("layernorm_backward:9")[9]


@needs_nvrtc
def test_a_family_that_is_broken_costs_its_own_rows(sweep: Sweep, tmp_path: Path) -> None:
    (tmp_path / "worse.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "worse.cu").write_text("")
    rows = rows_of(sweep, f"worse toy:1 --static --family-dir {tmp_path}")
    assert [(row.family, row.status) for row in rows] == [("worse", "invalid"), ("toy", "pass")]


# ------------------------------------------------------------------------------------------- bad input


def test_without_a_compiler_it_says_which_extra_has_one(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CannotRunError("cannot compile for CUDA: the library NVRTC is not found", "another hint")

    monkeypatch.setattr(compiled, "nvrtc_build", missing)
    status, out, err = sweep("toy --static")
    assert status == Exit.CANNOT and "[nvrtc13]" in err and "another hint" not in err and err.count("\n") == 1
    assert not Path("results/runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--static --counts", "two different sweeps"),
        ("--arch sm_90", "add --static"),
        ("--counts --arch sm_90", "--arch belongs to --static"),
        ("--static --arch sm_91", "unknown architecture 'sm_91'; known here: sm_80"),
        ("--static --arch sm_90,", "unknown architecture ''"),
        ("--static --arch all", "unknown architecture 'all'"),
        ("--static --hot", "--static takes no --hot"),
        ("--static --graph", "--static takes no --graph"),
        ("--static --rounds 3", "--static takes no --rounds"),
        ("--static --seed 1", "--static takes no --seed"),
        ("--static --rtol 1", "--static takes no --rtol"),
        ("--static --device cuda", "--static takes no --device"),
        ("--static --resume", "--static takes no --resume"),
        ("--static --html a.html", "--static takes no --html"),
        ("--static --time-limit 3", "--static takes no --time-limit"),
        ("--static --strategy brute_force", "--static takes no --strategy"),
        ("--counts --workers 1", "--counts takes no --workers"),
        ("--counts --full", "--counts takes no --full"),
        ("--static --save a/b", "cannot be the name of a baseline"),
        ("--static --preset huge", "has no preset 'huge'"),
        ("--static --block-sizes some", "'some' is neither a whole number nor a range"),
    ],
)
def test_options_that_do_not_go_together(sweep: Sweep, words: str, says: str) -> None:
    if "preset" in words and not has_nvrtc:
        pytest.skip("needs NVRTC")
    status, out, err = sweep(f"toy:1 {words}")
    assert status == Exit.USAGE and says in err and err.count("\n") == 1 and not out
    assert not Path("results/runs").exists()


# ------------------------------------------------------------------------------------------- what other commands do


def unproven(mode: str = "static", **more: Any) -> Row:
    return make_row(verdict=None, cache_mode=mode, device="sm_90", **more)


def test_such_a_row_never_wins_even_with_a_time() -> None:
    for mode, word in (("static", "compiled"), ("counts", "counted")):
        row = unproven(mode, measurement=measured(1.0))
        assert row.outcome == word and not row.may_win
        assert make_row(cache_mode=mode, status="invalid").outcome == "invalid"
        document = load_best(Path("nowhere"))
        assert merge(document, [row], "run") == 0 and document["gpus"] == {}
    assert make_row().outcome == "pass" and make_row(cache_mode="hot", median_ms=1.0).may_win


@needs_nvrtc
def test_plots_and_resumed_sweeps_say_that_there_is_nothing(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    sweep("toy:1 --static")
    assert run_command(["plot", "--results", "results"]) == Exit.USAGE
    assert "holds what was compiled: neither verdicts nor times to plot" in capsys.readouterr().err
    status = run_command(["sweep", "--resume", "--results", "results"])
    assert status == Exit.USAGE and "does not go on; sweep again" in capsys.readouterr().err
    path = find_run(Path("results"), "latest")
    lines = path.read_text().splitlines()
    proven = json.dumps({"kind": "row", **make_row(median_ms=1.0).to_dict()})
    path.write_text("\n".join([lines[0], proven, *lines[1:]]) + "\n")  # as of two runs that were merged
    assert run_command(["plot", "--results", "results", "-o", "page.html"]) == Exit.OK
    assert "sm_90" not in Path("page.html").read_text().partition("<section")[2]
