"""Parameters: whole numbers that a version declares beside its block size, such as the packets of a thread."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from kbench.errors import UsageError

# Upper case, as sizes are: so no column of a table, and no argument of a plan, can have the same name.
_NAME = re.compile(r"[A-Z][A-Z0-9_]*")
_LARGEST = 1 << 31  # what a template argument of type int can hold, and one more


@dataclass(frozen=True)
class Param:
    """One parameter. values: what it may be, in the order in which it is swept. default: the one of them that runs
    where nobody asks for another. meaning: a few words for `kbench list`."""

    default: int
    values: tuple[int, ...]
    meaning: str = ""

    def __post_init__(self) -> None:
        listed = isinstance(self.values, tuple | list) and len(self.values) > 0
        if not listed or not all(map(_is_value, self.values)) or len(set(self.values)) < len(self.values):
            raise TypeError(f"a Param's values are a tuple of different whole numbers, 0 or more, not {self.values!r}")
        if not _is_value(self.default) or self.default not in self.values:
            raise TypeError(f"a Param's default is one of its values {self.values!r}, not {self.default!r}")
        if not isinstance(self.meaning, str):
            raise TypeError(f"a Param's meaning is a few words, not {self.meaning!r}")


def _is_value(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) < _LARGEST


def checked_params(params: object) -> None:
    """Raise TypeError for parameters that a version cannot have."""
    if not isinstance(params, Mapping) or not all(isinstance(param, Param) for param in params.values()):
        raise TypeError(f"a Version's params are a dict of Param, not {params!r}")
    for name in params:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TypeError(f"a parameter's name is upper case, such as ROWS_PER_BLOCK, not {name!r}")


def require_takes(
    function: Callable[..., Any], what: str, arguments: Sequence[str], params: Mapping[str, Param]
) -> None:
    """Raise TypeError for a function of a version that does not take these arguments, and its parameters by name. what:
    it is called in messages."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that does not say what it takes: its call will
        return
    try:
        signature.bind(*arguments, **{name: param.default for name, param in params.items()})
    except TypeError as error:
        takes = f"{what}({', '.join((*arguments, *params))})"
        raise TypeError(f"a Version with these params has a {takes}; yours: {error}") from error


def params_text(params: Mapping[str, int]) -> str:
    """Such as "ROWS=2 TILE=64"; empty without parameters."""
    return " ".join(f"{name}={value}" for name, value in params.items())


def place_text(block: int, params: Mapping[str, int]) -> str:
    """A block size with the parameters that go with it: "256", or "256 ROWS=2"."""
    return " ".join(filter(None, (str(block), params_text(params))))


def params_refusal(declared: Mapping[str, Param], chosen: Mapping[str, int]) -> str:
    """Why a version that declares `declared` does not take the values `chosen`; "" if it does."""
    for name, value in chosen.items():
        if name not in declared:
            have = f"it has {', '.join(declared)}" if declared else "it has no parameters"
            return f"parameter {name} is not declared; {have}"
        if value not in declared[name].values:
            return f"{name}={value} is not supported; it has {_listed(declared[name].values)}"
    return ""


def combinations(
    declared: Mapping[str, Param], wanted: Mapping[str, Sequence[int]], whole: bool
) -> list[dict[str, int]]:
    """What a sweep over the parameters of one version runs, the first parameter changing slowest.

    wanted: values by name; names that the version does not declare are none of its business. A parameter that is not
    named keeps its default, or takes all of its values where `whole`.
    """
    choices = [wanted.get(name, param.values if whole else (param.default,)) for name, param in declared.items()]
    return [dict(zip(declared, values, strict=True)) for values in itertools.product(*choices)]


def one_at_a_time(declared: Mapping[str, Param]) -> Iterator[dict[str, int]]:
    """Every value but the defaults once, the other parameters at theirs."""
    defaults = {name: param.default for name, param in declared.items()}
    for name, param in declared.items():
        for value in param.values:
            if value != param.default:
                yield {**defaults, name: value}


def require_declared(wanted: Mapping[str, Sequence[int]], versions: Mapping[str, Mapping[str, Param]]) -> None:
    """Raise UsageError for a name that no version declares. versions: what each declares, by "FAMILY:NUMBER"."""
    unknown = next((name for name in wanted if not any(name in declared for declared in versions.values())), None)
    if unknown is None:
        return
    have = [f"{version} has {described(declared)}" for version, declared in versions.items() if declared]
    what = f"none of the chosen versions has a parameter {unknown!r}"
    raise UsageError(what, "; ".join(have) or "they declare none")


def require_taken(chosen: Mapping[str, int], declared: Mapping[str, Param], version: str) -> None:
    """Raise UsageError for a name or a value that a version does not have. version: "FAMILY:NUMBER"."""
    for name, value in chosen.items():
        has = described(declared)
        if name not in declared:
            raise UsageError(f"{version} has no parameter {name!r}", f"it has {has}" if has else "it declares none")
        if value not in declared[name].values:
            raise UsageError(f"{version} does not take {name}={value}", f"it has {has}")


def described(declared: Mapping[str, Param]) -> str:
    """Such as "ROWS=2 (1, 2, 4)": default and values."""
    return ", ".join(f"{name}={param.default} ({_listed(param.values)})" for name, param in declared.items())


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
