"""Why a GPU cannot be used, in one line, with nothing on stderr."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kbench.device.cuda import probe


class FakeDriver:
    """libcuda with chosen answers."""

    def __init__(self, version: int = 13_000, count: int = 1, start_up: int = 0):
        self._version, self._count, self._start_up = version, count, start_up

    def cuDriverGetVersion(self, result: Any) -> int:
        result._obj.value = self._version
        return 0

    def cuInit(self, flags: int) -> int:
        return self._start_up

    def cuDeviceGetCount(self, result: Any) -> int:
        result._obj.value = self._count
        return 0


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None, cupy_cuda: int | None = 13) -> None:
    def load(name: str) -> FakeDriver:
        if driver is None:
            raise OSError("no such library")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(probe, "_installed", lambda name: cupy_cuda is not None or name != "cupy")
    if cupy_cuda is not None:
        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cuda.runtime = SimpleNamespace(runtimeGetVersion=lambda: cupy_cuda * 1000 + 20)
        cupy.cuda = cuda
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


@pytest.mark.parametrize(
    ("driver", "cupy_cuda", "words"),
    [
        (None, 13, "no NVIDIA driver"),
        (FakeDriver(count=0), 13, "CUDA_VISIBLE_DEVICES"),
        (FakeDriver(start_up=100), 13, "CUDA error 100"),
        (FakeDriver(), None, "CuPy is not installed: pip install"),
        (FakeDriver(version=12_040), None, "[cuda12]"),
        (FakeDriver(version=12_040), 13, "built for CUDA 13 (driver 580 or later), the driver supports CUDA 12.4"),
    ],
)
def test_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    driver: FakeDriver | None,
    cupy_cuda: int | None,
    words: str,
) -> None:
    install(monkeypatch, driver, cupy_cuda)
    reason = probe.probe_gpu()
    assert words in reason and "\n" not in reason
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("version", "cupy_cuda"), [(13_000, 13), (13_000, 12), (12_090, 12)])
def test_no_reason_where_all_is_there(monkeypatch: pytest.MonkeyPatch, version: int, cupy_cuda: int) -> None:
    install(monkeypatch, FakeDriver(version), cupy_cuda)
    assert probe.probe_gpu() == ""
    assert probe.driver_version() == version


def test_without_a_driver_its_version_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert probe.driver_version() == 0
