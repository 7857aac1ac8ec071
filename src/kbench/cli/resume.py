"""`--resume`: a sweep that goes on, with the options that its run file holds."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kbench.cli.screen import Screen
from kbench.cli.session import Session
from kbench.errors import UsageError
from kbench.jobs import Job
from kbench.results.resume import Remainder, ResumedRun, remainder, require_same_device, rounds_of, selection_of
from kbench.results.schema import Row
from kbench.results.store import LATEST, Run, find_run
from kbench.selection import Selection
from kbench.typed import misfit

if TYPE_CHECKING:
    from kbench.sweep import Options

# What a resumed sweep takes beside the run: how results are shown, and where runs are looked for.
SHOWING = ("targets", "resume", "columns", "sort", "top", "html", "save", "results", "json", "debug")


@dataclass
class Resumption:
    """A run file, locked, with the selection and options that it was swept with."""

    writer: ResumedRun
    selection: Selection
    options: Options
    screen: Screen

    @property
    def rounds(self) -> int:
        return rounds_of(self.writer.run)

    def prepare(self, session: Session, jobs: Sequence[Job]) -> Mapping[int, Row]:
        """The rows that stay, by their places. Raises CannotRunError on another device."""
        run = self.writer.run
        require_same_device(run, session.device)
        session.device = dict(run.header["device"])  # with the ceilings that its first rows are compared to
        found = remainder(run, jobs, self.rounds)
        for warning in run.warnings:
            self.screen.note(warning)
        self.screen.note(_outcome(run, found, len(jobs), self.rounds))
        self.writer.keep(list(found.kept.values()))
        return found.kept


def resumption(results: Path, targets: Sequence[str], screen: Screen) -> Resumption:
    """Open the run to go on with: the one named in place of a target, or the latest.

    Raises UsageError for one that is not found, cannot go on or is being written; CannotRunError for one that cannot
    be written.
    """
    if len(targets) > 1:
        raise UsageError(f"--resume takes one run, not {' '.join(targets)}", "its families stand in its file")
    writer = ResumedRun(results, find_run(results, targets[0] if targets else LATEST))
    try:
        return Resumption(writer, _selection(writer.run), options_of(writer.run), screen)
    except BaseException:
        writer.close()
        raise


def require_no_others(context: typer.Context, allowed: Collection[str] = SHOWING) -> None:
    """Raises UsageError if options stand beside --resume that would have to be those of the run."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in allowed and source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0]
            raise UsageError(f"--resume takes no {option}", "a run goes on with the options that it began with")


def _selection(run: Run) -> Selection:
    try:
        return Selection.from_dict(selection_of(run))
    except (KeyError, TypeError) as error:
        raise UsageError(f"{run.path}:1 is damaged: its selection is none", "sweep again") from error


def options_of(run: Run) -> Options:
    """The options that a run's rows were measured with. Raises UsageError."""
    from kbench.sweep import Options

    try:
        recorded, device = run.header["options"], run.header["device"]
        known: dict[str, Any] = {f.name: recorded[f.name] for f in fields(Options) if f.name in recorded}
        if wrong := misfit(Options, known):
            raise TypeError(wrong)
        known["family_dirs"] = tuple(Path(folder) for folder in known.get("family_dirs", ()))
        # "auto" would take whatever is here now.
        return Options(**{**known, "device": device["kind"]})
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{run.path}:1 is damaged: its options are none", "sweep again") from error


def _outcome(run: Run, found: Remainder, jobs: int, rounds: int) -> str:
    command = run.header.get("command")
    words = f" with the options of `{shlex.join(map(str, command))}`" if isinstance(command, list) else ""
    again = ", ".join(f"{count} {why}" for why, count in found.again.items())
    if not found.left:
        return f"nothing left to do: {run.path} has all of its {len(found.kept)} rows"
    more = f" (among them {again})" if again else ""
    # Later rounds are of what the first one times, which is not known before.
    of, most = (f" of {jobs}", "") if rounds == 1 else ("", "at most ")
    return f"going on with {run.path}{words}: {len(found.kept)}{of} rows kept, {most}{found.left} to run{more}"
