"""Which commit the kernels of a run were of, from its header, for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbench.results.merge import source_headers
from kbench.revision import OWN

DIGITS = 10  # of a hash: enough for git to find it in the largest repositories
_HASH = re.compile(r"[0-9a-f]{10,64}")


def revision_text(header: Mapping[str, Any]) -> str:
    """Such as "3f1c2ab012", or "3f1c2ab012+" where the files differed from that commit; "" where it is not known.

    Where kernels came from several folders and not all of them from one commit, each of those that are known with its
    name: "kbench 3f1c2ab012, mine 9e0d771fff+".
    """
    known = [entry for entry in _list(header.get("revisions")) if _is_sound(entry)]
    if not known:
        return ""
    folders = 1 + len(_list(_mapping(header.get("options")).get("family_dirs")))
    whole = len(known) >= folders and any(entry["folder"] == OWN for entry in known)
    if whole and len({entry["commit"] for entry in known}) == 1:
        return _short({**known[0], "dirty": any(entry.get("dirty") for entry in known)})
    return ", ".join(dict.fromkeys(f"{_name(entry)} {_short(entry)}" for entry in known))


def revisions_of(header: Mapping[str, Any]) -> list[str]:
    """The same of a file: of a merged one that of each of its runs, each once; [] where nothing is known."""
    headers = source_headers(header).values() or [header]
    return list(filter(None, dict.fromkeys(map(revision_text, headers))))


def _is_sound(entry: Any) -> bool:
    """Whether it is what `kbench.revision.revisions` gives: a file may have been edited."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("folder"), str)
        and isinstance(entry.get("commit"), str)
        and _HASH.fullmatch(entry["commit"]) is not None
    )


def _short(entry: Mapping[str, Any]) -> str:
    return entry["commit"][:DIGITS] + ("+" if entry.get("dirty") else "")


def _name(entry: Mapping[str, Any]) -> str:
    return OWN if entry["folder"] == OWN else Path(entry["folder"]).name or entry["folder"]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
