"""The shell commands of the workflow files in docs/ci/, found without a library for YAML: the files are written so that
the few forms that are known here are enough."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "docs" / "ci"
FILES = sorted(FOLDER.glob("*.yml"))
# Where shell code stands: after a key, or as an item of a list below `script:`.
_CODE = re.compile(r"^(?P<indent> *)(?:- )?run: (?P<text>.*)$")
_SCRIPT = re.compile(r"^(?P<indent> *)script:$")
_ENDS = {"||", "&&", ";", ";;", "|", ")", "}", "&"}


def scripts(path: Path) -> list[str]:
    """The scripts of a file, one for each `run:` and each item of a `script:`, in their order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines):
        if match := _CODE.match(line):
            # The keys of a step stand two columns to the right of its dash.
            indent = len(match["indent"]) + (2 if line.lstrip().startswith("- ") else 0)
            found.append(_text(match["text"], lines[number + 1 :], indent))
        elif match := _SCRIPT.match(line):
            indent = len(match["indent"])
            for at, item in enumerate(_below(lines[number + 1 :], indent)):
                if item[indent:].startswith("  - "):
                    found.append(_text(item[indent + 4 :], lines[number + 2 + at :], indent + 2))
    return found


def commands(script: str) -> list[list[str]]:
    """The words of each kbench command in a script, without what the shell does with them."""
    found = []
    for line in re.sub(r"\\\n", " ", script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
        lexer.whitespace_split = True
        words = list(lexer)
        while "kbench" in words:
            words = words[words.index("kbench") :]
            end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
            found.append(words[:end])
            words = words[end:]
    return found


def _text(first: str, following: list[str], indent: int) -> str:
    """A scalar: a word or more on its line, or a block below it, of which ">-" joins the lines."""
    if first not in ("|", ">-"):
        return first
    block = [line.strip() if first == ">-" else line[indent + 2 :] for line in _below(following, indent)]
    return (" " if first == ">-" else "\n").join(block)


def _below(lines: list[str], indent: int) -> list[str]:
    """The lines that stand further to the right."""
    found = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        found.append(line)
    return found
