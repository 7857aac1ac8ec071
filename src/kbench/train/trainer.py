"""Steps of training on a device: batches in, reports out, and the state that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kbench.device.dtypes import numpy_dtype
from kbench.family import Array
from kbench.train.engine import Engine
from kbench.train.feed import CudaFeed, DirectFeed, Feed
from kbench.train.layout import Layout
from kbench.train.optimizer import BETA1, BETA2, EPSILON
from kbench.train.program import Action
from kbench.train.slots import OUTLIER_WINDOW, Shape

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice


@dataclass(frozen=True)
class Settings:
    """What stays the same over a run. rates: the learning rate of every step. clip: the largest norm of all gradients,
    0 for no limit. skip_loss_z, skip_norm_z: z-scores beyond which an update is skipped, 0 for never. seed: of
    stochastic rounding."""

    rates: Sequence[float]
    weight_decay: float = 0.0
    clip: float = 1.0
    skip_loss_z: float = 0.0
    skip_norm_z: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """What the device says of one step. skipped: it left the parameters alone."""

    step: int
    loss: float
    norm: float
    rate: float
    scale: float
    loss_z: float
    norm_z: float
    skipped: bool

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm))


@dataclass
class State:
    """All that a step changes, as arrays on the host. params: as stored (float32 or bfloat16), one array per parameter.
    m, v: None before the first step, where they are 0. master: None in fp32. window, filled: of the outlier test."""

    step: int
    params: dict[str, Array]
    m: dict[str, Array] | None
    v: dict[str, Array] | None
    master: dict[str, Array] | None
    window: Array
    filled: int


def fresh_state(weights: dict[str, Array], storage: str) -> State:
    """The state before the first step. weights: float32; parameters are rounded to nearest."""
    params = {name: values.astype(numpy_dtype(storage)) for name, values in weights.items()}
    master = None if storage == "fp32" else weights
    return State(0, params, None, None, master, np.zeros((2, OUTLIER_WINDOW), np.float32), 0)


class Trainer:
    """A training step on a device, ready to run."""

    def __init__(self, engine: Engine, shape: Shape, settings: Settings):
        self.engine, self.shape, self.settings = engine, shape, settings
        self.layout = Layout(shape.model)
        program = engine.program
        self._programs: dict[str, tuple[Action, ...]] = {
            "logits": (*program.forward, *program.logits),
            "losses": (*program.forward, *program.losses),
            "first": (*program.forward, *program.first),
            "later": (*program.forward, *program.later),
            "update": program.update,
        }
        self._graphs: dict[str, Any] = {}
        self.feed: Feed = CudaFeed(engine) if self._on_gpu else DirectFeed(engine)

    @property
    def _on_gpu(self) -> bool:
        return self.engine.device.kind == "cuda"

    # ------------------------------------------------------------------------------------------ state

    def load(self, state: State) -> None:
        """Set parameters, moments and counters, and what a run keeps."""
        engine, layout, fp32 = self.engine, self.layout, np.dtype(np.float32)
        engine.fill("params", layout.pack(state.params, numpy_dtype(self.shape.storage)))
        for name, moment in (("m", state.m), ("v", state.v)):
            if moment is None:
                engine.clear(name)
            else:
                engine.fill(name, layout.pack(moment, fp32))
        if state.master is not None:
            engine.fill("master", layout.pack(state.master, fp32))
        engine.clear("grads")  # what lies between parameters is never written
        engine.fill("decays", layout.decays(self.settings.weight_decay))
        engine.fill("window", state.window)
        engine.fill("filled", np.array([state.filled], np.uint32))
        engine.fill("step", np.array([state.step, self.settings.seed], np.uint32))
        engine.fill("schedule", _schedule(self.settings.rates, self.shape.schedule_rows))
        weight = 1.0 / (self.shape.batch * self.shape.seq * self.shape.micro_steps)
        settings = self.settings
        numbers = (weight, settings.clip, settings.skip_loss_z, settings.skip_norm_z, BETA1, BETA2, EPSILON, 0.0)
        engine.fill("settings", np.array(numbers, np.float32))
        engine.fill("dlosses", np.full((self.shape.batch, self.shape.seq), weight, np.float32))

    def state(self) -> State:
        """Everything back from the device, after all that was queued."""
        engine, unpack = self.engine, self.layout.unpack
        master = unpack(engine.fetch("master")) if "master" in engine.buffers else None
        return State(
            step=int(engine.fetch("step")[0]),
            params=unpack(engine.fetch("params")),
            m=unpack(engine.fetch("m")),
            v=unpack(engine.fetch("v")),
            master=master,
            window=engine.fetch("window"),
            filled=int(engine.fetch("filled")[0]),
        )

    def gradients(self) -> dict[str, Array]:
        """Of the micro-steps since the last update began, one array per parameter, as stored."""
        return self.layout.unpack(self.engine.fetch("grads"))

    # ------------------------------------------------------------------------------------------ steps

    def gradient(self, batches: Iterable[tuple[Array, Array]]) -> None:
        """Queue forward and backward passes: one micro-step for each batch."""
        for number, (inputs, targets) in enumerate(batches):
            self.feed.put(inputs, targets)
            self._run("later" if number else "first")

    def step(self, batches: Iterable[tuple[Array, Array]]) -> None:
        """Queue a whole step. Its report comes from `report`, which may be called one step late."""
        self.gradient(batches)
        self._run("update")
        self.feed.ask()

    @property
    def late(self) -> int:
        """How many steps a report may come late so that the device need not wait for the host."""
        return 1 if self._on_gpu else 0

    @property
    def pending(self) -> int:
        """Steps that were queued and whose report was not read."""
        return self.feed.asked

    def report(self) -> Report:
        """Of the oldest step whose report was not read; waits for it."""
        loss, norm, rate, scale, loss_z, norm_z, step, skipped = (float(value) for value in self.feed.answer())
        return Report(int(step), loss, norm, rate, scale, loss_z, norm_z, bool(skipped))

    def losses(self, inputs: Array, targets: Array) -> Array:
        """The loss of every token, fp32 (B, T); changes nothing that training keeps."""
        self.feed.put(inputs, targets)
        self._run("losses")
        return self.engine.fetch("losses")

    def logits(self, inputs: Array, position: int) -> Array:
        """Logits of the token after `position` of the batch's first row, float32 (V,)."""
        self.feed.put(inputs, np.zeros_like(inputs))
        self._run("logits")
        return self._row_of_logits(position)[: self.shape.model.vocab].astype(np.float32)

    def measure(self, name: str, repeats: int, now: Callable[[], float]) -> float:
        """Seconds of one run of a part ("first", "later", "update", "losses"), on what the device holds."""
        self._run(name)
        self.engine.device.synchronize()
        start = now()
        for _ in range(repeats):
            self._run(name)
        self.engine.device.synchronize()
        return (now() - start) / repeats

    def _run(self, name: str) -> None:
        if not self._on_gpu:
            self.engine.run(self._programs[name])
            return
        device = cast("CudaDevice", self.engine.device)
        if name not in self._graphs:
            self._graphs[name] = device.capture(*self.engine.bounds(self._programs[name]))
        with device.activate():
            self._graphs[name].launch(device.stream)

    def _row_of_logits(self, position: int) -> Array:
        buffer = self.engine.buffers["logits"]
        padded = self.shape.model.padded_vocab
        start = position * padded
        if not self._on_gpu:
            return buffer.array.reshape(-1)[start : start + padded].copy()
        from kbench.device.cuda.memory import copy_out

        device = cast("CudaDevice", self.engine.device)
        values = np.empty(padded, numpy_dtype(buffer.tensor.dtype))
        with device.activate():
            copy_out(buffer.address + start * values.itemsize, values, device.stream)
        return values


def _schedule(rates: Sequence[float], rows: int) -> Array:
    """fp32 (rows, 3): learning rate and AdamW's bias corrections 1 - beta^t of each step, t counting from 1. Rows past
    the last step have the rate 0."""
    t = np.arange(1, rows + 1, dtype=np.float64)
    padded = np.zeros(rows)
    padded[: len(rates)] = rates
    return np.stack([padded, 1.0 - BETA1**t, 1.0 - BETA2**t], axis=1).astype(np.float32)
