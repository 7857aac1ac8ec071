"""Theoretical occupancy: how many blocks of a kernel one multiprocessor holds at once, what limits them, and how much
more or less of a resource would change that.

The arithmetic of CUDA's occupancy calculator: whole blocks only; registers go to warps in lots, from the partition
that runs the warp; shared memory goes to blocks in lots, with what the system keeps of it. The multiprocessor is taken
to give shared memory all that it can give it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kbench.family import WARP, ceil_div
from kbench.inspect.architectures import (
    PARTITIONS,
    REGISTER_UNIT,
    REGISTERS,
    REGISTERS_PER_THREAD,
    SHARED_RESERVED,
    SHARED_UNIT,
    Architecture,
)

LIMITERS = ("threads", "blocks", "registers", "shared memory")


@dataclass(frozen=True)
class Usage:
    """What a block takes. threads: of the block. registers: per thread. shared: bytes, static and dynamic.
    max_threads: of a block, as the kernel was compiled."""

    threads: int
    registers: int
    shared: int = 0
    max_threads: int = 1024

    @property
    def warps(self) -> int:
        return ceil_div(self.threads, WARP)


@dataclass(frozen=True)
class Occupancy:
    """blocks: resident on one multiprocessor; 0 where not even one can be launched. warps: of all these blocks.
    share: of the warps that the multiprocessor holds at most. limiters: every resource that allows no further block."""

    blocks: int
    warps: int
    share: float
    limiters: tuple[str, ...]


@dataclass(frozen=True)
class Cliff:
    """The smallest change of one resource that changes the number of resident blocks. resource: "registers" (per
    thread) or "shared memory" (bytes per block). change: below 0 for less of it. occupancy: what it leads to."""

    resource: str
    change: int
    occupancy: Occupancy


def occupancy(usage: Usage, architecture: Architecture) -> Occupancy:
    """How many blocks fit, and why no more."""
    limits = {
        "threads": architecture.warps // usage.warps if usage.threads <= usage.max_threads else 0,
        "blocks": architecture.blocks,
        "registers": _by_registers(usage),
        "shared memory": _by_shared(usage, architecture),
    }
    blocks = min(limits.values())
    warps = blocks * usage.warps
    limiters = tuple(name for name in LIMITERS if limits[name] == blocks)
    return Occupancy(blocks, warps, warps / architecture.warps, limiters)


def cliffs(usage: Usage, architecture: Architecture) -> tuple[Cliff, ...]:
    """The nearest cliffs: less of a resource that gives more blocks, and more of one that costs some. None where no
    amount of it changes anything, because another resource limits as well."""
    now = occupancy(usage, architecture).blocks
    found = []
    for change in range(1, max(usage.registers, 1)):
        then = occupancy(replace(usage, registers=usage.registers - change), architecture)
        if then.blocks > now:
            found.append(Cliff("registers", -change, then))
            break
    less = _most_shared(now + 1, architecture)
    if 0 <= less < usage.shared:
        then = occupancy(replace(usage, shared=less), architecture)
        if then.blocks > now:
            found.append(Cliff("shared memory", less - usage.shared, then))
    if now == 0:
        return tuple(found)
    for change in range(1, REGISTERS_PER_THREAD - usage.registers + 1):
        then = occupancy(replace(usage, registers=usage.registers + change), architecture)
        if then.blocks < now:
            found.append(Cliff("registers", change, then))
            break
    more = _most_shared(now, architecture) + 1
    if more <= architecture.shared_per_block:
        then = occupancy(replace(usage, shared=more), architecture)
        found.append(Cliff("shared memory", more - usage.shared, then))
    return tuple(found)


def _by_registers(usage: Usage) -> int:
    if usage.registers > REGISTERS_PER_THREAD:
        return 0
    of_warp = _rounded(max(usage.registers, 1) * WARP, REGISTER_UNIT)
    return REGISTERS // PARTITIONS // of_warp * PARTITIONS // usage.warps


def _by_shared(usage: Usage, architecture: Architecture) -> int:
    if usage.shared > architecture.shared_per_block:
        return 0
    return architecture.shared // _rounded(usage.shared + SHARED_RESERVED, SHARED_UNIT)


def _most_shared(blocks: int, architecture: Architecture) -> int:
    """The most bytes a block can use so that this many still fit; below 0 if they never do."""
    return architecture.shared // blocks // SHARED_UNIT * SHARED_UNIT - SHARED_RESERVED


def _rounded(count: int, unit: int) -> int:
    return ceil_div(count, unit) * unit
