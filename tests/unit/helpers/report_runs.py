"""Run files of made-up sweeps on an H200: rows in rounds, with noise within and between them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes import make_row, measured
from gpu_rows import DEVICE, kernel
from kbench import __version__
from kbench.results.schema import SCHEMA_VERSION, Row

Change = Callable[[Row, float], tuple[Row, float]]
"""Changes a row and its time in milliseconds."""


def simulated(
    versions: Iterable[int] = (1, 2, 3, 4, 5),
    blocks: Iterable[int] = (64, 128),
    rounds: int = 3,
    samples: int = 20,
    seed: int = 1,
    change: Change = lambda row, ms: (row, ms),
    noise: float = 0.01,
    between: float = 0.003,
    family: str = "layernorm_forward",
) -> list[Row]:
    """Rows of a family, round by round. noise, between: relative standard deviations within and between rounds."""
    rng = random.Random(seed)
    rows = []
    for number in range(rounds):
        for version in versions:
            for block in blocks:
                row, ms = change(plain(version, block, family), 0.05 * version)
                if row.status == "pass":
                    level = ms * (1 + rng.gauss(0, between))
                    taken = [level * (1 + abs(rng.gauss(0, noise))) for _ in range(samples)]
                    row = replace(row, measurement={**measured(ms), "samples_ms": taken})
                elif number:
                    continue
                rows.append(replace(row, round=number))
    return rows


def plain(version: int, block: int, family: str = "layernorm_forward") -> Row:
    """A row without a time."""
    mine = kernel(f"{family}{version}<float, {block}>", 1024, block, 30 + version)
    return make_row(
        version, family=family, sizes={"B": 8, "C": 768}, block=block, device=DEVICE["name"], kernels=[mine],
        steps={"Launch": 1}, source=f"files of {version}", code=f"code of {family} {version} {block}",
    )  # fmt: skip


def write_run(path: Path, rows: Iterable[Row], device: dict[str, Any] | None = None, **header: Any) -> Path:
    """A complete run file of these rows. device: what is other than on the H200."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {
        "kind": "header", "schema": SCHEMA_VERSION, "kbench": __version__, "id": path.name.split(".")[0],
        "started": "2026-11-29T12:00:00+00:00", "command": ["kbench", "sweep"], "options": {},
        "device": {**DEVICE, **(device or {})}, **header,
    }  # fmt: skip
    lines = [head, *({"kind": "row", **row.to_dict()} for row in rows), {"kind": "footer", "ended": "complete"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def slower(factor: float, *versions: int) -> Change:
    """A change of these versions: other code, and slower by a factor."""

    def change(row: Row, ms: float) -> tuple[Row, float]:
        return (replace(row, code="other " + row.code), factor * ms) if row.version in versions else (row, ms)

    return change
