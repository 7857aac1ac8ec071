"""The tables of a sweep on the terminal, and what is said below each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kbench.cli.failures import show_reasons
from kbench.cli.screen import Screen
from kbench.cli.session import Session, describe
from kbench.cli.table import Column, stacks, width
from kbench.inspect.architectures import architecture_of
from kbench.results.best import contest, median, winners
from kbench.results.columns import BY_NAME, Fact, Order, is_all, parse_order, present
from kbench.results.conditions import mode_text
from kbench.results.facts import Card, Facts, facts_of
from kbench.results.schema import COUNTS, STATIC, UNPROVEN, Row
from kbench.results.tables import interval, mark, milliseconds
from kbench.results.why import tied_rows, why

# What a table shows where no columns are named, and the order in which they go where the terminal is narrow: the last
# first. A column that holds nothing is left out, too.
TIMED = (
    "version", "block", "params", "check", "time", "interval", "bound", "ceiling", "occupancy", "gbs", "bar",
    "registers", "waves", "tail", "tflops", "limiter", "launches", "spills", "dynamic", "same",
)  # fmt: skip
# What a GPU's occupancy follows from, such as shared memory, says little where nothing is timed.
UNTIMED = ("version", "block", "params", "check", "bound", "same", "launches", "touched")
COMPILED = (
    "version", "block", "params", "check", "registers", "spills", "occupancy", "limiter", "local", "static", "dynamic",
    "instructions", "waves", "launches", "grid",
)  # fmt: skip
MAY_BE_NONE = ("local", "static", "dynamic")
COUNTED = (
    "version", "block", "params", "check", "sectors", "used", "asked", "wavefronts", "conflicts", "barriers", "atomics",
)  # fmt: skip
USUAL = {"cuda": TIMED, STATIC: COMPILED, COUNTS: COUNTED}  # by the kind of a session's device; else UNTIMED
ALWAYS = ("version", "block", "params", "check", "time")
KEYS = ("version", "block", "params")  # what tells rows apart: repeated where a table is broken into several

KEPT = Column("kept")


@dataclass(frozen=True)
class Layout:
    """How tables are shown. columns: None for those that fit. order: None for the order in which the rows ran.
    top: how many rows of each table."""

    columns: Sequence[Fact] | None = None
    order: Order | None = None
    top: int | None = None

    def sorted(self, timed: bool) -> Order | None:
        """The order of the rows: without one, the first few are the fastest, where there are times."""
        return parse_order("time") if self.order is None and self.top is not None and timed else self.order


@dataclass
class Shown:
    """One table: the rows of one problem, dtype and cache mode."""

    session: Session
    rows: Sequence[Row]
    layout: Layout

    @cached_property
    def card(self) -> Card:
        return Card.of(self.session.device)

    @cached_property
    def pairs(self) -> list[tuple[Row, Facts]]:
        """All rows, in the order in which they are shown, with what is known of them."""
        pairs = [(row, facts_of(row, self.card)) for row in self.rows]
        order = self.layout.sorted(self.session.timed)
        return order.sort(pairs) if order else pairs

    def show(self, screen: Screen) -> None:
        self._heading(screen)
        shown = self.pairs[: self.layout.top]
        self._table(shown, screen)
        self._left_out(self.pairs[len(shown) :], screen)
        screen.say()
        show_reasons(self.rows, screen)
        best = list(winners(self.rows).values())
        for winner in best:
            self._winner(winner, screen)
        if not best and self.session.timed:
            screen.prose("no winner: no version was proven and timed here", rest="    ")
        if best or self.session.timed or any(row.reason for row in self.rows):
            screen.say()

    def _heading(self, screen: Screen) -> None:
        first = self.rows[0]
        mode = f", {mode_text(first)}" if self.session.timed else ""
        seed = "" if first.cache_mode in UNPROVEN else f", seed {self.session.seed}"
        problem = f"{first.problem}, " if first.sizes else ""
        screen.prose(f"{first.family}: {problem}{first.dtype}{mode}{seed}", rest="  ")
        screen.prose(self._where(first), rest="  ")
        if kept := sum(map(self.session.is_kept, self.rows)):
            screen.prose(f"{kept} of {len(self.rows)} rows kept from before", rest="  ")
        self.session.say_replaced(screen)
        screen.say()

    def _where(self, row: Row) -> str:
        device = self.session.device
        if row.cache_mode == STATIC:
            card = architecture_of(row.device)
            compiler = device.get("compiler", "an unknown compiler")
            plans = f"plans and waves as on {card.card}: {card.multiprocessors} multiprocessors"
            return f"compiled for {row.device} by {compiler}, not run; {plans}"
        if row.cache_mode == COUNTS:
            return f"counted on {describe(device)}; another compiler may merge other accesses"
        return f"on {describe(device)}"

    def _table(self, pairs: Sequence[tuple[Row, Facts]], screen: Screen) -> None:
        chosen = self.layout.columns
        facts = list(chosen) if chosen is not None else self._usual(pairs)
        if is_all(facts):
            facts = present(facts, pairs)
        if not any(row.params for row in self.rows):
            facts = [fact for fact in facts if fact.name != "params"]
        columns = [Column(""), *(self._column(fact, chosen is None) for fact in facts)]
        best = winners(self.rows)
        cells = [[mark(r, best.get(contest(r))), *(fact.show(r, f) for fact in facts)] for r, f in pairs]
        if any(self.session.is_kept(row) for row in self.rows):
            columns.append(KEPT if chosen is not None else Column(KEPT.title, drop=1))
            for line, (row, _) in zip(cells, pairs, strict=True):
                line.append("kept" if self.session.is_kept(row) else "")
        if chosen is None:
            screen.table(columns, cells)
            return
        # What was asked for is shown, if need be below each other; each part says which rows it is of.
        keys = [0, *(i for i, fact in enumerate(facts, start=1) if fact.name in KEYS)]
        for position, part in enumerate(stacks(columns, cells, width(), keys)):
            if position:
                screen.say()
            screen.table([columns[i] for i in part], [[line[i] for i in part] for line in cells])

    @property
    def _names(self) -> tuple[str, ...]:
        return USUAL.get(self.session.device_kind, UNTIMED)

    def _usual(self, pairs: Sequence[tuple[Row, Facts]]) -> list[Fact]:
        names = self._names
        there = {fact.name for fact in present([BY_NAME[name] for name in names], pairs)}
        if names is COMPILED:  # what no version has takes the place of what all have
            there -= {name for name in MAY_BE_NONE if not any(BY_NAME[name].value(*pair) for pair in pairs)}
        # An empty column of times says that there are none; other empty columns say nothing.
        known = {"cuda": {"bound", "time"}, STATIC: {"registers"}, COUNTS: {"sectors"}}
        wanted = there | {"version", "block", "check"} | known.get(self.session.device_kind, {"bound"})
        return [fact for fact in BY_NAME.values() if fact.name in wanted]

    def _column(self, fact: Fact, may_drop: bool) -> Column:
        names = self._names
        drop = len(names) + 1 - names.index(fact.name) if may_drop and fact.name not in ALWAYS else 0
        title = self.session.bound if fact.name == "bound" else fact.title
        return Column(title, fact.align, fact.name == "idea", fact.short, drop)

    def _left_out(self, pairs: Sequence[tuple[Row, Facts]], screen: Screen) -> None:
        if not pairs:
            return
        counts = ", ".join(f"{n} {outcome}" for outcome, n in Counter(row.outcome for row, _ in pairs).items())
        order = self.layout.sorted(self.session.timed)
        by = f" by {order}" if order and order.sorts(self.pairs) else ""
        shown = len(self.rows) - len(pairs)
        screen.prose(f"the first {shown} of {len(self.rows)} rows{by}; not shown: {counts}", rest="  ")

    def _winner(self, winner: Row, screen: Screen) -> None:
        time = f"{milliseconds(median(winner))} ms ({interval(winner)})"
        screen.prose(f"* fastest: version {winner.version} at block size {winner.place}, {time}", rest="    ")
        if tied := tied_rows(winner, self.rows):
            screen.prose(f"~ within noise of it: {tied}", rest="    ")
        if (because := why(winner, self.rows, self.card)) is not None:
            screen.prose(f"  {because}", rest="    ")
