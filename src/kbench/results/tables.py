"""Rows of results as text: the cells that the terminal shows, and the CSV and Markdown files of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbench.results.best import contest, ties, winners
from kbench.results.facts import Card, Facts, facts_of
from kbench.results.schema import Row
from kbench.results.store import TABLES, replace_text

if TYPE_CHECKING:
    import pandas as pd

WINNER = "*"
TIED = "~"


def worst_used(row: Row) -> float | None:
    """The largest share of the error bound that any output used; None without a finite one."""
    outputs = row.verdict["outputs"] if row.verdict else []
    used = [output["used"] for output in outputs]
    return max(used) if used and None not in used else None


def milliseconds(value: float) -> str:
    """A time in milliseconds with four significant digits, at most six places and never an exponent."""
    if value <= 0:
        return f"{value:.3f}"
    places = 3 - math.floor(math.log10(value))
    return f"{value:.{min(max(places, 0), 6)}f}"


def count_text(value: float) -> str:
    """A count with all of its digits, never an exponent: "16384"; what is no whole number with six digits."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def interval(row: Row) -> str:
    """The interval of the median, such as "0.497..0.500"; empty where nothing was timed."""
    taken = row.measurement
    return f"{milliseconds(taken['low_ms'])}..{milliseconds(taken['high_ms'])}" if taken else ""


def spread(row: Row) -> str:
    """How far the interval of the median reaches from it, such as "0.4%"; empty where nothing was timed."""
    taken = row.measurement
    if not taken or not taken["median_ms"] > 0:
        return ""
    reach = max(taken["high_ms"] - taken["median_ms"], taken["median_ms"] - taken["low_ms"])
    return f"{reach / taken['median_ms']:.1%}"


def share_of_bound(row: Row) -> str:
    """How much of the error bound was used: "12%"; empty where there is no such number."""
    return percent(worst_used(row))


def percent(used: float | None) -> str:
    """A share as "12%", or "<1%" for what would round to nothing, or ">999%"."""
    if used is None:
        return ""
    if 0 < used < 0.01:
        return "<1%"
    return f"{used:.0%}" if used < 10 else ">999%"


def determinism(row: Row) -> str:
    """Whether repeats were bitwise equal: "yes", "no", or empty where it was not asked."""
    same = row.verdict.get("deterministic") if row.verdict else None
    return "" if same is None else "yes" if same else "no"


def mark(row: Row, best: Row | None) -> str:
    """ "*" for the winner `best` itself, "~" for a row that the measurement does not tell apart from it."""
    if best is None:
        return ""
    return WINNER if row is best else TIED if ties(row, best) else ""


def by_family(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each family, in the order in which they came."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    return families


def by_problem(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one family in groups of one device, problem, dtype and cache mode, in the order in which they came."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.device, row.problem, row.dtype, row.cache_mode), []).append(row)
    return list(groups.values())


def frame(rows: Sequence[Row], card: Card | None = None) -> pd.DataFrame:
    """One line a row, one column a fact; one column for each size. Times are milliseconds, shares 1 for all."""
    import pandas as pd  # 0.3 s: only for whoever writes tables

    best = winners(rows)
    lines = [_facts(row, best.get(contest(row)), facts_of(row, card or Card())) for row in rows]
    # Whole numbers stay whole beside rows that lack them.
    return pd.DataFrame(lines, dtype=object)


def write_tables(folder: Path, run_id: str, rows: Sequence[Row], card: Card | None = None) -> list[Path]:
    """Write `tables/ID/FAMILY.csv` and `.md` below the results folder; returns the paths.

    card: of the device that they ran on. Raises CannotRunError where they cannot be written.
    """
    tables = {family: frame(mine, card) for family, mine in by_family(rows).items()}
    return [path for family, table in tables.items() for path in write_table(folder, run_id, family, table)]


def write_table(folder: Path, run_id: str, name: str, table: pd.DataFrame) -> list[Path]:
    """Write `tables/ID/NAME.csv` and `.md` below the results folder; returns the paths. Raises CannotRunError."""
    written = []
    for suffix, text in ((".csv", table.to_csv(index=False)), (".md", markdown(table))):
        path = folder / TABLES / run_id / (name + suffix)
        replace_text(path, text)
        written.append(path)
    return written


def markdown(table: pd.DataFrame) -> str:
    """A Markdown table of the columns that hold anything, with a bar in a cell escaped."""
    shown = table.dropna(axis="columns", how="all")
    lines = [list(shown.columns), ["---"] * len(shown.columns)]
    lines += [[_cell(value) for value in line] for line in shown.itertuples(index=False)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _facts(row: Row, best: Row | None, facts: Facts) -> dict[str, Any]:
    taken = row.measurement or {}
    return {
        "family": row.family,
        "version": row.version,
        "idea": row.idea,
        "dtype": row.dtype,
        **row.sizes,
        "block": row.block,
        **row.params,
        "status": row.outcome,
        "bound_used": worst_used(row),
        "deterministic": determinism(row) or None,
        "median_ms": taken.get("median_ms"),
        "low_ms": taken.get("low_ms"),
        "high_ms": taken.get("high_ms"),
        "q1_ms": taken.get("q1_ms"),
        "q3_ms": taken.get("q3_ms"),
        "samples": taken.get("count") or (len(taken["samples_ms"]) if "samples_ms" in taken else None),
        "cache": row.cache_mode if taken else None,
        "mark": mark(row, best) or None,
        **asdict(facts),
        "kernels": " + ".join(kernel["name"] for kernel in row.kernels) or None,
        "traffic": row.traffic,
        "flops": row.flops,
        "overridden": row.overridden or None,
        "seed": row.seed,
        "device": row.device,
        "reason": row.reason or None,
        "note": taken.get("note") or None,
    }


def _cell(value: Any) -> str:
    if value is None or value != value:  # pandas turns an absent number into NaN, which differs from itself
        return ""
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
