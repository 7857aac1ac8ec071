"""Bars and what they are drawn with."""

from __future__ import annotations

import io
import sys

import pytest

from kbench.drawn import BAR_WIDTH, bar, drawable


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "··········"), (0.01, "▏·········"), (0.05, "▌·········"), (0.62, "██████▎···"), (1, "██████████"),
     (0.999, "██████████"), (1.02, "██████████"), (-0.1, "··········")],
)  # fmt: skip
def test_a_bar_has_a_tenth_for_each_character(share: float, drawn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert bar(share) == drawn and len(drawn) == BAR_WIDTH


def test_an_encoding_without_blocks_gets_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert bar(0.62) == "######...." and not drawable("█") and drawable("#")
