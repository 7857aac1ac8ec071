"""Drawing tokens: the right odds, never the padding, and the same draws for the same seed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.sampling import choose, generate, generator

LOGITS = np.array([1.0, 3.0, -math.inf, 2.0, 90.0, math.nan], dtype=np.float32)  # 4 real columns, 2 of padding


class Coin:
    """A source that always gives the same number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, shape: tuple[int, ...]) -> Any:
        return np.full(shape, self.value)


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    count = 40_000
    ids = choose(np.tile(LOGITS, (count, 1)), 4, generator())
    assert ids.shape == (count,) and ids.dtype == np.int64
    powers = np.array([math.e, math.e**3, 0.0, math.e**2])
    odds = powers / powers.sum()
    found = np.bincount(ids, minlength=4) / count
    assert found[2] == 0.0 and len(found) == 4
    np.testing.assert_allclose(found, odds, atol=4 * math.sqrt(0.25 / count))


def test_temperature_flattens_and_sharpens() -> None:
    rows = np.tile([0.0, 1.0], (20_000, 1))
    shares = [choose(rows, 2, generator(), temperature).mean() for temperature in (0.5, 1.0, 5.0)]
    expected = [1 / (1 + math.exp(-1 / temperature)) for temperature in (0.5, 1.0, 5.0)]
    np.testing.assert_allclose(shares, expected, atol=0.015)


def test_temperature_0_takes_the_largest_and_draws_nothing() -> None:
    source = generator()
    assert choose(LOGITS, 4, source, 0.0).tolist() == 1
    assert choose(np.array([[2.0, 5.0, 5.0], [7.0, 1.0, 0.0]]), 3, source, 0.0).tolist() == [1, 0]
    assert source.random() == generator().random()
    with np.errstate(all="raise"):
        assert choose(LOGITS, 4, source, 1e-320).tolist() == 1


@pytest.mark.parametrize(("coin", "expected"), [(0.0, 1), (math.nextafter(1.0, 0.0), 3), (1.0, 3)])
def test_the_ends_of_the_draw_never_hit_a_token_of_no_weight(coin: float, expected: int) -> None:
    row = np.array([-math.inf, 0.1, -math.inf, 0.3, -math.inf])
    assert choose(row, 5, Coin(coin)).tolist() == expected


def test_large_logits_do_not_overflow() -> None:
    with np.errstate(over="raise", invalid="raise"):
        assert choose(np.array([1e30, -1e30, 0.0]), 3, generator()).tolist() == 0
        assert choose(np.array([-1e300, -1e305]), 2, generator(), 1e-3).tolist() == 0


def test_an_event_repeats_and_leaves_numpys_own_generator_alone() -> None:
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    rows = np.random.default_rng(1).normal(size=(50, 9))
    first, second = (choose(rows, 9, generator()) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert (first != choose(rows, 9, generator(1))).any()
    np.testing.assert_array_equal(state, np.random.get_state()[1])


@pytest.mark.parametrize(
    ("logits", "vocab", "temperature", "words"),
    [
        (LOGITS, 5 + 1, 1.0, "not finite; the weights are damaged, or training diverged"),
        (np.full(3, -math.inf), 3, 1.0, "not finite"),
        (np.array([0.0, math.inf]), 2, 0.0, "not finite"),
        (LOGITS, 7, 1.0, "6 columns of logits for a vocabulary of 7"),
        (LOGITS, 4, -1.0, "temperature of -1"),
        (LOGITS, 4, math.nan, "temperature of nan"),
    ],
)
def test_what_cannot_be_sampled_is_refused(logits: Any, vocab: int, temperature: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose(logits, vocab, generator(), temperature)


def test_generate_shows_the_model_the_end_of_the_text() -> None:
    seen = []

    def logits_of(ids: Any) -> Any:
        seen.append(ids.tolist())
        return np.eye(8)[(ids[-1] + 1) % 5] * 50.0

    assert generate(logits_of, [7, 3], 4, vocab=5, context=3, temperature=0.0) == [4, 0, 1, 2]
    assert seen == [[7, 3], [7, 3, 4], [3, 4, 0], [4, 0, 1]]
    flat = {tuple(generate(lambda ids: np.zeros(8), [0], 20, vocab=5, context=3)) for _ in range(2)}
    assert len(flat) == 1 and all(0 <= token < 5 for token in flat.pop())
    assert generate(logits_of, [1], 0, vocab=5, context=3) == []
    with pytest.raises(UsageError, match="no token to sample from"):
        generate(logits_of, [], 1, vocab=5, context=3)
