"""Learning-rate schedules: known values, the joints between their parts, and nonsense."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.schedule import KINDS, rates


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_warms_up_linearly_and_goes_on_from_the_full_rate(kind: str) -> None:
    got = rates(kind, 100, 3e-4, warmup=10, final_fraction=0.1)
    assert got.shape == (100,) and got.dtype == np.float64
    np.testing.assert_allclose(got[:10], 3e-4 * np.arange(1, 11) / 10, rtol=1e-15)
    assert got[10] == 3e-4 and (np.diff(got[10:]) <= 0).all() and got.min() > 0.0
    assert got[-1] >= 0.1 * 3e-4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", [1.0, 0.2 + 0.4 * (1 + math.cos(math.pi / 4)), 0.6, 0.2 + 0.4 * (1 + math.cos(0.75 * math.pi))]),
        ("linear", [1.0, 0.8, 0.6, 0.4]),
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("wsd", [1.0, 1.0, 1.0, 1.0 - 0.8 * math.sqrt(0.5)]),
    ],
)
def test_known_values(kind: str, expected: list[float]) -> None:
    np.testing.assert_allclose(rates(kind, 6, 1.0, warmup=2, final_fraction=0.2), [0.5, 1.0, *expected], rtol=1e-14)


def test_wsd_decays_over_its_last_fifth() -> None:
    got = rates("wsd", 20, 2.0, final_fraction=0.5)
    np.testing.assert_array_equal(got[:17], 2.0)
    np.testing.assert_allclose(got[17:], [2.0 - math.sqrt(done) for done in (0.25, 0.5, 0.75)], rtol=1e-15)


def test_a_long_warm_up_leaves_wsd_no_jump() -> None:
    got = rates("wsd", 20, 1.0, warmup=18)
    assert got[17] == got[18] == 1.0 and got[19] == pytest.approx(1 - math.sqrt(0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_edges(kind: str) -> None:
    assert rates(kind, 0, 1.0).shape == (0,)
    assert rates(kind, 1, 0.5).tolist() == [0.5]
    assert rates(kind, 1, 0.5, warmup=1).tolist() == [0.5]
    np.testing.assert_allclose(rates(kind, 4, 1.0, warmup=4), [0.25, 0.5, 0.75, 1.0])
    assert not rates(kind, 5, 0.0, warmup=2).any()
    np.testing.assert_array_equal(rates(kind, 50, 0.3, final_fraction=1.0), 0.3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "cosin"}, "no learning-rate schedule 'cosin'; there are cosine, linear, constant, wsd"),
        ({"steps": -1}, "-1 steps"),
        ({"warmup": 11}, "11 steps of warm-up in a run of 10: choose 0 to 10"),
        ({"warmup": -1}, "-1 steps of warm-up"),
        ({"rate": -1e-3}, "learning rate of -0.001"),
        ({"rate": math.nan}, "learning rate of nan"),
        ({"rate": math.inf}, "learning rate of inf"),
        ({"final_fraction": 1.5}, "1.5 times the rate"),
        ({"final_fraction": -0.1}, "-0.1 times"),
        ({"final_fraction": math.nan}, "nan times"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        rates(**{"kind": "cosine", "steps": 10, "rate": 1e-3} | change)
    assert words in str(caught.value)
