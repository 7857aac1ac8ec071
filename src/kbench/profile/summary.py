"""What ncu's counters say of a plan: kernel by kernel, in all, and in a sentence or two. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kbench.errors import UsageError
from kbench.inspect.architectures import architecture_of
from kbench.inspect.occupancy import Usage, occupancy
from kbench.profile import metrics as m
from kbench.profile.raw import Profiled, plain_name, short_name
from kbench.source import base_name

# A unit at this share of its peak leaves a kernel little to gain but less work for that unit. Nsight Compute's own
# rules call a kernel bound from here on.
BOUND_FROM = 80.0
# Within this of the bytes that any version has to move, nothing is to be remarked on: counters and the ends of tensors
# are no more exact.
TRAFFIC_WITHIN = 0.1
# A reason for stalls below this share of a warp's time explains nothing.
STALL_FROM = 0.1
SHOWN_STALLS = 3


@dataclass(frozen=True)
class Counters:
    """One kernel of a plan, or launches of it that are alike taken together; None where ncu has no such number.

    us: of all its launches. read_bytes, written_bytes: of DRAM, all launches. Shares are of 1 and, over several
    launches, means by time. dram, l2, multiprocessors, issue, tensor: of the unit's peak. l2_hits: of the sectors asked
    for. achieved, possible: occupancy, by ncu and by our own arithmetic (ncu's for a library's kernels). limiters: of
    the possible one.
    load_sectors, store_sectors: of 32 bytes, per request of a warp to global memory. conflicts: wavefronts of shared
    memory beyond what was needed; conflict_share: of all its wavefronts. stalls: why warps stand still, as shares of
    their time, the longest first. ours: whether the plan launches it, not a library.
    """

    name: str
    launches: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    ours: bool
    us: float | None
    read_bytes: float | None
    written_bytes: float | None
    dram: float | None
    l2: float | None
    l2_hits: float | None
    multiprocessors: float | None
    issue: float | None
    tensor: float | None
    achieved: float | None
    possible: float | None
    limiters: tuple[str, ...]
    registers: float | None
    load_sectors: float | None
    store_sectors: float | None
    conflicts: float | None
    conflict_share: float | None
    stalls: tuple[tuple[str, float], ...]

    @property
    def moved_bytes(self) -> float | None:
        return _added([self.read_bytes, self.written_bytes])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "stalls": [{"reason": reason, "share": share} for reason, share in self.stalls]}


@dataclass(frozen=True)
class Summary:
    """A plan's kernels in the order in which they first ran, and all of them together. seen, planned: launches of the
    plan's own kernels, by ncu and by the plan."""

    kernels: tuple[Counters, ...]
    seen: int
    planned: int

    @property
    def us(self) -> float | None:
        return _added([kernel.us for kernel in self.kernels])

    @property
    def read_bytes(self) -> float | None:
        return _added([kernel.read_bytes for kernel in self.kernels])

    @property
    def written_bytes(self) -> float | None:
        return _added([kernel.written_bytes for kernel in self.kernels])

    @property
    def moved_bytes(self) -> float | None:
        return _added([self.read_bytes, self.written_bytes])


def summarise(profiled: Sequence[Profiled], launches: Sequence[Mapping[str, Any]], arch: str) -> Summary:
    """launches: the plan's own, as of `Row.kernels`, in order. arch: "sm_90"."""
    matched = attribute([each.name for each in profiled], [str(launch["name"]) for launch in launches])
    groups: dict[tuple[object, ...], list[tuple[Profiled, Mapping[str, Any] | None]]] = {}
    for each, position in zip(profiled, matched, strict=True):
        launch = launches[position] if position is not None else None
        key = (short_name(each.name), each.grid, each.block, launch is None)
        groups.setdefault(key, []).append((each, launch))
    kernels = tuple(_counters(group, arch) for group in groups.values())
    return Summary(kernels, sum(position is not None for position in matched), len(launches))


def attribute(names: Sequence[str], launched: Sequence[str]) -> list[int | None]:
    """For each kernel that ran, which of the plan's launches it is; None for kernels of libraries between them.

    Both are in order. A kernel is the next launch of its name, so that one that ncu missed costs itself alone.
    """
    found: list[int | None] = []
    start = 0
    for name in names:
        plain = plain_name(name)
        position = next((i for i in range(start, len(launched)) if base_name(launched[i]) == plain), None)
        found.append(position)
        start = start if position is None else position + 1
    return found


def _counters(group: Sequence[tuple[Profiled, Mapping[str, Any] | None]], arch: str) -> Counters:
    first, launch = group[0]
    parts = [each for each, _ in group]
    times = [_value(part, m.TIME) for part in parts]

    def total(names: Sequence[str]) -> float | None:
        return _added([_value(part, names) for part in parts])

    def share(names: Sequence[str]) -> float | None:
        mean = _mean([(_value(part, names), time) for part, time in zip(parts, times, strict=True)])
        return None if mean is None else mean / 100

    us = _added(times)
    ours, limiters = _possible(launch, arch)
    conflicts = total(m.CONFLICTS)
    return Counters(
        name=str(launch["name"]) if launch is not None else short_name(first.name),
        launches=len(group),
        grid=first.grid,
        block=first.block,
        ours=launch is not None,
        us=None if us is None else us / 1e3,
        read_bytes=total(m.READ),
        written_bytes=total(m.WRITTEN),
        dram=share(m.DRAM),
        l2=share(m.L2),
        l2_hits=share(m.L2_HITS),
        multiprocessors=share(m.MULTIPROCESSORS),
        issue=share(m.ISSUE),
        tensor=share(m.TENSOR),
        achieved=share(m.ACHIEVED),
        possible=ours if ours is not None else share(m.POSSIBLE),
        limiters=limiters,
        registers=_value(first, m.REGISTERS),
        load_sectors=_quotient(total(m.LOAD_SECTORS), total(m.LOAD_REQUESTS)),
        store_sectors=_quotient(total(m.STORE_SECTORS), total(m.STORE_REQUESTS)),
        conflicts=conflicts,
        conflict_share=_quotient(conflicts, total(m.WAVEFRONTS)),
        stalls=stalls_of(parts),
    )


def _possible(launch: Mapping[str, Any] | None, arch: str) -> tuple[float | None, tuple[str, ...]]:
    """Theoretical occupancy of one of the plan's own launches, and what limits it."""
    if launch is None:
        return None, ()
    threads = 1
    for size in launch["block"]:
        threads *= size
    shared = (launch.get("static_shared") or 0) + (launch.get("shared") or 0)
    try:
        fits = occupancy(Usage(threads, launch.get("registers") or 0, shared), architecture_of(arch))
    except UsageError:  # a GPU that the tables do not have
        return None, ()
    return fits.share, fits.limiters


def stalls_of(parts: Sequence[Profiled]) -> tuple[tuple[str, float], ...]:
    """Reasons for which warps stand still and the shares of their time, over all launches; the longest first."""
    sums: dict[str, float] = {}
    for part in parts:
        time = _value(part, m.TIME) or 1.0
        for name, value in part.values.items():
            if (reason := _reason(name)) is not None:
                sums[reason] = sums.get(reason, 0.0) + value * time
    total = sum(sums.values())
    if total <= 0:
        return ()
    shares = [(reason, value / total) for reason, value in sums.items() if reason != m.NOT_A_STALL and value > 0]
    return tuple(sorted(shares, key=lambda share: -share[1]))


def _reason(metric: str) -> str | None:
    for end in m.STALL_ENDS:
        if metric.startswith(m.STALL) and metric.endswith(end):
            reason = metric.removeprefix(m.STALL).removesuffix(end)
            # The same again, of the cycles in which the scheduler issued nothing.
            return None if reason.endswith("not_issued") else reason
    return None


# ---------------------------------------------------------------------------------------------- reading


def reading(summary: Summary, traffic: float | None) -> list[str]:
    """What the counters say, in sentences without advice: of the kernel that takes most of the time, what limits it; of
    the plan, its bytes. traffic: bytes that any version has to move."""
    if not summary.kernels:
        return []
    longest = max(summary.kernels, key=lambda kernel: kernel.us or 0.0)
    bound = _bound(longest)
    if len(summary.kernels) > 1 and summary.us and longest.us is not None:
        lead = f"{shortened(base_name(longest.name))} takes {longest.us / summary.us:.0%} of the time"
        bound = f"{lead}; {bound}" if bound else lead
    return [sentence for sentence in (bound, _traffic(summary.moved_bytes, traffic)) if sentence]


def _bound(kernel: Counters) -> str:
    units = [
        ("DRAM", kernel.dram),
        ("the tensor cores", kernel.tensor),
        ("the multiprocessors", kernel.multiprocessors),
        ("the L2 cache", kernel.l2),
    ]
    known = [(name, share) for name, share in units if share is not None]
    if not known:
        return ""
    name, share = max(known, key=lambda unit: unit[1])
    if 100 * share >= BOUND_FROM:
        return f"bound by {name}: {share:.0%} of {'their' if name.endswith('s') else 'its'} peak"
    shares = ", ".join(f"{name} {share:.0%}" for name, share in known)
    return f"no unit is at its limit ({shares}){_waiting(kernel)}"


def _waiting(kernel: Counters) -> str:
    """What its warps wait for most, where one reason stands out."""
    if not kernel.stalls or kernel.stalls[0][1] < STALL_FROM:
        return ""
    reason, share = kernel.stalls[0]
    return f"; warps spend {share:.0%} of their time waiting for {described(reason)}"


def shortened(name: str, room: int = 40) -> str:
    """A kernel's name for a line: libraries have some of over a hundred characters."""
    return name if len(name) <= room else f"{name[: room - 3]}..."


def described(reason: str) -> str:
    """What warps that are stalled for this reason wait for."""
    return m.STALLS.get(reason, reason.replace("_", " "))


def _traffic(moved: float | None, least: float | None) -> str:
    if moved is None or not least:
        return ""
    ratio = moved / least
    if ratio > 1 + TRAFFIC_WITHIN:
        return f"moves {ratio:.2f}x the bytes that any version has to"
    if ratio < 1 - TRAFFIC_WITHIN:
        return f"DRAM moved {ratio:.2f}x the bytes that any version has to move: the rest stayed in the L2 cache"
    return "moves no more bytes than it has to"


# ---------------------------------------------------------------------------------------------- arithmetic


def _value(part: Profiled, names: Sequence[str]) -> float | None:
    return next((part.values[name] for name in names if name in part.values), None)


def _added(values: Sequence[float | None]) -> float | None:
    """A sum, None if any part of it is not known: what is there would be taken for all of it."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _mean(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """The mean of values by weights; where no weight is known, the plain one."""
    known = [(value, weight or 0.0) for value, weight in pairs if value is not None]
    if not known or len(known) < len(pairs):
        return None
    total = sum(weight for _, weight in known)
    if total <= 0:
        return sum(value for value, _ in known) / len(known)
    return sum(value * weight for value, weight in known) / total


def _quotient(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None
