"""The kernels of tests/emulator/kernels, compiled once per file and launched on numpy arrays."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from kbench.device.emulator.device import EmulatorDevice
from kbench.device.emulator.runtime import LaunchRequest, LoadedModule, Report
from kbench.source import Source, load_source

KERNELS = Path(__file__).parents[1] / "kernels"

_LOW = ("widen", "narrow", "narrow_double", "integers", "arithmetic", "pairs", "compare", "functions")
SHUFFLED = {
    "int": "i4", "unsigned int": "u4", "long long": "i8", "unsigned long": "u8", "float": "f4", "double": "f8",
    "__half": "u2", "__half2": "u4", "__nv_bfloat16": "u2", "__nv_bfloat162": "u4",
}  # fmt: skip
CACHED = (
    "char", "signed char", "uchar2", "char4", "short", "ushort2", "short4", "int", "uint2", "int4", "long",
    "ulonglong2", "float", "float2", "float4", "double", "double2", "__half", "__half2", "__nv_bfloat16",
    "__nv_bfloat162",
)  # fmt: skip
TILES = (1, 2, 4, 8, 16, 32)

# Every kernel of every file, by name expression.
NAMES: dict[str, tuple[str, ...]] = {
    "low_precision": (*(f"{name}<{kind}>" for kind in ("Half", "Bfloat") for name in _LOW), "classes"),
    "integers": ("integers", "wide_integers"),
    "floats": ("directed", "conversions", "functions", "special"),
    "warp": (*(f"shuffles<{name}>" for name in SHUFFLED), "partial", "votes"),
    "memory": (*(f"copy<{name}>" for name in CACHED), "vectors"),
    "atomics": ("contended", "returned"),
    "groups": ("identities", "structures", "coalesced", "whole_warp_coalesced", *(f"tiles<{n}>" for n in TILES)),
    "language": (
        "words", "private_to_the_block", "barriers", "indices",
        "static_cast<void (*)(float*)>(overloaded)", "(void (*)(int*))overloaded",
        "templated<float>", "templated<int, 3>", "templated<4>", "inner::scoped<true>", "c_linkage", "internal",
        "many", "asserts", "traps", "grid_barrier", "divergent_group", "prints",
    ),
}  # fmt: skip

_CTYPES = {
    "f": ctypes.c_float, "d": ctypes.c_double, "i": ctypes.c_int32, "u": ctypes.c_uint32, "l": ctypes.c_int64,
    "q": ctypes.c_uint64, "s": ctypes.c_int16, "t": ctypes.c_uint16, "c": ctypes.c_int8, "y": ctypes.c_uint8,
    "o": ctypes.c_bool,
}  # fmt: skip


def source_of(file: str) -> Source:
    return load_source(KERNELS / f"{file}.cu")


@functools.cache
def device() -> EmulatorDevice:
    return EmulatorDevice(time_limit=20)


@functools.cache
def module_of(file: str) -> LoadedModule:
    return device().build(source_of(file), NAMES[file])


def try_launch(
    file: str, kernel: str, grid: Any, block: Any, *args: Any, shared: int = 0, schedule: str = "forward"
) -> Report | None:
    """Run a kernel. Arrays are passed by address, so the kernel writes into them; returns what stopped it, or None."""
    module = module_of(file)
    loaded = module.kernels[kernel]
    assert len(args) == len(loaded.parameters), f"{kernel} takes {len(loaded.parameters)} arguments"
    values = [_value(parameter, arg) for parameter, arg in zip(loaded.parameters, args, strict=True)]
    request = LaunchRequest(loaded, module, _three(grid), _three(block), shared, values)
    runtime = device()._loaded_runtime()
    return runtime.launch(request, schedule, 0, device().workers, device().time_limit)


def launch(
    file: str, kernel: str, grid: Any, block: Any, *args: Any, shared: int = 0, schedule: str = "forward"
) -> None:
    """Run a kernel that must not be stopped."""
    report = try_launch(file, kernel, grid, block, *args, shared=shared, schedule=schedule)
    assert report is None, f"{kernel}: {report.kind.decode()}: {report.message.decode()} line {report.line}"


def elementwise(file: str, kernel: str, rows: int, dtype: Any, *inputs: Any) -> Any:
    """Run `kernel(out, *inputs, n)` over the inputs' n elements; returns out, of shape (rows, n)."""
    n = len(inputs[0])
    out = np.zeros((rows, n), dtype)
    launch(file, kernel, -(-n // 256), 256, out, *inputs, n)
    return out


def line_of(file: str, text: str) -> int:
    """The number of the line of a kernel file that contains `text`."""
    lines = (KERNELS / f"{file}.cu").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def _value(parameter: Any, arg: Any) -> Any:
    if isinstance(arg, np.ndarray):
        assert parameter.is_pointer and arg.flags.c_contiguous
        return ctypes.c_void_p(arg.ctypes.data)
    if isinstance(arg, ctypes.Array):
        return arg
    return _CTYPES[parameter.letter](arg)


def _three(size: Any) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
