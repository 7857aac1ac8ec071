"""Running ncu, Nsight Compute's command line: where it is, what it is told, and what its failures mean."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.device.worker import child_environment
from kbench.errors import CannotRunError, Exit, KbenchError, UsageError, WrongResult
from kbench.profile.launch import Spec
from kbench.profile.metrics import NAMED, SECTIONS

REPORT = ".ncu-rep"
# Where installers put it, besides PATH and the variables below.
_FOLDERS = ("/usr/local/cuda/bin",)
_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_INSTALLED = "/opt/nvidia/nsight-compute"  # NVIDIA's own packages: a folder a version
# Asked for its version, or for a table of a few launches, it takes a second or two; on a busy machine much longer.
_QUICK_SECONDS = 120.0
# A metric that this ncu or this GPU lacks ends it at once, one at a time: past these, it counts the sections only.
_TRIES = 4
_MISSING_METRIC = re.compile(r"Failed to find metric (?:regex:\^)?([\w.\\]+)")
_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_TAIL_LINES = 3
_NO_KERNELS = {"Fill", "Copy"}  # steps that the driver does by itself
_SHOW = "--debug shows all that it printed"


@dataclass(frozen=True)
class Ncu:
    """An ncu that starts. version: "2025.3.1.0", or "" where it does not say."""

    path: str
    version: str


@dataclass(frozen=True)
class Finished:
    """A program that came to its end. output: its stdout and stderr together."""

    status: int
    output: str


@dataclass(frozen=True)
class Profile:
    """What a run of ncu left. answer: what the launched process said. raw: the CSV of the page "raw". report: ncu's own
    file, in a folder that is about to go. command: as it was run. left_out: metrics that this ncu does not know."""

    answer: dict[str, Any]
    raw: str
    report: Path
    command: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def find_ncu(given: Path | None = None) -> Ncu:
    """The ncu that is named, or the first that is found. Raises UsageError where the named one is no program, and
    CannotRunError, with the places looked at, where there is none or it does not start."""
    if given is not None:
        found = shutil.which(str(given))
        if found is None:
            raise UsageError(f"--ncu {given} is no program that can be run", "name Nsight Compute's ncu")
    else:
        found = _search()
    said = _run([found, "--version"], _QUICK_SECONDS)
    if said.status != 0:
        raise CannotRunError(f"{found} --version fails (status {said.status}): {tail(said.output)}", "try --ncu PATH")
    version = re.search(r"Version\s+([\d.]+)", said.output)
    return Ncu(found, version[1] if version else "")


def _search() -> str:
    variables = [name for name in _VARIABLES if os.environ.get(name)]
    folders = [*(str(Path(os.environ[name]) / "bin") for name in variables), *_FOLDERS]
    newest = sorted(Path(_INSTALLED).glob("*/ncu"), key=lambda path: path.parent.name, reverse=True)
    places = [shutil.which("ncu"), *(f"{folder}/ncu" for folder in folders), *map(str, newest)]
    for place in places:
        if place is not None and shutil.which(place) is not None:
            return place
    raise CannotRunError(
        f"Nsight Compute's ncu is not installed: it is not in PATH, {', '.join(folders)} or {_INSTALLED}",
        "install the CUDA toolkit's package cuda-nsight-compute-MAJOR-MINOR, or name it with --ncu PATH",
    )


# ---------------------------------------------------------------------------------------------- profiling


def profile(
    ncu: Ncu,
    spec: Spec,
    folder: Path,
    seconds: float,
    *,
    cache_control: str,
    sections: Sequence[str] = SECTIONS,
    metrics: Sequence[str] = NAMED,
    show: Callable[[str], None] = lambda output: None,
) -> Profile:
    """Run `kbench.profile.launch` under ncu and read the report back. folder: for files that nobody else uses; spec's
    answer stands in it. seconds: that ncu may take.

    cache_control: "all" empties the caches before each pass over each kernel, "none" leaves them as they are. show:
    gets all that ncu and the launched process print.
    Raises WrongResult where a version fails its check, KbenchError as the launched process did, or CannotRunError for
    whatever is wrong with ncu.
    """
    spec_file, report = folder / "spec.json", folder / f"profile{REPORT}"
    spec_file.write_text(spec.to_json(), encoding="utf-8")
    wanted, left_out = list(metrics), list[str]()
    for position in range(_TRIES):
        command = _command(ncu, spec_file, report, cache_control, sections, wanted)
        done = _run(command, seconds, child_environment())
        show(done.output)
        missing = _MISSING_METRIC.search(done.output)
        if missing is None or not wanted or report.exists():
            break
        gone = [name for name in wanted if _is_named(missing[1], name)]
        if not gone or position == _TRIES - 2:
            gone = list(wanted)
        left_out += gone
        wanted = [name for name in wanted if name not in gone]
        Path(spec.answer).unlink(missing_ok=True)
    answer = _answer(Path(spec.answer))
    if (fault := fault_of(done, answer, report.exists())) is not None:
        raise fault
    read = _run(
        [ncu.path, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"],
        _QUICK_SECONDS,
        {**os.environ, "LC_ALL": "C"},  # elsewhere 1.5 may be written 1,5
    )
    if read.status != 0:
        raise CannotRunError(f"ncu cannot read its own report (status {read.status}): {tail(read.output)}")
    return Profile(answer or {}, read.output, report, tuple(command), tuple(left_out))


def _command(
    ncu: Ncu, spec_file: Path, report: Path, cache_control: str, sections: Sequence[str], metrics: Sequence[str]
) -> list[str]:
    return [
        ncu.path,
        # Programs that Python's start or a compiler calls are nobody's business.
        *("--target-processes", "application-only"),
        *("--profile-from-start", "off"),
        *("--replay-mode", "kernel"),
        # The card's clocks stay as they are: the timer takes them so, and they belong to everybody.
        *("--clock-control", "none"),
        *("--cache-control", cache_control),
        *(word for name in sections for word in ("--section", name)),
        *(("--metrics", ",".join(metrics)) if metrics else ()),
        *("--export", str(report).replace("%", "%%")),  # a per cent sign begins a placeholder
        *(sys.executable, "-m", "kbench.profile.launch", str(spec_file)),
    ]  # fmt: skip


def _is_named(pattern: str, metric: str) -> bool:
    """Whether ncu's message is about this metric: it escapes dots, and may leave out what follows the first."""
    name = pattern.replace("\\", "").rstrip(".")
    return metric == name or metric.split(".")[0] == name.split(".")[0]


def _answer(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        answer = json.loads(path.read_text(encoding="utf-8"))
        return answer if isinstance(answer, dict) else None
    return None


def fault_of(done: Finished, answer: Mapping[str, Any] | None, reported: bool) -> KbenchError | None:
    """What went wrong, by ncu's output and by what the launched process said; None if there is a report of versions
    that are right.

    reported: whether ncu left one.
    """
    if _NO_PERMISSION in done.output:
        return CannotRunError(
            f"this user may not read the GPU's performance counters ({_NO_PERMISSION})",
            "run as root (in a container with CAP_SYS_ADMIN), or load the nvidia module with "
            "NVreg_RestrictProfilingToAdminUsers=0",
        )
    if answer is not None and "error" in answer:
        fault = KbenchError(f"under ncu: {answer['error']}")
        fault.exit_status = Exit(int(answer.get("exit_status", Exit.INTERNAL)))
        return fault
    if answer is None:
        what = f"ncu ended with status {done.status} before the launches were made"
        return CannotRunError(f"{what}: {tail(done.output)}", _SHOW)
    for job in answer["jobs"]:
        if not job["passed"]:
            return WrongResult(f"{job['name']} is wrong under ncu: {job['reason']}", "it was not profiled")
        if not set(job["steps"]) - _NO_KERNELS:
            return CannotRunError(f"{job['name']} launches no kernel that ncu could profile, but only fills and copies")
    if not reported:
        nothing = "No kernels were profiled" in done.output
        what = "ncu saw no kernel" if nothing else f"ncu left no report (status {done.status})"
        return CannotRunError(f"{what}: {tail(done.output)}", _SHOW)
    return None


def tail(output: str) -> str:
    """The end of a program's output in one line: what it calls errors, if it does."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    return " / ".join((errors or lines)[-_TAIL_LINES:])[-400:] or "no output"


def _run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Finished:
    """Run a program to its end. Raises CannotRunError if it cannot be started or takes too long; with its children it
    is then ended, as it is on Ctrl-C."""
    # A file: children that outlive it would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except OSError as error:
            raise CannotRunError(f"cannot run {command[0]}: {error.strerror or error}") from error
        try:
            status = process.wait(seconds)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            said = tail(_text(output))
            raise CannotRunError(
                f"ncu took longer than {seconds:g} s and was ended; its last words: {said}",
                "a larger --time-limit gives it more",
            ) from None
        return Finished(status, _text(output))


def _text(output: Any) -> str:
    output.seek(0)
    return str(output.read().decode("utf-8", errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it has started: all of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
