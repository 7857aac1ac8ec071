"""Whether what a family file gave is of the kind that is wanted: such files are written by users."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def require(condition: object, text: str, found: object) -> None:
    if not condition:
        raise TypeError(f"{text}, not {found!r}")


def is_count(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


def are_sizes(values: object, least: int, most: int) -> bool:
    return isinstance(values, tuple | list) and least <= len(values) <= most and all(map(is_count, values))
