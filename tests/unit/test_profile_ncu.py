"""Finding ncu, what it is told, and what its failures are taken for."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from kbench.errors import CannotRunError, Exit, UsageError
from kbench.jobs import Job
from kbench.profile import ncu as module
from kbench.profile.launch import Spec
from kbench.profile.ncu import Finished, Ncu, fault_of, find_ncu, profile, tail

VERSION = 'if [ "$1" = --version ]; then echo "Version 2025.3.1.0 (build 1)"; exit 0; fi\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No ncu of this machine."""
    monkeypatch.setattr(module, "_FOLDERS", (str(tmp_path / "usual"),))
    monkeypatch.setattr(module, "_INSTALLED", str(tmp_path / "installed"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    for name in module._VARIABLES:
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------------------------------------- finding


def test_ncu_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    places = ["installed/2024.1.0/ncu", "installed/2025.2.0/ncu", "usual/ncu", "home/bin/ncu", "path/ncu", "given/it"]
    for place in places:
        made = program(tmp_path / place, VERSION)
        if place != "given/it":
            assert find_ncu() == Ncu(str(made), "2025.3.1.0")
    assert find_ncu(tmp_path / "given/it").path == str(tmp_path / "given/it")


def test_without_ncu_it_is_said_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_PATH", "/some/cuda")
    with pytest.raises(CannotRunError) as caught:
        find_ncu()
    assert all(word in str(caught.value) for word in ("PATH", "/some/cuda/bin", "usual", "installed", "cuda-nsight"))


def test_what_is_named_has_to_be_a_program(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    for wrong in ("text", "missing", "."):
        with pytest.raises(UsageError, match="no program"):
            find_ncu(tmp_path / wrong)


def test_an_ncu_that_does_not_start_is_no_ncu(tmp_path: Path) -> None:
    broken = program(tmp_path / "ncu", "echo libfoo.so is missing >&2; exit 127")
    with pytest.raises(CannotRunError, match=r"status 127\): libfoo.so is missing"):
        find_ncu(broken)
    no_format = tmp_path / "other"
    no_format.write_bytes(b"\x7fELF")
    no_format.chmod(0o755)
    with pytest.raises(CannotRunError, match="cannot run"):
        find_ncu(no_format)
    assert find_ncu(program(tmp_path / "silent", "")).version == ""


# ---------------------------------------------------------------------------------------------- failures

PASSED = {"jobs": [{"name": "toy version 1", "passed": True, "steps": {"Launch": 1, "Fill": 1}}]}
WRONG = {"jobs": [PASSED["jobs"][0], {"name": "toy version 2", "passed": False, "reason": "out: bad", "steps": {}}]}
COPIES = {"jobs": [{"name": "toy version 3", "passed": True, "steps": {"Copy": 2}}]}
PERMISSION = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n==WARNING== No kernels were profiled.\n"


def test_a_report_of_a_version_that_is_right_is_no_failure() -> None:
    assert fault_of(Finished(0, "==PROF== fine"), PASSED, True) is None
    assert fault_of(Finished(0, "==PROF== fine"), WRONG, True) is not None


@pytest.mark.parametrize(
    ("output", "answer", "words", "status"),
    [
        (PERMISSION, PASSED, "NVreg_RestrictProfilingToAdminUsers=0", Exit.CANNOT),
        (PERMISSION, None, "run as root", Exit.CANNOT),
        ("", {"error": "no memory", "exit_status": 5}, "under ncu: no memory", Exit.CANNOT),
        ("", {"error": "a trap", "exit_status": 6}, "under ncu: a trap", Exit.CRASHED),
        ("Traceback\nNameError: x\n", None, "status 3 before the launches were made: Traceback / NameError: x", 5),
        ("No kernels were profiled", WRONG, "toy version 2 is wrong under ncu: out: bad", Exit.WRONG),
        ("No kernels were profiled", COPIES, "toy version 3 launches no kernel", Exit.CANNOT),
        ("==WARNING== No kernels were profiled.\n", PASSED, "ncu saw no kernel", Exit.CANNOT),
        ("", PASSED, "left no report (status 3): no output", Exit.CANNOT),
    ],
)
def test_failures(output: str, answer: dict[str, object] | None, words: str, status: int) -> None:
    fault = fault_of(Finished(3, output), answer, False)
    assert fault is not None and words in str(fault) and fault.exit_status == status


def test_the_tail_is_what_it_calls_errors_or_its_last_words() -> None:
    assert tail("a\n==ERROR== b\nc\n\n") == "==ERROR== b"
    assert tail("a\nb\n\nc\nd\n") == "b / c / d" and len(tail("x" * 9000)) == 400


# ---------------------------------------------------------------------------------------------- running


def spec(folder: Path) -> Spec:
    return Spec((Job("toy", 1, "", {"N": 4}, "fp32", 32),), 1, str(folder / "answer.json"), ("/a folder",))


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    assert Spec.from_json(spec(tmp_path).to_json()) == spec(tmp_path)


# Refuses the metrics that $UNKNOWN names, one at a time, as ncu does; then answers, and leaves its arguments as report.
PICKY = """
case "$1" in --import) cat "$2"; exit 0;; esac
for metric in $UNKNOWN; do
    case "$*" in *"$metric"*) echo "==ERROR== Failed to find metric regex:^$metric(\\.sum|)"; exit 1;; esac
done
echo '{"jobs": [{"passed": true, "steps": {"Launch": 1}}]}' > "$FOLDER/answer.json"
echo "$*" > "$FOLDER/profile.ncu-rep"
"""


@pytest.mark.parametrize(
    ("unknown", "left"),
    [
        ("", ["a__x.sum", "b__y.sum", "c__z.pct"]),
        ("b__y.sum", ["a__x.sum", "c__z.pct"]),
        ("b__y", ["a__x.sum", "c__z.pct"]),
        ("a__x.sum b__y.sum c__z", []),
    ],
)
def test_metrics_that_ncu_does_not_know_are_left_out(
    unknown: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNKNOWN", unknown)
    monkeypatch.setenv("FOLDER", str(tmp_path))
    ncu = Ncu(str(program(tmp_path / "ncu", PICKY)), "")
    shown: list[str] = []
    found = profile(
        ncu, spec(tmp_path), tmp_path, 20, cache_control="none", metrics=("a__x.sum", "b__y.sum", "c__z.pct"),
        show=shown.append,
    )  # fmt: skip
    words = found.raw.split()
    assert (words[words.index("--metrics") + 1].split(",") if "--metrics" in words else []) == left
    assert set(found.left_out) == {"a__x.sum", "b__y.sum", "c__z.pct"} - set(left)
    assert words[words.index("--clock-control") + 1] == "none" and words[words.index("--cache-control") + 1] == "none"
    assert "Occupancy" in words and words[-2:] == ["kbench.profile.launch", str(tmp_path / "spec.json")]
    assert len(shown) == 1 + len(unknown.split())


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    text = f"echo working; sh -c 'echo $$ > {tmp_path}/child; sleep 60' & wait"
    ncu = Ncu(str(program(tmp_path / "ncu", text)), "")
    with pytest.raises(CannotRunError, match=r"longer than 0.8 s and was ended; its last words: working; a larger"):
        profile(ncu, spec(tmp_path), tmp_path, 0.8, cache_control="all")
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not alive(child):
            return
        time.sleep(0.02)
    raise AssertionError("the child is still there")


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
