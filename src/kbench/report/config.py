"""`kbench.toml`: what a project wants its reports to be judged by.

    [report]
    threshold = "3%"

    [report.thresholds]
    layernorm_forward = "5%"

    [report.budgets]
    "layernorm_forward.6.registers" = "<= 40"
    "*.spill_bytes" = "== 0"

Other tables are not the report's, and are left alone.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.errors import UsageError
from kbench.report.budget import Budget, parse_budget, require_known
from kbench.report.thresholds import Thresholds, parse_fail_on, parse_threshold

NAME = "kbench.toml"
_KEYS = ("threshold", "thresholds", "budgets", "fail_on")


@dataclass(frozen=True)
class Config:
    """What a report is judged by. fail_on: None where the file does not say."""

    path: Path | None = None
    thresholds: Thresholds = Thresholds()
    budgets: tuple[Budget, ...] = ()
    fail_on: tuple[str, ...] | None = None

    def require_known(self, families: Collection[str], metrics: Collection[str]) -> None:
        """Raises UsageError for a family or metric that neither kbench nor the records have."""
        for name in self.thresholds.by_family:
            if name not in families:
                near = difflib.get_close_matches(name, families, n=1)
                hint = f"did you mean {near[0]}?" if near else f"families: {', '.join(sorted(families))}"
                raise UsageError(f"{self.path}: report.thresholds: unknown family {name!r}", hint)
        for budget in self.budgets:
            require_known(budget, families, metrics, f"{self.path}: report.budgets")


def read_config(path: Path | None) -> Config:
    """The file that was named, or the folder's own, or nothing. Raises UsageError, naming file and key."""
    if path is None:
        path = Path(NAME)
        if not path.exists():
            return Config()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    return _config(path, _table(document, "report", path))


def _config(path: Path, report: Mapping[str, Any]) -> Config:
    for key in report:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{path}: report.{key} means nothing", f"{meant}there are {', '.join(_KEYS)}")
    own = {
        family: parse_threshold(text, f"{path}: report.thresholds.{family}")
        for family, text in _table(report, "thresholds", path).items()
    }
    usual = Thresholds().usual
    if "threshold" in report:
        usual = parse_threshold(report["threshold"], f"{path}: report.threshold")
    budgets = [
        parse_budget(key, text, f"{path}: report.budgets")
        for key, text in _lines(_table(report, "budgets", path), path).items()
    ]
    return Config(path, Thresholds(usual, own), tuple(budgets), _fail_on(report.get("fail_on"), path))


def _fail_on(value: Any, path: Path) -> tuple[str, ...] | None:
    if value is None:
        return None
    what = f"{path}: report.fail_on"
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"{what} is not a list of names", 'write fail_on = ["regression"], or [] for none')
    return parse_fail_on(",".join(value), what) if value else ()


def _lines(budgets: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Lines by their whole keys. Raises UsageError for one that is there twice: to TOML, "a.b" and a.b are two."""
    found: dict[str, Any] = {}
    for key, value in _flat(budgets):
        if key in found:
            raise UsageError(f"{path}: report.budgets: {key} stands there twice", "leave one of them out")
        found[key] = value
    return found


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Without quotes, a dot of TOML begins another table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _table(holder: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = holder.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {name} is not a table", f"write [{name}] above its lines")
    return table
