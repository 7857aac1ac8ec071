"""The numpy GPT-2 against finite differences and against a second formulation, token by token; and its optimiser."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train import reference
from kbench.train.model import Model
from kbench.train.reference import Array, logits, loss_and_gradients
from kbench.train.reference_update import State, adamw_step, fresh_state, global_norm, train_steps

TINY = Model(2, 2, 8, vocab=11, context=7)  # T stays below the context, and the vocabulary below its padding
NAMES = [parameter.name for parameter in TINY.parameters]


def random_weights(model: Model, seed: int = 1) -> dict[str, Array]:
    """Large enough for no part to vanish, biases and the vocabulary's padding included."""
    source = np.random.default_rng(seed)
    return {parameter.name: source.normal(parameter.constant, 0.5, parameter.shape) for parameter in model.parameters}


def random_batch(model: Model, batch: int = 3, seq: int = 5, seed: int = 2) -> tuple[Array, Array]:
    inputs, targets = np.random.default_rng(seed).integers(model.vocab, size=(2, batch, seq))
    return inputs, targets


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    return random_weights(TINY)


@pytest.fixture(scope="module")
def batch() -> tuple[Array, Array]:
    return random_batch(TINY)


# ---------------------------------------------------------------------------------------------- loss and gradients


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_slopes_of_the_loss(name: str, weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    gradient = loss_and_gradients(TINY, weights, *batch)[2][name]
    assert gradient.shape == weights[name].shape and gradient.dtype == np.float64
    source = np.random.default_rng(3)
    rows = weights[name].shape[0] if name != "wte" else TINY.vocab  # else most picks would fall into the padding
    step = 1e-5
    for _ in range(12):
        place = (source.integers(rows), *(source.integers(size) for size in weights[name].shape[1:]))
        sides = []
        for sign in (1, -1):
            moved = weights[name].copy()
            moved[place] += sign * step
            sides.append(loss_and_gradients(TINY, weights | {name: moved}, *batch)[0])
        # The error of a central difference: step^2 times the third derivative, and rounding of the loss over the step.
        assert gradient[place] == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-6, abs=3e-9), place
    if name not in ("wte", "wpe"):
        assert np.count_nonzero(gradient) > 0.9 * gradient.size, "so the elements picked say something"


def loss_by_token(model: Model, w: dict[str, Array], tokens: list[int], targets: list[int]) -> list[float]:
    """The same losses one token at a time, with lists of past keys and values in place of a mask, and scalar math."""
    size = model.head_size
    past: list[list[tuple[Array, Array]]] = [[] for _ in range(model.layers * model.heads)]
    losses = []
    for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
        x = w["wte"][token] + w["wpe"][position]
        for layer in range(model.layers):
            p = {name: w[name][layer] for name in NAMES[2:14]}
            qkv = p["qkvw"] @ norm(x, p["ln1w"], p["ln1b"]) + p["qkvb"]
            heads = []
            for head in range(model.heads):
                q, k, v = (qkv[part * model.channels + head * size :][:size] for part in range(3))
                seen = past[layer * model.heads + head]
                seen.append((k, v))
                powers = [math.exp(float(q @ key) / math.sqrt(size)) for key, _ in seen]
                heads.append(sum(power * value for power, (_, value) in zip(powers, seen, strict=True)) / sum(powers))
            x = x + p["attprojw"] @ np.concatenate(heads) + p["attprojb"]
            fc = p["fcw"] @ norm(x, p["ln2w"], p["ln2b"]) + p["fcb"]
            activated = [
                f * (1 - 1 / (math.exp(2 * math.sqrt(2 / math.pi) * (f + 0.044715 * f**3)) + 1)) for f in fc
            ]  # (1 + tanh y) / 2 = 1 - 1 / (e^2y + 1)
            x = x + p["fcprojw"] @ np.array(activated) + p["fcprojb"]
        scores = [float(row @ norm(x, w["lnfw"], w["lnfb"])) for row in w["wte"][: model.vocab]]
        losses.append(-math.log(math.exp(scores[target]) / sum(map(math.exp, scores))))
    return losses


def norm(x: Array, weight: Array, bias: Array) -> Array:
    return (x - np.mean(x)) / math.sqrt(np.var(x) + 1e-5) * weight + bias


def test_losses_are_those_of_a_second_formulation(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    loss, losses, _ = loss_and_gradients(TINY, weights, *batch)
    again = [loss_by_token(TINY, weights, list(row), list(wanted)) for row, wanted in zip(*batch, strict=True)]
    np.testing.assert_allclose(losses, again, rtol=1e-12)
    assert loss == pytest.approx(np.mean(again), rel=1e-13)


def test_a_model_that_knows_nothing_has_the_loss_of_a_uniform_guess(batch: tuple[Array, Array]) -> None:
    blank = {p.name: np.full(p.shape, p.constant) for p in TINY.parameters}
    loss, losses, gradients = loss_and_gradients(TINY, blank, *batch)
    assert loss == pytest.approx(math.log(TINY.vocab), rel=1e-14) and losses.shape == (3, 5)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_padding_has_no_part_and_no_gradient(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    loss, _, gradients = loss_and_gradients(TINY, weights, *batch)
    other = weights["wte"].copy()
    other[TINY.vocab :] = np.nan
    assert loss_and_gradients(TINY, weights | {"wte": other}, *batch)[0] == loss
    assert gradients["wte"].shape == (128, 8) and not gradients["wte"][TINY.vocab :].any()
    assert not gradients["wpe"][batch[0].shape[1] :].any() and gradients["wpe"][: batch[0].shape[1]].all()
    assert list(gradients) == NAMES


def test_a_token_changes_no_loss_before_it(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    inputs, targets = batch
    changed = inputs.copy()
    changed[:, 3] = (inputs[:, 3] + 1) % TINY.vocab
    before, after = (loss_and_gradients(TINY, weights, tokens, targets)[1] for tokens in (inputs, changed))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).all()


def test_the_batch_is_the_mean_of_its_rows(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    loss, _, gradients = loss_and_gradients(TINY, weights, *batch)
    rows = [loss_and_gradients(TINY, weights, batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(3)]
    assert loss == pytest.approx(np.mean([row[0] for row in rows]), rel=1e-14)
    for name in NAMES:
        np.testing.assert_allclose(gradients[name], np.mean([row[2][name] for row in rows], axis=0), atol=1e-15)


def test_float32_is_float32_from_end_to_end(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    exact_loss, exact_losses, exact = loss_and_gradients(TINY, weights, *batch)
    loss, losses, gradients = loss_and_gradients(TINY, weights, *batch, np.float32)
    # A type wider than float32 anywhere spreads to all that is computed from it.
    assert losses.dtype == np.float32 and {gradient.dtype for gradient in gradients.values()} == {np.dtype("f4")}
    assert loss == np.float32(loss) and loss == pytest.approx(exact_loss, rel=1e-6)
    assert logits(TINY, weights, batch[0], np.float32).dtype == np.float32
    for name in NAMES:
        error = np.linalg.norm(gradients[name] - exact[name]) / np.linalg.norm(exact[name])
        assert 1e-9 < error < 1e-5, name


def test_logits_are_those_of_the_loss(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    scores = logits(TINY, weights, batch[0])
    assert scores.shape == (3, 5, 11)
    losses = reference.cross_entropy(scores, batch[1])[0]
    np.testing.assert_array_equal(losses, loss_and_gradients(TINY, weights, *batch)[1])


def test_large_logits_lose_nothing() -> None:
    losses, probs = reference.cross_entropy(np.array([[[2000.0, 0.0, -2000.0]]]), np.array([[2]]))
    assert losses == 4000.0 and probs.tolist() == [[[1.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ([[0, 11]], [[0, 1]], "token ids from 0 to 11: the model has 0 to 10"),
        ([[0, 1]], [[0, -1]], "token ids from -1 to 0"),
        ([[0] * 8], [[0] * 8], "sequences of 8 tokens: the model's context is 7"),
        ([[0, 1]], [[0]], "of one shape"),
        ([0, 1], [0, 1], "of one shape"),
        ([[]], [[]], "not empty"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(
    inputs: list[list[int]], targets: list[list[int]], words: str, weights: dict[str, Array]
) -> None:
    with pytest.raises(UsageError, match=words):
        loss_and_gradients(TINY, weights, np.array(inputs, dtype=int), np.array(targets, dtype=int))


def test_weights_that_do_not_fit_are_refused(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    with pytest.raises(UsageError, match=r"fcw has the shape \(2, 8, 32\), and the model needs \(2, 32, 8\)"):
        loss_and_gradients(TINY, weights | {"fcw": weights["fcw"].swapaxes(1, 2)}, *batch)
    with pytest.raises(UsageError, match="the weights have no lnfb"):
        loss_and_gradients(TINY, {name: weights[name] for name in NAMES[:-1]}, *batch)


# ---------------------------------------------------------------------------------------------- the update


def test_adamw_is_its_formula(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    first, second = (loss_and_gradients(TINY, weights, *random_batch(TINY, seed=seed))[2] for seed in (5, 6))
    one, state, norm = adamw_step(TINY, weights, first, fresh_state(weights), 1e-2, decay=0.1, max_norm=0.5)
    two, state, _ = adamw_step(TINY, one, second, state, 3e-3, decay=0.1, max_norm=1e9)
    assert state.steps == 2 and norm == pytest.approx(global_norm(first)) and norm > 0.5
    for name, decay in (("wte", 0.1), ("wpe", 0.1), ("fcw", 0.1), ("ln1w", 0.0), ("fcb", 0.0), ("lnfw", 0.0)):
        w, m, v = float(weights[name].flat[9 % weights[name].size]), 0.0, 0.0
        for t, gradients, rate, clip in ((1, first, 1e-2, 0.5 / norm), (2, second, 3e-3, 1.0)):
            g = float(gradients[name].flat[9 % weights[name].size]) * clip
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            w -= rate * (m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay * w)
        assert two[name].flat[9 % weights[name].size] == pytest.approx(w, rel=1e-12), name


def test_decay_moves_only_what_has_it_and_arguments_stay(weights: dict[str, Array]) -> None:
    still = {name: np.zeros_like(array) for name, array in weights.items()}
    before = {name: array.copy() for name, array in weights.items()}
    new, state, norm = adamw_step(TINY, weights, still, fresh_state(weights), 0.5, decay=0.2)
    assert norm == 0.0, "and nothing is divided by it"
    for parameter in TINY.parameters:
        factor = 0.9 if parameter.decay else 1.0
        np.testing.assert_allclose(new[parameter.name], factor * before[parameter.name], rtol=1e-14)
        np.testing.assert_array_equal(weights[parameter.name], before[parameter.name])


def test_small_gradients_are_not_scaled_up(weights: dict[str, Array]) -> None:
    gradients = {name: np.full_like(array, 1e-6) for name, array in weights.items()}
    _, state, norm = adamw_step(TINY, weights, gradients, fresh_state(weights), 1e-3)
    assert norm < 1.0 and state.m["qkvb"][0, 0] == pytest.approx(1e-7)


def test_training_lowers_the_loss_and_repeats_its_steps(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    run = train_steps(TINY, weights, [batch] * 30, [1e-2] * 30, decay=0.1)
    assert run.losses.shape == run.norms.shape == (30,) and run.losses[-1] < 0.3 * run.losses[0]
    # Broken into two, with the state carried along by hand.
    now, state = dict(weights), fresh_state(weights)
    for index in range(3):
        loss, _, gradients = loss_and_gradients(TINY, now, *batch)
        assert loss == run.losses[index]
        now, state, norm = adamw_step(TINY, now, gradients, state, 1e-2, decay=0.1)
        assert norm == run.norms[index]
    assert isinstance(state, State)


def test_each_step_takes_its_rate(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    run = train_steps(TINY, weights, [batch] * 3, np.array([0.0, 0.0, 1e-2]))
    assert run.losses[0] == run.losses[1] == run.losses[2] and (run.weights["wpe"][:5] != weights["wpe"][:5]).any()
    with pytest.raises(ValueError):
        train_steps(TINY, weights, [batch] * 3, [1e-2] * 2)


def test_steps_in_float32_stay_in_float32(weights: dict[str, Array], batch: tuple[Array, Array]) -> None:
    rates = np.full(4, 1e-3)
    narrow = train_steps(TINY, weights, [batch] * 4, rates, dtype=np.float32)
    wide = train_steps(TINY, weights, [batch] * 4, rates)
    assert {array.dtype for array in narrow.weights.values()} == {np.dtype("f4")}
    np.testing.assert_allclose(narrow.losses, wide.losses, rtol=1e-5)
    assert (narrow.losses != wide.losses).any()
