"""`kbench results`: the run files that sweeps leave behind: shown, listed, exported, merged, removed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import options as o
from kbench.cli.output import write
from kbench.cli.plot import RunArgument
from kbench.cli.screen import Screen
from kbench.cli.sweep import ColumnsOption, SortOption, TopOption
from kbench.errors import Exit, UsageError
from kbench.results.store import LATEST, Run, find_run, read_run, replace_bytes

if TYPE_CHECKING:
    from kbench.results.listing import Entry
    from kbench.results.prune import Plan

SHOW_EXAMPLES = ("kbench results show", "kbench results show latest --columns time,registers --sort time --top 5")
LIST_EXAMPLES = ("kbench results list", "kbench results list --results elsewhere --json")
EXPORT_EXAMPLES = (
    "kbench results export latest --format csv -o rows.csv",
    "kbench results export latest --format github-action-benchmark -o bench.json",
)
MERGE_EXAMPLES = ("kbench results merge h200.jsonl a100.jsonl -o both.jsonl.gz",)
PRUNE_EXAMPLES = ("kbench results prune --older-than 30d --keep 20 --dry-run", "kbench results prune --keep 50 --yes")
EXAMPLES = (LIST_EXAMPLES[0], SHOW_EXAMPLES[0], EXPORT_EXAMPLES[0])
HELP = """Show, list, export, merge and remove the runs that sweeps recorded.

results/README.md describes the files and the formats.
"""
FORMATS = ("csv", "parquet", "google-benchmark", "bencher", "github-action-benchmark")
STDOUT = "-"


def _keep(text: str) -> int:
    return o._whole(text, "--keep", "give a number of runs, such as 20", 1_000_000, 0)


# ------------------------------------------------------------------------------------------ show, list


def show(
    run: RunArgument = LATEST,
    columns: ColumnsOption = None,
    sort: SortOption = None,
    top: TopOption = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show a run as the sweep did that wrote it: its tables, and with several families its summary.

    RUN is a run file, an id or a part of one, or latest (the same if left out). Of a merged file, each of its runs.
    """
    from kbench.cli.results_shown import document, show_run
    from kbench.cli.sweep_shown import Layout
    from kbench.results.columns import parse_columns, parse_order
    from kbench.results.merge import parts
    from kbench.results.sound import require_sound

    screen = Screen(json)
    layout = Layout(
        parse_columns(columns) if columns is not None else None, parse_order(sort) if sort is not None else None, top
    )
    found = _read(find_run(results, run), screen)
    require_sound(found)
    runs = parts(found)
    status = Exit.OK if found.rows else Exit.NOTHING
    screen.document(
        "results show", {"exit_status": int(status), "file": str(found.path), "runs": list(map(document, runs))}
    )
    for position, part in enumerate(runs):
        if position:
            screen.say()
        show_run(part, layout, screen)
    if not found.rows:
        screen.note(f"{found.path} holds no rows")
    return int(status)


def list_(
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """List the runs of the results folder, newest first: when, on what, how many rows of which status, and the size."""
    from kbench.cli.results_shown import show_list
    from kbench.results.listing import entries

    screen = Screen(json)
    if not results.is_dir():
        raise UsageError(f"{results} is no folder", "name one with --results DIR; `kbench sweep` makes it")
    found = entries(results)
    screen.document("results list", {"folder": str(results), "runs": [entry.to_dict() for entry in found]})
    show_list(results, found, screen)
    return int(Exit.OK)


# -------------------------------------------------------------------------------------- export, merge


def export(
    run: RunArgument = LATEST,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}.",
            autocompletion=lambda incomplete: [name for name in FORMATS if name.startswith(incomplete)],
        ),
    ] = FORMATS[0],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The file; - or nothing for standard output.")
    ] = STDOUT,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Write a run for other programs: as a table, or as the JSON of benchmark trackers.

    RUN is a run file, an id or a part of one, or latest (the same if left out).

    csv and parquet hold every row. google-benchmark (for its compare.py), bencher (Bencher's Metric Format, adapter
    json) and github-action-benchmark (tool customSmallerIsBetter) hold what was proven and timed, and of a static run
    its counts.
    """
    screen = Screen(json)
    _require_format(form, output, json)
    found = _read(find_run(results, run), screen)
    text, shown, without = _exported(form, found)
    if not shown:
        screen.note(f"nothing to export as {form}: {found.path} holds {'no time' if found.rows else 'no rows'}")
        screen.document("results export", {"exit_status": int(Exit.NOTHING), "run": str(found.path), "entries": 0})
        return int(Exit.NOTHING)
    if without:
        screen.note(f"left out: {without} experiments without a proven time")
    if output == STDOUT:
        assert isinstance(text, str)
        write(sys.stdout, text)
        return int(Exit.OK)
    data = text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
    replace_bytes(Path(output), data, "choose another file with -o FILE")
    content = {"run": str(found.path), "format": form, "file": output, "entries": shown, "left_out": without}
    screen.document("results export", {"exit_status": 0, **content})
    one, more = ("row", "rows") if form in FORMATS[:2] else ("entry", "entries")
    screen.say(f"{form}: {output} ({shown} {one if shown == 1 else more})")
    return int(Exit.OK)


def merge(
    files: Annotated[list[str], typer.Argument(metavar="RUN RUN...", hidden=True)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The merged file: .jsonl, or .jsonl.gz, compressed.")
    ],
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Put runs, also of several machines, into one run file; each row says which run it is of.

    RUN is a run file, an id or a part of one, or latest; two or more.

    Rows stay in the order of the files. What stands in two files is kept once, and said; the headers are kept, so that
    `kbench results show` shows each run by itself. An earlier merged file may be written over, a run never.
    """
    from kbench.results.merge import SOURCES, require_target, write_merged
    from kbench.results.merge import merge as merged_of

    screen = Screen(json)
    if len(files) < 2:
        raise UsageError("one run is merged with nothing", "name two or more")
    require_target(output)
    found = merged_of([_read(find_run(results, name), screen) for name in files])
    for remark in found.remarks:
        screen.note(remark)
    write_merged(output, found)
    content = {"file": str(output), "rows": len(found.rows), "remarks": list(found.remarks)}
    screen.document(
        "results merge", {"exit_status": 0, **content, SOURCES: [header.get("id") for header in found.headers]}
    )
    screen.say(f"merged: {output} ({len(found.rows)} rows of {len(found.headers)} runs)")
    return int(Exit.OK)


# ---------------------------------------------------------------------------------------------- prune


def prune(
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", parser=_keep, help="The newest N runs stay.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Younger runs stay: 12h, 30d, 8w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them. Without it nothing is removed.")] = False,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Remove old runs and their tables. With both limits, runs go that are past both.

    Never removed: baselines, the latest run, one that is being written, those that best.json took rows from, and what
    cannot be read.
    """
    from kbench.results.prune import parse_age, plan, remove

    screen = Screen(json)
    age: timedelta | None = parse_age(older_than) if older_than is not None else None
    if keep is None and age is None:
        raise UsageError("prune needs a limit", "give --keep N, --older-than 30d, or both")
    if yes and dry_run:
        raise UsageError("--yes and --dry-run exclude each other", "leave one of them out")
    if not results.is_dir():
        raise UsageError(f"{results} is no folder", "name one with --results DIR")
    found = plan(results, keep, age)
    removed = [entry for entry in found.removed if not yes or remove(results, entry)]
    _say_plan(removed, found, yes, screen)
    status = Exit.OK if yes or dry_run or not found.removed else Exit.USAGE
    screen.document(
        "results prune",
        {
            "exit_status": int(status),
            "dry_run": not yes,
            "bytes": sum(entry.size for entry in removed),
            "runs": [entry.to_dict() for entry in removed],
            "kept": [{"id": entry.id, "reason": why} for entry, why in found.kept],
        },
    )
    if status != Exit.OK:
        screen.note("nothing was removed: add --yes to remove them, or --dry-run to only look")
    return int(status)


def _say_plan(removed: Sequence[Entry], found: Plan, yes: bool, screen: Screen) -> None:
    from kbench.results.columns import bytes_text

    verb = "removed" if yes else "to remove"
    for entry in removed:
        screen.say(f"{verb}: {entry.id} ({entry.rows} rows, {bytes_text(entry.size)})")
    for entry, why in found.kept:
        screen.say(f"kept:    {entry.id}: {why}")
    runs = f"{len(removed)} run{'s' if len(removed) != 1 else ''}"
    total = bytes_text(sum(entry.size for entry in removed))
    screen.say(f"{runs} {verb}, {total}" if removed else "nothing to remove")


# ---------------------------------------------------------------------------------------------- parts


def _read(path: Path, screen: Screen) -> Run:
    found = read_run(path)
    for warning in found.warnings:
        screen.note(warning)
    return found


def _require_format(form: str, output: str, json: bool) -> None:
    """Raises UsageError and CannotRunError before anything is read."""
    if form not in FORMATS:
        raise UsageError(f"unknown format {form!r}", f"write --format {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if output == STDOUT and json:
        raise UsageError(
            "--json and an export on standard output are two documents in one place", "name a file with -o"
        )
    if form == "parquet":
        from kbench.results.formats.tabular import require_parquet

        if output == STDOUT:
            raise UsageError("Parquet is no text for a terminal", "name a file with -o FILE.parquet")
        require_parquet()


def _exported(form: str, run: Run) -> tuple[str | bytes, int, int]:
    """The text of an export, how many entries it has, and how many experiments have none."""
    from kbench.results.formats import benchmarks, tabular
    from kbench.results.formats.subject import counted, left_out, timed
    from kbench.results.merge import parts
    from kbench.results.rounds import merged
    from kbench.results.sound import require_sound

    require_sound(run)
    if form in ("csv", "parquet"):
        if not run.rows:
            return "", 0, 0
        entries = sum(len(merged(part.rows)) for part in parts(run))
        return (tabular.csv(run) if form == "csv" else tabular.parquet(run)), entries, 0
    subjects = timed(run)
    counts = [] if form == "google-benchmark" else list(counted(run))
    write_as = {
        "google-benchmark": benchmarks.google_benchmark,
        "bencher": benchmarks.bencher,
        "github-action-benchmark": benchmarks.github_action_benchmark,
    }
    return write_as[form](run), len(subjects) + len(counts), 0 if counts else left_out(run, subjects)
