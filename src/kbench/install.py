"""How to install an extra of kbench, as a command that works where kbench stands."""

from __future__ import annotations

import shlex
from pathlib import Path


def install_command(extra: str) -> str:
    """The pip command for `extra`. From a source tree it names the tree: a package index may hold a stranger's
    package of the same name."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{tree}[{extra}]')}"
    return f"pip install '.[{extra}]' in kbench's source folder"
