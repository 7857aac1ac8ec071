"""JSON that every parser reads: NaN and infinity, which JSON does not have, become null."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def dumps(data: Any, indent: int | None = None) -> str:
    """JSON text of dicts, lists, strings, numbers, booleans and None. Raises TypeError for anything else.

    Bytes of a file's name that are no text, which Python holds as halves of characters, are escaped: no file takes them
    as they are, and they come back as they were.
    """
    text = json.dumps(_finite(data), allow_nan=False, indent=indent, ensure_ascii=False)
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _finite(data: Any) -> Any:
    # A non-finite error ratio is no reason to lose the row that reports it, so it is written as "no number".
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
