"""Training on a real GPU: gradients against float64 and PyTorch, graphs against eager calls, runs that go on.

Sweeps are left out but in one slow test: without times the highest numbers stand for the fastest, and every version
that runs is proven all the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.errors import LibraryMissing, WrongResult
from kbench.train import run as run_module
from kbench.train import slots
from kbench.train.check_step import check_step
from kbench.train.checkpoint import checkpoint_steps, load_checkpoint
from kbench.train.feed import DirectFeed
from kbench.train.gradcheck import relative_error
from kbench.train.log import read_json_log
from kbench.train.reference import loss_and_gradients
from kbench.train.run import Run, open_checkpoint
from kbench.train.setup import Workshop
from kbench.train.trainer import Report, Trainer
from kbench.train.trials import Trials
from train_runs import (
    batches,
    chosen_trainer_of,
    gradients,
    ignore,
    run_on,
    same_bits,
    train,
    trainer_of,
    workshop_on,
)

NANO: dict[str, Any] = {"model": "nano", "batch": 4, "seq": 64, "val_batches": 1}
D6: dict[str, Any] = {"model": "d6", "batch": 4, "seq": 64, "val_batches": 1}
MODELS = [pytest.param(NANO, id="nano"), pytest.param(D6, id="d6")]
# Attention by its matrix, which needs no library of its own.
MATRIX = "attention_forward=6,attention_backward=9"


@pytest.fixture(autouse=True)
def no_sweeps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the card measured."""
    monkeypatch.setattr(run_module, "gemm_rate", lambda device, dtype, note: None)
    if "sweeps" not in request.fixturenames:
        monkeypatch.setattr(Trials, "missing", lambda *arguments: [])


@pytest.fixture
def workshop(device: Any, tmp_path: Path) -> Workshop:
    return workshop_on(device, tmp_path / "results")


@pytest.fixture
def exact(device: Any, tmp_path: Path) -> Workshop:
    """Of versions that give the same bits every time."""
    return workshop_on(device, tmp_path / "results", deterministic=True)


@pytest.fixture(scope="module")
def cudnn() -> None:
    """Skips where the library is not there."""
    from kbench.device.cuda.sdpa import Cudnn

    try:
        Cudnn().close()
    except LibraryMissing as error:
        pytest.skip(str(error))


def use_of(dtype: str, use: str = "best") -> str:
    """The pair of attention versions that every machine has."""
    return f"{use},{MATRIX}" if use == "best" and dtype == "bf16" else use


# ---------------------------------------------------------------------------------------------- against float64


def assert_right(workshop: Workshop, **options: Any) -> None:
    findings = check_step(run_on(workshop, **options), ignore)
    assert len(findings) == 17
    assert not [finding for finding in findings if not finding.right]


@pytest.mark.parametrize("use", ["best", "naive"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("options", MODELS)
def test_gradients_are_as_close_to_float64_as_allowed(
    workshop: Workshop, options: dict[str, Any], dtype: str, use: str
) -> None:
    assert_right(workshop, **options, dtype=dtype, use=use_of(dtype, use))


@pytest.mark.parametrize("options", MODELS)
def test_with_cudnns_attention(workshop: Workshop, cudnn: None, options: dict[str, Any]) -> None:
    assert_right(workshop, **options, dtype="bf16", use="attention_forward=10,attention_backward=10")


@pytest.mark.parametrize(("batch", "seq", "dtype"), [(1, 1, "fp32"), (1, 17, "fp32"), (3, 5, "tf32"), (2, 17, "bf16")])
@pytest.mark.parametrize("use", ["best", "naive"])
def test_odd_sizes(workshop: Workshop, batch: int, seq: int, dtype: str, use: str) -> None:
    assert_right(
        workshop, layers=1, heads=3, channels=33, vocab=300, context=17, batch=batch, seq=seq, dtype=dtype,
        use=use_of(dtype, use),
    )  # fmt: skip


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_recompute_level_is_right(workshop: Workshop, level: int) -> None:
    assert_right(workshop, **NANO, dtype="fp32", recompute=level)


# How far sums of the same float32 terms in another order may be apart, relative to the norm of a whole tensor.
REORDERED = 5e-6


def assert_near(found: dict[str, Any], expected: dict[str, Any], most: float) -> None:
    errors = {name: relative_error(found[name], expected[name].astype(np.float64)) for name in expected}
    assert max(errors.values()) <= most, errors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_micro_steps_are_one_step_of_twice_the_batch(workshop: Workshop, dtype: str) -> None:
    whole = run_on(workshop, **D6, dtype=dtype, use=use_of(dtype))
    inputs, targets = batches(whole, 1)[0]
    with trainer_of(whole) as trainer:
        trainer.gradient([(inputs, targets)])
        expected = trainer.gradients()
    halves = run_on(workshop, **{**D6, "batch": 2}, dtype=dtype, micro_steps=2, use=use_of(dtype))
    with trainer_of(halves) as trainer:
        trainer.gradient([(inputs[:2], targets[:2]), (inputs[2:], targets[2:])])
        found = trainer.gradients()
    # bf16 stores what the first micro-step left before the second adds to it: a rounding more. A tensor's GEMM of half
    # the batch may be by another algorithm, too.
    assert_near(found, expected, REORDERED if dtype == "fp32" else 2.0**-7)


def test_logits_in_parts_are_as_good_as_all_at_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(workshop, **D6, dtype="fp32")
    with trainer_of(run) as trainer:
        assert trainer.shape.parts == 1
    expected = gradients(run)
    monkeypatch.setattr(slots, "_LOGIT_TOKENS", 64)
    run = run_on(workshop, **D6, dtype="fp32")
    with trainer_of(run) as trainer:
        assert trainer.shape.parts == 4
    assert_near(gradients(run), expected, REORDERED)


# ---------------------------------------------------------------------------------------------- step by step


@pytest.mark.parametrize(("dtype", "most"), [("fp32", 5e-4), ("bf16", 2e-2)])
@pytest.mark.parametrize("options", MODELS)
def test_naive_and_best_agree_step_by_step(
    workshop: Workshop, options: dict[str, Any], dtype: str, most: float
) -> None:
    naive = train(run_on(workshop, **options, dtype=dtype, use="naive", steps=10), 10)
    best = train(run_on(workshop, **options, dtype=dtype, use=use_of(dtype), steps=10), 10)
    apart = [abs(one.loss - other.loss) for one, other in zip(naive, best, strict=True)]
    assert max(apart) <= most, apart
    assert apart[0] <= most / 10, "before the first update"
    assert [report.step for report in best] == list(range(10))
    assert best[9].loss < best[0].loss - 0.2


class Eager(Trainer):
    """Every call queued by itself, and the host waits for every report."""

    def __init__(self, trainer: Trainer):
        super().__init__(trainer.engine, trainer.shape, trainer.settings)
        self.feed = DirectFeed(trainer.engine)

    def _run(self, name: str) -> None:
        self.engine.run(self._programs[name])


def steps_of(trainer: Trainer, given: Sequence[tuple[Any, Any]], late: int) -> list[Report]:
    micro, reports = trainer.shape.micro_steps, []
    for start in range(0, len(given), micro):
        trainer.step(given[start : start + micro])
        while trainer.pending > late:
            reports.append(trainer.report())
    while trainer.pending:
        reports.append(trainer.report())
    return reports


@pytest.mark.parametrize(("dtype", "micro_steps"), [("fp32", 1), ("bf16", 2)])
@pytest.mark.parametrize("options", MODELS)
def test_graphs_give_the_bits_of_the_same_calls_one_by_one(
    exact: Workshop, options: dict[str, Any], dtype: str, micro_steps: int
) -> None:
    """Batches that travel while the step before still runs, too: each step must see its own."""
    run = run_on(exact, **options, dtype=dtype, micro_steps=micro_steps, steps=6, use=use_of(dtype), deterministic=True)
    given = batches(run, 6 * micro_steps)
    assert len({inputs.tobytes() for inputs, _ in given}) == len(given)
    with trainer_of(run) as trainer:
        found, state = steps_of(trainer, given, late=1), trainer.state()
        losses = trainer.losses(*given[0])
        eager = Eager(trainer)
        eager.load(run.inputs.state)
        expected, right = steps_of(eager, given, late=0), eager.state()
        assert np.array_equal(losses, eager.losses(*given[0]))
        # And the same trainer once more, with graphs that have run already.
        trainer.load(run.inputs.state)
        again = steps_of(trainer, given, late=1)
    assert found == expected == again
    for kind in ("params", "m", "v"):
        assert not same_bits(getattr(state, kind), getattr(right, kind)), kind
    assert (state.master is None) == (dtype == "fp32")
    assert state.master is None or not same_bits(state.master, right.master or {})
    assert state.step == right.step == 6 and np.array_equal(state.window, right.window)


def test_validation_and_samples_leave_training_alone(exact: Workshop) -> None:
    options = {**NANO, "dtype": "fp32", "steps": 6, "deterministic": True, "sample_length": 16}
    outcomes = []
    for more in ({"val_every": 0}, {"val_every": 2, "sample_every": 3}, {"val_every": 2, "sample_every": 3}):
        with chosen_trainer_of(run_on(exact, **options, **more)) as (chosen, trainer):
            outcomes.append(run_on(exact, **options, **more).go(trainer, chosen))
    plain, watched, again = outcomes
    assert plain.losses == watched.losses and len(plain.losses) == 6
    assert watched.samples == again.samples and watched.validation == again.validation
    assert plain.tokens_per_s is not None and plain.tokens_per_s > 0


def test_weights_that_are_not_finite_stop_the_run_at_its_first_step(workshop: Workshop, tmp_path: Path) -> None:
    run = run_on(workshop, tmp_path / "out", **NANO, dtype="fp32", val_every=0)
    run.inputs.state.params["fcw"][1, 3, 5] = np.nan
    with (
        pytest.raises(WrongResult, match=r"step 1: the loss is nan and the norm of the gradients nan"),
        chosen_trainer_of(run) as (chosen, trainer),
    ):
        run.go(trainer, chosen)
    assert checkpoint_steps(tmp_path / "out") == []


# ---------------------------------------------------------------------------------------------- going on


def go(run: Run) -> Any:
    with chosen_trainer_of(run) as (chosen, trainer):
        return run.go(trainer, chosen)


@pytest.mark.parametrize(("dtype", "micro_steps"), [("fp32", 1), ("bf16", 2)])
def test_eight_steps_are_four_and_four(exact: Workshop, dtype: str, micro_steps: int, tmp_path: Path) -> None:
    options = {**NANO, "dtype": dtype, "micro_steps": micro_steps, "deterministic": True, "schedule": "linear",
               "warmup": 3, "checkpoint_every": 4, "val_every": 4, "use": use_of(dtype)}  # fmt: skip
    unbroken = go(run_on(exact, tmp_path / "unbroken", **options, steps=8))
    _first_half(exact, tmp_path, options)
    again = go(Run(exact, open_checkpoint(tmp_path / "broken", {}, ignore), tmp_path / "broken", ignore, ignore))
    assert again.losses == unbroken.losses[4:] and again.norms == unbroken.norms[4:]
    one, other = (load_checkpoint(tmp_path / name) for name in ("unbroken", "broken"))
    assert not same_bits(other.state.params, one.state.params)
    assert not same_bits(other.state.optimizer.v, one.state.optimizer.v)
    assert one.document == other.document
    logs = [read_json_log(tmp_path / name / "train.jsonl") for name in ("unbroken", "broken")]
    assert [(r.step, r.loss) for r in logs[0].steps] == [(r.step, r.loss) for r in logs[1].steps]


def _first_half(exact: Workshop, tmp_path: Path, options: dict[str, Any]) -> None:
    """A run of eight steps that a signal ends after the fourth or fifth."""

    def stop(line: str) -> None:
        if line.startswith("step 4/8"):
            os.kill(os.getpid(), signal.SIGTERM)

    run = run_on(exact, tmp_path / "broken", say=stop, **options, steps=8)
    outcome = go(run)
    assert outcome.stopped == "SIGTERM" and outcome.step in (4, 5)
    # On from the fourth, whichever was the last.
    for path in (tmp_path / "broken").glob("*00000005*"):
        path.unlink()
    assert checkpoint_steps(tmp_path / "broken") == [4]


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "most"),
    [("attention_forward=10,attention_backward=10", 24.5e9), (MATRIX, 44e9)],
    ids=["log-sum-exp", "matrix"],
)
def test_d12_with_64_sequences_stays_within_its_memory(
    workshop: Workshop, cudnn: None, attention: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the libraries' workspaces and all that calls need besides. Proofs at this size have their own time."""
    monkeypatch.setattr(Trials, "prove", lambda trials, uses: None)
    if workshop.device.free_memory() < most:
        pytest.skip(f"needs {most / 1e9:.0f} GB")
    run = run_on(workshop, model="d12", batch=64, seq=1024, dtype="bf16", recompute=1, use=attention)
    engine = workshop.engine(run.choose())
    assert engine.needed <= most
    before = workshop.device.free_memory()
    engine.allocate()
    taken = before - workshop.device.free_memory()
    engine.close()
    assert taken <= most


# ---------------------------------------------------------------------------------------------- PyTorch


@pytest.fixture(scope="module")
def gpt2() -> Any:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    path = Path(__file__).parents[2] / "benchmarks" / "gpt2_torch.py"
    spec = importlib.util.spec_from_file_location("gpt2_torch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt2_torch"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def single(gpt2: Any) -> Any:
    """fp32 without TF32, which its bound would not survive."""
    return gpt2.Settings(device="cuda", precision="fp32")


# Small enough in batch and sequence for the float64 reference.
AGAINST_TORCH = [
    pytest.param({"model": "nano", "batch": 4, "seq": 64}, id="nano"),
    pytest.param({"model": "d6", "batch": 2, "seq": 64}, id="d6"),
    pytest.param({"model": "d12", "batch": 2, "seq": 64}, id="d12"),
]


@pytest.mark.parametrize("options", AGAINST_TORCH)
def test_losses_are_pytorchs_step_by_step(workshop: Workshop, gpt2: Any, single: Any, options: dict[str, Any]) -> None:
    run = run_on(workshop, **options, dtype="fp32", steps=20, warmup=5, schedule="linear", weight_decay=0.1)
    weights = {name: values.copy() for name, values in run.inputs.state.params.items()}
    reports = train(run, 20)
    rates = run.inputs.settings.rates
    torch = gpt2.train(run.inputs.model, weights, batches(run, 20), rates, single, decay=0.1)
    assert reports[0].loss == pytest.approx(torch.losses[0], rel=1e-5)
    apart = [abs(report.loss - loss) for report, loss in zip(reports, torch.losses, strict=True)]
    assert max(apart) <= 2e-3, apart
    assert reports[0].norm == pytest.approx(torch.norms[0], rel=1e-4)
    assert reports[19].loss < reports[0].loss - 0.5


@pytest.mark.parametrize("options", AGAINST_TORCH)
def test_gradients_are_no_further_from_float64_than_twice_pytorchs(
    workshop: Workshop, gpt2: Any, single: Any, options: dict[str, Any]
) -> None:
    run = run_on(workshop, **options, dtype="fp32")
    model, weights, batch = run.inputs.model, run.inputs.state.params, batches(run, 1)[0]
    found = gradients(run)
    _, _, torch = gpt2.loss_and_gradients(model, weights, batch, single)
    exact = {name: values.astype(np.float64) for name, values in weights.items()}
    _, _, right = loss_and_gradients(model, exact, *batch, dtype=np.float64)
    errors = {n: (relative_error(found[n], right[n]), relative_error(torch[n], right[n])) for n in right}
    assert not {name: pair for name, pair in errors.items() if pair[0] > 2.0 * pair[1]}


def test_bf16_follows_pytorchs_autocast(workshop: Workshop, gpt2: Any) -> None:
    """Both keep fp32 weights and compute in bf16, with roundings in other places: d6, 20 steps."""
    run = run_on(workshop, **D6, dtype="bf16", steps=20, warmup=5, schedule="linear", use=use_of("bf16"))
    weights = run.inputs.state.master
    assert weights is not None
    torch = gpt2.train(
        run.inputs.model, weights, batches(run, 20), run.inputs.settings.rates, gpt2.Settings("cuda", "bf16")
    )
    reports = train(run, 20)
    apart = [abs(report.loss - loss) for report, loss in zip(reports, torch.losses, strict=True)]
    assert max(apart) <= 0.05 and sum(apart) / 20 <= 0.02, apart


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Every version is timed, as for a user whose cache is empty."""
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "cache"))
    yield


@pytest.mark.slow
def test_the_command_sweeps_once_and_trains(sweeps: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from kbench.cli.app import run_command

    command = ["train", "gpt2", "--model", "nano", "--dtype", "fp32", "--steps", "3", "--val-every", "0",
               "--results", str(tmp_path / "results"), "--json"]  # fmt: skip
    losses, notes = [], []
    for _ in range(2):
        assert run_command(command) == 0
        out, err = capfd.readouterr()
        document = json.loads(out)
        assert document["device"]["kind"] == "cuda" and len(document["losses"]) == 3
        losses.append(document["losses"])
        notes.append(err)
    assert "sweeping" in notes[0] and "sweeping" not in notes[1] and "proving" not in notes[1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    best = json.loads((tmp_path / "results" / "best.json").read_text())
    assert any("attention_backward" in families for families in best["gpus"].values())
