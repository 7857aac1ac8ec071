"""`kbench train gpt2` as a user types it, on the emulator: kills and signals, wrong kernels, exports, bad options."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.train.checkpoint import checkpoint_steps
from kbench.train.log import History, read_json_log

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

SMALL = ("--batch", "2", "--seq", "16", "--val-batches", "1")
# About a fifth of a second a step: time to be killed in.
SLOW = ("--deterministic", "--steps", "8", "--checkpoint-every", "4", "--val-every", "4", "--val-batches", "1",
        "--warmup", "3", "--schedule", "cosine")  # fmt: skip


class Ran:
    """What a command line left: its exit status, and both of its streams."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def text(self) -> str:
        """Everything, on one line."""
        return " ".join((self.out + self.err).split())


@pytest.fixture
def kbench(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`kbench train gpt2 --device emulator ...` in this process."""

    def run(*arguments: str | Path) -> Ran:
        capfd.readouterr()
        status = run_command(["train", "gpt2", "--device", "emulator", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Ran(status, out, err)

    return run


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "kbench", "train", "gpt2", "--device", "emulator", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Until the log holds this step; the run is then in a later one."""
    for _ in range(12000):
        log = folder / "main.log"
        if log.exists() and f"s:{step} trl:" in log.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    pytest.fail("the run did not reach its step in two minutes")


def numbers(history: History) -> list[Any]:
    """What may not differ in any bit."""
    return [(r.step, r.loss, r.norm, r.rate, r.scale, r.skipped) for r in history.steps] + list(history.validation)


# ---------------------------------------------------------------------------------------------- stopped


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    process = start(*SLOW, "--out", folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == Exit.OK, err
    assert "step 8/8" in out
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    number: signal.Signals, unbroken: Path, tmp_path: Path, kbench: Callable[..., Ran]
) -> None:
    process = start(*SLOW, "--out", tmp_path)
    wait_for_step(process, tmp_path, 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL and checkpoint_steps(tmp_path) == [4]
    else:
        assert process.returncode == Exit.INTERRUPTED, err
        at = checkpoint_steps(tmp_path)[-1]
        assert at in (6, 7) and f"stopped by SIGTERM after step {at}; go on with --resume {tmp_path}" in err
        assert "Traceback" not in err
    again = kbench("--resume", tmp_path, "--json")
    assert again.status == Exit.OK, again.err
    found, right = (read_json_log(folder / "train.jsonl") for folder in (tmp_path, unbroken))
    assert numbers(found) == numbers(right) and len(right.steps) == 8
    assert (tmp_path / "main.log").read_text() == (unbroken / "main.log").read_text()
    assert again.document["losses"] == [record.loss for record in right.steps][-len(again.document["losses"]) :]
    # The same parameters and moments in the end, bit for bit.
    for name in ("model_00000008.bin", "state_00000008_00000.bin"):
        assert (tmp_path / name).read_bytes() == (unbroken / name).read_bytes(), name
    assert (tmp_path / "loss.svg").read_text().startswith(("<svg", "<?xml"))


def test_without_a_folder_a_stopped_run_says_that_nothing_was_kept(tmp_path: Path) -> None:
    process = start("--steps", "500", *SMALL)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step   2/500"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == Exit.INTERRUPTED
    assert "stopped by SIGINT after step" in err and "nothing was kept: no --out was given" in err
    assert "Traceback" not in err


# ---------------------------------------------------------------------------------------------- wrong kernels

WRONG_CU = """
__global__ void gelu_of_all_but_one(float* out, const float* inp, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n - 1) {
        const float x = inp[i];
        out[i] = 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    } else if (i < n) {
        out[i] = 0.0f;
    }
}
"""
WRONG_PY = """
from kbench.family import Launch, Version


def plan(problem, block, props):
    N = problem["N"]
    return (Launch("gelu_of_all_but_one", (-(-N // block),), (block,), ("out", "inp", N)),)


versions = (Version(99, "forgets the last element", plan, ("fp32",)),)
"""


def test_a_wrong_version_ends_the_run_before_its_first_step(tmp_path: Path, kbench: Callable[..., Ran]) -> None:
    (tmp_path / "gelu_forward.wrong.cu").write_text(WRONG_CU)
    (tmp_path / "gelu_forward.wrong.py").write_text(WRONG_PY)
    out = tmp_path / "out"
    ran = kbench(*SMALL, "--family-dir", tmp_path, "--use", "gelu_forward=99", "--out", out)
    assert ran.status == Exit.WRONG
    assert "gelu_forward version 99, block size 256, cannot train: fail" in ran.text
    assert "1 of" in ran.err and "elements wrong" in ran.err
    assert "step 1/" not in ran.out and "validation" not in ran.out and checkpoint_steps(out) == []
    # Repaired, it trains: what was remembered of the wrong one does not count.
    (tmp_path / "gelu_forward.wrong.cu").write_text(WRONG_CU.replace("n - 1", "n"))
    ran = kbench(*SMALL, "--family-dir", tmp_path, "--use", "gelu_forward=99", "--steps", "1", "--json")
    assert ran.status == Exit.OK, ran.err
    assert ran.document["kernels"]["gelu"] == {"family": "gelu_forward", "version": 99, "block": 256, "params": {}}
    # And spoiled again after that proof, it does not.
    (tmp_path / "gelu_forward.wrong.cu").write_text(WRONG_CU)
    assert kbench(*SMALL, "--family-dir", tmp_path, "--use", "gelu_forward=99").status == Exit.WRONG


# ---------------------------------------------------------------------------------------------- what it says


def test_a_run_says_what_it_does_and_leaves_a_log(tmp_path: Path, kbench: Callable[..., Ran]) -> None:
    out = tmp_path / "out"
    ran = kbench(*SMALL, "--steps", "3", "--sample-every", "3", "--sample-length", "5", "--out", out)
    assert ran.status == Exit.OK, ran.err
    words = ("2 layers, 4 heads, 64 channels", "on emulator, fp32, batch 2 of 16 tokens", "from scratch, seed 42",
             "kbench's own story", "memory: ", "optimizer", "ready after", "validation loss", "step 1/3  loss",
             "step 3/3  loss", "sample: '", "checkpoint of step 3 in", "log and loss curve: ")  # fmt: skip
    for text in words:
        assert text in ran.out or text in ran.text, text
    history = read_json_log(out / "train.jsonl")
    assert len(history.steps) == 3 and len(history.samples) == 1 and history.header["device"] == "emulator"
    assert history.header["options"]["batch"] == 2
    assert sorted(path.name for path in out.iterdir()) == [
        "DONE_00000003", "loss.svg", "main.log", "model_00000003.bin", "state_00000003_00000.bin", "train.jsonl",
        "train_00000003.json",
    ]  # fmt: skip


def test_the_document_is_json_and_stands_alone(kbench: Callable[..., Ran]) -> None:
    ran = kbench(*SMALL, "--steps", "2", "--micro-steps", "2", "--json")
    found = ran.document
    assert (found["command"], found["step"], len(found["losses"]), found["exit_status"]) == ("train", 2, 2, 0)
    assert found["kernels"]["adamw"]["version"] == 3 and found["options"]["micro_steps"] == 2
    assert found["device"]["kind"] == "emulator" and found["recompute"] == 0


def test_check_and_explain_do_not_train(tmp_path: Path, kbench: Callable[..., Ran]) -> None:
    ran = kbench(*SMALL, "--check", "--json")
    assert ran.status == Exit.OK
    findings = ran.document["check"]
    assert [finding["name"] for finding in findings][:2] == ["loss", "wte"] and len(findings) == 17
    assert all(finding["right"] and finding["error"] <= finding["allowed"] for finding in findings)
    ran = kbench(*SMALL, "--explain")
    assert ran.status == Exit.OK and "no times: the emulator is not a GPU" in ran.text
    assert "attention_backward" in ran.out and "step 1/" not in ran.out


def test_a_check_that_fails_is_status_3(kbench: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.train import gradcheck

    monkeypatch.setattr(gradcheck, "relative_error", lambda found, right: 1e-3 * float(found is not None))
    ran = kbench(*SMALL, "--check", "--dtype", "tf32")
    assert ran.status == Exit.OK, "1e-3 is allowed"
    monkeypatch.setattr(gradcheck, "relative_error", lambda found, right: 3e-3)
    ran = kbench(*SMALL, "--check", "--dtype", "tf32")
    assert ran.status == Exit.WRONG and "16 of 17 are further from float64 than allowed" in ran.text


def test_weights_are_exported_and_read_again(tmp_path: Path, kbench: Callable[..., Ran]) -> None:
    first = kbench(*SMALL, "--steps", "2", "--export", tmp_path / "a.bin", "--json")
    assert first.status == Exit.OK, first.err
    losses = []
    for name in ("a.bin", "b.safetensors"):
        ran = kbench(*SMALL, "--weights", tmp_path / "a.bin", "--steps", "0", "--export", tmp_path / "b.safetensors")
        assert ran.status == Exit.OK, ran.err
        ran = kbench(*SMALL, "--weights", tmp_path / name, "--steps", "1", "--json")
        losses.append((ran.document["losses"], ran.document["validation"][0]))
    assert losses[0] == losses[1]
    assert losses[0][1][1] == first.document["validation"][-1][1], "it begins where the first ended"


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--use", "gelu_forward=7"), 2, "gelu_forward has no version 7; it has 1, 2"),
        (("--use", "fastest"), 2, "'fastest' is none of best, naive, FAMILY=VERSION"),
        (("--use", "attention_forward=10"), 2, "no choice of versions covers attention; attention_forward: version 10"),
        (("--use", "trimat_forward=1"), 2, "no part of this step is of that family"),
        (("--use", "matmul_forward=1", "--dtype", "tf32"), 2, "version 1: dtype tf32 is not supported"),
        (("--dtype", "fp16"), 2, "training in 'fp16'; dtypes: fp32, tf32, bf16"),
        (("--seq", "65"), 2, "--seq 65: the model's context is 64"),
        (("--model", "d13"), 2, "unknown model 'd13'"),
        (("--lr", "nan"), 2, "--lr nan: it is a finite number, 0 or more"),
        (("--export", "weights.pt"), 2, "the name ends in neither .bin nor .safetensors"),
        (("--resume", "nowhere"), 2, "nowhere"),
        (("--resume", "nowhere", "--lr", "1"), 2, "--lr cannot be given with --resume"),
        (("--data", "nowhere.txt"), 2, "nowhere.txt"),
        (("--weights", "nowhere.bin"), 2, "nowhere.bin"),
        (("--steps", "-1"), 2, "--steps -1: at least 0"),
    ],
)
def test_bad_input_is_one_line_with_its_status(
    arguments: tuple[str, ...], status: int, words: str, kbench: Callable[..., Ran], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    ran = kbench(*arguments)
    assert ran.status == status, ran.err
    assert words in ran.text
    assert len([line for line in ran.err.splitlines() if "error" in line]) == 1
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_another_model_than_gpt2(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "gpt3"]) == Exit.USAGE
    assert "there is no model 'gpt3' to train; kbench train gpt2" in capfd.readouterr().err


def test_a_folder_that_holds_another_run_is_not_written_to(tmp_path: Path, kbench: Callable[..., Ran]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        assert kbench(*SMALL, "--steps", "1", "--out", folder).status == Exit.OK
    before = {path: path.read_bytes() for path in other.iterdir()}
    for arguments in ((*SMALL, "--out", other), ("--resume", one, "--steps", "2", "--out", other)):
        ran = kbench(*arguments)
        assert ran.status == Exit.USAGE and f"{other} holds a checkpoint of step 1" in ran.text
    assert {path: path.read_bytes() for path in other.iterdir()} == before
    assert "neither .bin nor .safetensors" in kbench("--resume", one, "--steps", "2", "--export", "w.pt").text
    # A folder of its own is fine, and so is the old one by another name.
    assert kbench("--resume", one, "--steps", "2", "--out", tmp_path / "new").status == Exit.OK
    assert checkpoint_steps(tmp_path / "new") == [2]
    assert kbench("--resume", one, "--steps", "2", "--out", one / ".." / "one").status == Exit.OK
    assert checkpoint_steps(one) == [1, 2]


def test_a_checkpoint_that_is_damaged_is_named(tmp_path: Path, kbench: Callable[..., Ran]) -> None:
    assert kbench(*SMALL, "--steps", "1", "--out", tmp_path).status == Exit.OK
    path = tmp_path / "state_00000001_00000.bin"
    path.write_bytes(path.read_bytes()[:-4])
    ran = kbench("--resume", tmp_path, "--steps", "2")
    assert ran.status == Exit.USAGE and path.name in ran.text
