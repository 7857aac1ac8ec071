"""CuPy and nvmath as they are installed: what of them can be seen without a GPU. Skipped where they are not."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kbench.errors import CannotRunError, KernelFault
from kbench.inspect.architectures import architecture_of

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


def test_the_cuda_device_and_its_libraries_import() -> None:
    pytest.importorskip("nvmath", reason="nvmath-python is not installed")
    import nvmath.bindings.cublasLt

    import kbench.device.cuda.device
    import kbench.measure.timer

    assert kbench.device.cuda.device.CudaDevice.kind == "cuda"
    assert callable(kbench.measure.timer.time_plan)
    assert callable(nvmath.bindings.cublasLt.matmul)


def test_errors_of_cupys_runtime_and_driver_are_translated() -> None:
    from kbench.device.cuda.faults import translated

    with pytest.raises(KernelFault) as fault, translated("a copy"):
        raise cupy.cuda.runtime.CUDARuntimeError(700)
    assert (fault.value.kind, fault.value.context_lost) == ("illegal-access", True)
    with pytest.raises(CannotRunError, match="a copy: not enough GPU memory"), translated("a copy"):
        raise cupy.cuda.runtime.CUDARuntimeError(2)


def test_the_driver_error_is_where_we_look_for_it() -> None:
    assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)


def test_no_gpu_memory_is_told_from_no_main_memory() -> None:
    """CuPy's error is a MemoryError: in array operations as in what the device does itself."""
    from kbench.device.cuda.device import CudaDevice
    from kbench.device.cuda.faults import translated

    def exhaust() -> None:
        raise cupy.cuda.memory.OutOfMemoryError(1 << 40, 0)

    with pytest.raises(CannotRunError, match="preparing a plan: not enough GPU memory"), translated("preparing a plan"):
        exhaust()
    device = object.__new__(CudaDevice)
    device.ordinal, device._runtime = 0, SimpleNamespace(setDevice=lambda ordinal: None)
    device._device = device.stream = nullcontext()
    with pytest.raises(CannotRunError, match="not enough GPU memory"), device.activate():
        exhaust()
    with pytest.raises(MemoryError), device.activate():
        raise MemoryError


def test_a_description_names_the_libraries_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.device.cuda import versions
    from kbench.device.cuda.device import CudaDevice
    from kbench.errors import LibraryMissing

    def missing() -> None:
        raise LibraryMissing("no NCCL")

    def no_symbol() -> None:  # the package looks for its library at the first call
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    blas = SimpleNamespace(get_version=lambda: 130000)
    monkeypatch.setitem(sys.modules, "nvmath", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nvmath.bindings", SimpleNamespace(cublasLt=blas))
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version_string=lambda: "9.13.0"))
    monkeypatch.setattr(versions, "load_nccl", lambda: SimpleNamespace(get_version=lambda: 22707))
    device = object.__new__(CudaDevice)
    device.xp, device.props, device.ordinal = cupy, architecture_of("sm_90").props(), 0
    limits = {"power_limit_w": 700.0, "sm_clock_mhz": 1980, "application_clock_mhz": None}
    monkeypatch.setattr("kbench.device.cuda.device.limits", lambda ordinal: limits)
    device._runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13000)
    facts = device.describe()
    assert (facts["cublaslt"], facts["cudnn"], facts["nccl"]) == (130000, "9.13.0", 22707)
    assert device.row_name == facts["name"] == "H100 SXM"
    assert facts["props"]["multiprocessors"] == 132 and facts["limits"] == limits
    monkeypatch.setitem(sys.modules, "nvmath.bindings", None)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version_string=no_symbol))
    monkeypatch.setattr(versions, "load_nccl", missing)
    assert not {"cublaslt", "cudnn", "nccl"} & set(device.describe())
