"""From what was typed to the rows that it asks for: which versions, problems and block sizes, in what order."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbench.catalog import Catalog
from kbench.errors import UsageError
from kbench.family import Family, Problem, Version
from kbench.grammar import Target, parse_dtype, parse_dtypes
from kbench.jobs import Job
from kbench.params import combinations, one_at_a_time, require_declared
from kbench.typed import misfit

# 256 threads fill every GPU's multiprocessors, and are the block size that most kernels are written for.
_USUAL_BLOCK = 256


@dataclass(frozen=True)
class Selection:
    """What a command asks for. targets: none at all means every family. mode: "run", "check" or "sweep".
    block_sizes, preset, dtype: None where the user left it open. dtype: as typed; of check and sweep also several,
    "fp32,bf16", or "all" that a family has. params: values of versions' parameters by name. whole: a parameter that is
    left open takes all of its values, not the default alone. usual: of block sizes that are left open, one a version as
    `run` does, not all."""

    targets: Sequence[Target]
    mode: str
    block_sizes: Sequence[int] | None = None
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    preset: str | None = None
    dtype: str | None = None
    params: Mapping[str, Sequence[int]] = field(default_factory=dict)
    whole: bool = False
    usual: bool = False

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Selection:
        """The reverse of dataclasses.asdict, after a trip through JSON. Raises KeyError or TypeError for another."""
        if wrong := misfit(cls, data):
            raise TypeError(wrong)
        return cls(**{**data, "targets": [Target(**target) for target in data["targets"]]})

    def jobs(self, catalog: Catalog, device_kind: str) -> Iterator[Job]:
        """The rows, small problems first, so that the first failure is also the smallest.

        Raises UsageError for names that do not exist, and for sizes that break a rule of the family.
        """
        purpose = "check" if self.mode == "check" else "time"
        if self.mode == "run":
            parse_dtype(self.dtype, "run")
        asked = parse_dtypes(self.dtype) if self.dtype is not None else None
        if not self.targets and self.preset is not None and not _anybody_has(catalog, self.preset):
            raise UsageError(f"no family has a preset {self.preset!r}", "`kbench list FAMILY` names a family's presets")
        self._require_declared(catalog)
        for target in self.targets or [Target(name) for name in catalog.names]:
            name = target.family
            try:
                family = catalog[name]
            except UsageError:
                if len(self.targets) == 1:
                    raise
                # One of several: its row, which cannot be evaluated either, says what is wrong; the others go on.
                yield Job(name, 0, "", {}, asked[0] if asked else "fp32", 0, purpose)
                continue
            if not self.targets and self.preset is not None and self.preset not in family.presets:
                continue  # of all families, those that have the preset
            versions = [catalog.version(name, number) for number in target.versions or family.by_number]
            for dtype in self._dtypes(family, versions, asked, device_kind):
                yield from self._jobs_in(family, versions, dtype, device_kind, purpose)

    def _jobs_in(
        self, family: Family, versions: Sequence[Version], dtype: str, device_kind: str, purpose: str
    ) -> Iterator[Job]:
        """The rows of one family in one dtype."""
        name = family.name
        if dtype not in family.dtypes:
            # One of several: a refused row per version says so, and the other families go on.
            sizes = dict(self._shapes(family, family.dtypes[0], device_kind)[0].sizes)
            for version in versions:
                params = version.chosen({})
                yield Job(name, version.number, version.idea, sizes, dtype, version.blocks[0], purpose, params)
            return
        shapes = self._shapes(family, dtype, device_kind)
        varied = {v.number: self._varied(family, v, shapes, dtype) for v in versions if v.params}
        for shape in shapes:
            for version in versions:
                if shape.versions is not None and version.number not in shape.versions:
                    continue
                choices = combinations(version.params, self.params, self.whole)
                if shape in varied.get(version.number, ()):
                    choices += one_at_a_time(version.params)
                for block, params in itertools.product(self._blocks(version, shape), choices):
                    sizes = dict(shape.sizes)
                    yield Job(name, version.number, version.idea, sizes, dtype, block, purpose, params)

    def _dtypes(
        self, family: Family, versions: Sequence[Version], asked: Sequence[str] | None, device_kind: str
    ) -> Sequence[str]:
        """The dtypes that a family runs in. Raises UsageError for one that it lacks where no other family is named."""
        if self.dtype is None:
            return [_common_dtype(family, versions, device_kind)]
        if asked is None:  # all
            return family.dtypes
        lacking = [dtype for dtype in asked if dtype not in family.dtypes]
        if lacking and len(self.targets) == 1:
            raise UsageError(f"{family.name} has no dtype {lacking[0]!r}", f"it has {', '.join(family.dtypes)}")
        return asked

    def _require_declared(self, catalog: Catalog) -> None:
        """Raises UsageError for a parameter that none of the chosen versions has."""
        if not self.params:
            return
        declared = {}
        for target in self.targets or [Target(name) for name in catalog.names]:
            with contextlib.suppress(UsageError):  # a broken family's row says what is wrong with it
                for number in target.versions or catalog[target.family].by_number:
                    declared[f"{target.family}:{number}"] = catalog.version(target.family, number).params
        if declared:
            require_declared(self.params, declared)

    def _varied(self, family: Family, version: Version, shapes: Sequence[_Shape], dtype: str) -> list[_Shape]:
        """Where `check` tries every other value of a version's parameters too, one at a time, the others at their
        defaults: at the smallest, the middle and the largest of the shapes that the version takes. Nowhere, if the
        user chose values."""
        if self.mode != "check" or self.params.keys() & version.params.keys():
            return []
        taken = [shape for shape in shapes if shape.takes(family, version, dtype)]
        taken.sort(key=lambda shape: volume(family, shape.sizes, dtype))
        return [taken[0], taken[len(taken) // 2], taken[-1]] if taken else []

    def _shapes(self, family: Family, dtype: str, device_kind: str) -> list[_Shape]:
        if self.mode == "check" and not self.sizes and self.preset is None:
            shapes = [_Shape(shape.sizes, shape.versions, shape.block_sizes) for shape in family.check_shapes]
            return sorted(shapes, key=lambda shape: volume(family, shape.sizes, dtype))
        base = _checked_preset(family, self.preset or ("default" if device_kind == "cuda" else "small"))
        unknown = sorted(set(self.sizes) - set(family.sizes))
        if unknown:
            raise UsageError(f"{family.name} has no size {unknown[0]!r}", f"its sizes are {', '.join(family.sizes)}")
        choices = [self.sizes.get(name, [base[name]]) for name in family.sizes]
        shapes = [_Shape(dict(zip(family.sizes, values, strict=True))) for values in itertools.product(*choices)]
        for shape in shapes:
            _require_valid(family, shape.sizes, dtype)
        return shapes

    def _blocks(self, version: Version, shape: _Shape) -> Sequence[int]:
        """Block sizes of a version to run: a fixed one runs once, whatever was asked."""
        if version.fixed is not None:
            return [version.fixed]
        if self.block_sizes is not None:
            return self.block_sizes
        if self.mode == "run" or self.usual:
            return [min(version.blocks, key=lambda block: abs(math.log2(block / _USUAL_BLOCK)))]
        return [block for block in version.blocks if shape.block_sizes is None or block in shape.block_sizes]


@dataclass(frozen=True)
class _Shape:
    sizes: Mapping[str, int]
    versions: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None

    def takes(self, family: Family, version: Version, dtype: str) -> bool:
        """Whether it is meant for a version, and the version takes it."""
        if self.versions is not None and version.number not in self.versions:
            return False
        blocks: tuple[int, ...] = ()
        with contextlib.suppress(Exception):  # whatever a rule raises: a row of the version says so
            blocks = family.taken_blocks(version, Problem(self.sizes, dtype))
        return any(self.block_sizes is None or block in self.block_sizes for block in blocks)


def _anybody_has(catalog: Catalog, preset: str) -> bool:
    for name in catalog.names:
        with contextlib.suppress(UsageError):  # a broken family's row says what is wrong with it
            if preset in catalog[name].presets:
                return True
    return False


def volume(family: Family, sizes: Mapping[str, int], dtype: str) -> int:
    """Elements of all tensors: what makes a problem small or large. 0 where the family cannot say: it only puts
    problems in order, and their rows say what is wrong."""
    with contextlib.suppress(Exception):  # whatever a family's file raises
        return sum(tensor.count for tensor in family.tensors(Problem(sizes, dtype)))
    return 0


def _common_dtype(family: Family, versions: Sequence[Version], device_kind: str) -> str:
    """Where none is named: the first of the family's dtypes that all of the chosen versions take, so that their rows
    can be compared; the first of all if there is no such dtype. Versions that the device skips anyway do not count."""
    if device_kind == "emulator":
        versions = [version for version in versions if not version.gpu_only] or versions
    return next((d for d in family.dtypes if all(d in version.dtypes for version in versions)), family.dtypes[0])


def _checked_preset(family: Family, preset: str) -> Mapping[str, int]:
    if preset not in family.presets:
        raise UsageError(f"{family.name} has no preset {preset!r}", f"it has {', '.join(family.presets)}")
    return family.presets[preset]


def _require_valid(family: Family, sizes: Mapping[str, int], dtype: str) -> None:
    for name, size in sizes.items():
        if fault := family.size_fault(name, size):
            raise UsageError(fault)
    for rule in family.rules:
        holds = True
        with contextlib.suppress(Exception):  # whatever a rule raises: each row says so
            holds = rule.holds(Problem(sizes, dtype))
        if not holds:
            raise UsageError(f"{family.name} needs {rule.text}; here {Problem(sizes, dtype)}")
