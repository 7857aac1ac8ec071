"""Rows without a GPU: versions compiled for architectures that need not be here, neither proven nor timed.

Each row is compiled by itself, from the kernels of its own plan. Kernels that are compiled together share more than
the time it takes: a helper that several of them call may no longer be inlined, and registers change. A row must not
depend on which others were asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

from kbench.catalog import Catalog, load_catalog
from kbench.cpus import usable_cpus
from kbench.device.base import KernelInfo
from kbench.device.cuda.compile import OPTIONS, nvrtc_build, require_arch
from kbench.device.cuda.cubin import CubinError
from kbench.device.cuda.same_code import code_hash
from kbench.device.cuda.steps import Kernel, PreparedLaunch
from kbench.errors import CannotRunError, LaunchRefused, UsageError
from kbench.family import Launch, kernels_of
from kbench.inspect.architectures import architecture_of
from kbench.inspect.examine import Inspection, arch_of, examine
from kbench.inspect.facts import kernel_facts
from kbench.inspect.instructions import GROUPS, group_of
from kbench.install import install_command
from kbench.jobs import Job
from kbench.outcome import outcome_of
from kbench.results.schema import STATIC, Row
from kbench.selection import Selection
from kbench.subject import Subject, subject_of
from kbench.sweep import Bench
from kbench.work import kernel_rows, steps_of, touched_bytes

# Facts that are metrics as they are.
_FACTS = ("registers", "spill_bytes", "stack_bytes", "static_shared", "dynamic_shared")
# Groups of instructions that cost time of their own. Arithmetic and control are the rest of all instructions.
_GROUPS = ("memory", "exchange")


class CompiledBench(Bench):
    """A bench without a device: its rows say what a compiler made of the versions, for each architecture of
    `options.archs`. Families' files are loaded in this process."""

    def __enter__(self) -> CompiledBench:
        self._catalog: Catalog = load_catalog(self.options.family_dirs)
        self.device_kind = STATIC
        try:
            compiler = f"NVRTC {nvrtc_build()}"
        except CannotRunError as error:
            hint = f"{install_command('nvrtc13')} needs no GPU; or the extra nvrtc12"
            raise CannotRunError(error.message, hint) from error
        for arch in self.options.archs:
            require_arch(arch)
        self.device = {
            "kind": STATIC,
            "name": ", ".join(self.options.archs),
            "archs": list(self.options.archs),
            "compiler": compiler,
            "options": list(OPTIONS),
            "cards": {arch: _card(arch) for arch in self.options.archs},
        }
        self.seed = 0  # nothing is drawn
        self._pool = ThreadPoolExecutor(usable_cpus())  # NVRTC lets go of the interpreter
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def jobs(self, selection: Selection) -> list[Job]:
        """As of any bench, once for each architecture."""
        found = [replace(job, source=self._fingerprint(job)) for job in selection.jobs(self._catalog, "cuda")]
        return [replace(job, arch=arch) for arch in self.options.archs for job in found]

    def rows(self, jobs: Sequence[Job], earlier: Sequence[Row] = (), again: bool = False) -> Iterator[Row]:
        """Compile the jobs, several at once; their rows come in their order."""
        for future in [self._pool.submit(self._compiled, job) for job in jobs]:
            yield future.result()

    def _fingerprint(self, job: Job) -> str:
        """Of the version's files; "" where they are at fault: its row says how."""
        with contextlib.suppress(Exception):  # whatever a family's file raises
            return self._catalog.fingerprint(job.family, job.version)
        return ""

    def _compiled(self, job: Job) -> Row:
        started = time.perf_counter()
        folders = [str(folder) for folder in self.options.family_dirs]
        row = Row(
            job.family, job.version, job.idea, job.sizes, job.dtype, job.block, job.arch, "pass", self.seed,
            reproduce=job.inspecting(folders, ("--arch", job.arch)), cache_mode=STATIC, params=dict(job.params),
            source=job.source,
        )  # fmt: skip
        try:
            compile_row(self._catalog, job, row)
        except Exception as error:
            row.status, row.reason, row.details = outcome_of(error)
        row.seconds = time.perf_counter() - started
        return row


def compile_row(catalog: Catalog, job: Job, row: Row) -> None:
    """Compile a job and write what came of it into its row. Raises what `outcome_of` makes a row's status of."""
    family, version = catalog[job.family], catalog.version(job.family, job.version)
    row.params = version.chosen(job.params)
    subject = subject_of(catalog, job, architecture_of(job.arch).props())
    if subject.refusal:
        row.status, row.reason = "refused", subject.refusal
        return
    try:
        arch_of(family.name, version, job.arch)
    except UsageError as error:  # one architecture of several, and the version is for another
        row.status, row.reason = "skipped", error.message
        return
    row.traffic, row.flops = subject.traffic, subject.flops
    row.steps, row.touched = steps_of(subject.plan), touched_bytes(subject.plan, subject.tensors)
    if not kernels_of(subject.plan):
        row.status, row.reason = "skipped", "there is no kernel to compile: all of it is steps of libraries"
        return
    found = examine(catalog, job.family, job.version, subject.problem, [job.block], job.arch, row.params)
    infos = {each.launch.kernel: each.info for each in found.kernels}
    row.kernels = kernel_rows(subject.plan, infos.values())
    row.metrics = static_metrics(found)
    with contextlib.suppress(CubinError, KeyError):  # no row depends on it
        row.code = code_hash(subject.plan, found.cubin)
    row.reason = _note(row.metrics)
    _require_launchable(subject, found, infos)


def static_metrics(found: Inspection) -> dict[str, dict[str, float]]:
    """By kernel, what is exact for its compiler.

    `registers`, `spill_bytes`, `stack_bytes`: of a thread. `static_shared`, `dynamic_shared`: bytes of a block.
    `occupancy`: warps that a multiprocessor holds at once, of the launch for which they are fewest. `instructions`: in
    the kernel's PTX; `instructions_memory`, `instructions_exchange`: those of them that access memory, and those by
    which threads wait for or talk to each other (barriers, atomics, shuffles).
    """
    metrics = {}
    for kernel, facts in kernel_facts(found).items():
        known = {name: facts[name] for name in _FACTS if facts[name] is not None}
        known["occupancy"] = min(each.occupancy.warps for each in found.kernels if each.launch.kernel == kernel)
        groups = dict.fromkeys(GROUPS, 0)  # all of them: the first barrier of a kernel is a change from 0
        for name, count in facts["ptx"].items():
            groups[group_of(name)] += count
        counts = {f"instructions_{group}": groups[group] for group in _GROUPS}
        metrics[kernel] = {**known, "instructions": sum(groups.values()), **counts}
    return metrics


def _require_launchable(subject: Subject, found: Inspection, infos: Mapping[str, KernelInfo]) -> None:
    """Raises LaunchRefused for what a GPU would refuse: too many threads, too much shared memory, arguments that do not
    fit the compiled kernel."""
    props = found.architecture.props()
    signatures = found.cubin.signatures if found.cubin is not None else {}
    for step in subject.plan:
        if isinstance(step, Launch):
            kernel = Kernel(step.kernel, 0, signatures[step.kernel], infos[step.kernel])
            PreparedLaunch(step, kernel, props, subject.tensors)
    for each in found.kernels:
        if not each.occupancy.blocks:
            what = " and ".join(each.occupancy.limiters)
            raise LaunchRefused(f"no block of kernel {each.launch.kernel} fits a multiprocessor: {what}")


def _note(metrics: Mapping[str, Mapping[str, float]]) -> str:
    """Which of a version's kernels spill: a table shows one kernel alone."""
    spilled = {kernel: known["spill_bytes"] for kernel, known in metrics.items() if known.get("spill_bytes")}
    return "; ".join(f"{kernel} spills {count:g} bytes a thread" for kernel, count in spilled.items())


def _card(arch: str) -> dict[str, Any]:
    """The card that plans for an architecture are made for."""
    architecture = architecture_of(arch)
    return {"name": architecture.card, "multiprocessors": architecture.multiprocessors}
