"""`kbench history`: one family over all recorded runs, and where its numbers changed."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import options as o
from kbench.cli.plot import require_page
from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.errors import Exit, UsageError
from kbench.grammar import parse_block_sizes, parse_dtypes, parse_sizes, parse_targets
from kbench.results.baselines import baseline_path
from kbench.results.store import find_run, is_path, require_writable, run_files

if TYPE_CHECKING:
    from kbench.history.series import Series, Wanted
    from kbench.results.store import Run

EXAMPLES = (
    "kbench history layernorm_forward:6",
    "kbench history layernorm_forward --block-sizes 256 --html history.html",
    "kbench history gelu_forward:2 --metric registers",
)

# The finding stays longest: it is what a history is for.
COLUMNS = (
    Column("ver", "right"), Column("block", "right"), Column("params", drop=5), Column("runs", "right", drop=3),
    Column("first", "right", drop=1), Column("last", "right", drop=4), Column("change", "right"),
    Column("trend", drop=2), Column("finding"),
)  # fmt: skip


def history(
    target: o.TargetArgument,
    version: o.VersionsOption = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric", metavar="NAME", help="time, or a count that runs hold: registers, spill_bytes, instructions."
        ),
    ] = "time",
    block_sizes: o.BlocksOption = None,
    size: o.SizesOption = None,
    dtype: o.DtypesOption = None,
    threshold: Annotated[
        str, typer.Option("--threshold", metavar="P%", help="Smaller changes of times do not count.")
    ] = "3%",
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="NAME", help="Also a baseline, or any run file. May be repeated."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Also a page with a picture of each series.")
    ] = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show a family's times, or counts, over all runs of the results folder: what changed, and since which run.

    TARGET is FAMILY or FAMILY:VERSIONS, such as layernorm_forward:6.

    A change is one that at least two runs agree on; a single run that stands out is "unconfirmed", and many small
    steps one way are a "creep". Runs with another driver, compiler or harness are not compared with those before them.
    """
    from kbench.history.series import Wanted, read_runs, series_of
    from kbench.plot.history import write_history
    from kbench.report.thresholds import parse_threshold

    screen = Screen(json)
    if html is not None:
        require_page(html, "--html")
        require_writable(html.parent, ())
    least = parse_threshold(threshold, "--threshold")
    targets = parse_targets([target], version)
    wanted = Wanted(
        targets[0].family,
        targets[0].versions,
        parse_dtypes(dtype) if dtype is not None else None,
        parse_block_sizes(block_sizes) if block_sizes is not None else None,
        parse_sizes(size or []),
    )
    runs = read_runs([*run_files(results).values(), *_named(results, baseline or [])], wanted.family, screen.note)
    found = series_of(runs, wanted, metric, least)
    status = Exit.OK if found else Exit.NOTHING
    content = {"family": wanted.family, "metric": metric, "threshold": least, "runs": [run.id for run in runs]}
    screen.document(
        "history", {"exit_status": int(status), **content, "series": [series.to_dict() for series in found]}
    )
    if not found:
        screen.note(_nothing(results, runs, wanted, metric))
        return int(status)
    _show(found, wanted.family, metric, screen)
    if html is not None:
        write_history(html, f"{wanted.family}: {metric} over {_runs(found)} runs", found)
        screen.say(f"page: {html}")
    return int(status)


def _named(folder: Path, names: Sequence[str]) -> list[Path]:
    """The files of --baseline: a baseline's name goes before an id. Raises UsageError for one that is not there."""
    found = []
    for name in names:
        path = Path(name) if is_path(name) else baseline_path(folder, name)
        path = path if path.is_file() or is_path(name) else find_run(folder, name)
        if not path.is_file():
            raise UsageError(f"{path} is not there", "--baseline takes a baseline's name, a run's id or a file")
        found.append(path)
    return found


def _nothing(folder: Path, runs: Sequence[Run], wanted: Wanted, metric: str) -> str:
    """Why there is nothing to show, and what there would be."""
    from kbench.history.series import metrics_in

    if not runs:
        return f"{folder} holds no runs; `kbench sweep` writes one"
    if not any(run.rows for run in runs):
        near = difflib.get_close_matches(wanted.family, _families(folder), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"none of {len(runs)} runs holds rows of {wanted.family}{meant}"
    known = metrics_in(runs, wanted)
    if known and metric not in known:
        have = f"what these rows have, for --metric: {', '.join(known)}"
        return f"no row of {wanted.family} has {'a proven time' if metric == 'time' else metric}; {have}"
    what = "proven time" if metric == "time" else metric
    return f"no row of {wanted.family} that was asked for has a {what} in {len(runs)} runs of {folder}"


def _families(folder: Path) -> list[str]:
    """The families that the runs of a folder are of."""
    from kbench.results.store import read_run

    found: set[str] = set()
    for path in run_files(folder).values():
        try:
            found |= {row.family for row in read_run(path).rows}
        except UsageError:
            continue
    return sorted(found)


def _runs(found: Sequence[Series]) -> int:
    return len({point.run for series in found for point in series.points})


def _show(found: Sequence[Series], family: str, metric: str, screen: Screen) -> None:
    """A table for each problem, dtype, mode and device, and below it what its series did."""
    groups: dict[object, list[Series]] = {}
    for series in found:
        key = series.key
        groups.setdefault((key.device, key.problem, key.dtype, key.cache_mode, key.kernel), []).append(series)
    for mine in groups.values():
        _heading(mine, family, metric, screen)
        screen.table(*_table(mine))
        screen.say()
        said = [*_breaks(mine), *(text for series in mine for text in _told(series))]
        for text in said:
            screen.prose(text, rest="    ")
        if said:
            screen.say()


def _heading(mine: Sequence[Series], family: str, metric: str, screen: Screen) -> None:
    from kbench.history.words import reach
    from kbench.results.conditions import mode_name

    key = mine[0].key
    unit = f"{metric} in {mine[0].metric.unit}" if mine[0].metric.unit else metric
    mode = f", {mode_name(key.cache_mode)}" if metric == "time" else ""
    screen.prose(f"{family}: {key.problem}, {key.dtype}{mode}; {unit} over {_runs(mine)} runs", rest="  ")
    screen.prose(f"on {key.device}{f', kernel {key.kernel}' if key.kernel else ''}", rest="  ")
    if commits := reach(mine):
        screen.prose(commits, rest="  ")
    screen.say()


def _table(mine: Sequence[Series]) -> tuple[list[Column], list[list[str]]]:
    from kbench.cli.sparkline import sparkline
    from kbench.history.ratio import percent
    from kbench.history.words import finding

    lines = []
    for series in mine:
        params = " ".join(f"{name}={value}" for name, value in series.key.params)
        points, ratio = series.points, series.ratio
        lines.append(
            [
                str(series.key.version), str(series.key.block), params, str(len(points)),
                _number(points[0].value, series), _number(points[-1].value, series),
                percent(ratio) if ratio is not None else "", sparkline([point.value for point in points]),
                finding(series),
            ]
        )  # fmt: skip
    kept = [i for i, column in enumerate(COLUMNS) if column.title != "params" or any(line[i] for line in lines)]
    return [COLUMNS[i] for i in kept], [[line[i] for i in kept] for line in lines]


def _number(value: float, series: Series) -> str:
    from kbench.results.tables import count_text, milliseconds

    return count_text(value) if series.metric.exact else milliseconds(value)


def _breaks(mine: Sequence[Series]) -> list[str]:
    """Which runs of a table cannot be compared with those before: once, not of each version anew."""
    from kbench.history.words import when

    found = {(when(series.points[at]), why) for series in mine for at, why in series.breaks.items()}
    return [f"not comparable with the runs before: {run} ({why})" for run, why in sorted(found)]


def _told(series: Series) -> list[str]:
    from kbench.history.words import sentences

    return [f"version {series.key.version} at {series.key.place}: {text}" for text in sentences(series, breaks=False)]
