"""`kbench compare`: which of two is faster, timed alternately, launch by launch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import options as o
from kbench.cli.compare_shown import NOTHING_COMPARED, Shown, show
from kbench.cli.run import not_run
from kbench.cli.screen import Screen
from kbench.errors import Exit, UsageError, worst
from kbench.grammar import parse_dtype, parse_params, parse_sizes, several
from kbench.measure.ab_statistics import Rule
from kbench.results.compared import write_comparison
from kbench.results.store import require_writable
from kbench.selection import Selection
from kbench.sides import Side, labels, parse_sides

if TYPE_CHECKING:
    from kbench.compare import Answer, CompareBench, PlannedSide

EXAMPLES = (
    "kbench compare layernorm_forward:5 layernorm_forward:6",
    "kbench compare layernorm_forward:6 --block-sizes 128,512",
    "kbench compare residual_forward:2@PACKETS=1 residual_forward:2@PACKETS=4",
    "kbench compare layernorm_forward:6 mine.cu --fail-if-slower --least 2%",
)


# --------------------------------------------------------------------------------------------- options


def _share(what: str, form: str, low: float, high: float) -> Any:
    def parse(text: str | float) -> float:
        if isinstance(text, float):  # the default
            return text
        # 0.5 alone could be half of it all, or half a percent.
        if not text.endswith("%"):
            raise UsageError(f"{what} {text!r} is not a percentage", form)
        try:
            value = float(text.removesuffix("%")) / 100
        except ValueError:
            raise UsageError(f"{what} {text!r} is not a percentage", form) from None
        if not low <= value <= high:
            raise UsageError(f"{what} {text} is out of range", form)
        return value

    return parse


def _seconds(text: str | float) -> float:
    form = "give seconds above 0, such as 10"
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--budget {text!r} is not a number", form) from None
    if not 0 < value <= 100_000:
        raise UsageError(f"--budget {text} is out of range", form)
    return value


_confidence = _share("--confidence", "from 50% to 99.9999%, such as 99.9%", 0.5, 0.999999)
_least = _share("--least", "from 0% to 100%, such as 0.5%", 0.0, 1.0)
_resolution = _share("--resolution", "from 0.01% to 50%, such as 0.25%", 0.0001, 0.5)

SidesArgument = Annotated[
    list[str], typer.Argument(metavar="SIDE [SIDE]", hidden=True, autocompletion=o.complete_target)
]
FamilyOption = Annotated[
    str | None, typer.Option("--family", metavar="NAME", help="The family of .cu files, where their names do not say.")
]
VersionOption = Annotated[
    str | None,
    typer.Option(
        "--version", "--versions", metavar="N", help="Of sides that name none; of a .cu file, whose plan it is."
    ),
]
BlocksOption = Annotated[
    str | None,
    typer.Option(
        "--block-sizes",
        "--block-size",
        metavar="N[,N]",
        help="Threads per block of both sides, or of each. Left out: the best in results/best.json, else about 256.",
    ),
]
ConfidenceOption = Annotated[
    float,
    typer.Option(
        "--confidence", metavar="P%", parser=_confidence, help="Of the interval: 99.9% if left out.", show_default=False
    ),
]
LeastOption = Annotated[
    float,
    typer.Option(
        "--least",
        metavar="P%",
        parser=_least,
        help="Differences below it do not count: 0.5% if left out.",
        show_default=False,
    ),
]
ResolutionOption = Annotated[
    float | None,
    typer.Option(
        "--resolution",
        metavar="P%",
        parser=_resolution,
        help="Half the interval to aim at. Half of --least if left out.",
    ),
]
BudgetOption = Annotated[
    float,
    typer.Option("--budget", metavar="SECONDS", parser=_seconds, help="Of timing, at most, unless both are slow."),
]
FailOption = Annotated[
    bool, typer.Option("--fail-if-slower", help="Exit with status 1 if the second side is slower, by --least or more.")
]


# --------------------------------------------------------------------------------------------- command


def compare(
    sides: SidesArgument,
    version: VersionOption = None,
    family: FamilyOption = None,
    block_sizes: BlocksOption = None,
    param: o.ParamOption = None,
    size: o.SizeOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
    confidence: ConfidenceOption = 0.999,
    least: LeastOption = 0.005,
    resolution: ResolutionOption = None,
    budget: BudgetOption = 10.0,
    fail_if_slower: FailOption = False,
    seed: o.SeedOption = None,
    device: o.DeviceOption = "auto",
    family_dir: o.FamilyDirOption = None,
    time_limit: o.TimeLimitOption = 30.0,
    workers: o.WorkersOption = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Prove two versions of one family, then time them alternately: which is faster, and how sure is that?

    SIDE is FAMILY:VERSION, such as layernorm_forward:6, or a .cu file whose kernels stand in place of the family's.
    Either may end in a block size, in values of parameters that its version declares, or in both: @512, @BATCH=1,
    @512,BATCH=1. FAMILY:5,6 names both sides at once. --param is for both sides, where their versions declare it.

    The answer is the ratio of their times with its interval, or "no difference seen" with the smallest that would
    have been. Sides that are the same machine code show the noise. On the emulator both are proven, and not timed.
    """
    screen = Screen(json)
    params = parse_params(param or [])
    if name := several(params):
        what = f"compare takes one value of a parameter, and --param {name} has several"
        one, other = params[name][:2]
        raise UsageError(what, f"give one, or write FAMILY:N@{name}={one} FAMILY:N@{name}={other}")
    pair = parse_sides(sides, family, version, block_sizes, params)
    rule = Rule(confidence, least, resolution or least / 2 or Rule.resolution, budget_s=budget)
    select = Selection(
        [], "run", sizes=parse_sizes(size or []), params=params, preset=preset, dtype=parse_dtype(dtype, "compare")
    )
    options = o.bench_options(
        device=device,
        family_dir=family_dir,
        seed=seed,
        rtol=None,
        atol=None,
        time_limit=time_limit,
        workers=workers,
        debug=debug,
    )
    from kbench.compare import CompareBench

    with CompareBench(options, screen.note) as bench:
        if bench.fallback:
            screen.note(f"no GPU ({bench.fallback}): the CPU emulator proves both sides, and times neither")
        if bench.device_kind == "cuda":
            require_writable(results)
        planned = bench.sides(pair, select, results)
        _note_contracts(pair, screen)
        names = labels(pair, [side.job.block for side in planned], [side.job.params for side in planned])
        again = _command(planned, bench, rule)
        with screen.progress([f"{names[0]} and {names[1]}"]):
            answer = bench.compare(planned, rule, again)
        shown = Shown(names, planned, answer, bench.device, bench.device_kind, bench.seed)
    status = _status(answer, shown, fail_if_slower)
    document = _document(shown, planned, status)
    path = write_comparison(results, again, document) if answer.comparison is not None else None
    screen.document("compare", {**document, **({"record": str(path)} if path is not None else {})})
    for row in answer.rows:
        if error := not_run(row):
            raise error
    show(shown, screen, debug)
    if path is not None:
        screen.say(f"record: {path}")
    if status == Exit.NOTHING:
        screen.note(NOTHING_COMPARED)
    return int(status)


def _status(answer: Answer, shown: Shown, fail_if_slower: bool) -> Exit:
    if any(error := not_run(row) for row in answer.rows):
        return worst([error.exit_status for row in answer.rows if (error := not_run(row)) is not None])
    failed = worst([row.exit_status for row in answer.rows])
    if failed != Exit.OK:
        return failed
    if answer.comparison is None:
        return Exit.NOTHING
    return Exit.REGRESSION if fail_if_slower and shown.verdict == "A faster" else Exit.OK


def _document(shown: Shown, planned: Sequence[PlannedSide], status: Exit) -> dict[str, Any]:
    sides = [
        {
            "label": label,
            "file": side.side.file,
            "block_from": side.why,
            "params_from": side.params_from,
            "row": row.to_dict(),
        }
        for label, side, row in zip(shown.names, planned, shown.answer.rows, strict=True)
    ]
    return {
        "device": shown.device,
        "device_kind": shown.device_kind,
        "seed": shown.seed,
        "exit_status": int(status),
        "verdict": shown.verdict,
        "answer": shown.sentence,
        "sides": sides,
        "comparison": shown.answer.comparison,
    }


def _note_contracts(sides: Sequence[Side], screen: Screen) -> None:
    """Say which `.py` files do not count: a plan that was changed beside a kernel would otherwise seem to run."""
    for side in sides:
        if side.file and (beside := Path(side.file).with_suffix(".py")).is_file():
            screen.note(
                f"{beside} is not read: {side.family}'s own plan of version {side.version} launches {side.file}"
            )


def _command(planned: Sequence[PlannedSide], bench: CompareBench, rule: Rule) -> str:
    """What repeats this comparison on the same inputs."""
    job = planned[0].job
    words = ["kbench", "compare", *(side.side.at(side.job.block, side.job.params) for side in planned)]
    if files := [side for side in planned if side.side.file]:
        words += ["--family", job.family]
        words += ["--version", str(files[0].job.version)]
    for name, size in job.sizes.items():
        words += ["--size", f"{name}={size}"]
    words += ["--dtype", job.dtype, "--seed", str(bench.seed), "--device", bench.device_kind]
    for option, value, usual in (
        ("confidence", rule.confidence, Rule.confidence),
        ("least", rule.least, Rule.least),
        ("resolution", rule.resolution, rule.least / 2),
    ):
        if value != usual:
            words += [f"--{option}", f"{100 * value:.10g}%"]
    if rule.budget_s != Rule.budget_s:
        words += ["--budget", f"{rule.budget_s:g}"]
    for folder in bench.options.family_dirs:
        words += ["--family-dir", str(folder)]
    return shlex.join(words)
