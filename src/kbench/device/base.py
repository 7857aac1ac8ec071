"""The interface of a device: where plans run. The CUDA GPU and the CPU emulator implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from kbench.device.redzone import PATTERNS
from kbench.family import Array, Props, Step, Tensor
from kbench.source import Source


@dataclass
class Buffer:
    """Device memory of one tensor, between redzones.

    array: the tensor's elements as an array of `Device.xp`, contiguous, of the tensor's shape and dtype
    (bf16 as ml_dtypes.bfloat16). handle: what the device keeps to free it and to find the redzones. redzone: the
    word that they are filled with.
    """

    tensor: Tensor
    array: Array
    address: int
    handle: Any = None
    redzone: int = PATTERNS[0]


@dataclass(frozen=True)
class Damage:
    """Bytes of a redzone that changed. `offset` is in bytes from the start of the tensor: negative before
    it, at least `tensor.nbytes` after it."""

    tensor: str
    offset: int
    count: int


@dataclass(frozen=True)
class KernelInfo:
    """What the compiler made of one kernel. None where the device has no such thing (the emulator)."""

    name: str
    registers: int | None = None
    static_shared: int | None = None
    local_bytes: int | None = None  # per thread: spills and stack arrays
    max_threads: int | None = None  # per block, as compiled
    spill_bytes: int | None = None  # stores and loads of spilled registers in the code, as ptxas counts them


@dataclass
class Prepared:
    """A plan with everything done that is not work: compiled, loaded, limits checked, GEMM algorithms chosen.

    infos: one per kernel of the plan. workspace: bytes that libraries need. native: the device's own.
    """

    plan: tuple[Step, ...]
    infos: tuple[KernelInfo, ...]
    tensors: tuple[Tensor, ...]
    workspace: int = 0
    native: Any = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Bound:
    """A prepared plan with its buffers filled in: enqueueing it allocates nothing."""

    prepared: Prepared
    native: Any


class Device(ABC):
    """One device. Methods raise CompileError, LaunchRefused, KernelFault or CannotRunError."""

    kind: str  # "cuda" or "emulator"
    props: Props
    xp: Any  # numpy or cupy
    # Orders of threads and blocks that a check runs; the GPU has its own and only one.
    schedules: tuple[str, ...] = ("",)

    @property
    def row_name(self) -> str:
        """What rows call this device."""
        return self.kind

    def activate(self) -> AbstractContextManager[Any]:
        """Array operations of `xp` inside the block run on this device, in order with its own work, and raise what the
        device's own methods do."""
        return nullcontext()

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What stands in every record about this device: name, arch, driver, compiler and its version, options, and
        `props` as a dict."""

    @abstractmethod
    def build(self, source: Source, kernels: Sequence[str], arch: str = "") -> Any:
        """Compile (or take from the cache) and return a module that holds `kernels`. Thread-safe."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that can still be allocated."""

    @abstractmethod
    def alloc(self, tensor: Tensor) -> Buffer:
        """Memory for a tensor between redzones, both filled with a pattern."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None: ...

    @abstractmethod
    def upload(self, buffer: Buffer, values: Array) -> None:
        """Copy a numpy array of the tensor's shape and dtype into the buffer."""

    @abstractmethod
    def download(self, buffer: Buffer) -> Array:
        """A numpy copy of the buffer."""

    @abstractmethod
    def poison(self, buffer: Buffer, byte: int) -> None:
        """Fill the tensor's memory with one byte. 0xFF is a NaN in every floating-point type."""

    @abstractmethod
    def damage(self, buffer: Buffer) -> Damage | None:
        """The first damage to the redzones of a buffer, which are then repaired; None if there is none."""

    @abstractmethod
    def prepare(self, plan: Sequence[Step], module: Any, tensors: Sequence[Tensor]) -> Prepared:
        """Type the arguments, check limits, set attributes, choose GEMM algorithms."""

    @abstractmethod
    def bind(self, prepared: Prepared, buffers: Mapping[str, Buffer], workspace: Buffer | None = None) -> Bound:
        """Fill in addresses. The workspace, of at least `prepared.workspace` bytes, is allocated if none is given."""

    @abstractmethod
    def enqueue(self, bound: Bound, stream: Any = None, schedule: str = "") -> None:
        """Queue all steps of a plan; the emulator has run them when this returns."""

    def distribute(self, bound: Bound) -> None:
        """Before a launch: other GPUs that take part in it get their share of what the buffers hold."""
        return None

    def collect(self, bound: Bound) -> None:
        """After a launch that was waited for: the buffers get what other GPUs made of their share."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work; raises KernelFault if any of it failed."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
