"""A program on a device: plans made and kernels compiled once per use, memory allocated, every call bound to it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kbench.builds import Builds
from kbench.catalog import Catalog, kernel_folder
from kbench.device.base import Bound, Buffer, Device, Prepared
from kbench.device.dtypes import numpy_dtype
from kbench.errors import CannotRunError, KbenchError
from kbench.family import ITEM_SIZES, Array, Step, Tensor, Version, checked_plan, kernels_of, tensors_of
from kbench.source import Source, load_source
from kbench.train.program import Action, Call, Plain, Program, Use, View

# Bytes. As every GPU allocation is aligned, and as cuBLASLt and packets of kernels want their tensors.
_ALIGNMENT = 256
# Memory that stays free for what the driver and libraries allocate by themselves: lazily loaded kernels, and cuDNN.
RESERVE = 256 << 20


@dataclass(frozen=True)
class Made:
    """The plan of one use, and the tensors that it touches."""

    use: Use
    version: Version
    plan: tuple[Step, ...]
    tensors: tuple[Tensor, ...]
    touched: tuple[Tensor, ...]

    def transient(self, views: Mapping[str, View]) -> tuple[Tensor, ...]:
        """What it touches that has no place of its own."""
        return tuple(tensor for tensor in self.touched if tensor.name not in views)

    def transient_bytes(self, views: Mapping[str, View]) -> int:
        """Memory for them, each aligned."""
        return sum(_aligned(tensor.nbytes) for tensor in self.transient(views))


class Plans:
    """Plans of uses, as their families make them for a device. Raises KbenchError where a use is refused."""

    def __init__(self, catalog: Catalog, device: Device):
        self._catalog, self._device = catalog, device
        self._made: dict[Use, Made] = {}

    def of(self, use: Use) -> Made:
        if use not in self._made:
            self._made[use] = self._make(use)
        return self._made[use]

    def touches(self, use: Use) -> tuple[str, ...]:
        """Names of the tensors that a use touches."""
        return tuple(tensor.name for tensor in self.of(use).touched)

    def source(self, use: Use) -> Source:
        return load_source(Path(self._catalog[use.family].sources[use.version]), (kernel_folder(),))

    def _make(self, use: Use) -> Made:
        family, version = self._catalog[use.family], self._catalog.version(use.family, use.version)
        problem, props, params = use.problem, self._device.props, dict(use.params)
        if refusal := family.refusal(version, problem, use.block, params):
            raise KbenchError(f"{use.family} version {use.version} cannot be used: {refusal}")
        plan = checked_plan(version.plan(problem, use.block, props, **params))
        own = version.scratch(problem, use.block, props, **params) if version.scratch is not None else ()
        tensors = (*family.tensors(problem), *own)
        touched = set(tensors_of(plan))
        return Made(use, version, plan, tensors, tuple(tensor for tensor in tensors if tensor.name in touched))


class Engine:
    """A program, ready to run.

    Memory is allocated by `allocate`, after `needed` has said how much it will be; `run` queues actions.
    """

    def __init__(self, device: Device, plans: Plans, program: Program):
        self.device, self.plans, self.program = device, plans, program
        self.buffers: dict[str, Buffer] = {}
        self.calls = [action for action in program.actions if isinstance(action, Call)]
        self._sizes = {tensor.name: tensor.nbytes for tensor in program.tensors}
        self._prepared: dict[Use, Prepared] = {}
        self._bound: dict[int, Bound] = {}
        self._prepare()
        self._scratch = Tensor("scratch", (self._scratch_bytes(),), "uint8", "scratch")

    # ------------------------------------------------------------------------------------------ preparing

    def _prepare(self) -> None:
        """Compile everything at once, then prepare each use."""
        uses = list(dict.fromkeys(call.use for call in self.calls))
        wanted: dict[tuple[str, str], set[str]] = defaultdict(set)
        sources: dict[tuple[str, str], Source] = {}
        for use in uses:
            made, source = self.plans.of(use), self.plans.source(use)
            key = (source.digest, made.version.arch)
            sources[key] = source
            wanted[key].update(kernels_of(made.plan))
        with ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 2))) as pool:
            builds = Builds(self.device, pool)
            for key, kernels in wanted.items():
                builds.ahead(sources[key], kernels, key[1])
            for use in uses:
                made = self.plans.of(use)
                module = builds.module(self.plans.source(use), kernels_of(made.plan), made.version.arch)
                self._prepared[use] = self.device.prepare(made.plan, module, made.tensors)

    @property
    def notes(self) -> list[str]:
        """What preparing had to say, each once."""
        return list(dict.fromkeys(note for prepared in self._prepared.values() for note in prepared.notes))

    # ------------------------------------------------------------------------------------------ memory

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All device memory, tensor by tensor."""
        return (*self.program.tensors, self._scratch)

    @property
    def needed(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def allocate(self) -> None:
        """Allocate every tensor and bind every call. Raises CannotRunError where memory does not suffice."""
        free = self.device.free_memory()
        if self.needed + RESERVE > free:
            raise CannotRunError(
                f"the step needs {self.needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
                "give a higher --recompute or a smaller --batch",
            )
        for tensor in self.tensors:
            self.buffers[tensor.name] = self.device.alloc(tensor)
        for action in self.program.actions:
            self._bound[id(action)] = self._bind(action)

    def close(self) -> None:
        self._bound.clear()
        for buffer in self.buffers.values():
            self.device.free(buffer)
        self.buffers.clear()

    def _bind(self, action: Action) -> Bound:
        if isinstance(action, Plain):
            prepared = self.device.prepare(action.steps, None, self.tensors)
            return self.device.bind(prepared, self.buffers)
        made, prepared = self.plans.of(action.use), self._prepared[action.use]
        places = {name: self._place(made, name, view) for name, view in action.views.items()}
        arena, offset = self._arena(action), 0
        for tensor in made.transient(action.views):
            places[tensor.name] = self._inside(tensor, arena, offset)
            offset += _aligned(tensor.nbytes)
        workspace = Tensor("workspace", (prepared.workspace,), "uint8", "scratch")
        given = self._inside(workspace, arena, offset) if prepared.workspace else None
        return self.device.bind(prepared, {n: b for n, b in places.items() if b is not None}, given)

    def _place(self, made: Made, name: str, view: View) -> Buffer | None:
        """A tensor of the family in a tensor of the step; None if the plan does not touch it."""
        tensor = next((tensor for tensor in made.touched if tensor.name == name), None)
        if tensor is None:
            return None
        whole = self.buffers[view.tensor]
        if tensor.dtype != whole.tensor.dtype:
            raise KbenchError(f"{made.use}: tensor {name} holds {tensor.dtype}, {view.tensor} {whole.tensor.dtype}")
        return self._inside(tensor, whole, view.offset * ITEM_SIZES[whole.tensor.dtype])

    def _inside(self, tensor: Tensor, whole: Buffer, start: int) -> Buffer:
        """A tensor in the memory of another, from byte `start` on."""
        if start + tensor.nbytes > whole.tensor.nbytes:
            raise KbenchError(
                f"tensor {tensor.name} of {tensor.nbytes} bytes reaches past the end of {whole.tensor.name}"
            )
        array = None
        if self.device.kind == "emulator":
            memory = whole.array.reshape(-1).view(np.uint8)[start : start + tensor.nbytes]
            array = memory.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        return Buffer(tensor, array, whole.address + start, whole.handle, whole.redzone)

    def _arena(self, call: Call) -> Buffer:
        return self.buffers[call.arena if self._fits(call) else "scratch"]

    def _fits(self, call: Call) -> bool:
        """Whether its transient memory fits into its arena; else it goes where all of it fits."""
        return self._transient_bytes(call) <= self._sizes.get(call.arena, 0)

    def _transient_bytes(self, call: Call) -> int:
        return self.plans.of(call.use).transient_bytes(call.views) + self._prepared[call.use].workspace

    def _scratch_bytes(self) -> int:
        return (
            max((self._transient_bytes(call) for call in self.calls if not self._fits(call)), default=0) or _ALIGNMENT
        )

    # ------------------------------------------------------------------------------------------ running

    def bounds(self, actions: Sequence[Action]) -> list[Bound]:
        """What `actions`, which belong to the program, are bound to."""
        return [self._bound[id(action)] for action in actions]

    def run(self, actions: Sequence[Action]) -> None:
        """Queue actions; the emulator has run them when this returns."""
        with self.device.activate():
            for bound in self.bounds(actions):
                self.device.enqueue(bound)

    def fill(self, name: str, values: Array) -> None:
        """Upload a whole tensor."""
        buffer = self.buffers[name]
        dtype = numpy_dtype(buffer.tensor.dtype)
        self.device.upload(buffer, np.ascontiguousarray(values, dtype).reshape(buffer.tensor.shape))

    def fetch(self, name: str) -> Array:
        """Download a whole tensor, after all that was queued."""
        return self.device.download(self.buffers[name])

    def clear(self, *names: str) -> None:
        """Fill tensors with zeros."""
        for name in names:
            self.device.poison(self.buffers[name], 0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
