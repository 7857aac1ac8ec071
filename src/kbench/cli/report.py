"""`kbench report`: what became faster, slower or wrong between two sets of records, and an exit status for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import options as o
from kbench.cli.plot import require_page
from kbench.cli.report_outputs import Output, require_apart
from kbench.cli.screen import Screen
from kbench.errors import Exit, UsageError
from kbench.report.model import FAIL_ON, Report
from kbench.report.sources import MissingBaseline, Source, find_sources
from kbench.report.thresholds import NONE, Thresholds, parse_fail_on, parse_threshold
from kbench.results.baselines import PREVIOUS, baseline_names
from kbench.results.store import LATEST

# What needs numpy is imported where it is used: every command loads this file.
if TYPE_CHECKING:
    from kbench.report.build import Settings
    from kbench.report.config import Config
    from kbench.report.records import Loaded

EXAMPLES = (
    "kbench report baseline latest",
    'kbench report git:main latest --markdown "$GITHUB_STEP_SUMMARY" --github',
    "kbench report previous latest --threshold 5% --fail-on regression,unclear",
)
FORMATS = ("markdown", "junit", "html", "sarif")

BeforeArgument = Annotated[str, typer.Argument(metavar="BEFORE", hidden=True, autocompletion=lambda: _names())]
AfterArgument = Annotated[str, typer.Argument(metavar="AFTER", hidden=True, autocompletion=lambda: _names())]
ThresholdOption = Annotated[
    str | None,
    typer.Option("--threshold", metavar="P%", help="Changes of time below it do not count: 3% if left out."),
]
FailOnOption = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="LIST",
        help=f"What ends in exit status 1: some of {', '.join(FAIL_ON)}; or {NONE}. Left out: regression.",
        autocompletion=lambda incomplete: [name for name in (*FAIL_ON, NONE) if name.startswith(incomplete)],
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Thresholds and budgets. ./kbench.toml if left out, where it is."),
]
FirstRunOption = Annotated[
    bool, typer.Option("--first-run", help="That BEFORE is not there is no error: all rows of AFTER are new.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Show every row, unchanged ones too.")]
GithubOption = Annotated[bool, typer.Option("--github", help="Also print annotations for GitHub Actions.")]
SelfTestOption = Annotated[
    bool, typer.Option("--self-test", help="Slow a kernel of AFTER, in memory: 0 only if the report finds it.")
]
RerunOption = Annotated[
    bool,
    typer.Option("--rerun-unclear", help="Measure AFTER's unclear rows again on its GPU, add the rounds, and decide."),
]


def _file_option(name: str, text: str) -> object:
    return typer.Option(f"--{name}", metavar="FILE", help=f"{text} - is standard output.")


def _names() -> list[str]:
    return [LATEST, PREVIOUS, *baseline_names(Path("results"))]


def report(
    before: BeforeArgument,
    after: AfterArgument = LATEST,
    threshold: ThresholdOption = None,
    fail_on: FailOnOption = None,
    config: ConfigOption = None,
    first_run: FirstRunOption = False,
    whole: AllOption = False,
    markdown: Annotated[
        str | None, _file_option("markdown", "Write Markdown, for a comment or a job's summary.")
    ] = None,
    junit: Annotated[str | None, _file_option("junit", "Write JUnit XML.")] = None,
    sarif: Annotated[str | None, _file_option("sarif", "Write SARIF.")] = None,
    html: Annotated[str | None, _file_option("html", "Write a page with pictures.")] = None,
    github: GithubOption = False,
    rerun_unclear: RerunOption = False,
    self_test: SelfTestOption = False,
    family_dir: o.FamilyDirOption = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Compare two sets of records row by row: faster, slower, same, unclear, wrong, new, gone.

    BEFORE and AFTER are a run file, the id of a run or a part of it, latest, previous, a baseline's name (`kbench
    sweep --save NAME`), or git:REV, the baseline as it is committed at that revision (git:REV:NAME for another than
    baseline). Commas join several: their rounds are put together. AFTER is latest if it is left out.

    A regression is slower beyond doubt and beyond the threshold. Rows of another GPU, driver or compiler are not
    comparable. Registers, shared memory and other counts are compared as they are, with the same compiler. Thresholds
    of families, and budgets, stand in kbench.toml.

    Wrong rows end in exit status 3 or 6, regressions in 1; if nothing could be compared, it is 4.
    """
    from kbench.cli.report_rerun import growing, rerun
    from kbench.report.build import Settings, build
    from kbench.report.config import read_config

    screen = Screen(json)
    limits = _limits(read_config(config), threshold)
    settings = Settings(limits, _fail_on(fail_on, limits), tuple(family_dir or ()), rerun_before=not rerun_unclear)
    outputs = _outputs({"markdown": markdown, "junit": junit, "sarif": sarif, "html": html})
    require_apart(outputs, json, github)
    if self_test and (rerun_unclear or first_run or outputs):
        raise UsageError("--self-test writes no report and measures nothing", "leave the other options out")

    old, new = _before(results, before, first_run, screen), find_sources(results, after)
    if rerun_unclear:
        growing(new)
    files = [Path(source.path) for source in (*(old or ()), *new) if source.data is None]
    for output in outputs:
        if not output.to_stdout:
            output.require_writable(files)

    with _no_collections():
        sides = (None if old is None else _load(before, old, screen)), _load(after, new, screen)
        if self_test:
            return _self_test(sides[0], sides[1], settings, screen)
        built = build(*sides, settings)
        if rerun_unclear and built.unclear:
            rerun(built.unclear, new, results, screen)
            # The files have grown: read again what is there, not what should be.
            built = build(None if old is None else _load(before, old, screen), _load(after, new, screen), settings)
        return _show(built.report, outputs, github, whole, screen)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without Python's search for cycles: records have none, and a hundred thousand would be searched over and over."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _limits(config: Config, threshold: str | None) -> Config:
    """The file's limits; the command line's threshold stands in place of the usual one, not of a family's own."""
    if threshold is None:
        return config
    thresholds = Thresholds(parse_threshold(threshold, "--threshold"), config.thresholds.by_family)
    return replace(config, thresholds=thresholds)


def _fail_on(text: str | None, config: Config) -> tuple[str, ...]:
    if text is not None:
        return parse_fail_on(text)
    return config.fail_on if config.fail_on is not None else ("regression",)


def _outputs(files: dict[str, str | None]) -> list[Output]:
    found = []
    for name, file in files.items():
        if file is None:
            continue
        if not file:
            raise UsageError(f"--{name} names no file", "is a variable empty? - is standard output")
        if name == "html" and file != "-":
            require_page(Path(file), "--html")
        found.append(Output(f"--{name}", file, _renderer(name)))
    return found


def _renderer(name: str) -> Callable[[Report], str]:
    def render(report: Report) -> str:
        from importlib import import_module

        text: str = import_module(f"kbench.report.surfaces.{name}").render(report)
        return text

    return render


def _before(results: Path, name: str, first_run: bool, screen: Screen) -> list[Source] | None:
    try:
        return find_sources(results, name)
    except MissingBaseline as missing:
        if not first_run:
            raise
        screen.note(f"first run: {missing.message}")
        return None


def _load(name: str, sources: list[Source], screen: Screen) -> Loaded:
    from kbench.report.records import load

    loaded = load(name, sources)
    for warning in loaded.warnings:
        screen.note(warning)
    return loaded


def _self_test(before: Loaded | None, after: Loaded, settings: Settings, screen: Screen) -> int:
    from kbench.report.self_test import self_test

    assert before is not None  # --first-run goes with no self-test
    found = self_test(before, after, settings)
    status = Exit.OK if found.fires else Exit.NOTHING
    screen.document("report", {"self_test": found.fires, "told": found.told, "exit_status": int(status)})
    screen.prose(f"the gate {'fires' if found.fires else 'does NOT fire'}: {found.told}", rest="  ")
    return int(status)


def _show(report: Report, outputs: list[Output], github: bool, whole: bool, screen: Screen) -> int:
    """Files first: a reader that goes away while the terminal is written to must not cost them."""
    for output in outputs:
        if not output.to_stdout:
            output.write(report)
    if screen.json:
        screen.document("report", report.to_dict())
    elif alone := next((output for output in outputs if output.to_stdout), None):
        alone.write(report)
        return report.exit_status
    else:
        from kbench.cli.report_shown import show

        show(report, screen, whole)
        for output in outputs:
            screen.say(f"{output.option.removeprefix('--') + ':':10}{output.file}")
    if github:
        Output("--github", "-", _renderer("github")).write(report)
    return report.exit_status
