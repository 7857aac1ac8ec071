"""What is exported: one version at one problem, its plan for one architecture, its inputs and expected results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kbench.catalog import Catalog, describe_fault
from kbench.check.case import Case, make_case
from kbench.check.memory import gib
from kbench.device.host_memory import available_memory
from kbench.errors import CannotRunError, UsageError
from kbench.export.inputs import Packed, RepeatingGenerator, pack, plain_size
from kbench.export.outputs import Answer, answers
from kbench.export.plan import require_exportable
from kbench.family import Family, Problem, Step, Tensor, Version, checked_plan, checked_tensors, tensors_of
from kbench.inspect.architectures import Architecture, architecture_of
from kbench.inspect.examine import arch_of
from kbench.jobs import Job
from kbench.params import place_text

# Characters of text: inputs that take more are drawn anew, from few different rows. Editors and web forms get slow
# beyond a few MB, and compilers read some MB of string literals in a second.
PLAIN_INPUTS = 1 << 20
MOST_INPUTS = 2 << 20
WHOLE_OUTPUTS = 1 << 20

# Float64 numbers while a reference runs, for each element of the largest tensor.
_TEMPORARIES = 2


@dataclass(frozen=True)
class Subject:
    """A version at a problem and block size, as its plan is for an architecture. tensors: that the plan touches."""

    family: Family
    version: Version
    problem: Problem
    block: int
    arch: str
    architecture: Architecture
    plan: tuple[Step, ...]
    tensors: tuple[Tensor, ...]
    params: Mapping[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, self.params)

    @property
    def name(self) -> str:
        return f"{self.family.name} version {self.version.number}"


@dataclass(frozen=True)
class Data:
    """What a program has of its problem. repeating: whether inputs consist of few different rows; else they are those
    that every command draws from the same seed."""

    inputs: dict[str, Packed]
    outputs: dict[str, Answer]
    repeating: bool


def subject_of(catalog: Catalog, job: Job, arch: str | None) -> Subject:
    """Ask the family's file. arch: "sm_90"; None takes the version's, or the usual one.

    Raises UsageError for a problem that the version refuses, a plan that cannot be exported, and a file that fails.
    """
    family, version = catalog[job.family], catalog.version(job.family, job.version)
    problem, params = Problem(job.sizes, job.dtype), version.chosen(job.params)
    arch = arch_of(job.family, version, arch)
    architecture = architecture_of(arch)
    props = architecture.props()
    what = f"{job.family} version {job.version}"
    try:
        refusal = family.refusal(version, problem, job.block, params)
        if not refusal:
            plan = checked_plan(version.plan(problem, job.block, props, **params))
            tensors = checked_tensors(family.tensors(problem))
            scratch = version.scratch
            own = checked_tensors(scratch(problem, job.block, props, **params)) if scratch is not None else ()
    except Exception as error:  # whatever a family's file raises
        path = Path(family.sources[version.number]).with_suffix(".py")
        raise UsageError(f"the contract of {what} fails: {describe_fault(error, path)}") from error
    if refusal:
        raise UsageError(f"{what} refuses this: {refusal}", f"`kbench list {job.family}` shows what it takes")
    require_exportable(what, plan)
    touched = _touched(what, plan, (*tensors, *own))
    return Subject(family, version, problem, job.block, arch, architecture, plan, touched, params)


def _touched(what: str, plan: Sequence[Step], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    names = tensors_of(plan)
    known = {tensor.name for tensor in tensors}
    for name in names:
        if name not in known:
            raise UsageError(f"the plan of {what} names a tensor {name!r}", f"there are {', '.join(sorted(known))}")
    for tensor in tensors:
        if tensor.role in ("out", "inout") and not tensor.intermediate and tensor.name not in names:
            raise UsageError(f"the plan of {what} never touches the output {tensor.name}")
    return tuple(tensor for tensor in tensors if tensor.name in names)


def data_of(subject: Subject, seed: int) -> Data:
    """Draw the inputs and compute what must come of them.

    Raises UsageError where inputs take too much text however they are drawn, CannotRunError where the reference takes
    more memory than there is.
    """
    inputs = [tensor for tensor in subject.tensors if tensor.role in ("in", "inout")]
    repeating = sum(map(plain_size, inputs)) > PLAIN_INPUTS
    case = _case(subject, seed, repeating)
    packed = {tensor.name: pack(case.inputs[tensor.name]) for tensor in inputs}
    _require_small(subject, packed)
    outputs = {tensor.name: tensor for tensor in subject.tensors if tensor.role in ("out", "inout")}
    return Data(packed, answers(outputs, case.expected, seed, WHOLE_OUTPUTS), repeating)


def _case(subject: Subject, seed: int, repeating: bool) -> Case:
    needed, free = _memory(subject.family.tensors(subject.problem)), available_memory()
    where = f"{subject.name} at {subject.problem}"
    if needed > free:
        raise CannotRunError(
            f"the reference of {where} needs {gib(needed)} of main memory, {gib(free)} are free", "try smaller sizes"
        )
    generator = RepeatingGenerator(seed) if repeating else None
    try:
        return make_case(subject.family, subject.problem, seed, generator=generator)
    except MemoryError as error:
        raise CannotRunError(f"not enough main memory for the reference of {where}", "try smaller sizes") from error


def _memory(tensors: Sequence[Tensor]) -> int:
    """Bytes: inputs as stored and in float64, values and bounds of outputs, and what a reference needs on its way."""
    inputs = sum(tensor.nbytes + 8 * tensor.count for tensor in tensors if tensor.role in ("in", "inout"))
    outputs = sum(16 * tensor.count for tensor in tensors if tensor.role in ("out", "inout"))
    return inputs + outputs + _TEMPORARIES * 8 * max((tensor.count for tensor in tensors), default=0)


def _require_small(subject: Subject, packed: dict[str, Packed]) -> None:
    total = sum(each.size for each in packed.values())
    if total <= MOST_INPUTS:
        return
    largest = max(packed, key=lambda name: packed[name].size)
    small = " ".join(f"{name}={size}" for name, size in subject.family.presets.get("small", {}).items())
    raise UsageError(
        f"{subject.name} at {subject.problem}: its inputs would take {total / 2**20:.0f} MiB of text, most of it "
        f"{largest}, and an exported program holds up to {MOST_INPUTS >> 20}",
        f"take smaller sizes{f', such as --preset small ({small})' if small else ''}",
    )
