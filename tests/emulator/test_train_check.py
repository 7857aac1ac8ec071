"""The gradients of a whole step on the emulator: against float64, and against each other where they must be equal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.device.emulator.device import EmulatorDevice
from kbench.train import slots
from kbench.train.check_step import check_step
from kbench.train.engine import Engine
from kbench.train.gradcheck import relative_error
from kbench.train.layout import GROUP
from kbench.train.program import Action, Call, View
from kbench.train.setup import Workshop
from kbench.train.step import StepBuilder
from train_runs import batches, gradients, run_on, same_bits, trainer_of, workshop_on

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

ODD = {"layers": 1, "heads": 3, "channels": 33, "vocab": 300, "context": 17}
PARAMETERS = 16


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatorDevice]:
    opened = EmulatorDevice()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def workshop(device: EmulatorDevice, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return workshop_on(device, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def exact(device: EmulatorDevice, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Of versions that give the same bits every time: others add up in any order, here too."""
    return workshop_on(device, tmp_path_factory.mktemp("results"), deterministic=True)


def assert_right(workshop: Workshop, **options: Any) -> None:
    notes: list[str] = []
    findings = check_step(run_on(workshop, **options), notes.append)
    assert len(findings) == 1 + PARAMETERS and not notes
    assert not [finding for finding in findings if not finding.right]


# ---------------------------------------------------------------------------------------------- against float64


@pytest.mark.parametrize("use", ["best", "naive"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_nano_is_as_close_to_float64_as_allowed(workshop: Workshop, dtype: str, use: str) -> None:
    assert_right(workshop, dtype=dtype, use=use)


@pytest.mark.parametrize(
    ("batch", "seq", "dtype", "use"),
    [(1, 1, "fp32", "best"), (1, 17, "fp32", "best"), (1, 17, "fp32", "naive"), (1, 17, "bf16", "best"),
     (3, 5, "tf32", "best"), (1, 1, "bf16", "naive")],
)  # fmt: skip
def test_odd_sizes(workshop: Workshop, batch: int, seq: int, dtype: str, use: str) -> None:
    """33 channels in heads of 11, 84 padding rows of the vocabulary, positions that no batch reaches."""
    assert_right(workshop, **ODD, batch=batch, seq=seq, dtype=dtype, use=use)


def test_several_layers_of_odd_sizes_with_everything_computed_again(workshop: Workshop) -> None:
    assert_right(workshop, **{**ODD, "layers": 3}, batch=2, seq=7, recompute=2)


def test_a_gradient_that_is_a_little_off_is_found(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check compares with is not what it is given."""
    from kbench.train.trainer import Trainer

    real = Trainer.gradients

    def off(self: Trainer) -> dict[str, Any]:
        found = real(self)
        found["fcw"][1] *= np.float32(1.0 + 1e-5)
        return found

    monkeypatch.setattr(Trainer, "gradients", off)
    findings = check_step(run_on(workshop, batch=1, seq=16), lambda note: None)
    assert [finding.name for finding in findings if not finding.right] == ["fcw"]


def test_gains_of_another_layernorm_are_found(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """From scratch all gains are 1 and all biases 0; the check varies them."""
    own = StepBuilder._weight

    def of_ln1(self: StepBuilder, name: str, layer: int = 0) -> View:
        return own(self, {"ln2w": "ln1w", "ln2b": "ln1b"}.get(name, name), layer)

    monkeypatch.setattr(StepBuilder, "_weight", of_ln1)
    findings = check_step(run_on(workshop, batch=2, seq=16, val_batches=1), lambda note: None)
    assert sum(not finding.right for finding in findings) > 10


def test_padding_and_positions_out_of_reach_have_no_gradient(workshop: Workshop) -> None:
    with trainer_of(run_on(workshop, **ODD, batch=2, seq=7, micro_steps=2)) as trainer:
        trainer.engine.fill("grads", np.full(trainer.layout.count, 7.0, np.float32))  # of the update before
        trainer.engine.clear("grads")
        for name in ("wte", "wpe"):
            at, count = trainer.layout.offset(name), trainer.layout.model.channels
            flat = trainer.engine.fetch("grads")
            flat[at : at + count] = 7.0
            trainer.engine.fill("grads", flat)
        trainer.gradient(batches(run_on(workshop, **ODD, batch=2, seq=7), 2))
        flat, found = trainer.engine.fetch("grads"), trainer.gradients()
    assert not np.any(found["wte"][300:]) and not np.any(found["wpe"][7:])
    assert np.all(np.abs(found["wpe"][:7]) < 1.0) and np.all(np.abs(found["wte"]) < 1.0), "what was there is gone"
    between = np.ones(flat.size, bool)
    for part in trainer.layout.parts:
        between[part.offset : part.offset + part.count] = False
    assert np.count_nonzero(between) > GROUP and not np.any(flat[between]), "gaps stay 0"


# ---------------------------------------------------------------------------------------------- against each other

# How far sums of the same float32 terms in another order may be apart, relative to the norm of a whole tensor.
REORDERED = 2e-6


def assert_near(found: dict[str, Any], expected: dict[str, Any], most: float) -> None:
    errors = {name: relative_error(found[name], expected[name].astype(np.float64)) for name in expected}
    assert max(errors.values()) <= most, errors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("use", ["naive", "best"])
def test_recomputing_changes_no_bit_but_where_gelu_comes_from_an_epilogue(
    exact: Workshop, use: str, dtype: str
) -> None:
    """GELU again is a kernel's: its last digits, which only the gradient of fcproj's weights sees, are not the GEMM's.
    LayerNorms again are the same in every version."""
    options = {"batch": 2, "seq": 32, "dtype": dtype, "use": use}
    kept = gradients(run_on(exact, recompute=0, **options))
    for level in (1, 2):
        found = gradients(run_on(exact, recompute=level, **options))
        epilogue = use == "best" and dtype != "fp32"  # fp32 does not take the library's GELU
        assert same_bits(found, kept) == (["fcprojw"] if epilogue else []), level
        assert_near(found, kept, REORDERED if dtype == "fp32" else 2.0**-8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_micro_steps_are_one_step_of_twice_the_batch(workshop: Workshop, dtype: str) -> None:
    """The same windows of the text, too: they are cut to the size of a batch, so both are given here."""
    whole = run_on(workshop, batch=4, seq=32, dtype=dtype)
    inputs, targets = batches(whole, 1)[0]
    with trainer_of(whole) as trainer:
        trainer.gradient([(inputs, targets)])
        expected, loss = trainer.gradients(), trainer.engine.fetch("losses").mean(dtype=np.float64)
        trainer.step([(inputs, targets)])
        reported = trainer.report()
    halves = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    with trainer_of(run_on(workshop, batch=2, seq=32, dtype=dtype, micro_steps=2)) as trainer:
        trainer.gradient(halves)
        found = trainer.gradients()
        trainer.step(halves)
        again = trainer.report()
    # bf16 stores what the first micro-step left before the second adds to it: one rounding more, of half a unit in 2^8.
    assert_near(found, expected, REORDERED if dtype == "fp32" else 2.0**-8)
    assert reported.loss == pytest.approx(loss, rel=1e-6)
    assert again.loss == pytest.approx(reported.loss, rel=1e-6)
    assert again.norm == pytest.approx(reported.norm, rel=1e-5 if dtype == "fp32" else 1e-2)


def test_a_second_step_begins_with_no_gradient(exact: Workshop) -> None:
    """Sums that are not cleared would show: twice the same batch gives the same gradient twice."""
    run = run_on(exact, batch=2, seq=16, micro_steps=2)
    given = batches(run, 2)
    with trainer_of(run) as trainer:
        trainer.gradient(given)
        first = trainer.gradients()
        trainer.gradient(given)
        assert not same_bits(trainer.gradients(), first)


@pytest.mark.parametrize("seq", [64, 17])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_logits_in_parts_are_as_good_as_all_at_once(
    workshop: Workshop, seq: int, micro_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch": 4, "seq": seq, "micro_steps": micro_steps}
    with trainer_of(run_on(workshop, **options)) as trainer:
        assert trainer.shape.parts == 1
        given = batches(run_on(workshop, **options), micro_steps)
        trainer.gradient(given)
        expected, losses = trainer.gradients(), trainer.losses(*given[0])
        row = trainer.logits(given[0][0], seq - 1)
    monkeypatch.setattr(slots, "_LOGIT_TOKENS", seq)
    with trainer_of(run_on(workshop, **options)) as trainer:
        assert trainer.shape.parts == 4
        trainer.gradient(given)
        assert_near(trainer.gradients(), expected, REORDERED)
        assert np.array_equal(trainer.losses(*given[0]), losses)
        assert np.array_equal(trainer.logits(given[0][0], seq - 1), row)


@pytest.mark.parametrize("use", ["best", "naive"])
@pytest.mark.parametrize(("dtype", "level"), [("fp32", 0), ("bf16", 2)])
def test_what_lay_in_lent_memory_and_in_outputs_changes_no_bit(
    exact: Workshop, use: str, dtype: str, level: int
) -> None:
    """Scratch, the logits while nobody needs them, and whatever a call is to replace hold NaN when it begins."""
    run = run_on(exact, **ODD, batch=2, seq=11, dtype=dtype, use=use, recompute=level, micro_steps=2)
    given = batches(run, 2)
    with trainer_of(run) as trainer:
        trainer.step(given)
        expected, after = trainer.gradients(), trainer.state()
    with trainer_of(run) as trainer:
        engine, program = trainer.engine, trainer.engine.program
        for batch, backward in zip(given, (program.first, program.later), strict=True):
            trainer.feed.put(*batch)
            for action in (*program.forward, *backward):
                poison(engine, action)
                engine.run([action])
        found = trainer.gradients()
        for action in program.update:
            poison(engine, action)
            engine.run([action])
        assert not same_bits(found, expected)
        for kind in ("params", "m", "v"):
            assert not same_bits(getattr(trainer.state(), kind), getattr(after, kind)), kind


def poison(engine: Engine, action: Action) -> None:
    """Fill with NaN what the action may not read."""
    if not isinstance(action, Call):
        return
    for name in {"scratch", action.arena}:
        engine.device.poison(engine.buffers[name], 0xFF)
    made = engine.plans.of(action.use)
    given = [tensor for tensor in made.touched if tensor.name in action.views]
    read = {action.views[tensor.name] for tensor in given if tensor.role != "out"}  # an alias in place is one
    for tensor in given:
        view = action.views[tensor.name]
        if tensor.role == "out" and view not in read:
            whole = engine.buffers[view.tensor].array.reshape(-1)
            whole[view.offset : view.offset + tensor.count].view(np.uint8)[...] = 0xFF


def test_losses_and_logits_are_of_the_same_forward_pass(workshop: Workshop) -> None:
    run = run_on(workshop, batch=2, seq=16)
    inputs, targets = batches(run, 1)[0]
    with trainer_of(run) as trainer:
        losses = trainer.losses(inputs, targets)
        for position in (0, 7, 15):
            row = trainer.logits(inputs, position).astype(np.float64)
            assert row.shape == (256,)
            right = np.log(np.exp(row - row.max()).sum()) + row.max() - row[targets[0, position]]
            assert losses[0, position] == pytest.approx(right, abs=1e-5)


def test_memory_is_given_back(workshop: Workshop, tmp_path: Path) -> None:
    with trainer_of(run_on(workshop, batch=1, seq=8)) as trainer:
        engine = trainer.engine
        assert len(engine.buffers) == len(engine.tensors)
        assert engine.needed == sum(buffer.tensor.nbytes for buffer in engine.buffers.values())
        assert all(engine.device.damage(buffer) is None for buffer in engine.buffers.values())
        trainer.step(batches(run_on(workshop, batch=1, seq=8), 1))
        trainer.report()
        damaged = [name for name, buffer in engine.buffers.items() if engine.device.damage(buffer) is not None]
        assert not damaged, "a kernel wrote past the end of a tensor"
    assert not engine.buffers
