"""Whether this machine has a GPU that kbench can use."""

from __future__ import annotations

import ctypes
import importlib.util

from kbench.install import install_command

# "driver 580 or later" says more to a user than CUDA's own number (CUDA Toolkit release notes, table 3).
_NVML_VERSION_BYTES = 80  # NVML's own constant for the length of version texts, NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
_FIRST_DRIVER = {12: "525.60", 13: "580"}


def probe_gpu() -> str:
    """ "" if there is a usable GPU and CuPy, else the reason in one line.

    It initialises the driver: a process that called it must not go on with CUDA in a fork (a new process is fine).
    """
    version, reason = _driver()
    if reason:
        return reason
    missing = [name for name in ("cupy", "cuda.bindings.driver") if not _installed(name)]
    extra = "cuda13" if version >= 13000 else "cuda12"
    if missing:
        package = "CuPy" if missing[0] == "cupy" else "cuda-bindings"
        return f"there is a GPU, but {package} is not installed: {install_command(extra)}"
    return _cupy_fits(version, extra)


def driver_version() -> int:
    """CUDA version that the driver supports, such as 13000; 0 without a driver."""
    return _driver()[0]


def driver_release() -> str:
    """The driver's own version, such as "580.159.04"; "" where NVML does not say."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(_NVML_VERSION_BYTES)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, _NVML_VERSION_BYTES):
        return ""
    library.nvmlShutdown()
    return text.value.decode()


def _driver() -> tuple[int, str]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, "no NVIDIA driver (libcuda.so.1 is not found)"
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    if status := library.cuDriverGetVersion(ctypes.byref(version)):
        return 0, f"the NVIDIA driver does not answer (CUDA error {status})"
    if status := library.cuInit(0):
        return version.value, f"no usable GPU (the driver's start-up ends in CUDA error {status})"
    if library.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return version.value, "no GPU is visible to this process (see CUDA_VISIBLE_DEVICES)"
    return version.value, ""


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a parent package is missing
        return False


def _cupy_fits(version: int, extra: str) -> str:
    try:
        from cupy.cuda import runtime

        major = runtime.runtimeGetVersion() // 1000
    except Exception as error:  # whatever a broken installation raises on import
        first_line = (str(error).splitlines() or [""])[0]
        return f"CuPy does not load ({type(error).__name__}: {first_line}): {install_command(extra)}"
    if major > version // 1000:
        first = _FIRST_DRIVER.get(major, "a newer one")
        has = f"CUDA {version // 1000}.{version % 1000 // 10}"
        needs = f"CuPy is built for CUDA {major} (driver {first} or later)"
        return f"{needs}, the driver supports {has}: {install_command(extra)}"
    return ""
