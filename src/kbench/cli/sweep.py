"""`kbench sweep`: every version at every block size, checked, then timed; records and tables on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kbench import __version__
from kbench.ceilings import Ceilings
from kbench.cli import options as o
from kbench.cli.failures import show_reasons
from kbench.cli.plot import HtmlOption, require_page
from kbench.cli.screen import Screen
from kbench.cli.search import MaxRowsOption, StrategyOption, chosen_search, show_searched
from kbench.cli.session import NO_TIMES, Session, describe, run_rows
from kbench.cli.summary import show_summary
from kbench.cli.table import Column
from kbench.grammar import parse_block_sizes, parse_params, parse_sizes, parse_targets
from kbench.params import params_text
from kbench.plot.page import write_page
from kbench.results.best import contest, load_best, median, ties, update_best, winners
from kbench.results.conditions import mode_text
from kbench.results.schema import Row
from kbench.results.store import RunWriter, read_run, require_writable
from kbench.results.summary import summarise, write_summary
from kbench.results.tables import (
    by_family,
    by_problem,
    determinism,
    interval,
    mark,
    milliseconds,
    share_of_bound,
    write_tables,
)
from kbench.selection import Selection

EXAMPLES = (
    "kbench sweep attention_backward --versions 1,7-8 --block-sizes 64..256",
    "kbench sweep attention_backward:8 --size T=32,64 --block-sizes 32..128:32",
    "kbench sweep residual_forward --param PACKETS=1,2,4 --preset small",
)


def sweep(
    targets: o.TargetsArgument = None,
    version: o.VersionsOption = None,
    block_sizes: o.BlocksOption = None,
    param: o.ParamsOption = None,
    size: o.SizesOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
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
    html: HtmlOption = None,
    workers: o.WorkersOption = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Check, then time, every version at every block size; one row each, the fastest marked.

    TARGET is FAMILY or FAMILY:VERSIONS, such as attention_backward:1,3-5; without one, every family is meant.

    Failures, refusals and crashes are rows with their reason. Rows are written to the results folder as they
    come, so that a stopped sweep keeps what it has. The emulator gives verdicts, and neither times nor winners.

    --strategy measures a part of the rows: those that a search strategy of Kernel Tuner asks for on its way to the
    fastest, in each version and problem. A parameter without --param then takes all of its values, as it does with
    --strategy brute_force.

    On a GPU, what the card copies and multiplies at most (its ceilings) is measured first, and kept. A sweep over
    several families ends with a summary: the best version of each problem, and how near it is to those ceilings.
    """
    screen = Screen(json)
    selection = Selection(
        parse_targets(o.family_names(targets, version, family_dir), version),
        "sweep",
        block_sizes=parse_block_sizes(block_sizes) if block_sizes is not None else None,
        sizes=parse_sizes(size or []),
        params=parse_params(param or []),
        whole=strategy is not None,
        preset=preset,
        dtype=dtype,
    )
    search = chosen_search(strategy, max_rows)
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
    # All before any work: an hour of measuring must not end in "cannot write".
    if html is not None:
        require_page(html, "--html")
        require_writable(html.parent)
    require_writable(results)
    load_best(results)

    writers: list[RunWriter] = []

    def record(session: Session) -> RunWriter:
        recorded = {**asdict(options), "family_dirs": [str(folder) for folder in options.family_dirs]}
        recorded["seed"] = session.seed
        writer = RunWriter(
            results,
            device=session.device,
            command=["kbench", *sys.argv[1:]],
            options=recorded,
            kbench_version=__version__,
        )
        writers.append(writer)
        return writer

    session = run_rows(options, selection, screen, record, search)
    _finish(session, writers[0], screen)
    if html is not None:
        write_page(html, read_run(writers[0].path))
        screen.say(f"page:    {html}")
    return session.finish(screen, debug, kept=str(writers[0].path))


def _finish(session: Session, writer: RunWriter, screen: Screen) -> None:
    """Tables on the screen and on disk, and the winners into best.json."""
    best = winners(session.rows)
    families = by_family(session.rows)
    ceilings = Ceilings.from_dict(session.device.get("ceilings") or Ceilings().to_dict())
    # One family's table shows as much by itself; without times there is nothing to sum up.
    summary = summarise(session.rows, ceilings) if session.timed and len(families) > 1 else []
    screen.document(
        "sweep",
        session.document(
            run=str(writer.path),
            winners=[_winner(row) for row in best.values()],
            summary=[asdict(line) for line in summary],
            **({"searched": [asdict(found) for found in session.searched]} if session.searched else {}),
        ),
    )
    for rows in families.values():
        for group in by_problem(rows):
            _table(session, group, screen)
    if not session.timed:
        screen.say(f"{NO_TIMES}, so there is no winner\n")
    show_searched(session.searched, screen)
    write_tables(writer.folder, writer.id, session.rows)
    if summary:
        write_summary(writer.folder, writer.id, summary)
    screen.say(f"records: {writer.path}")
    screen.say(f"tables:  {writer.folder / 'tables' / writer.id}")
    if session.timed:  # also without a winner: a row may have proven a kept one wrong
        changed = update_best(writer.folder, session.rows, writer.id)
        screen.say(f"best:    {writer.folder / 'best.json'} (changed: {changed})")
    if summary:
        show_summary(summary, ceilings, screen)


def _winner(row: Row) -> dict[str, str | int]:
    return {
        "family": row.family,
        "version": row.version,
        "dtype": row.dtype,
        "block": row.block,
        **row.params,
        **row.sizes,
    }


def _table(session: Session, rows: Sequence[Row], screen: Screen) -> None:
    first = rows[0]
    mode = f", {mode_text(first)}" if session.timed else ""
    screen.prose(f"{first.family}: {first.problem}, {first.dtype}{mode}, seed {session.seed}", rest="  ")
    screen.prose(f"on {describe(session.device)}", rest="  ")
    session.say_replaced(screen)
    screen.say()
    columns = [Column(""), Column("ver", "right"), Column("block", "right")]
    columns += [Column("params" if any(row.params for row in rows) else ""), Column("check")]
    columns.append(Column(session.bound, "right", drop=1))
    if session.timed:
        columns += [Column("median ms", "right", short="ms"), Column("95% interval", drop=2)]
    else:
        columns.append(Column("same bits", short="same", drop=2))
    best = winners(rows)
    screen.table(columns, [_line(row, best.get(contest(row)), session.timed) for row in rows])
    screen.say()
    show_reasons(rows, screen)
    for winner in best.values():
        tied = sum(ties(row, winner) for row in rows)
        also = f"; {tied} within its interval (~)" if tied else ""
        name = f"version {winner.version} at block size {winner.place}"
        time = f"{milliseconds(median(winner))} ms ({interval(winner)})"
        screen.prose(f"* fastest: {name}, {time}{also}", rest="    ")
    if best or any(row.reason for row in rows):
        screen.say()


def _line(row: Row, best: Row | None, timed: bool) -> list[str]:
    cells = [mark(row, best), str(row.version), str(row.block), params_text(row.params)]
    cells += [row.status, share_of_bound(row)]
    if timed:
        cells += [milliseconds(median(row)) if row.measurement else "", interval(row)]
    else:
        cells.append(determinism(row))
    return cells
