"""What `kbench bisect` says: the commits that were tried, and the answer in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kbench.bisect.search import Commit, Found, Trial, Verdict
from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.history.ratio import percent

if TYPE_CHECKING:
    from kbench.report.model import Metric

_MOST = 10  # suspects that are listed one by one


def document(found: Found, commits: Sequence[Commit]) -> dict[str, Any]:
    """The JSON of a search."""
    return {
        "good": _commit(commits[0]),
        "bad": _commit(commits[-1]),
        "commits": len(commits) - 1,
        "unchanged": found.alike,
        "first": _commit(found.first) if found.first is not None else None,
        "suspects": [_commit(commit) for commit in found.suspects],
        "newest_good": _commit(found.good) if found.good is not None else None,
        "trials": [
            {
                **asdict(trial),
                "commit": _commit(trial.commit),
                "verdict": str(trial.verdict),
                "ratio": trial.ratio if trial.ratio is None or math.isfinite(trial.ratio) else None,
            }
            for trial in found.trials
        ],
    }


def value_text(value: float) -> str:
    """A time in milliseconds, or a count, as the tables have it."""
    from kbench.results.tables import count_text, milliseconds

    return count_text(value) if float(value).is_integer() else milliseconds(value)


def trial_text(trial: Trial, unit: str) -> str:
    """One commit that was tried, as a line."""
    return f"{trial.commit.short} {trial.verdict}{_number(trial, unit)}{f' ({trial.reason})' if trial.reason else ''}"


def show(found: Found, name: str, metric: Metric, commits: Sequence[Commit], screen: Screen) -> None:
    """The trials in the order of the commits, then the answer."""
    if found.trials:
        place = {commit.name: position for position, commit in enumerate(commits)}
        trials = sorted(found.trials, key=lambda trial: place[trial.commit.name])
        columns = [Column("commit"), Column("date", drop=1), Column("", "left"), Column(metric.name, "right")]
        columns += [Column("change", "right"), Column("subject", flexible=True)]
        screen.table(columns, [_line(trial, metric) for trial in trials])
        screen.say()
    screen.prose(_answer(found, name, metric, commits), rest="  ")
    if len(found.suspects) > 1:
        for commit in found.suspects[:_MOST]:
            trial = found.trial_of(commit)
            why = f": {trial.reason}" if trial is not None and trial.reason else ""
            screen.prose(f"{commit}{why}", "  ", rest="    ")
        if len(found.suspects) > _MOST:
            screen.say(f"  and {len(found.suspects) - _MOST} more")
    elif found.first is not None:
        screen.say(f"  git show {found.first.short}")


def _answer(found: Found, name: str, metric: Metric, commits: Sequence[Commit]) -> str:
    word = "slower" if metric.name == "time" else f"worse in {metric.name}"
    between = len(commits) - 1
    counted = f"{between} commit{'s' if between != 1 else ''}, {len(found.trials)} tried"
    if found.alike:
        counted += f", {found.alike} without a change of its files"
    if not found.suspects:
        last = found.trials[-1] if found.trials else None
        if last is None:
            return f"nothing to find: the files of {name} are the same at {commits[0].short} and {commits[-1].short}"
        if last.verdict is Verdict.SKIP:
            return f"nothing was found: the bad commit, {last.commit.short}, cannot be measured: {last.reason}"
        # What is the same machine code as the good commit's was not timed.
        why = last.reason if last.value is None else percent(last.ratio) if last.ratio is not None else ""
        change = f" ({why})" if why else ""
        return f"nothing to find: {name} is not {word} at {commits[-1].short} than at {commits[0].short}{change}"
    if found.first is None:
        assert found.good is not None
        what = f"one of {len(found.suspects)} commits made {name} {word}; those before the last cannot be measured"
        return f"{what} ({counted}; the newest good one is {found.good.short}):"
    trial = found.trial_of(found.first)
    size = f":{_number(trial, metric.unit)} against {commits[0].short}" if trial is not None else ""
    return f"{found.first.short} ({found.first.date}, {found.first.subject!r}) made {name} {word}{size} ({counted})"


def _line(trial: Trial, metric: Metric) -> list[str]:
    value = "" if trial.value is None else value_text(trial.value)
    change = "" if trial.ratio is None or trial.value is None else percent(trial.ratio)
    subject = trial.commit.subject if trial.value is not None else f"{trial.commit.subject}\n  {trial.reason}"
    return [trial.commit.short, trial.commit.date, str(trial.verdict), value, change, subject]


def _number(trial: Trial, unit: str) -> str:
    if trial.value is None:
        return ""
    change = f", {percent(trial.ratio)}" if trial.ratio is not None else ""
    return f" {value_text(trial.value)}{f' {unit}' if unit else ''}{change}"


def _commit(commit: Commit) -> dict[str, str]:
    return {"commit": commit.name, "date": commit.date, "subject": commit.subject}
