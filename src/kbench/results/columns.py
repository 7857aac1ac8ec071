"""The columns that a table of rows can have: their names on the command line, headings, values and cells."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kbench.drawn import bar
from kbench.errors import UsageError
from kbench.params import params_text
from kbench.results.facts import Facts
from kbench.results.schema import Row
from kbench.results.summary import rate_text
from kbench.results.tables import determinism, interval, milliseconds, percent, spread, worst_used


@dataclass(frozen=True)
class Fact:
    """One column. name: on the command line. short: its heading where space is short. meaning: for the documentation.

    value: what rows are sorted by, None where there is none. text: the cell of a value; `cell` where it needs more.
    """

    name: str
    title: str
    meaning: str
    value: Callable[[Row, Facts], Any]
    text: Callable[[Any], str] = str
    align: Literal["left", "right"] = "right"
    short: str = ""
    cell: Callable[[Row, Facts], str] | None = None

    def show(self, row: Row, facts: Facts) -> str:
        """The cell of a row; empty where nothing is known."""
        if self.cell is not None:
            return self.cell(row, facts)
        value = self.value(row, facts)
        return "" if value is None else self.text(value)


def _taken(name: str) -> Callable[[Row, Facts], Any]:
    return lambda row, facts: (row.measurement or {}).get(name)


def _fact(name: str) -> Callable[[Row, Facts], Any]:
    return lambda row, facts: getattr(facts, name)


def _samples(row: Row, facts: Facts) -> int | None:
    taken = row.measurement or {}
    return taken.get("count") or len(taken.get("samples_ms", ())) or None  # of many, a record holds some


def _spread(row: Row, facts: Facts) -> float | None:
    taken = row.measurement
    if not taken or not taken["median_ms"] > 0:
        return None
    return float((taken["high_ms"] - taken["low_ms"]) / taken["median_ms"])


def bytes_text(value: float) -> str:
    """Such as "640 B", "25.2 MB"; powers of 1000, like rates."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
        value /= 1000
    raise AssertionError


def _times(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


FACTS = (
    Fact("version", "ver", "the version's number", lambda row, facts: row.version),
    Fact("block", "block", "threads of a block", lambda row, facts: row.block),
    Fact("params", "params", "values of the parameters that the version declares",
         lambda row, facts: params_text(row.params) or None, align="left"),
    Fact("check", "check", "what became of the row", lambda row, facts: row.outcome, align="left"),
    Fact("bound", "bound", "largest error, of the error bound", lambda row, facts: worst_used(row), percent),
    Fact("same", "same bits", "whether repeats were equal bit by bit", lambda r, f: determinism(r) or None,
         align="left", short="same"),
    Fact("time", "median ms", "median time", _taken("median_ms"), milliseconds, short="ms"),
    Fact("interval", "95% interval", "interval of the median, in ms", _taken("low_ms"), align="left",
         cell=lambda row, facts: interval(row)),
    Fact("spread", "+-", "how far the interval reaches from the median", _spread, cell=lambda row, facts: spread(row)),
    Fact("gbs", "GB/s", "bytes that any version has to move, a second", _fact("gbs"), rate_text),
    Fact("tflops", "TFLOP/s", "operations of the family's formula, a second", _fact("tflops"), rate_text, short="TF/s"),
    Fact("ceiling", "of ceiling", "share of the card's ceiling that binds, and which", _fact("share"), short="ceiling",
         cell=lambda row, facts: f"{percent(facts.share)} {facts.ceiling}" if facts.ceiling else ""),
    Fact("bar", "0 to ceiling", "the share of the ceiling, drawn", _fact("share"), bar, align="left"),
    Fact("occupancy", "occupancy", "warps that fit, of those a multiprocessor holds", _fact("occupancy"), percent,
         short="occup"),
    Fact("limiter", "limited by", "what allows no further block", _fact("limiter"), align="left", short="limit"),
    Fact("registers", "registers", "registers of a thread", _fact("registers"), short="regs"),
    Fact("spills", "spill bytes", "bytes of spilled registers that a thread stores and loads", _fact("spill_bytes"),
         short="spill"),
    Fact("local", "local bytes", "bytes of local memory of a thread: spills, arrays", _fact("local_bytes"),
         short="local"),
    Fact("static", "static shared", "bytes of static shared memory of a block", _fact("static_shared"),
         _count, short="static"),
    Fact("dynamic", "dynamic shared", "bytes of dynamic shared memory of a block", _fact("dynamic_shared"),
         _count, short="dyn"),
    Fact("grid", "blocks", "blocks of the grid", _fact("grid"), _count),
    Fact("fit", "fit", "blocks that a multiprocessor holds at once", _fact("fit")),
    Fact("waves", "waves", "how often the grid fills the card", _fact("waves"), _times),
    Fact("tail", "tail", "how full the last wave is", _fact("tail"), percent),
    Fact("launches", "steps", "steps of the plan: kernels, libraries' calls, fills, copies", _fact("launches")),
    Fact("library", "library", "steps that a library computes", _fact("library"), short="lib"),
    Fact("touched", "touched", "bytes of the tensors that the steps name, each once a kernel", _fact("touched"),
         bytes_text),
    Fact("instructions", "instructions", "instructions in the PTX of all kernels", _fact("instructions"), _count,
         short="instr"),
    Fact("asked", "asked", "bytes of global memory that lanes asked for, all kernels together", _fact("asked"),
         bytes_text),
    Fact("sectors", "sectors", "pieces of 32 bytes of global memory that they touched", _fact("sectors"), _count),
    Fact("used", "used", "share of the sectors' bytes that was asked for", _fact("used"), percent),
    Fact("wavefronts", "wavefronts", "turns that shared memory took", _fact("wavefronts"), _count, short="turns"),
    Fact("conflicts", "x", "of the turns that it would take without bank conflicts", _fact("conflicts"), _times),
    Fact("barriers", "barriers", "barriers of all blocks", _fact("barriers"), _count),
    Fact("atomics", "atomics", "atomic operations of all lanes", _fact("atomics"), _count),
    Fact("kernel", "kernel", "the kernel that registers, shared memory, blocks and waves are of", _fact("kernel"),
         align="left"),
    Fact("samples", "samples", "times that were taken", _samples),
    Fact("seconds", "row s", "wall time of the whole row, in seconds", lambda row, facts: row.seconds or None,
         lambda value: f"{value:.2f}"),
    Fact("idea", "idea", "the version's idea", lambda row, facts: row.idea, align="left"),
)  # fmt: skip
BY_NAME = {fact.name: fact for fact in FACTS}
NAMES = tuple(BY_NAME)
ALL = "all"


def parse_columns(text: str) -> list[Fact]:
    """The columns of "time,gbs", each once, in the order given; of "all" every one. Raises UsageError."""
    names = [part.strip() for part in text.split(",")]
    if names == [ALL]:
        return list(FACTS)
    return [_named(name, "--columns") for name in dict.fromkeys(names)]


def is_all(facts: Sequence[Fact]) -> bool:
    """Whether these are the columns of "all", of which a table shows those that hold anything."""
    return tuple(facts) == FACTS


@dataclass(frozen=True)
class Order:
    """What rows are sorted by. reverse: largest first."""

    fact: Fact
    reverse: bool = False

    def sort(self, rows: Iterable[tuple[Row, Facts]]) -> list[tuple[Row, Facts]]:
        """Rows in order; those of equal values stay as they were, those without a value come last."""
        pairs = list(rows)
        known = [pair for pair in pairs if self.fact.value(*pair) is not None]
        unknown = [pair for pair in pairs if self.fact.value(*pair) is None]
        known.sort(key=lambda pair: self.fact.value(*pair), reverse=self.reverse)
        return known + unknown

    def sorts(self, rows: Iterable[tuple[Row, Facts]]) -> bool:
        """Whether any row has a value to sort by."""
        return any(self.fact.value(*pair) is not None for pair in rows)

    def __str__(self) -> str:
        return f"{self.fact.name}, largest first" if self.reverse else self.fact.name


def parse_order(text: str) -> Order:
    """The order of "time", or reversed of "-time". Raises UsageError."""
    name = text.strip()
    return Order(_named(name.removeprefix("-"), "--sort"), name.startswith("-"))


def present(facts: Sequence[Fact], rows: Sequence[tuple[Row, Facts]]) -> list[Fact]:
    """Of these columns, those that hold anything for any of the rows."""
    return [fact for fact in facts if any(fact.show(*pair) for pair in rows)]


def _named(name: str, option: str) -> Fact:
    if name in BY_NAME:
        return BY_NAME[name]
    # What a table has above a column is not always its name: "steps" stands above `launches`.
    headed = [fact.name for fact in FACTS if name and name in (fact.title, fact.short)]
    near = headed or difflib.get_close_matches(name, NAMES, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"{option}: there is no column {name!r}", f"{meant}columns: {', '.join(NAMES)}")
