"""`kbench bisect`: the first commit that made a version slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import options as o
from kbench.cli.bisect_shown import document, show, trial_text, value_text
from kbench.cli.screen import Screen
from kbench.errors import CannotRunError, Exit, UsageError
from kbench.grammar import parse_block_size, parse_dtype, parse_params, parse_sizes, parse_targets, several
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.bisect.measure import Kernels
    from kbench.bisect.search import Commit, Found, Trial
    from kbench.catalog import Catalog

EXAMPLES = (
    "kbench bisect layernorm_forward:6 --good v1.2",
    "kbench bisect gelu_forward:2 --good HEAD~40 --metric registers --arch sm_90",
)
TIME = "time"
HEAD = "HEAD"


def bisect(
    target: o.TargetArgument,
    good: Annotated[
        str, typer.Option("--good", metavar="REV", help="A commit, tag or branch at which it was fast enough.")
    ],
    bad: Annotated[str, typer.Option("--bad", metavar="REV", help="One at which it is slower.")] = HEAD,
    version: o.VersionsOption = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric", metavar="NAME", help="time needs a GPU; registers, static_shared, instructions do not."
        ),
    ] = TIME,
    threshold: Annotated[
        str | None,
        typer.Option("--threshold", metavar="P%", help="How much slower is slower: 3% of a time, anything of a count."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="SM", help="For counts: sm_80, 86, 89, 90, 100, 120. The version's, or sm_90."),
    ] = None,
    block_size: o.BlockOption = None,
    param: o.ParamOption = None,
    size: o.SizesOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
    family_dir: o.FamilyDirOption = None,
    time_limit: o.TimeLimitOption = 30.0,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Find the first commit that made a version slower, by halving the commits between a good and a bad one.

    TARGET is FAMILY:VERSION, such as layernorm_forward:6. Commits are those along first parents of the repository that
    holds the kernels; each is checked out beside the work tree, which may have changes and stays as it is.

    A commit's kernels are timed alternately with the good one's, as `kbench compare` does, so that whatever the machine
    does happens to both. Commits that leave the kernels' files or machine code alone are not measured; those that do
    not compile, or compute something wrong, are passed over, and the answer then names several commits.

    Exit status 0 if a commit or a range is named, 4 if the bad commit is not slower than the good one.
    """
    from kbench.bisect.measure import Kernels
    from kbench.bisect.repository import Repository, WorkTrees
    from kbench.bisect.search import search
    from kbench.catalog import load_catalog
    from kbench.report.metrics import metric_of

    screen = Screen(json)
    family, number = _version(target, version)
    least = _least(threshold, metric)
    block = parse_block_size(block_size) if block_size is not None else None
    sizes, one_dtype = parse_sizes(size or []), parse_dtype(dtype, "bisect")
    selection = Selection(
        parse_targets([f"{family}:{number}"]), "run", sizes=sizes, preset=preset, dtype=one_dtype, params=_params(param)
    )
    _require_metric(metric, arch)
    folders = [folder.resolve() for folder in family_dir or ()]
    folder = _folder(load_catalog(folders), family, number)
    repository = Repository.of(folder)
    commits = repository.commits(repository.resolve(good, "--good"), repository.resolve(bad, "--bad"), family)
    with WorkTrees(repository) as trees:
        position = folders.index(folder) if folder in folders else 0
        kernels = Kernels(trees, tuple(each for each in folders if each != folder), position)
        if metric == TIME:
            options = o.bench_options(
                device="cuda", family_dir=None, seed=None, rtol=None, atol=None, time_limit=time_limit, workers=None,
                debug=debug,
            )  # fmt: skip
            found = _timed(kernels, commits, selection, block, least, options, results, screen)
        else:
            found = _counted(kernels, commits, selection, block, least, arch, metric, screen, search)
    status = Exit.OK if found.suspects else Exit.NOTHING
    content = {"family": family, "version": number, "metric": metric_of(metric).name, "threshold": least}
    screen.document("bisect", {"exit_status": int(status), **content, **document(found, commits)})
    show(found, f"{family}:{number}", metric_of(metric), commits, screen)
    return int(status)


# ------------------------------------------------------------------------------------------ what is asked


def _version(target: str, option: str | None) -> tuple[str, int]:
    """The one family and version. Raises UsageError."""
    found = parse_targets([target], option)[0]
    if found.versions is None or len(found.versions) != 1:
        raise UsageError(f"bisect takes one version of one family, not {target!r}", "write FAMILY:VERSION")
    return found.family, found.versions[0]


def _params(texts: list[str] | None) -> dict[str, list[int]]:
    """Each parameter that is named, with its one value. Raises UsageError."""
    params = parse_params(texts or [])
    if name := several(params):
        raise UsageError(f"bisect takes one value of a parameter, and --param {name} has several", "choose one")
    return params


def _least(threshold: str | None, metric: str) -> float:
    from kbench.report.thresholds import parse_threshold

    if threshold is None:
        return 0.03 if metric == TIME else 0.0
    return parse_threshold(threshold, "--threshold")


def _require_metric(metric: str, arch: str | None) -> None:
    """Raises before anything is checked out: UsageError, CannotRunError without a GPU or NVRTC."""
    if metric == TIME:
        from kbench.device.open import choose_kind

        if arch is not None:
            raise UsageError("--arch is for counts: times are of the GPU that is here", "leave it out, or add --metric")
        try:
            choose_kind("cuda")
        except CannotRunError as error:
            raise CannotRunError(error.message, "counts need none: --metric registers, say") from None
        return
    from kbench.device.cuda.compile import nvrtc_version
    from kbench.inspect.architectures import architecture_of

    nvrtc_version()
    if arch is not None:
        architecture_of(arch)


def _folder(catalog: Catalog, family: str, number: int) -> Path:
    """Where the version's files are today; of a version that is gone, the family's."""
    sources = catalog[family].sources
    return Path(sources.get(number) or sources[min(sources)]).parent.resolve()


# -------------------------------------------------------------------------------------------- searching


def _counted(
    kernels: Kernels,
    commits: Sequence[Commit],
    selection: Selection,
    block: int | None,
    least: float,
    arch: str | None,
    metric: str,
    screen: Screen,
    search: Callable[..., Found],
) -> Found:
    from kbench.bisect.measure import CountMeasurer, job_of
    from kbench.inspect.examine import arch_of
    from kbench.report.metrics import metric_of

    with kernels.trees.lent(commits[0]) as tree:
        catalog = kernels.catalog(tree)
        job = job_of(catalog, selection, block)
        chosen = arch_of(job.family, catalog.version(job.family, job.version), arch)
        # Rows are compiled by the plain name of an architecture; what a version needs of it, compile_row finds again.
        job = replace(job, arch=arch or chosen.rstrip("abf"))
    measurer = CountMeasurer(kernels, commits[0], job, metric_of(metric), least)
    value = measurer.begin()
    screen.note(f"{commits[0].short}, the good commit: {metric} {value_text(value)}")
    return search(commits, _noted(measurer, measurer.metric.unit, screen))


def _timed(
    kernels: Kernels,
    commits: Sequence[Commit],
    selection: Selection,
    block: int | None,
    least: float,
    options: Any,
    results: Path,
    screen: Screen,
) -> Found:
    from kbench.bisect.measure import TimeMeasurer, code_of
    from kbench.bisect.search import search
    from kbench.compare import CompareBench
    from kbench.measure.ab_statistics import Rule
    from kbench.sides import Side

    good = commits[0]
    folders = tuple(kernels.folders(kernels.trees.folder(good)))
    target = selection.targets[0]
    assert target.versions is not None
    side = Side(target.family, target.versions[0], block)
    # What is to be found has to be seen with certainty, and a quarter of it told apart.
    rule = Rule(least=min(least / 2, Rule.least) or Rule.least, resolution=max(least / 4, 0.001))
    with CompareBench(replace(options, family_dirs=folders), screen.note) as bench:
        planned = bench.sides((side, side), selection, results)[0]
        code = code_of(kernels, planned.job, str(bench.device.get("arch", "")))
        measurer = TimeMeasurer(kernels, good, bench, planned, rule, least, code)
        measurer.begin()
        return search(commits, _noted(measurer, "ms", screen))


def _noted(test: Callable[[Commit], Trial], unit: str, screen: Screen) -> Callable[[Commit], Trial]:
    """A test that says what it found: minutes may pass until the answer."""

    def noted(commit: Commit) -> Trial:
        with screen.progress([f"{commit.short} {commit.subject}"]):
            trial = test(commit)
        screen.note(trial_text(trial, unit))
        return trial

    return noted
