"""Runs of exact numbers as files for git: a file that says the same as the committed one is the committed one.

What was compiled or counted is the same each time, so that a baseline of it should change where its numbers do, and
show in a commit only then. When a run took place, how long, and under which id is left out; rows stand in one order.
Which commit the kernels were of stays as the file has it, as its time does: the first at which they gave these numbers.
"""

from __future__ import annotations

import json
from typing import Any

from kbench.errors import UsageError
from kbench.results.schema import UNPROVEN, Row
from kbench.results.store import row_key
from kbench.results.strict_json import dumps

# In the header: these tell runs apart, not what they found.
_OF_THE_RUN = ("id", "started", "command", "kbench", "revisions")


def is_exact(header: dict[str, Any]) -> bool:
    """Whether all rows of a run were compiled or counted, by its header."""
    options = header.get("options")
    return isinstance(options, dict) and options.get("mode") in UNPROVEN


def steady(data: bytes) -> bytes:
    """A run file's text with its rows in order, and without times and the run's id. Other runs stay as they are.

    Raises UsageError for what is no run file.
    """
    try:
        header, *lines = [json.loads(line) for line in data.decode("utf-8").removesuffix("\n").split("\n")]
        if not is_exact(header):
            return data
        rows = [line for line in lines if line["kind"] == "row"]
        rows.sort(key=lambda line: repr(row_key(Row.from_dict(line))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError("a run that was not written whole cannot be a baseline", "sweep again") from error
    header = {name: value for name, value in header.items() if name != "id"}
    kept = [{**row, "seconds": 0.0} for row in rows]
    footer = {"kind": "footer", "rows": len(rows), "ended": "complete"}
    return "".join(dumps(line) + "\n" for line in (header, *kept, footer)).encode("utf-8")


def says_the_same(one: bytes, other: bytes) -> bool:
    """Whether two run files differ at most in when and by which command they came about."""
    (head, *rows), (other_head, *other_rows) = one.split(b"\n"), other.split(b"\n")
    return rows == other_rows and _what(head) == _what(other_head)


def _what(head: bytes) -> Any:
    try:
        header = json.loads(head)
    except (ValueError, RecursionError):
        return head
    if not isinstance(header, dict) or not is_exact(header):
        return head
    return {name: value for name, value in header.items() if name not in _OF_THE_RUN}
