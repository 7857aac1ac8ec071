"""`kbench plot`: the pictures of a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbench.cli import options as o
from kbench.cli.screen import Screen
from kbench.errors import Exit, UsageError
from kbench.results.store import LATEST, TABLES, find_run, read_run, require_writable

EXAMPLES = ("kbench plot", "kbench plot latest -o sweep.html")

RunArgument = Annotated[str, typer.Argument(metavar="RUN", show_default=False, hidden=True)]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE.html", help="Also draw the run: one page, as `kbench plot` does.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE.html", help="The page. tables/ID/plot.html of the results if left out."
    ),
]


def require_page(path: Path, option: str) -> None:
    """Raises UsageError for a name that a page cannot have: a run file named by mistake would be lost."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{option} {path} is not the name of a page", "it has to end in .html")


def require_page_writable(path: Path, option: str) -> None:
    """Raises UsageError for a folder of this name, CannotRunError where no file can be written."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder", f"choose another file with {option} FILE.html")
    require_writable(path.parent, below=(), hint=f"choose another file with {option} FILE.html")


def plot(
    run: RunArgument = LATEST,
    output: OutputOption = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Draw a run: one HTML page that needs neither network nor script.

    RUN is a run file, an id or a part of one, or latest (the same if left out).

    Of each problem: time over block size per version with 95% intervals, a heat map, and what each version gains
    over the first; of the run: a summary and the roofline with the ceilings that were measured. A run of the
    emulator gives a page of verdicts.
    """
    from kbench.plot.page import write_page

    screen = Screen(json)
    if output is not None:
        require_page(output, "-o")
    found = read_run(find_run(results, run))
    for warning in found.warnings:
        screen.note(warning)
    path = output if output is not None else results / TABLES / found.path.stem / "plot.html"
    problems = write_page(path, found)
    screen.document("plot", {"run": str(found.path), "page": str(path), "problems": problems})
    screen.say(f"page: {path} (problems: {problems})")
    return int(Exit.OK)
