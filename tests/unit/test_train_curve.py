"""The loss curve: well-formed SVG whatever the losses are, points where they belong, and round ticks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kbench.axis import Axis
from kbench.train.curve import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    loss_curve,
    moving_mean,
    thinned,
    write_curve,
)
from kbench.train.log import History, StepRecord

SVG = "{http://www.w3.org/2000/svg}"


def history(losses: list[float], validation: list[tuple[int, float]] | None = None) -> History:
    return History(steps=[StepRecord(i, loss, 1.0, 1e-3) for i, loss in enumerate(losses)], validation=validation or [])


def drawn(picture: str, style: str) -> list[tuple[float, float]]:
    """The points of a curve in pixels (the first path of a style; its second is in the legend)."""
    for path in ElementTree.fromstring(picture).iter(f"{SVG}path"):
        if path.get("class") == style:
            return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) ([\d.]+)", path.get("d", ""))]
    return []


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_curves_stand_where_their_numbers_say() -> None:
    picture = loss_curve(history([5.0, 4.0, 3.0, 1.0], [(0, 4.5), (3, 2.0)]), 'nano <b> & "more"')
    across = (WIDTH - RIGHT - LEFT) / 3
    down = (HEIGHT - BOTTOM - TOP) / 4  # from 5 at the top to 1 at the bottom
    expected = [(LEFT + i * across, TOP + rows * down) for i, rows in enumerate((0, 1, 2, 4))]
    assert drawn(picture, "mean") == [pytest.approx(point, abs=0.06) for point in expected]
    assert drawn(picture, "dots") == [
        pytest.approx((LEFT, TOP + 0.5 * down), abs=0.06), pytest.approx((WIDTH - RIGHT, TOP + 3 * down), abs=0.06)
    ]  # fmt: skip
    words = texts(picture)
    assert 'nano <b> & "more"' in words and "training 1.0000" in words and "validation 2.0000" in words
    assert {"1", "2", "3", "4", "5", "step", "loss"} <= set(words)
    assert "prefers-color-scheme: dark" in picture and not drawn(picture, "losses")


@pytest.mark.parametrize(
    "losses", [[], [3.0], [2.5] * 50, [0.0] * 3, [math.nan] * 3, [1e-12, 2e-12], [1e30, 3.0], [math.inf, 2.0, 1.0]]
)
def test_any_losses_make_a_picture(losses: list[float]) -> None:
    picture = loss_curve(history(losses, [(0, losses[0])] if losses else []))
    finite = [loss for loss in losses if math.isfinite(loss)]
    assert ("no loss has been measured" in texts(picture)) == (not finite)
    assert "nan" not in picture and "inf" not in picture
    for x, y in drawn(picture, "losses") + drawn(picture, "mean") + drawn(picture, "dots"):
        assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM


def test_losses_that_are_not_finite_leave_a_gap() -> None:
    picture = loss_curve(history([4.0, 3.0, math.nan, 2.0, 1.0]))
    path = next(p for p in ElementTree.fromstring(picture).iter(f"{SVG}path") if p.get("class") == "mean")
    assert re.sub(r"[\d. ]+", "", path.get("d", "")) == "MhLMhL"
    assert "training 1.0000" in texts(picture)
    assert "training 4.0000" in texts(loss_curve(history([4.0, math.nan])))


def test_a_resumed_run_of_other_steps_starts_its_axis_there() -> None:
    run = History(steps=[StepRecord(step, 1.0 + step, 1.0, 1e-3) for step in (500, 501, 502)])
    assert drawn(loss_curve(run), "mean")[0][0] == LEFT


def test_a_long_run_gets_a_mean_and_a_small_file() -> None:
    losses = [3.0 + math.sin(i) for i in range(200_000)]
    losses[123_456] = 9.0
    picture = loss_curve(history(losses))
    assert len(picture) < 60_000 and f"mean of 20 steps {sum(losses[-20:]) / 20:.4f}" in texts(picture)
    # The axis ends at 10, the round number above the outlier, and begins at 2.
    highest = TOP + (HEIGHT - BOTTOM - TOP) / 8
    assert min(y for _, y in drawn(picture, "losses")) == pytest.approx(highest, abs=0.06), "the outlier is still there"


def test_moving_mean() -> None:
    assert moving_mean([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0.5, 2.0), (1.5, 4.0)]
    assert moving_mean([(0, 1.0)], 2) == moving_mean([], 2) == []


def test_thinned_keeps_extremes_in_order_and_gaps() -> None:
    kept = thinned([(0.1, 5.0), (0.2, 9.0), (0.3, 1.0), (0.4, 4.0), (1.0, 2.0), (1.5, math.nan), (1.6, 7.0)])
    assert kept[:3] == [(0.2, 9.0), (0.3, 1.0), (1.0, 2.0)] and math.isnan(kept[3][1]) and kept[4:] == [(1.6, 7.0)]


@pytest.mark.parametrize(
    ("low", "high", "ticks", "decimals"),
    [
        (2.93, 10.98, [2, 4, 6, 8, 10, 12], 0),
        (3.21, 3.34, [3.2, 3.25, 3.3, 3.35], 2),
        (-0.5, 0.7, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8], 1),
    ],
)
def test_ticks_are_round_and_hold_the_values(low: float, high: float, ticks: list[float], decimals: int) -> None:
    axis = Axis.over([low, high], 0, 100)
    assert axis.ticks == pytest.approx(ticks) and axis.decimals == decimals
    assert axis.low <= low and axis.high >= high and axis.pixel(axis.low) == 0 and axis.pixel(axis.high) == 100


def test_steps_get_whole_ticks_only() -> None:
    assert Axis.over([0, 3], 0, 100, whole=True).ticks == [0, 1, 2, 3]
    assert Axis.over([7, 7], 0, 100, whole=True).ticks == [7]
    assert Axis.over([0, 49], 0, 100, whole=True).ticks == [0, 10, 20, 30, 40]


def test_the_file_is_replaced_in_one_move(tmp_path: Path) -> None:
    for losses in ([3.0], [3.0, 2.0]):
        write_curve(tmp_path / "loss.svg", history(losses))
    assert "training 2.0000" in (tmp_path / "loss.svg").read_text() and len(list(tmp_path.iterdir())) == 1
