"""Text from outside as a terminal, a page or a log may show it: a record is written by whoever sent it."""

from __future__ import annotations

import unicodedata

# Reordering characters make a line read as another one: https://trojansource.codes
_REORDERING = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str, keep: str = "") -> str:
    """The text with what cannot be shown, or commands a terminal, as its escape, such as "\\x1b". keep: control
    characters that stay, such as line breaks."""
    if text.isprintable():
        return text
    return "".join(letter if letter in keep or _shows(letter) else _escape(letter) for letter in text)


def _shows(letter: str) -> bool:
    if letter in _REORDERING or ord(letter) & 0xFFFE == 0xFFFE:
        return False
    # Format characters (Cf) join emoji and letters of many scripts, and are harmless but for those above.
    return unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp")


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
