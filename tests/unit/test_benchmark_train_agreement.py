"""benchmarks/train_agreement.py: what it calls agreement, from figures that are made up."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def agreement(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("train_agreement")
    for name in ("train_agreement", "train_inside"):
        sys.modules.pop(name, None)


def test_curves_agree_by_means_of_20_steps(agreement: Any) -> None:
    base = [5.0 - i / 100 for i in range(60)]
    noise = [loss + (0.5 if i % 2 else -0.5) for i, loss in enumerate(base)]
    assert agreement.losses_agree(noise, base, base)[0], "noise within a window averages out"
    shifted = base[:40] + [loss + 0.03 for loss in base[40:]]
    verdict, worst, limit = agreement.losses_agree(shifted, base, base)
    assert not verdict and worst == pytest.approx(0.03) and limit == 0.02
    assert agreement.losses_agree(shifted, base, [loss + 0.011 for loss in base])[0], "PyTorch itself spreads as much"
    bad = [*base[:59], float("nan")]
    assert not agreement.losses_agree(bad, base, base)[0] and not agreement.losses_agree(base, base, bad)[0]
    assert not agreement.losses_agree(base, base, [*base[:59], float("inf")])[0], "a run that broke allows nothing"
    assert not agreement.losses_agree(base[:40], base, base)[0] and not agreement.losses_agree([], [], [])[0]


def test_gradients_are_judged_by_their_error_beside_pytorchs(agreement: Any) -> None:
    right = {name: np.ones(100) for name in ("good", "bad", "exact", "nan")}
    theirs = {name: values * (1 + 1e-6) for name, values in right.items()} | {"exact": right["exact"]}
    ours = {"good": right["good"] * (1 + 1.9e-6), "bad": right["bad"] * (1 + 2.1e-6),
            "exact": right["exact"] * (1 + 5e-8), "nan": right["nan"] * math.nan}  # fmt: skip
    found = {one["tensor"]: one for one in agreement.gradient_errors(ours, theirs, right)}
    assert {name: one["agrees"] for name, one in found.items()} == {
        "good": True, "bad": False, "exact": True, "nan": False
    }  # fmt: skip
    assert found["good"]["ratio"] == pytest.approx(1.9, rel=1e-3) and math.isfinite(found["exact"]["ratio"])


@pytest.mark.parametrize(
    ("ours", "gradient", "agrees"),
    [
        ([10.00009, 9.001], True, True),
        ([10.00011, 9.0], True, False),
        ([10.0, 9.0021], True, False),
        ([10.0, 9.0], False, False),
        ([10.0, math.nan], True, False),
    ],
)
def test_fp32_needs_losses_and_gradients(ours: list[float], gradient: bool, agrees: bool, agreement: Any) -> None:
    one = {"tensor": "wte", "kbench": 1e-6, "pytorch": 1e-6, "ratio": 1.0, "agrees": gradient}
    found = agreement.fp32_verdict(ours, [10.0, 9.0], 10.0, [one]) | {"batch": 4, "seq": 64}
    assert found["agrees"] is agrees
    lines = agreement.fp32_lines(found)
    assert lines[-1] == ("they agree" if agrees else "THEY DISAGREE") and all(len(line) <= 80 for line in lines)
    assert ("too far" in lines[-2]) != gradient


def test_windows_are_shown_with_difference_and_spread(agreement: Any) -> None:
    losses = {"kbench": [5.01] * 40, "flash": [5.0] * 40, "cudnn": [5.002] * 40}
    found = {"batch": 4, "seq": 8, "losses": losses, "largest_difference": 0.01, "limit": 0.02, "agrees": True}
    lines = agreement.bf16_lines(found)
    assert lines[3].split() == ["21-40", "5.0100", "5.0000", "5.0020", "+0.0100", "+0.0020"] and len(lines) == 6
