"""GPT-2's training step in kbench and in PyTorch, side by side on one GPU: tokens per second.

    python3 benchmarks/train.py --batch 4 --batch 64 --results R [--only NAME]... [--model d12] [--json FILE]

Programs: kbench; PyTorch eager, compiled ("compile"), and compiled with CUDA graphs and cuDNN's attention ("graphs");
only on demand, as they take long or are alike: "tuned" (max-autotune-no-cudagraphs) and "whole" (compiled, the whole
step in one CUDA graph). PyTorch has fp32 weights, bf16 by autocast, fused AdamW and a padded vocabulary in the softmax,
which is as fast as its users get it (benchmarks/gpt2_torch.py); all clip gradients. All read the same tokens, random
ones if no --data is named.

Each program runs at each batch in a process of its own: one that dies, hangs or runs out of memory costs its own line.
Times are medians of steps without the first ones, in which programs compile, tune and record. Memory is kbench's plan
and PyTorch's peak of allocations. "x eager" is how many times a program's rate is PyTorch eager's at that batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kbench.train.batches import Batches
from kbench.train.dataset import open_data
from kbench.train.log import read_log
from kbench.train.model import PRESETS, Model
from kbench.train.schedule import rates
from kbench.train.tokens import write_tokens

WARM_STEPS = 10  # left out of the median; torch.compile with CUDA graphs has settled after 3
END_LINES = 12  # of what a program said that failed
RATE = 3e-4
SEED = 42

# What gpt2_torch.Settings gets beyond device and precision.
PYTORCH: dict[str, dict[str, Any]] = {
    "eager": {},
    "compile": {"compile": "default"},
    "graphs": {"compile": "reduce-overhead", "sdpa": "cudnn"},
    "tuned": {"compile": "max-autotune-no-cudagraphs", "sdpa": "cudnn"},
    "whole": {"compile": "default", "sdpa": "cudnn", "graph": True},
}
PROGRAMS = ("kbench", *PYTORCH)
USUAL = ("kbench", "eager", "compile", "graphs")
DEVICES = {"cuda": "cuda", "emulator": "cpu"}  # kbench's name: PyTorch's


@dataclass(frozen=True)
class Options:
    """One program at one batch. data: a token file. limit: seconds that it may take in all."""

    program: str
    batch: int
    model: str = "d12"
    seq: int = 1024
    steps: int = 50
    dtype: str = "bf16"
    device: str = "cuda"
    data: str = ""
    results: str = "results"
    use: str = "best"
    limit: float = 120.0


@dataclass(frozen=True)
class Figures:
    """What a program did: loss and milliseconds of each step, the device's memory in bytes where it is known, and what
    else there is to keep."""

    losses: list[float]
    ms: list[float]
    memory: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        """Of the warm steps; of a run that has no warm step, the last."""
        return statistics.median(self.ms[min(WARM_STEPS, len(self.ms) - 1) :])


# ---------------------------------------------------------------------------------------------- the programs


def run_kbench(options: Options) -> Figures:
    """`kbench train gpt2` in a process of its own: times from its log, what it chose from its JSON document."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        document = json.loads(_call(kbench_command(options, out), options.limit))
        steps = read_log(out).steps
    memory = [step.memory for step in steps if step.memory is not None]
    times = [step.ms for step in steps if step.ms is not None]
    notes = {name: document.get(name) for name in ("device", "recompute", "kernels")}
    return Figures([step.loss for step in steps], times, max(memory, default=None), notes)


def kbench_command(options: Options, folder: Path) -> list[str]:
    """Training as PyTorch does it here: a constant learning rate, nothing but steps; the log goes to `folder`."""
    named = {name: getattr(options, name) for name in ("model", "batch", "seq", "steps", "dtype", "device", "use")}
    named |= {"data": options.data, "results": options.results, "lr": RATE, "seed": SEED}
    named |= {"val-every": 0, "recompute": 0, "out": folder}
    parts = [str(part) for name, value in named.items() for part in (f"--{name}", value)]
    return [sys.executable, "-m", "kbench", "train", "gpt2", "--json", *parts]


def run_pytorch(options: Options) -> Figures:
    """The same in PyTorch, in this process: on random weights, which take as long as any."""
    import gpt2_torch

    model = PRESETS[options.model]
    settings = gpt2_torch.Settings(DEVICES[options.device], options.dtype, pad_vocab=True, **PYTORCH[options.program])
    weights = random_weights(model, np.random.default_rng(SEED))
    schedule = list(rates("constant", options.steps, RATE))
    run = gpt2_torch.train(model, weights, same_batches(options), schedule, settings, keep_weights=False)
    return Figures(run.losses, run.ms, run.peak_bytes)


def random_weights(model: Model, source: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
    """Drawn as at the start of training, fp32."""
    weights = {}
    for parameter in model.parameters:
        weights[parameter.name] = np.full(parameter.shape, parameter.constant, np.float32)
        if parameter.std:
            weights[parameter.name] += parameter.std * source.standard_normal(parameter.shape, np.float32)
    return weights


def random_tokens(model: Model, batch: int, seq: int) -> np.ndarray[Any, Any]:
    """Enough for a few different batches, and one that is held out."""
    return np.random.default_rng(SEED).integers(model.vocab, size=6 * batch * seq + 2)


def same_batches(options: Options) -> list[Any]:
    """The batches that kbench trains on."""
    model, sizes = PRESETS[options.model], {"batch": options.batch, "seq": options.seq}
    dataset = open_data(options.data, None, model, note=lambda line: None, **sizes)
    return list(islice(Batches(dataset.train, options.batch, options.seq, shuffle_seed=SEED), options.steps))


# ---------------------------------------------------------------------------------------------- running them


def measure(options: Options) -> Figures:
    """The program in a process of its own. Raises RuntimeError with one line where it fails."""
    if options.program == "kbench":
        return run_kbench(options)
    answer = _call([sys.executable, __file__, "--worker", json.dumps(asdict(options))], options.limit)
    return Figures(**json.loads(answer.splitlines()[-1]))


def _call(command: list[str], limit: float) -> str:
    """What a command prints. Raises RuntimeError with the line that names its error, or how it ended; the end of what
    it said goes to stderr. At the limit it is ended with all processes that it started: torch.compile has a dozen.
    """
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            _tell_end(error.stderr or b"")
            raise RuntimeError(f"not done after {limit:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        _tell_end(errors)
        lines = [line for line in errors.splitlines() if line.strip()] or ["it said nothing"]
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]  # advice may come after it
        raise RuntimeError(f"exit status {process.returncode}: {(named or lines)[-1]}")
    return out


def _tell_end(errors: str | bytes) -> None:
    """The last lines of what a program said before it failed."""
    text = errors.decode(errors="replace") if isinstance(errors, bytes) else errors
    for line in text.splitlines()[-END_LINES:]:
        print(f"  | {line[:200]}", file=sys.stderr)


def card() -> dict[str, str]:
    """Name and driver of the GPU, without a context on it, which would take memory from the programs."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError):
        raise SystemExit("this benchmark needs a GPU: nvidia-smi names none") from None
    return {"card": name, "driver": driver}


def main(arguments: Sequence[str] | None = None, program: Callable[[Options], Figures] = measure) -> int:
    chosen = _parser().parse_args(arguments)
    if chosen.worker:
        print(json.dumps(asdict(run_pytorch(Options(**json.loads(chosen.worker))))))
        return 0
    where = card() if chosen.device == "cuda" else {"card": "CPU"}
    facts = {name: getattr(chosen, name) for name in ("model", "seq", "steps", "dtype")}
    head: dict[str, Any] = where | {"date": datetime.now(UTC).isoformat(timespec="seconds")} | facts
    print(", ".join(f"{name} {value}" for name, value in head.items()), flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in chosen.batch or (4, 64):
            common = Options("", batch, device=chosen.device, results=chosen.results, use=chosen.use, **facts)
            common = replace(common, data=chosen.data or _written_tokens(common, Path(folder)))
            for name in chosen.only or USUAL:
                limit = chosen.kbench_limit if name == "kbench" else chosen.limit
                rows.append(_row(replace(common, program=name, limit=limit), program))
                if chosen.json:  # after each row: what has been measured survives whatever ends this program
                    chosen.json.write_text(json.dumps(head | {"rows": rows}, indent=1))
    print("\n".join(table(rows)))
    return 1 if any("error" in row for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="d12", choices=PRESETS)
    parser.add_argument("--batch", type=int, nargs="+", action="extend", help="4 and 64")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--only", nargs="+", action="extend", choices=PROGRAMS, help=" ".join(USUAL))
    parser.add_argument("--data", help="a token file; random tokens if left out")
    parser.add_argument("--results", default="results", help="where kbench looks up and keeps times of versions")
    parser.add_argument("--use", default="best", help="kbench's versions, as `kbench train --use`")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a program of PyTorch")
    parser.add_argument("--kbench-limit", type=float, default=300.0, help="seconds for kbench, which may have to sweep")
    parser.add_argument("--device", default="cuda", choices=DEVICES, help="emulator: to try this script out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def _written_tokens(options: Options, folder: Path) -> str:
    path = folder / f"random_{options.batch}.bin"
    write_tokens(path, random_tokens(PRESETS[options.model], options.batch, options.seq))
    return str(path)


def _row(options: Options, program: Callable[[Options], Figures]) -> dict[str, Any]:
    """What a program did, told on stderr at once; "error" in it where it failed."""
    row: dict[str, Any] = {"program": options.program, "batch": options.batch}
    begun = time.monotonic()
    try:
        figures = program(options)
        rate = 1e3 * options.batch * options.seq / figures.median_ms
        row |= {"tokens_per_s": rate, "median_ms": figures.median_ms} | asdict(figures)
        said = f"{rate:,.0f} tokens/s, loss {figures.losses[0]:.4f} to {figures.losses[-1]:.4f}"
    except Exception as error:  # whatever a program or its output does: the others go on
        row["error"] = said = str(error).strip() or type(error).__name__
    row["seconds"] = round(time.monotonic() - begun, 1)
    print(f"{options.program}, batch {options.batch}: {said} (took {row['seconds']} s)", file=sys.stderr, flush=True)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table: times, rates, memory, and each rate over that of PyTorch's programs at the same batch."""
    others = [name for name in PYTORCH if any(row["program"] == name for row in rows)]
    rates_there = {(row["program"], row["batch"]): row.get("tokens_per_s") for row in rows}
    lines = [f"{'program':8s} {'batch':>5s} {'ms':>9s} {'tokens/s':>9s} {'GB':>6s}"
             + "".join(f"  {'x ' + name:>9s}" for name in others)]  # fmt: skip
    for row in rows:
        start = f"{row['program']:8s} {row['batch']:5d}"
        if "error" in row:
            lines.append(f"{start} {row['error']}")
            continue
        memory = f"{row['memory'] / 1e9:.2f}" if row["memory"] is not None else "-"
        line = f"{start} {row['median_ms']:9.3f} {row['tokens_per_s']:9,.0f} {memory:>6s}"
        for name in others:
            base = rates_there.get((name, row["batch"]))
            line += f"  {row['tokens_per_s'] / base:9.3f}" if base else f"  {'-':>9s}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    sys.exit(main())
