"""`kbench report --rerun-unclear`: AFTER's unclear rows measured again on its GPU, as further rounds of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kbench.catalog import load_catalog
from kbench.cli.resume import options_of
from kbench.cli.screen import Screen
from kbench.errors import CannotRunError, UsageError
from kbench.jobs import Job
from kbench.report.sources import Source
from kbench.results.resume import ResumedRun, require_same_device
from kbench.results.schema import Row
from kbench.results.store import COMPRESSED, newest, row_key

if TYPE_CHECKING:
    from kbench.report.build import Unclear

# A round of a few rows takes seconds. A row that needs more rounds than this has a machine that is too noisy for it.
MOST_ROUNDS = 12


def rerun(unclear: Sequence[Unclear], sources: Sequence[Source], results: Path, screen: Screen) -> int:
    """Measure the rows that a bounded number of rounds would settle; returns how many rows were measured.

    Rounds are appended to AFTER's run file. Raises UsageError for an AFTER that cannot grow and for files that changed
    since, CannotRunError where its GPU is not.
    """
    path = growing(sources)
    needs = {_key(each): each.rounds for each in unclear if each.rounds and each.rounds <= MOST_ROUNDS}
    if hopeless := len(unclear) - len(needs):
        screen.note(f"{hopeless} unclear rows are left as they are: {MOST_ROUNDS} more rounds would not settle them")
    if not needs:
        return 0
    with ResumedRun(results, path) as writer:
        run = writer.run
        writer.keep(newest(run.rows))
        rows: dict[object, Row] = {}
        last: dict[object, int] = {}
        for row in run.rows:
            rows.setdefault(row_key(row), row)
            last[row_key(row)] = max(row.round, last.get(row_key(row), 0))
        wanted = {key: needs[key] for key in rows if key in needs}
        return _measure(writer, rows, wanted, last, screen)


def growing(sources: Sequence[Source]) -> Path:
    """The run file that AFTER is. Raises UsageError where it is something that cannot grow."""
    if len(sources) != 1 or sources[0].data is not None or str(sources[0].path).endswith(COMPRESSED):
        names = ", ".join(str(source.path) for source in sources)
        raise UsageError(f"--rerun-unclear adds rounds to a run, and AFTER is {names}", "name one run, such as latest")
    return Path(sources[0].path)


def _key(each: Unclear) -> object:
    return (*each.experiment.key, each.experiment.device)


def _measure(
    writer: ResumedRun, rows: dict[object, Row], wanted: dict[object, int], last: dict[object, int], screen: Screen
) -> int:
    from kbench.sweep import Bench

    options = options_of(writer.run)
    _require_unchanged([rows[key] for key in wanted], options.family_dirs)
    if options.device != "cuda":
        raise CannotRunError("--rerun-unclear measures times, and AFTER is of the emulator", "sweep on a GPU")
    rounds = max(wanted.values())
    screen.note(f"measuring {len(wanted)} unclear rows again, in up to {rounds} rounds")
    names = [
        f"{rows[key].family}:{rows[key].version} {rows[key].problem} block {rows[key].place} round {number + 1}"
        for number in range(rounds) for key, need in wanted.items() if need > number
    ]  # fmt: skip
    count = 0
    with Bench(options, screen.note) as bench, screen.progress(names) as advance:
        require_same_device(writer.run, bench.device)
        for number in range(rounds):
            keys = [key for key, need in wanted.items() if need > number]
            for key, row in zip(keys, bench.rows([_job(rows[key]) for key in keys], again=True), strict=True):
                writer.append(replace(row, round=last[key] + 1 + number))
                count += 1
                advance()
    return count


def _job(row: Row) -> Job:
    return Job(
        row.family, row.version, row.idea, row.sizes, row.dtype, row.block, params=row.params, source=row.source
    )  # fmt: skip


def _require_unchanged(rows: Sequence[Row], folders: Sequence[Path]) -> None:
    """Raises UsageError where rounds of today would be of other files than those of the run."""
    catalog = load_catalog(folders)
    for row in rows:
        if row.source != catalog.fingerprint(row.family, row.version):
            raise UsageError(
                f"--rerun-unclear: the files of {row.family} version {row.version} are not those of AFTER any more",
                "check out what was measured, or sweep again",
            )
