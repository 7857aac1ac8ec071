"""Rows of counts: versions run once on the emulator for what they ask of memory, neither judged nor timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from kbench.catalog import Catalog, load_catalog
from kbench.cpus import usable_cpus
from kbench.device.emulator.build import require_counting
from kbench.device.emulator.counter import CountingDevice
from kbench.device.worker import Worker, WorkerError, WorkerLost
from kbench.errors import KernelFault
from kbench.family import Props, kernels_of
from kbench.inspect.counts import SECTOR_BYTES, Counts
from kbench.jobs import Job
from kbench.outcome import outcome_of
from kbench.results.schema import COUNTS, Row
from kbench.selection import Selection
from kbench.subject import subject_of
from kbench.sweep import Bench
from kbench.work import steps_of, touched_bytes

# Each counts in a process of its own, which keeps up to 256 MiB of accesses until the lanes of a warp have met.
_MOST_PROCESSES = 8

_TOTALS = (
    "launches", "global_accesses", "global_bytes", "global_sectors", "shared_accesses", "shared_bytes",
    "shared_wavefronts", "barriers", "atomics", "atomic_sectors",
)  # fmt: skip


class CountedBench(Bench):
    """A bench whose rows hold what each kernel asked of memory, at the preset `small` unless sizes are named."""

    def __enter__(self) -> CountedBench:
        require_counting()
        self._catalog: Catalog = load_catalog(self.options.family_dirs)
        self._folders = [str(folder) for folder in self.options.family_dirs]
        device = CountingDevice()
        self.device_kind = COUNTS
        self.device: dict[str, Any] = device.describe()
        del self.device["workers"]  # blocks are counted one after another, however many CPUs there are
        self._props: Props = device.props
        self.seed = 0  # the inputs' is fixed: two runs count the same
        count = min(usable_cpus(), _MOST_PROCESSES)
        self._pool = ThreadPoolExecutor(count)
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()  # None: one that is yet to be started
        self._started: list[Worker] = []
        for _ in range(count):
            self._idle.put(None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._started:
            if worker.alive:
                worker.kill()

    def jobs(self, selection: Selection) -> list[Job]:
        return [replace(job, source=self._fingerprint(job)) for job in selection.jobs(self._catalog, "emulator")]

    def rows(self, jobs: Sequence[Job], earlier: Sequence[Row] = (), again: bool = False) -> Iterator[Row]:
        """Count the jobs, several at once; their rows come in their order."""
        for future in [self._pool.submit(self._row_of, job) for job in jobs]:
            yield future.result()

    def _fingerprint(self, job: Job) -> str:
        with contextlib.suppress(Exception):  # whatever a family's file raises: its row says how
            return self._catalog.fingerprint(job.family, job.version)
        return ""

    def _row_of(self, job: Job) -> Row:
        started = time.perf_counter()
        row = Row(
            job.family, job.version, job.idea, job.sizes, job.dtype, job.block, "emulator", "pass", self.seed,
            reproduce=job.inspecting(self._folders, ("--counts",)), cache_mode=COUNTS, params=dict(job.params),
            source=job.source,
        )  # fmt: skip
        try:
            self._fill(job, row)
        except Exception as error:
            row.status, row.reason, row.details = outcome_of(error)
        row.seconds = time.perf_counter() - started
        return row

    def _fill(self, job: Job, row: Row) -> None:
        version = self._catalog.version(job.family, job.version)
        row.params = version.chosen(job.params)
        subject = subject_of(self._catalog, job, self._props)
        if subject.refusal:
            row.status, row.reason = "refused", subject.refusal
            return
        row.traffic, row.flops = subject.traffic, subject.flops
        row.steps, row.touched = steps_of(subject.plan), touched_bytes(subject.plan, subject.tensors)
        if version.gpu_only:
            row.status, row.reason = "skipped", f"the emulator cannot run it: {version.gpu_only}"
        elif not kernels_of(subject.plan):
            row.status, row.reason = "skipped", "there is no kernel to count: all of it is steps of libraries"
        else:
            row.metrics = count_metrics(self._counts(job, row))

    def _counts(self, job: Job, row: Row) -> Counts:
        """Raises as `kbench.inspect.counts.count` does; a kernel may also take its process down."""
        request = {
            "name": job.family, "number": job.version, "sizes": job.sizes, "dtype": job.dtype, "block": job.block,
            "params": row.params, "time_limit": self.options.time_limit,
        }  # fmt: skip
        worker = self._idle.get()
        try:
            if worker is None:
                worker = Worker("kbench.inspect.counts:serve", {"family_dirs": self._folders}, self._note)
                self._started.append(worker)
            return Counts.from_dict(worker.call(request))
        except WorkerLost as lost:
            worker = None
            raise lost.fault from None
        except (WorkerError, KernelFault) as error:  # in whatever state that left it
            if worker is not None:
                worker.kill()
            worker = None
            if isinstance(error, WorkerError):
                raise RuntimeError(str(error)) from error
            raise
        finally:
            self._idle.put(worker)


def count_metrics(found: Counts) -> dict[str, dict[str, float]]:
    """By kernel, what is exact for its compiler and the kind of machine; of all of it, more is worse.

    `launches`; `global_accesses` (of warps), `global_bytes` (that lanes asked for), `global_sectors` (of 32 bytes that
    they touched), `global_unused` (bytes of these sectors that nobody asked for); `shared_accesses`, `shared_bytes`,
    `shared_wavefronts`, `shared_conflicts` (wavefronts beyond those that it takes without bank conflicts);
    `barriers` (of blocks), `atomics` (of lanes), `atomic_sectors`.
    """
    metrics: dict[str, dict[str, float]] = {}
    for kernel in found.kernels:
        totals = kernel.totals
        metrics[kernel.kernel] = {
            **{name: totals[name] for name in _TOTALS},
            "global_unused": SECTOR_BYTES * totals["global_sectors"] - totals["global_used"],
            "shared_conflicts": totals["shared_wavefronts"] - totals["shared_ideal"],
        }
    return metrics
