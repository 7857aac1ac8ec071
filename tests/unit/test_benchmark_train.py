"""benchmarks/train.py without a GPU: its figures, its gaps, and the programs that fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kbench.train.log import StepRecord, TrainLog

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "train.py"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_train", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_a_gpu(train: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(train, "card", lambda: {"card": "Test GPU", "driver": "580.1"})
    return train


def test_one_table_and_one_file_whatever_fails(
    on_a_gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = on_a_gpu
    asked = []

    def program(options: Any) -> Any:
        asked.append((options.program, options.batch, options.limit))
        if options.program == "compile":
            raise RuntimeError("not done after 7 s")
        if options.program == "graphs":
            return train.Figures([], [])
        warm = [20.0, 20.0, 40.0, 10.0] if options.program == "kbench" else [30.0]
        return train.Figures([11.0] + [9.5] * 13, [500.0] * 10 + warm, 12_340_000_000)

    arguments = ["--batch", "4", "--limit", "7", "--kbench-limit", "8", "--json", str(tmp_path / "figures.json")]
    assert train.main(arguments, program) == 1
    assert asked == [("kbench", 4, 8.0), ("eager", 4, 7.0), ("compile", 4, 7.0), ("graphs", 4, 7.0)]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["card"], figures["driver"], figures["model"], figures["steps"]) == ("Test GPU", "580.1", "d12", 50)
    assert figures["date"].startswith("20") and len(figures["rows"]) == 4
    assert figures["rows"][0]["tokens_per_s"] == 204_800.0 and figures["rows"][0]["median_ms"] == 20.0
    assert "error" in figures["rows"][3], "a program without steps is a gap"
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[1].split()[:5] == ["program", "batch", "ms", "tokens/s", "GB"]
    assert lines[1].split()[5:] == ["x", "eager", "x", "compile", "x", "graphs"]
    assert lines[2].split() == ["kbench", "4", "20.000", "204,800", "12.34", "1.500", "-", "-"]
    assert lines[3].split()[:2] + lines[3].split()[5:6] == ["eager", "4", "1.000"]
    assert lines[4].split(maxsplit=2) == ["compile", "4", "not done after 7 s"]
    assert all(len(line) <= 80 for line in lines[1:])
    assert "kbench, batch 4: 204,800 tokens/s, loss 11.0000 to 9.5000" in printed.err, "told at once"


def test_batches_and_programs_add_up_and_ratios_are_of_one_batch(
    on_a_gpu: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(options: Any) -> Any:
        ms = {("kbench", 2): 10.0, ("eager", 2): 20.0, ("kbench", 3): 10.0, ("eager", 3): 5.0}
        assert Path(options.data).is_file(), "both read the same tokens"
        return on_a_gpu.Figures([5.0], [ms[options.program, options.batch]])

    arguments = ["--batch", "2", "--batch", "3", "--only", "kbench", "--only", "eager", "--model", "nano"]
    assert on_a_gpu.main([*arguments, "--seq", "64"], program) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(*line[:2], line[-1]) for line in lines] == [
        ("kbench", "2", "2.000"), ("eager", "2", "1.000"), ("kbench", "3", "0.500"), ("eager", "3", "1.000")
    ]  # fmt: skip


def test_kbench_is_read_back_from_its_log(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def call(command: list[str], limit: float) -> str:
        called.extend(command)
        with TrainLog(Path(command[-1]), {}) as log:
            for step in range(3):
                log.step(StepRecord(step, 5.0 - step, 1.0, 3e-4, ms=10.0 + step, memory=100 + step))
        return json.dumps({"recompute": 0, "kernels": {"encoder": {"version": 3}}})

    monkeypatch.setattr(train, "_call", call)
    figures = train.measure(train.Options("kbench", 4, data="tokens.bin", results="R"))
    assert (figures.losses, figures.ms, figures.memory) == ([5.0, 4.0, 3.0], [10.0, 11.0, 12.0], 102)
    assert figures.notes["kernels"] == {"encoder": {"version": 3}}
    assert figures.median_ms == 12.0, "with no warm step, the last counts"
    assert called[1:6] == ["-m", "kbench", "train", "gpt2", "--json"]
    given = dict(zip(called[6::2], called[7::2], strict=True))
    assert given["--data"] == "tokens.bin" and given["--results"] == "R" and given["--recompute"] == "0"
    assert given["--val-every"] == "0" and given["--batch"] == "4" and given["--seq"] == "1024"


def test_the_command_is_one_that_kbench_understands(train: Any, tmp_path: Path) -> None:
    command = train.kbench_command(train.Options("kbench", 1, seq=10**6, device="emulator"), tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the model's context is 1024" in done.stderr, "all options were taken; this is the first thing wrong"


@pytest.mark.parametrize(
    ("code", "words"),
    [("import sys; sys.exit('no memory')", "exit status 1: no memory"), ("raise SystemExit(3)", "it said nothing"),
     ("import sys; print('a.b.MemoryError: 9 GB', 'Set this for more', sep='\\n', file=sys.stderr); sys.exit(1)",
      r"exit status 1: a\.b\.MemoryError: 9 GB")],
)  # fmt: skip
def test_a_command_that_fails_is_one_line(code: str, words: str, train: Any) -> None:
    with pytest.raises(RuntimeError, match=words):
        train._call([sys.executable, "-c", code], 60.0)


def test_at_the_limit_a_program_ends_with_all_that_it_started(train: Any, tmp_path: Path) -> None:
    child = "import subprocess, sys, pathlib\n"
    child += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    child += f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid))\np.wait()"
    with pytest.raises(RuntimeError, match="not done after 2 s"):
        train._call([sys.executable, "-c", child], 2.0)
    grandchild = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5.0
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(grandchild)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def test_without_a_gpu_it_says_so(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="needs a GPU"):
        train.main([])


def test_pytorch_really_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = [sys.executable, str(SCRIPT), "--model", "nano", "--batch", "2", "--seq", "32", "--steps", "3"]
    command += ["--only", "eager", "--device", "emulator", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert len(row["losses"]) == len(row["ms"]) == 3 and row["tokens_per_s"] > 0.0
    assert row["losses"][0] == pytest.approx(5.54, abs=0.2), "ln 256 of a model that knows nothing"
