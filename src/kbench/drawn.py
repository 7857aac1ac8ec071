"""Pictures of a few characters, for cells of tables."""

from __future__ import annotations

import sys

BAR_WIDTH = 10  # characters: each a tenth
_FILLED, _PARTS, _EMPTY = "█", "▏▎▍▌▋▊▉", "·"
_PLAIN_FILLED, _PLAIN_EMPTY = "#", "."


def bar(share: float) -> str:
    """A share of one as a bar of BAR_WIDTH characters, in steps of an eighth of one; of a whole one where the encoding
    has no such blocks. What is below 0 or above 1 is drawn as that."""
    share = min(max(share, 0.0), 1.0)
    if not drawable(_FILLED + _PARTS + _EMPTY):
        whole = round(BAR_WIDTH * share)
        return _PLAIN_FILLED * whole + _PLAIN_EMPTY * (BAR_WIDTH - whole)
    steps = len(_PARTS) + 1
    whole, part = divmod(round(BAR_WIDTH * steps * share), steps)
    return (_FILLED * whole + (_PARTS[part - 1] if part else "")).ljust(BAR_WIDTH, _EMPTY)


def drawable(text: str) -> bool:
    """Whether the encoding of stdout has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
