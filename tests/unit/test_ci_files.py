"""The workflow files of docs/ci/: what stands in them is what kbench takes, and what its pages say of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from ci_steps import FILES, FOLDER, commands, scripts
from kbench.cli import app

COMMANDS = [
    pytest.param(words, id=f"{path.stem}: {' '.join(words[:3])} {number}")
    for path in FILES
    for number, words in enumerate(words for script in scripts(path) for words in commands(script))
]
PAGE = (FOLDER.parent / "ci.md").read_text(encoding="utf-8")


def parsed(words: list[str]) -> dict[str, object]:
    """The values that a command would get. Raises the option parser's errors."""
    root = get_command(app._app)
    command = root.get_command(None, words[1])  # type: ignore[attr-defined]  # a group, as the application has commands
    assert command is not None, f"there is no command {words[1]}"
    context = command.make_context(words[1], words[2:])
    return context.params


def test_every_file_is_found_and_has_its_commands() -> None:
    assert [path.name for path in FILES] == ["github-gpu.yml", "github-no-gpu.yml", "gitlab.yml"]
    counts = {path.name: sum(len(commands(script)) for script in scripts(path)) for path in FILES}
    assert counts == {"github-gpu.yml": 3, "github-no-gpu.yml": 3, "gitlab.yml": 6}
    for path in FILES:
        text = re.sub(r"#.*", "", path.read_text(encoding="utf-8"))
        # Guards the parser of these tests: a command that it does not find is not tested.
        assert len(re.findall(r"\bkbench (?:check|sweep|report)\b", text)) == counts[path.name], path.name


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_is_one_that_kbench_takes(words: list[str]) -> None:
    values = parsed(words)
    assert values["family_dir"], "families of one's own are what the files are for"
    assert words[1] == "report" or values["targets"] == ["scale"]


def test_an_option_that_is_gone_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["kbench", "sweep", "scale", "--no-such-option"])
    with pytest.raises(AssertionError, match="no command"):
        parsed(["kbench", "swep"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_files_are_plain_yaml(path: Path) -> None:
    """The slips that a parser would find: tabs, odd indentation, a colon inside a plain scalar, a missing quote."""
    text = path.read_text(encoding="utf-8")
    assert "\t" not in text and text.endswith("\n") and "\r" not in text
    block = -1
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent > block >= 0:
            continue
        block = -1
        assert indent % 2 == 0, line
        content = line.strip().removeprefix("- ")
        if re.search(r"(?:^|: )(?:\||>-)$", content):
            block = indent
        if not content.startswith(("#", "|", ">")) and (match := re.match(r"[\w .-]+?:(?: (.*))?$", content)):
            value = re.sub(r" +#.*", "", match[1] or "")
            assert ": " not in value or value.startswith(('"', "[", "{")), line
            assert value.count('"') % 2 == 0, line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_scripts_are_shell_that_parses(path: Path) -> None:
    for script in scripts(path):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, f"{script}\n{done.stderr}"
        assert "${{" not in script, "what a stranger can name must not become part of a script"


def test_the_page_names_the_files_and_they_name_it() -> None:
    for path in FILES:
        assert f"ci/{path.name}" in PAGE and "docs/ci.md" in path.read_text(encoding="utf-8")


def test_a_stopped_side_ends_the_job_and_a_wrong_one_does_not() -> None:
    """What the GPU jobs do with exit statuses of sweeps, in a shell with a kbench that ends as it is told to."""
    for path in (FOLDER / "github-gpu.yml", FOLDER / "gitlab.yml"):
        script = next(script for script in scripts(path) if "for round" in script)
        loop = script.partition("before=$(")[0]
        for status, ended, sweeps in ((0, 0, 6), (3, 0, 6), (6, 0, 6), (2, 1, 1), (5, 1, 1), (70, 1, 1)):
            fake = f"kbench() {{ echo ran; return {status}; }}\n"
            done = subprocess.run(["bash", "-e"], input=fake + loop, capture_output=True, text=True)
            assert (done.returncode, done.stdout.count("ran")) == (ended, sweeps), (path.name, status)
