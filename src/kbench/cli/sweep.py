"""`kbench sweep`: every version at every block size, checked, then timed; records and tables on disk."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kbench import __version__
from kbench.cli import options as o
from kbench.cli.plot import HtmlOption, require_page, require_page_writable
from kbench.cli.resume import require_no_others, resumption
from kbench.cli.screen import Screen
from kbench.cli.search import MaxRowsOption, StrategyOption, chosen_search, show_searched
from kbench.cli.session import NO_TIMES, Session, run_rows
from kbench.cli.summary import show_summary
from kbench.cli.sweep_shown import Layout, Shown
from kbench.cli.sweep_unproven import ALL, ArchOption, CountsOption, StaticOption, unproven
from kbench.errors import Exit, UsageError
from kbench.grammar import parse_block_sizes, parse_params, parse_sizes, parse_targets
from kbench.plot.page import write_page
from kbench.results.baselines import require_name, save_baseline
from kbench.results.best import load_best, unsettled, update_best, winners
from kbench.results.columns import NAMES, parse_columns, parse_order
from kbench.results.facts import Card, facts_of
from kbench.results.schema import Row
from kbench.results.store import BASELINES, RUNS, TABLES, RunWriter, read_run, require_writable
from kbench.results.summary import summarise, write_summary
from kbench.results.tables import by_family, by_problem, write_tables
from kbench.results.why import why
from kbench.revision import revisions
from kbench.selection import Selection

EXAMPLES = (
    "kbench sweep attention_backward --versions 1,7-8 --block-sizes 64..256",
    "kbench sweep attention_backward:8 --size T=32,64 --block-sizes 32..128:32",
    "kbench sweep residual_forward --param PACKETS=1,2,4 --preset small",
    "kbench sweep gelu_forward --dtype fp32,bf16 --sort time --top 5",
    "kbench sweep softmax_forward --static --arch sm_90,sm_100",
)
MOST_ROWS = 1_000_000
MOST_ROUNDS = 100
MIN_ROUNDS = 3  # of a baseline: fewer tell nothing of how rounds differ, and `kbench report` asks for as many
FOLDERS = (RUNS, TABLES, BASELINES)


def _top(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= MOST_ROWS:
        raise UsageError(f"--top {text!r} is not a number of rows", "give a whole number above 0, such as 5")
    return int(text)


def _rounds(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= MOST_ROUNDS:
        raise UsageError(f"--rounds {text!r} is not a number of rounds", f"give one from 1 to {MOST_ROUNDS}, such as 3")
    return int(text)


ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="LIST",
        help=f"Columns of the tables: all, or some of {', '.join(NAMES)}. Those that fit, if left out.",
        autocompletion=lambda incomplete: [name for name in NAMES if name.startswith(incomplete)],
    ),
]
SortOption = Annotated[
    str | None,
    typer.Option(
        "--sort",
        metavar="COLUMN",
        help="Sort each table by a column; -COLUMN for the largest first. As they ran, if left out.",
        autocompletion=lambda incomplete: [name for name in NAMES if name.startswith(incomplete)],
    ),
]
TopOption = Annotated[
    int | None,
    typer.Option(
        "--top", metavar="N", parser=_top, help="Only the first N rows of each table: by time, unless sorted."
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on with a run that was stopped: the latest, or RUN in place of TARGET."),
]
RoundsOption = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        parser=_rounds,
        help="Time the rows N times, one round after the other: 1 if left out, 3 with --save.",
    ),
]
SaveOption = Annotated[
    str | None,
    typer.Option("--save", metavar="NAME", help="Keep the run as a baseline for `kbench report`, to be committed."),
]


def sweep(
    context: typer.Context,
    targets: o.TargetsArgument = None,
    version: o.VersionsOption = None,
    block_sizes: o.BlocksOption = None,
    param: o.ParamsOption = None,
    size: o.SizesOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypesOption = None,
    seed: o.SeedOption = None,
    device: o.DeviceOption = "auto",
    family_dir: o.FamilyDirOption = None,
    rtol: o.RtolOption = None,
    atol: o.AtolOption = None,
    time_limit: o.TimeLimitOption = 30.0,
    full: o.FullOption = False,
    hot: o.HotOption = False,
    graph: o.GraphOption = False,
    strategy: StrategyOption = None,
    max_rows: MaxRowsOption = None,
    columns: ColumnsOption = None,
    sort: SortOption = None,
    top: TopOption = None,
    html: HtmlOption = None,
    rounds: RoundsOption = None,
    save: SaveOption = None,
    static: StaticOption = False,
    arch: ArchOption = None,
    counts: CountsOption = False,
    workers: o.WorkersOption = None,
    resume: ResumeOption = False,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Check, then time, every version at every block size; one row each, the fastest marked.

    TARGET is FAMILY or FAMILY:VERSIONS, such as attention_backward:1,3-5; without one, every family is meant.

    Failures, refusals and crashes are rows with their reason. Rows are written to the results folder as they
    come, so that a stopped sweep keeps what it has, and --resume goes on with it: with the options that it began
    with, running what is missing, what crashed, and what changed since. The emulator gives verdicts, and neither
    times nor winners.

    --strategy measures a part of the rows: those that a search strategy of Kernel Tuner asks for on its way to the
    fastest, in each version and problem. A parameter without --param then takes all of its values, as it does with
    --strategy brute_force.

    --rounds measures the rows that are timed again, once all of them are through: what differs between two moments,
    and not between two launches, is then known to `kbench report`. Tables show all rounds together.

    --static compiles each version, at one block size unless --block-sizes says which, or all; --counts runs it once on
    the emulator. Nothing is proven or timed then: such rows are for `kbench report` to hold against others.

    On a GPU, what the card copies and multiplies at most (its ceilings) is measured first, and kept. A sweep over
    several families ends with a summary: the best version of each problem, and how near it is to those ceilings.
    """
    screen = Screen(json)
    layout = Layout(
        parse_columns(columns) if columns is not None else None, parse_order(sort) if sort is not None else None, top
    )
    # All before any work: an hour of measuring must not end in "cannot write".
    if html is not None:
        require_page(html, "--html")
        require_page_writable(html, "--html")
    if save is not None:
        require_name(save)
    instead = unproven(context, static, counts, arch)
    if resume:
        require_no_others(context)
        again = resumption(results, targets or [], screen)
        require_writable(again.writer.folder, FOLDERS)
        load_best(again.writer.folder)
        with closing(again.writer):
            session = run_rows(
                again.options, again.selection, screen, lambda session: again.writer, earlier=again.prepare,
                rounds=again.rounds,
            )  # fmt: skip
        return _finish(session, again.writer, layout, screen, html, save, debug)
    selection = Selection(
        parse_targets(o.family_names(targets, version, family_dir), version),
        "sweep",
        block_sizes=parse_block_sizes(block_sizes) if block_sizes not in (None, ALL) else None,
        sizes=parse_sizes(size or []),
        params=parse_params(param or []),
        whole=strategy is not None,
        usual=instead is not None and block_sizes is None,
        preset=preset,
        dtype=dtype,
    )
    search = chosen_search(strategy, max_rows)
    if search is not None and (rtol is not None or atol is not None):
        what = "--strategy looks for the winner, and no row judged by --rtol or --atol can be one"
        raise UsageError(what, "leave one of them out")
    times = 1 if instead else _times(rounds, save, search is not None, rtol is not None or atol is not None)
    options = o.bench_options(
        device=device,
        family_dir=family_dir,
        seed=seed,
        rtol=rtol,
        atol=atol,
        time_limit=time_limit,
        workers=workers,
        debug=debug,
        full=full or search is not None,  # a search compares all rows that it asks for
        hot=hot,
        graph=graph,
    )
    if instead is not None:
        options = instead.options(options)
    require_writable(results, FOLDERS)
    load_best(results)
    writers: list[RunWriter] = []

    def record(session: Session) -> RunWriter:
        # From wherever it goes on, the folders have to be found.
        folders = [str(folder.absolute()) for folder in options.family_dirs]
        writer = RunWriter(
            results,
            device=session.device,
            command=["kbench", *sys.argv[1:]],
            options={
                **asdict(options),
                "family_dirs": folders,
                "seed": session.seed,
                "rounds": times,
                **({"strategy": search.strategy, "max_rows": search.most} if search is not None else {}),
            },  # fmt: skip
            kbench_version=__version__,
            selection=asdict(selection),
            revisions=revisions(options.family_dirs),
        )
        writers.append(writer)
        return writer

    session = run_rows(
        options, selection, screen, record, search, rounds=times, makes=instead.bench if instead else None
    )  # fmt: skip
    return _finish(session, writers[0], layout, screen, html, save, debug)


def _times(rounds: int | None, save: str | None, searches: bool, overridden: bool) -> int:
    """How often rows are timed. Raises UsageError for options that contradict each other."""
    if save is not None and overridden:
        raise UsageError("--save and --rtol or --atol exclude each other", "a baseline is judged by the family's bound")
    if searches:
        if rounds is not None:
            raise UsageError("--rounds and --strategy exclude each other", "a search times each row once")
        return 1
    return rounds or (MIN_ROUNDS if save is not None else 1)


def _finish(
    session: Session,
    writer: RunWriter,
    layout: Layout,
    screen: Screen,
    html: Path | None,
    save: str | None,
    debug: bool,
) -> int:
    """Everything after the last row; returns the exit status."""
    _report(session, writer, layout, screen)
    if save is not None:
        _save(session, writer, save, screen)
    if html is not None:
        write_page(html, read_run(writer.path), "--html")
        screen.say(f"page:    {html}")
    # A search chooses by what it has seen: there is no rest of it to run. What only compiles is quickly done again.
    more = "" if session.searched or session.unproven else " (`kbench sweep --resume` goes on)"
    return session.finish(screen, debug, kept=f"{writer.path}{more}")


def _save(session: Session, writer: RunWriter, name: str, screen: Screen) -> None:
    """Keep a run that came to its end as a baseline, and say what it lacks."""
    if session.stopped is not None:
        screen.note(f"not saved as {name}: the sweep was stopped")
        return
    path = save_baseline(writer.folder, name, writer.path)
    screen.say(f"saved:   {path}")
    if not session.timed and not session.unproven:
        screen.note(f"{path} holds verdicts and no times: the emulator is not a GPU")
    bad = Counter(row.status for row in session.rows if row.exit_status != Exit.OK)
    if bad:
        counts = ", ".join(f"{count} {status}" for status, count in bad.items())
        screen.note(f"{path} holds rows that did not pass, too: {counts}")


def _report(session: Session, writer: RunWriter, layout: Layout, screen: Screen) -> None:
    """Tables on the screen and on disk, and the winners into best.json."""
    best = winners(session.rows)
    families = by_family(session.rows)
    card = Card.of(session.device)
    # One family's table shows as much by itself; without times there is nothing to sum up.
    summary = summarise(session.rows, card.ceilings) if session.timed and len(families) > 1 else []
    document = session.document(
        run=str(writer.path),
        winners=[_winner(row, session.rows, card) for row in best.values()],
        summary=[asdict(line) for line in summary],
        **({"searched": [asdict(found) for found in session.searched]} if session.searched else {}),
    )
    for entry, row in zip(document["rows"], session.rows, strict=True):
        entry["facts"] = asdict(facts_of(row, card))
    screen.document("sweep", document)
    for rows in families.values():
        for group in by_problem(rows):
            Shown(session, group, layout).show(screen)
    if not session.timed:
        screen.prose(session.unproven or f"{NO_TIMES}, so there is no winner")
        screen.say()
    show_searched(session.searched, screen)
    write_tables(writer.folder, writer.id, session.rows, card)
    if summary:
        write_summary(writer.folder, writer.id, summary)
    screen.say(f"records: {writer.path}")
    screen.say(f"tables:  {writer.folder / 'tables' / writer.id}")
    if session.timed:  # also without a winner: a row may have proven a kept one wrong
        kept = unsettled(load_best(writer.folder), filter(session.is_kept, session.rows), writer.id)
        came = [row for row in session.rows if not session.is_kept(row)]
        changed = update_best(writer.folder, [*kept, *came], writer.id)
        screen.say(f"best:    {writer.folder / 'best.json'} (changed: {changed})")
    if summary:
        show_summary(summary, card.ceilings, screen)


def _winner(row: Row, rows: list[Row], card: Card) -> dict[str, Any]:
    because = why(row, rows, card)
    return {
        "family": row.family,
        "version": row.version,
        "dtype": row.dtype,
        "block": row.block,
        **row.params,
        **row.sizes,
        "why": str(because) if because is not None else None,
    }
