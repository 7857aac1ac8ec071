"""What a training step is to a device: tensors to allocate, and calls of versions on views of them, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kbench.family import Problem, Step, Tensor
from kbench.params import place_text


@dataclass(frozen=True)
class Use:
    """One version at one problem, block size and parameters. Its plan is made once, and bound to memory wherever it is
    called."""

    family: str
    version: int
    block: int
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    params: tuple[tuple[str, int], ...] = ()

    @property
    def problem(self) -> Problem:
        return Problem(dict(self.sizes), self.dtype)

    def __str__(self) -> str:
        place = place_text(self.block, dict(self.params))
        return f"{self.family}:{self.version} {self.problem} {self.dtype} block {place}"


@dataclass(frozen=True)
class View:
    """Elements of a device tensor, from `offset` on."""

    tensor: str
    offset: int = 0


@dataclass(frozen=True)
class Call:
    """One use of a version. views: the family's tensors in the step's memory; what its plan touches besides lives in
    `arena` for as long as the call does."""

    role: str
    use: Use
    views: Mapping[str, View]
    arena: str


@dataclass(frozen=True)
class Plain:
    """Steps of no family, on the step's own tensors: fills and copies."""

    role: str
    steps: tuple[Step, ...]


Action = Call | Plain


@dataclass(frozen=True)
class Program:
    """A step, in phases that are captured into graphs of their own or several together.

    forward: from tokens to what the logits are made of. losses: from there to the loss of every token. logits: those of
    the first part of the batch alone. first, later: losses and the whole backward pass, of the first micro-step (`=`)
    and of later ones (`+=`). update: norm, control, AdamW.
    """

    tensors: tuple[Tensor, ...]
    forward: tuple[Action, ...]
    logits: tuple[Action, ...]
    losses: tuple[Action, ...]
    first: tuple[Action, ...]
    later: tuple[Action, ...]
    update: tuple[Action, ...]

    @property
    def actions(self) -> tuple[Action, ...]:
        return (*self.forward, *self.logits, *self.losses, *self.first, *self.later, *self.update)
