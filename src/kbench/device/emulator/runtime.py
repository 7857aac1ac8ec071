"""The emulator's runtime library, as Python calls it. The structures mirror report.h, state.h and include/abi.h."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.device.arguments import Parameter, parse_signature

ORDERS = {"": 0, "forward": 0, "reverse": 1, "random": 2}
# How long a launch is waited for at a stretch: Ctrl-C takes effect in between.
_WAIT_S = 0.2


class _KernelRecord(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("signature", ctypes.c_char_p)]


class _Request(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("module", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("time_limit", ctypes.c_double),
        ("counter", ctypes.c_void_p),
    ]


class Report(ctypes.Structure):
    """What stopped a launch; see report.h."""

    _fields_ = [
        ("kind", ctypes.c_char * 24),
        ("message", ctypes.c_char * 2048),
        ("file", ctypes.c_char * 1024),
        ("line", ctypes.c_int32),
        ("has_thread", ctypes.c_int32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("frames", ctypes.c_int32),
        ("is_write", ctypes.c_int32),
        ("pc", ctypes.c_uint64 * 8),
        ("address", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel of a loaded module. address: of its record in memory."""

    name: str
    parameters: tuple[Parameter, ...]
    address: int


@dataclass(frozen=True)
class LoadedModule:
    """A library of kernels, loaded for the life of the process. path: of the library, for its debug information."""

    path: Path
    kernels: dict[str, LoadedKernel]
    address: int
    files: tuple[str, ...]  # names of the user's source files
    library: Any


@dataclass(frozen=True)
class LaunchRequest:
    """A launch with everything that stays the same when it is repeated."""

    kernel: LoadedKernel
    module: LoadedModule
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    arguments: Sequence[ctypes._SimpleCData[Any]]


_loaded: dict[str, Runtime] = {}
_loading = threading.Lock()


def load_runtime(path: Path) -> Runtime:
    """The library at `path`, loaded once: all devices of a process share it. Raises OSError if it cannot be loaded.

    Known by its name, a hash of what is in it, because kernel modules find it by that name: a second copy from
    another folder would be one that no kernel talks to.
    """
    with _loading:
        if path.name not in _loaded:
            _loaded[path.name] = Runtime(path)
        return _loaded[path.name]


class Runtime:
    """The loaded library. One launch runs at a time in a process; others wait their turn. See load_runtime."""

    def __init__(self, path: Path):
        # RTLD_LOCAL, as by default: two runtimes of different compilers must not take over each other's symbols.
        library = ctypes.CDLL(str(path))
        self.reserve = _function(library.emu_reserve, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        self.release = _function(library.emu_release, None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        self.page_size = int(_function(library.emu_page_size, ctypes.c_size_t)())
        self._find_module = _function(library.emu_find_module, ctypes.c_void_p, ctypes.c_void_p)
        self._start = _function(library.emu_start, None, ctypes.POINTER(_Request))
        self._wait = _function(library.emu_wait, ctypes.c_int, ctypes.c_double, ctypes.POINTER(Report))
        self._cancel = _function(library.emu_cancel, None)
        self.library = library
        self._turn = threading.Lock()

    def load(self, path: Path, kernels: Sequence[str], files: tuple[str, ...]) -> LoadedModule:
        """Load a library of kernels built against this runtime. Raises OSError if it cannot be loaded."""
        library = ctypes.CDLL(str(path))
        loaded: dict[str, LoadedKernel] = {}
        code: int | None = None
        for number, name in enumerate(kernels):
            record = _KernelRecord.in_dll(library, f"emu_kernel_{number}")
            code = record.call
            loaded[name] = LoadedKernel(name, parse_signature(record.signature.decode()), ctypes.addressof(record))
        return LoadedModule(path, loaded, self._find_module(code) if code else 0, files, library)

    def launch(
        self, request: LaunchRequest, order: str, seed: int, workers: int, time_limit: float, counter: int | None = None
    ) -> Report | None:
        """Run a kernel to its end; returns what stopped it, or None. KeyboardInterrupt ends it early.

        counter: what counts the accesses (`counter.py`); it takes one worker.
        """
        values = request.arguments
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        native = _Request(
            request.kernel.address, request.module.address, parameters,
            (ctypes.c_uint32 * 3)(*request.grid), (ctypes.c_uint32 * 3)(*request.block),
            request.shared, workers, ORDERS[order], seed & 0xFFFFFFFF, time_limit, counter,
        )  # fmt: skip
        report = Report()
        with self._turn:
            self._start(ctypes.byref(native))
            try:
                while not self._wait(_WAIT_S, ctypes.byref(report)):
                    pass
            except BaseException:
                self._cancel()
                raise
        return report if report.kind else None


def _function(native: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
    native.restype = result
    native.argtypes = arguments
    typed: Callable[..., Any] = native
    return typed
