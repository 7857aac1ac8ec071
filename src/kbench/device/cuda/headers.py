"""Where the headers of CUDA are: those of pip's packages, of a toolkit, or of conda, of the compiler's version."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_VERSION = re.compile(r"#\s*define\s+CUDART_VERSION\s+(\d+)")
# CUDART_VERSION stands some 6 KB into a file of 600 KB.
_VERSION_WITHIN = 65_536

# NVRTC has no host headers; a `.cu` for three compilers includes them under a guard.
_HOST_HEADERS = re.compile(
    r"^(c?(assert|float|limits|math|stdarg|stddef|stdint|stdio|stdlib|string|time)(\.h)?"
    r"|algorithm|array|atomic|functional|iostream|memory|numeric|string|tuple|type_traits|utility|vector)$"
)


@dataclass(frozen=True)
class HeaderSet:
    """The include folders of one installation, and the CUDA version of the runtime header in it."""

    version: tuple[int, int]
    folders: tuple[Path, ...]


def cuda_headers(version: tuple[int, int]) -> tuple[Path, ...]:
    """Include folders for an NVRTC of this version.

    Headers of the very same version if there are any (several installations of it complete each other: pip's
    runtime package has no `crt/`), else the first ones of the same major version; never those of another one.
    Empty if there are none: a `.cu` that includes nothing of CUDA's still compiles.
    """
    sets = [found for root in _roots() if (found := _header_set(root)) is not None]
    same = [found for found in sets if found.version == version]
    near = same or [found for found in sets if found.version[0] == version[0]][:1]
    return tuple(dict.fromkeys(folder for found in near for folder in found.folders))


def headers_version(folders: tuple[Path, ...]) -> int:
    """CUDART_VERSION of the first runtime header in `folders` (13000), 0 without one."""
    for folder in folders:
        if (folder / "cuda_runtime_api.h").is_file():
            return _cudart_version(folder)
    return 0


def remedy(header: str, version: tuple[int, int]) -> str:
    """What to do about a header that was not found."""
    if _HOST_HEADERS.match(header):
        return "NVRTC has no host headers: include it under `#ifndef __CUDACC_RTC__`, or use <cuda/std/...>"
    package = _package(header, version[0])
    if package is None:
        return "put it beside the .cu or in kbench's dev_kernels, and include it with quotes"
    return f"pip install '{package}=={version[0]}.{version[1]}.*'"


def _package(header: str, major: int) -> str | None:
    if header.startswith("crt/"):
        return "nvidia-cuda-crt" if major >= 13 else "nvidia-cuda-nvcc-cu12"
    suffix = "" if major >= 13 else f"-cu{major}"
    if header.startswith(("nv/", "cuda/", "cub/", "thrust/")):
        return f"nvidia-cuda-cccl{suffix}"
    if re.match(r"(cuda_|cooperative_groups|mma\.h|math_constants|vector_types|device_|library_types)", header):
        return f"nvidia-cuda-runtime{suffix}"
    return None


def _roots() -> list[tuple[Path, ...]]:
    """Groups of folders that belong together, the likeliest first."""
    groups: list[tuple[Path, ...]] = []
    spec = importlib.util.find_spec("nvidia")
    for place in map(Path, (spec and spec.submodule_search_locations) or ()):
        groups += [(include,) for include in sorted(place.glob("cu[0-9]*/include"), reverse=True)]
        groups.append(tuple(place / part / "include" for part in ("cuda_runtime", "cuda_nvcc", "cuda_cccl")))
    toolkits = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/opt/cuda"]
    groups += [(Path(toolkit) / "include",) for toolkit in toolkits if toolkit]
    groups += [(include,) for include in sorted(Path(sys.prefix).glob("targets/*-linux/include"))]  # conda
    return groups


def _header_set(group: tuple[Path, ...]) -> HeaderSet | None:
    number = next((_cudart_version(f) for f in group if (f / "cuda_runtime_api.h").is_file()), 0)
    if not number:
        return None
    folders = [folder for base in group for folder in (base, base / "cccl") if folder.is_dir()]
    return HeaderSet((number // 1000, number % 1000 // 10), tuple(folders))


def _cudart_version(folder: Path) -> int:
    try:
        with open(folder / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as file:
            match = _VERSION.search(file.read(_VERSION_WITHIN))
    except OSError:
        return 0
    return int(match.group(1)) if match else 0
