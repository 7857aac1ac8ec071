"""The CPU emulator as a device: kernels compiled by a C++ compiler, run with CUDA's semantics."""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kbench.cpus import usable_cpus
from kbench.device.arguments import typed_arguments
from kbench.device.base import Bound, Buffer, Damage, Device, KernelInfo, Prepared
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator import steps
from kbench.device.emulator.build import KERNEL_OPTIONS, build_kernels, build_runtime, find_compiler
from kbench.device.emulator.memory import Memory
from kbench.device.emulator.runtime import ORDERS, LaunchRequest, LoadedModule, Report, Runtime, load_runtime
from kbench.device.emulator.symbols import locate
from kbench.device.host_memory import available_memory
from kbench.errors import CannotRunError, KernelFault, LaunchRefused
from kbench.family import Array, Launch, Props, Ref, Step, Tensor
from kbench.source import Source

log = logging.getLogger("kbench.emulator")

# CUDA's limits on a grid: 2^31 - 1 blocks along x, 65,535 along y and z; and on a block along z.
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)


@dataclass(frozen=True)
class _BoundStep:
    """A step ready to run: a launch request, or a step for numpy with its buffers."""

    step: Step
    request: LaunchRequest | None


class EmulatorDevice(Device):
    """Runs plans on the CPU. Threads may share it: launches take turns, compilations run at once.

    workers: OS threads over which the blocks of a launch are spread (default: the CPUs that this process may use).
    time_limit: seconds that one launch may take. seed: of the schedule "random".
    """

    kind = "emulator"
    xp = np
    # Forward and reverse order show most races, and each is easy to think through. The random one shows those that
    # look right from both ends: what is written by the first and the last thread alike. It is seeded: verdicts repeat.
    schedules = ("forward", "reverse", "random")

    def __init__(self, workers: int | None = None, time_limit: float = 30.0, seed: int = 0):
        self.workers = workers or usable_cpus()
        self.time_limit = time_limit
        self.seed = seed
        self.props = _props()
        self._lock = threading.Lock()
        self._runtime: Runtime | None = None
        self._memory: Memory | None = None
        self._modules: dict[tuple[str, tuple[str, ...]], LoadedModule] = {}

    def describe(self) -> dict[str, Any]:
        compiler = find_compiler()
        return {
            "kind": self.kind,
            "name": self.props.name,
            "arch": self.props.arch,
            "driver": None,
            "machine": platform.machine(),
            "workers": self.workers,
            "compiler": compiler.version,
            "compiler_command": " ".join(compiler.command),
            "options": [*compiler.options, *KERNEL_OPTIONS],
            "props": asdict(self.props),
        }

    def build(self, source: Source, kernels: Sequence[str], arch: str = "") -> LoadedModule:
        """Compile and load `kernels`. `arch` is of no meaning here."""
        names = tuple(dict.fromkeys(kernels))
        path = self._compile(source, names)
        key = (str(path), names)
        with self._lock:
            if key not in self._modules:
                files = (source.path.name, *(included.name for _, included, _ in source.includes))
                self._modules[key] = self._load(path, source, names, files)
            return self._modules[key]

    def free_memory(self) -> int:
        return available_memory()

    def alloc(self, tensor: Tensor) -> Buffer:
        return self._all_memory().alloc(tensor)

    def free(self, buffer: Buffer) -> None:
        self._all_memory().free(buffer)

    def upload(self, buffer: Buffer, values: Array) -> None:
        values = np.asarray(values)
        tensor = buffer.tensor
        if values.shape != tensor.shape or values.dtype != numpy_dtype(tensor.dtype):
            raise ValueError(
                f"tensor {tensor.name} is {tensor.dtype} {tensor.shape}, not {values.dtype} {values.shape}"
            )
        buffer.array[...] = values

    def download(self, buffer: Buffer) -> Array:
        return buffer.array.copy()

    def poison(self, buffer: Buffer, byte: int) -> None:
        self._all_memory().poison(buffer, byte)

    def damage(self, buffer: Buffer) -> Damage | None:
        return self._all_memory().damage(buffer)

    def prepare(self, plan: Sequence[Step], module: LoadedModule | None, tensors: Sequence[Tensor]) -> Prepared:
        by_name = {tensor.name: tensor for tensor in tensors}
        infos: dict[str, KernelInfo] = {}
        for step in plan:
            if isinstance(step, Launch):
                self._check_launch(step, module, tensors)
                infos[step.kernel] = KernelInfo(step.kernel)
            else:
                steps.check_step(step, by_name)
        return Prepared(tuple(plan), tuple(infos.values()), tuple(tensors), native=module)

    def bind(self, prepared: Prepared, buffers: Mapping[str, Buffer], workspace: Buffer | None = None) -> Bound:
        def address(ref: Ref) -> int:
            buffer = buffers[ref.tensor]
            return buffer.address + ref.offset * numpy_dtype(buffer.tensor.dtype).itemsize

        bound = [
            _BoundStep(step, _request(step, prepared, address) if isinstance(step, Launch) else None)
            for step in prepared.plan
        ]
        return Bound(prepared, (tuple(bound), dict(buffers)))

    def enqueue(self, bound: Bound, stream: Any = None, schedule: str = "") -> None:
        """Run all steps. Raises KernelFault at the step that was stopped.

        schedule: "forward" (also ""), "reverse" or "random": the order of threads, warps and blocks.
        """
        if schedule not in ORDERS:
            raise ValueError(f"unknown schedule {schedule!r}: it is one of forward, reverse, random")
        bound_steps, buffers = bound.native
        for bound_step in bound_steps:
            step = bound_step.step
            if isinstance(step, Launch):
                self._launch(bound_step.request, schedule)
            else:
                steps.run_step(step, buffers)

    def synchronize(self) -> None:
        """Nothing to wait for: enqueue returns when all is done."""

    def close(self) -> None:
        if self._memory is not None:
            self._memory.free_all()

    # ------------------------------------------------------------------------------------------ inside

    def _compile(self, source: Source, kernels: tuple[str, ...]) -> Path:
        return build_kernels(source, kernels)

    def _load(self, path: Path, source: Source, names: tuple[str, ...], files: tuple[str, ...]) -> LoadedModule:
        runtime = self._loaded_runtime()
        try:
            return runtime.load(path, names, files)
        except OSError as error:
            log.warning("%s in the cache cannot be loaded (%s): compiling it again", path.name, error)
            path.unlink(missing_ok=True)
            try:
                return runtime.load(self._compile(source, names), names, files)
            except OSError as again:
                raise CannotRunError(f"compiled kernels of {source.path.name} cannot be loaded: {again}") from again

    def _loaded_runtime(self) -> Runtime:
        if self._runtime is None:
            self._runtime = _load_runtime()
        return self._runtime

    def _all_memory(self) -> Memory:
        with self._lock:
            if self._memory is None:
                self._memory = Memory(self._loaded_runtime())
            return self._memory

    def _check_launch(self, step: Launch, module: LoadedModule | None, tensors: Sequence[Tensor]) -> None:
        if module is None or step.kernel not in module.kernels:
            raise LaunchRefused(f"kernel {step.kernel} is not in the module that the plan is prepared with")
        _check_dimensions(step, self.props)
        typed_arguments(step.kernel, module.kernels[step.kernel].parameters, step.args, tensors, lambda ref: 0)

    def _launch(self, request: LaunchRequest, schedule: str) -> None:
        self._launch_counted(request, schedule, None)

    def _launch_counted(self, request: LaunchRequest, schedule: str, counter: int | None) -> None:
        workers = 1 if counter else self.workers
        report = self._loaded_runtime().launch(request, schedule, self.seed, workers, self.time_limit, counter)
        if report is not None:
            raise self._fault(request, report)

    def _fault(self, request: LaunchRequest, report: Report) -> KernelFault:
        kind, message = report.kind.decode(), report.message.decode(errors="replace")
        if report.address:
            is_write = None if report.is_write < 0 else bool(report.is_write)
            near = self._all_memory().describe(report.address, is_write)
            kind, message = ("out-of-bounds", near) if near else (kind, message)
        return KernelFault(
            kind,
            message,
            kernel=request.kernel.name,
            block=(report.block[0], report.block[1], report.block[2]),
            thread=(report.thread[0], report.thread[1], report.thread[2]) if report.has_thread else None,
            location=_location(request.module, report),
        )


def _location(module: LoadedModule, report: Report) -> str:
    if report.line:
        return f"{os.path.basename(report.file.decode(errors='replace'))}:{report.line}"
    return locate(module.path, list(report.pc[: report.frames]), module.files)


def _request(step: Launch, prepared: Prepared, address: Any) -> LaunchRequest:
    module: LoadedModule = prepared.native
    kernel = module.kernels[step.kernel]
    arguments = typed_arguments(step.kernel, kernel.parameters, step.args, prepared.tensors, address)
    return LaunchRequest(kernel, module, _three(step.grid), _three(step.block), step.shared, arguments)


def _three(dimensions: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*dimensions, 1, 1)[:3]
    return x, y, z


def _check_dimensions(step: Launch, props: Props) -> None:
    for what, given, limits in (("grid", step.grid, _GRID_LIMITS), ("block", step.block, _BLOCK_LIMITS)):
        for axis, size, limit in zip("xyz", given, limits, strict=False):
            if not 1 <= size <= limit:
                raise LaunchRefused(f"kernel {step.kernel}: {what} dimension {axis} is {size}, allowed is 1 to {limit}")
    threads, most = math.prod(step.block), props.threads_per_block
    if threads > most:
        raise LaunchRefused(f"kernel {step.kernel}: {threads} threads per block, the device allows {most}")
    most = props.shared_per_block_optin
    if not 0 <= step.shared <= most:
        raise LaunchRefused(
            f"kernel {step.kernel}: {step.shared} bytes of dynamic shared memory, the device allows {most}"
        )


def _load_runtime() -> Runtime:
    path = build_runtime()
    try:
        return load_runtime(path)
    except OSError as error:
        log.warning("the emulator's runtime in the cache cannot be loaded (%s): compiling it again", error)
        path.unlink(missing_ok=True)
        try:
            return load_runtime(build_runtime())
        except OSError as again:
            raise CannotRunError(f"the emulator's runtime cannot be loaded: {again}") from again


def _props() -> Props:
    """Those of an H100-class GPU, except for the number of multiprocessors: 3, so that a hard-coded count shows."""
    return Props(
        name="CPU emulator",
        arch="sm_90",
        multiprocessors=3,
        threads_per_multiprocessor=2048,
        threads_per_block=1024,
        shared_per_block=48 * 1024,
        shared_per_block_optin=227 * 1024,
        shared_per_multiprocessor=228 * 1024,
        registers_per_multiprocessor=65536,
        l2_bytes=50 * 2**20,  # an H100's: a plan that sizes a chunk by L2 takes the path that it takes there
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
