"""Whether what a JSON file holds has the types that a dataclass declares: a file may have been edited by hand."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any


def misfit(of: type, data: Mapping[str, Any]) -> str:
    """The first of the fields of a dataclass whose value in `data` is of another type, and that value, such as
    "sizes is 5"; "" if there is none. Fields that `data` does not have, and keys that are no fields, are left alone."""
    hints = _hints(of)
    return next((f"{name} is {v!r}"[:60] for name, v in data.items() if name in hints and not fits(v, hints[name])), "")


def fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON is what the type stands for there: lists for tuples, texts for paths."""
    kind, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in of)
    if kind in (list, tuple, Sequence):
        return isinstance(value, list | tuple) and all(fits(each, of[0]) for each in value)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and all(fits(each, of[1]) for each in value.values())
    if is_dataclass(hint):
        return isinstance(value, Mapping) and not misfit(typing.cast(type, hint), value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, {float: int | float, Path: str}.get(hint, hint))


@functools.cache
def _hints(of: type) -> dict[str, Any]:
    """Types of the fields; of classes whose modules import all that they name."""
    return typing.get_type_hints(of)
