"""`kbench profile`: one version under Nsight Compute: its counters beside our own time and traffic."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import options as o
from kbench.cli.failures import show_failures
from kbench.cli.output import write
from kbench.cli.run import not_run
from kbench.cli.screen import Screen
from kbench.cli.session import Session, run_rows
from kbench.errors import CannotRunError, Exit, UsageError
from kbench.grammar import parse_block_size, parse_dtype, parse_params, parse_sizes, parse_targets, several
from kbench.jobs import Job
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.profile.ncu import Ncu, Profile
    from kbench.profile.summary import Summary
    from kbench.results.schema import Row

EXAMPLES = (
    "kbench profile layernorm_forward --version 6",
    "kbench profile attention_backward:7 --block-size 128 --size T=256",
    "kbench profile gelu_forward:2 --dtype bf16 --hot --json",
)
# ncu launches a plan some dozens of times, saves memory in between and starts Python first: so many launches' limit.
_LIMITS = 20


def profile(
    target: o.TargetArgument,
    version: o.OneVersionOption = None,
    block_size: o.BlockOption = None,
    param: o.ParamOption = None,
    size: o.SizeOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
    hot: Annotated[bool, typer.Option("--hot", help="Leave the caches filled, by launches just before.")] = False,
    ncu: Annotated[
        Path | None, typer.Option("--ncu", metavar="PATH", help="Nsight Compute's ncu, if not the usual one.")
    ] = None,
    seed: o.SeedOption = None,
    family_dir: o.FamilyDirOption = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            parser=o.seconds,
            help=f"A launch that takes longer counts as hung; ncu may take {_LIMITS} times as long.",
        ),
    ] = 30.0,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Count what one version does to the GPU, with NVIDIA's Nsight Compute (ncu), beside kbench's own figures.

    TARGET is FAMILY:VERSION, such as layernorm_forward:6. The version is first proved and timed as `kbench run` does,
    then launched under ncu, where it is proved again. The report, for ncu's viewer, stays in results/profiles.
    """
    from kbench.cli.profile_shown import show
    from kbench.profile.keep import PROFILES, new_files
    from kbench.profile.ncu import find_ncu
    from kbench.results.store import require_writable

    screen = Screen(json)
    selection = _selection(target, version, block_size, param, size, preset, dtype)
    options = o.bench_options(
        device="cuda", family_dir=family_dir, seed=seed, rtol=None, atol=None, time_limit=time_limit, workers=None,
        debug=debug,
    )  # fmt: skip
    _require_gpu()
    tool = find_ncu(ncu)
    require_writable(results, (PROFILES,))
    session = run_rows(options, selection, screen)
    if session.stopped is not None or session.rows[0].status != "pass":
        return _not_profiled(session, screen, debug)
    row = session.rows[0]
    screen.note(f"profiling with ncu {tool.version}".rstrip())
    with tempfile.TemporaryDirectory(prefix="kbench-") as folder:
        found = _under_ncu(tool, row, session.seed, family_dir or [], not hot, Path(folder), time_limit, debug)
        files = new_files(results, row.family, row.version)
        summary, document = _documented(session, tool, found, hot, files.to_dict())
        _keep(files, found, document)
    screen.document("profile", document)
    show(session.device, row, summary, document, screen)
    return int(Exit.OK)


def _require_gpu() -> None:
    """Before a search for tools that would be of no use. Raises CannotRunError."""
    from kbench.device.open import choose_kind

    try:
        choose_kind("cuda")
    except CannotRunError as error:
        advice = "run `kbench doctor`; without a GPU, `kbench inspect --counts` counts accesses to memory"
        raise CannotRunError(error.message, advice) from error


def _selection(
    target: str, version: str | None, block_size: str | None, param: list[str] | None, size: list[str] | None,
    preset: str | None, dtype: str | None,
) -> Selection:  # fmt: skip
    """One version at one problem. Raises UsageError for more."""
    targets, sizes, params = parse_targets([target], version), parse_sizes(size or []), parse_params(param or [])
    family, versions = targets[0].family, targets[0].versions
    if versions is None or len(versions) != 1:
        raise UsageError("a profile is of one version", f"name it: kbench profile {family} --version N")
    if name := several(sizes):
        raise UsageError(f"a profile is of one problem, and --size {name} has several values", "name one")
    if name := several(params):
        raise UsageError(f"a profile is of one kernel, and --param {name} has several values", "name one")
    blocks = [parse_block_size(block_size)] if block_size is not None else None
    return Selection(
        targets,
        "run",
        block_sizes=blocks,
        sizes=sizes,
        preset=preset,
        dtype=parse_dtype(dtype, "profile"),
        params=params,
    )


def _not_profiled(session: Session, screen: Screen, debug: bool) -> int:
    """A version that is not right, or does not run, has no profile: its row says why."""
    if session.stopped is None and (error := not_run(session.rows[0])) is not None:
        screen.document("profile", session.document(error=str(error), exit_status=int(error.exit_status)))
        raise error
    screen.document("profile", session.document())
    show_failures(session.rows, screen, debug)
    if session.stopped is None:
        screen.note("not profiled: only a version that is proved right is")
    return session.finish(screen, debug)


def _under_ncu(
    tool: Ncu,
    row: Row,
    seed: int,
    family_dirs: Sequence[Path],
    cold: bool,
    folder: Path,
    time_limit: float,
    debug: bool,
) -> Profile:
    """Raises as `kbench.profile.ncu.profile`."""
    from kbench.profile.launch import Spec
    from kbench.profile.ncu import profile

    spec = Spec(
        (Job(row.family, row.version, row.idea, row.sizes, row.dtype, row.block, params=row.params),),
        seed,
        str(folder / "answer.json"),
        tuple(os.path.abspath(directory) for directory in family_dirs),
        cold,
    )
    # Counting takes several passes over a kernel, and only the first would find what our own flush has left.
    return profile(
        tool, spec, folder, _LIMITS * time_limit, cache_control="all" if cold else "none",
        show=lambda output: write(sys.stderr, output) if debug else None,
    )  # fmt: skip


def _documented(
    session: Session, tool: Ncu, found: Profile, hot: bool, files: dict[str, str]
) -> tuple[Summary, dict[str, Any]]:
    """The summary, and the document of it and of all that it was made from."""
    from kbench.profile.raw import read_raw
    from kbench.profile.summary import reading, summarise

    row = session.rows[0]
    summary = summarise(read_raw(found.raw), row.kernels, str(session.device.get("arch", "")))
    timer_us = 1e3 * row.measurement["median_ms"] if row.measurement else None
    moved = summary.moved_bytes
    steps = found.answer["jobs"][0]["steps"]
    document = {
        "device": session.device,
        "seed": session.seed,
        "exit_status": int(Exit.OK),
        "ncu": {
            "path": tool.path,
            "version": tool.version,
            "command": list(found.command),
            "cache": "hot" if hot else "cold",
            "unknown_metrics": list(found.left_out),
        },
        "time": {"ncu_us": summary.us, "timer_us": timer_us, "ratio": _ratio(summary.us, None if hot else timer_us)},
        "bytes": {
            "read": summary.read_bytes,
            "written": summary.written_bytes,
            "least": row.traffic,
            "ratio": _ratio(moved, row.traffic),
        },
        "steps": steps,
        "launches": {"planned": summary.planned, "seen": summary.seen},
        "kernels": [kernel.to_dict() for kernel in summary.kernels],
        "reading": reading(summary, row.traffic),
        "files": files,
        "row": row.to_dict(),
    }
    return summary, document


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _keep(files: Any, found: Profile, document: dict[str, Any]) -> None:
    from kbench.profile.keep import keep_report, keep_summary

    keep_report(files, found.report, found.raw)
    keep_summary(files, document)
