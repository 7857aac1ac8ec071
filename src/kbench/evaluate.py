"""One row: refuse, compile, prepare, prove, time, prove again. Runs in the worker process."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kbench.builds import Builds
from kbench.catalog import Catalog, kernel_folder, load_catalog
from kbench.check.bound import Tolerance
from kbench.check.buffers import Buffers
from kbench.check.case import Case, CaseCache
from kbench.check.judge import Judges
from kbench.check.memory import require_memory
from kbench.check.prove import prove, recheck
from kbench.check.verdict import Verdict
from kbench.device.base import Device, Prepared
from kbench.device.host_memory import available_memory
from kbench.device.open import open_device
from kbench.device.worker import Channel, Message
from kbench.errors import (
    KbenchError,
    KernelFault,
)
from kbench.family import Family, Step, Version, kernels_of
from kbench.jobs import Job
from kbench.outcome import outcome_of
from kbench.results.schema import Row
from kbench.selection import Selection, volume
from kbench.source import Source, load_source
from kbench.subject import Subject, subject_of
from kbench.work import kernel_rows, steps_of, touched_bytes

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# Expected values kept for reuse, which every row of a sweep needs: the two cases of attention_backward's default
# problem (1.7 GB each in float64 with bounds) and some room; a machine with more memory keeps larger ones.
_CASE_CACHE_BYTES = 6 << 30
_CASE_CACHE_SHARE = 0.25
# Smaller shapes tried for the command that reproduces a failure; each is quick, the search must not outlast
# the row that failed.
_SHRINK_TRIES = 8
# A family's Python code is a page of arithmetic; one that takes longer hangs.
_PLAN_SECONDS = 60.0
# Compilers and references take seconds at large sizes, on a busy machine minutes; beyond this something hangs.
_HOST_SECONDS = 600.0


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
        repeat_options: Sequence[str] = (),
        mode: str = "cold",
    ):
        self.channel = channel
        self.seed = seed
        self.time_limit = time_limit
        self.family_dirs = family_dirs
        self.repeat_options = repeat_options
        self.mode = mode
        self.lost = False  # the device cannot be used any more: this process has to be replaced
        self.tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
        with channel.limit(_PLAN_SECONDS, "loading the family files"):
            self.catalog: Catalog = load_catalog([Path(folder) for folder in family_dirs])
        self.device: Device = open_device(device, time_limit, workers)
        self.judges = Judges(self.device, channel.note)
        self.cases = CaseCache(case_cache_bytes(), self.judges.make_case)
        self.builds = Builds(self.device, ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2))))

    def handle(self, request: Message) -> Any:
        match request["do"]:
            case "describe":
                return {"kind": self.device.kind, "device": self.device.describe()}
            case "ceilings":
                return self.ceilings()
            case "timer":
                return self.timer()
            case "jobs":
                with self.channel.limit(_PLAN_SECONDS, "loading the family files"):
                    jobs = Selection.from_dict(request["select"]).jobs(self.catalog, self.device.kind)
                    return [asdict(replace(job, source=self._fingerprint(job))) for job in jobs]
            case "announce":
                return self.announce([Job(**job) for job in request["jobs"]])
            case "row":
                row = self.row(Job(**request["job"]))
                return {"row": row.to_dict(), "lost": self.lost}
        raise ValueError(f"unknown request {request['do']!r}")

    def ceilings(self) -> dict[str, Any]:
        """What the GPU can do at most, from the cache or measured now."""
        from kbench.measure.ceilings import measured_ceilings

        with self.channel.limit(_HOST_SECONDS, "measuring the GPU's ceilings"):
            return measured_ceilings(cast("CudaDevice", self.device), self.channel.note).to_dict()

    def timer(self) -> dict[str, Any]:
        """How times are taken on this GPU, and who else uses it, which is told at once, too."""
        from kbench.device.cuda.card import busy
        from kbench.measure.timer import timer_of

        device = cast("CudaDevice", self.device)
        with self.channel.limit(_HOST_SECONDS, "setting up the timer"):
            facts = timer_of(device).facts()
            if used := busy(device.ordinal):
                self.channel.note(f"{used}: times are of a GPU that is shared")
        return {**facts, "busy": used}

    def announce(self, jobs: list[Job]) -> None:
        """Start compiling for these jobs, and computing their references, ahead of their turn."""
        wanted: dict[tuple[str, int], set[str]] = defaultdict(set)
        for job in jobs:
            with contextlib.suppress(KbenchError):  # its own row will say so
                subject = self._subject(job)
                if not subject.refusal:
                    wanted[job.family, job.version].update(kernels_of(subject.plan))
        for (name, number), kernels in wanted.items():
            family = self.catalog[name]
            with contextlib.suppress(KbenchError):
                self.builds.ahead(self._source(family, number), kernels, family.by_number[number].arch)
        for job in jobs[:1]:  # only the first problem: later ones would hold memory long before their turn
            with contextlib.suppress(Exception):  # whatever a family's rules and reference raise: its row says it
                family, version = self.catalog[job.family], self.catalog.version(job.family, job.version)
                subject = self._subject(job)
                if not subject.refusal:
                    with self.channel.limit(_HOST_SECONDS, f"comparing references of {job.family}"):
                        self._enter(family, version, subject, self._draws(job))
                    self.cases.submit(family, subject.problem, self.seed)

    # ------------------------------------------------------------------------------------------ rows

    def row(self, job: Job) -> Row:
        """Evaluate one job. Whatever goes wrong, with the version, the family or kbench itself, is in the row."""
        started = time.perf_counter()
        row = self._new_row(job)
        try:
            family, version = self.catalog[job.family], self.catalog.version(job.family, job.version)
            row.params = version.chosen(job.params)
            self._evaluate(family, version, job, row)
            if row.status == "fail" and job.purpose != "check":
                smallest = self._smallest_failing(family, job)
                row.smaller = self._command(smallest) if smallest is not None else ""
        except Exception as error:
            self._record(error, row, job.purpose)
        row.seconds = time.perf_counter() - started
        return row

    def _new_row(self, job: Job) -> Row:
        return Row(
            job.family, job.version, job.idea, job.sizes, job.dtype, job.block, self.device.row_name, "pass", self.seed,
            overridden=self.tolerance is not None, reproduce=self._command(job), cache_mode=self.mode,
            params=dict(job.params), source=self._fingerprint(job),
        )  # fmt: skip

    def _record(self, error: Exception, row: Row, purpose: str) -> None:
        """Write what stopped a row into it."""
        row.measurement = None
        fault = _lost_context(error) or error
        row.status, row.reason, details = outcome_of(fault, purpose)
        if isinstance(fault, KernelFault):
            self.lost = self.lost or fault.context_lost
            details = row.details + details
        row.details = details or row.details

    def _ready(self, family: Family, version: Version, job: Job, row: Row) -> Ready | None:
        """All that comes before the first launch; None, and the row says why, where there will be none."""
        subject = self._subject(job)
        if subject.refusal:
            row.status, row.reason = "refused", subject.refusal
            return None
        row.traffic, row.flops = subject.traffic, subject.flops
        row.steps, row.touched = steps_of(subject.plan), touched_bytes(subject.plan, subject.tensors)
        if version.gpu_only and self.device.kind == "emulator":
            row.status, row.reason = "skipped", f"the emulator cannot run it: {version.gpu_only}"
            return None
        draws = self._draws(job)
        with self.channel.limit(_HOST_SECONDS, f"compiling {job.family} version {job.version}, or its reference,"):
            self._enter(family, version, subject, draws)
            futures = [self.cases.submit(family, subject.problem, *draw) for draw in draws]
            try:
                kernels = kernels_of(subject.plan)
                module = self.builds.module(self._source(family, version.number), kernels, version.arch)
            finally:
                # A reference that still runs would disturb what is measured next: GEMM algorithms when the plan is
                # prepared, launches, or after an error here the next row. Nor must a launch's time limit cover it.
                wait(futures)
            first, second = (future.result() for future in futures)
            prepared = self.device.prepare(subject.plan, module, subject.tensors)
            row.kernels = kernel_rows(subject.plan, prepared.infos)
            row.details = list(prepared.notes)
            row.code = self._code(subject.plan, module)
        return Ready(subject, module, prepared, (first, second))

    def _evaluate(self, family: Family, version: Version, job: Job, row: Row) -> None:
        ready = self._ready(family, version, job, row)
        if ready is None:
            return
        subject, prepared, (first, second) = ready.subject, ready.prepared, ready.cases

        def launch_limit() -> Any:
            return self.channel.limit(self.time_limit, f"a launch of {job.family} version {job.version}")

        with Buffers(self.device, family, version, subject.problem, job.block, subject.plan, row.params) as buffers:
            verdict = prove(
                self.device, family, version, prepared, buffers, first, tolerance=self.tolerance, guard=launch_limit
            )
            self._judge(row, verdict)
            if row.status != "pass":
                return
            timed = job.purpose == "time" and self.device.kind == "cuda"
            measurement = None
            if timed:
                with launch_limit() as restart:
                    measurement = self._time(prepared, buffers, restart)
            # A version that remembers its first inputs, or wears out, was right until now.
            verdict = recheck(
                self.device, family, version, prepared, buffers, second, tolerance=self.tolerance, guard=launch_limit
            )
            if verdict.passed:
                row.measurement = measurement
                row.reason = "; ".join(prepared.notes)  # what tables show of a row that passed; its report has details
                return
            self._judge(row, verdict)
            patterned = self._draws(job)[1][1]
            when = "after the timed launches" if timed else "on patterned inputs" if patterned else "on other inputs"
            row.reason = f"{when}: {row.reason}"

    def _time(self, prepared: Prepared, buffers: Buffers, restart: Callable[[], None]) -> dict[str, Any]:
        from kbench.measure.timer import time_plan

        bound = self.device.bind(prepared, buffers.by_name)
        device = cast("CudaDevice", self.device)
        device.distribute(bound)  # once: what other GPUs have of the inputs does not change
        return time_plan(device, bound, buffers.restore, on_launch=restart, mode=self.mode).to_dict()

    def _draws(self, job: Job) -> tuple[tuple[int, bool], tuple[int, bool]]:
        """Seeds of a row's two cases, and whether their inputs are patterned: `check` ends on such inputs, because
        versions may be fitted to noise (all equal, equal rows, one peak a row)."""
        return (self.seed, False), (self.seed + 1, job.purpose == "check")

    def _enter(self, family: Family, version: Version, subject: Subject, draws: Sequence[tuple[int, bool]]) -> None:
        """Make a row's problem the one in use, once it is known who judges it and that all fits into memory."""
        self.cases.use(family, subject.problem)  # first: what the problem before has to give back is free memory
        on_gpu = self.judges.on_gpu(family, subject.problem)
        made = [case for draw in draws if (case := self.cases.made(family, subject.problem, *draw)) is not None]
        require_memory(self.device, family, version, subject.problem, subject.tensors, on_gpu, made)

    def _judge(self, row: Row, verdict: Verdict) -> None:
        row.verdict = verdict.to_dict()
        if not verdict.passed:
            row.status, row.reason, row.details = "fail", verdict.reason(), verdict.details() + row.details

    # ------------------------------------------------------------------------------------------ parts

    def _subject(self, job: Job) -> Subject:
        """The problem, its refusal or its plan and tensors. Raises KbenchError for a fault of the family file."""
        with self.channel.limit(_PLAN_SECONDS, f"the plan of {job.family} version {job.version}"):
            return subject_of(self.catalog, job, self.device.props)

    def _source(self, family: Family, number: int) -> Source:
        return load_source(Path(family.sources[number]), (kernel_folder(),))

    def _fingerprint(self, job: Job) -> str:
        """Of the version's files; "" where they are at fault: its row says how."""
        with contextlib.suppress(Exception):  # whatever a family's file raises
            return self.catalog.fingerprint(job.family, job.version)
        return ""

    def _code(self, plan: Sequence[Step], module: Any) -> str:
        """The hash of what a GPU runs; "" on the emulator, and where it is not known: nothing but a report needs it."""
        cubin = getattr(module, "cubin", None)
        if self.device.kind != "cuda" or (cubin is None and kernels_of(plan)):
            return ""
        from kbench.device.cuda.cubin import CubinError
        from kbench.device.cuda.same_code import code_hash

        with contextlib.suppress(CubinError, KeyError):
            return code_hash(plan, cubin)
        return ""

    def _command(self, job: Job) -> str:
        return job.command(self.seed, self.device.kind, self.family_dirs, self.repeat_options)

    def _smallest_failing(self, family: Family, job: Job) -> Job | None:
        """The smallest check shape at which the same version fails with the same block size, if there is one."""
        size = volume(family, job.sizes, job.dtype)
        shapes = sorted((shape.sizes for shape in family.check_shapes), key=lambda s: volume(family, s, job.dtype))
        for sizes in shapes[:_SHRINK_TRIES]:
            smaller = replace(job, sizes=dict(sizes), purpose="check")
            if self.lost or volume(family, sizes, job.dtype) >= size:
                break
            if self.row(smaller).status == "fail":
                return smaller
        return None


def case_cache_bytes() -> int:
    return max(_CASE_CACHE_BYTES, int(_CASE_CACHE_SHARE * available_memory()))


@dataclass(frozen=True)
class Ready:
    """A job that can be launched. module: as `Device.build` returned it. cases: of its two proofs."""

    subject: Subject
    module: Any
    prepared: Prepared
    cases: tuple[Case, Case]


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
