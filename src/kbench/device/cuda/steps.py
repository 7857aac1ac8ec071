"""The steps of a plan other than GEMMs, checked against device and kernel, and turned into driver calls.

A step goes through three forms: the plan's (`kbench.family`), prepared (limits and ranges checked), and bound
(a callable that takes a stream and queues the work: everything else is computed beforehand, so that a call costs
about a microsecond, allocates nothing and can be captured into a CUDA graph).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kbench.device.arguments import Parameter, typed_arguments
from kbench.device.base import KernelInfo
from kbench.device.cuda.faults import error_of
from kbench.device.dtypes import numpy_dtype
from kbench.errors import LaunchRefused
from kbench.family import ITEM_SIZES, Copy, Fill, Launch, Props, Ref, Tensor

# Queues work on a stream, given as its handle.
Runner = Callable[[int], None]
# The device address of a tensor.
Address = Callable[[str], int]

# The same for every GPU of compute capability 3.0 and later.
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
# Dynamic shared memory beyond this, with the static, has to be asked for by an attribute of the function.
_SHARED_WITHOUT_ASKING = 48 * 1024
_SUCCESS, _NOT_READY = 0, 600  # CUresult


class PreparedStep(Protocol):
    """A step whose limits and ranges fit. workspace: bytes that it needs to run."""

    workspace: int

    def bind(self, address: Address, workspace: int) -> Runner:
        """Queue-able work; `workspace` is the address of at least `self.workspace` bytes."""
        ...


@dataclass(eq=False)
class Kernel:
    """A loaded kernel. function: CUfunction handle. info: as the driver reports it. module: CuPy's, which unloads
    the code when nothing refers to it any more; so everything that launches the kernel keeps it. allowed_shared:
    bytes of dynamic shared memory that the function has been allowed (a handle may be given out again after its
    module is unloaded, so this belongs to the loaded kernel)."""

    name: str
    function: int
    parameters: tuple[Parameter, ...]
    info: KernelInfo
    module: Any = None
    allowed_shared: int = 0


class PreparedLaunch:
    """A launch whose arguments and limits fit. Raises LaunchRefused where they do not."""

    workspace = 0

    def __init__(self, step: Launch, kernel: Kernel, props: Props, tensors: Sequence[Tensor]):
        self._kernel, self._tensors, self._args = kernel, tuple(tensors), step.args
        self._grid = _three(step.grid, _MAX_GRID, f"the grid of kernel {kernel.name}")
        self._block = _three(step.block, _MAX_BLOCK, f"the block of kernel {kernel.name}")
        self._shared = step.shared
        _check_threads(kernel, self._block)
        _check_shared(kernel, step.shared, props)
        typed_arguments(kernel.name, kernel.parameters, step.args, self._tensors, lambda ref: 0)

    @property
    def asks_for_shared(self) -> int:
        """Bytes of dynamic shared memory that the function has to be allowed, 0 if it has them anyway."""
        static = self._kernel.info.static_shared or 0
        return self._shared if self._shared and static + self._shared > _SHARED_WITHOUT_ASKING else 0

    def bind(self, address: Address, workspace: int) -> Runner:
        items = {tensor.name: ITEM_SIZES[tensor.dtype] for tensor in self._tensors}

        def element(ref: Ref) -> int:
            return address(ref.tensor) + ref.offset * items[ref.tensor]

        values = typed_arguments(self._kernel.name, self._kernel.parameters, self._args, self._tensors, element)
        return _BoundLaunch(self._kernel, self._grid, self._block, self._shared, values)


class _BoundLaunch:
    """cuLaunchKernel with a parameter array of our own, which lives as long as this object."""

    def __init__(self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], shared: int, values: Sequence[Any]):
        driver = driver_api()
        self._name = kernel.name
        self._values = values
        self._kernel = kernel  # keeps its code loaded
        self._pointers = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        self._launch = driver.cuLaunchKernel
        self._before = (driver.CUfunction(kernel.function), *grid, *block, shared)
        self._parameters = ctypes.addressof(self._pointers)

    def __call__(self, stream: int) -> None:
        (status,) = self._launch(*self._before, stream, self._parameters, 0)
        if status:
            raise error_of(int(status), f"launch of kernel {self._name}", self._name)


class PreparedFill:
    """A fill whose range and value fit. Raises LaunchRefused where they do not."""

    workspace = 0

    def __init__(self, step: Fill, tensors: Sequence[Tensor]):
        tensor = _tensor(step.target.tensor, tensors)
        count = tensor.count - step.target.offset if step.count is None else step.count
        _check_range(tensor, step.target.offset, count)
        self._name, self._count = tensor.name, count
        self._item = ITEM_SIZES[tensor.dtype]
        self._offset = step.target.offset * self._item
        self._pattern = _pattern(step.value, tensor)

    def bind(self, address: Address, workspace: int) -> Runner:
        return _bound(f"fill of {self._name}", self._calls(address(self._name) + self._offset))

    def _calls(self, start: int) -> tuple[_Call, ...]:
        driver, count, pattern = driver_api(), self._count, self._pattern
        if count == 0:
            return ()
        if len(set(pattern)) == 1:
            return ((driver.cuMemsetD8Async, (start, pattern[0], count * self._item)),)
        if self._item == 2:
            return ((driver.cuMemsetD16Async, (start, int.from_bytes(pattern, "little"), count)),)
        if self._item == 4:
            return ((driver.cuMemsetD32Async, (start, int.from_bytes(pattern, "little"), count)),)
        # There is no 64-bit memset: all low words, then all high words, as columns of a matrix.
        low, high = int.from_bytes(pattern[:4], "little"), int.from_bytes(pattern[4:], "little")
        fill = driver.cuMemsetD2D32Async
        return ((fill, (start, 8, low, 1, count)), (fill, (start + 4, 8, high, 1, count)))


class PreparedCopy:
    """A copy whose ranges and types fit. Raises LaunchRefused where they do not."""

    workspace = 0

    def __init__(self, step: Copy, tensors: Sequence[Tensor]):
        target, source = _tensor(step.target.tensor, tensors), _tensor(step.source.tensor, tensors)
        if target.dtype != source.dtype:
            names = f"{source.name} ({source.dtype}) to {target.name} ({target.dtype})"
            raise LaunchRefused(f"copy of {names}: types differ")
        _check_range(target, step.target.offset, step.count)
        _check_range(source, step.source.offset, step.count)
        item = ITEM_SIZES[target.dtype]
        self._target, self._source = (target.name, step.target.offset * item), (source.name, step.source.offset * item)
        self._bytes = step.count * item

    def bind(self, address: Address, workspace: int) -> Runner:
        target, source = (address(name) + offset for name, offset in (self._target, self._source))
        if abs(target - source) < self._bytes:
            raise LaunchRefused(f"copy of {self._source[0]} to {self._target[0]}: the ranges overlap")
        calls = ((driver_api().cuMemcpyDtoDAsync, (target, source, self._bytes)),) if self._bytes else ()
        return _bound(f"copy of {self._source[0]} to {self._target[0]}", calls)


_Call = tuple[Callable[..., tuple[Any, ...]], tuple[int, ...]]


def _bound(doing: str, calls: Sequence[_Call]) -> Runner:
    def run(stream: int) -> None:
        for function, arguments in calls:
            (status,) = function(*arguments, stream)
            if status:
                raise error_of(int(status), doing)

    return run


def driver_api() -> Any:
    """cuda-bindings' driver module; loads libcuda on the first call of any of its functions."""
    from cuda.bindings import driver

    return driver


def raise_if_lost(stream: int, doing: str) -> None:
    """Raise KernelFault if work queued before has failed."""
    (status,) = driver_api().cuStreamQuery(stream)
    if status not in (_SUCCESS, _NOT_READY):
        raise error_of(int(status), doing)


# ---------------------------------------------------------------------------------------------- limits


def _three(sizes: Sequence[int], limits: Sequence[int], what: str) -> tuple[int, int, int]:
    if not 1 <= len(sizes) <= 3:
        raise LaunchRefused(f"{what} has {len(sizes)} dimensions, not 1 to 3")
    padded = (*sizes, *(1,) * (3 - len(sizes)))
    for size, limit, axis in zip(padded, limits, "xyz", strict=True):
        if not 1 <= size <= limit:
            raise LaunchRefused(f"{what} has {axis} = {size}, allowed are 1 to {limit}")
    return padded[0], padded[1], padded[2]


def _check_threads(kernel: Kernel, block: Sequence[int]) -> None:
    threads, limit = block[0] * block[1] * block[2], kernel.info.max_threads or _MAX_BLOCK[0]
    if threads > limit:
        raise LaunchRefused(
            f"kernel {kernel.name} was given {threads} threads per block; as compiled "
            f"({kernel.info.registers} registers a thread) it can have {limit}"
        )


def _check_shared(kernel: Kernel, dynamic: int, props: Props) -> None:
    static = kernel.info.static_shared or 0
    if dynamic < 0:
        raise LaunchRefused(f"kernel {kernel.name} was given {dynamic} bytes of dynamic shared memory")
    if static + dynamic > props.shared_per_block_optin:
        raise LaunchRefused(
            f"kernel {kernel.name} needs {static + dynamic} bytes of shared memory ({static} static and {dynamic} "
            f"dynamic), a block on {props.name} can have {props.shared_per_block_optin}"
        )


# ---------------------------------------------------------------------------------------------- tensors


def _tensor(name: str, tensors: Sequence[Tensor]) -> Tensor:
    for tensor in tensors:
        if tensor.name == name:
            return tensor
    raise LaunchRefused(f"the plan names the tensor {name!r}; the family has {', '.join(t.name for t in tensors)}")


def _check_range(tensor: Tensor, offset: int, count: int) -> None:
    if not (offset >= 0 and count >= 0 and offset + count <= tensor.count):
        raise LaunchRefused(
            f"elements {offset} to {offset + count} are outside tensor {tensor.name} of {tensor.count} elements"
        )


def _pattern(value: float, tensor: Tensor) -> bytes:
    dtype = numpy_dtype(tensor.dtype)
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        if value != int(value) or not limits.min <= value <= limits.max:
            raise LaunchRefused(f"fill of {tensor.name}: {value} does not fit {tensor.dtype}")
        value = int(value)
    return np.asarray(value).astype(dtype).tobytes()


def tensors_by_name(tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
    return {tensor.name: tensor for tensor in tensors}
