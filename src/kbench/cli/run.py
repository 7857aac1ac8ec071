"""`kbench run`: one version proved and timed, or a family's versions as a ladder from naive to fastest."""

from __future__ import annotations

from collections.abc import Sequence

from kbench.cli import options as o
from kbench.cli.failures import show_commands, show_details, show_reasons
from kbench.cli.screen import Screen
from kbench.cli.session import NO_TIMES, Session, describe, run_rows
from kbench.cli.table import Column
from kbench.errors import CannotRunError, KbenchError, UsageError
from kbench.grammar import parse_block_size, parse_params, parse_sizes, parse_targets
from kbench.params import params_text
from kbench.results.best import contest, median, winners
from kbench.results.conditions import card_text, mode_text, second_text
from kbench.results.schema import Row
from kbench.results.tables import by_problem, determinism, interval, mark, milliseconds, percent, share_of_bound, spread
from kbench.selection import Selection

EXAMPLES = (
    "kbench run attention_backward --version 5",
    "kbench run attention_backward:1,7 --preset small",
    "kbench run attention_backward:7 --block-size 64 --size T=33 --seed 1",
)
LEGEND = "* fastest, ~ not told apart from it; +- 95% interval; speed-up over the first"


def run(
    target: o.TargetArgument,
    version: o.VersionsOption = None,
    block_size: o.BlockOption = None,
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
    hot: o.HotOption = False,
    graph: o.GraphOption = False,
    workers: o.WorkersOption = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Check one version against the float64 reference, then time it.

    TARGET is FAMILY or FAMILY:VERSIONS, such as attention_backward:5. Without versions, every version in turn: the
    ladder from naive to fastest, as one table. On the emulator there are verdicts and no times.
    """
    screen = Screen(json)
    selection = Selection(
        parse_targets([target], version),
        "run",
        block_sizes=[parse_block_size(block_size)] if block_size is not None else None,
        sizes=parse_sizes(size or []),
        params=parse_params(param or []),
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
        hot=hot,
        graph=graph,
    )
    session = run_rows(options, selection, screen)
    # Not what was asked for but what came of it: a family of one version needs no ladder.
    only = session.rows[0] if session.planned.total() == len(session.rows) == 1 else None
    error = not_run(only) if only is not None else None
    failure = {"error": str(error), "exit_status": int(error.exit_status)} if error is not None else {}
    screen.document("run", session.document(**failure))
    if error is not None:
        raise error
    if only is not None:
        _report(session, only, screen, debug)
    else:
        _ladders(session, screen)
    return session.finish(screen, debug)


def not_run(row: Row) -> KbenchError | None:
    """The error that a single row is which did not run at all."""
    what = f"{row.family} version {row.version}"
    if row.status == "refused":
        return UsageError(f"{what} refuses this: {row.reason}", f"`kbench list {row.family}` shows what it takes")
    if row.status == "skipped":
        hint = "it needs --device cuda" if row.device == "emulator" else ""
        return CannotRunError(f"{what} cannot run on this device: {row.reason}", hint)
    if row.status == "unable":
        return CannotRunError(f"cannot run here: {row.reason}")
    return None


def _report(session: Session, row: Row, screen: Screen, debug: bool) -> None:
    screen.prose(f"{row.family} version {row.version}: {row.idea}", rest="  ")
    screen.prose(describe(session.device), "  on       ")
    screen.prose(f"{row.problem}, {row.dtype}, block size {row.place}, seed {session.seed}", "  problem  ")
    status = row.status if row.status == "pass" else row.status.upper()
    screen.prose(f"{status}{_check_line(session, row)}", "  check    ", status=status)
    if row.verdict and row.verdict["outputs"]:
        screen.say()
        _outputs(session, row, screen)
        screen.say()
    if row.measurement:
        screen.prose(_time_line(row), "  time     ")
        for title, text in (("  again    ", second_text(row)), ("  card     ", card_text(row))):
            if text:
                screen.prose(text, title)
    elif row.status == "pass":
        screen.prose(NO_TIMES if not session.timed else row.reason or "not taken", "  time     ")
    show_details(row, screen, debug, " " * 11)  # below the text of the check
    if row.status != "pass":
        show_commands(row, screen, "  again    ", "  smaller  ")


def _check_line(session: Session, row: Row) -> str:
    by = f" with {session.replaced} in place of the family's error bound" if session.replaced else ""
    if row.status != "pass":
        return f": {row.reason}{f' (judged{by})' if by else ''}"
    verdict = row.verdict or {}
    same = {"yes": "bitwise equal each time", "no": "not bitwise equal each time"}.get(determinism(row))
    parts = [f"{verdict['launches']} launches" if "launches" in verdict else None, same]
    parts.append(f"judged by {verdict.get('judge', 'kbench')}{by}")
    return "".join(f", {part}" for part in parts if part)


def _outputs(session: Session, row: Row, screen: Screen) -> None:
    columns = [Column("output"), Column("compared", "right"), Column("wrong", "right")]
    columns.append(Column(f"of {session.bound}", "right"))
    outputs = row.verdict["outputs"] if row.verdict else []
    lines = [[out["name"], f"{out['compared']:,}", f"{out['wrong']:,}", percent(out["used"])] for out in outputs]
    screen.table(columns, lines, indent=2)


def _time_line(row: Row) -> str:
    taken = row.measurement or {}
    line = f"{milliseconds(median(row))} ms median, 95% interval {interval(row)}"
    line += f", {mode_text(row)}, {taken.get('count') or len(taken.get('samples_ms', ()))} samples"
    return f"{line}; {taken['note']}" if taken.get("note") else line


def _ladders(session: Session, screen: Screen) -> None:
    """A table for each problem, and once what holds for all of them."""
    for position, rows in enumerate(by_problem(session.rows)):
        if position:
            screen.say()
        _ladder(session, rows, screen)
    screen.say()
    screen.prose(LEGEND if session.timed else NO_TIMES)


def _ladder(session: Session, rows: Sequence[Row], screen: Screen) -> None:
    first = rows[0]
    mode = f", {mode_text(first)}" if session.timed else ""
    screen.prose(f"{first.family}: {first.problem}, {first.dtype}{mode}, seed {session.seed}", rest="  ")
    screen.prose(f"on {describe(session.device)}", rest="  ")
    session.say_replaced(screen)
    screen.say()
    columns = [
        Column(""),
        Column("ver", "right"),
        Column("idea", flexible=True),
        Column("block", "right", drop=3),
        Column("params" if any(row.params for row in rows) else ""),
        Column("check"),
        Column(session.bound, "right", drop=1),
    ]
    if session.timed:
        columns += [Column("median ms", "right", short="ms"), Column("+-", "right", drop=2)]
        columns.append(Column("speed-up", "right", short="gain"))
    best = winners(rows)
    base = next((row for row in rows if row.measurement), None)
    screen.table(columns, [_rung(row, best.get(contest(row)), base, session.timed) for row in rows])
    if any(row.reason for row in rows):
        screen.say()
        show_reasons(rows, screen)


def _rung(row: Row, best: Row | None, base: Row | None, timed: bool) -> Sequence[str]:
    cells = [mark(row, best), str(row.version), row.idea, str(row.block), params_text(row.params)]
    cells += [row.status, share_of_bound(row)]
    if timed:
        ratio = f"{median(base) / median(row):.2f}x" if base is not None and row.measurement else ""
        cells += [milliseconds(median(row)) if row.measurement else "", spread(row), ratio]
    return cells
