"""Proving versions of kbench's own families on one emulator, for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import Case, make_case
from kbench.check.prove import prove
from kbench.check.verdict import Verdict
from kbench.device.emulator.device import EmulatorDevice
from kbench.errors import LibraryMissing
from kbench.family import CheckShape, Family, Problem, Version, kernels_of
from kbench.grammar import Target
from kbench.jobs import Job
from kbench.selection import Selection
from kbench.source import Source, load_source

# No right version may use more of its bound, or the bound says nothing about the next compiler or GPU.
LARGEST_USE = 0.6

# Except where rounding to the output's own type is nearly all of the bound, and the nearest number may use all of that.
_ROUNDED_COARSELY = ("bf16", "fp16")


class FamilyRunner:
    """One family on one emulator; kernels are compiled together by `compile`, else at their first use."""

    def __init__(self, name: str):
        self._catalog = load_catalog()
        self.family: Family = self._catalog[name]
        self.device = EmulatorDevice()
        self._modules: dict[tuple[str, ...], Any] = {}
        self._all: Any = None
        self._held: frozenset[str] = frozenset()

    def pairs(self, shape: CheckShape, dtype: str, one_block: bool = False) -> Iterator[tuple[Version, int]]:
        """The versions and block sizes that a check shape is for. one_block: only one block size of each version."""
        for version in self.family.versions:
            if shape.versions is not None and version.number not in shape.versions:
                continue
            blocks = shape.block_sizes or version.blocks
            usable = [b for b in blocks if not self.family.refusal(version, Problem(shape.sizes, dtype), b)]
            yield from ((version, block) for block in (usable[len(usable) // 2 :][:1] if one_block else usable))

    def varied(self, dtype: str) -> list[Job]:
        """What `kbench check` tries of other values of parameters than the defaults."""
        jobs = Selection([Target(self.family.name)], "check", dtype=dtype).jobs(self._catalog, "emulator")
        return [job for job in jobs if job.params != self.family.by_number[job.version].defaults]

    def compile(self, dtype: str, one_block: bool = False, varied: Iterable[Job] = ()) -> None:
        """All kernels of the check shapes in one go, and those of these rows besides."""
        props = self.device.props
        kernels = {
            kernel: None
            for shape in self.family.check_shapes
            for version, block in self.pairs(shape, dtype, one_block)
            for kernel in kernels_of(version.plan(Problem(shape.sizes, dtype), block, props))
        }
        for job in varied:
            plan = self.family.by_number[job.version].plan(Problem(job.sizes, dtype), job.block, props, **job.params)
            kernels |= dict.fromkeys(kernels_of(plan))
        self._all = self.device.build(self._source(), tuple(kernels)) if kernels else None
        self._held = frozenset(kernels)

    def case(self, shape: CheckShape | dict[str, int], dtype: str, seed: int, structured: bool = False) -> Case:
        sizes = shape.sizes if isinstance(shape, CheckShape) else shape
        return make_case(self.family, Problem(sizes, dtype), seed, structured)

    def prove(
        self,
        version: Version,
        block: int,
        case: Case,
        source: Source | None = None,
        params: Mapping[str, int] | None = None,
    ) -> Verdict | None:
        """The verdict; None where the plan needs a library that the emulator has not got."""
        problem, props, chosen = case.problem, self.device.props, dict(params or {})
        plan = version.plan(problem, block, props, **chosen)
        scratch = version.scratch(problem, block, props, **chosen) if version.scratch is not None else ()
        try:
            module = self._module(kernels_of(plan), source)
            prepared = self.device.prepare(plan, module, (*case.tensors.values(), *scratch))
        except LibraryMissing:
            return None
        with Buffers(self.device, self.family, version, problem, block, plan, chosen) as buffers:
            return prove(self.device, self.family, version, prepared, buffers, case)

    def broken(self, old: str, new: str) -> Source:
        """The family's source with a bug in it."""
        source = self._source()
        assert source.text.count(old) == 1, f"{self.family.name}.cu does not hold {old!r} exactly once"
        return replace(source, path=Path("broken.cu"), text=source.text.replace(old, new))

    def _module(self, kernels: tuple[str, ...], source: Source | None) -> Any:
        if not kernels:
            return None  # a plan of library calls
        if source is None and self._held.issuperset(kernels):
            return self._all
        if source is not None:
            return self.device.build(source, kernels)
        if kernels not in self._modules:
            self._modules[kernels] = self.device.build(self._source(), kernels)
        return self._modules[kernels]

    def _source(self) -> Source:
        return load_source(kernel_folder() / f"{self.family.name}.cu")


def assert_proved(verdict: Verdict, version: Version, case: Case, what: str) -> None:
    """Passed, well within the bound, and as deterministic as the version claims."""
    assert verdict.passed, f"{what}: {verdict.reason()}"
    assert verdict.deterministic or not version.claims_deterministic, what
    for output in verdict.outputs:
        assert output.used is not None, f"{what}: {output.name}"
        if case.tensors[output.name].dtype not in _ROUNDED_COARSELY:
            assert output.used <= LARGEST_USE, f"{what}: {output.name} uses {output.used} of its bound"
