"""What this machine has for kbench, found out cheaply and without failing: the facts behind `kbench doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from kbench import __version__
from kbench.catalog import kernel_folder, load_catalog
from kbench.errors import KbenchError
from kbench.install import install_command
from kbench.results.store import require_writable

# Distributions that may carry a module: CuPy has one for each major version of CUDA.
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
# nvidia-smi answers in a second or hangs with a driver that is in trouble.
NVIDIA_SMI_SECONDS = 15.0

GPU_REMEDY = "use a machine with an NVIDIA GPU and its driver"
GPU_COMMANDS = "times in run and sweep, and training more than a tiny model"
EMULATOR_COMMANDS = "run, check, sweep and train without a GPU"


@dataclass(frozen=True)
class Library:
    """A library that few versions are built on; without it they are skipped by name.

    parts: what has to be there, each as distributions of which one will do, or the name of a shared library of the
    system. extra: kbench's, without the version of CUDA.
    """

    name: str
    parts: tuple[tuple[tuple[str, ...], str], ...]
    extra: str
    needed_by: str


OPTIONAL = (
    Library(
        "cuDNN",
        ((("nvidia-cudnn-frontend",), ""), (("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"), "cudnn")),
        "cudnn",
        "attention_backward version 10, attention_forward version 10",
    ),
    Library("NCCL", ((("nvidia-nccl-cu13", "nvidia-nccl-cu12"), "nccl"),), "nccl", "nccl_all_reduce"),
)


@dataclass(frozen=True)
class Fact:
    """One thing that this machine has or lacks.

    state: "ok", "missing", or "note" for what nothing has to be done about. needed_by: which commands or versions.
    remedy: the command that mends it.
    """

    name: str
    state: str
    value: str
    needed_by: str = ""
    remedy: str = ""


def facts(results: Path) -> list[Fact]:
    """Everything about this machine that a command of kbench depends on."""
    return [
        Fact("kbench", "ok", f"{__version__} on Python {platform.python_version()}, {platform.machine()}"),
        _kernels(),
        _compiler(),
        _gpu(),
        _cuda_device(),
        _nvrtc(),
        _distribution("CuPy", "cupy", CUPY),
        _distribution("cuda-bindings", "cuda.bindings", ("cuda-bindings",)),
        _distribution("nvmath (cuBLASLt)", "nvmath", ("nvmath-python",)),
        *(_optional(library) for library in OPTIONAL),
        _tokens(),
        _data(),
        _cache(),
        _results(results),
    ]


def can_run(found: list[Fact]) -> bool:
    """Whether the main job, `kbench run`, works here somehow: on a GPU or on the emulator."""
    state = {fact.name: fact.state for fact in found}
    return state["kernels"] == "ok" and "ok" in (state["CUDA device"], state["C++ compiler"])


def gpu_name_and_driver() -> tuple[str, str] | None:
    """The first GPU and the driver's version, as nvidia-smi says; None without either."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True)
        name, driver = answer.stdout.splitlines()[0].rsplit(", ", 1)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
    return name, driver


def cuda_extra() -> str:
    """The extra of kbench that fits the driver: cuda13 where there is none to go by."""
    from kbench.device.cuda.probe import driver_version

    return "cuda12" if driver_version() // 1000 == 12 else "cuda13"


def _kernels() -> Fact:
    try:
        names = load_catalog().names
    except KbenchError as error:
        return Fact("kernels", "missing", str(error), "every command", "install kbench again")
    folder = kernel_folder()
    if not names:
        return Fact("kernels", "missing", f"no families in {folder}", "every command", "install kbench again")
    families = "1 family" if len(names) == 1 else f"{len(names)} families"
    return Fact("kernels", "ok", f"{families} in {folder}")


def _compiler() -> Fact:
    from kbench.device.emulator.compiler import find_compiler

    remedy = f"apt install g++   (or: {install_command('compiler')})"
    return _found("C++ compiler", lambda: str(find_compiler()), EMULATOR_COMMANDS, remedy)


def _gpu() -> Fact:
    found = gpu_name_and_driver()
    if found is None:
        return Fact("GPU", "missing", "nvidia-smi finds none", GPU_COMMANDS, GPU_REMEDY)
    return Fact("GPU", "ok", f"{found[0]}, driver {found[1]}")


def _cuda_device() -> Fact:
    from kbench.device.cuda.probe import driver_version, probe_gpu

    reason = probe_gpu()
    if not reason:
        return Fact("CUDA device", "ok", "can be used")
    return Fact(
        "CUDA device",
        "missing",
        reason,
        GPU_COMMANDS,
        install_command(cuda_extra()) if driver_version() else GPU_REMEDY,
    )


def _nvrtc() -> Fact:
    from kbench.device.cuda.compile import nvrtc_version
    from kbench.device.cuda.headers import cuda_headers

    def describe() -> str:
        version = nvrtc_version()
        folders = cuda_headers(version)
        headers = f"headers in {folders[0]}" if folders else "no headers of this version"
        return f"{version[0]}.{version[1]}, {headers}"

    return _found("NVRTC", describe, "compiling for a GPU", install_command("nvrtc13"))


def _found(name: str, describe: Callable[[], str], needed_by: str, remedy: str) -> Fact:
    try:
        return Fact(name, "ok", describe())
    except KbenchError as error:
        return Fact(name, "missing", error.message, needed_by, remedy)


def _distribution(name: str, module: str, distributions: tuple[str, ...]) -> Fact:
    for distribution in distributions:
        try:
            return Fact(name, "ok", f"{metadata.version(distribution)} ({distribution})")
        except metadata.PackageNotFoundError:
            continue
    if _has_module(module):
        return Fact(name, "ok", "there, of unknown version")
    from kbench.device.cuda.probe import driver_version

    if not driver_version():
        return Fact(name, "note", "not installed, and of use only with a GPU")
    return Fact(name, "missing", "not installed", GPU_COMMANDS, install_command(cuda_extra()))


def _optional(library: Library) -> Fact:
    """A library whose lack is no fault: what it is of use for, and the command that installs it, are told."""
    from kbench.device.cuda.probe import driver_version

    found = [_part(*part) for part in library.parts]
    if all(found):
        return Fact(library.name, "ok", ", ".join(filter(None, found)))
    lacking = next(" or ".join(names) for (names, _), part in zip(library.parts, found, strict=True) if not part)
    if not driver_version():
        return Fact(library.name, "note", f"{lacking} is not installed, and of use only with a GPU")
    remedy = install_command(cuda_extra().replace("cuda", library.extra))
    skipped = f"{lacking} is not installed; skipped: {library.needed_by}"
    return Fact(library.name, "note", skipped, library.needed_by, remedy)


def _part(distributions: tuple[str, ...], system_library: str) -> str:
    """A part of a library that is there, in words; "" if it is not."""
    for distribution in distributions:
        try:
            return f"{metadata.version(distribution)} ({distribution})"
        except metadata.PackageNotFoundError:
            continue
    return find_library(system_library) or "" if system_library else ""


def _has_module(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def _tokens() -> Fact:
    """Whether text can be made into GPT-2's tokens: training without them reads bytes."""
    from kbench.train.text import EXTRA, can_encode_gpt2

    name = "GPT-2's tokens"
    if reason := can_encode_gpt2():
        remedy = install_command(EXTRA)
        return Fact(name, "note", f"{reason}: train reads text as bytes", "train and data tokens", remedy)
    return Fact(name, "ok", f"{_part(('tiktoken',), '') or 'tiktoken'}, and the vocabulary")


def _data() -> Fact:
    """Where prepared training data are, and whether they have been prepared."""
    from kbench.train.shakespeare import prepared

    files, name = prepared(), "training data"
    if files.has_tokens and files.text.is_file():
        return Fact(name, "ok", f"{files.folder} has Shakespeare as text and tokens")
    if files.text.is_file():
        has = f"{files.folder} has Shakespeare as text, without GPT-2's tokens"
    else:
        has = f"no Shakespeare in {files.folder} ($KBENCH_DATA names another folder)"
    return Fact(name, "note", has, "train --data shakespeare", "kbench data shakespeare")


def _cache() -> Fact:
    from kbench.device.cache_folder import cache_folder

    folder = cache_folder()
    if why := _unwritable(folder):
        return Fact(
            "cache",
            "missing",
            f"{folder} cannot be written: {why}; kernels are compiled again every time",
            "keeping what was compiled",
            "export KBENCH_CACHE=DIR, naming a folder that can be written",
        )
    size = sum(_size(Path(place) / name) for place, _, names in os.walk(folder) for name in names)
    return Fact("cache", "note", f"{folder}, {size / 2**20:.1f} MiB (may be deleted at any time)")


def _unwritable(folder: Path) -> str:
    """Why no file can be made below a folder, which need not exist yet; empty if one can."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        # Permission bits say nothing about read-only mounts, quotas and root.
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".kbench-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # deleted by another process since it was listed
        return 0


def _results(folder: Path) -> Fact:
    try:
        require_writable(folder)
    except KbenchError as error:
        return Fact(
            "results", "missing", error.message, "sweep", "choose another folder: --results DIR or $KBENCH_RESULTS"
        )
    return Fact("results", "ok", f"{folder.resolve()}, writable")
