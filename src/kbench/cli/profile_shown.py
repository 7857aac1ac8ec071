"""What `kbench profile` prints: the plan as a whole, a table of its kernels, and a few lines on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kbench.cli.screen import Screen
from kbench.cli.session import describe
from kbench.cli.table import Column
from kbench.profile.summary import SHOWN_STALLS, described, shortened
from kbench.source import base_name

if TYPE_CHECKING:
    from kbench.profile.summary import Counters, Summary
    from kbench.results.schema import Row

# Kernels of one plan that are shown; some plans of libraries' steps have dozens, and a few of them take all the time.
SHOWN = 8
LEGEND = (
    "us: of all launches; DRAM, L2, SM, tensor, issue: of the unit's peak; hits: of the sectors asked of L2; occup: "
    "warps that were resident, of all that a multiprocessor holds"
)
_NAME, _FULL_NAME = 20, 52  # characters of a kernel's name in the table, and above its details
_UNSEEN = {"Fill": "fills", "Copy": "copies"}


def show(device: Mapping[str, Any], row: Row, summary: Summary, document: Mapping[str, Any], screen: Screen) -> None:
    """Print a profile, in 80 columns."""
    screen.prose(f"{row.family} version {row.version}: {row.idea}", rest="  ")
    screen.prose(f"{describe(dict(device))}, ncu {document['ncu']['version'] or '?'}", "  on       ")
    screen.prose(f"{row.problem}, {row.dtype}, block size {row.block}, seed {document['seed']}", "  problem  ")
    screen.prose(_times(row, document), "  time     ")
    if text := _bytes(document["bytes"]):
        screen.prose(text, "  bytes    ")
    for label, lines in (("reading", document["reading"]), ("note", _remarks(summary, document))):
        for position, line in enumerate(lines):
            screen.prose(line, f"  {'' if position else label:<7}  ")
    screen.prose(document["files"]["report"], "  report   ")
    screen.say()
    kernels = sorted(summary.kernels, key=lambda kernel: -(kernel.us or 0.0))
    _table(kernels[:SHOWN], screen)
    screen.say()
    for number, kernel in enumerate(kernels[:SHOWN], start=1):
        _details(number, kernel, screen)
    if len(kernels) > SHOWN:
        screen.prose(f"and {len(kernels) - SHOWN} more kernels, which take less time; --json has all", "  ")
    screen.say()
    screen.prose(LEGEND)


def _times(row: Row, document: Mapping[str, Any]) -> str:
    time = document["time"]
    ncu = f"{microseconds(time['ncu_us'])} us by ncu" if time["ncu_us"] is not None else "none by ncu"
    if time["timer_us"] is None:
        return ncu
    ours = f"{microseconds(time['timer_us'])} us by kbench's timer ({_interval(row)}{row.cache_mode} L2)"
    ratio = f": {time['ratio']:.2f}x" if time["ratio"] is not None else ""
    return f"{ncu}, {ours}{ratio}"


def _interval(row: Row) -> str:
    taken = row.measurement
    if not taken:
        return ""
    low, high = (microseconds(1e3 * taken[name]) for name in ("low_ms", "high_ms"))
    return f"median, {low}..{high}; "


def _bytes(moved: Mapping[str, float | None]) -> str:
    if moved["read"] is None or moved["written"] is None:
        return ""
    text = f"{megabytes(moved['read'])} read, {megabytes(moved['written'])} written"
    if moved["least"] is None or moved["ratio"] is None:
        return text
    return f"{text}; any version has to move {megabytes(moved['least'])}: {moved['ratio']:.2f}x"


def _remarks(summary: Summary, document: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside the figures."""
    remarks = []
    if unseen := [f"{document['steps'][name]} {words}" for name, words in _UNSEEN.items() if name in document["steps"]]:
        remarks.append(f"{' and '.join(unseen)} of the plan are in the timer's figure, but not in ncu's")
    if document["ncu"]["cache"] == "hot":
        remarks.append("hot caches under ncu, cold for the timer: the two times are not of the same thing")
    elif sum(kernel.launches for kernel in summary.kernels) > 1:
        remarks.append("ncu empties the caches before each kernel; the timer only before the first")
    if summary.seen < summary.planned:
        remarks.append(f"ncu saw {summary.seen} of the plan's {summary.planned} launches")
    if missing := document["ncu"]["unknown_metrics"]:
        remarks.append(f"this ncu does not know {', '.join(missing)}")
    return remarks


def _table(kernels: list[Counters], screen: Screen) -> None:
    columns = [
        Column("", "right"),
        Column("kernel"),
        Column("times", "right", drop=2),
        Column("us", "right"),
        Column("DRAM", "right"),
        Column("L2", "right"),
        Column("hits", "right"),
        Column("SM", "right"),
        Column("tensor", "right"),
        Column("issue", "right", drop=1),
        Column("occup", "right"),
        Column("regs", "right"),
    ]
    screen.table(columns, [_line(number, kernel) for number, kernel in enumerate(kernels, start=1)])


def _line(number: int, kernel: Counters) -> list[str]:
    shares = (kernel.dram, kernel.l2, kernel.l2_hits, kernel.multiprocessors, kernel.tensor, kernel.issue)
    return [
        str(number),
        shortened(base_name(kernel.name), _NAME),
        str(kernel.launches),
        microseconds(kernel.us),
        *(percent(share) for share in (*shares, kernel.achieved)),
        "" if kernel.registers is None else f"{kernel.registers:.0f}",
    ]


def _details(number: int, kernel: Counters, screen: Screen) -> None:
    grid, block = ("x".join(map(str, sizes)) for sizes in (_trimmed(kernel.grid), _trimmed(kernel.block)))
    where = "" if kernel.ours else " (a library's)"
    screen.prose(f"{number}  {shortened(kernel.name, _FULL_NAME)}{where}, {grid} blocks of {block}", rest="     ")
    for label, text in (
        ("occupancy", _occupancy(kernel)),
        ("access", _access(kernel)),
        ("conflicts", _conflicts(kernel)),
        ("stalls", _stalls(kernel)),
    ):
        if text:
            screen.prose(text, f"     {label:<9}  ")


def _trimmed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Without the ones at the end."""
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes or (0,)


def _occupancy(kernel: Counters) -> str:
    if kernel.achieved is None or kernel.possible is None:
        return ""
    limits = f", limited by {' and '.join(kernel.limiters)}" if kernel.limiters else ""
    return f"{kernel.achieved:.0%} of the multiprocessor's warps; {kernel.possible:.0%} would fit{limits}"


def _access(kernel: Counters) -> str:
    pairs = (("load", kernel.load_sectors), ("store", kernel.store_sectors))
    parts = [f"{sectors:.1f} sectors a {word}" for word, sectors in pairs if sectors is not None]
    return f"{', '.join(parts)} of a warp (32 bytes each; 4 carry 32 floats)" if parts else ""


def _conflicts(kernel: Counters) -> str:
    if not kernel.conflicts:
        return ""
    share = f", {kernel.conflict_share:.0%} of its wavefronts" if kernel.conflict_share is not None else ""
    return f"{kernel.conflicts:,.0f} bank conflicts of shared memory{share}"


def _stalls(kernel: Counters) -> str:
    parts = [f"{share:.0%} for {described(reason)}" for reason, share in kernel.stalls[:SHOWN_STALLS] if share >= 0.005]
    return f"of their time, warps wait {', '.join(parts)}" if parts else ""


# ---------------------------------------------------------------------------------------------- numbers


def microseconds(us: float | None) -> str:
    """Three or four digits, whatever the size."""
    if us is None:
        return ""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def megabytes(count: float) -> str:
    """Bytes in the unit of data sheets: 1 MB = 1e6 bytes."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
