"""The README, pages of docs/ and the examples of the help do what they say: they are executed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kbench.catalog import load_catalog
from kbench.cli import check, doctor, export, inspect, run, sweep, train
from kbench.cli import list as listing
from kbench.cli.app import run_command
from kbench.device.cuda.compile import nvrtc_version
from kbench.device.cuda.probe import probe_gpu
from kbench.device.emulator.compiler import find_compiler
from kbench.errors import CannotRunError, Exit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+) ?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMES = (
    "README.md",
    "docs/training.md",
    "docs/sweep.md",
    "docs/tuning.md",
    "docs/inspect.md",
    "docs/export.md",
    "docs/ci.md",
)
PAGES = {page: FENCE.findall((ROOT / page).read_text(encoding="utf-8")) for page in NAMES}
BLOCKS = PAGES["README.md"]


def commands_of(text: str) -> list[str]:
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


# A block may say in its first line that its commands need a GPU or NVRTC, or are slow: then `make test-all` runs them.
# Commands of one block run one after the other in one folder: a later one may need what an earlier one left.
SESSIONS = [
    pytest.param(
        page,
        commands_of(text),
        info.split(),
        id=commands_of(text)[0],
        marks=[pytest.mark.slow] if "slow" in info.split() else [],
    )
    for page, blocks in PAGES.items()
    for kind, info, text in blocks
    if kind == "console"
]
EXAMPLES = [line for command in (listing, run, check, sweep, inspect, export, doctor) for line in command.EXAMPLES]


def cannot_run() -> str:
    """Why no kernel can run on this machine; empty if one can."""
    try:
        find_compiler()
    except CannotRunError as error:
        return f"{probe_gpu()}, and {error.message}" if probe_gpu() else ""
    return ""


def require_nvrtc() -> None:
    try:
        nvrtc_version()
    except CannotRunError as error:
        pytest.skip(f"needs NVRTC: {error.message}")


needs_kernels = pytest.mark.skipif(bool(cannot_run()), reason=cannot_run() or "kernels can run")


def in_a_folder_with_the_files_of(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own files, and the README: a text that whoever reads it has at hand."""
    (folder / "README.md").write_text(README, encoding="utf-8")
    for kind, name, text in PAGES[page]:
        if kind in ("cuda", "python") and name:  # without one it is a piece of a file
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)


@pytest.fixture
def folder_with_the_files_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder_with_the_files_of("README.md", tmp_path, monkeypatch)


def execute(line: str) -> int:
    words = shlex.split(line)
    assert words[0] == "kbench", f"only kbench can be executed here, not {line!r}"
    return run_command(words[1:])


def test_the_readme_has_commands_and_files() -> None:
    # Guards the tests below against a changed way of writing fences, which would leave them nothing to do.
    assert len(SESSIONS) >= 12 and all(session.values[1] for session in SESSIONS)
    assert {kind for kind, _, _ in BLOCKS} == {"sh", "console", "text", "cuda", "python"}
    assert {word for session in SESSIONS for word in session.values[2]} == {"gpu", "nvrtc", "slow"}
    assert {session.values[0] for session in SESSIONS} == set(PAGES)


@needs_kernels
@pytest.mark.emulator
@pytest.mark.parametrize(("page", "lines", "needs"), SESSIONS)
def test_commands_of_the_pages(
    page: str, lines: list[str], needs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "gpu" in needs and (reason := probe_gpu()):
        pytest.skip(f"only on a GPU: {reason}")
    if "nvrtc" in needs:
        require_nvrtc()
    in_a_folder_with_the_files_of(page, tmp_path, monkeypatch)
    for line in lines:
        assert execute(line) == Exit.OK, line


@needs_kernels
@pytest.mark.emulator
@pytest.mark.parametrize("line", EXAMPLES)
@pytest.mark.usefixtures("folder_with_the_files_of_the_readme")
def test_examples_of_the_help(line: str) -> None:
    if line in inspect.EXAMPLES or "--static" in line:
        require_nvrtc()
    assert execute(line) == Exit.OK


@needs_kernels
@pytest.mark.emulator
@pytest.mark.slow
def test_examples_of_the_help_of_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for line in train.EXAMPLES:
        # Of d12, and what goes on with it, the emulator would take hours.
        if not probe_gpu() or not re.search("d12|--resume", line):
            assert execute(line) == Exit.OK, line


@needs_kernels
@pytest.mark.emulator
def test_make_run_with_an_interpreter_as_it_is() -> None:
    command = ["make", "run", f"PYTHON={sys.executable}", "VENV=", "ARGS=--seed 1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "attention_backward version 5" in done.stdout and "seed 1\n" in done.stdout


@needs_kernels
@pytest.mark.emulator
def test_make_train_with_an_interpreter_as_it_is() -> None:
    options = "ARGS=--device emulator --steps 1"
    command = ["make", "train", f"PYTHON={sys.executable}", "VENV=", options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout


def test_the_make_targets_that_the_readme_names_exist() -> None:
    named = set(re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)", README, re.MULTILINE))
    named = {first or second for first, second in named}
    assert {"run", "train", "test", "help"} <= named
    for target in named:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_numbers_of_families_and_versions_are_those_of_the_catalogue() -> None:
    claim = re.search(r"(\d+) families .*?(\d+) versions in all", README, re.DOTALL)
    catalog = load_catalog()
    assert claim is not None
    assert tuple(map(int, claim.groups())) == (len(catalog), sum(len(catalog[name].versions) for name in catalog))


def test_the_table_of_families_has_the_catalogues_names_and_numbers_of_versions() -> None:
    table = README.partition("| families | versions |")[2].partition("\n\n")[0]
    found: dict[str, int] = {}
    for line in table.splitlines()[2:]:
        names, versions = line.strip("| ").split(" | ")
        # The numbers come first, as many as there are names; what is said of them follows a colon.
        numbers = re.findall(r"\d+", versions.partition(":")[0])
        found |= dict(zip(re.findall(r"`(\w+)`", names), map(int, numbers), strict=True))
    assert found == {name: len(family.versions) for name, family in load_catalog().items()}


def test_the_exit_statuses_of_the_readme_are_all_there() -> None:
    table = {int(number) for number in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert table == {int(status) for status in Exit}
