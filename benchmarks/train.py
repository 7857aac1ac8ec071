"""GPT-2's training step in kbench and in PyTorch, side by side on one GPU: tokens per second.

    python3 benchmarks/train.py [--model d12] [--batch 4 64] [--seq 1024] [--steps 50] [--program NAME...] [--json FILE]

PyTorch runs eager, compiled, and compiled with CUDA graphs and cuDNN's attention, in bf16 with fp32 weights and a
padded vocabulary in the softmax, which is as fast as its users get it (benchmarks/gpt2_torch.py). Each program runs at
each batch in a process of its own: one that dies, or runs out of memory, costs its own line. What it has to say for
itself is the median time of its steps without the first ones, in which programs compile, tune and record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kbench.train.log import read_log
from kbench.train.model import PRESETS, Model
from kbench.train.schedule import rates

WARM_STEPS = 10  # left out of the median; torch.compile with CUDA graphs has settled after 3
RATE = 3e-4
SEED = 42
TIMEOUT = 900  # seconds for one program at one batch: torch.compile of a large model takes minutes

# What gpt2_torch.Settings gets beyond device and precision.
PYTORCH: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": "default"},
    "compiled, graphs, cuDNN": {"compile": "reduce-overhead", "sdpa": "cudnn"},
}
PROGRAMS = ("kbench", *PYTORCH)


@dataclass(frozen=True)
class Options:
    """One program at one batch."""

    program: str
    batch: int
    model: str = "d12"
    seq: int = 1024
    steps: int = 50
    dtype: str = "bf16"
    device: str = "cuda"


@dataclass(frozen=True)
class Figures:
    """What a program did: loss and milliseconds of each step, and the device's memory at its peak where it is known."""

    losses: list[float]
    ms: list[float]
    peak_bytes: int | None = None

    def tokens_per_s(self, tokens: int) -> float:
        """From the median of the warm steps; of a run that has no warm step, from its last."""
        return 1e3 * tokens / statistics.median(self.ms[min(WARM_STEPS, len(self.ms) - 1) :])


# ---------------------------------------------------------------------------------------------- the programs


def run_kbench(options: Options) -> Figures:
    """`kbench train gpt2` in a process of its own, read back from its log."""
    with tempfile.TemporaryDirectory() as folder:
        _call(kbench_command(options, Path(folder) / "run"))
        steps = read_log(Path(folder) / "run").steps
    memory = [step.memory for step in steps if step.memory is not None]
    times = [step.ms for step in steps if step.ms is not None]
    return Figures([step.loss for step in steps], times, max(memory, default=None))


def kbench_command(options: Options, folder: Path) -> list[str]:
    """Training as PyTorch does it here: a constant learning rate, nothing but steps; the log goes to `folder`."""
    sizes = {"--model": options.model, "--batch": options.batch, "--seq": options.seq, "--steps": options.steps}
    rest = {"--dtype": options.dtype, "--device": options.device, "--lr": RATE, "--out": folder}
    return [
        sys.executable,
        "-m",
        "kbench",
        "train",
        "gpt2",
        *(str(part) for pair in (sizes | rest).items() for part in pair),
    ]


def run_pytorch(options: Options) -> Figures:
    """The same in PyTorch, in this process: on random weights and tokens, which take as long as any."""
    import gpt2_torch

    model = PRESETS[options.model]
    choice = PYTORCH[options.program]
    settings = gpt2_torch.Settings(options.device, options.dtype, pad_vocab=True, **choice)
    source = np.random.default_rng(SEED)
    batches = [random_batch(model, options.batch, options.seq, source)] * options.steps
    schedule = list(rates("constant", options.steps, RATE))
    run = gpt2_torch.train(model, random_weights(model, source), batches, schedule, settings, keep_weights=False)
    return Figures(run.losses, run.ms, run.peak_bytes)


def random_weights(model: Model, source: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Drawn as at the start of training, fp32."""
    weights = {}
    for parameter in model.parameters:
        weights[parameter.name] = np.full(parameter.shape, parameter.constant, np.float32)
        if parameter.std:
            weights[parameter.name] += parameter.std * source.standard_normal(parameter.shape, np.float32)
    return weights


def random_batch(model: Model, batch: int, seq: int, source: np.random.Generator) -> Any:
    inputs, targets = source.integers(model.vocab, size=(2, batch, seq))
    return inputs, targets


def losses_agree(
    ours: Sequence[float], theirs: Sequence[float], others: Sequence[float], window: int = 20, least: float = 0.02
) -> tuple[bool, float, float]:
    """Whether two training runs have the same curve: verdict, largest difference, limit.

    Means of `window` steps are compared. The limit is 3 times the largest such difference between two runs of one
    program that differ only in rounding, `theirs` and `others`, and at least `least`. A loss that is not finite, or
    runs that are not equally long, never agree.
    """
    if not len(ours) == len(theirs) == len(others) or len(ours) < window:
        return False, float("nan"), least
    means = [np.array([np.mean(run[i : i + window]) for i in range(0, len(run) - window + 1, window)])
             for run in (ours, theirs, others)]  # fmt: skip
    worst = float(np.max(np.abs(means[0] - means[1])))
    limit = max(least, 3.0 * float(np.max(np.abs(means[1] - means[2]))))
    return worst <= limit, worst, limit  # NaN compares as false


# ---------------------------------------------------------------------------------------------- running them


def measure(options: Options) -> Figures:
    """The program in a process of its own. Raises RuntimeError with one line where it fails."""
    if options.program == "kbench":
        return run_kbench(options)
    answer = _call([sys.executable, __file__, "--worker", json.dumps(asdict(options))])
    return Figures(**json.loads(answer.splitlines()[-1]))


def _call(command: list[str]) -> str:
    """What a command prints. Raises RuntimeError with the last line of its errors, or how it ended."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"exit status {done.returncode}: {lines[-1] if lines else 'it said nothing'}")
    return done.stdout


def card() -> dict[str, str]:
    """Name and driver of the GPU, without a context on it, which would take memory from the programs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError):
        raise SystemExit("this benchmark needs a GPU: nvidia-smi names none") from None
    return {"card": name, "driver": driver}


def main(arguments: Sequence[str] | None = None, program: Callable[[Options], Figures] = measure) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="d12", choices=PRESETS)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--program", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try this script out")
    parser.add_argument("--json", type=Path, help="also write the figures here, after each line")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        print(json.dumps(asdict(run_pytorch(Options(**json.loads(chosen.worker))))))
        return 0
    where = card() if chosen.device == "cuda" else {"card": "CPU", "driver": ""}
    facts = {name: getattr(chosen, name) for name in ("model", "seq", "steps", "dtype")}
    head: dict[str, Any] = where | {"date": datetime.now(UTC).isoformat(timespec="seconds")} | facts
    print(", ".join(f"{name} {value}" for name, value in head.items() if value))
    print(f"{'program':25s} {'batch':>5s} {'tokens/s':>10s} {'ms':>9s} {'GB':>6s} {'first loss':>10s} {'last':>8s}")
    common, rows = Options("", 0, device=chosen.device, **facts), []
    for batch in chosen.batch:
        for name in chosen.program:
            options = replace(common, program=name, batch=batch)
            rows.append(_row(options, program))
            print(_line(rows[-1]), flush=True)
            if chosen.json:  # after each line: what has been measured survives whatever ends this program
                chosen.json.write_text(json.dumps(head | {"rows": rows}, indent=1))
    return 1 if any("error" in row for row in rows) else 0


def _row(options: Options, program: Callable[[Options], Figures]) -> dict[str, Any]:
    row: dict[str, Any] = {"program": options.program, "batch": options.batch}
    try:
        figures = program(options)
        tokens = options.batch * options.seq
        rate = figures.tokens_per_s(tokens)
    except Exception as error:  # whatever a program or its output does: the others go on
        return row | {"error": str(error).strip() or type(error).__name__}
    return row | {"tokens_per_s": rate, "median_ms": 1e3 * tokens / rate} | asdict(figures)


def _line(row: Mapping[str, Any]) -> str:
    start = f"{row['program']:25s} {row['batch']:5d}"
    if "error" in row:
        return f"{start} {row['error']}"
    memory = f"{row['peak_bytes'] / 1e9:.1f}" if row["peak_bytes"] is not None else "-"
    losses = f"{row['losses'][0]:10.4f} {row['losses'][-1]:8.4f}"
    return f"{start} {row['tokens_per_s']:10,.0f} {row['median_ms']:9.2f} {memory:>6s} {losses}"


if __name__ == "__main__":
    sys.exit(main())
