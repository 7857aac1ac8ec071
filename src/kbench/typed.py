"""Whether what a JSON file holds has the types that a dataclass declares: a file may have been edited by hand."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any


def misfit(of: type, data: Mapping[str, Any]) -> str:
    """A field of a dataclass whose value in `data` is of another type, and that value, such as "sizes is 5"; "" if
    there is none. Fields that `data` does not have, and keys that are no fields, are left alone."""
    for name, check in _to_check(of, tuple(data), tuple(map(type, data.values()))):
        if not check(data[name]):
            return f"{name} is {data[name]!r}"[:60]
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


# The rows of a file have the same fields with values of the same kinds, all but a few: so in each only those are looked
# at that their kind does not settle. As many combinations as the odd rows of some files have.
@functools.lru_cache(maxsize=4096)
def _to_check(of: type, names: tuple[str, ...], kinds: tuple[type, ...]) -> tuple[tuple[str, Check], ...]:
    """The fields to look at in data of these fields and kinds, with their checks."""
    checks = _checks(of)
    known = [(checks[name], name, kind) for name, kind in zip(names, kinds, strict=True) if name in checks]
    return tuple(
        (name, check) for check, name, kind in known if not (isinstance(check, _Kinds) and kind in check.kinds)
    )


@functools.cache  # records are checked by the hundred thousand: what a type means is found out once
def _check(hint: Any) -> Check:
    kind, of = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _anything
    if kind in (typing.Union, types.UnionType):
        if not any(typing.get_origin(one) or is_dataclass(one) or one is Any for one in of):
            kinds = tuple(kind for one in of for kind in _KINDS.get(one, (one,)))
            return _Kinds(kinds)
        return _any_of([_check(one) for one in of])
    if kind in (list, tuple, Sequence):
        return _list_of(_check(of[0]))
    if kind in (dict, Mapping):
        return _dict_of(_check(of[1]))
    if is_dataclass(hint):
        made = typing.cast(type, hint)
        return lambda value: _is_mapping(value) and not misfit(made, value)
    # By the exact type, which is quick and tells bools, which are ints in Python, from JSON's numbers.
    return _Kinds(_KINDS.get(hint, (hint,)))


_KINDS: dict[Any, tuple[type, ...]] = {float: (int, float), Path: (str,), None: (types.NoneType,)}


@dataclass(frozen=True)
class _Kinds:
    """Whether a value is of one of these types."""

    kinds: tuple[type, ...]

    def __call__(self, value: Any) -> bool:
        return type(value) in self.kinds


def _anything(value: Any) -> bool:
    return True


def _any_of(checks: list[Check]) -> Check:
    return lambda value: any(check(value) for check in checks)


def _list_of(check: Check) -> Check:
    if check is _anything:
        return lambda value: isinstance(value, list | tuple)
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _dict_of(check: Check) -> Check:
    if check is _anything:
        return _is_mapping
    return lambda value: _is_mapping(value) and all(map(check, value.values()))


def _is_mapping(value: Any) -> bool:
    return type(value) is dict or isinstance(value, Mapping)  # nearly all are, and are not asked about slowly
