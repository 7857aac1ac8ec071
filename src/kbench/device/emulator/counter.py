"""An emulator that counts what each line of a kernel asks of memory: see counter.h for how."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbench.device.base import Buffer
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator.build import COUNT_OPTIONS, KERNEL_OPTIONS, build_kernels, find_compiler
from kbench.device.emulator.device import EmulatorDevice
from kbench.device.emulator.runtime import LaunchRequest, Runtime
from kbench.device.emulator.symbols import guard_variables, inline_chains
from kbench.errors import CannotRunError
from kbench.source import Source

# Blocks of a launch that are counted, the others only run: enough that a few special ones weigh as they should, few
# enough that a family's small problem takes seconds.
COUNTED_BLOCKS = 1024
# Accesses and basic blocks of all lanes that are kept until the lanes of a warp meet: 256 MiB of them.
MOST_EVENTS = 1 << 24
KINDS = ("load", "store", "atomic", "barrier")
_NUMBERS = ("size", "accesses", "lanes", "bytes", "used", "sectors", "wavefronts", "ideal")
_DEEPEST = 64  # calls within calls that a place is followed through

Frame = tuple[str, int]  # path and line


class _Row(ctypes.Structure):
    _fields_ = [
        ("site", ctypes.c_uint32),
        ("tensor", ctypes.c_int32),
        ("kind", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("accesses", ctypes.c_uint64),
        ("lanes", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("ideal", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class PlaceCounts:
    """What one place in a kernel's code asked of one memory, in the blocks that were counted.

    kind: of KINDS. tensor: "" for shared memory. frames: where the access stands and the calls that led there,
    innermost first; empty if unknown. size: bytes of one lane's access, the largest. accesses: of a warp; of a block
    for barriers. lanes, bytes: of all lanes together. used: different bytes, access by access. sectors: of 32 bytes.
    wavefronts, ideal: turns that shared memory takes, and would take without conflicts between banks.
    """

    kind: str
    tensor: str
    frames: tuple[Frame, ...]
    size: int
    accesses: int
    lanes: int
    bytes: int
    used: int
    sectors: int
    wavefronts: int
    ideal: int


@dataclass(frozen=True)
class LaunchCounts:
    """One launch. blocks, counted: of its grid, and those among them that `places` is about."""

    kernel: str
    blocks: int
    counted: int
    places: tuple[PlaceCounts, ...]


class CountingDevice(EmulatorDevice):
    """An emulator whose kernels are built so that accesses can be counted. launches: one entry per launch so far.

    Blocks run one after another and in the same order: two runs on the same inputs count the same.
    """

    def __init__(self, time_limit: float = 30.0, blocks: int = COUNTED_BLOCKS, events: int = MOST_EVENTS):
        super().__init__(workers=1, time_limit=time_limit)
        self.blocks = blocks
        self.events = events
        self.launches: list[LaunchCounts] = []

    def describe(self) -> dict[str, Any]:
        compiler = find_compiler()
        return {**super().describe(), "options": [*compiler.options, *KERNEL_OPTIONS, *COUNT_OPTIONS]}

    def _compile(self, source: Source, kernels: tuple[str, ...]) -> Path:
        return build_kernels(source, kernels, counts=True)

    def _launch(self, request: LaunchRequest, schedule: str) -> None:
        runtime = self._loaded_runtime()
        with _counter(runtime, self.blocks, self.events) as counter:
            for buffer in self._all_memory().buffers:
                counter.add_tensor(buffer)
            for begin, size in guard_variables(request.module.path):
                counter.add_hole(begin, size)
            self._launch_counted(request, schedule, counter.handle)
            if counter.overflowed:
                raise CannotRunError(
                    f"kernel {request.kernel.name}: its threads run on for too long without a barrier to be counted",
                    "choose smaller sizes",
                )
            x, y, z = request.grid
            places = counter.places(request.module.path)
            self.launches.append(LaunchCounts(request.kernel.name, x * y * z, counter.blocks, places))


class _Counter:
    """A counter of the runtime. handle: its address."""

    def __init__(self, library: Any, blocks: int, events: int):
        self._library = library
        self._names: list[str] = []
        library.emu_counter_new.restype = ctypes.c_void_p
        self.handle = int(library.emu_counter_new(ctypes.c_uint32(blocks), ctypes.c_size_t(events)))

    def add_tensor(self, buffer: Buffer) -> None:
        """In the order of their addresses."""
        nbytes = buffer.tensor.count * numpy_dtype(buffer.tensor.dtype).itemsize
        self._add(self._library.emu_counter_range, buffer.address, nbytes)
        self._names.append(buffer.tensor.name)

    def add_hole(self, begin: int, size: int) -> None:
        """Thread-local storage that is no variable of the kernel: begin counts from its start."""
        self._add(self._library.emu_counter_hole, begin, size)

    def _add(self, function: Any, begin: int, size: int) -> None:
        function(ctypes.c_void_p(self.handle), ctypes.c_uint64(begin), ctypes.c_uint64(begin + size))

    @property
    def overflowed(self) -> bool:
        return bool(self._library.emu_counter_overflowed(ctypes.c_void_p(self.handle)))

    @property
    def blocks(self) -> int:
        self._library.emu_counter_blocks.restype = ctypes.c_uint64
        return int(self._library.emu_counter_blocks(ctypes.c_void_p(self.handle)))

    def places(self, library: Path) -> tuple[PlaceCounts, ...]:
        """In the order in which they were first met, which is the same each time."""
        pointer = ctypes.POINTER(_Row)()
        self._library.emu_counter_rows.restype = ctypes.c_size_t
        count = self._library.emu_counter_rows(ctypes.c_void_p(self.handle), ctypes.byref(pointer))
        rows = [pointer[i] for i in range(count)]
        chains = {row.site: self._chain(row.site) for row in rows}
        known = inline_chains(library, sorted({address for chain in chains.values() for address in chain}))
        frames = {site: [frame for pc in chain for frame in known.get(pc, ())] for site, chain in chains.items()}
        return tuple(self._place(row, frames[row.site]) for row in rows)

    def delete(self) -> None:
        self._library.emu_counter_delete(ctypes.c_void_p(self.handle))

    def _place(self, row: Any, frames: Sequence[Frame]) -> PlaceCounts:
        tensor = self._names[row.tensor] if row.tensor >= 0 else ""
        numbers = (getattr(row, name) for name in _NUMBERS)
        return PlaceCounts(KINDS[row.kind], tensor, tuple(frames), *numbers)

    def _chain(self, site: int) -> list[int]:
        """Code addresses relative to the kernel's library; 0 stands for the runtime's own code."""
        out = (ctypes.c_uint64 * _DEEPEST)()
        self._library.emu_counter_chain.restype = ctypes.c_size_t
        count = self._library.emu_counter_chain(
            ctypes.c_void_p(self.handle), ctypes.c_uint32(site), out, ctypes.c_size_t(_DEEPEST)
        )
        return [address for address in out[:count] if address]


@contextmanager
def _counter(runtime: Runtime, blocks: int, events: int) -> Iterator[_Counter]:
    counter = _Counter(runtime.library, blocks, events)
    try:
        yield counter
    finally:
        counter.delete()
