"""What `kbench compare` says: a table of the two sides, and the answer in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kbench.cli.failures import show_commands, show_details
from kbench.cli.screen import Screen
from kbench.cli.session import NO_TIMES, describe
from kbench.cli.table import Column
from kbench.errors import UsageError
from kbench.inspect.architectures import architecture_of
from kbench.inspect.occupancy import Usage, occupancy
from kbench.results.schema import Row
from kbench.results.tables import milliseconds
from kbench.sides import shortened

if TYPE_CHECKING:
    from kbench.compare import Answer, PlannedSide

_LONG_NAME = 36
NOTHING_COMPARED = "nothing compared: the emulator has no times"


@dataclass(frozen=True)
class Shown:
    """A comparison with what to call its sides."""

    names: tuple[str, str]
    planned: Sequence[PlannedSide]
    answer: Answer
    device: dict[str, Any]
    device_kind: str
    seed: int

    @property
    def verdict(self) -> str:
        """ "A faster", "B faster", "no difference" or "same code"; "" where nothing was compared."""
        found = self.answer.comparison
        if found is None:
            return ""
        if found["same_code"]:
            return "same code"
        if not found["estimate"]["differs"]:
            return "no difference"
        return "B faster" if found["estimate"]["ratio"] > 1 else "A faster"

    @property
    def sentence(self) -> str:
        """The answer; "" where nothing was compared."""
        found = self.answer.comparison
        if found is None:
            return ""
        (a, b), got = self.names, found["estimate"]
        ratio, low, high = got["ratio"], got["low"], got["high"]
        counts = f"{got['pairs']} pairs, {got['rounds']} rounds"
        interval = f"{_percent(found['rule']['confidence'])} interval"
        visible = _visible(got["visible"])
        match self.verdict:
            case "B faster":
                line = (
                    f"{b} is {ratio:.3f} times as fast as {shortened(a, b)} ({interval} {low:.3f}..{high:.3f}, {counts}"
                )
            case "A faster":
                line = f"{a} is {1 / ratio:.3f} times as fast as {shortened(b, a)}"
                line += f" ({interval} {1 / high:.3f}..{1 / low:.3f}, {counts}"
            case "same code":
                apart = _percent(abs(ratio - 1))
                return (
                    f"same code: {a} and {shortened(b, a)} run the same machine code, launched alike; they measured "
                    f"{apart} apart ({interval} {low:.4f}..{high:.4f}, {counts}): that is this comparison's noise"
                )
            case _:
                seen = f"anything above {visible} would have been seen" if visible else "too few rounds to see any"
                if not low <= 1 <= high:
                    seen = f"what there is lies below {_percent(found['rule']['least'])}; {seen}"
                return (
                    f"no difference seen between {a} and {shortened(b, a)} ({seen}; time of A over time of B "
                    f"{ratio:.4f}, {interval} {low:.4f}..{high:.4f}, {counts})"
                )
        return f"{line}; smallest visible difference {visible})"


def show(shown: Shown, screen: Screen, debug: bool) -> None:
    """Table, remarks and answer on stdout."""
    rows, found = shown.answer.rows, shown.answer.comparison
    first = rows[0]
    mode = ", cold L2" if found is not None else ""
    screen.prose(f"{first.family}: {first.problem}, {first.dtype}{mode}, seed {shown.seed}", rest="  ")
    screen.prose(f"on {describe(shown.device)}", rest="  ")
    screen.say()
    _table(shown, screen)
    screen.say()
    for letter, side in zip("AB", shown.planned, strict=True):
        screen.prose(f"{letter} at {_origins(side)}", "  ")
    for line in _remarks(shown):
        screen.prose(line, "  ")
    for letter, row in zip("AB", rows, strict=True):
        if row.status != "pass":
            screen.say()
            status = row.status.upper()
            screen.prose(f"{letter} {status}: {row.reason}", rest="  ", status=status)
            show_details(row, screen, debug)
            show_commands(row, screen, "  again:   ", "  smaller: ")
    screen.say()
    if found is not None:
        screen.prose(shown.sentence, rest="  ")
    elif all(row.status == "pass" for row in rows):
        screen.prose(f"both are right; {NO_TIMES}")
    else:
        screen.prose("no ratio: both sides have to be proven first")


def _origins(side: PlannedSide) -> str:
    """Such as "block size 64: as given; ROWS=2: the default"."""
    places = [f"block size {side.job.block}: {side.why}"]
    places += [f"{name}={value}: {side.params_from[name]}" for name, value in side.job.params.items()]
    return "; ".join(places)


def _other_block(planned: Sequence[PlannedSide]) -> list[str]:
    """A remark where two sets of parameters are compared, and the block sizes that nobody named differ as well."""
    first, second = (side.job for side in planned)
    chosen = any(side.side.block is None for side in planned)
    if first.version != second.version or first.params == second.params or first.block == second.block or not chosen:
        return []
    return ["the block sizes differ, too: name one to compare the parameters alone"]


def _table(shown: Shown, screen: Screen) -> None:
    found = shown.answer.comparison
    # A path may be of any length; other names stay whole, and what can be done without makes room for them.
    long = max(map(len, shown.names)) > _LONG_NAME
    columns = [Column(""), Column("side", flexible=long), Column("block", "right"), Column("check")]
    if found is not None:
        columns += [Column("median ms", "right", short="ms"), Column("95% interval", drop=3)]
    columns += [Column("regs", "right", drop=2), Column("occup", "right", drop=1)]
    lines = []
    for index, (name, row) in enumerate(zip(shown.names, shown.answer.rows, strict=True)):
        cells = ["AB"[index], name, str(row.block), row.status]
        if found is not None:
            side = found["sides"][index]
            cells += [milliseconds(side["median_ms"])]
            cells += [f"{milliseconds(side['low_ms'])}..{milliseconds(side['high_ms'])}"]
        lines.append([*cells, _registers(row), _occupancy(row, str(shown.device.get("arch", "")))])
    empty = [all(not line[i] for line in lines) for i in range(len(columns))]
    kept = [i for i in range(len(columns)) if not empty[i]]
    screen.table([columns[i] for i in kept], [[line[i] for i in kept] for line in lines], indent=2)


def _remarks(shown: Shown) -> list[str]:
    found = shown.answer.comparison
    lines = _other_block(shown.planned)
    lines += [note for row in shown.answer.rows if row.status == "pass" for note in row.details]
    if found is not None:
        for letter, side in zip("AB", found["sides"], strict=True):
            lines += [f"{letter}: {note}" for note in side["notes"]]
        if found["places"] < 2:
            lines.append("both ran in the same memory: there is none for two places")
        if thrown := found["thrown_away"]:
            lines.append(f"{len(thrown)} blocks of four samples thrown away: {thrown[-1]}")
    return list(dict.fromkeys(lines))


def _registers(row: Row) -> str:
    return _range([kernel["registers"] for kernel in row.kernels if kernel.get("registers") is not None], str)


def _occupancy(row: Row, arch: str) -> str:
    """Theoretical occupancy of its kernels; empty on a device that has no such thing, or is not known."""
    try:
        card = architecture_of(arch)
    except UsageError:
        return ""
    known = [kernel for kernel in row.kernels if kernel.get("registers") is not None]
    usages = [
        Usage(math.prod(k["block"]), k["registers"], (k["static_shared"] or 0) + k["shared"], 1024) for k in known
    ]
    return _range([occupancy(usage, card).share for usage in usages], lambda share: f"{share:.0%}")


def _range(values: Sequence[Any], text: Any) -> str:
    """One value, or the least and the largest of several kernels."""
    ends = [text(end) for end in (min(values), max(values))] if values else []
    return "..".join(dict.fromkeys(ends))


def _percent(share: float) -> str:
    """ "0.5%", "99.9%", "0.043%"."""
    return f"{100 * share:.3g}%" if share < 0.9 else f"{100 * share:.10g}%"


def _visible(share: float | None) -> str:
    return f"{100 * share:.2g}%" if share is not None and math.isfinite(share) else ""
