"""JSON that every parser reads: NaN and infinity, which JSON does not have, become null."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(data: Any, indent: int | None = None) -> str:
    """JSON text of dicts, lists, strings, numbers, booleans and None. Raises TypeError for anything else."""
    return json.dumps(_finite(data), allow_nan=False, indent=indent, ensure_ascii=False)


def _finite(data: Any) -> Any:
    # A non-finite error ratio is no reason to lose the row that reports it, so it is written as "no number".
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
