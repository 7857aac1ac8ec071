"""One row: refuse, compile, prepare, prove, time, prove again. Runs in the worker process."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kbench.catalog import Catalog, describe_fault, kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import CaseCache
from kbench.check.memory import require_memory
from kbench.check.prove import prove, recheck
from kbench.check.verdict import Verdict
from kbench.device.base import Device, KernelInfo
from kbench.device.worker import Channel, Message
from kbench.errors import CannotRunError, CompileError, KbenchError, KernelFault, LaunchRefused, UsageError
from kbench.family import Family, Launch, Problem, Step, Tensor, Version, kernels_of
from kbench.jobs import Job
from kbench.results.schema import Row
from kbench.source import Source, load_source

# Expected values kept for reuse: two cases of the largest default problem (attention_backward, 2.4 GB each
# in float64 with bounds) and some room.
_CASE_CACHE_BYTES = 6 << 30
# Smaller shapes tried for the command that reproduces a failure; each is quick, the search must not outlast
# the row that failed.
_SHRINK_TRIES = 8
# A family's Python code is a page of arithmetic; one that takes longer hangs.
_PLAN_SECONDS = 60.0


@dataclass(frozen=True)
class Tolerance:
    """--rtol and --atol: they replace the family's bound."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass
class _Module:
    """A compilation of several kernels of one source, running ahead of its use."""

    kernels: frozenset[str]
    future: Future[Any]


@dataclass
class Builds:
    """Compilations by source and architecture: those announced run ahead in threads, one per version."""

    device: Device
    pool: ThreadPoolExecutor
    modules: dict[tuple[str, str], list[_Module]] = field(default_factory=lambda: defaultdict(list))

    def ahead(self, source: Source, kernels: Iterable[str], arch: str) -> None:
        names = frozenset(kernels)
        modules = self.modules[source.digest, arch]
        if names and not any(names <= module.kernels for module in modules):
            modules.append(_Module(names, self.pool.submit(self.device.build, source, sorted(names), arch)))

    def module(self, source: Source, kernels: Sequence[str], arch: str) -> Any:
        """The compiled kernels. Where a joint compilation fails, these kernels are tried alone, so that one
        broken instantiation costs its own rows only."""
        for module in self.modules[source.digest, arch]:
            if module.kernels.issuperset(kernels):
                try:
                    return module.future.result()
                except CompileError:
                    if module.kernels == frozenset(kernels):
                        raise
        built: Future[Any] = Future()
        try:
            built.set_result(self.device.build(source, sorted(set(kernels)), arch))
        except CompileError as error:
            built.set_exception(error)
        self.modules[source.digest, arch].append(_Module(frozenset(kernels), built))
        return built.result()


class Evaluator:
    """Answers the requests of `kbench.sweep.Bench` in the worker process."""

    def __init__(
        self,
        channel: Channel,
        *,
        device: str,
        family_dirs: Sequence[str],
        seed: int,
        rtol: float | None,
        atol: float | None,
        time_limit: float,
        workers: int | None,
    ):
        self.channel = channel
        self.seed = seed
        self.time_limit = time_limit
        self.family_dirs = family_dirs
        self.lost = False  # the device cannot be used any more: this process has to be replaced
        self.tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
        with channel.limit(_PLAN_SECONDS, "loading the family files"):
            self.catalog: Catalog = load_catalog([Path(folder) for folder in family_dirs])
        self.device: Device = _open_device(device, time_limit, workers)
        self.cases = CaseCache(_CASE_CACHE_BYTES)
        self.builds = Builds(self.device, ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2))))

    def handle(self, request: Message) -> Any:
        match request["do"]:
            case "describe":
                return {"kind": self.device.kind, "device": self.device.describe()}
            case "jobs":
                return [asdict(job) for job in self.jobs(**request["select"])]
            case "announce":
                return self.announce([Job(**job) for job in request["jobs"]])
            case "row":
                row = self.row(Job(**request["job"]))
                return {"row": row.to_dict(), "lost": self.lost}
        raise ValueError(f"unknown request {request['do']!r}")

    # ------------------------------------------------------------------------------------------ jobs

    def jobs(
        self,
        targets: list[tuple[str, list[int] | None]],
        mode: str,
        block_sizes: list[int] | None,
        sizes: dict[str, list[int]],
        preset: str | None,
        dtype: str | None,
    ) -> Iterator[Job]:
        """The rows that a command asks for, in the order in which they run: small problems first, so that the
        first failure is also the smallest."""
        with self.channel.limit(_PLAN_SECONDS, "loading the family files"):
            for name, numbers in targets or [(name, None) for name in self.catalog.names]:
                family = self.catalog[name]
                versions = [self.catalog.version(name, number) for number in numbers or family.by_number]
                chosen = _checked_dtype(family, dtype)
                for shape in self._shapes(family, mode, sizes, preset, chosen):
                    for version in versions:
                        if shape.versions is not None and version.number not in shape.versions:
                            continue
                        for block in _blocks(version, mode, block_sizes, shape.block_sizes):
                            purpose = "check" if mode == "check" else "time"
                            yield Job(name, version.number, version.idea, dict(shape.sizes), chosen, block, purpose)

    def _shapes(
        self, family: Family, mode: str, sizes: dict[str, list[int]], preset: str | None, dtype: str
    ) -> list[_Shape]:
        if mode == "check" and not sizes and preset is None:
            shapes = [_Shape(shape.sizes, shape.versions, shape.block_sizes) for shape in family.check_shapes]
            return sorted(shapes, key=lambda shape: _volume(family, shape.sizes, dtype))
        default = "default" if self.device.kind == "cuda" else "small"
        base = _checked_preset(family, preset or default)
        unknown = set(sizes) - set(family.sizes)
        if unknown:
            raise UsageError(f"{family.name} has no size {sorted(unknown)[0]!r}", f"its sizes are {', '.join(family.sizes)}")
        choices = [sizes.get(name, [base[name]]) for name in family.sizes]
        shapes = [_Shape(dict(zip(family.sizes, values, strict=True))) for values in itertools.product(*choices)]
        for shape in shapes:
            _require_valid(family, shape.sizes, dtype)
        return shapes

    def announce(self, jobs: list[Job]) -> None:
        """Start compiling for these jobs, and computing their references, ahead of their turn."""
        wanted: dict[tuple[str, int], set[str]] = defaultdict(set)
        for job in jobs:
            try:
                subject = self._subject(job)
                if not subject.refusal:
                    wanted[job.family, job.version].update(kernels_of(subject.plan))
            except KbenchError:
                continue  # its own row will say so
        for (name, number), kernels in wanted.items():
            family = self.catalog[name]
            self.builds.ahead(self._source(family, number), kernels, family.by_number[number].arch)
        for job in jobs[:1]:  # only the first problem: later ones would hold memory long before their turn
            self.cases.submit(self.catalog[job.family], Problem(job.sizes, job.dtype), self.seed)

    # ------------------------------------------------------------------------------------------ rows

    def row(self, job: Job) -> Row:
        """Evaluate one job. Whatever the version does wrong is in the row; faults of kbench are raised."""
        started = time.perf_counter()
        family, version = self.catalog[job.family], self.catalog.version(job.family, job.version)
        row = Row(
            job.family, job.version, version.idea, job.sizes, job.dtype, job.block, self.device.kind, "pass", self.seed,
            overridden=self.tolerance is not None, reproduce=job.command(self.seed, self.device.kind, self.family_dirs),
        )  # fmt: skip
        try:
            self._evaluate(family, version, job, row)
        except Exception as error:
            self._record(error, row)
        if row.status == "fail" and job.purpose == "time":
            smallest = self._smallest_failing(family, job)
            row.reproduce = smallest.command(self.seed, self.device.kind, self.family_dirs)
        row.seconds = time.perf_counter() - started
        return row

    def _record(self, error: Exception, row: Row) -> None:
        """Write what stopped a row into it; re-raise what is kbench's own fault."""
        row.measurement = None
        fault = _lost_context(error) or error
        match fault:
            case KernelFault():
                row.status, row.reason = fault.row_status, str(fault)
                row.details += _fault_details(fault)
                self.lost = self.lost or fault.context_lost
            case LaunchRefused():
                row.status, row.reason = "unlaunchable", str(fault)
            case CompileError():
                row.status, row.reason, row.details = "invalid", str(fault), fault.log.splitlines()
            case CannotRunError():
                row.status, row.reason = "unable", str(fault)
            case KbenchError():
                row.status, row.reason = "invalid", str(fault)
            case _:
                raise error

    def _evaluate(self, family: Family, version: Version, job: Job, row: Row) -> None:
        subject = self._subject(job)
        if subject.refusal:
            row.status, row.reason = "refused", subject.refusal
            return
        if version.gpu_only and self.device.kind == "emulator":
            row.status, row.reason = "skipped", f"the emulator cannot run it: {version.gpu_only}"
            return
        require_memory(self.device, family, version, subject.problem, subject.tensors)
        case = self.cases.submit(family, subject.problem, self.seed)
        module = self.builds.module(self._source(family, version.number), kernels_of(subject.plan), version.arch)
        prepared = self.device.prepare(subject.plan, module, subject.tensors)
        row.kernels = _kernel_rows(subject.plan, prepared.infos)
        inputs = case.result()  # before the clock starts: a reference takes seconds at large sizes
        with Buffers(self.device, family, version, subject.problem, job.block, subject.plan) as buffers:
            with self._limit(f"a launch of {job.family} version {job.version}") as restart:
                verdict = prove(
                    self.device, family, version, prepared, buffers, inputs,
                    tolerance=self.tolerance, on_launch=restart,
                )  # fmt: skip
            self._judge(row, verdict)
            if row.status == "pass" and job.purpose == "time" and self.device.kind == "cuda":
                self._time(family, version, subject, prepared, buffers, row)

    def _time(self, family: Family, version: Version, subject: Subject, prepared: Any, buffers: Buffers, row: Row) -> None:
        """Time a proven version, then prove it once more on other inputs."""
        from kbench.measure.timer import time_plan

        # Before the timing: a reference computed beside it would disturb it.
        other = self.cases.submit(family, subject.problem, self.seed + 1).result()
        bound = self.device.bind(prepared, buffers.by_name)
        with self._limit(f"a launch of {row.family} version {row.version}") as restart:
            measurement = time_plan(self.device, bound, buffers.restore, on_launch=restart)
            verdict = recheck(
                self.device, family, version, prepared, buffers, other,
                tolerance=self.tolerance, on_launch=restart,
            )  # fmt: skip
        if not verdict.passed:
            self._judge(row, verdict)
            row.reason = f"after the timed launches: {row.reason}"
            return
        row.measurement = measurement.to_dict()

    def _judge(self, row: Row, verdict: Verdict) -> None:
        row.verdict = verdict.to_dict()
        if not verdict.passed:
            row.status, row.reason, row.details = "fail", verdict.reason(), verdict.details()

    def _limit(self, doing: str) -> Any:
        return self.channel.limit(self.time_limit, doing)

    # ------------------------------------------------------------------------------------------ parts

    def _subject(self, job: Job) -> Subject:
        """The problem, its refusal or its plan and tensors. Raises KbenchError for a fault of the family file."""
        family, version = self.catalog[job.family], self.catalog.version(job.family, job.version)
        problem = Problem(job.sizes, job.dtype)
        path = Path(family.sources[version.number]).with_suffix(".py")
        with self.channel.limit(_PLAN_SECONDS, f"the plan of {job.family} version {job.version}"):
            try:
                refusal = family.refusal(version, problem, job.block)
                if refusal:
                    return Subject(problem, refusal)
                plan = tuple(version.plan(problem, job.block, self.device.props))
                tensors = family.tensors(problem)
                if version.scratch is not None:
                    tensors = (*tensors, *version.scratch(problem, job.block, self.device.props))
            except Exception as error:
                raise UsageError(f"the plan of {job.family} version {job.version} fails: {describe_fault(error, path)}") from error
        return Subject(problem, "", plan, tensors)

    def _source(self, family: Family, number: int) -> Source:
        return load_source(Path(family.sources[number]), (kernel_folder(),))

    def _smallest_failing(self, family: Family, job: Job) -> Job:
        """The smallest check shape at which the same version fails with the same block size, else the job itself."""
        size = _volume(family, job.sizes, job.dtype)
        shapes = sorted((shape.sizes for shape in family.check_shapes), key=lambda s: _volume(family, s, job.dtype))
        for sizes in shapes[:_SHRINK_TRIES]:
            smaller = replace(job, sizes=dict(sizes), purpose="check")
            if _volume(family, sizes, job.dtype) < size and self.row(smaller).status == "fail":
                return smaller
        return job


@dataclass(frozen=True)
class Subject:
    """What a job is about, once the family file has been asked."""

    problem: Problem
    refusal: str
    plan: tuple[Step, ...] = ()
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Shape:
    sizes: Any
    versions: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None


def _open_device(kind: str, time_limit: float, workers: int | None) -> Device:
    if kind == "cuda":
        from kbench.device.cuda.device import CudaDevice

        return CudaDevice()
    from kbench.device.emulator.device import EmulatorDevice

    return EmulatorDevice(workers=workers, time_limit=time_limit)


def _checked_dtype(family: Family, dtype: str | None) -> str:
    if dtype is not None and dtype not in family.dtypes:
        raise UsageError(f"{family.name} has no dtype {dtype!r}", f"it has {', '.join(family.dtypes)}")
    return dtype or family.dtypes[0]


def _checked_preset(family: Family, preset: str) -> Any:
    if preset not in family.presets:
        raise UsageError(f"{family.name} has no preset {preset!r}", f"it has {', '.join(family.presets)}")
    return family.presets[preset]


def _require_valid(family: Family, sizes: dict[str, int], dtype: str) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"size {name}={size} must be at least 1")
    for rule in family.rules:
        if not rule.holds(Problem(sizes, dtype)):
            raise UsageError(f"{family.name} needs {rule.text}; here {Problem(sizes, dtype)}")


def _blocks(version: Version, mode: str, asked: list[int] | None, allowed: tuple[int, ...] | None) -> list[int]:
    """Block sizes of a version to run: a fixed one runs once whatever was asked."""
    if version.fixed is not None:
        return [version.fixed]
    if asked is not None:
        return asked
    if mode == "run":
        # 256 threads fill every GPU's multiprocessors and are the block size that most kernels are written for.
        return [min(version.blocks, key=lambda block: abs(math.log2(block / 256)))]
    return [block for block in version.blocks if allowed is None or block in allowed]


def _volume(family: Family, sizes: Any, dtype: str) -> int:
    return sum(tensor.count for tensor in family.tensors(Problem(sizes, dtype)))


def _kernel_rows(plan: Sequence[Step], infos: Sequence[KernelInfo]) -> list[dict[str, Any]]:
    by_name = {info.name: info for info in infos}
    rows = []
    for step in plan:
        if isinstance(step, Launch):
            info = by_name[step.kernel]
            rows.append(
                {
                    "name": step.kernel, "grid": list(step.grid), "block": list(step.block), "shared": step.shared,
                    "registers": info.registers, "static_shared": info.static_shared, "local_bytes": info.local_bytes,
                }  # fmt: skip
            )
    return rows


def _fault_details(fault: KernelFault) -> list[str]:
    parts = [("kernel", fault.kernel), ("block", fault.block), ("thread", fault.thread), ("at", fault.location)]
    line = ", ".join(f"{name} {value}" for name, value in parts if value)
    return [line] if line else []


def _lost_context(error: BaseException) -> KernelFault | None:
    """The fault behind an exception: once a context is lost, freeing its memory raises too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KernelFault) and cause.context_lost:
            return cause
        cause = cause.__context__
    return None


def serve(channel: Channel, **options: Any) -> Evaluator:
    """The worker's entry: see `kbench.device.worker`."""
    return Evaluator(channel, **options)
