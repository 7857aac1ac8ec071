"""`kbench run`: one version proved and timed, or a family's versions as a ladder from naive to fastest."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from kbench.cli import options as o
from kbench.cli.screen import Column, Screen, cut
from kbench.cli.session import Session, describe, run_rows
from kbench.errors import CannotRunError, Exit, UsageError
from kbench.grammar import parse_block_size, parse_sizes, parse_targets
from kbench.results.best import contest, median, winners
from kbench.results.schema import Row
from kbench.results.tables import by_problem, determinism, interval, mark, milliseconds, percent, share_of_bound, spread
from kbench.selection import Selection

EXAMPLES = (
    "kbench run attention_backward --version 5",
    "kbench run attention_backward:1,7 --preset small",
    "kbench run attention_backward:7 --block-size 64 --size T=33 --seed 1",
)
LEGEND = "* fastest, ~ not told apart from it; +- 95% interval; speed-up over the first"
IDEA_WIDTH = 60  # three lines of the column that times leave free in 80; `kbench list FAMILY` has the whole
NO_TIMES = "no times: the emulator is not a GPU"


def run(
    target: o.TargetArgument,
    version: o.VersionsOption = None,
    block_size: o.BlockOption = None,
    size: o.SizesOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
    seed: o.SeedOption = None,
    device: o.DeviceOption = "auto",
    family_dir: o.FamilyDirOption = None,
    rtol: o.RtolOption = None,
    atol: o.AtolOption = None,
    time_limit: o.TimeLimitOption = 30.0,
    workers: o.WorkersOption = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Check one version against the CPU reference, then time it.

    Without --version, every version in turn: the ladder from naive to fastest, as one table. On the emulator
    there are verdicts and no times.
    """
    screen = Screen(json)
    targets = parse_targets([target], version)
    selection = Selection(
        targets,
        "run",
        block_sizes=[parse_block_size(block_size)] if block_size is not None else None,
        sizes=parse_sizes(size or []),
        preset=preset,
        dtype=dtype,
    )
    options = o.bench_options(
        device=device,
        family_dir=family_dir,
        seed=seed,
        rtol=rtol,
        atol=atol,
        time_limit=time_limit,
        workers=workers,
        debug=debug,
    )
    session = run_rows(options, selection, screen)
    screen.document("run", session.document())
    named = targets[0].versions or ()
    if len(named) == 1 and len(session.rows) == 1:
        _raise_if_not_run(session.rows[0])
        _report(session, session.rows[0], screen, debug)
    else:
        for rows in by_problem(session.rows):
            _ladder(session, rows, screen)
    return session.finish(screen, debug)


def _raise_if_not_run(row: Row) -> None:
    """A single version that was asked for by number and did not run is an error, not a row."""
    what = f"{row.family} version {row.version}"
    if row.status == "refused":
        raise UsageError(f"{what} refuses this: {row.reason}", f"`kbench list {row.family}` shows what it takes")
    if row.status == "skipped":
        raise CannotRunError(f"{what} cannot run on this device: {row.reason}", "it needs --device cuda")
    if row.status == "unable":
        raise CannotRunError(f"cannot run here: {row.reason}")


def _report(session: Session, row: Row, screen: Screen, debug: bool) -> None:
    screen.say(f"{row.family} version {row.version}: {row.idea}")
    screen.say(f"  on       {describe(session.device)}")
    screen.say(f"  problem  {row.problem}, {row.dtype}, block size {row.block}, seed {row.seed}")
    screen.say(f"  check    {_check_line(row)}")
    if row.verdict and row.verdict["outputs"]:
        _outputs(row, screen)
    if row.measurement:
        screen.say(f"  time     {_time_line(row)}")
    elif row.status == "pass":
        screen.say(f"  time     {NO_TIMES if not session.timed else row.reason or 'not taken'}")
    _explain(row, screen, debug)


def _check_line(row: Row) -> str:
    if row.status != "pass":
        return f"{row.status.upper()}: {row.reason}"
    verdict = row.verdict or {}
    same = {"yes": "bitwise equal each time", "no": "not bitwise equal each time"}.get(determinism(row))
    parts = ["pass", f"{verdict['launches']} launches" if "launches" in verdict else None, same]
    parts.append(f"judged by {verdict['judge']}" if verdict.get("judge") else None)
    parts.append("by --rtol/--atol, not by the bound" if row.overridden else None)
    return ", ".join(part for part in parts if part)


def _outputs(row: Row, screen: Screen) -> None:
    columns = [Column("  output"), Column("compared", "right"), Column("wrong", "right"), Column("of bound", "right")]
    outputs = row.verdict["outputs"] if row.verdict else []
    lines = [[f"  {out['name']}", f"{out['compared']:,}", f"{out['wrong']:,}", percent(out["used"])] for out in outputs]
    screen.table(columns, lines)


def _time_line(row: Row) -> str:
    taken = row.measurement or {}
    line = f"{milliseconds(median(row))} ms median, 95% interval {interval(row)}"
    line += f", {row.cache_mode} L2, {len(taken.get('samples_ms', ()))} samples"
    return f"{line}; {taken['note']}" if taken.get("note") else line


def _explain(row: Row, screen: Screen, debug: bool) -> None:
    """Where a failed row went wrong, and how to see it again."""
    for line in cut(row.details, debug):
        screen.say(f"    {line}")
    if row.status != "pass" and row.reproduce:
        screen.say(f"  again    {row.reproduce}")


def _ladder(session: Session, rows: Sequence[Row], screen: Screen) -> None:
    first = rows[0]
    mode = f", {first.cache_mode} L2" if session.timed else ""
    screen.say(f"{first.family}: {first.problem}, {first.dtype}{mode}, seed {session.seed}")
    screen.say(f"on {describe(session.device)}\n")
    columns = [
        Column("", "left"),
        Column("ver", "right"),
        Column("idea", flexible=True),
        Column("block", "right"),
        Column("check"),
        Column("bound", "right"),
    ]
    if session.timed:
        columns += [Column("median ms", "right"), Column("+-", "right"), Column("speed-up", "right")]
    best = winners(rows)
    base = next((row for row in rows if row.measurement), None)
    lines = [_rung(row, best.get(contest(row)), base, session.timed) for row in rows]
    screen.table(columns, lines)
    screen.say()
    for row in rows:
        if row.reason:
            screen.say(f"version {row.version} {row.status}: {row.reason}")
        if row.status != "pass" and row.exit_status != Exit.OK and row.reproduce:
            screen.say(f"    {row.reproduce}")
    screen.say(LEGEND if session.timed else NO_TIMES)


def _rung(row: Row, best: Row | None, base: Row | None, timed: bool) -> Sequence[str]:
    idea = textwrap.shorten(row.idea, IDEA_WIDTH, placeholder=" ...")
    cells = [mark(row, best), str(row.version), idea, str(row.block), row.status, share_of_bound(row)]
    if timed:
        ratio = f"{median(base) / median(row):.2f}x" if base is not None and row.measurement else ""
        cells += [milliseconds(median(row)) if row.measurement else "", spread(row), ratio]
    return cells
