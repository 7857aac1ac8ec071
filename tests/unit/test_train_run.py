"""A run's inputs: opened and found sound before a device is touched, from scratch or from a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.checkpoint import TrainState, save_checkpoint
from kbench.train.model import PRESETS, Model
from kbench.train.options import TrainOptions
from kbench.train.run import Inputs, batches_of, open_checkpoint, open_inputs
from kbench.train.state_file import OptimizerState
from kbench.train.weights import export_llmc

NANO = PRESETS["nano"]


def opened(kind: str = "emulator", **options: Any) -> Inputs:
    return open_inputs(TrainOptions(**options), kind, lambda text: None)


def saved(folder: Path, step: int = 3, **changes: Any) -> Inputs:
    """What a run of nano was given, and its checkpoint of a step, with changes to the document."""
    inputs = opened(batch=2, seq=8, steps=5)
    state = inputs.state
    batches = batches_of(inputs)
    for _ in range(step):
        next(batches)
    document = {
        "options": inputs.options.to_dict(), "kernels": {}, "data": batches.position(),
        "window": np.arange(256.0).reshape(2, 128).tolist(), "filled": 3,
    }  # fmt: skip
    document = {name: value for name, value in {**document, **changes}.items() if value is not None}
    zeros = {name: np.zeros_like(values) for name, values in state.params.items()}
    tensors = TrainState(inputs.model, state.params, OptimizerState(zeros, zeros, state.master))
    save_checkpoint(folder, step, tensors, document)
    return inputs


def resumed(folder: Path, **changes: Any) -> Inputs:
    return open_checkpoint(folder, changes, lambda text: None)


# ---------------------------------------------------------------------------------------------- from scratch


def test_a_run_from_nothing_has_every_default() -> None:
    inputs = opened()
    assert inputs.model == NANO and inputs.position is None and inputs.state.step == 0
    assert (inputs.options.seq, inputs.options.dtype, inputs.options.steps) == (64, "fp32", 10)
    assert inputs.shape.batch == 4 and inputs.shape.seq == 64 and inputs.shape.steps == 10
    assert list(inputs.settings.rates) == [3e-4] * 10 and inputs.settings.seed == 42
    assert inputs.weights == "from scratch, seed 42" and "held out" in inputs.dataset.description


@pytest.mark.parametrize(("context", "seq"), [(17, 17), (1024, 1024), (2048, 1024)])
def test_the_sequence_is_the_context_up_to_1024(context: int, seq: int) -> None:
    inputs = opened(model="nano", context=context, batch=1)
    assert inputs.options.seq == seq


@pytest.mark.parametrize(("dtype", "stored", "master"), [("fp32", "f4", 0), ("tf32", "f4", 0), ("bf16", "bf", 16)])
def test_what_is_stored(dtype: str, stored: str, master: int) -> None:
    state = opened(dtype=dtype).state
    right = np.float32 if stored == "f4" else ml_dtypes.bfloat16
    assert all(values.dtype == right for values in state.params.values())
    assert len(state.master or {}) == master
    if state.master is not None:
        assert all(values.dtype == np.float32 for values in state.master.values())
        # Rounded to nearest: at most half a unit in the last of 8 bits.
        wide = state.params["qkvw"].astype(np.float32)
        assert np.all(np.abs(wide - state.master["qkvw"]) <= np.abs(state.master["qkvw"]) * 2.0**-8)
    assert state.m is None and state.v is None and state.filled == 0 and state.window.shape == (2, 128)


def test_a_run_of_no_steps_has_a_schedule_all_the_same() -> None:
    inputs = opened(steps=0)
    assert list(inputs.settings.rates) == [0.0] and inputs.shape.steps == 1


def test_seeds_decide_weights_and_order() -> None:
    one, again, other = opened(seed=1), opened(seed=1), opened(seed=2)
    assert np.array_equal(one.state.params["wte"], again.state.params["wte"])
    assert not np.array_equal(one.state.params["wte"], other.state.params["wte"])
    firsts = [next(batches_of(inputs))[0] for inputs in (one, again, other)]
    assert np.array_equal(firsts[0], firsts[1]) and not np.array_equal(firsts[0], firsts[2])
    in_order = next(batches_of(opened(overfit=True, batch=1, seq=16)))[0]
    assert np.array_equal(in_order[0], opened().dataset.train.shards[0].ids[:16]), "overfitting takes the first batch"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq": 65}, "--seq 65: the model's context is 64; give at most --seq 64"),
        ({"model": "d12", "seq": 1025}, "context is 1024"),
        ({"schedule": "sawtooth"}, "no learning-rate schedule 'sawtooth'"),
        ({"warmup": 11}, "11 steps of warm-up in a run of 10"),
        ({"final_fraction": 1.5}, "a final learning rate of 1.5 times"),
        ({"vocab": 100}, "100"),
        ({"weights": "/nowhere/weights.bin"}, "/nowhere/weights.bin"),
        ({"data": "/nowhere/text.txt"}, "/nowhere/text.txt"),
        ({"hellaswag": "/nowhere/hellaswag.bin"}, "/nowhere/hellaswag.bin"),
        ({"dtype": "fp16"}, "training in 'fp16'"),
        ({"batch": 0}, "--batch 0"),
    ],
)
def test_wrong_input_is_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        opened(**options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_batch_larger_than_the_data_says_what_fits(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("a short text " * 20)
    with pytest.raises(UsageError, match=r"--batch 2 is the largest that fits"):
        opened(data=str(text), batch=64, seq=64)
    assert opened(data=str(text), batch=2, seq=64).dataset.val.count >= 129


def test_weights_of_a_file_decide_the_model(tmp_path: Path) -> None:
    model = Model(1, 3, 33, vocab=300, context=17)
    source = opened(layers=1, heads=3, channels=33, vocab=300, context=17)
    export_llmc(tmp_path / "odd.bin", model, source.state.params)
    inputs = opened(weights=str(tmp_path / "odd.bin"), batch=1)
    assert inputs.model == model and inputs.options.seq == 17
    assert np.array_equal(inputs.state.params["fcw"], source.state.params["fcw"])
    with pytest.raises(UsageError, match="asked for were 2 layers"):
        opened(weights=str(tmp_path / "odd.bin"), model="nano")


# ---------------------------------------------------------------------------------------------- from a checkpoint


def test_a_checkpoint_gives_back_options_state_and_place(tmp_path: Path) -> None:
    before = saved(tmp_path)
    inputs = resumed(tmp_path)
    assert inputs.options == before.options and inputs.model == NANO
    assert inputs.state.step == 3 and inputs.state.filled == 3 and inputs.state.window[1, 127] == 255.0
    for name, values in before.state.params.items():
        assert np.array_equal(inputs.state.params[name], values)
    there = batches_of(before)
    for _ in range(3):
        next(there)
    assert np.array_equal(next(batches_of(inputs))[0], next(there)[0])
    assert inputs.weights == f"step 3 of {tmp_path}"


def test_what_was_changed_counts(tmp_path: Path) -> None:
    saved(tmp_path)
    inputs = resumed(tmp_path, steps=20, val_every=7, use="naive")
    assert (inputs.options.steps, inputs.options.val_every, inputs.options.use) == (20, 7, "naive")
    assert len(inputs.settings.rates) == 20
    assert resumed(tmp_path, steps=3).options.steps == 3, "nothing is left to do"


@pytest.mark.parametrize(
    ("document", "changes", "words"),
    [
        ({}, {"steps": 2}, "--steps 2: the checkpoint in {} has done 3"),
        ({}, {"val_batches": -1}, "--val-batches -1"),
        ({"options": None}, {}, "{}: the checkpoint has no 'options': it is not of a kbench run"),
        ({"data": None}, {}, "no 'data'"),
        ({"window": None}, {}, "no 'window'"),
        ({"filled": None}, {}, "no 'filled'"),
        ({"window": [[0.0], [0.0]]}, {}, "window of losses has the shape (2, 1)"),
        ({"options": {**asdict(TrainOptions()), "zeta": 1}}, {}, "an option 'zeta'"),
        ({"options": 5}, {}, "options or its place in the data are damaged"),
        ({"data": 5}, {}, "options or its place in the data are damaged"),
        ({"options": asdict(TrainOptions())}, {}, "--seq, --dtype or --steps is missing"),
        ({"options": {"lr": "x"}}, {}, "option 'lr' is damaged: 'x'"),
        ({"options": {"batch": "2"}}, {}, "option 'batch' is damaged: '2'"),
        ({"options": {"batch": True}}, {}, "option 'batch' is damaged: True"),
        ({"options": {"use": 5}}, {}, "option 'use' is damaged: 5"),
        ({"options": {"seq": 8, "steps": 5, "dtype": "bf16"}}, {}, "options say bf16, its tensors fp32"),
        ({"window": "abc"}, {}, "window of losses is damaged"),
        ({"window": [[0.0], [0.0, 1.0]]}, {}, "window of losses is damaged"),
        ({"filled": "x"}, {}, "count of losses is damaged: 'x'"),
        ({"filled": -1}, {}, "count of losses is damaged: -1"),
        ({"filled": 1 << 32}, {}, "count of losses is damaged"),
    ],
)
def test_a_checkpoint_that_is_not_of_this_run(
    document: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved(tmp_path, **document)
    with pytest.raises(UsageError) as caught:
        resumed(tmp_path, **changes)
    assert words.format(tmp_path) in str(caught.value)


def test_a_batch_beyond_all_memory_is_wrong_input() -> None:
    # kbench's own story would be repeated until it fills one.
    with pytest.raises(UsageError, match=r"--batch 1000000000 of --seq 64 is 64000000000 tokens: at most 67108864"):
        opened(batch=10**9)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        resumed(tmp_path)


def test_other_data_than_the_checkpoint_was_trained_on_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    text = tmp_path / "other.txt"
    text.write_text("another text altogether " * 40)
    with pytest.raises(UsageError, match="the place in the data was saved for"):
        resumed(tmp_path / "run", data=str(text))
