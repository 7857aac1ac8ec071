"""The CUDA GPU as a device: CuPy for memory, streams and events, NVRTC's cubins, the driver for launches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kbench.device.arguments import Parameter
from kbench.device.base import Bound, Buffer, Damage, Device, KernelInfo, Prepared
from kbench.device.cuda.all_reduce import BoundAllReduce, Groups, PreparedAllReduce
from kbench.device.cuda.capture import CapturedPlan
from kbench.device.cuda.card import limits
from kbench.device.cuda.compile import OPTIONS, Cubin, compile_cubin, nvrtc_version
from kbench.device.cuda.faults import error_of, translated
from kbench.device.cuda.gemm import CublasLt, PreparedGemm
from kbench.device.cuda.memory import allocate, check_redzones, copy_in, copy_out, reserve
from kbench.device.cuda.probe import driver_release
from kbench.device.cuda.probe import probe_gpu as probe_gpu
from kbench.device.cuda.sdpa import Cudnn, PreparedSdpa
from kbench.device.cuda.sdpa_backward import PreparedSdpaBackward
from kbench.device.cuda.steps import (
    Address,
    Kernel,
    PreparedCopy,
    PreparedFill,
    PreparedLaunch,
    PreparedStep,
    Runner,
    driver_api,
)
from kbench.device.cuda.tune import choose
from kbench.device.cuda.versions import library_versions
from kbench.device.dtypes import numpy_dtype
from kbench.errors import CannotRunError, LaunchRefused
from kbench.family import AllReduce, Array, Fill, Gemm, Launch, Props, Sdpa, SdpaBackward, Step, Tensor, kernels_of
from kbench.source import Source


@dataclass(frozen=True)
class Module:
    """Compiled kernels, loaded. kernels: by name expression."""

    cubin: Cubin
    kernels: Mapping[str, Kernel]


class CudaDevice(Device):
    """One GPU.

    All of its work is queued on `stream`, a private CuPy stream that does not wait for the default one. Code that
    makes arrays of `xp` (CuPy) for it, or reads `Buffer.array`, must run inside `with device.activate():`, which
    makes device and stream current in this thread, so that CuPy queues on the same stream.
    """

    kind = "cuda"

    def __init__(self, ordinal: int = 0):
        if reason := probe_gpu():
            raise CannotRunError(f"cannot use a GPU: {reason}", "run `kbench doctor`, or use --device emulator")
        import cupy

        self.xp = cupy
        self.ordinal = ordinal
        self._runtime = cupy.cuda.runtime
        if not 0 <= ordinal < self._runtime.getDeviceCount():
            raise CannotRunError(f"there is no GPU {ordinal}; this process sees {self._runtime.getDeviceCount()}")
        with translated(f"start of GPU {ordinal}"):
            self._runtime.setDevice(ordinal)
            self._device = cupy.cuda.Device(ordinal)
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.props = _props(self._runtime.getDeviceProperties(ordinal))
        self._blas: CublasLt | None = None
        self._cudnn: Cudnn | None = None
        self._groups = Groups(ordinal)
        self._lock = threading.Lock()

    @property
    def row_name(self) -> str:
        """The model, because times of two models never compete."""
        return self.props.name

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Make the GPU and its stream current for the driver, the runtime and CuPy in this thread."""
        self._runtime.setDevice(self.ordinal)
        with self._device, self.stream, translated("array operations on the GPU"):
            yield

    def describe(self) -> dict[str, Any]:
        runtime, supported = self._runtime.runtimeGetVersion(), self._runtime.driverGetVersion()
        return {
            "kind": self.kind,
            "name": self.props.name,
            "arch": self.props.arch,
            "driver": driver_release() or f"for CUDA {_dotted(supported)}",
            "cuda_driver": _dotted(supported),
            "cuda_runtime": _dotted(runtime),
            "compiler": f"NVRTC {'.'.join(map(str, nvrtc_version()))}",
            "options": list(OPTIONS),
            "cupy": self.xp.__version__,
            "props": asdict(self.props),
            "limits": limits(self.ordinal),
            **library_versions(),
        }

    # ------------------------------------------------------------------------------------ code

    def build(self, source: Source, kernels: Sequence[str], arch: str = "") -> Module:
        self._check_arch(arch)
        cubin = compile_cubin(source, kernels, arch or self.props.arch)
        with translated(f"loading the kernels of {source.path}"):
            self._runtime.setDevice(self.ordinal)  # this may be a thread of its own
            handle = self.xp.cuda.Module()
            handle.load(cubin.data)
            loaded = {
                name: _load(handle, name, cubin.lowered[name], cubin.signatures[name], cubin.infos[name])
                for name in cubin.lowered
            }
        return Module(cubin, loaded)

    def _check_arch(self, arch: str) -> None:
        """sm_90a code runs on compute capability 9.0 only."""
        if arch and arch.rstrip("af") != self.props.arch:
            raise CannotRunError(f"the version needs {arch}, {self.props.name} is {self.props.arch}")

    # ------------------------------------------------------------------------------------ memory

    def free_memory(self) -> int:
        with self.activate(), translated("asking for free memory"):
            free, _ = self._runtime.memGetInfo()
            return int(free) + int(self.xp.get_default_memory_pool().free_bytes())

    def alloc(self, tensor: Tensor) -> Buffer:
        with self.activate(), translated(f"allocation of tensor {tensor.name}"):
            return allocate(tensor, self.free_memory, self.stream)

    def free(self, buffer: Buffer) -> None:
        buffer.array = buffer.handle = None

    def upload(self, buffer: Buffer, values: Array) -> None:
        tensor = buffer.tensor
        if values.dtype != numpy_dtype(tensor.dtype) or values.shape != tensor.shape:
            given = f"{values.dtype} {values.shape}"
            raise ValueError(f"tensor {tensor.name} is {tensor.dtype} {tensor.shape}, not {given}")
        with self.activate(), translated(f"upload of {tensor.name}"):
            copy_in(buffer.address, np.ascontiguousarray(values), self.stream)

    def download(self, buffer: Buffer) -> Array:
        values = np.empty(buffer.tensor.shape, dtype=numpy_dtype(buffer.tensor.dtype))
        with self.activate(), translated(f"download of {buffer.tensor.name}"):
            copy_out(buffer.address, values, self.stream)
        return values

    def poison(self, buffer: Buffer, byte: int) -> None:
        with self.activate(), translated(f"poisoning of {buffer.tensor.name}"):
            self._runtime.memsetAsync(buffer.address, byte, buffer.tensor.nbytes, self.stream.ptr)

    def damage(self, buffer: Buffer) -> Damage | None:
        with self.activate(), translated(f"check of the redzones of {buffer.tensor.name}"):
            return check_redzones(buffer, self.stream)

    # ------------------------------------------------------------------------------------ plans

    def prepare(self, plan: Sequence[Step], module: Any, tensors: Sequence[Tensor]) -> Prepared:
        """Does not touch the tensors: GEMM algorithms are measured on memory of their own."""
        notes: list[str] = []
        with self.activate(), translated("preparing a plan"):
            steps = [self._prepare(step, module, tensors, notes) for step in plan]
        infos = tuple(module.kernels[name].info for name in kernels_of(plan))
        workspace = max((step.workspace for step in steps), default=0)
        return Prepared(tuple(plan), infos, tuple(tensors), workspace, tuple(steps), list(dict.fromkeys(notes)))

    def _prepare(self, step: Step, module: Module | None, tensors: Sequence[Tensor], notes: list[str]) -> PreparedStep:
        if isinstance(step, Launch):
            if module is None or step.kernel not in module.kernels:
                raise LaunchRefused(f"kernel {step.kernel} is not in the module that the plan is prepared with")
            launch = PreparedLaunch(step, module.kernels[step.kernel], self.props, tensors)
            self._allow_shared(module.kernels[step.kernel], launch.asks_for_shared)
            return launch
        if isinstance(step, Gemm):
            return self._prepare_gemm(step, tensors, notes)
        if isinstance(step, Sdpa | SdpaBackward):
            with self._lock:
                self._cudnn = self._cudnn or Cudnn()
            if isinstance(step, Sdpa):
                return PreparedSdpa(self._cudnn, step, tensors)
            return PreparedSdpaBackward(self._cudnn, step, tensors)
        if isinstance(step, AllReduce):
            return _AllReduceStep(step, tensors, self._groups.of)
        return PreparedFill(step, tensors) if isinstance(step, Fill) else PreparedCopy(step, tensors)

    def _prepare_gemm(self, step: Gemm, tensors: Sequence[Tensor], notes: list[str]) -> PreparedGemm:
        with self._lock:
            self._blas = self._blas or CublasLt()
        gemm = PreparedGemm(self._blas, step, tensors)
        notes += gemm.notes
        if note := choose(gemm, self.props.name, self.props.l2_bytes, self.free_memory, self.stream):
            notes.append(note)
        return gemm

    def _allow_shared(self, kernel: Kernel, size: int) -> None:
        """Raise the function's limit; never lower it, because another plan may have asked for more."""
        if size <= kernel.allowed_shared:
            return
        driver = driver_api()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(driver.CUfunction(kernel.function), attribute, size)
        if status:
            doing = f"allowing kernel {kernel.name} {size} bytes of dynamic shared memory"
            raise error_of(int(status), doing, kernel.name)
        kernel.allowed_shared = size

    def bind(self, prepared: Prepared, buffers: Mapping[str, Buffer], workspace: Buffer | None = None) -> Bound:
        def address(name: str) -> int:
            if name not in buffers:
                raise LaunchRefused(f"the plan uses tensor {name}, for which there is no memory")
            return buffers[name].address

        with self.activate(), translated("binding a plan"):
            # One workspace for all steps: on one stream they never run at the same time.
            size, own = prepared.workspace, None
            if size and workspace is None:
                own = reserve(size, "the workspace of libraries", self.free_memory)
            start = workspace.address if workspace is not None else int(own.ptr) if own is not None else 0
            runners = tuple(step.bind(address, start) for step in prepared.native)
        return Bound(prepared, _BoundPlan(runners, own or workspace, dict(buffers)))

    def enqueue(self, bound: Bound, stream: Any = None, schedule: str = "") -> None:
        """Queue all steps, on `stream` (a CuPy stream) or the device's own. Must run inside `activate()`."""
        handle = (stream or self.stream).ptr
        for run in bound.native.runners:
            run(handle)

    def distribute(self, bound: Bound) -> None:
        with self.activate(), translated("giving the other GPUs their rows"):
            for run in bound.native.runners:
                if isinstance(run, BoundAllReduce):
                    run.distribute(self.stream)

    def collect(self, bound: Bound) -> None:
        with self.activate(), translated("fetching the other GPUs' rows"):
            for run in bound.native.runners:
                if isinstance(run, BoundAllReduce):
                    run.collect(self.stream)

    def capture(self, *bounds: Bound) -> CapturedPlan:
        """Plans, one after the other, as one CUDA graph, ready to launch; nothing has run."""

        def queue() -> None:
            for bound in bounds:
                self.enqueue(bound)

        return self.capture_work(queue, bounds)

    def capture_work(self, queue: Callable[[], None], bounds: tuple[Bound, ...]) -> CapturedPlan:
        """Whatever `queue` puts on the device's stream, as one CUDA graph. bounds: the plans among it, whose memory
        has to live as long."""
        with self.activate(), translated("capturing a plan into a CUDA graph"):
            self.stream.begin_capture()
            try:
                queue()
            except BaseException:
                with contextlib.suppress(Exception):  # the capture is invalid: only leave it
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()
            graph.upload(self.stream)
        return CapturedPlan(graph, bounds)

    def synchronize(self) -> None:
        with translated("the work on the GPU was stopped"):
            self.stream.synchronize()

    def close(self) -> None:
        """Give back the libraries' handles and cached memory. After a fault, the end of the process does."""
        with contextlib.suppress(Exception):
            self._groups.close()
            if self._blas is not None:
                self._blas.close()
                self._blas = None
            if self._cudnn is not None:
                self._cudnn.close()
                self._cudnn = None
            with self.activate():
                self.stream.synchronize()
                self.xp.get_default_memory_pool().free_all_blocks()


class _AllReduceStep(PreparedAllReduce):
    """An all-reduce as a step of a plan: NCCL has a workspace of its own."""

    workspace = 0

    def bind(self, address: Address, workspace: int = 0) -> BoundAllReduce:
        return super().bind(address)


@dataclass(frozen=True)
class _BoundPlan:
    """What runs, and what it must keep alive: the workspace and the tensors' memory."""

    runners: tuple[Runner, ...]
    workspace: Any
    buffers: Mapping[str, Buffer]


def _load(handle: Any, name: str, lowered: str, parameters: tuple[Parameter, ...], compiled: KernelInfo) -> Kernel:
    driver = driver_api()
    function = int(handle.get_function(lowered).ptr)
    attributes = driver.CUfunction_attribute

    def read(attribute: Any) -> int:
        status, value = driver.cuFuncGetAttribute(attribute, driver.CUfunction(function))
        if status:
            raise error_of(int(status), f"asking for the limits of kernel {name}", name)
        return int(value)

    # Static shared memory stays the compiler's figure: what the driver counts of the KiB that it reserves in each
    # block is its own affair.
    info = replace(
        compiled,
        registers=read(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS),
        local_bytes=read(attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES),
        max_threads=read(attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
    )
    return Kernel(name, function, parameters, info, handle)


def _props(properties: Mapping[str, Any]) -> Props:
    return Props(
        name=properties["name"].decode(),
        arch=f"sm_{properties['major']}{properties['minor']}",
        multiprocessors=properties["multiProcessorCount"],
        threads_per_multiprocessor=properties["maxThreadsPerMultiProcessor"],
        threads_per_block=properties["maxThreadsPerBlock"],
        shared_per_block=properties["sharedMemPerBlock"],
        shared_per_block_optin=properties["sharedMemPerBlockOptin"],
        shared_per_multiprocessor=properties["sharedMemPerMultiprocessor"],
        registers_per_multiprocessor=properties["regsPerMultiprocessor"],
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=properties["totalGlobalMem"],
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
