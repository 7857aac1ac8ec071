"""CuPy and nvmath as they are installed: what of them can be seen without a GPU. Skipped where they are not."""

from __future__ import annotations

import pytest

from kbench.errors import CannotRunError, KernelFault

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
