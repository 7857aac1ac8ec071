"""The loop around a trainer that only pretends: what happens before which step, what is said and kept, how it ends."""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kbench.errors import CannotRunError, Exit, WrongResult
from kbench.train import loop as module
from kbench.train.batches import Batches
from kbench.train.checkpoint import checkpoint_steps, load_checkpoint
from kbench.train.dataset import Dataset, open_data
from kbench.train.hellaswag import HellaSwag
from kbench.train.initial import initial_weights
from kbench.train.log import TrainLog, read_json_log, read_main_log
from kbench.train.loop import Loop, Outcome, Schedule
from kbench.train.model import Model
from kbench.train.slots import Shape
from kbench.train.trainer import Report, State, Trainer, fresh_state

MODEL = Model(1, 1, 2, vocab=256, context=8)
# Of all weights of the first state: what says that a checkpoint is of this step.
STEP_WEIGHT = 0.5


class FakeTrainer:
    """A trainer whose loss at step n is 5 - n / 100, and whose parameters count steps.

    late: how many reports stay behind, as on a GPU. bad: losses by step. events: all that was asked of it. at_step:
    called in every step with its number.
    """

    def __init__(self, late: int = 0, micro_steps: int = 1, first: int = 0):
        self.shape = Shape(MODEL, 2, 8, "fp32", micro_steps)
        self.late, self.next = late, first
        self.bad: dict[int, float] = {}
        self.skipped: set[int] = set()
        self.events: list[str] = []
        self.batches: list[np.ndarray[Any, Any]] = []
        self.at_step: Callable[[int], None] = lambda step: None
        self._reports: deque[int] = deque()

    def step(self, batches: Iterable[tuple[Any, Any]]) -> None:
        given = list(batches)
        assert len(given) == self.shape.micro_steps
        self.batches += [inputs for inputs, _ in given]
        self.events.append(f"step {self.next}")
        self._reports.append(self.next)
        self.at_step(self.next)
        self.next += 1

    @property
    def pending(self) -> int:
        return len(self._reports)

    def report(self) -> Report:
        step = self._reports.popleft()
        self.events.append(f"report {step}")
        loss = self.bad.get(step, 5.0 - step / 100)
        return Report(step, loss, 2.0, 1e-3, 0.5, 0.1, 0.2, step in self.skipped)

    def losses(self, inputs: Any, targets: Any) -> Any:
        assert not self._reports, "a report would be of other work than it seems"
        self.events.append("losses")
        return np.full(inputs.shape, 4.0, np.float32)

    def logits(self, inputs: Any, position: int) -> Any:
        assert not self._reports
        self.events.append(f"logits {position}")
        return np.where(np.arange(MODEL.vocab) == ord("x"), 0.0, -100.0).astype(np.float32)

    def state(self) -> State:
        assert not self._reports
        self.events.append(f"state {self.next}")
        state = fresh_state(initial_weights(MODEL, 1), "fp32")
        state.params["lnfb"] = np.full(2, self.next * STEP_WEIGHT, np.float32)
        state.m = state.v = {name: np.zeros_like(values) for name, values in state.params.items()}
        state.step, state.filled = self.next, self.next
        return state


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return open_data(None, None, MODEL, batch=2, seq=8, note=lambda text: None)


class Made:
    """A loop, and what it said."""

    def __init__(self, dataset: Dataset, trainer: FakeTrainer, folder: Path | None = None, **more: Any):
        self.trainer, self.said = trainer, list[str]()
        first = more.pop("first", 0)
        others = {name: more.pop(name) for name in ("log", "hellaswag", "gemm_tflops", "memory") if name in more}
        self.loop = Loop(
            cast(Trainer, trainer), dataset, Batches(dataset.train, 2, 8, shuffle_seed=3), Schedule(**more),
            self._say, folder=folder, document={"options": {"seed": 3}}, first=first, **others,
        )  # fmt: skip

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.trainer.events.append(f"say {text.split()[0]}")

    def run(self) -> Outcome:
        return self.loop.run()

    @property
    def order(self) -> list[str]:
        return self.trainer.events


# ---------------------------------------------------------------------------------------------- order


def test_what_comes_before_which_step(dataset: Dataset, tmp_path: Path) -> None:
    made = Made(
        dataset, FakeTrainer(), tmp_path, steps=5, val_every=2, val_batches=1, sample_every=3, sample_length=1,
        checkpoint_every=2,
    )  # fmt: skip
    outcome = made.run()

    def steps(*numbers: int) -> list[str]:
        return [event for n in numbers for event in (f"step {n}", f"report {n}", "say step")]

    validation, sample = ["losses", "say validation"], ["logits 0", "say sample:"]
    assert made.order == [
        *validation, *steps(0, 1), *validation, "state 2", "say checkpoint", *steps(2), *sample, *steps(3),
        *validation, "state 4", "say checkpoint", *steps(4), *validation, *sample, "state 5", "say checkpoint",
    ]  # fmt: skip
    assert [step for step, _ in outcome.validation] == [0, 2, 4, 5]
    assert [step for step, _ in outcome.samples] == [3, 5]
    assert checkpoint_steps(tmp_path) == [2, 4, 5]
    assert outcome.step == 5 and outcome.stopped == "" and outcome.checkpoint == str(tmp_path)
    assert outcome.losses == [5.0, 4.99, 4.98, 4.97, 4.96] and outcome.norms == [2.0] * 5


def test_zero_is_never_and_the_last_step_is_kept_all_the_same(dataset: Dataset, tmp_path: Path) -> None:
    made = Made(dataset, FakeTrainer(), tmp_path, steps=2, val_every=0)
    made.run()
    assert [e for e in made.order if not e.startswith("say")] == ["step 0", "report 0", "step 1", "report 1", "state 2"]
    assert checkpoint_steps(tmp_path) == [2]
    nothing = Made(dataset, FakeTrainer(), steps=2, val_every=0)
    nothing.run()
    assert "state 2" not in nothing.order, "without a folder nothing is read back"


def test_a_run_of_no_steps_validates_and_keeps_where_it_begins(dataset: Dataset, tmp_path: Path) -> None:
    outcome = Made(dataset, FakeTrainer(), tmp_path, steps=0, val_batches=1).run()
    assert outcome.validation == [(0, 4.0)] and outcome.losses == []
    assert checkpoint_steps(tmp_path) == [0]


def test_old_checkpoints_go_but_for_major_ones(dataset: Dataset, tmp_path: Path) -> None:
    Made(dataset, FakeTrainer(), tmp_path, steps=7, val_every=0, checkpoint_every=1, keep=2, major=3).run()
    assert checkpoint_steps(tmp_path) == [3, 6, 7]


def test_validation_takes_as_many_batches_as_asked_for_or_all_that_there_are(dataset: Dataset) -> None:
    there = (dataset.val.count - 1) // 16
    for asked, taken in ((3, 3), (0, there), (there + 50, there)):
        made = Made(dataset, FakeTrainer(), steps=0, val_batches=asked)
        made.run()
        assert made.order.count("losses") == taken
        assert made.said == [f"validation loss 4.0000 ({taken} batches)"]
    made = Made(dataset, FakeTrainer(), steps=0, val_batches=1)
    made.run()
    assert made.said == ["validation loss 4.0000 (1 batch)"]


def test_a_sample_is_as_long_as_asked_for(dataset: Dataset) -> None:
    made = Made(dataset, FakeTrainer(), steps=1, val_every=0, sample_every=1, sample_length=12, temperature=0.0)
    assert made.run().samples == [(1, "x" * 12)]
    # Past the sequence the model sees the end of the text: the last place.
    assert [e for e in made.order if e.startswith("logits")] == [f"logits {min(n, 7)}" for n in range(12)]


class Questions:
    """Two questions of a multiple-choice test, one answered right."""

    examples = ("a", "b")

    def batches(self, batch: int, seq: int) -> Iterator[Any]:
        shape = np.zeros((batch, seq), np.int32)
        yield SimpleNamespace(inputs=shape, targets=shape, correct=lambda losses: 1)


def test_questions_are_asked_at_validations_but_the_first(dataset: Dataset) -> None:
    questions = cast(HellaSwag, Questions())
    outcome = Made(dataset, FakeTrainer(), steps=3, val_every=2, val_batches=1, hellaswag=questions).run()
    assert outcome.accuracy == [(2, 0.5), (3, 0.5)]


# ---------------------------------------------------------------------------------------------- batches


def test_every_micro_step_gets_a_batch_of_its_own(dataset: Dataset) -> None:
    trainer = FakeTrainer(micro_steps=3)
    Made(dataset, trainer, steps=2, val_every=0).run()
    right = Batches(dataset.train, 2, 8, shuffle_seed=3)
    assert len(trainer.batches) == 6
    assert all(np.array_equal(found, next(right)[0]) for found in trainer.batches)


def test_overfitting_sees_the_same_batches_at_every_step(dataset: Dataset) -> None:
    trainer = FakeTrainer(micro_steps=2)
    Made(dataset, trainer, steps=3, val_every=0, overfit=True).run()
    assert all(np.array_equal(trainer.batches[i], trainer.batches[i % 2]) for i in range(6))
    assert not np.array_equal(trainer.batches[0], trainer.batches[1])


# ---------------------------------------------------------------------------------------------- late reports


def test_on_a_gpu_reports_are_read_one_step_late_and_none_is_lost(dataset: Dataset) -> None:
    made = Made(dataset, FakeTrainer(late=1), steps=5, val_every=3, val_batches=1)
    outcome = made.run()
    assert [e for e in made.order if not e.startswith("say")] == [
        "losses", "step 0", "step 1", "report 0", "step 2", "report 1", "report 2", "losses",
        "step 3", "step 4", "report 3", "report 4", "losses",
    ]  # fmt: skip
    assert len(outcome.losses) == 5 and outcome.step == 5


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_loss_that_is_not_finite_ends_the_run_and_names_its_step(
    dataset: Dataset, tmp_path: Path, late: int, bad: float
) -> None:
    trainer = FakeTrainer(late)
    trainer.bad = {2: bad, 3: 1.0}
    folder = tmp_path / "out"
    with TrainLog(folder, {}) as log:
        made = Made(dataset, trainer, folder, steps=9, val_every=0, checkpoint_every=2, log=log)
        with pytest.raises(WrongResult) as caught:
            made.run()
    assert caught.value.message == f"step 3: the loss is {bad:g} and the norm of the gradients 2"
    assert caught.value.hint.startswith("a lower --lr or more --warmup may help")
    assert f"the checkpoint of step 2 in {folder} is from before" in caught.value.hint
    assert caught.value.exit_status == Exit.WRONG
    assert trainer.next == 3 + late, "no step more than was queued already"
    assert checkpoint_steps(folder) == [2], "what came after the last good one is not kept"
    records = read_json_log(folder / "train.jsonl").steps
    assert [record.step for record in records] == [0, 1, 2], "the log shows what was wrong"
    assert not math.isfinite(records[2].loss) and records[1].loss == 4.99


def test_a_norm_that_is_not_finite_ends_the_run_too(dataset: Dataset) -> None:
    trainer = FakeTrainer()
    real = trainer.report
    trainer.report = lambda: Report(real().step, 4.0, float("nan"), 1e-3, 0.0, 0.0, 0.0, True)
    with pytest.raises(WrongResult, match="step 1: the loss is 4 and the norm of the gradients nan; a lower --lr"):
        Made(dataset, trainer, steps=3, val_every=0).run()


def test_skipped_updates_are_counted_and_said(dataset: Dataset) -> None:
    trainer = FakeTrainer()
    trainer.skipped = {1, 2}
    made = Made(dataset, trainer, steps=4, val_every=0)
    assert made.run().skipped == 2
    assert [line.endswith("update skipped: an outlier") for line in made.said] == [False, True, True, False]


# ---------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("late", [0, 1])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    dataset: Dataset, tmp_path: Path, number: signal.Signals, late: int
) -> None:
    trainer = FakeTrainer(late)
    trainer.at_step = lambda step: os.kill(os.getpid(), number) if step == 2 else None
    before = signal.getsignal(number)
    with TrainLog(tmp_path, {}) as log:
        outcome = Made(dataset, trainer, tmp_path, steps=9, val_every=0, log=log).run()
    assert outcome.stopped == number.name and outcome.step == 3
    assert checkpoint_steps(tmp_path) == [3]
    assert len(outcome.losses) == 3, "the report of the last step is there"
    assert [record.step for record in read_json_log(tmp_path / "train.jsonl").steps] == [0, 1, 2]
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.state.params["lnfb"][0] == 3 * STEP_WEIGHT
    assert checkpoint.document["data"]["drawn"] == 3 and checkpoint.document["filled"] == 3
    assert signal.getsignal(number) is before


def test_a_signal_before_the_first_step_keeps_where_the_run_begins(dataset: Dataset, tmp_path: Path) -> None:
    trainer = FakeTrainer()
    real = trainer.losses

    def losses(inputs: Any, targets: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(inputs, targets)

    trainer.losses = losses
    outcome = Made(dataset, trainer, tmp_path, steps=9, val_batches=1).run()
    assert (outcome.step, outcome.stopped, outcome.losses) == (0, "SIGTERM", [])
    assert checkpoint_steps(tmp_path) == [0]


def test_a_second_signal_ends_it_at_once(dataset: Dataset, tmp_path: Path) -> None:
    trainer = FakeTrainer()
    trainer.at_step = lambda step: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)] and None
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Made(dataset, trainer, tmp_path, steps=9, val_every=0).run()
    assert checkpoint_steps(tmp_path) == [] and signal.getsignal(signal.SIGINT) is before


def test_a_signal_while_a_checkpoint_is_written_needs_no_other(dataset: Dataset, tmp_path: Path) -> None:
    trainer = FakeTrainer()
    real = trainer.state

    def state() -> State:
        if "state 3" not in trainer.events:
            os.kill(os.getpid(), signal.SIGTERM)
        return real()

    trainer.state = state
    outcome = Made(dataset, trainer, tmp_path, steps=9, val_every=0, checkpoint_every=3).run()
    assert (outcome.step, outcome.stopped, trainer.next) == (3, "SIGTERM", 3)
    assert checkpoint_steps(tmp_path) == [3] and trainer.events.count("state 3") == 1


# ---------------------------------------------------------------------------------------------- going on


def test_a_run_that_goes_on_does_what_an_unbroken_one_would(dataset: Dataset, tmp_path: Path) -> None:
    plan = {"steps": 8, "val_every": 4, "val_batches": 1, "sample_every": 2, "sample_length": 3, "checkpoint_every": 4}
    folders = [tmp_path / name for name in ("unbroken", "broken")]
    with TrainLog(folders[0], {}) as log:
        Made(dataset, FakeTrainer(), folders[0], log=log, **plan).run()
    with TrainLog(folders[1], {}) as log:
        Made(dataset, FakeTrainer(), folders[1], log=log, **{**plan, "steps": 4}).run()
    again = Made(dataset, FakeTrainer(first=4), folders[1], first=4, **plan)
    again.loop.batches.seek(load_checkpoint(folders[1]).document["data"])
    with TrainLog(folders[1], {}, resume_step=4) as log:
        again.loop.log = log
        outcome = again.run()
    assert outcome.losses == [4.96, 4.95, 4.94, 4.93]
    assert again.order[0] == "losses", "what an unbroken run does before step 4"
    assert "state 4" not in again.order, "that checkpoint is on the disk already"
    logs = [(folder / "main.log").read_text() for folder in folders]
    assert logs[0] == logs[1] and len(read_main_log(folders[1] / "main.log").steps) == 8
    histories = [read_json_log(folder / "train.jsonl") for folder in folders]
    assert histories[0].validation == histories[1].validation and histories[0].samples == histories[1].samples
    positions = [load_checkpoint(folder).document["data"] for folder in folders]
    assert positions[0] == positions[1]


def test_a_run_that_cannot_keep_its_checkpoint_says_so_and_leaves_the_one_before(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise CannotRunError("cannot write model: No space left on device")

    trainer = FakeTrainer()
    trainer.at_step = lambda step: monkeypatch.setattr(module, "save_checkpoint", full) if step == 3 else None
    with pytest.raises(CannotRunError, match="No space left"):
        Made(dataset, trainer, tmp_path, steps=9, val_every=0, checkpoint_every=2).run()
    assert checkpoint_steps(tmp_path) == [2]


# ---------------------------------------------------------------------------------------------- speed


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_tokens_per_second_are_of_steps_alone(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step after anything else is warming up, and what lies between steps does not count."""
    clock = Clock(monkeypatch)
    trainer = FakeTrainer(micro_steps=3)
    took = {0: 9.0, 1: 0.5, 2: 0.5, 3: 7.0, 4: 0.25, 5: 0.25}
    trainer.at_step = lambda step: clock.advance(took[step])
    real = trainer.losses

    def losses(inputs: Any, targets: Any) -> Any:
        clock.advance(1000.0)
        return real(inputs, targets)

    trainer.losses = losses
    made = Made(dataset, trainer, steps=6, val_every=3, val_batches=1)
    with TrainLog(tmp_path, {}) as log:
        made.loop.log = log
        made.run()
    tokens = 2 * 8 * 3
    records = read_json_log(tmp_path / "train.jsonl").steps
    assert [record.ms for record in records] == pytest.approx([9000.0, 500.0, 500.0, 7000.0, 250.0, 250.0])
    rates = [record.tokens_per_s for record in records]
    assert rates[0] is None and rates[1] == rates[2] == rates[3] == pytest.approx(tokens / 0.5)
    # The mean forgets slowly: two of 0.5 s, weighted 0.95 and 0.95^2, and one of 0.25 s.
    mean = (0.5 * (0.95**2 + 0.95) + 0.25) / (0.95**2 + 0.95 + 1.0)
    assert rates[4] == pytest.approx(tokens / mean)
    assert made.said[1].split("  ")[4:] == ["9,000.0 ms"] and made.said[2].split("  ")[4:] == ["500.0 ms", "96 tok/s"]


def test_the_share_of_the_cards_arithmetic(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    trainer = FakeTrainer()
    trainer.at_step = lambda step: clock.advance(2.0)
    made = Made(dataset, trainer, steps=2, val_every=0, gemm_tflops=1e-9, memory=123)
    outcome = made.run()
    assert outcome.tokens_per_s == pytest.approx(8.0)
    assert outcome.mfu == pytest.approx(8.0 * MODEL.flops_per_token(8) / 1e3)
    assert made.said[-1].endswith("MFU")
    assert Made(dataset, trainer, steps=2, val_every=0).run().mfu is None


def test_a_line_for_people(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    trainer = FakeTrainer()
    trainer.at_step = lambda step: clock.advance(0.0125)
    made = Made(dataset, trainer, steps=10, val_every=0)
    made.run()
    assert made.said[0] == "step  1/10  loss 5.0000  norm 2.000  lr 1.00e-03  12.5 ms"
    assert made.said[9] == "step 10/10  loss 4.9100  norm 2.000  lr 1.00e-03  12.5 ms  1,280 tok/s"


def test_the_log_has_every_number(dataset: Dataset, tmp_path: Path) -> None:
    with TrainLog(tmp_path, {}) as log:
        Made(dataset, FakeTrainer(), tmp_path, steps=2, val_batches=1, log=log, memory=77).run()
    history = read_json_log(tmp_path / "train.jsonl")
    record = history.steps[1]
    assert (record.step, record.loss, record.norm, record.rate, record.scale) == (1, 4.99, 2.0, 1e-3, 0.5)
    assert (record.loss_z, record.norm_z, record.skipped, record.memory) == (0.1, 0.2, False, 77)
    assert record.ms is not None and history.validation == [(0, 4.0), (2, 4.0)]
    assert (tmp_path / "main.log").read_text().splitlines() == [
        "s:0 tel:4.0000", "s:0 trl:5.0000 lr:0.001000 norm:2.00", "s:1 trl:4.9900 lr:0.001000 norm:2.00",
        "s:2 tel:4.0000",
    ]  # fmt: skip


def test_a_run_that_goes_on_in_another_folder_keeps_a_checkpoint_there(dataset: Dataset, tmp_path: Path) -> None:
    """Without one, a run that is stopped before its first step could not be resumed from where it says."""
    Made(dataset, FakeTrainer(first=4), tmp_path, first=4, steps=4, val_every=0).run()
    assert checkpoint_steps(tmp_path) == [4]
    again = Made(dataset, FakeTrainer(first=4), tmp_path, first=4, steps=4, val_every=0)
    again.run()
    assert not any(event.startswith("state") for event in again.order), "it is there already"


def test_a_sample_reads_the_logits_after_its_last_token(dataset: Dataset) -> None:
    made = Made(dataset, FakeTrainer(), steps=1, val_every=0, sample_every=1, sample_length=3)
    made.run()
    assert [event for event in made.order if event.startswith("logits")] == ["logits 0", "logits 1", "logits 2"]
