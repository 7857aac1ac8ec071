"""benchmarks/train.py without a GPU: its figures, its gaps, and the programs that fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
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
    monkeypatch.setattr(module, "card", lambda: {"card": "Test GPU", "driver": "580.1"})
    return module


def test_one_table_and_one_file_whatever_fails(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def program(options: Any) -> Any:
        if options.program == "compiled":
            raise RuntimeError("exit status -9: it said nothing")
        if options.program == "eager":
            return train.Figures([], [])
        return train.Figures([11.0] + [9.5] * 13, [500.0] * 10 + [20.0, 20.0, 40.0, 10.0], 12_340_000_000)

    status = train.main(["--batch", "4", "--json", str(tmp_path / "figures.json")], program)
    assert status == 1
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["card"], figures["driver"], figures["model"], figures["steps"]) == ("Test GPU", "580.1", "d12", 50)
    assert figures["date"].startswith("20") and len(figures["rows"]) == 4
    assert figures["rows"][0]["tokens_per_s"] == 204_800.0 and figures["rows"][0]["median_ms"] == 20.0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["kbench", "4", "204,800", "20.00", "12.3", "11.0000", "9.5000"]
    assert lines[4].split(maxsplit=2) == ["compiled", "4", "exit status -9: it said nothing"]
    assert "error" in figures["rows"][1], "a program without steps is a gap"
    assert train.main(["--program", "kbench", "--batch", "4", "64"], program) == 0


def test_kbench_is_read_back_from_its_log(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def call(command: list[str]) -> str:
        called.append(command)
        with TrainLog(Path(command[-1]), {}) as log:
            for step in range(3):
                log.step(StepRecord(step, 5.0 - step, 1.0, 3e-4, ms=10.0 + step, memory=100 + step))
        return ""

    monkeypatch.setattr(train, "_call", call)
    figures = train.measure(train.Options("kbench", 4))
    assert figures == train.Figures([5.0, 4.0, 3.0], [10.0, 11.0, 12.0], 102)
    assert figures.tokens_per_s(120) == 10_000.0, "with no warm step, the last counts"
    assert called[0][1:13] == ["-m", "kbench", "train", "gpt2", "--model", "d12", "--batch", "4", "--seq", "1024",
                               "--steps", "50"]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words"),
    [("import sys; sys.exit('no memory')", "exit status 1: no memory"), ("raise SystemExit(3)", "it said nothing"),
     ("import time; time.sleep(60)", "not done after 1 s")],
)  # fmt: skip
def test_a_command_that_fails_is_one_line(code: str, words: str, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TIMEOUT", 1 if "sleep" in code else 60)
    with pytest.raises(RuntimeError, match=words):
        train._call([sys.executable, "-c", code])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_train", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_train", module)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="needs a GPU"):
        module.main([])


def test_curves_agree_by_means_of_20_steps(train: Any) -> None:
    base = [5.0 - i / 100 for i in range(60)]
    noise = [loss + (0.5 if i % 2 else -0.5) for i, loss in enumerate(base)]
    assert train.losses_agree(noise, base, base)[0], "noise within a window averages out"
    shifted = base[:40] + [loss + 0.03 for loss in base[40:]]
    verdict, worst, limit = train.losses_agree(shifted, base, base)
    assert not verdict and worst == pytest.approx(0.03) and limit == 0.02
    assert train.losses_agree(shifted, base, [loss + 0.011 for loss in base])[0], "PyTorch itself spreads as much"
    assert not train.losses_agree([*base[:59], float("nan")], base, base)[0]
    assert not train.losses_agree(base[:40], base, base)[0] and not train.losses_agree([], [], [])[0]


def test_pytorch_really_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = [sys.executable, str(SCRIPT), "--model", "nano", "--batch", "2", "--seq", "32", "--steps", "3"]
    command += ["--program", "eager", "--device", "cpu", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert len(row["losses"]) == len(row["ms"]) == 3 and row["tokens_per_s"] > 0.0
    assert row["losses"][0] == pytest.approx(5.54, abs=0.2), "ln 256 of a model that knows nothing"
