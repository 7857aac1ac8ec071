"""The numpy GPT-2 and PyTorch's, each against the other: two programs that share nothing but the sizes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.train import reference, reference_update
from kbench.train.model import PRESETS, Model
from kbench.train.reference import Array
from kbench.train.schedule import rates

pytest.importorskip("torch", reason="PyTorch is not installed")

NANO = PRESETS["nano"]
ODD = Model(3, 2, 12, vocab=37, context=9)


@pytest.fixture(scope="module")
def gpt2() -> Any:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import gpt2_torch
    finally:
        sys.path.remove(folder)
    return gpt2_torch


@pytest.fixture(scope="module")
def on_cpu(gpt2: Any) -> Any:
    return gpt2.Settings(device="cpu", precision="fp32")


def weights_of(model: Model, spread: float = 1.0) -> dict[str, Array]:
    """As at the start of training, but with no part that is all 0 or all 1; the padding of wte is 0."""
    source, weights = np.random.default_rng(7), {}
    for parameter in model.parameters:
        array = source.normal(parameter.constant, spread * max(parameter.std, 0.02), parameter.shape)
        weights[parameter.name] = array.astype(np.float32)
    weights["wte"][model.vocab :] = 0.0
    return weights


def batch_of(model: Model, batch: int, seq: int, seed: int = 8) -> tuple[Array, Array]:
    inputs, targets = np.random.default_rng(seed).integers(model.vocab, size=(2, batch, seq))
    return inputs, targets


@pytest.mark.parametrize(("model", "batch", "seq"), [(NANO, 4, 64), (NANO, 1, 17), (ODD, 2, 5)])
def test_loss_and_gradients_agree(model: Model, batch: int, seq: int, gpt2: Any, on_cpu: Any) -> None:
    weights, tokens = weights_of(model, 5.0), batch_of(model, batch, seq)
    loss, losses, gradients = reference.loss_and_gradients(model, weights, *tokens)
    torch_loss, torch_losses, torch_gradients = gpt2.loss_and_gradients(model, weights, tokens, on_cpu)
    assert torch_loss == pytest.approx(loss, abs=1e-5)
    np.testing.assert_allclose(torch_losses, losses, atol=1e-5)
    assert list(torch_gradients) == list(gradients)
    for name, expected in gradients.items():
        error = np.linalg.norm(torch_gradients[name] - expected) / np.linalg.norm(expected)
        assert torch_gradients[name].shape == expected.shape and error < 1e-5, name


@pytest.mark.parametrize(("model", "batch", "seq"), [(NANO, 2, 33), (ODD, 2, 5)])
def test_in_float64_pytorch_is_as_good_a_reference(model: Model, batch: int, seq: int, gpt2: Any) -> None:
    weights, tokens = weights_of(model, 5.0), batch_of(model, batch, seq)
    loss, losses, gradients = reference.loss_and_gradients(model, weights, *tokens)
    settings = gpt2.Settings(device="cpu", precision="fp64", sdpa="math")
    torch_loss, torch_losses, torch_gradients = gpt2.loss_and_gradients(model, weights, tokens, settings)
    assert torch_loss == pytest.approx(loss, rel=1e-13)
    np.testing.assert_allclose(torch_losses, losses, rtol=1e-12)
    for name, expected in gradients.items():
        error = np.linalg.norm(torch_gradients[name] - expected) / np.linalg.norm(expected)
        assert torch_gradients[name].dtype == np.float64 and error < 1e-12, name


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_attention_backends_agree(backend: str, gpt2: Any, on_cpu: Any) -> None:
    weights, tokens = weights_of(NANO, 5.0), batch_of(NANO, 2, 64)
    settings = dataclasses.replace(on_cpu, sdpa=backend)
    loss = gpt2.loss_and_gradients(NANO, weights, tokens, settings)[0]
    assert loss == pytest.approx(reference.loss_and_gradients(NANO, weights, *tokens)[0], abs=1e-5)


def test_steps_agree(gpt2: Any, on_cpu: Any) -> None:
    weights = weights_of(NANO, 2.0)
    batches = [batch_of(NANO, 2, 32, seed) for seed in range(10)]
    schedule = rates("cosine", 10, 1e-3, warmup=3, final_fraction=0.1)
    exact = reference_update.train_steps(NANO, weights, batches, schedule, decay=0.1)
    run = gpt2.train(NANO, weights, batches, schedule, on_cpu, decay=0.1)
    np.testing.assert_allclose(run.losses, exact.losses, rtol=1e-5)
    np.testing.assert_allclose(run.norms, exact.norms, rtol=1e-4)
    assert max(exact.norms) > 1.0, "so clipping took part"
    assert len(run.ms) == 10 and min(run.ms) > 0.0 and run.peak_bytes is None
    for name, expected in exact.weights.items():
        moved = np.linalg.norm(expected - weights[name])
        # Where a gradient is near 0, AdamW turns its rounding error into a step of full size.
        assert np.linalg.norm(run.weights[name] - expected) < 0.02 * moved, name


def test_bf16_is_near_and_not_the_same(gpt2: Any, on_cpu: Any) -> None:
    weights, tokens = weights_of(NANO, 5.0), batch_of(NANO, 4, 64)
    exact = reference.loss_and_gradients(NANO, weights, *tokens)
    loss, _, gradients = gpt2.loss_and_gradients(NANO, weights, tokens, dataclasses.replace(on_cpu, precision="bf16"))
    assert 1e-6 < abs(loss - exact[0]) < 0.02
    for name, expected in exact[2].items():
        assert np.linalg.norm(gradients[name] - expected) < 0.05 * np.linalg.norm(expected), name


def test_bf16_sees_each_update(gpt2: Any, on_cpu: Any) -> None:
    weights, batches = weights_of(NANO), [batch_of(NANO, 2, 32)] * 8
    exact = reference_update.train_steps(NANO, weights, batches, [3e-3] * 8)
    run = gpt2.train(NANO, weights, batches, [3e-3] * 8, dataclasses.replace(on_cpu, precision="bf16"))
    assert exact.losses[-1] < exact.losses[0] - 1.0
    np.testing.assert_allclose(run.losses, exact.losses, atol=0.05)


def test_the_padded_vocabulary_is_for_speed_only(gpt2: Any, on_cpu: Any) -> None:
    weights, tokens = weights_of(ODD, 5.0), batch_of(ODD, 2, 5)
    loss, _, gradients = gpt2.loss_and_gradients(ODD, weights, tokens, dataclasses.replace(on_cpu, pad_vocab=True))
    assert loss > reference.loss_and_gradients(ODD, weights, *tokens)[0] + 0.5
    assert gradients["wte"][ODD.vocab :].any()


def test_settings_that_mean_nothing_and_flags_left_behind(gpt2: Any, on_cpu: Any) -> None:
    import torch

    with pytest.raises(ValueError, match="precision is one of fp32"):
        gpt2.Settings(precision="fp16")
    with pytest.raises(ValueError, match="sdpa of flash"):
        gpt2.Settings(sdpa="fastest")
    before = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(IndexError):
        gpt2.train(ODD, weights_of(ODD), [(np.array([[99]]), np.array([[0]]))], [0.1],
                   dataclasses.replace(on_cpu, precision="tf32"))  # fmt: skip
    assert torch.backends.cuda.matmul.allow_tf32 == before
