"""Families of toy kernels, with which tests sweep in a folder of their own. Nothing is proven: they compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kbench.cli.app import run_command

Sweep = Callable[[str], tuple[int, str, str]]

_CONTRACT = """
from kbench.family import CheckShape, Family, Fill, Launch, Ref, Rule, Tensor, Version, normal
{functions}
toy = Family(
    name="toy", summary="toys", sizes={{"N": "how many"}}, dtypes={dtypes},
    presets={{"default": {{"N": {default}}}, "small": {{"N": {small}}}}},
    check_shapes=(CheckShape({{"N": {small}}}, "small"),),
    tensors=lambda problem: (
        Tensor("x", (problem["N"],), "fp32", "in", draw=normal(0, 1)),
        Tensor("y", (problem["N"],), "fp32", "out"),
    ),
    reference=lambda problem, inputs, error, xp: {{}},
    versions=({versions}),
)
"""


def plant_toy(
    folder: Path,
    source: str,
    functions: str,
    versions: str,
    *,
    default: int = 4096,
    small: int = 8,
    dtypes: tuple[str, ...] = ("fp32",),
) -> Path:
    """Write the family "toy", of tensors x and y of N floats, into a folder, which is returned.

    source: its `.cu`. functions: what the versions' plans call, as Python. versions: the versions, as Python. default,
    small: N of these presets.
    """
    contract = _CONTRACT.format(functions=functions, versions=versions, default=default, small=small, dtypes=dtypes)
    (folder / "toy.cu").write_text(source)
    (folder / "toy.py").write_text(contract)
    return folder


def sweeper(folder: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """A function that sweeps with further words and a folder of families; its exit status, stdout and stderr."""

    def sweep(words: str) -> tuple[int, str, str]:
        status = run_command(["sweep", *words.split(), "--family-dir", str(folder), "--results", "results"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return sweep
