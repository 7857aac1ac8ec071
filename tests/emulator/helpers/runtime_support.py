"""What the tests of the emulator's runtime share: a device, kernels from kernels/, and lines marked in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.device.emulator.build import find_compiler
from kbench.device.emulator.device import EmulatorDevice
from kbench.errors import CannotRunError, KernelFault
from kbench.family import Launch, Tensor, normal
from kbench.source import Source, load_source

KERNELS = Path(__file__).parents[1] / "kernels"


def compiler_missing() -> str:
    """Why kernels cannot be compiled here; "" if they can."""
    try:
        find_compiler()
    except CannotRunError as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=compiler_missing() or "a compiler is there")


def source(name: str) -> Source:
    return load_source(KERNELS / name)


def line_of(file: str, mark: str) -> str:
    """ "file.cu:LINE" of the line that ends in the comment `// mark`."""
    lines = (KERNELS / file).read_text().splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'// {mark}'))}"


class Runner:
    """Launches kernels of one file on arrays."""

    def __init__(self, file: str, kernels: list[str], device: EmulatorDevice):
        self.device = device
        self.module = device.build(source(file), kernels)

    def __call__(
        self,
        kernel: str,
        grid: Any,
        block: Any,
        arrays: dict[str, np.ndarray],
        *numbers: int | float,
        shared: int = 0,
        schedule: str = "",
    ) -> dict[str, np.ndarray]:
        """Launch `kernel(arrays..., numbers...)`; the arrays as they are afterwards. Redzones must be whole."""
        tensors = [_tensor(name, array) for name, array in arrays.items()]
        buffers = {tensor.name: self.device.alloc(tensor) for tensor in tensors}
        try:
            for name, array in arrays.items():
                self.device.upload(buffers[name], array)
            step = Launch(kernel, _tuple(grid), _tuple(block), (*arrays, *numbers), shared)
            prepared = self.device.prepare([step], self.module, tensors)
            self.device.enqueue(self.device.bind(prepared, buffers), schedule=schedule)
            assert all(self.device.damage(buffer) is None for buffer in buffers.values())
            return {name: self.device.download(buffer) for name, buffer in buffers.items()}
        finally:
            for buffer in buffers.values():
                self.device.free(buffer)

    def fault(self, *arguments: Any, **options: Any) -> KernelFault:
        """The fault that a launch ends in."""
        with pytest.raises(KernelFault) as caught:
            self(*arguments, **options)
        return caught.value


def _tuple(dimensions: Any) -> tuple[int, ...]:
    return tuple(dimensions) if isinstance(dimensions, tuple | list) else (dimensions,)


_DTYPES = {
    "float32": "fp32",
    "float64": "fp64",
    "int32": "int32",
    "uint32": "uint32",
    "float16": "fp16",
    "uint8": "uint8",
}


def _tensor(name: str, array: np.ndarray) -> Tensor:
    return Tensor(name, array.shape, _DTYPES[str(array.dtype)], "inout", draw=normal(0, 1))
