"""Runs of training on the emulator, in this process: what is learned, kept, gone on with, skipped and sampled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.device.emulator.device import EmulatorDevice
from kbench.errors import CannotRunError, WrongResult
from kbench.train.checkpoint import checkpoint_steps, load_checkpoint
from kbench.train.initial import initial_weights
from kbench.train.log import read_json_log
from kbench.train.loop import Outcome
from kbench.train.model import PRESETS
from kbench.train.options import TrainOptions
from kbench.train.reference_update import train_steps
from kbench.train.run import Run, batches_of, open_checkpoint
from kbench.train.setup import Workshop
from kbench.train.slots import OUTLIER_WINDOW
from kbench.train.trainer import State, Trainer
from kbench.train.weights import export_llmc, export_safetensors
from train_runs import batches, chosen_trainer_of, ignore, run_on, same_bits, train, trainer_of, workshop_on

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

# Small enough for a tenth of a second a step, with every part of the step.
SMALL: dict[str, Any] = {"batch": 2, "seq": 16, "val_batches": 1}


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatorDevice]:
    opened = EmulatorDevice()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def workshop(device: EmulatorDevice, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return workshop_on(device, tmp_path_factory.mktemp("results"))


def go(run: Run) -> Outcome:
    """The whole run, as the command does it."""
    with chosen_trainer_of(run) as (chosen, trainer):
        return run.go(trainer, chosen)


# ---------------------------------------------------------------------------------------------- learning


def test_the_loss_on_the_story_falls(workshop: Workshop) -> None:
    """From what guessing among 256 bytes costs, log(256) = 5.545, by at least 0.7 in ten steps."""
    outcome = go(run_on(workshop, lr=1e-3, val_batches=2, val_every=10))
    assert len(outcome.losses) == 10 and outcome.losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert outcome.losses[-1] < outcome.losses[0] - 0.7
    assert [step for step, _ in outcome.validation] == [0, 10]
    assert outcome.validation[1][1] < outcome.validation[0][1] - 0.7, "on what it was not trained on, too"


def test_naive_and_best_agree_step_by_step(workshop: Workshop) -> None:
    """In fp32 only the order of sums differs. In bf16 every stored tensor is rounded to 2^-9 of itself; a loss is a
    mean over 64 tokens, of which such errors, of random sign, leave a tenth of that."""
    for dtype, most in (("fp32", 1e-5), ("bf16", 2e-3)):
        options = {"batch": 2, "seq": 32, "dtype": dtype}
        naive = train(run_on(workshop, **options, use="naive"), 10)
        best = train(run_on(workshop, **options, use="best"), 10)
        apart = [abs(one.loss - other.loss) for one, other in zip(naive, best, strict=True)]
        assert max(apart) <= most, (dtype, apart)
        assert [report.step for report in best] == list(range(10)) and not any(report.skipped for report in best)
        assert best[9].loss < best[0].loss - 0.2


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_steps_are_those_of_the_float64_reference(workshop: Workshop, micro_steps: int) -> None:
    """Losses, norms and weights, with a schedule, weight decay and clipping; micro-steps count as one larger batch."""
    run = run_on(
        workshop, **SMALL, steps=6, micro_steps=micro_steps, lr=1e-3, warmup=2, schedule="cosine", weight_decay=0.1
    )
    given = batches(run, 6 * micro_steps)
    joined = [tuple(map(np.concatenate, zip(*given[i : i + micro_steps], strict=True)))
              for i in range(0, len(given), micro_steps)]  # fmt: skip
    right = train_steps(run.inputs.model, run.inputs.state.params, joined, run.inputs.settings.rates, decay=0.1)
    reports = []
    with trainer_of(run) as trainer:
        for start in range(0, len(given), micro_steps):
            trainer.step(given[start : start + micro_steps])
            reports.append(trainer.report())
        found = trainer.state().params
    np.testing.assert_allclose([report.loss for report in reports], right.losses, atol=5e-6)
    np.testing.assert_allclose([report.norm for report in reports], right.norms, rtol=1e-5)
    assert reports[0].scale < 1.0, "clipping has to do something"
    for name, values in right.weights.items():
        # AdamW divides by the gradient's own size: where that is next to nothing, a rounding error turns a step around.
        far = np.abs(found[name] - values) > 2e-6
        assert np.mean(far) < 0.002, name
        np.testing.assert_allclose(found[name], values, atol=6e-3, err_msg=name)


def test_bf16_follows_fp32(workshop: Workshop) -> None:
    """Master weights and stochastic rounding keep what bf16 would lose: the first steps are those of fp32."""
    single, half = (train(run_on(workshop, batch=2, seq=32, dtype=dtype), 5) for dtype in ("fp32", "bf16"))
    assert max(abs(a.loss - b.loss) for a, b in zip(single, half, strict=True)) <= 2e-3


def test_a_batch_is_learned_by_heart(workshop: Workshop) -> None:
    outcome = go(run_on(workshop, **SMALL, overfit=True, steps=12, lr=3e-3, val_every=0))
    assert outcome.losses[-1] < 3.0


def test_the_schedule_reaches_the_device(workshop: Workshop) -> None:
    run = run_on(workshop, **SMALL, steps=6, schedule="cosine", warmup=2, lr=1e-2, final_fraction=0.1)
    reports = train(run, 6)
    np.testing.assert_allclose([report.rate for report in reports], run.inputs.settings.rates, rtol=1e-6)


def test_a_rate_of_0_changes_no_parameter(workshop: Workshop) -> None:
    run = run_on(workshop, **SMALL, lr=0.0)
    with trainer_of(run) as trainer:
        trainer.step(batches(run, 1))
        assert not same_bits(trainer.state().params, run.inputs.state.params)


def test_one_step_is_adamw_of_the_clipped_gradients(workshop: Workshop) -> None:
    run = run_on(workshop, **SMALL, weight_decay=0.1, lr=1e-2, clip=0.5)
    before = run.inputs.state
    with trainer_of(run) as trainer:
        trainer.step(batches(run, 1))
        found, gradients = trainer.state(), trainer.gradients()
        report = trainer.report()
    norm = np.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in gradients.values()))
    assert report.norm == pytest.approx(norm, rel=1e-5) and report.scale == pytest.approx(0.5 / norm, rel=1e-5)
    for parameter in run.inputs.model.parameters:
        name, decay = parameter.name, 0.1 if parameter.decay else 0.0
        gradient = gradients[name].astype(np.float64) * (0.5 / norm)
        right, m, v = _adamw(before.params[name].astype(np.float64), gradient, 1e-2, decay)
        np.testing.assert_allclose(found.params[name], right, rtol=1e-4, atol=2e-7, err_msg=name)
        np.testing.assert_allclose(found.m[name], m, rtol=1e-4, atol=1e-10)
        np.testing.assert_allclose(found.v[name], v, rtol=2e-4, atol=1e-14)
    assert found.step == 1 and found.filled == 1


def _adamw(p: Any, g: Any, rate: float, decay: float) -> tuple[Any, Any, Any]:
    """The first step of AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2), with
    the moments' bias corrected: m / (1 - beta1) is g, v / (1 - beta2) is g^2."""
    m, v = 0.1 * g, 0.05 * g * g
    return p - rate * (g / (np.sqrt(g * g) + 1e-8) + decay * p), m, v


# ---------------------------------------------------------------------------------------------- outliers


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_outlier_is_skipped_and_changes_nothing(workshop: Workshop, dtype: str) -> None:
    run = run_on(workshop, **SMALL, dtype=dtype, skip_loss_z=3.0)
    source = np.random.default_rng(1)
    window = np.stack([2.0 + 0.01 * source.normal(size=OUTLIER_WINDOW), 1.0 + source.random(OUTLIER_WINDOW)])
    quiet = replace(run.inputs.state, window=window.astype(np.float32), filled=OUTLIER_WINDOW)
    given = batches(run, 1)
    with trainer_of(run) as trainer:
        before = _after(trainer, quiet, [])
        trainer.load(quiet)
        trainer.step(given)
        report, after = trainer.report(), trainer.state()
        assert report.skipped and report.scale == 0.0 and report.loss_z > 3.0 and report.finite
        for kind in ("params", "m", "v"):
            assert not same_bits(getattr(after, kind), getattr(before, kind)), kind
        assert after.master is None or not same_bits(after.master, before.master or {})
        assert after.step == 1 and after.filled == OUTLIER_WINDOW + 1
        # A window in which such a loss is nothing unusual lets it pass; and so does a limit of 0.
        usual = replace(quiet, window=np.full((2, OUTLIER_WINDOW), report.loss, np.float32) + window[:, ::-1] * 0.1)
        trainer.load(replace(usual, window=usual.window.astype(np.float32)))
        trainer.step(given)
        assert not trainer.report().skipped and same_bits(trainer.state().params, before.params)
    unlimited = run_on(workshop, **SMALL, dtype=dtype)
    with trainer_of(unlimited) as trainer:
        trainer.load(quiet)
        trainer.step(given)
        assert not trainer.report().skipped


def _after(trainer: Trainer, state: State, given: list[Any]) -> State:
    trainer.load(state)
    for batch in given:
        trainer.step([batch])
        trainer.report()
    return trainer.state()


# ---------------------------------------------------------------------------------------------- not finite


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_that_are_not_finite_stop_the_run_at_its_first_step(
    workshop: Workshop, dtype: str, tmp_path: Path
) -> None:
    run = run_on(workshop, tmp_path / "out", **SMALL, dtype=dtype, val_every=0)
    run.inputs.state.params["fcw"][1, 3, 5] = np.nan
    with pytest.raises(WrongResult, match=r"step 1: the loss is nan and the norm of the gradients nan; a lower --lr"):
        go(run)
    assert checkpoint_steps(tmp_path / "out") == []
    records = read_json_log(tmp_path / "out" / "train.jsonl").steps
    assert [record.step for record in records] == [0] and np.isnan(records[0].loss) and records[0].skipped


def test_a_rate_far_too_high_stops_at_the_first_step_that_is_not_finite(workshop: Workshop, tmp_path: Path) -> None:
    run = run_on(workshop, tmp_path / "out", **SMALL, lr=1e30, steps=9, val_every=0, checkpoint_every=1)
    with pytest.raises(WrongResult, match=r"step [23]: the loss is (nan|inf).*the checkpoint of step [12] in"):
        go(run)


# ---------------------------------------------------------------------------------------------- samples


def test_a_sample_is_the_same_each_time_and_leaves_no_trace(workshop: Workshop) -> None:
    options = {**SMALL, "steps": 4, "val_every": 0, "sample_length": 12}
    sampled, again = (go(run_on(workshop, **options, sample_every=2)) for _ in range(2))
    assert [step for step, _ in sampled.samples] == [2, 4]
    assert sampled.samples == again.samples and all(len(text) > 0 for _, text in sampled.samples)
    assert go(run_on(workshop, **options)).losses == sampled.losses, "sampling is not training"
    coldest = go(run_on(workshop, **options, sample_every=2, temperature=0.0))
    assert coldest.samples != sampled.samples


# ---------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize(("dtype", "micro_steps"), [("fp32", 1), ("bf16", 2)])
def test_eight_steps_are_four_and_four(device: EmulatorDevice, dtype: str, micro_steps: int, tmp_path: Path) -> None:
    """Losses, parameters, moments and master weights bit for bit: batches, windows, seeds and rates go on."""
    workshop = workshop_on(device, tmp_path, deterministic=True)
    options = {**SMALL, "dtype": dtype, "micro_steps": micro_steps, "deterministic": True, "schedule": "linear",
               "warmup": 3, "checkpoint_every": 4, "sample_every": 4, "sample_length": 8, "val_every": 4}  # fmt: skip
    unbroken = go(run_on(workshop, tmp_path / "unbroken", **options, steps=8))
    assert checkpoint_steps(tmp_path / "unbroken") == [4, 8]
    shutil.copytree(tmp_path / "unbroken", tmp_path / "broken")
    for path in (tmp_path / "broken").glob("*00000008*"):
        path.unlink()
    inputs = open_checkpoint(tmp_path / "broken", {}, ignore)
    assert inputs.options == TrainOptions(**options, steps=8).on("emulator")
    again = go(Run(workshop, inputs, tmp_path / "broken", ignore, ignore))
    assert again.losses == unbroken.losses[4:] and again.norms == unbroken.norms[4:] and again.step == 8
    one, other = (load_checkpoint(tmp_path / name) for name in ("unbroken", "broken"))
    assert one.document == other.document
    for kind in ("m", "v", "master"):
        found, right = getattr(other.state.optimizer, kind), getattr(one.state.optimizer, kind)
        assert (found is None and right is None) or not same_bits(found, right), kind
    assert not same_bits(other.state.params, one.state.params)
    logs = [read_json_log(tmp_path / name / "train.jsonl") for name in ("unbroken", "broken")]
    assert [(r.step, r.loss, r.norm, r.rate, r.scale) for r in logs[0].steps] == [
        (r.step, r.loss, r.norm, r.rate, r.scale) for r in logs[1].steps
    ]
    assert logs[0].validation == logs[1].validation and logs[0].samples == logs[1].samples
    assert (tmp_path / "unbroken" / "main.log").read_text() == (tmp_path / "broken" / "main.log").read_text()


def test_a_run_goes_on_with_the_kernels_that_it_had(workshop: Workshop, tmp_path: Path) -> None:
    """Others would round in another way. Unless others are asked for."""
    go(run_on(workshop, tmp_path, **SMALL, steps=1, use="naive", recompute=2))
    kernels = load_checkpoint(tmp_path).document["kernels"]
    versions = []
    for changes in ({"steps": 2}, {"steps": 2, "use": "best"}):
        chosen = Run(workshop, open_checkpoint(tmp_path, changes, ignore), tmp_path, ignore, ignore).choose()
        versions.append({role: pick.version for role, pick in chosen.picks.items()})
        assert chosen.shape.recompute == 2
    assert versions[0] == {role: version for role, (_, version, *_) in kernels.items()}
    assert versions[0]["encoder"] == 1 and versions[1]["encoder"] > 1 and "fused_residual" in versions[1]


def test_kernels_that_are_gone_are_chosen_anew_and_that_is_said(workshop: Workshop, tmp_path: Path) -> None:
    go(run_on(workshop, tmp_path, **SMALL, steps=1))
    inputs = open_checkpoint(tmp_path, {"steps": 2}, ignore)
    assert inputs.kernels is not None
    by_role = {**inputs.kernels.by_role, "encoder": ("encoder_forward", 77, 256)}
    notes: list[str] = []
    inputs.kernels = replace(inputs.kernels, by_role=by_role)
    chosen = Run(workshop, inputs, tmp_path, ignore, notes.append).choose()
    assert chosen.picks["encoder"].version != 77
    assert notes == ["the kernels of the checkpoint are not those of this kbench or device: choosing anew"]


def test_a_run_that_was_stopped_before_its_first_step_goes_on(workshop: Workshop, tmp_path: Path) -> None:
    go(run_on(workshop, tmp_path, **SMALL, steps=0))
    assert checkpoint_steps(tmp_path) == [0]
    inputs = open_checkpoint(tmp_path, {"steps": 2}, ignore)
    outcome = go(Run(workshop, inputs, tmp_path, ignore, ignore))
    assert outcome.step == 2 and len(outcome.losses) == 2 and checkpoint_steps(tmp_path) == [0, 2]
    assert outcome.losses == go(run_on(workshop, **SMALL, steps=2)).losses


def test_a_run_that_is_done_has_nothing_to_do(workshop: Workshop, tmp_path: Path) -> None:
    go(run_on(workshop, tmp_path, **SMALL, steps=2))
    before = (tmp_path / "main.log").read_text()
    outcome = go(Run(workshop, open_checkpoint(tmp_path, {}, ignore), tmp_path, ignore, ignore))
    assert outcome.losses == [] and outcome.step == 2 and (tmp_path / "main.log").read_text() == before


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_weights_begin_where_the_run_ended(workshop: Workshop, dtype: str, tmp_path: Path) -> None:
    run = run_on(workshop, **SMALL, dtype=dtype)
    given = batches(run, 3)
    with trainer_of(run) as trainer:
        for batch in given[:2]:
            trainer.step([batch])
            trainer.report()
        params = trainer.state().params
        expected = trainer.losses(*given[2])
    export_llmc(tmp_path / "a.bin", run.inputs.model, params, dtype)
    export_safetensors(tmp_path / "b.safetensors", run.inputs.model, params, dtype)
    assert not np.array_equal(params["wte"], run.inputs.state.params["wte"])
    for name in ("a.bin", "b.safetensors"):
        options = {**SMALL, "weights": str(tmp_path / name), "dtype": dtype}
        again = run_on(workshop, **options)
        assert again.inputs.model == PRESETS["nano"]
        with trainer_of(again) as trainer:
            assert np.array_equal(trainer.losses(*given[2]), expected), name


def test_trained_weights_are_not_those_it_began_with(workshop: Workshop) -> None:
    """Every tensor is updated, in every layer; the padding of the vocabulary and positions out of reach are not."""
    run = run_on(workshop, layers=2, heads=2, channels=16, vocab=300, context=20, **SMALL)
    before = initial_weights(run.inputs.model, 42)
    with trainer_of(run) as trainer:
        source = batches_of(run.inputs)
        for _ in range(2):
            trainer.step([next(source)])
            trainer.report()
        after = trainer.state().params
    for parameter in run.inputs.model.parameters:
        old, new = before[parameter.name], after[parameter.name]
        for layer in range(parameter.slices):
            one, other = (old[layer], new[layer]) if parameter.layered else (old, new)
            assert not np.array_equal(one, other), (parameter.name, layer)
    assert not np.any(after["wte"][300:])
    assert np.array_equal(after["wpe"][16:], before["wpe"][16:])


# ---------------------------------------------------------------------------------------------- memory


def test_a_step_that_does_not_fit_says_what_does(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.train.engine import RESERVE

    run = run_on(workshop, **SMALL)
    chosen = run.choose()
    monkeypatch.setattr(workshop.device, "free_memory", lambda: RESERVE + 1_000_000)
    with pytest.raises(CannotRunError, match=r"needs \d+\.\d GB, 0\.0 GB are free; (--batch 1 fits|not even)"):
        run.choose()
    with pytest.raises(CannotRunError, match=r"the step needs 0\.00 GB, 0\.27 GB are free"):
        run.trainer(chosen)
