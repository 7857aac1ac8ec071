"""A bug to plant into a family's device code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`old`, which stands in the source exactly once, becomes `new`: then `version` at `block` threads must fail at
    these sizes. dtype: "" is the family's default."""

    old: str
    new: str
    version: int
    block: int
    sizes: Mapping[str, int]
    dtype: str = ""
