"""What a training run was asked for: everything that decides its result, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args, get_type_hints

from kbench.errors import UsageError
from kbench.train.model import PRESETS, Model

# What a run does where nothing is said: a real model on a GPU; on the emulator one that takes a second a step.
GPU_DEFAULTS = {"model": "d12", "dtype": "bf16", "steps": 50}
EMULATOR_DEFAULTS = {"model": "nano", "dtype": "fp32", "steps": 10}
DTYPES = ("fp32", "tf32", "bf16")
SCRATCH = "scratch"
# The device reports the index of a step in fp32, which holds whole numbers up to here. (Names of checkpoints have eight
# digits, which is more.)
MOST_STEPS = 1 << 24


@dataclass(frozen=True)
class TrainOptions:
    """The options of `kbench train gpt2`; None is what the device, the model or the weights decide."""

    model: str | None = None
    layers: int | None = None
    heads: int | None = None
    channels: int | None = None
    vocab: int | None = None
    context: int | None = None
    batch: int = 4
    seq: int | None = None
    dtype: str | None = None
    steps: int | None = None
    micro_steps: int = 1
    recompute: int | None = None
    weights: str = SCRATCH
    data: str | None = None
    val_data: str | None = None
    use: str = "best"
    deterministic: bool = False
    lr: float = 3e-4
    schedule: str = "constant"
    warmup: int = 0
    final_fraction: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    skip_loss_z: float = 0.0
    skip_norm_z: float = 0.0
    val_every: int = 20
    val_batches: int = 20
    sample_every: int = 0
    sample_length: int = 64
    temperature: float = 1.0
    hellaswag: str | None = None
    checkpoint_every: int = 0
    keep: int = 0
    major: int = 0
    overfit: bool = False
    seed: int = 42

    def on(self, kind: str) -> TrainOptions:
        """With the defaults of a device in place of what was left open."""
        defaults = GPU_DEFAULTS if kind == "cuda" else EMULATOR_DEFAULTS
        open_ones: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if self.weights != SCRATCH:
            open_ones.pop("model", None)  # the file says it
        return replace(self, **open_ones)

    def sizes(self) -> Model | None:
        """The model asked for, None where the weights decide. Raises UsageError."""
        named = {name: getattr(self, name) for name in ("layers", "heads", "channels", "vocab", "context")}
        given = {name: value for name, value in named.items() if value is not None}
        if self.model is None and not given:
            return None
        if self.model is not None and self.model not in PRESETS:
            raise UsageError(
                f"unknown model {self.model!r}", f"models: {', '.join(PRESETS)}, or give --layers and others"
            )
        if self.model is None:
            missing = [name for name in ("layers", "heads", "channels") if name not in given]
            if missing:
                hint = "name a --model too" if self.weights == SCRATCH else "leave out sizes: the weights have them"
                raise UsageError(f"--{missing[0]} is missing", f"{hint}; or give all of the sizes")
            return Model(**given)
        base = asdict(PRESETS[self.model])
        return Model(**{**base, **given})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainOptions:
        """The reverse of `to_dict`. Raises UsageError where a checkpoint holds something else."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise UsageError(f"the checkpoint was made with an option {unknown[0]!r}, which this kbench does not have")
        hints = get_type_hints(cls)
        for name, value in data.items():
            # type(), because True is an int too; a whole float may come back from JSON as an int.
            kinds = get_args(hints[name]) or (hints[name],)
            if type(value) not in (*kinds, *((int,) if float in kinds else ())):
                raise UsageError(f"the checkpoint's option {name!r} is damaged: {value!r}")
        return cls(**data)


def require_valid(options: TrainOptions) -> None:
    """Raises UsageError for values that no run could have."""
    least = {
        "batch": 1, "seq": 1, "steps": 0, "micro_steps": 1, "warmup": 0, "val_every": 0, "val_batches": 0,
        "sample_every": 0, "sample_length": 1, "checkpoint_every": 0, "keep": 0, "major": 0, "seed": 0,
    }  # fmt: skip
    for name, limit in least.items():
        value = getattr(options, name)
        if value is not None and value < limit:
            raise UsageError(f"--{name.replace('_', '-')} {value}: at least {limit} is needed")
    for name in ("lr", "weight_decay", "clip", "skip_loss_z", "skip_norm_z", "temperature"):
        value = getattr(options, name)
        if not 0.0 <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: it is a finite number, 0 or more")
    if options.dtype is not None and ("," in options.dtype or options.dtype == "all"):
        raise UsageError(f"train takes one dtype, not {options.dtype!r}", f"dtypes: {', '.join(DTYPES)}")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"training in {options.dtype!r}", f"dtypes: {', '.join(DTYPES)}")
    if options.recompute not in (None, 0, 1, 2):
        raise UsageError(f"--recompute {options.recompute}", "levels: 0, 1, 2")
    if options.steps is not None and options.steps > MOST_STEPS:
        raise UsageError(f"--steps {options.steps}: at most {MOST_STEPS} can be counted")
    if options.seed >= 1 << 32:
        raise UsageError(f"--seed {options.seed}: it is below 2^32")
