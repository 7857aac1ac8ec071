"""The benchmarks that train in their own process, on the emulator: what they run on a GPU is run here once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kbench.train.options import TrainOptions
from kbench.train.run import Run, open_inputs

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

ROOT = Path(__file__).parents[2]
SMALL = ("--device", "emulator", "--model", "nano", "--batch", "2", "--seq", "16")


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_steps_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import train_inside

    def ignore(line: Any) -> None: ...

    options = TrainOptions(model="nano", batch=2, seq=16, dtype="fp32", steps=4, val_every=0)
    with train_inside.workshop("emulator", tmp_path, ignore) as shop:
        with train_inside.training(shop, options, ignore) as training:
            reports, times = train_inside.run_steps(training.trainer, training.batches(4))
        train_inside.release(shop)
        run = Run(shop, open_inputs(options, "emulator", ignore), None, ignore, ignore)
        chosen = run.choose()
        outcome = run.go(run.trainer(chosen), chosen)
    assert [report.loss for report in reports] == outcome.losses and len(times) == 4 and min(times) > 0.0


def test_agreement_with_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    figures = tmp_path / "figures.json"
    done = run_script("train_agreement.py", "fp32", "bf16", *SMALL, "--steps", "20", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    single, half = json.loads(figures.read_text())
    assert len(single["gradients"]) == 16 and single["first_loss"]["relative"] < 1e-6
    assert len(half["losses"]) == 3 and half["largest_difference"] < 0.02
    assert done.stdout.count("they agree") == 2


def test_idle_says_which_ways_failed(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    done = run_script("train_idle.py", *SMALL, "--dtype", "fp32", "--steps", "1", "--json", str(tmp_path / "f.json"))
    assert done.returncode == 1, "the emulator cannot be traced"
    assert "no way to trace it worked" in done.stdout and "the emulator has no clock of its own" in done.stderr
    assert [way for way in ("graphs:", "early:", "eager:", "events:") if way in done.stderr][3:] == ["events:"]
