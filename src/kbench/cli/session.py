"""Running the rows of a command, keeping what was measured when it is stopped, and its exit status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from kbench.cli.output import report_error
from kbench.cli.screen import Screen
from kbench.errors import Exit, KbenchError, worst
from kbench.jobs import Job
from kbench.results.rounds import merge
from kbench.results.schema import COUNTS, STATIC, Row
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.search.run import Search, Searched
    from kbench.sweep import Bench, Options

# A sweep over many small tables must not say the same of each.
NO_TIMES = "no times: the emulator is not a GPU"
_UNPROVEN = {
    STATIC: "compiled, not run: nothing here is proven or timed",
    COUNTS: "counted, not judged: nothing here is proven or timed",
}
_DONE = {STATIC: ("compiled", "compile"), COUNTS: ("counted", "count")}


class Recorder(Protocol):
    """Takes each row as soon as it is there."""

    def append(self, row: Row) -> None: ...


@dataclass
class Session:
    """What became of a command's rows.

    rows: one for each experiment, of all of its rounds. planned: how many rows each (family, version) was to have, each
    round its own. taken: how many came, or were there. stopped: what ended the command early, if anything
    did. replaced: the options that stand in place of the families' bounds, empty without any. searched: what came of
    each search, if rows were searched for. kept: those of `rows` that an earlier part of the run had, by identity: two
    rows may be equal.
    """

    rows: list[Row] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    device_kind: str = ""
    seed: int = 0
    planned: Counter[tuple[str, int]] = field(default_factory=Counter)
    taken: int = 0
    replaced: str = ""
    stopped: KeyboardInterrupt | KbenchError | None = None
    searched: list[Searched] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)

    @property
    def timed(self) -> bool:
        """Whether this device has times at all: the emulator is not a GPU."""
        return self.device_kind == "cuda"

    @property
    def unproven(self) -> str:
        """What the rows are worth where nothing was checked by intent; "" where they were."""
        return _UNPROVEN.get(self.device_kind, "")

    @property
    def exit_status(self) -> Exit:
        """Of all rows: NOTHING where none was proven and none went wrong; INTERRUPTED after Ctrl-C."""
        if isinstance(self.stopped, KeyboardInterrupt):
            return Exit.INTERRUPTED
        statuses = [row.exit_status for row in self.rows]
        if isinstance(self.stopped, KbenchError):
            statuses.append(self.stopped.exit_status)
        if not any(row.status == "pass" for row in self.rows):
            statuses.append(Exit.NOTHING)
        return worst(statuses)

    @property
    def bound(self) -> str:
        """The heading of the column that says how much of the allowed error was used."""
        return "tol." if self.replaced else "bound"

    def say_replaced(self, screen: Screen) -> None:
        """Say that errors were not judged by the families' bounds, where that is so."""
        if self.replaced:
            screen.prose(f"judged by {self.replaced} in place of the family's error bound: no such row can win")

    def finish(self, screen: Screen, debug: bool = False, kept: str = "") -> int:
        """Say what ended the command early, after its tables were printed, and return the exit status.

        kept: where the rows are, if they are anywhere but on the screen.
        """
        if isinstance(self.stopped, KeyboardInterrupt):
            where = f"; they are kept in {kept}" if kept else ""
            screen.note(f"interrupted after {self.taken} of {self.planned.total()} rows{where}")
        elif self.stopped is not None:
            report_error(self.stopped, debug)
        elif self.exit_status == Exit.NOTHING:
            done, do = _DONE.get(self.device_kind, ("checked", "check"))
            screen.note(f"nothing was {done}: every row was refused or skipped" if self.rows else f"nothing to {do}")
        return int(self.exit_status)

    def document(self, **more: Any) -> dict[str, Any]:
        """The JSON of this session."""
        return {
            "device": self.device,
            "device_kind": self.device_kind,
            "seed": self.seed,
            "planned": self.planned.total(),
            "interrupted": isinstance(self.stopped, KeyboardInterrupt),
            "exit_status": int(self.exit_status),
            **({"error": str(self.stopped)} if isinstance(self.stopped, KbenchError) else {}),
            **more,
            "rows": [self._row(row) for row in self.rows],
        }

    def is_kept(self, row: Row) -> bool:
        """Whether an earlier part of the run had this row."""
        return id(row) in self.kept

    def _row(self, row: Row) -> dict[str, Any]:
        return {**row.to_dict(), "kept": self.is_kept(row)} if self.kept else row.to_dict()

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, KbenchError) as error:
            # Before the first row there is nothing to show, and the error is the whole story.
            if not self.rows:
                raise
            self.stopped = error


def run_rows(
    options: Options,
    selection: Selection,
    screen: Screen,
    record: Callable[[Session], AbstractContextManager[Recorder]] | None = None,
    search: Search | None = None,
    earlier: Callable[[Session, Sequence[Job]], Mapping[int, Row]] | None = None,
    rounds: int = 1,
    makes: Callable[[Options, Callable[[str], None]], Bench] | None = None,
) -> Session:
    """Run what is selected, row by row, under a progress bar.

    record: opens what takes the rows, once the device is known and the selection is found valid. search: chooses which
    of them are run; None runs all. earlier: the rows that are there already, by their places, and the device's record
    as it was then; not of a search. rounds: how often rows are timed; a row's place is its round times the number of
    jobs, and the position of its job; not of a search. makes: opens what makes the rows, if nothing is to be checked.
    Raises UsageError or CannotRunError if there is not even a first row; later ones end the session early.
    """
    from kbench.sweep import Bench

    session = Session(replaced=_replaced(options))
    # The bench closes inside: it has to see a Ctrl-C, so as not to wait for a worker that is still busy.
    with session._stopping(), (makes or Bench)(options, screen.note) as bench:
        jobs = bench.jobs(selection)
        planned = search.planned(jobs) if search is not None else jobs
        session.device, session.device_kind = dict(bench.device), bench.device_kind
        session.seed, session.planned = bench.seed, Counter((job.family, job.version) for job in planned)
        if bench.fallback:
            screen.note(_fallback(bench.fallback, selection, jobs))
        if search is not None:
            search.require_times(bench.device_kind)
        kept = earlier(session, jobs) if earlier else {}
        if earlier is None:
            _measure_device(session, bench, selection.mode)
        recorder: AbstractContextManager[Recorder | None] = record(session) if record else nullcontext()
        with recorder as sink:
            if search is not None:
                _search(search, bench, jobs, session, sink, screen)
            else:
                with _in_order(session, kept, len(jobs)) as places:
                    for number in range(rounds):
                        _run_round(number, bench, jobs, places, session, sink, screen)
    return session


def _measure_device(session: Session, bench: Bench, mode: str) -> None:
    """Put what times are compared to, and taken with, into the device's record."""
    if mode == "sweep" and (ceilings := bench.ceilings()) is not None:
        session.device["ceilings"] = ceilings
    if mode != "check" and (timer := bench.timer()) is not None:
        session.device["timer"] = timer


def _run_round(
    number: int,
    bench: Bench,
    jobs: Sequence[Job],
    places: dict[int, Row],
    session: Session,
    sink: Recorder | None,
    screen: Screen,
) -> None:
    """Run the jobs that have no row in this round yet; rows go to `sink`, and to their places. After the first round
    only what it timed is run: for verdicts once is enough, each of them being of several launches."""
    first = number * len(jobs)
    wanted = [first + at for at in range(len(jobs)) if not number or (at in places and places[at].measurement)]
    todo = {place: jobs[place - first] for place in wanted if place not in places}
    if number:
        session.planned.update((jobs[place - first].family, jobs[place - first].version) for place in wanted)
    if not todo:
        return
    which = f" round {number + 1}" if number else ""
    names = [f"{job.family}:{job.version} {_sizes(job)} block {job.place}{which}" for job in todo.values()]
    with _taking(names, session, sink, screen, number) as take:
        for place, row in zip(todo, _rows(number, bench, list(todo.values()), list(places.values())), strict=True):
            places[place] = take(row)


def _rows(number: int, bench: Bench, jobs: Sequence[Job], earlier: Sequence[Row]) -> Iterator[Row]:
    if number:
        return bench.rows(jobs, again=True)
    return bench.rows(jobs, earlier) if earlier else bench.rows(jobs)


def _search(
    search: Search, bench: Bench, jobs: Sequence[Job], session: Session, sink: Recorder | None, screen: Screen
) -> None:
    """Run those of the jobs that a search asks for; rows go to `sink` and into the session."""
    names = [f"{job.family}:{job.version} {_sizes(job)}: {search.strategy}" for job in search.planned(jobs)]
    with _taking(names, session, sink, screen) as take:
        for found in search.run(bench, jobs, take):
            session.searched.append(found)


@contextmanager
def _taking(
    names: Sequence[str], session: Session, sink: Recorder | None, screen: Screen, number: int = 0
) -> Iterator[Callable[[Row], Row]]:
    """What takes each row as soon as it is there, and returns it with its round. names: of what the progress bar shows,
    one a row."""
    with screen.progress(names) as advance:

        def take(row: Row) -> Row:
            if number:
                row = replace(row, round=number)
            if sink is not None:
                sink.append(row)
            session.rows.append(row)
            session.taken += 1
            advance()
            return row

        yield take


@contextmanager
def _in_order(session: Session, kept: Mapping[int, Row], jobs: int) -> Iterator[dict[int, Row]]:
    """Takes rows by their places. Afterwards, also after an error, the session has those that were there and those that
    came in the order of their jobs, the rounds of each as one row."""
    places = dict(kept)
    session.taken += len(kept)
    try:
        yield places
    finally:
        rounds: dict[int, list[int]] = {}
        for place in sorted(places):
            rounds.setdefault(place % jobs, []).append(place)
        session.rows, session.kept = [], set()
        for _, mine in sorted(rounds.items()):
            row = merge([places[place] for place in mine])
            session.rows.append(row)
            if all(place in kept for place in mine):
                session.kept.add(id(row))


def _fallback(reason: str, selection: Selection, jobs: Sequence[Job]) -> str:
    """That the emulator runs the rows, and the preset where it is what decided their sizes."""
    sizes_left_open = any(name not in selection.sizes for job in jobs for name in job.sizes)
    by_preset = selection.preset is None and sizes_left_open and (selection.mode != "check" or selection.sizes)
    return f"no GPU ({reason}): running on the CPU emulator{', with the `small` preset' if by_preset else ''}"


def _replaced(options: Options) -> str:
    given = (("--rtol", options.rtol), ("--atol", options.atol))
    # One that is left out counts as 0 beside the other.
    return " ".join(f"{name} {value or 0:g}" for name, value in given) if any(v is not None for _, v in given) else ""


def _sizes(job: Job) -> str:
    return " ".join(f"{name}={size}" for name, size in job.sizes.items())


def describe(device: dict[str, Any]) -> str:
    """A device in one line: its name, then architecture, driver and compiler where it says them."""
    # The emulator has an architecture only as far as plans ask for one; without a driver it would mislead.
    keys = ("arch", "driver", "compiler") if device.get("driver") else ("compiler",)
    more = [f"driver {device[key]}" if key == "driver" else str(device[key]) for key in keys if device.get(key)]
    name = str(device.get("name", "unnamed device"))
    return f"{name} ({', '.join(more)})" if more else name
