"""The training loop: what happens before which step, what is said and written, and how a run ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kbench.errors import WrongResult
from kbench.family import Array
from kbench.train.batches import Batches
from kbench.train.checkpoint import TrainState, checkpoint_steps, save_checkpoint
from kbench.train.dataset import Dataset
from kbench.train.hellaswag import HellaSwag
from kbench.train.log import StepRecord, TrainLog
from kbench.train.sampling import generate
from kbench.train.state_file import OptimizerState
from kbench.train.trainer import Report, Trainer

# Weight of the past in the shown tokens per second: the mean of about twenty steps.
_MEMORY = 0.95


@dataclass(frozen=True)
class Schedule:
    """When the loop does what, in steps; 0 is never. val_batches: 0 for the whole validation split.

    Validation also comes before the first step and after the last; samples and checkpoints after the last.
    """

    steps: int
    val_every: int = 20
    val_batches: int = 20
    sample_every: int = 0
    sample_length: int = 64
    temperature: float = 1.0
    checkpoint_every: int = 0
    keep: int = 0
    major: int = 0
    overfit: bool = False


@dataclass
class Outcome:
    """What became of a run. step: the next one to do. stopped: the signal that ended it early, if any."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)
    skipped: int = 0
    ms: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    checkpoint: str = ""
    stopped: str = ""


@dataclass
class Loop:
    """A run on a trainer whose state is loaded.

    batches: where training data come from, at the right place. folder, log: None keeps nothing on disk.
    document: what a checkpoint holds besides tensors and the place in the data. gemm_tflops: what the card multiplies
    at most in the run's dtype, None where unknown. memory: bytes of device memory. say: takes a line for people.
    """

    trainer: Trainer
    dataset: Dataset
    batches: Batches
    schedule: Schedule
    say: Callable[[str], None]
    folder: Path | None = None
    log: TrainLog | None = None
    document: Mapping[str, Any] = field(default_factory=dict)
    hellaswag: HellaSwag | None = None
    gemm_tflops: float | None = None
    memory: int | None = None
    first: int = 0

    def run(self) -> Outcome:
        """Train to the end, or until a signal. Raises WrongResult at the first loss or norm that is not finite."""
        self._outcome = Outcome(step=self.first)
        self._rate = _Rate()
        # What was resumed from is on the disk already, unless this folder is another one.
        on_disk = self.folder is not None and self.first in checkpoint_steps(self.folder)
        self._saved = self.first if on_disk else -1
        with _signals() as received:
            for step in range(self.first, self.schedule.steps + 1):
                if received:
                    break
                if self._due(step):
                    self._drain()
                    self._before(step)
                    self._rate.pause()
                if step < self.schedule.steps and not received:
                    self._step(step)
        self._drain()
        if received:
            self._outcome.stopped = received[0]
            self._save(self._outcome.step)
        return self._outcome

    # ------------------------------------------------------------------------------------------ steps

    def _step(self, step: int) -> None:
        if self.schedule.overfit:
            self.batches.rewind()
        self.trainer.step(next(self.batches) for _ in range(self.trainer.shape.micro_steps))
        self._outcome.step = step + 1
        while self.trainer.pending > self.trainer.late:  # the report of the step before, while this one runs
            self._took(self.trainer.report())

    def _drain(self) -> None:
        while self.trainer.pending:
            self._took(self.trainer.report())

    def _took(self, report: Report) -> None:
        seconds = self._rate.tick()
        if not report.finite:
            if self.log is not None:
                self.log.step(self._record(report))
            self._outcome.step = report.step
            raise WrongResult(
                f"step {report.step + 1}: the loss is {report.loss:g} and the norm of the gradients {report.norm:g}",
                "a lower --lr or more --warmup may help" + self._last_good(),
            )
        outcome, shape = self._outcome, self.trainer.shape
        outcome.losses.append(report.loss)
        outcome.norms.append(report.norm)
        outcome.skipped += report.skipped
        tokens = shape.batch * shape.seq * shape.micro_steps
        outcome.ms = None if seconds is None else seconds * 1e3
        mean = self._rate.mean
        outcome.tokens_per_s = None if mean is None else tokens / mean
        outcome.mfu = self._mfu(outcome.tokens_per_s)
        if self.log is not None:
            self.log.step(self._record(report))
        self.say(self._line(report))

    def _record(self, report: Report) -> StepRecord:
        outcome = self._outcome
        return StepRecord(
            step=report.step, loss=report.loss, norm=report.norm, rate=report.rate, scale=report.scale,
            skipped=report.skipped, ms=outcome.ms, tokens_per_s=outcome.tokens_per_s, loss_z=report.loss_z,
            norm_z=report.norm_z, mfu=outcome.mfu, memory=self.memory,
        )  # fmt: skip

    def _line(self, report: Report) -> str:
        outcome, digits = self._outcome, len(str(self.schedule.steps))
        parts = [
            f"step {report.step + 1:{digits}d}/{self.schedule.steps}",
            f"loss {report.loss:.4f}",
            f"norm {report.norm:.3f}",
            f"lr {report.rate:.2e}",
        ]
        if outcome.ms is not None:
            parts.append(f"{outcome.ms:,.1f} ms")
        if outcome.tokens_per_s is not None:
            parts.append(f"{outcome.tokens_per_s:,.0f} tok/s")
        if outcome.mfu is not None:
            parts.append(f"{outcome.mfu:.1%} MFU")
        if report.skipped:
            parts.append("update skipped: an outlier")
        return "  ".join(parts)

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        """Of the arithmetic that the card was measured to do, what the model needs at least."""
        if tokens_per_s is None or not self.gemm_tflops:
            return None
        shape = self.trainer.shape
        return tokens_per_s * shape.model.flops_per_token(shape.seq) / (self.gemm_tflops * 1e12)

    # ------------------------------------------------------------------------------------------ between steps

    def _due(self, step: int) -> bool:
        """Whether something comes before this step."""
        plan = self.schedule
        every = (plan.val_every, plan.sample_every, plan.checkpoint_every)
        return step in (self.first, plan.steps) or any(n and step % n == 0 for n in every)

    def _before(self, step: int) -> None:
        plan = self.schedule
        last = step == plan.steps
        if plan.val_every and (last or step % plan.val_every == 0):
            self._validate(step)
            if self.hellaswag is not None and step:
                self._evaluate(step)
        if plan.sample_every and step and (last or step % plan.sample_every == 0):
            self._sample(step)
        if last or (plan.checkpoint_every and step and step % plan.checkpoint_every == 0):
            self._save(step)

    def _validate(self, step: int) -> None:
        shape = self.trainer.shape
        batches = Batches(self.dataset.val, shape.batch, shape.seq, shuffle_seed=None)
        count = min(self.schedule.val_batches or batches.batches_per_epoch, batches.batches_per_epoch)
        means = [float(self.trainer.losses(*next(batches)).mean(dtype=np.float64)) for _ in range(count)]
        loss = sum(means) / len(means)
        self._outcome.validation.append((step, loss))
        if self.log is not None:
            self.log.validation(step, loss)
        self.say(f"validation loss {loss:.4f} ({count} {'batch' if count == 1 else 'batches'})")

    def _evaluate(self, step: int) -> None:
        assert self.hellaswag is not None
        shape = self.trainer.shape
        right = 0
        for batch in self.hellaswag.batches(shape.batch, shape.seq):
            right += batch.correct(self.trainer.losses(batch.inputs, batch.targets))
        accuracy = right / len(self.hellaswag.examples)
        self._outcome.accuracy.append((step, accuracy))
        if self.log is not None:
            self.log.evaluation(step, accuracy)
        self.say(f"HellaSwag accuracy {accuracy:.4f} ({right} of {len(self.hellaswag.examples)})")

    def _sample(self, step: int) -> None:
        shape, start = self.trainer.shape, [self.dataset.tokenizer.start]
        ids = generate(
            self._logits_after, start, self.schedule.sample_length, vocab=shape.model.vocab, context=shape.seq,
            temperature=self.schedule.temperature,
        )  # fmt: skip
        text = self.dataset.decode(ids)
        self._outcome.samples.append((step, text))
        if self.log is not None:
            self.log.sample(step, text)
        self.say(f"sample: {text!r}")

    def _logits_after(self, ids: Array) -> Array:
        shape = self.trainer.shape
        inputs = np.zeros((shape.batch, shape.seq), np.int32)  # causal: what follows the text changes nothing
        inputs[0, : len(ids)] = ids
        return self.trainer.logits(inputs, len(ids) - 1)

    # ------------------------------------------------------------------------------------------ checkpoints

    def _save(self, step: int) -> None:
        if self.folder is None or step == self._saved:
            return
        state = self.trainer.state()
        document = {
            **self.document,
            "data": self.batches.position(),
            "window": [[float(value) for value in row] for row in state.window],
            "filled": state.filled,
        }
        assert state.m is not None and state.v is not None  # None stands for zeros only before a run
        tensors = TrainState(self.trainer.shape.model, state.params, OptimizerState(state.m, state.v, state.master))
        save_checkpoint(self.folder, step, tensors, document, keep=self.schedule.keep, major=self.schedule.major)
        self._saved = step
        self._outcome.checkpoint = str(self.folder)
        self.say(f"checkpoint of step {step} in {self.folder}")

    def _last_good(self) -> str:
        if self.folder is None or self._saved < 0:
            return ""
        return f"; the checkpoint of step {self._saved} in {self.folder} is from before"


class _Rate:
    """Seconds per step, from the arrival of reports."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._fresh = True
        self._sum = self._weight = 0.0

    def pause(self) -> None:
        """What comes now is not training: the next step is timed from its own start."""
        self._last = time.perf_counter()
        self._fresh = True

    def tick(self) -> float | None:
        """Seconds since the report before."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        fresh, self._fresh = self._fresh, False
        if not fresh:  # the first after a pause also waited for the GPU to get going, or captured graphs
            self._sum = _MEMORY * self._sum + (1.0 - _MEMORY) * seconds
            self._weight = _MEMORY * self._weight + (1.0 - _MEMORY)
        return seconds

    @property
    def mean(self) -> float | None:
        """Weighted towards the last steps; None before the second step."""
        return self._sum / self._weight if self._weight else None


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Names of the signals that asked the run to end, which it does after a step; a second one ends it at once."""
    received: list[str] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
