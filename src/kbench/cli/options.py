"""The options that commands share: their spelling, their help and their completion, once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.errors import KbenchError, UsageError

if TYPE_CHECKING:
    from kbench.catalog import Catalog
    from kbench.family import Family
    from kbench.sweep import Options

_OVERRIDES = "tolerance in place of the family's bound; such a row cannot win."
DEVICES = ("auto", "cuda", "emulator")
PRESETS = ("default", "small", "large")
DTYPES = ("fp32", "tf32", "bf16", "fp16")


# ------------------------------------------------------------------------------------------ completion


def _catalog(context: typer.Context) -> Catalog:
    from kbench.catalog import load_catalog

    return load_catalog([Path(folder) for folder in context.params.get("family_dir") or ()])


def complete_target(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Names of families, and after a name and a colon its versions, for the shell."""
    name, colon, number = incomplete.partition(":")
    try:
        catalog = _catalog(ctx)
        if not colon:
            return [(family, "") for family in catalog.names if family.startswith(name)]
        return [(f"{name}:{v.number}", v.idea) for v in catalog[name].versions if str(v.number).startswith(number)]
    except KbenchError:
        return []  # a shell that completes is no place for an error message


def _family(context: typer.Context) -> Family | None:
    """The first family that stands on the line already, if it can be loaded."""
    named = context.params.get("target") or context.params.get("targets")
    # While an option still lacks its value, the option parser leaves the words before it unassigned.
    targets = [named] if isinstance(named, str) else [*(named or context.args)]
    try:
        return _catalog(context)[targets[0].partition(":")[0]] if targets else None
    except KbenchError:
        return None


def complete_version(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Versions, with their ideas, of the family on the line."""
    family = _family(ctx)
    versions = family.versions if family is not None else ()
    return [(str(v.number), v.idea) for v in versions if str(v.number).startswith(incomplete)]


def complete_dtype(ctx: typer.Context, incomplete: str) -> list[str]:
    """dtypes of the family on the line, or all that there are."""
    family = _family(ctx)
    return [dtype for dtype in (family.dtypes if family is not None else DTYPES) if dtype.startswith(incomplete)]


def complete_preset(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets of the family on the line, or all that kbench's own families have."""
    family = _family(ctx)
    return [preset for preset in (family.presets if family is not None else PRESETS) if preset.startswith(incomplete)]


def complete_device(incomplete: str) -> list[str]:
    """Names of devices, for the shell."""
    return [device for device in DEVICES if device.startswith(incomplete)]


# --------------------------------------------------------------------------------------------- numbers


def _number(text: str, what: str, form: str, holds: Callable[[float], bool]) -> float:
    """A number on the command line. The option parser's own message would not repeat what was typed."""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{what} {text!r} is not a number", form) from None
    if not holds(value):  # NaN holds nowhere
        raise UsageError(f"{what} {text} is out of range", form)
    return value


def _whole(text: str, what: str, form: str, last: int, first: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not first <= int(text) <= last:
        raise UsageError(f"{what} {text!r} is not a whole number in range", form)
    return int(text)


def _seed(text: str) -> int:
    return _whole(text, "--seed", "give one from 0 to 2^63 - 1, such as 1", 2**63 - 1, 0)


def _workers(text: str) -> int:
    return _whole(text, "--workers", "give a number of threads from 1 to 1024", 1024, 1)


def _tolerance(text: str) -> float:
    return _number(text, "tolerance", "give a number of at least 0, such as 1e-3", lambda x: 0 <= x < math.inf)


def seconds(text: str) -> float:
    # Long enough for a night; a timer cannot wait for 10^300 seconds.
    return _number(text, "--time-limit", "give seconds above 0, such as 30", lambda x: 0 < x <= 100_000)


# --------------------------------------------------------------------------------------------- options

# Hidden from the help's list of arguments, where the option parser would add "<list[str]>": each command's own text
# says what a TARGET is.
TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TARGET",
        hidden=True,
        autocompletion=complete_target,
    ),
]
TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        hidden=True,
        autocompletion=complete_target,
    ),
]
OptionalTargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        hidden=True,
        autocompletion=complete_target,
    ),
]
VersionsOption = Annotated[
    str | None,
    typer.Option(
        "--version",
        "--versions",
        metavar="N",
        help="Versions: 5, or 1,3-5. All of them if left out.",
        autocompletion=complete_version,
    ),
]
OneVersionOption = Annotated[
    str | None,
    typer.Option(
        "--version", "--versions", metavar="N", help="The version, such as 5.", autocompletion=complete_version
    ),
]
BlockOption = Annotated[
    str | None,
    typer.Option(
        "--block-size",
        "--block-sizes",
        metavar="N",
        help="Threads per block, up to 1024. About 256, as the version has it, if left out.",
    ),
]
BlocksOption = Annotated[
    str | None,
    typer.Option(
        "--block-sizes",
        "--block-size",
        metavar="RANGE",
        help="32..1024 (powers of two), 32..256:32 (steps) or 32,96,768. All that a version has if left out.",
    ),
]
ParamsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUES",
        help="A parameter that versions declare (see `kbench list FAMILY`): ROWS=1,2,4; once for each name.",
    ),
]
# Of commands whose rows are of one set of values.
ParamOption = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=VALUE",
        help="A parameter that the version declares (see `kbench list FAMILY`): ROWS=2; once for each name.",
    ),
]
SizesOption = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="NAME=VALUES", help="A size, such as T=128 or T=128..1024; once for each name."),
]
SizeOption = Annotated[
    list[str] | None, typer.Option("--size", metavar="NAME=VALUE", help="A size, such as T=128; once for each name.")
]
PresetOption = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Sizes by name: default (for a GPU), small (for the emulator), large (moves 1 GiB; some have it).",
        autocompletion=complete_preset,
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="fp32, tf32, bf16 or fp16. If left out, the family's first that all chosen versions take.",
        autocompletion=complete_dtype,
    ),
]
DtypesOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        "--dtypes",
        metavar="LIST",
        help="bf16, or fp32,bf16, or all of a family's. Left out: its first that all chosen versions take.",
        autocompletion=complete_dtype,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", parser=_seed, help="Fixes the inputs. Random, and shown, if left out."),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="|".join(DEVICES),
        help="Where kernels run. auto takes the GPU if there is one.",
        autocompletion=complete_device,
    ),
]
FamilyDirOption = Annotated[
    list[Path] | None,
    typer.Option("--family-dir", metavar="DIR", help="A folder of your own families or versions. May be repeated."),
]
RtolOption = Annotated[
    float | None,
    typer.Option(
        "--rtol",
        metavar="X",
        parser=_tolerance,
        help=f"Relative {_OVERRIDES}",
    ),
]
AtolOption = Annotated[
    float | None,
    typer.Option(
        "--atol",
        metavar="X",
        parser=_tolerance,
        help=f"Absolute {_OVERRIDES}",
    ),
]
TimeLimitOption = Annotated[
    float,
    typer.Option("--time-limit", metavar="SECONDS", parser=seconds, help="A launch that takes longer counts as hung."),
]
WorkersOption = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", parser=_workers, help="CPU threads of the emulator. All cores if left out."),
]
FullOption = Annotated[
    bool, typer.Option("--full", help="Time versions over 0.1 s a launch at every block size, not at one.")
]
HotOption = Annotated[
    bool, typer.Option("--hot", help="Time with the L2 cache as the launch before left it, not flushed.")
]
GraphOption = Annotated[
    bool, typer.Option("--graph", help="Time runs one after another in a CUDA graph, the L2 cache not flushed.")
]
ResultsOption = Annotated[
    Path,
    typer.Option("--results", metavar="DIR", envvar="KBENCH_RESULTS", help="Where records and tables are written."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]
DebugOption = Annotated[
    bool,
    typer.Option("--debug", help="Show tracebacks, whole compiler logs, and all failed rows of a check."),
]


def bench_options(
    *,
    device: str,
    family_dir: list[Path] | None,
    seed: int | None,
    rtol: float | None,
    atol: float | None,
    time_limit: float,
    workers: int | None,
    debug: bool,
    full: bool = False,
    hot: bool = False,
    graph: bool = False,
) -> Options:
    """The options of a Bench, with their values checked. Raises UsageError."""
    from kbench.sweep import Options

    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", f"write --device {', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    if hot and graph:
        raise UsageError("--hot and --graph are two ways to time", "choose one; neither stands for a cold L2 cache")
    return Options(
        device=device,
        family_dirs=tuple(family_dir or ()),
        seed=seed,
        rtol=rtol,
        atol=atol,
        time_limit=time_limit,
        debug=debug,
        full=full,
        workers=workers,
        mode="hot" if hot else "graph" if graph else "cold",
    )


def family_names(targets: list[str] | None, version: str | None, family_dir: list[Path] | None) -> list[str]:
    """The targets as given; none at all stands for every family, and each is named where versions of all are asked."""
    if targets or version is None:
        return targets or []
    from kbench.catalog import load_catalog

    return list(load_catalog(family_dir or ()).names)
