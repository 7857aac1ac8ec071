"""One version at one problem: its plans at each block size, compiled for an architecture that need not be here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbench.catalog import Catalog, describe_fault, kernel_folder
from kbench.device.base import KernelInfo
from kbench.device.cuda.compile import Cubin, Ptx, compile_cubin, compile_ptx, nvrtc_version
from kbench.errors import UsageError
from kbench.family import Family, Launch, Problem, Step, Version, checked_plan, kernels_of
from kbench.inspect.architectures import Architecture, architecture_of
from kbench.inspect.instructions import instruction_mix
from kbench.inspect.nvdisasm import disassemble, instructions, listing
from kbench.inspect.occupancy import Cliff, Occupancy, Usage, cliffs, occupancy
from kbench.inspect.sass import sass_mix
from kbench.source import Source, base_name, load_source

# Most GPUs of today's data centres; every version of kbench's own compiles for it.
USUAL_ARCH = "sm_90"


@dataclass(frozen=True)
class Examined:
    """One kernel as a plan launches it.

    block: the version's block size; the launch's own may differ. times: how often the plan launches just this.
    waves: how many times the grid fills the card that stands for the architecture; None where no block fits.
    """

    block: int
    launch: Launch
    times: int
    info: KernelInfo
    occupancy: Occupancy
    cliffs: tuple[Cliff, ...]
    waves: float | None

    @property
    def name(self) -> str:
        """The kernel without its template arguments, which may differ from one block size to the next."""
        return base_name(self.launch.kernel)


@dataclass(frozen=True)
class MachineCode:
    """By name expression: the lines of the code to be read, and the counts of its instructions by class."""

    listings: Mapping[str, tuple[str, ...]]
    mixes: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Inspection:
    """What is known of one version at one problem.

    arch: as compiled for, "sm_90a". compiler: which and its version, "" where there was nothing to compile. kernels: by
    kernel in the order of the plan, then by block size. mixes: name expression to the counts of its PTX. others: the
    plan's other steps, "Gemm" to how many. refused: block size to why. params: what the version declares, as compiled.
    machine_code: None without nvdisasm. cubin: what the kernels were compiled to, None where there was nothing to.
    """

    family: str
    version: Version
    problem: Problem
    arch: str
    compiler: str
    architecture: Architecture
    kernels: tuple[Examined, ...]
    mixes: dict[str, dict[str, int]]
    others: dict[str, int]
    refused: dict[int, str]
    ptx: str
    params: dict[str, int] = field(default_factory=dict)
    machine_code: MachineCode | None = None
    cubin: Cubin | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        card = self.architecture
        return {
            "family": self.family,
            "version": self.version.number,
            "idea": self.version.idea,
            "sizes": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "params": self.params,
            "arch": self.arch,
            "compiler": self.compiler,
            "card": {"name": card.card, "multiprocessors": card.multiprocessors},
            "kernels": [_to_dict(kernel) for kernel in self.kernels],
            "instructions": self.mixes,
            "sass_instructions": dict(self.machine_code.mixes) if self.machine_code is not None else None,
            "other_steps": self.others,
            "refused": [{"block": block, "reason": reason} for block, reason in self.refused.items()],
        }


def examine(
    catalog: Catalog,
    name: str,
    number: int,
    problem: Problem,
    blocks: Sequence[int],
    arch: str | None,
    params: Mapping[str, int] | None = None,
    *,
    nvdisasm: Path | None = None,
    lines: bool = False,
) -> Inspection:
    """Compile a version's kernels and work out what they use.

    arch: "sm_90"; None takes the one that the version needs, or the usual one. params: its defaults if left out.
    nvdisasm: the program, for the machine code; lines: with the lines of the source in it. Raises UsageError for an
    architecture that is not known or not the version's, CannotRunError without NVRTC or where nvdisasm fails,
    CompileError if the source is at fault.
    """
    family, version = catalog[name], catalog.version(name, number)
    arch = arch_of(name, version, arch)
    architecture = architecture_of(arch)
    chosen = version.chosen(params or {})
    plans, refused = _plans(family, version, problem, blocks, architecture, chosen)
    kernels = sorted({kernel for plan in plans.values() for kernel in kernels_of(plan)})
    infos: dict[str, KernelInfo] = {}
    ptx, compiler, machine_code = Ptx("", {}), "", None
    cubin: Cubin | None = None
    if kernels:
        source = load_source(Path(family.sources[number]), (kernel_folder(),))
        # NVRTC lets go of the interpreter: the front end runs twice, but beside itself.
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(compile_ptx, source, kernels, arch)
            cubin = compile_cubin(source, kernels, arch)
            infos = dict(cubin.infos)
            if nvdisasm is not None:
                machine_code = _machine_code(cubin, source, nvdisasm, lines)
            ptx = text.result()
        compiler = "NVRTC {}.{}".format(*nvrtc_version())
    mixes = instruction_mix(ptx.text)
    examined = [_examined(b, step, n, infos, architecture) for b, plan in plans.items() for step, n in _launches(plan)]
    order = list(dict.fromkeys(kernel.name for kernel in examined))
    return Inspection(
        name,
        version,
        problem,
        arch,
        compiler,
        architecture,
        tuple(sorted(examined, key=lambda kernel: order.index(kernel.name))),
        {kernel: mixes[ptx.lowered[kernel]] for kernel in kernels},
        _others(plans),
        refused,
        ptx.text,
        chosen,
        machine_code,
        cubin,
    )


def _machine_code(cubin: Cubin, source: Source, nvdisasm: Path, lines: bool) -> MachineCode:
    texts = disassemble(cubin.data, nvdisasm, lines)
    files = {str(path): text for path, text in [(source.path, source.text), *((p, t) for _, p, t in source.includes)]}
    of_kernel = {kernel: texts[lowered] for kernel, lowered in cubin.lowered.items()}
    return MachineCode(
        {kernel: tuple(listing(text, files)) for kernel, text in of_kernel.items()},
        {kernel: sass_mix(instructions(text)) for kernel, text in of_kernel.items()},
    )


def arch_of(name: str, version: Version, arch: str | None) -> str:
    """What to compile for: where a version needs the variant "sm_90a", "sm_90" means that."""
    if arch is None:
        return version.arch or USUAL_ARCH
    if version.arch and arch not in (version.arch, version.arch.rstrip("af")):
        architecture_of(arch)
        raise UsageError(f"{name} version {version.number} is compiled for {version.arch} only, not for {arch}")
    return version.arch or arch


def _plans(
    family: Family,
    version: Version,
    problem: Problem,
    blocks: Sequence[int],
    architecture: Architecture,
    params: Mapping[str, int],
) -> tuple[dict[int, tuple[Step, ...]], dict[int, str]]:
    plans, refused = {}, {}
    for block in blocks:
        try:
            if reason := family.refusal(version, problem, block, params):
                refused[block] = reason
            else:
                plans[block] = checked_plan(version.plan(problem, block, architecture.props(), **params))
        except Exception as error:  # whatever a family's file raises
            path = Path(family.sources[version.number]).with_suffix(".py")
            what = f"the plan of {family.name} version {version.number} fails: {describe_fault(error, path)}"
            raise UsageError(what) from error
    return plans, refused


def _launches(plan: Sequence[Step]) -> list[tuple[Launch, int]]:
    """Launches that differ in more than their arguments, and how often each stands in the plan."""
    launches = [step for step in plan if isinstance(step, Launch)]
    first = {shape(step): step for step in reversed(launches)}
    return [(first[key], count) for key, count in Counter(map(shape, launches)).items()]


def shape(step: Launch) -> tuple[object, ...]:
    """All of a launch but its arguments, to compare it with others by. Families may write lists for tuples."""
    return step.kernel, tuple(step.grid), tuple(step.block), step.shared


def _examined(
    block: int, step: Launch, times: int, infos: dict[str, KernelInfo], architecture: Architecture
) -> Examined:
    info = infos[step.kernel]
    shared = (info.static_shared or 0) + step.shared
    usage = Usage(math.prod(step.block), info.registers or 0, shared, info.max_threads or 1024)
    resident = occupancy(usage, architecture)
    at_once = resident.blocks * architecture.multiprocessors
    waves = math.prod(step.grid) / at_once if at_once else None
    return Examined(block, step, times, info, resident, cliffs(usage, architecture), waves)


def _others(plans: dict[int, tuple[Step, ...]]) -> dict[str, int]:
    """Steps that are no launches, of the plan that has most of them: no block size decides on a library's step."""
    names = [[type(step).__name__ for step in plan if not isinstance(step, Launch)] for plan in plans.values()]
    most: list[str] = max(names, key=len, default=[])
    return dict(Counter(most))


def _to_dict(kernel: Examined) -> dict[str, Any]:
    info = kernel.info
    return {
        "kernel": kernel.launch.kernel,
        "block": kernel.block,
        "threads": list(kernel.launch.block),
        "grid": list(kernel.launch.grid),
        "launches": kernel.times,
        "registers": info.registers,
        "spill_bytes": info.spill_bytes,
        "stack_bytes": info.local_bytes,
        "static_shared": info.static_shared,
        "dynamic_shared": kernel.launch.shared,
        "max_threads": info.max_threads,
        **_resident(kernel.occupancy),
        "limiters": list(kernel.occupancy.limiters),
        "waves": kernel.waves,
        "cliffs": [{"resource": c.resource, "change": c.change, **_resident(c.occupancy)} for c in kernel.cliffs],
    }


def _resident(found: Occupancy) -> dict[str, Any]:
    return {"blocks_per_multiprocessor": found.blocks, "occupancy": found.share}
