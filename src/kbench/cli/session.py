"""Running the rows of a command, keeping what was measured when it is stopped, and its exit status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kbench.cli.output import report_error
from kbench.cli.screen import Screen
from kbench.errors import Exit, KbenchError, worst
from kbench.jobs import Job
from kbench.results.schema import Row
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.search.run import Search, Searched
    from kbench.sweep import Options

# A sweep over many small tables must not say the same of each.
NO_TIMES = "no times: the emulator is not a GPU"


class Recorder(Protocol):
    """Takes each row as soon as it is there."""

    def append(self, row: Row) -> None: ...


@dataclass
class Session:
    """What became of a command's rows.

    planned: how many rows each (family, version) was to have. stopped: what ended the command early, if anything
    did. replaced: the options that stand in place of the families' bounds, empty without any. searched: what came of
    each search, if rows were searched for.
    """

    rows: list[Row] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    device_kind: str = ""
    seed: int = 0
    planned: Counter[tuple[str, int]] = field(default_factory=Counter)
    replaced: str = ""
    stopped: KeyboardInterrupt | KbenchError | None = None
    searched: list[Searched] = field(default_factory=list)

    @property
    def timed(self) -> bool:
        """Whether this device has times at all: the emulator is not a GPU."""
        return self.device_kind == "cuda"

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
            screen.note(f"interrupted after {len(self.rows)} of {self.planned.total()} rows{where}")
        elif self.stopped is not None:
            report_error(self.stopped, debug)
        elif self.exit_status == Exit.NOTHING:
            screen.note("nothing was checked: every row was refused or skipped" if self.rows else "nothing to check")
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
            "rows": [row.to_dict() for row in self.rows],
        }

    @contextmanager
    def _kept(self) -> Iterator[None]:
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
) -> Session:
    """Run what is selected, row by row, under a progress bar.

    record: opens what takes the rows, once the device is known and the selection is found valid. search: chooses which
    of them are run; None runs all.
    Raises UsageError or CannotRunError if there is not even a first row; later ones end the session early.
    """
    from kbench.sweep import Bench

    session = Session(replaced=_replaced(options))
    # The bench closes inside: it has to see a Ctrl-C, so as not to wait for a worker that is still busy.
    with session._kept(), Bench(options, screen.note) as bench:
        jobs = bench.jobs(selection)
        planned = search.planned(jobs) if search is not None else jobs
        session.device, session.device_kind = dict(bench.device), bench.device_kind
        session.seed, session.planned = bench.seed, Counter((job.family, job.version) for job in planned)
        if bench.fallback:
            screen.note(_fallback(bench.fallback, selection, jobs))
        if search is not None:
            search.require_times(bench.device_kind)
        if selection.mode == "sweep" and (ceilings := bench.ceilings()) is not None:
            session.device["ceilings"] = ceilings
        if selection.mode != "check" and (timer := bench.timer()) is not None:
            session.device["timer"] = timer
        names = [f"{job.family}:{job.version} {_sizes(job)} block {job.place}" for job in jobs]
        if search is not None:
            names = [f"{job.family}:{job.version} {_sizes(job)}: {search.strategy}" for job in planned]
        recorder: AbstractContextManager[Recorder | None] = record(session) if record else nullcontext()
        with recorder as sink, screen.progress(names) as advance:

            def take(row: Row) -> None:
                if sink is not None:
                    sink.append(row)
                session.rows.append(row)
                advance()

            if search is not None:
                for found in search.run(bench, jobs, take):
                    session.searched.append(found)
            else:
                for row in bench.rows(jobs):
                    take(row)
    return session


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
