"""Families and versions: what `dev_kernels/*.py` declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from kbench.family.checked import are_sizes, is_count, require
from kbench.family.error import ErrorModel, Expected
from kbench.family.problem import MAX_BLOCK, POWERS_OF_TWO, Array, Problem
from kbench.family.steps import Step
from kbench.family.tensor import Tensor
from kbench.params import Param, checked_params, params_refusal, params_text, require_takes


@dataclass(frozen=True)
class Rule:
    """A condition on a problem. `text` is shown when it refuses: "C divisible by NH"."""

    text: str
    holds: Callable[[Problem], bool]


@dataclass(frozen=True)
class LaunchRule:
    """A condition of a version on its block size and parameters as well: `holds(problem, block, **params)`."""

    text: str
    holds: Callable[..., bool]


@dataclass(frozen=True)
class CheckShape:
    """Sizes that `kbench check` tries, and why. `versions` and `block_sizes` limit it (None: all)."""

    sizes: Mapping[str, int]
    why: str
    versions: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None


PlanFunction = Callable[..., tuple[Step, ...]]
"""`plan(problem, block, props)`; with the version's parameters, if it has any, as keyword arguments besides."""


@dataclass(frozen=True)
class Version:
    """One way of computing the operation.

    plan: `plan(problem, block, props)`, pure. block_sizes: threads per block as launched, never rounded;
    `fixed` replaces them where a version has exactly one. claims_deterministic: the check proves it.
    params: by name, whole numbers that plan and scratch take as keyword arguments: `plan(problem, block, props, ROWS)`.
    Whoever calls them without gets the defaults.
    needs, saves: names of intermediates that it reads from, or leaves for, another family.
    aliases: pairs (input, output) that may be the same memory; checked both ways.
    scratch: `scratch(problem, block, props)`, tensors of its own. gpu_only: why the emulator cannot run it.
    arch: "sm_90a" where it needs one exactly.
    """

    number: int
    idea: str
    plan: PlanFunction
    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...] = POWERS_OF_TWO
    fixed: int | None = None
    rules: tuple[Rule | LaunchRule, ...] = ()
    needs: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    claims_deterministic: bool = True
    scratch: Callable[..., tuple[Tensor, ...]] | None = None
    gpu_only: str = ""
    arch: str = ""
    params: Mapping[str, Param] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require(is_count(self.number), "a Version's number is an int, 0 or more", self.number)
        require(isinstance(self.idea, str), "a Version's idea is a line of text", self.idea)
        require(callable(self.plan), "a Version's plan is a function", self.plan)
        require(isinstance(self.dtypes, tuple | list), "a Version's dtypes are a tuple", self.dtypes)
        usable = are_sizes(self.blocks, 1, MAX_BLOCK) and all(1 <= block <= MAX_BLOCK for block in self.blocks)
        require(usable, f"block sizes are a tuple of ints from 1 to {MAX_BLOCK}", self.blocks)
        checked_params(self.params)
        for rule in self.rules:
            if isinstance(rule, LaunchRule):
                require_takes(rule.holds, "LaunchRule", ("problem", "block"), self.params)
        for name in ("plan", "scratch") if self.params else ():
            if function := getattr(self, name):
                require_takes(function, name, ("problem", "block", "props"), self.params)
                object.__setattr__(self, name, partial(function, **self.defaults))  # frozen: this is still its making

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.fixed,) if self.fixed is not None else self.block_sizes

    @property
    def defaults(self) -> dict[str, int]:
        """The parameters where nobody asks for others."""
        return {name: param.default for name, param in self.params.items()}

    def chosen(self, params: Mapping[str, int]) -> dict[str, int]:
        """These parameters, with the defaults of those that are left open."""
        return {**self.defaults, **params}


@dataclass(frozen=True)
class Family:
    """One operation: its sizes, tensors, reference and versions.

    sizes: name to meaning, in the order in which they are shown. dtypes: the first is the default.
    presets: "default" (the sizes for a GPU) and "small" (seconds on the emulator).
    tensors: `tensors(problem)`, in the order in which they are drawn.
    reference: `reference(problem, inputs, error, xp)`: name of each output to Expected; `inputs` holds the
        "in" and "inout" tensors as float64 arrays of the values that the kernel sees, after rounding.
    """

    name: str
    summary: str
    sizes: Mapping[str, str]
    dtypes: tuple[str, ...]
    presets: Mapping[str, Mapping[str, int]]
    check_shapes: tuple[CheckShape, ...]
    tensors: Callable[[Problem], tuple[Tensor, ...]]
    reference: Callable[[Problem, Mapping[str, Array], ErrorModel, Any], dict[str, Expected]]
    versions: tuple[Version, ...]
    rules: tuple[Rule, ...] = ()
    flops: Callable[[Problem], float] | None = None
    # Bytes that any version has to read and write. None: inputs once, outputs once, without intermediates.
    traffic: Callable[[Problem], float] | None = None
    # Sizes that say yes or no: 0 or 1, where all other sizes start at 1.
    flags: tuple[str, ...] = ()
    # Set by the loader, not by family files: where each version's device code stands.
    sources: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = isinstance(self.versions, tuple | list) and all(isinstance(v, Version) for v in self.versions)
        require(listed, "a Family's versions are a tuple of Version", self.versions)
        for name in ("sizes", "presets"):
            require(isinstance(getattr(self, name), Mapping), f"a Family's {name} are a dict", getattr(self, name))
        require(isinstance(self.dtypes, tuple | list), "a Family's dtypes are a tuple", self.dtypes)
        plain = all(isinstance(rule, Rule) for rule in self.rules)
        require(plain, "a Family's rules are a tuple of Rule: only versions have block sizes", self.rules)
        known = isinstance(self.flags, tuple | list) and all(name in self.sizes for name in self.flags)
        require(known, "a Family's flags are a tuple of names of its sizes", self.flags)
        for sizes in (*self.presets.values(), *(shape.sizes for shape in self.check_shapes)):
            require(isinstance(sizes, Mapping), "the sizes of a preset or check shape are a dict", sizes)
            for name, size in sizes.items():
                require(not self.size_fault(name, size), "sizes are ints above 0, flags 0 or 1", sizes)

    def size_fault(self, name: str, size: object) -> str:
        """Why a size cannot have this value; "" if it can."""
        if name in self.flags:
            return "" if is_count(size) and size in (0, 1) else f"{name} is 0 or 1, not {size}"
        return "" if is_count(size) and size else f"size {name}={size} must be at least 1"

    def least_traffic(self, problem: Problem) -> float:
        """Bytes of global memory that any version has to move: `traffic`, or what the tensors' roles say."""
        if self.traffic is not None:
            return self.traffic(problem)
        passes = {"in": 1, "out": 1, "inout": 2, "scratch": 0}
        return float(sum(passes[t.role] * t.nbytes for t in self.tensors(problem) if not t.intermediate))

    @cached_property
    def by_number(self) -> dict[int, Version]:
        return {version.number: version for version in self.versions}

    def refusal(self, version: Version, problem: Problem, block: int, params: Mapping[str, int] | None = None) -> str:
        """Why this version does not take this problem, block size and parameters; "" if it does. params: the defaults
        where they are left open."""
        if problem.dtype not in version.dtypes:
            return f"dtype {problem.dtype} is not supported; it has {', '.join(version.dtypes)}"
        for rule in (*self.rules, *version.rules):
            if isinstance(rule, Rule) and not rule.holds(problem):
                return f"needs {rule.text} (here {problem})"
        if block not in version.blocks:
            kind = "fixed block size" if version.fixed is not None else "block sizes"
            return f"block size {block} is not supported; {kind} {', '.join(map(str, version.blocks))}"
        chosen = version.chosen(params or {})
        if refusal := params_refusal(version.params, chosen):
            return refusal
        for rule in version.rules:
            if isinstance(rule, LaunchRule) and not rule.holds(problem, block, **chosen):
                return f"needs {rule.text} (here {problem}, block size {block}{_with(chosen)})"
        return ""

    def taken_blocks(self, version: Version, problem: Problem) -> tuple[int, ...]:
        """The block sizes at which a version takes a problem, with its default parameters."""
        return tuple(block for block in version.blocks if not self.refusal(version, problem, block))


def _with(params: Mapping[str, int]) -> str:
    return f", {params_text(params)}" if params else ""
