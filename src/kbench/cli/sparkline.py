"""A series in a few characters, for a column of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from kbench.drawn import drawable

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=*^#"  # of an encoding without blocks: each higher on the line, or darker, than the one before
WIDEST = 16
# Less than this between the lowest and the highest is drawn as if it were this much: noise is to look flat.
SMALLEST = 0.04


def sparkline(values: Sequence[float], characters: str = "") -> str:
    """One character a value, the lowest first of them; of more than WIDEST, the medians of as many groups.

    characters: eight of them; those that stdout's encoding has, if left out. Heights are of logarithms where all values
    are positive.
    """
    steps = characters or (BLOCKS if drawable(BLOCKS) else PLAIN)
    heights = [math.log(value) for value in values] if all(value > 0 for value in values) else list(values)
    if len(heights) > WIDEST:
        edges = [round(i * len(heights) / WIDEST) for i in range(WIDEST + 1)]
        heights = [median(heights[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    if not heights:
        return ""
    low, high = min(heights), max(heights)
    if high - low < SMALLEST:
        middle = (low + high) / 2
        low, high = middle - SMALLEST / 2, middle + SMALLEST / 2
    return "".join(steps[min(int((h - low) / (high - low) * len(steps)), len(steps) - 1)] for h in heights)
