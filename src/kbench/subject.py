"""What a job is about, once its family's file has been asked; nothing is compiled or run yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kbench.catalog import Catalog, describe_fault
from kbench.errors import UsageError
from kbench.family import Problem, Props, Step, Tensor, checked_plan, checked_tensors
from kbench.jobs import Job


@dataclass(frozen=True)
class Subject:
    """refusal: why the version does not take this; "" if it does, and then there is a plan. tensors: the family's, and
    the version's scratch. traffic: bytes that any version has to move. flops: None where the family counts none."""

    problem: Problem
    refusal: str
    plan: tuple[Step, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    traffic: float | None = None
    flops: float | None = None


def subject_of(catalog: Catalog, job: Job, props: Props) -> Subject:
    """The problem, its refusal or its plan and tensors. props: of the device that the plan is for.

    Raises UsageError for a family or version that is not there, and for whatever a family's file raises.
    """
    family, version = catalog[job.family], catalog.version(job.family, job.version)
    problem = Problem(job.sizes, job.dtype)
    path = Path(family.sources[version.number]).with_suffix(".py")
    try:
        refusal = family.refusal(version, problem, job.block, job.params)
        if refusal:
            return Subject(problem, refusal)
        plan = checked_plan(version.plan(problem, job.block, props, **job.params))
        tensors = checked_tensors(family.tensors(problem))
        if version.scratch is not None:
            own = version.scratch(problem, job.block, props, **job.params)
            tensors = (*tensors, *checked_tensors(own))
        traffic = float(family.least_traffic(problem))
        flops = float(family.flops(problem)) if family.flops is not None else None
    except Exception as error:
        what = f"the contract of {job.family} version {job.version} fails: {describe_fault(error, path)}"
        raise UsageError(what) from error
    return Subject(problem, "", plan, tensors, traffic, flops)
