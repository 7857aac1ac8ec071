"""Whether what a JSON file holds has the types that a dataclass declares: a file may have been edited by hand."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any


def misfit(of: type, data: Mapping[str, Any]) -> str:
    """The first of the fields of a dataclass whose value in `data` is of another type, and that value, such as
    "sizes is 5"; "" if there is none. Fields that `data` does not have, and keys that are no fields, are left alone."""
    checks = _checks(of)
    for name, value in data.items():
        check = checks.get(name)
        if check is not None and not check(value):
            return f"{name} is {value!r}"[:60]
    return ""


def fits(value: object, hint: Any) -> bool:
    """Whether a value of JSON is what the type stands for there: lists for tuples, texts for paths."""
    return _check(hint)(value)


Check = Callable[[Any], bool]


@functools.cache
def _checks(of: type) -> dict[str, Check]:
    """Of each field, of classes whose modules import all that they name; fields that may hold anything are left out."""
    hints = typing.get_type_hints(of)
    return {name: _check(hint) for name, hint in hints.items() if hint is not Any}


@functools.cache  # records are checked by the hundred thousand: what a type means is found out once
def _check(hint: Any) -> Check:
    kind, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: True
    if kind in (typing.Union, types.UnionType):
        if not any(typing.get_origin(one) or is_dataclass(one) or one is Any for one in of):
            kinds = tuple(kind for one in of for kind in _KINDS.get(one, (one,)))
            return lambda value: type(value) in kinds
        return _any_of([_check(one) for one in of])
    if kind in (list, tuple, Sequence):
        return _list_of(_check(of[0]))
    if kind in (dict, Mapping):
        return _dict_of(_check(of[1]))
    if is_dataclass(hint):
        made = typing.cast(type, hint)
        return lambda value: isinstance(value, Mapping) and not misfit(made, value)
    # By the exact type, which is quick and tells bools, which are ints in Python, from JSON's numbers.
    kinds = _KINDS.get(hint, (hint,))
    return lambda value: type(value) in kinds


_KINDS: dict[Any, tuple[type, ...]] = {float: (int, float), Path: (str,), None: (types.NoneType,)}


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(check(value) for check in checks)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, Mapping) and all(map(check, value.values()))
