"""A training run from its options: input opened and checked first, then kernels chosen, memory planned, steps done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from kbench.device.base import Device
from kbench.errors import UsageError
from kbench.family import Array
from kbench.train.batches import Batches
from kbench.train.checkpoint import Checkpoint, load_checkpoint, prepare_folder
from kbench.train.chooser import parse_use
from kbench.train.dataset import Dataset, open_data
from kbench.train.hellaswag import HellaSwag, read_hellaswag
from kbench.train.log import TrainLog
from kbench.train.loop import Loop, Outcome, Schedule
from kbench.train.model import Model
from kbench.train.options import TrainOptions, require_valid
from kbench.train.schedule import rates
from kbench.train.setup import Chosen, Kernels, Workshop
from kbench.train.slots import OUTLIER_WINDOW, Shape
from kbench.train.state_file import OptimizerState
from kbench.train.trainer import Settings, State, Trainer, fresh_state
from kbench.train.weights import load_weights

Say = Callable[[str], None]
# Of one batch: the smallest GPT-2 keeps 300 kB for each of them, so that these would take tens of terabytes.
MOST_TOKENS = 1 << 26


@dataclass
class Inputs:
    """All that a run reads, opened and found sound, before a device is touched. options: with nothing left open but
    recompute. state: where the run begins. position: in the data, of a run that goes on. kernels: of such a run."""

    options: TrainOptions
    model: Model
    dataset: Dataset
    hellaswag: HellaSwag | None
    state: State
    position: Mapping[str, Any] | None
    weights: str
    kernels: Kernels | None = None

    @property
    def shape(self) -> Shape:
        options = self.options
        assert options.seq is not None and options.dtype is not None and options.steps is not None
        return Shape(
            self.model, options.batch, options.seq, options.dtype, options.micro_steps, steps=max(options.steps, 1)
        )

    @property
    def settings(self) -> Settings:
        options = self.options
        table = _rates(options)
        return Settings(
            rates=[float(rate) for rate in table] or [0.0],
            weight_decay=options.weight_decay,
            clip=options.clip,
            skip_loss_z=options.skip_loss_z,
            skip_norm_z=options.skip_norm_z,
            seed=options.seed,
        )

    def require_possible(self) -> None:
        """Raises UsageError for a schedule that cannot be, and for a place in the data that is not there."""
        _rates(self.options)
        batches_of(self)


def _rates(options: TrainOptions) -> Array:
    """The learning rate of every step. Raises UsageError for a schedule that cannot be."""
    assert options.steps is not None
    return rates(options.schedule, options.steps, options.lr, options.warmup, options.final_fraction)


def open_inputs(options: TrainOptions, kind: str, note: Say) -> Inputs:
    """Raises UsageError for whatever is wrong with files or sizes."""
    require_valid(options)
    options = options.on(kind)
    loaded = load_weights(options.weights, options.sizes(), options.seed)
    for line in loaded.notes:
        note(line)
    model = loaded.model
    options = _with_sequence(options, model)
    assert options.seq is not None and options.dtype is not None
    storage = "fp32" if options.dtype == "tf32" else options.dtype
    state = fresh_state(loaded.weights, storage)
    return _inputs(options, model, state, None, loaded.description, note)


def open_checkpoint(folder: Path, changes: Mapping[str, Any], note: Say) -> Inputs:
    """A run that goes on where its newest checkpoint is. changes: options that may differ from the saved ones."""
    checkpoint = load_checkpoint(folder)
    document = checkpoint.document
    saved, place = (_entry(document, name, folder) for name in ("options", "data"))
    if not isinstance(saved, dict) or not isinstance(place, dict):
        raise UsageError(f"{folder}: the checkpoint's options or its place in the data are damaged")
    options = TrainOptions.from_dict(saved)
    if None in (options.seq, options.dtype, options.steps):
        raise UsageError(f"{folder}: the checkpoint's options are damaged: --seq, --dtype or --steps is missing")
    if ("bf16" if options.dtype == "bf16" else "fp32") != checkpoint.state.dtype:
        raise UsageError(
            f"{folder}: the checkpoint's options say {options.dtype}, its tensors {checkpoint.state.dtype}"
        )
    options = replace(options, **changes)
    require_valid(options)
    if options.steps is not None and options.steps < checkpoint.step:
        raise UsageError(f"--steps {options.steps}: the checkpoint in {folder} has done {checkpoint.step}")
    model = checkpoint.state.model
    state = _state(checkpoint, folder)
    inputs = _inputs(options, model, state, place, f"step {checkpoint.step} of {folder}", note)
    if "use" not in changes:
        inputs.kernels = Kernels.from_document(document)
    return inputs


def _inputs(
    options: TrainOptions, model: Model, state: State, position: Mapping[str, Any] | None, weights: str, note: Say
) -> Inputs:
    assert options.seq is not None
    if (tokens := options.batch * options.seq) > MOST_TOKENS:
        raise UsageError(
            f"--batch {options.batch} of --seq {options.seq} is {tokens} tokens: at most {MOST_TOKENS} make a batch",
            "--micro-steps adds up several batches",
        )
    dataset = open_data(options.data, options.val_data, model, batch=options.batch, seq=options.seq, note=note)
    hellaswag = read_hellaswag(Path(options.hellaswag), model.vocab) if options.hellaswag is not None else None
    if hellaswag is not None:
        hellaswag.require_fit(options.batch, options.seq)
    inputs = Inputs(options, model, dataset, hellaswag, state, position, weights)
    inputs.require_possible()
    return inputs


def _with_sequence(options: TrainOptions, model: Model) -> TrainOptions:
    seq = options.seq if options.seq is not None else min(1024, model.context)
    if seq > model.context:
        raise UsageError(f"--seq {seq}: the model's context is {model.context}", f"give at most --seq {model.context}")
    return replace(options, seq=seq)


def _state(checkpoint: Checkpoint, folder: Path) -> State:
    document, saved = checkpoint.document, checkpoint.state
    try:
        window = np.array(_entry(document, "window", folder), np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{folder}: the checkpoint's window of losses is damaged ({error})") from error
    if window.shape != (2, OUTLIER_WINDOW):
        raise UsageError(f"{folder}: the checkpoint's window of losses has the shape {window.shape}")
    optimizer = saved.optimizer
    filled = _entry(document, "filled", folder)
    if type(filled) is not int or not 0 <= filled < 1 << 32:
        raise UsageError(f"{folder}: the checkpoint's count of losses is damaged: {filled!r}")
    return State(checkpoint.step, saved.params, dict(optimizer.m), dict(optimizer.v), _copy(optimizer), window, filled)


def _copy(optimizer: OptimizerState) -> dict[str, Any] | None:
    return dict(optimizer.master) if optimizer.master is not None else None


def _entry(document: Mapping[str, Any], name: str, folder: Path) -> Any:
    if name not in document:
        raise UsageError(f"{folder}: the checkpoint has no {name!r}: it is not of a kbench run")
    return document[name]


def batches_of(inputs: Inputs) -> Batches:
    """Training data from where the run begins, shuffled with its seed."""
    options = inputs.options
    assert options.seq is not None
    seed = None if options.overfit else options.seed  # one batch over and over: the first one
    batches = Batches(inputs.dataset.train, options.batch, options.seq, shuffle_seed=seed)
    if inputs.position is not None:
        batches.seek(inputs.position)
    return batches


@dataclass
class Run:
    """A run on an open workshop. folder: where log and checkpoints go, None for nowhere."""

    workshop: Workshop
    inputs: Inputs
    folder: Path | None
    say: Say
    note: Say
    show_memory: Callable[[Chosen, int], None] = lambda chosen, needed: None
    gemm_tflops: float | None = None

    def choose(self) -> Chosen:
        """Versions for the run's shape, measured and proven."""
        options = self.inputs.options
        if (saved := self.inputs.kernels) is not None:
            chosen = self.workshop.choose_saved(self.inputs.shape, saved)
            if chosen is not None:
                return chosen
            self.note("the kernels of the checkpoint are not those of this kbench or device: choosing anew")
        wanted = parse_use(options.use, self.workshop.catalog)
        return self.workshop.choose(self.inputs.shape, wanted, options.recompute)

    def trainer(self, chosen: Chosen) -> Trainer:
        """Memory planned, shown and allocated; the state loaded."""
        engine = self.workshop.engine(chosen)
        for line in engine.notes:
            self.note(line)
        # Measured, if it was not before, while the memory is still free.
        self.gemm_tflops = gemm_rate(self.workshop.device, self.inputs.options.dtype or "", self.note)
        self.show_memory(chosen, engine.needed)
        engine.allocate()
        trainer = Trainer(engine, chosen.shape, self.inputs.settings)
        trainer.load(self.inputs.state)
        return trainer

    def go(self, trainer: Trainer, chosen: Chosen) -> Outcome:
        """Train. Log and checkpoints are opened first: an unwritable folder ends the run before it begins."""
        inputs, options = self.inputs, self.inputs.options
        first = inputs.state.step
        resuming = inputs.position is not None  # a run may have been stopped before its first step
        if self.folder is not None:
            prepare_folder(self.folder, resuming=resuming)
        with self._log(first if resuming else None) as log:
            return Loop(
                trainer, inputs.dataset, batches_of(inputs), _schedule(options), self.say,
                folder=self.folder, log=log, document=self._document(chosen), hellaswag=inputs.hellaswag,
                gemm_tflops=self.gemm_tflops,
                memory=trainer.engine.needed, first=first,
            ).run()  # fmt: skip

    def _log(self, resume_step: int | None) -> AbstractContextManager[TrainLog | None]:
        if self.folder is None:
            return nullcontext()
        facts = {"options": self.inputs.options.to_dict(), "device": self.workshop.device.row_name}
        return TrainLog(self.folder, facts, resume_step=resume_step)

    def _document(self, chosen: Chosen) -> dict[str, Any]:
        return {"options": self.inputs.options.to_dict(), **chosen.document()}


def gemm_rate(device: Device, dtype: str, note: Say) -> float | None:
    """TFLOP/s of the card's GEMMs in a dtype, as measured by `kbench.measure.ceilings`; None on the emulator."""
    if device.kind != "cuda":
        return None
    from kbench.device.cuda.device import CudaDevice
    from kbench.measure.ceilings import measured_ceilings

    return measured_ceilings(cast("CudaDevice", device), note).gemm_tflops.get(dtype)


def _schedule(options: TrainOptions) -> Schedule:
    assert options.steps is not None
    return Schedule(
        steps=options.steps,
        val_every=options.val_every,
        val_batches=options.val_batches,
        sample_every=options.sample_every,
        sample_length=options.sample_length,
        temperature=options.temperature,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        major=options.major,
        overfit=options.overfit,
    )
