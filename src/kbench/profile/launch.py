"""The process that ncu runs: proves jobs right, then launches each between cuProfilerStart and cuProfilerStop.

    python -m kbench.profile.launch SPEC.json

It works on the device itself, without the worker: ncu looks at this very process, and a launch that hangs ends with
the process, which whoever started ncu kills. What is launched is prepared, bound and proved as a row that is timed. All
that it has to say stands in the file that the spec names, so that ncu's own messages stay apart.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.catalog import Catalog, kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.judge import Judges
from kbench.check.prove import prove
from kbench.device.base import Bound, Device, Prepared
from kbench.errors import KbenchError
from kbench.family import Family, Launch, Problem, Step, Version, checked_plan, checked_tensors, kernels_of
from kbench.jobs import Job
from kbench.source import Source, load_source

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# Clocks that fell while the host was computing a reference need some milliseconds of work to come back.
WARMUP_S = 0.1
MARKER = "kbench_marker"
_MARKER_SOURCE = f"__global__ void {MARKER}(int position) {{}}\n"

Restore = Callable[[Any], None]
Act = Callable[[Bound, Restore], None]


@dataclass(frozen=True)
class Spec:
    """What to launch. cold: empty the L2 before each launch, as the timer does. repeats: launches of each job. marked:
    a kernel called MARKER goes before each launch, to tell those of many jobs apart. answer: the file to write."""

    jobs: tuple[Job, ...]
    seed: int
    answer: str
    family_dirs: tuple[str, ...] = ()
    cold: bool = True
    repeats: int = 1
    marked: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        data = json.loads(text)
        jobs = tuple(Job(**job) for job in data["jobs"])
        return cls(**{**data, "jobs": jobs, "family_dirs": tuple(data["family_dirs"])})


def main() -> None:
    spec = Spec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answer = answer_of(spec)
    Path(spec.answer).write_text(json.dumps(answer), encoding="utf-8")
    # Whatever came of it, the status is 0: ncu would make an error of its own out of another.
    if "error" in answer:
        os._exit(0)  # a lost context can hang in destructors


def answer_of(spec: Spec) -> dict[str, Any]:
    """Launch all of it: {"jobs": [...]} as of `launched`, up to the first that fails its check, or {"error": its
    message, "exit_status"}."""
    from kbench.device.cuda.device import CudaDevice

    answers: list[dict[str, Any]] = []
    try:
        device = CudaDevice()
        catalog = load_catalog([Path(folder) for folder in spec.family_dirs])
        judges, marker = Judges(device), _marker(device) if spec.marked else None

        def act(bound: Bound, restore: Restore) -> None:
            launch_profiled(device, bound, restore, spec, marker)

        for job in spec.jobs:
            answers.append(launched(device, catalog, job, spec.seed, judges, act))
            if not answers[-1]["passed"]:
                break
        device.close()
    except KbenchError as error:
        return {"error": str(error), "exit_status": int(error.exit_status)}
    return {"jobs": answers}


def launched(device: Device, catalog: Catalog, job: Job, seed: int, judges: Judges, act: Act) -> dict[str, Any]:
    """Prepare a job, prove it right and hand it to `act`, which a version that is wrong never reaches.

    {"name", "passed", "reason", "steps": {"Launch": how many, ...}}.
    """
    family, version = catalog[job.family], catalog.version(job.family, job.version)
    problem = Problem(job.sizes, job.dtype)
    plan = checked_plan(version.plan(problem, job.block, device.props, **job.params))
    # The reference first: preparing may measure algorithms, which it would disturb.
    case = judges.make_case(family, problem, seed, False)
    prepared = _prepared(device, family, version, problem, job, plan)
    with Buffers(device, family, version, problem, job.block, plan, job.params) as buffers:
        verdict = prove(device, family, version, prepared, buffers, case)
        if verdict.passed:
            bound = buffers.bind(prepared)
            device.distribute(bound)
            act(bound, buffers.restore)
    steps = Counter(type(step).__name__ for step in plan)
    name = f"{job.family} version {job.version}"
    return {"name": name, "passed": verdict.passed, "reason": verdict.reason(), "steps": dict(steps)}


def _prepared(
    device: Device, family: Family, version: Version, problem: Problem, job: Job, plan: Sequence[Step]
) -> Prepared:
    tensors = checked_tensors(family.tensors(problem))
    if version.scratch is not None:
        tensors = (*tensors, *checked_tensors(version.scratch(problem, job.block, device.props, **job.params)))
    kernels = sorted(kernels_of(plan))
    source = load_source(Path(family.sources[version.number]), (kernel_folder(),))
    module = device.build(source, kernels, version.arch) if kernels else None
    return device.prepare(plan, module, tensors)


# ---------------------------------------------------------------------------------------------- launches


def launch_profiled(device: CudaDevice, bound: Bound, restore: Restore, spec: Spec, marker: Bound | None) -> None:
    """Warm up, then launch with the profiler on, nothing but the plan between start and stop."""
    from kbench.measure.flush import Flush

    with device.activate():
        flush = Flush(device) if spec.cold else None
        _warm_up(device, bound, restore)
        for _ in range(spec.repeats):
            restore(device.stream)
            device.synchronize()
            if flush is not None:
                flush(device.stream)
                device.synchronize()
            _switch_profiler(on=True)
            if marker is not None:
                device.enqueue(marker)
            device.enqueue(bound)
            device.synchronize()
            _switch_profiler(on=False)


def _warm_up(device: CudaDevice, bound: Bound, restore: Restore) -> None:
    """Not held, unlike the timer's launches: under a profiler nothing may wait for the host."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARMUP_S:
        restore(device.stream)
        device.enqueue(bound)
        device.synchronize()


def _switch_profiler(on: bool) -> None:
    from kbench.device.cuda.faults import error_of
    from kbench.device.cuda.steps import driver_api

    driver = driver_api()
    (status,) = driver.cuProfilerStart() if on else driver.cuProfilerStop()
    if status:
        raise error_of(int(status), f"turning the profiler {'on' if on else 'off'}")


def _marker(device: CudaDevice) -> Bound:
    step = Launch(MARKER, (1,), (1,), (0,))
    module = device.build(Source(Path("marker.cu"), _MARKER_SOURCE, ()), [MARKER])
    return device.bind(device.prepare((step,), module, ()), {})


if __name__ == "__main__":
    main()
