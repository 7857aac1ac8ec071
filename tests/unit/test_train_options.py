"""What a run is asked for: defaults by device, sizes, values that no run could have."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from kbench.errors import UsageError
from kbench.train.model import PRESETS, Model
from kbench.train.options import TrainOptions, require_valid

NOTHING = TrainOptions()


@pytest.mark.parametrize(
    ("kind", "model", "dtype", "steps"), [("cuda", "d12", "bf16", 50), ("emulator", "nano", "fp32", 10)]
)
def test_what_was_left_open_depends_on_the_device(kind: str, model: str, dtype: str, steps: int) -> None:
    options = NOTHING.on(kind)
    assert (options.model, options.dtype, options.steps) == (model, dtype, steps)
    assert (options.batch, options.lr, options.weights, options.use) == (4, 3e-4, "scratch", "best")
    given = TrainOptions(model="d6", dtype="tf32", steps=0).on(kind)
    assert (given.model, given.dtype, given.steps) == ("d6", "tf32", 0)
    # Only these are filled in.
    assert {f.name for f in fields(NOTHING) if getattr(options, f.name) != getattr(NOTHING, f.name)} == {
        "model", "dtype", "steps",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["cuda", "emulator"])
def test_a_file_of_weights_says_its_model(kind: str) -> None:
    options = TrainOptions(weights="gpt2.bin").on(kind)
    assert options.model is None and options.sizes() is None
    assert TrainOptions(weights="gpt2.bin", model="d24").on(kind).sizes() == PRESETS["d24"]


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"model": "d12"}, Model(12, 12, 768, 50257, 1024)),
        ({"model": "d12", "layers": 3}, Model(3, 12, 768, 50257, 1024)),
        ({"model": "nano", "vocab": 300, "context": 17}, Model(2, 4, 64, 300, 17)),
        ({"layers": 1, "heads": 3, "channels": 33}, Model(1, 3, 33, 50257, 1024)),
        ({"layers": 1, "heads": 3, "channels": 33, "vocab": 300, "context": 8}, Model(1, 3, 33, 300, 8)),
        ({}, None),
    ],
)
def test_sizes(given: dict[str, Any], right: Model | None) -> None:
    assert TrainOptions(**given).sizes() == right


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "d13"}, "unknown model 'd13'; models: nano, d6, d12"),
        ({"layers": 3}, "--heads is missing; name a --model too"),
        ({"layers": 3, "heads": 3}, "--channels is missing"),
        ({"vocab": 3}, "--layers is missing"),
        ({"model": "nano", "heads": 5}, "64 channels cannot be divided among 5 heads"),
        ({"model": "nano", "layers": 0}, "a model with layers = 0: at least 1"),
        ({"model": "nano", "context": -1}, "a model with context = -1"),
    ],
)
def test_impossible_sizes(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainOptions(**given).sizes()
    assert words in str(caught.value)


BAD = [
    ("batch", 0, "--batch 0: at least 1"), ("batch", -4, "--batch -4"), ("seq", 0, "--seq 0: at least 1"),
    ("steps", -1, "--steps -1: at least 0"), ("micro_steps", 0, "--micro-steps 0: at least 1"),
    ("warmup", -1, "--warmup -1: at least 0"), ("val_every", -1, "--val-every -1"),
    ("val_batches", -1, "--val-batches -1"), ("sample_every", -1, "--sample-every -1"),
    ("sample_length", 0, "--sample-length 0: at least 1"), ("checkpoint_every", -1, "--checkpoint-every -1"),
    ("steps", (1 << 24) + 1, "--steps 16777217: at most 16777216"),
    ("keep", -1, "--keep -1"), ("major", -1, "--major -1"), ("seed", -1, "--seed -1: at least 0"),
    ("seed", 1 << 32, "--seed 4294967296: it is below 2^32"),
    *((name, value, f"{value:g}: it is a finite number, 0 or more")
      for name in ("lr", "weight_decay", "clip", "skip_loss_z", "skip_norm_z", "temperature")
      for value in (-1.0, float("nan"), float("inf"))),
    ("dtype", "fp16", "training in 'fp16'; dtypes: fp32, tf32, bf16"), ("dtype", "", "training in ''"),
    ("recompute", 3, "--recompute 3; levels: 0, 1, 2"), ("recompute", -1, "--recompute -1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_values_that_no_run_could_have(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        require_valid(replace(NOTHING, **{name: value}))
    assert words in str(caught.value)


def test_values_at_the_edge_are_valid() -> None:
    require_valid(NOTHING)
    require_valid(
        TrainOptions(
            batch=1, seq=1, steps=0, micro_steps=1, val_every=0, val_batches=0, sample_length=1, lr=0.0, clip=0.0,
            temperature=0.0, recompute=0, seed=(1 << 32) - 1, dtype="tf32",
        )
    )  # fmt: skip


def test_a_checkpoint_gives_back_every_option() -> None:
    options = TrainOptions(model="nano", lr=0.1, seq=17, recompute=2, overfit=True, data="a", skip_loss_z=3.0)
    assert TrainOptions.from_dict(json.loads(json.dumps(options.to_dict()))) == options
    assert options.to_dict() == asdict(options)


def test_an_option_that_this_kbench_does_not_have_is_not_passed_over() -> None:
    with pytest.raises(UsageError, match="made with an option 'beta3', which this kbench does not have"):
        TrainOptions.from_dict({**NOTHING.to_dict(), "zeta": 1, "beta3": 0.5})
    # One that is newer than the checkpoint has its default.
    older = NOTHING.to_dict()
    del older["overfit"]
    assert TrainOptions.from_dict(older) == NOTHING
