"""Which versions of the optional libraries this process would use, asked without starting any of them."""

from __future__ import annotations

from collections.abc import Callable

from kbench.device.cuda.nccl import load_nccl
from kbench.errors import LibraryMissing


def library_versions() -> dict[str, int | str]:
    """Those of cuBLASLt (130000), cuDNN ("9.13.0") and NCCL (22707), as far as they are installed.

    What runs is settled here before any plan opens a library, so that every record has it.
    """
    asked: dict[str, Callable[[], int | str]] = {"cublaslt": _cublaslt, "cudnn": _cudnn, "nccl": _nccl}
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        # No Python package; no library that it could load; a package that looks for its library at the first call.
        except (ImportError, OSError, RuntimeError, LibraryMissing):
            continue
    return found


def _cublaslt() -> int:
    from nvmath.bindings import cublasLt

    return int(cublasLt.get_version())


def _cudnn() -> str:
    import cudnn

    return str(cudnn.backend_version_string())


def _nccl() -> int:
    return int(load_nccl().get_version())
