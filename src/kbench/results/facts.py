"""What is known of a row beside its time: rates, share of the card's ceilings, and what its kernel takes of the card.

All of it is worked out from the row and the record of its device; nothing is measured here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kbench.ceilings import Ceilings, share_of_ceiling
from kbench.errors import UsageError
from kbench.inspect.architectures import Architecture, architecture_of
from kbench.inspect.occupancy import Occupancy, Usage, occupancy
from kbench.results.schema import STATIC, Row
from kbench.work import LIBRARY_STEPS

SECTOR_BYTES = 32


@dataclass(frozen=True)
class Card:
    """What facts need of a device. architecture, multiprocessors: None where its record does not say, or names an
    architecture that is not known here."""

    architecture: Architecture | None = None
    multiprocessors: int | None = None
    ceilings: Ceilings = Ceilings()

    @classmethod
    def of(cls, device: Mapping[str, Any]) -> Card:
        """From the record of a device, as `Device.describe` makes it and a run file's header holds it. What is missing
        or damaged there is not known here."""
        props = device.get("props")
        count = props.get("multiprocessors") if isinstance(props, Mapping) else None
        architecture, ceilings = None, Ceilings()
        if device.get("kind") != "emulator":  # which has no registers, and an architecture only as plans ask for one
            with contextlib.suppress(UsageError):
                architecture = architecture_of(str(device.get("arch")))
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            ceilings = Ceilings.from_dict(device.get("ceilings") or Ceilings().to_dict())
        return cls(architecture, count if isinstance(count, int) and count > 0 else None, ceilings)


@dataclass(frozen=True)
class Facts:
    """What is known of a row; None is not known, or does not apply.

    gbs: the bytes that any version has to move, in 1e9 a second. tflops: the family's operations in 1e12 a second.
    share, ceiling: of the card's ceiling that binds, and which that is.
    launches: steps of the plan. library: how many of them a library computes. touched: bytes of the tensors that the
    steps name, each once for each kernel.

    Of all kernels together, where they were compiled: instructions in their PTX; where they were counted on the
    emulator: asked (bytes of global memory that lanes asked for), sectors (of 32 bytes that they touched), used (share
    of the sectors' bytes that was asked for), wavefronts (of shared memory), conflicts (wavefronts over those that it
    would take without bank conflicts), barriers, atomics.

    The others are of one kernel of the plan, `kernel`: the launch with the most threads (of equals the first), because
    the times of single kernels are not known. They are None where a plan has no kernel of its own.
    registers, local_bytes, spill_bytes: of a thread. static_shared, dynamic_shared: bytes of a block.
    grid: blocks. fit: blocks that a multiprocessor holds at once. occupancy: their warps, of those that it can hold.
    limiter: what allows no further block. waves: grid / (multiprocessors x fit). tail: how full the last wave is.
    """

    gbs: float | None = None
    tflops: float | None = None
    share: float | None = None
    ceiling: str | None = None
    launches: int | None = None
    library: int | None = None
    touched: float | None = None
    kernel: str | None = None
    registers: int | None = None
    local_bytes: int | None = None
    spill_bytes: int | None = None
    static_shared: int | None = None
    dynamic_shared: int | None = None
    grid: int | None = None
    fit: int | None = None
    occupancy: float | None = None
    limiter: str | None = None
    waves: float | None = None
    tail: float | None = None
    instructions: int | None = None
    asked: int | None = None
    sectors: int | None = None
    used: float | None = None
    wavefronts: int | None = None
    conflicts: float | None = None
    barriers: int | None = None
    atomics: int | None = None


def facts_of(row: Row, card: Card) -> Facts:
    """Everything about a row that follows from its record and that of its device."""
    if row.cache_mode == STATIC:
        card = compiled_card(row)
    return Facts(**_rates(row, card), **_steps(row), **_kernel(row, card), **_counts(row))


def compiled_card(row: Row) -> Card:
    """The card that stands for the architecture that a row was compiled for: its run may have several."""
    try:
        architecture = architecture_of(row.device)
    except UsageError:  # of a newer kbench
        return Card()
    return Card(architecture, architecture.multiprocessors)


def main_kernel(row: Row) -> dict[str, Any] | None:
    """The launch with the most threads in its grid, of equals the first; None for a plan without kernels."""
    return max(row.kernels, key=_threads, default=None)


def least_launches(row: Row) -> int:
    """How often the version launches at least: its kernels are known, those of the libraries that it calls are not.
    None are counted in a CUDA graph, where a launch costs less than the ceiling says."""
    return 0 if row.cache_mode == "graph" else max(1, len(row.kernels))


def waves_of(grid: int, fit: int, multiprocessors: int) -> tuple[float, float]:
    """How often a grid fills the card, and how full it is in the last of these waves: (2.5, 0.5); (2.0, 1.0)."""
    at_once = fit * multiprocessors
    return grid / at_once, ((grid - 1) % at_once + 1) / at_once


def _rates(row: Row, card: Card) -> dict[str, Any]:
    ms = float(row.measurement["median_ms"]) if row.measurement else 0.0
    if not ms > 0:
        return {}
    near = share_of_ceiling(row.traffic, row.flops, row.dtype, ms, card.ceilings, launches=least_launches(row))
    return {
        "gbs": row.traffic / ms / 1e6 if row.traffic else None,
        "tflops": row.flops / ms / 1e9 if row.flops else None,
        "share": near[0] if near else None,
        "ceiling": near[1] if near else None,
    }


def _steps(row: Row) -> dict[str, Any]:
    if not row.steps:
        return {}
    library = sum(count for kind, count in row.steps.items() if kind in LIBRARY_STEPS)
    return {"launches": sum(row.steps.values()), "library": library, "touched": row.touched}


def _kernel(row: Row, card: Card) -> dict[str, Any]:
    kernel = main_kernel(row)
    if kernel is None:
        return {}
    grid = math.prod(kernel.get("grid") or ())
    found: dict[str, Any] = {
        "kernel": kernel.get("name"),
        "dynamic_shared": kernel.get("shared"),
        "grid": grid if kernel.get("grid") else None,
        **{name: kernel.get(name) for name in ("registers", "local_bytes", "spill_bytes", "static_shared")},
    }
    resident = resident_of(kernel, card)
    if resident is None:
        return found
    found |= {"fit": resident.blocks, "occupancy": resident.share, "limiter": ", ".join(resident.limiters)}
    if found["grid"] and resident.blocks and card.multiprocessors:
        found["waves"], found["tail"] = waves_of(grid, resident.blocks, card.multiprocessors)
    return found


def _counts(row: Row) -> dict[str, Any]:
    """Sums over kernels; None for what was not counted, or where there is nothing to have a share of."""

    def total(name: str) -> int | None:
        found = [known[name] for known in row.metrics.values() if name in known]
        return int(sum(found)) if found else None

    def share(part: int | None, whole: int | None) -> float | None:
        return part / whole if part is not None and whole else None

    sectors, unused = total("global_sectors"), total("global_unused")
    wavefronts, conflicts = total("shared_wavefronts"), total("shared_conflicts")
    wasted = share(unused, SECTOR_BYTES * (sectors or 0))
    return {
        "instructions": total("instructions"),
        "asked": total("global_bytes"),
        "sectors": sectors,
        "used": 1 - wasted if wasted is not None else None,
        "wavefronts": wavefronts,
        "conflicts": share(wavefronts, (wavefronts or 0) - (conflicts or 0)),
        "barriers": total("barriers"),
        "atomics": total("atomics"),
    }


def resident_of(kernel: Mapping[str, Any], card: Card) -> Occupancy | None:
    """How many blocks of a kernel, as a row holds it, fit on a multiprocessor; None where that is not known."""
    if card.architecture is None or kernel.get("registers") is None or not kernel.get("block"):
        return None
    shared = (kernel.get("static_shared") or 0) + (kernel.get("shared") or 0)
    threads = math.prod(kernel["block"])
    return occupancy(Usage(threads, kernel["registers"], shared, kernel.get("max_threads") or 1024), card.architecture)


def _threads(kernel: Mapping[str, Any]) -> int:
    return math.prod(kernel.get("grid") or (0,)) * math.prod(kernel.get("block") or (0,))
