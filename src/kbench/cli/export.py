"""`kbench export`: one version at one problem as a CUDA program that needs nothing of kbench."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli import options as o
from kbench.cli.output import write
from kbench.cli.screen import Screen
from kbench.errors import CannotRunError, Exit, UsageError
from kbench.grammar import parse_block_size, parse_dtype, parse_params, parse_sizes, parse_targets
from kbench.jobs import Job
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.catalog import Catalog
    from kbench.export.problem import Data, Subject

EXAMPLES = (
    "kbench export layernorm_forward --version 6",
    "kbench export attention_backward:8 --size T=33 --dtype bf16 -o bug.cu",
    "kbench export gelu_forward:2 --preset default --seed 1 -o gelu.cu",
)
STDOUT = "-"

OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE.cu", help="The program; - is stdout. FAMILY_vN.cu in this folder if left out."
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is no exported program.")]
ArchOption = Annotated[
    str | None,
    typer.Option(
        "--arch", metavar="SM", help="What to plan for: sm_80, 86, 89, 90, 100 or 120. The version's, or sm_90."
    ),
]


def export(
    target: o.TargetArgument,
    version: o.OneVersionOption = None,
    block_size: o.BlockOption = None,
    param: o.ParamOption = None,
    size: o.SizeOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
    seed: o.SeedOption = None,
    arch: ArchOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    family_dir: o.FamilyDirOption = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Write one version as a CUDA program of one file, which nvcc builds with nothing of kbench. Needs no GPU.

    TARGET is FAMILY:VERSION, such as layernorm_forward:6. The program holds the kernels, the launches with their
    numbers, inputs and expected results; it checks, then times. Sizes are those of the preset small if left out.
    Large inputs consist of few different rows, and of large outputs some elements are compared.
    """
    from kbench.catalog import load_catalog
    from kbench.export.problem import data_of, subject_of
    from kbench.export.program import build_command, program

    if json and output == STDOUT:
        raise UsageError("--json and -o - both write to standard output", "name a file")
    screen = Screen(json)
    catalog = load_catalog(family_dir or ())
    job = _job(catalog, target, version, block_size, param, size, preset, dtype)
    path = _path(job, output)
    if path is not None:
        _require_replaceable(path, force)
    seed = secrets.randbelow(2**31) if seed is None else seed
    subject = subject_of(catalog, job, arch)
    data = data_of(subject, seed)
    name = path.stem if path is not None else _name(job)
    text = program(subject, data, name, _command(job, subject, seed, family_dir or ()))
    if path is None:
        write(sys.stdout, text)
        return int(Exit.OK)
    _write(path, text)
    build = build_command(subject, name)
    screen.document("export", _document(subject, data, seed, path, len(text), build))
    _report(subject, data, seed, path, len(text), build, screen)
    return int(Exit.OK)


def _job(
    catalog: Catalog,
    target: str,
    version: str | None,
    block_size: str | None,
    param: list[str] | None,
    size: list[str] | None,
    preset: str | None,
    dtype: str | None,
) -> Job:
    """The one row that is meant. The choices that are left open are those of a machine without a GPU."""
    selection = Selection(
        parse_targets([target], version),
        "run",
        block_sizes=[parse_block_size(block_size)] if block_size is not None else None,
        sizes=parse_sizes(size or []),
        preset=preset,
        dtype=parse_dtype(dtype, "export"),
        params=parse_params(param or []),
    )
    jobs = list(selection.jobs(catalog, "emulator"))
    if len(jobs) > 1:
        one = f"`kbench export {jobs[-1].family} --version {jobs[-1].version}`"
        for what, kinds, hint in (
            ("versions", {job.version for job in jobs}, f"name one, such as {one}"),
            ("problems", {str(job.sizes) for job in jobs}, "give each --size one value"),
            ("sets of parameters", {str(job.params) for job in jobs}, "give each --param one value"),
        ):
            if len(kinds) > 1:
                raise UsageError(f"a program holds one version at one problem, and {len(kinds)} {what} are meant", hint)
    return jobs[0]


def _name(job: Job) -> str:
    return f"{job.family}_v{job.version}"


def _path(job: Job, output: str | None) -> Path | None:
    """Where to write; None for stdout."""
    if output == STDOUT:
        return None
    path = Path(output) if output is not None else Path(f"{_name(job)}.cu")
    if path.suffix != ".cu":
        raise UsageError(f"-o {output} is not the name of a CUDA program", "it has to end in .cu")
    return path


def _require_replaceable(path: Path, force: bool) -> None:
    """An exported program is replaced, as it can be exported again. Anything else may be somebody's work."""
    from kbench.export.program import MARK

    if path.is_dir():
        raise UsageError(f"-o {path} is a folder", "name a file that ends in .cu")
    if force or not path.exists():
        return
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            exported = file.read(len(MARK)) == MARK
    except OSError as error:
        raise CannotRunError(f"cannot read {path}: {error.strerror}", "name another file with -o") from error
    if not exported:
        raise UsageError(f"{path} exists and is no exported program", "name another file with -o, or add --force")


def _write(path: Path, text: str) -> None:
    from kbench.results.store import replace_text

    replace_text(path, text, "name another file with -o")


def _command(job: Job, subject: Subject, seed: int, family_dir: Sequence[Path]) -> str:
    sizes = [word for name, size in job.sizes.items() for word in ("--size", f"{name}={size}")]
    params = [word for name, value in subject.params.items() for word in ("--param", f"{name}={value}")]
    folders = [word for folder in family_dir for word in ("--family-dir", str(folder))]
    return shlex.join([
        "kbench", "export", job.family, "--version", str(job.version), *sizes, "--block-size", str(job.block), *params,
        "--dtype", job.dtype, "--seed", str(seed), "--arch", subject.arch, *folders,
    ])  # fmt: skip


# --------------------------------------------------------------------------------------------- what came of it


def _document(subject: Subject, data: Data, seed: int, path: Path, size: int, build: str) -> dict[str, object]:
    outputs = {tensor.name: tensor for tensor in subject.tensors}
    return {
        "path": str(path),
        "bytes": size,
        "family": subject.family.name,
        "version": subject.version.number,
        "sizes": dict(subject.problem.sizes),
        "dtype": subject.problem.dtype,
        "block": subject.block,
        "params": dict(subject.params),
        "arch": subject.arch,
        "seed": seed,
        "repeating_inputs": data.repeating,
        "outputs": [
            {"name": name, "elements": outputs[name].count, "compared": answer.compared}
            for name, answer in data.outputs.items()
        ],
        "build": build,
    }


def _report(subject: Subject, data: Data, seed: int, path: Path, size: int, build: str, screen: Screen) -> None:
    screen.prose(f"{subject.name}: {subject.version.idea}", rest="  ")
    what = f"{subject.problem}, {subject.problem.dtype}, block size {subject.place}, seed {seed}"
    card = subject.architecture
    screen.prose(what, "  problem  ")
    screen.prose(f"{subject.arch}; as on {card.card}: {card.multiprocessors} multiprocessors", "  plan     ")
    if data.repeating:
        screen.prose("few different rows in random order: all values would be too much text", "  inputs   ")
    sampled = [f"{answer.compared:,} elements of {name}" for name, answer in data.outputs.items() if answer.places]
    screen.prose(", ".join(sampled) or "every element", "  compares ")
    screen.say(f"  program  {path} ({size / 1000:,.0f} KB)")
    screen.say(f"  build    {build}")
