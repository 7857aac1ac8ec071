"""Records of comparisons: one JSON document each, `results/compare/ID.json`. `results/README.md` describes them.

History of the schema (`schema` of each document):
1  first version.
2  each of `sides` has `params_from`; its `label`, and `command`, may name parameters: "softmax_forward:6@128,BATCH=4".
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench import __version__
from kbench.results.store import new_id, replace_text
from kbench.results.strict_json import dumps

COMPARE = "compare"
COMPARE_SCHEMA = 2


def write_comparison(folder: Path, command: str, document: Mapping[str, Any]) -> Path:
    """Write a comparison's document below the results folder; returns its path. command: what repeats it.

    Raises CannotRunError where it cannot be written.
    """
    finished = datetime.now(UTC)
    name = new_id(document["device"], finished)
    head = {"kind": "compare", "schema": COMPARE_SCHEMA, "kbench": __version__, "id": name}
    head |= {"finished": finished.isoformat(timespec="seconds"), "command": command}
    path = folder / COMPARE / f"{name}.json"
    replace_text(path, dumps({**head, **document}) + "\n")
    return path
