"""A change as people read it."""

from __future__ import annotations

import math


def percent(ratio: float) -> str:
    """Such as "+5.1%", "-33%", "x3.2"; of counts that were zero "from 0"."""
    if math.isinf(ratio):
        return "from 0"
    change = 100 * (ratio - 1)
    if change >= 199.5:
        return f"x{ratio:.3g}"
    return f"{change:+.1f}%" if abs(change) < 9.95 else f"{change:+.0f}%"
