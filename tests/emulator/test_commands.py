"""The commands as a user types them, on the emulator: real processes, exit statuses, kills and bad input."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kbench.evaluate import Evaluator
from kbench.jobs import Job

PLANTED = Path(__file__).resolve().parents[1] / "planted"

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler for the emulator"
)

SCALE_CU = """
__global__ void scale(float* out, const float* inp, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * inp[i];
}
"""
SCALE_PY = """
from kbench.family import Expected, Family, Launch, Tensor, Version, normal

def plan(problem, block, props):
    return (Launch("scale", (-(-problem["N"] // block),), (block,), ("out", "inp", problem["N"])),)

family = Family(
    name="scale", summary="doubles numbers", sizes={"N": "elements"}, dtypes=("fp32",),
    presets={"default": {"N": 1000}, "small": {"N": 100}}, check_shapes=(),
    tensors=lambda p: (
        Tensor("inp", (p["N"],), "fp32", "in", draw=normal(1, 2)), Tensor("out", (p["N"],), "fp32", "out")
    ),
    reference=lambda p, inputs, error, xp: {"out": Expected(2 * inputs["inp"])},
    versions=(Version(1, "plain", plan, ("fp32",)), Version(2, "one block size", plan, ("fp32",), fixed=64)),
)
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def kbench(*arguments: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kbench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(**more))


@pytest.fixture
def scale(tmp_path: Path) -> Path:
    folder = tmp_path / "kérnels 測試 x"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE_CU)
    (folder / "scale.py").write_text(SCALE_PY)
    return folder


def run_scale(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return kbench("run", "scale", "--version", "1", "--device", "emulator", "--family-dir", str(folder), *more)


def test_run_in_a_folder_with_unusual_characters(scale: Path) -> None:
    done = run_scale(scale)
    assert done.returncode == 0, done.stderr
    assert "pass" in done.stdout and "100" in done.stdout


def test_a_wrong_kernel_is_status_3_and_its_command_repeats_the_failure(scale: Path) -> None:
    (scale / "scale.cu").write_text(SCALE_CU.replace("i < n)", "i < n - 1)"))
    done = run_scale(scale, "--json")
    assert done.returncode == 3
    row = json.loads(done.stdout)["rows"][0]
    assert row["status"] == "fail" and "out: 1 of 100 elements wrong" in row["reason"]
    again = subprocess.run(
        [sys.executable, "-m", *shlex.split(row["reproduce"])], capture_output=True, text=True, env=environment()
    )
    assert again.returncode == 3 and "1 of 100 elements wrong" in again.stdout


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("2.0f * inp[i];", "2.0f * inp[i]", "scale.cu:4"),
        ("void scale(", "void scales(", "no kernel `scale`"),
        ("const float* inp", "const double* inp", "tensor inp holds fp32"),
        (", int n) {", ") { const int n = 100;", "takes 2 arguments"),
    ],
)
def test_device_code_that_does_not_fit_is_one_line(scale: Path, old: str, new: str, words: str) -> None:
    (scale / "scale.cu").write_text(SCALE_CU.replace(old, new))
    done = run_scale(scale)
    assert done.returncode in (2, 6)
    assert words in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "statement, status, words",
    [
        ("while (true) { if (out[0] == -1.5f) break; }", 6, "time limit"),
        ("*reinterpret_cast<volatile int*>(blockIdx.x + 8) = 1;", 6, "kernel scale"),
        ("__trap();", 6, "trap"),
    ],
)
def test_a_kernel_that_is_stopped_costs_its_own_row(scale: Path, statement: str, status: int, words: str) -> None:
    (scale / "scale.cu").write_text(SCALE_CU.replace("{\n", "{\n" + statement + "\n", 1))
    done = run_scale(scale, "--time-limit", "1")
    assert done.returncode == status, done.stdout + done.stderr
    assert words in done.stdout
    assert "scale.cu:3" in done.stdout


def test_a_sweep_with_every_kind_of_bug_ends_with_one_row_each(tmp_path: Path) -> None:
    done = kbench(
        "sweep", "planted", "--family-dir", str(PLANTED), "--device", "emulator", "--block-sizes", "128,33",
        "--time-limit", "1", "--results", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    rows = json.loads(done.stdout)["rows"]
    kinds = {row["status"] for row in rows}
    assert {"pass", "fail", "refused", "crashed", "hung", "unlaunchable"} <= kinds
    assert all(row["reason"] for row in rows if row["status"] != "pass")
    assert all(row["measurement"] is None for row in rows)
    assert rows_on_disk(tmp_path / "out") == len(rows)


def test_a_version_with_a_fixed_block_size_runs_once(scale: Path, tmp_path: Path) -> None:
    done = kbench(
        "sweep", "scale", "--family-dir", str(scale), "--device", "emulator", "--block-sizes", "32..1024",
        "--results", str(tmp_path / "out"), "--json",
    )  # fmt: skip
    blocks = [(row["version"], row["block"]) for row in json.loads(done.stdout)["rows"]]
    assert blocks == [(1, 32), (1, 64), (1, 128), (1, 256), (1, 512), (1, 1024), (2, 64)]


def test_a_sweep_is_drawn_where_it_was_asked_for(scale: Path, tmp_path: Path) -> None:
    sweep = ("sweep", "scale", "--family-dir", str(scale), "--device", "emulator", "--block-sizes", "64")
    page = tmp_path / "pages" / "scale.html"
    done = kbench(*sweep, "--html", str(page), "--results", str(tmp_path / "results"))
    assert done.returncode == 0 and f"page:    {page}" in done.stdout, done.stderr
    assert "scale" in page.read_text(encoding="utf-8")
    done = kbench(*sweep, "--html", str(tmp_path / "a.jsonl"), "--results", str(tmp_path / "other"))
    assert done.returncode == 2 and "is not the name of a page" in done.stderr
    assert not (tmp_path / "other").exists(), "before any work"


def start_sweep(results: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kbench", "sweep", "attention_backward", "--device", "emulator"]
    return subprocess.Popen(
        [*command, "--results", str(results), "--size", "T=128"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment(),
    )  # fmt: skip


def rows_on_disk(results: Path) -> int:
    lines = [line for path in results.glob("runs/*.jsonl") for line in path.read_text().splitlines()]
    return sum('"block"' in line for line in lines)


def wait_for_rows(results: Path, count: int) -> None:
    for _ in range(1200):
        if rows_on_disk(results) >= count:
            return
        time.sleep(0.1)
    pytest.fail("the sweep wrote no rows in two minutes")


def test_ctrl_c_keeps_the_rows_and_ends_with_130(tmp_path: Path) -> None:
    sweep = start_sweep(tmp_path)
    wait_for_rows(tmp_path, 2)
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, err
    assert "Traceback" not in err
    assert rows_on_disk(tmp_path) >= 2


def test_kill_9_leaves_readable_rows(tmp_path: Path) -> None:
    sweep = start_sweep(tmp_path)
    wait_for_rows(tmp_path, 2)
    sweep.kill()
    sweep.communicate(timeout=60)
    from kbench.results.store import read_run

    path = next(tmp_path.glob("runs/*.jsonl"))
    assert len(read_run(path).rows) >= 2


@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (("run", "atention_backward"), 2, "did you mean attention_backward?"),
        (("run", "attention_backward", "--version", "77"), 2, "it has 1, 2, 3, 4, 5, 6, 7, 8"),
        (("run", "attention_backward", "--version", "5", "--block-size", "33"), 2, "33"),
        (("run", "attention_backward", "--version", "5", "--block-size", "0"), 2, "0"),
        (("run", "attention_backward", "--version", "5", "--block-size", "2048"), 2, "2048"),
        (("run", "attention_backward", "--version", "5", "--block-size", "abc"), 2, "abc"),
        (("sweep", "attention_backward", "--block-sizes", "1024..32"), 2, "1024..32"),
        (("sweep", "attention_backward", "--block-sizes", ""), 2, "block"),
        (("run", "attention_backward", "--version", "5", "--size", "C=65"), 2, "C divisible by NH"),
        (("run", "attention_backward", "--version", "5", "--size", "T=0"), 2, "T=0"),
        (("run", "attention_backward", "--version", "5", "--size", "T=-4"), 2, "'-4' is negative"),
        (("run", "attention_backward", "--version", "5", "--size", "X=4"), 2, "its sizes are B, T, C, NH"),
        (("run", "attention_backward", "--version", "5", "--size", "T=1000000"), 5, "GiB"),
        (("run", "gelu_forward", "--version", "2", "--dtype", "tf32"), 2, "it has bf16, fp32, fp16"),
        (("run", "attention_backward", "--version", "5", "--preset", "huge"), 2, "it has default, small"),
        (("run", "attention_backward", "--version", "5", "--family-dir", "/nowhere"), 2, "/nowhere"),
    ],
)
def test_bad_input_is_one_line_with_its_status(arguments: tuple[str, ...], status: int, words: str) -> None:
    done = kbench(*arguments, "--device", "emulator")
    assert done.returncode == status, done.stdout + done.stderr
    text = done.stdout + done.stderr
    assert words in text and "Traceback" not in text
    assert len([line for line in done.stderr.splitlines() if "error" in line]) <= 1


def test_no_gpu_is_status_5(monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.device.cuda.device import probe_gpu

    if not probe_gpu():
        done = kbench("run", "attention_backward", "--version", "5", "--device", "cuda")
        assert done.returncode == 5 and "no GPU can be used" in done.stderr
    else:
        done = kbench("run", "attention_backward", "--version", "5", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 5


def test_a_missing_compiler_names_the_remedies(tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    done = kbench(
        "run", "attention_backward", "--version", "5", "--device", "emulator",
        PATH=str(bare), CXX="", KBENCH_CXX="", KBENCH_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    if done.returncode == 0:
        pytest.skip("ziglang is installed and took over")
    assert done.returncode == 5 and "g++" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('(-(-problem["N"] // block),)', '(problem["N"] / block + 1,)', "scale.py:5: TypeError: grid must be a tuple"),
        ('{"out": Expected(2 * inputs["inp"])}', '{"out": 2 * inputs["inp"]}', "must return a dict of Expected"),
        ('{"out": Expected(2 * inputs["inp"])}', 'inputs["other"]', "KeyError: 'other'"),
        ('("out", "inp", problem["N"])', '("out", "nothing", problem["N"])', "nothing"),
        ('("out", "inp", problem["N"])', '("out", "inp", problem["N"] + 0.5)', "passes the float 100.5"),
    ],
)
def test_slips_in_a_family_cost_their_row_and_name_the_line(scale: Path, old: str, new: str, words: str) -> None:
    (scale / "scale.py").write_text(SCALE_PY.replace(old, new))
    done = run_scale(scale, "--json")
    assert done.returncode in (2, 6), done.stdout + done.stderr
    document = json.loads(done.stdout)
    said = document["rows"][0]["reason"] if document.get("rows") else document["error"]
    assert words in said and "scale" in said


@pytest.mark.parametrize("order", [("scale", "broken", "binary"), ("broken", "binary", "scale")])
def test_broken_families_do_not_hide_the_others(scale: Path, order: tuple[str, ...]) -> None:
    (scale / "broken.py").write_text("family = 1 +")
    (scale / "broken.cu").write_text("")
    (scale / "binary.py").write_text(SCALE_PY.replace('name="scale"', 'name="binary"'))
    (scale / "binary.cu").write_bytes(b"\xff\xfe")
    done = kbench("sweep", *order, "--family-dir", str(scale), "--device", "emulator", "--json")
    assert done.returncode == 2, done.stderr
    rows = json.loads(done.stdout)["rows"]
    reasons = {name: {row["reason"] for row in rows if row["family"] == name} for name in order}
    statuses = {name: {row["status"] for row in rows if row["family"] == name} for name in order}
    assert statuses == {"scale": {"pass"}, "broken": {"invalid"}, "binary": {"invalid"}}
    assert "broken.py:1" in reasons["broken"].pop() and "not UTF-8" in reasons["binary"].pop()


@pytest.mark.parametrize("sizes", ["0", "2048", "0,64"])
def test_block_sizes_that_no_gpu_launches_are_wrong_usage(sizes: str) -> None:
    done = kbench("check", "attention_backward", "--block-sizes", sizes, "--device", "emulator")
    assert done.returncode == 2 and "block-sizes" in done.stderr


class SilentChannel:
    """Stands in for a worker's channel where there is no parent."""

    def note(self, text: str) -> None: ...

    @contextlib.contextmanager
    def limit(self, seconds: float, doing: str) -> Iterator[Callable[[], None]]:
        yield lambda: None


def test_nothing_is_drawn_ahead_for_a_problem_that_does_not_fit_into_memory(scale: Path) -> None:
    evaluator = Evaluator(
        SilentChannel(), device="emulator", family_dirs=[str(scale)], seed=1, rtol=None, atol=None, time_limit=5.0,
        workers=1,
    )  # fmt: skip
    drawn: list[int] = []
    evaluator.cases.submit = lambda family, problem, seed: drawn.append(problem["N"])
    evaluator.announce([Job("scale", 1, "", {"N": 10**13}, "fp32", 256)])
    assert drawn == []
    evaluator.announce([Job("scale", 1, "", {"N": 100}, "fp32", 256)])
    assert drawn == [100]
