"""Logarithmic axes: equal ratios are equally far apart, and the ticks are round."""

from __future__ import annotations

import pytest

from kbench.axis import LogAxis, round_numbers


def test_equal_ratios_are_equally_far_apart() -> None:
    axis = LogAxis.over([1, 100], 0, 200, pad=1)
    assert [axis.pixel(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])


@pytest.mark.parametrize("values", [[3.0], [], [0.001, 5000.0], [0.3897, 0.3903], [7e-9, 7.0001e-9]])
def test_the_values_and_three_ticks_or_more_are_on_the_axis(values: list[float]) -> None:
    axis = LogAxis.over(values, 300, 20)
    assert all(20 <= axis.pixel(value) <= 300 for value in [*values, *axis.ticks])
    assert 3 <= len(axis.ticks) <= 12


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.5, 200, [1, 10, 100]),
        (0.9, 12, [1, 2, 5, 10]),
        (0.39, 0.44, [0.39, 0.4, 0.41, 0.42, 0.43, 0.44]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_numbers(low, high) == pytest.approx(ticks)
