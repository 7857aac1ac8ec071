"""Running the rows of a command, keeping what was measured when it is stopped, and its exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kbench.cli.screen import Screen, report_error
from kbench.errors import Exit, KbenchError, worst
from kbench.results.schema import Row
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.sweep import Options


class Recorder(Protocol):
    """Takes each row as soon as it is there."""

    def append(self, row: Row) -> None: ...


@dataclass
class Session:
    """What became of a command's rows. stopped: what ended it early, if anything did."""

    rows: list[Row] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)
    device_kind: str = ""
    seed: int = 0
    planned: int = 0
    stopped: KeyboardInterrupt | KbenchError | None = None

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

    def finish(self, screen: Screen, debug: bool = False) -> int:
        """Say what ended the command early, after its tables were printed, and return the exit status."""
        if isinstance(self.stopped, KeyboardInterrupt):
            screen.note(f"interrupted after {len(self.rows)} of {self.planned} rows; they are kept")
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
            "planned": self.planned,
            "interrupted": isinstance(self.stopped, KeyboardInterrupt),
            "exit_status": int(self.exit_status),
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
) -> Session:
    """Run what is selected, row by row, under a progress bar.

    record: opens what takes the rows, once the device is known and the selection is found valid.
    Raises UsageError or CannotRunError if there is not even a first row; later ones end the session early.
    """
    from kbench.sweep import Bench

    session = Session()
    # The bench closes inside: it has to see a Ctrl-C, so as not to wait for a worker that is still busy.
    with session._kept(), Bench(options, screen.note) as bench:
        jobs = bench.jobs(selection)
        session.device, session.device_kind = dict(bench.device), bench.device_kind
        session.seed, session.planned = bench.seed, len(jobs)
        recorder: AbstractContextManager[Recorder | None] = record(session) if record else nullcontext()
        with recorder as sink, screen.progress(len(jobs)) as advance:
            for row in bench.rows(jobs):
                if sink is not None:
                    sink.append(row)
                session.rows.append(row)
                advance(f"{row.family}:{row.version} {row.problem} block {row.block}")
    return session


def describe(device: dict[str, Any]) -> str:
    """A device in one line: its name, then architecture, driver and compiler where it says them."""
    # The emulator has an architecture only as far as plans ask for one; without a driver it would mislead.
    keys = ("arch", "driver", "compiler") if device.get("driver") else ("compiler",)
    more = [f"driver {device[key]}" if key == "driver" else str(device[key]) for key in keys if device.get(key)]
    name = str(device.get("name", "unnamed device"))
    return f"{name} ({', '.join(more)})" if more else name
