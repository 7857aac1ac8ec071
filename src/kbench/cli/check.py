"""`kbench check`: correctness only, over a family's check shapes and all block sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kbench.cli import options as o
from kbench.cli.failures import show_failures, show_refusals
from kbench.cli.screen import Screen
from kbench.cli.session import Session, describe, run_rows
from kbench.cli.table import Column
from kbench.errors import Exit
from kbench.grammar import parse_block_sizes, parse_params, parse_sizes, parse_targets
from kbench.results.schema import STATUSES, Row
from kbench.results.tables import by_family, determinism, percent, worst_used
from kbench.selection import Selection

EXAMPLES = (
    "kbench check attention_backward:5 --block-sizes 32,256",
    "kbench check attention_backward --version 1,8 --preset small --seed 1",
)

# Of the rows of a version: what became of how many.
_COUNTS = ["passed", "wrong", "stopped", "refused"]


def check(
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
    workers: o.WorkersOption = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Check every version over the family's check shapes and all block sizes, without timing.

    TARGET is FAMILY or FAMILY:VERSIONS, such as attention_backward:1,3-5; without one, every family is meant.

    Ends with a summary table, and with exit status 3 if anything is wrong.
    """
    screen = Screen(json)
    selection = Selection(
        parse_targets(o.family_names(targets, version, family_dir), version),
        "check",
        block_sizes=parse_block_sizes(block_sizes) if block_sizes is not None else None,
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
    )
    session = run_rows(options, selection, screen)
    screen.document("check", session.document(summary=summarise(session.rows, session.planned)))
    _show(session, screen, debug)
    return session.finish(screen, debug)


def summarise(rows: Sequence[Row], planned: Mapping[tuple[str, int], int]) -> list[dict[str, Any]]:
    """One entry for each family and version: how many rows ended how, over how many shapes and block sizes.

    planned: how many rows each (family, version) was to have. A version that an early end left without any has an
    entry too, if its family has rows.
    """
    entries = []
    for family, mine in by_family(rows).items():
        numbers = {row.version for row in mine} | {number for name, number in planned if name == family}
        for number in sorted(numbers):
            chosen = [row for row in mine if row.version == number]
            entries.append(_entry(family, number, chosen, planned.get((family, number), len(chosen))))
    return entries


def _entry(family: str, number: int, rows: Sequence[Row], planned: int) -> dict[str, Any]:
    tried = [row for row in rows if row.status not in ("refused", "skipped")]
    used = [share for row in rows if (share := worst_used(row)) is not None]
    same = {determinism(row) for row in rows} - {""}
    return {
        "family": family,
        "version": number,
        "planned": planned,
        "rows": len(rows),
        "shapes": len({(row.problem, row.dtype) for row in tried}),
        "blocks": len({row.block for row in tried}),
        "passed": sum(row.status == "pass" for row in rows),
        "refused": sum(row.status == "refused" for row in rows),
        "skipped": sum(row.status == "skipped" for row in rows),
        "wrong": sum(row.status == "fail" for row in rows),
        "stopped": sum(_stopped(row) for row in rows),
        "statuses": dict(Counter(row.status for row in rows)),
        "worst_used": max(used, default=None),
        "deterministic": None if not same else same == {"yes"},
    }


def _stopped(row: Row) -> bool:
    return row.exit_status not in (Exit.OK, Exit.WRONG)


def _show(session: Session, screen: Screen, debug: bool) -> None:
    for family, rows in by_family(session.rows).items():
        show_failures(rows, screen, debug)
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
        screen.prose(f"{family}, {dtypes}, on {describe(session.device)}, seed {session.seed}", rest="  ")
        session.say_replaced(screen)
        screen.say()
        # Most machines skip nothing, and lines are short.
        counts = [*_COUNTS, "skipped"] if any(row.status == "skipped" for row in rows) else _COUNTS
        columns = [Column("ver", "right", drop=0), Column("verdict")]
        columns += [Column(name, "right") for name in counts]
        columns += [Column("shapes", "right", drop=2), Column("blocks", "right", drop=1)]
        columns += [Column(session.bound, "right"), Column("same bits", short="same", drop=3)]
        screen.table(columns, [_line(entry, counts) for entry in summarise(rows, session.planned)])
        screen.say()
        if any(row.status in ("refused", "skipped") for row in rows):
            show_refusals(rows, screen)
            screen.say()
    if len({row.family for row in session.rows}) > 1:
        screen.prose(_total(session.rows))


def _total(rows: Sequence[Row]) -> str:
    """What became of all rows of several families, in one line."""
    statuses = Counter(row.status for row in rows)
    versions = len({(row.family, row.version) for row in rows})
    counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    return f"{len({row.family for row in rows})} families, {versions} versions, {len(rows):,} rows: {counts}"


def _line(entry: dict[str, Any], names: Sequence[str]) -> list[str]:
    counts = [str(entry[name]) for name in (*names, "shapes", "blocks")]
    same = {True: "yes", False: "no", None: ""}[entry["deterministic"]]
    return [str(entry["version"]), _verdict(entry), *counts, percent(entry["worst_used"]), same]


def _verdict(entry: dict[str, Any]) -> str:
    if entry["wrong"]:
        return "fail"
    if entry["stopped"]:
        ends = [status for status in entry["statuses"] if STATUSES[status] not in (Exit.OK, Exit.WRONG)]
        return ends[0] if len(ends) == 1 else "stopped"
    # Right so far is not right: the rows that are missing may be the wrong ones.
    if entry["rows"] < entry["planned"]:
        return f"{entry['rows']} of {entry['planned']} rows"
    return "pass" if entry["passed"] else "skipped" if entry["skipped"] else "refused"
