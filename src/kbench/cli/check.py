"""`kbench check`: correctness only, over a family's check shapes and all block sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbench.cli import options as o
from kbench.cli.screen import Column, Screen, cut
from kbench.cli.session import Session, describe, run_rows
from kbench.errors import Exit
from kbench.grammar import parse_range, parse_sizes, parse_targets
from kbench.results.schema import Row
from kbench.results.tables import by_family, determinism, percent, worst_used
from kbench.selection import Selection

EXAMPLES = (
    "kbench check attention_backward:5 --block-sizes 32,256",
    "kbench check attention_backward --version 1,8 --preset small --seed 1",
)
# A bug that breaks one version breaks most of its rows in the same way: the first few tell the story.
FAILURES_SHOWN = 3


def check(
    targets: o.TargetsArgument = None,
    version: o.VersionsOption = None,
    block_sizes: o.BlocksOption = None,
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
    """Check every version over the family's check shapes and all block sizes, without timing.

    Ends with a summary table, and with exit status 3 if anything is wrong.
    """
    screen = Screen(json)
    selection = Selection(
        parse_targets(o.family_names(targets, family_dir), version),
        "check",
        block_sizes=parse_range(block_sizes, "--block-sizes") if block_sizes is not None else None,
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
    screen.document("check", session.document(summary=summarise(session.rows)))
    _show(session, screen, debug)
    return session.finish(screen, debug)


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each family and version: how many rows ended how, over how many shapes and block sizes."""
    entries = []
    for family, mine in by_family(rows).items():
        for number in sorted({row.version for row in mine}):
            entries.append(_entry(family, number, [row for row in mine if row.version == number]))
    return entries


def _entry(family: str, number: int, rows: Sequence[Row]) -> dict[str, Any]:
    tried = [row for row in rows if row.status not in ("refused", "skipped")]
    used = [share for row in rows if (share := worst_used(row)) is not None]
    same = {determinism(row) for row in rows} - {""}
    return {
        "family": family,
        "version": number,
        "shapes": len({(row.problem, row.dtype) for row in tried}),
        "blocks": len({row.block for row in tried}),
        "passed": sum(row.status == "pass" for row in rows),
        "refused": len(rows) - len(tried),
        "wrong": sum(row.status == "fail" for row in rows),
        "stopped": sum(row.exit_status not in (Exit.OK, Exit.WRONG) for row in rows),
        "worst_used": max(used, default=None),
        "deterministic": None if not same else same == {"yes"},
    }


def _show(session: Session, screen: Screen, debug: bool) -> None:
    for family, rows in by_family(session.rows).items():
        _failures(rows, screen, debug)
        screen.say(f"{family} on {describe(session.device)}, seed {session.seed}\n")
        columns = [Column("ver", "right"), Column("verdict")]
        columns += [Column(name, "right") for name in ("passed", "wrong", "stopped", "refused", "shapes", "blocks")]
        columns += [Column("bound", "right"), Column("same bits")]
        screen.table(columns, [_line(entry) for entry in summarise(rows)])
        screen.say()


def _failures(rows: Sequence[Row], screen: Screen, debug: bool) -> None:
    for number in sorted({row.version for row in rows}):
        bad = [row for row in rows if row.version == number and row.exit_status != Exit.OK]
        for row in bad if debug else bad[:FAILURES_SHOWN]:
            screen.say(f"{row.status.upper()} {row.family} version {number}, {row.problem}, block size {row.block}")
            screen.say(f"  {row.reason}")
            for line in cut(row.details, debug):
                screen.say(f"    {line}")
            if row.reproduce:
                screen.say(f"  again: {row.reproduce}")
        if len(bad) > FAILURES_SHOWN and not debug:
            screen.say(f"  version {number}: {len(bad) - FAILURES_SHOWN} more rows like these; --debug shows them")
        if bad:
            screen.say()


def _line(entry: dict[str, Any]) -> list[str]:
    verdict = "fail" if entry["wrong"] else "stopped" if entry["stopped"] else "pass" if entry["passed"] else "refused"
    counts = [str(entry[name]) for name in ("passed", "wrong", "stopped", "refused", "shapes", "blocks")]
    same = {True: "yes", False: "no", None: ""}[entry["deterministic"]]
    return [str(entry["version"]), verdict, *counts, percent(entry["worst_used"]), same]
