"""Tests of this folder need a GPU: without one they are skipped, with the reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in item.path.parents]
    if not ours:
        return
    from kbench.device.cuda.probe import probe_gpu

    if reason := probe_gpu():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no GPU can be used: {reason}"))


@pytest.fixture(scope="session")
def device() -> Iterator[Any]:
    """One CudaDevice for all tests: a test that loses the context must run in a process of its own."""
    from kbench.device.cuda.device import CudaDevice

    cuda = CudaDevice()
    yield cuda
    cuda.close()
