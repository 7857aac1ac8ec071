"""`kbench inspect --counts`: what the lines of a version's kernels ask of memory, counted on the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kbench.cli.screen import Screen
from kbench.cli.table import GAP, Column, width
from kbench.errors import CannotRunError, Exit, KbenchError, UsageError
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.inspect.counts import Counts, KernelCounts, Place, Tally
    from kbench.jobs import Job

LEGEND = (
    "sectors: pieces of 32 bytes of global memory that warps touch, each time anew: caches are not modelled; each: per "
    "access of a warp; used: of their bytes, what lanes asked for; turns: wavefronts of shared memory; x: of those "
    "without bank conflicts"
)
_LINES = 12  # of a kernel that are shown: the costliest
_LEAST_TEXT = 12  # characters of a line of source


def show_counts(
    selection: Selection, family_dirs: Sequence[Path], time_limit: float, screen: Screen, debug: bool
) -> int:
    """Count what is selected, one version and block size after another; returns the exit status.

    Of several, those that the emulator cannot run or that refuse the problem are left out with a note.
    """
    from kbench.catalog import load_catalog
    from kbench.inspect.counts import count_apart

    jobs = list(selection.jobs(load_catalog(family_dirs), "emulator"))
    found: list[Counts] = []
    skipped: list[dict[str, object]] = []
    with screen.progress([f"{job.family}:{job.version} block {job.place}" for job in jobs]) as advance:
        for job in jobs:
            try:
                found.append(count_apart(_request(job, time_limit), family_dirs, screen.note))
            except (CannotRunError, UsageError) as error:
                if len(jobs) == 1:
                    raise
                screen.note(f"left out: {error.message}")
                skipped.append(
                    {"version": job.version, "block": job.block, "params": job.params, "reason": error.message}
                )
                last: KbenchError = error
            advance()
    if not found:
        raise last
    screen.document("inspect", {"counts": [each.to_dict() for each in found], "skipped": skipped})
    for position, each in enumerate(found):
        if position:
            screen.say()
        _show(each, screen, debug)
    return int(Exit.OK)


def _request(job: Job, time_limit: float) -> dict[str, object]:
    return {
        "name": job.family, "number": job.version, "sizes": job.sizes, "dtype": job.dtype, "block": job.block,
        "params": job.params, "time_limit": time_limit,
    }  # fmt: skip


def _show(found: Counts, screen: Screen, debug: bool) -> None:
    screen.prose(f"{found.family} version {found.version}: accesses counted on the CPU emulator", rest="  ")
    screen.prose(f"{found.problem}, {found.problem.dtype}, block size {found.place}", "  problem  ")
    screen.prose(f"{found.compiler}; another compiler may merge other accesses", "  as made  ")
    if found.others:
        steps = ", ".join(f"{count} x {name}" for name, count in found.others.items())
        screen.prose(f"{steps} (not counted)", "  besides  ")
    for kernel in found.kernels:
        screen.say()
        _show_kernel(found, kernel, screen, debug)
    screen.say()
    if not found.kernels:
        screen.prose("no kernel to count: all of it is steps of libraries")
        return
    if not found.lines_known:
        screen.prose("lines are not known: install the package binutils, for its addr2line")
    screen.prose(LEGEND)


def _show_kernel(found: Counts, kernel: KernelCounts, screen: Screen, debug: bool) -> None:
    launches = f", {kernel.launches} launches" if kernel.launches > 1 else ""
    grid = f"{kernel.blocks:,} block{'s' if kernel.blocks > 1 else ''}"
    part = f", {kernel.counted:,} of them counted and scaled" if kernel.counted != kernel.blocks else ""
    screen.prose(f"{kernel.kernel}{launches}, {grid}{part}", rest="  ")
    for line in _totals(kernel):
        screen.prose(line, "  ", rest="    ")
    lines = _by_line(kernel)
    if not lines or not found.lines_known:
        return
    shown = lines if debug else lines[:_LINES]
    screen.say()
    screen.table(*_table(found, shown, debug), indent=2)
    if len(lines) > len(shown):
        screen.prose(f"and {len(lines) - len(shown)} lines that cost less: --debug shows them", "  ")


def _totals(kernel: KernelCounts) -> list[str]:
    total = kernel.totals
    lines = []
    if total["global_sectors"]:
        lines.append(
            f"global: {_bytes(total['global_bytes'])} asked for, {total['global_sectors']:,} sectors, "
            f"{total['efficiency']:.0%} of their bytes used"
        )
    if total["shared_wavefronts"]:
        ratio = total["shared_wavefronts"] / total["shared_ideal"]
        conflicts = f"{ratio:.2f}x the least" if ratio > 1 else "no bank conflicts"
        lines.append(f"shared: {_bytes(total['shared_bytes'])}, {total['shared_wavefronts']:,} wavefronts, {conflicts}")
    barriers = total["barriers"]
    parts = [f"{barriers:,} block barrier{'s' if barriers > 1 else ''}"] if barriers else []
    if total["atomics"]:
        where = f" on {total['atomic_sectors']:,} sectors" if total["atomic_sectors"] else ""
        parts.append(f"{total['atomics']:,} atomic operations{where}")
    return [*lines, *([", ".join(parts)] if parts else [])]


def _by_line(kernel: KernelCounts) -> list[list[tuple[Place, Tally]]]:
    """Places of one line together, the costliest line first: each sector and each wavefront is a turn of the memory."""
    lines: dict[tuple[str, int], list[tuple[Place, Tally]]] = {}
    for place, tally in kernel.places.items():
        lines.setdefault((place.file, place.line), []).append((place, tally))
    return sorted(lines.values(), key=lambda line: -sum(tally.sectors + tally.wavefronts for _, tally in line))


def _table(
    found: Counts, lines: Sequence[list[tuple[Place, Tally]]], debug: bool
) -> tuple[list[Column], list[list[str]]]:
    titles = ("line", "sectors", "each", "used", "turns", "x", "barriers", "atomics")
    cells = [_cells(found, line) for line in lines]
    kept = [i for i in range(len(titles)) if any(row[i] for row in cells)]
    columns = [Column(titles[i], "right") for i in kept]
    room = width() - 2 - sum(max(len(titles[i]), *(len(row[i]) for row in cells)) + GAP for i in kept)
    rows = []
    for row, line in zip(cells, lines, strict=True):
        text = _cut(found.text(line[0][0]), max(_LEAST_TEXT, room))
        rows.append([*(row[i] for i in kept), text])
        if debug:
            blanks = ["" for _ in kept]
            rows += [[*blanks, _cut(_detail(*each), max(_LEAST_TEXT, room))] for each in line]
    return [*columns, Column("source")], rows


def _cells(found: Counts, line: Sequence[tuple[Place, Tally]]) -> list[str]:
    from kbench.inspect.counts import Tally

    def total(*kinds: str) -> Tally:
        return sum((tally for place, tally in line if place.kind in kinds), Tally())

    place = line[0][0]
    everything = total("load", "store", "atomic")
    on_global = sum((tally.accesses for each, tally in line if each.tensor), 0)
    barriers, atomics = total("barrier").accesses, total("atomic").lanes
    headed = place.file if place.file.endswith(".cuh") else ""
    return [
        f"{headed}:{place.line}" if headed else str(place.line) if place.line else "?",
        f"{everything.sectors:,}" if everything.sectors else "",
        f"{everything.sectors / on_global:.1f}" if everything.sectors else "",
        f"{everything.efficiency:.0%}" if everything.efficiency is not None else "",
        f"{everything.wavefronts:,}" if everything.wavefronts else "",
        f"{everything.conflicts:.1f}" if everything.conflicts is not None else "",
        f"{barriers:,}" if barriers else "",
        f"{atomics:,}" if atomics else "",
    ]


def _detail(place: Place, tally: Tally) -> str:
    """One memory of a line, for --debug: `4 B load of inp, 31.0 lanes, in common.cuh:71`."""
    if place.kind == "barrier":
        what = "barrier"
    else:
        lanes = tally.lanes / tally.accesses if tally.accesses else 0
        what = f"{place.size} B {place.kind} of {place.tensor or 'shared memory'}, {lanes:.3g} lanes"
    return f"  {what}, in {place.helper}" if place.helper else f"  {what}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 3] + "..."


def _bytes(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
