"""`kbench inspect`: what a version's kernels use, how many of them fit, and what they are made of; without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import options as o
from kbench.cli.inspect_counts import show_counts
from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.errors import Exit, UsageError
from kbench.family import Problem
from kbench.grammar import parse_block_sizes, parse_dtype, parse_params, parse_sizes, parse_targets
from kbench.inspect.instructions import GROUPS, group_of, in_order
from kbench.inspect.nvdisasm import DisassemblyError, find_nvdisasm, require_nvdisasm
from kbench.params import params_text
from kbench.selection import Selection

if TYPE_CHECKING:
    from kbench.inspect.examine import Examined, Inspection
    from kbench.inspect.occupancy import Cliff

EXAMPLES = (
    "kbench inspect layernorm_forward --version 6",
    "kbench inspect attention_backward:8 --arch sm_80 --dtype bf16",
    "kbench inspect gelu_forward:2 --block-sizes 256 --ptx",
    "kbench inspect softmax_forward:5 --counts",
)
LEGEND = (
    "fit: blocks that one multiprocessor holds at once; occup: their warps, of all that it can hold; waves: how often "
    "the grid fills the card; spill, stack: bytes a thread; static, dynamic: bytes of shared memory a block"
)
SHORT = {"shared memory": "shared"}
STEPS = {
    "Gemm": "a library's GEMM",
    "Fill": "fill",
    "Copy": "copy",
    "Sdpa": "a library's attention",
    "SdpaBackward": "a library's attention, backward",
    "AllReduce": "a library's all-reduce",
}
_Pairs = tuple[tuple[str, int], ...]  # sizes or parameters, by name
_NO_KERNEL = "// no kernel: all of it is steps of libraries"
_USUAL_BLOCK = 256  # the one whose instructions are shown where each block size has a kernel of its own


def inspect(
    target: o.TargetArgument,
    version: o.VersionsOption = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="SM", help="sm_80, 86, 89, 90, 100 or 120. The version's, or sm_90."),
    ] = None,
    block_sizes: o.BlocksOption = None,
    param: o.ParamsOption = None,
    size: o.SizesOption = None,
    preset: o.PresetOption = None,
    dtype: o.DtypeOption = None,
    ptx: Annotated[bool, typer.Option("--ptx", help="The PTX itself in place of the tables.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="The machine code itself, by nvdisasm.")] = False,
    line_info: Annotated[bool, typer.Option("--line-info", help="With --sass: the lines it comes from.")] = False,
    counts: Annotated[
        bool, typer.Option("--counts", help="Run it on the emulator: sectors and bank conflicts, line by line.")
    ] = False,
    time_limit: o.TimeLimitOption = 30.0,
    family_dir: o.FamilyDirOption = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show registers, spills, shared memory, occupancy and instructions of a version's kernels, without a GPU.

    TARGET is FAMILY or FAMILY:VERSIONS, such as layernorm_forward:6. Kernels are compiled for --arch by NVRTC. A plan
    may depend on the number of multiprocessors: a card that is named stands for the architecture. With --counts they
    run on the CPU emulator instead, with the `small` preset and one block size unless others are named.
    """
    _require_one(ptx=ptx, sass=sass, counts=counts, arch=arch, line_info=line_info)
    screen = Screen(json)
    selection = Selection(
        parse_targets([target], version),
        "run" if counts else "sweep",
        block_sizes=parse_block_sizes(block_sizes) if block_sizes is not None else None,
        sizes=parse_sizes(size or []),
        preset=preset,
        dtype=parse_dtype(dtype, "inspect"),
        params=parse_params(param or []),
    )
    if counts:
        return show_counts(selection, family_dir or (), time_limit, screen, debug)
    nvdisasm = require_nvdisasm() if sass else find_nvdisasm()
    found = _examine(selection, arch, family_dir, nvdisasm, sass, line_info)
    documents = [{**each.to_dict(), **({"ptx": each.ptx} if ptx else _sass(each) if sass else {})} for each in found]
    screen.document("inspect", {"inspections": documents})
    for position, each in enumerate(found):
        if position:
            screen.say()
        if ptx or sass:
            screen.say(f"// {each.family} version {each.version.number}, {_problem(each)}")
        if ptx:
            screen.say(each.ptx.rstrip() or _NO_KERNEL)
        elif sass:
            _list_code(each, screen)
        else:
            _show(each, screen)
    return int(Exit.OK)


def _require_one(*, ptx: bool, sass: bool, counts: bool, arch: str | None, line_info: bool) -> None:
    """Raises UsageError for options that exclude one another."""
    asked = [name for name, wanted in (("--ptx", ptx), ("--sass", sass), ("--counts", counts)) if wanted]
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} are two different reports", "ask for one of them")
    if counts and arch is not None:
        raise UsageError("--arch says nothing with --counts: the emulator runs no GPU's code", "leave one of them out")
    if line_info and not sass:
        raise UsageError("--line-info belongs to --sass", "add --sass")


def _sass(found: Inspection) -> dict[str, Any]:
    code = found.machine_code
    return {"sass": {kernel: "\n".join(lines) for kernel, lines in code.listings.items()} if code is not None else {}}


def _list_code(found: Inspection, screen: Screen) -> None:
    if found.machine_code is None:
        screen.say(_NO_KERNEL)
        return
    for kernel, lines in found.machine_code.listings.items():
        screen.say(f"\n// {kernel}, {found.arch}")
        for line in lines:
            screen.say(line)


def _examine(
    selection: Selection,
    arch: str | None,
    family_dir: o.FamilyDirOption,
    nvdisasm: Path | None,
    required: bool,
    lines: bool,
) -> list[Inspection]:
    from kbench.catalog import load_catalog
    from kbench.inspect.architectures import architecture_of
    from kbench.inspect.examine import examine

    if arch is not None:
        architecture_of(arch)
    catalog = load_catalog(family_dir or ())
    subjects: dict[tuple[str, int, _Pairs, str, _Pairs], list[int]] = {}
    for job in selection.jobs(catalog, "cuda"):
        key = (job.family, job.version, tuple(job.sizes.items()), job.dtype, tuple(job.params.items()))
        subjects.setdefault(key, []).append(job.block)
    found = []
    for (family, number, sizes, dtype, params), blocks in subjects.items():
        subject = (catalog, family, number, Problem(dict(sizes), dtype), blocks, arch, dict(params))
        try:
            found.append(examine(*subject, nvdisasm=nvdisasm, lines=lines))
        except DisassemblyError:
            if required:
                raise
            nvdisasm = None  # too old for the architecture, say: the tables do without it
            found.append(examine(*subject))
    if all(not each.kernels and not each.others for each in found):
        first = found[0]
        reason = next(iter(first.refused.values()), "its plan is empty")
        what = f"{first.family} version {first.version.number} refuses this: {reason}"
        raise UsageError(what, f"`kbench list {first.family}` shows what it takes")
    return found


# --------------------------------------------------------------------------------------------- tables


def _show(found: Inspection, screen: Screen) -> None:
    card = found.architecture
    screen.prose(f"{found.family} version {found.version.number}: {found.version.idea}", rest="  ")
    screen.prose(_problem(found), "  problem  ")
    compiled = f"{found.arch}, {found.compiler}" if found.compiler else found.arch
    screen.prose(
        f"{compiled}; plans and waves as on {card.card}: {card.multiprocessors} multiprocessors", "  for      "
    )
    if found.others:
        steps = ", ".join(f"{count} x {STEPS.get(name, name)}" for name, count in found.others.items())
        screen.prose(f"{steps} (not inspected)", "  besides  ")
    for reason in dict.fromkeys(found.refused.values()):
        screen.prose(reason, "  refused  ")
    for name in dict.fromkeys(kernel.name for kernel in found.kernels):
        screen.say()
        _show_kernel(found, [kernel for kernel in found.kernels if kernel.name == name], screen)
    screen.say()
    screen.prose(LEGEND if found.kernels else "no kernel to inspect: all of it is steps of libraries")


def _problem(found: Inspection) -> str:
    return ", ".join(filter(None, (str(found.problem), found.problem.dtype, params_text(found.params))))


def _show_kernel(found: Inspection, rows: Sequence[Examined], screen: Screen) -> None:
    usual = min(rows, key=lambda row: abs(row.block - _USUAL_BLOCK))
    same = len({row.launch.kernel for row in rows}) == 1
    screen.prose(usual.launch.kernel if same else f"{rows[0].name}<...>, instantiated by block size", rest="  ")
    screen.say()
    screen.table(*_resources(rows), indent=2)
    if unused := _unused(rows):
        screen.prose(", ".join(f"no {what}" for what in unused), "  ")
    screen.say()
    columns, lines = _cliffs(rows)
    if lines:
        screen.table(columns, lines, indent=2)
    else:
        screen.prose("no single resource within reach changes how many blocks fit", "  ")
    screen.say()
    _show_mix(found, usual.launch.kernel, "" if same else f" of {usual.launch.kernel}", screen)


def _show_mix(found: Inspection, kernel: str, where: str, screen: Screen) -> None:
    mix = found.mixes[kernel]
    if found.machine_code is not None:
        sass = found.machine_code.mixes[kernel]
        screen.prose(f"instructions{where}, in PTX and in machine code:", "  ", rest="    ")
        screen.say()
        columns = [Column(""), Column("class"), Column("PTX", "right"), Column("SASS", "right")]
        names = in_order(Counter(mix) + Counter(sass))
        groups = [group_of(name) for name in names]
        lines = [
            ["" if i and groups[i - 1] == groups[i] else groups[i], _named(name), _count(mix, name), _count(sass, name)]
            for i, name in enumerate(names)
        ]
        lines.append(["", "all", f"{sum(mix.values()):,}", f"{sum(sass.values()):,}"])
        screen.table(columns, lines, indent=2)
        return
    screen.prose(f"{sum(mix.values()):,} instructions in the PTX{where}:", "  ", rest="    ")
    widest = max(map(len, GROUPS))
    for group in GROUPS:
        parts = [f"{_named(name)} {count:,}" for name, count in mix.items() if group_of(name) == group]
        if parts:
            screen.prose(", ".join(parts), f"    {group:<{widest}}  ")


def _resources(rows: Sequence[Examined]) -> tuple[list[Column], list[list[str]]]:
    """What a kernel uses and how many fit, by block size. Columns of what it never uses are left out."""
    labels, rows = _merged(rows)
    columns = [
        (Column("block", "right"), labels),
        (Column("threads", "right"), [_by(row.launch.block) for row in rows]),
        (Column("grid", "right"), [_by(row.launch.grid) for row in rows]),
        (Column("times", "right"), [str(row.times) for row in rows]),
        (Column("regs", "right"), [str(row.info.registers) for row in rows]),
        *((Column(title, "right"), [f"{value:,}" for value in values]) for title, values in _optional(rows).items()),
        (Column("fit", "right"), [str(row.occupancy.blocks) for row in rows]),
        (Column("occup", "right"), [f"{row.occupancy.share:.0%}" for row in rows]),
        (Column("limited by"), [", ".join(SHORT.get(n, n) for n in row.occupancy.limiters) for row in rows]),
        (Column("waves", "right", drop=1), ["-" if row.waves is None else _significant(row.waves) for row in rows]),
    ]
    needless = {"threads": all(_by(row.launch.block) == label for label, row in zip(labels, rows, strict=True))}
    needless |= {"times": all(row.times == 1 for row in rows)}
    needless |= {title: not any(values) for title, values in _optional(rows).items()}
    shown = [(column, cells) for column, cells in columns if not needless.get(column.title, False)]
    return [column for column, _ in shown], [list(line) for line in zip(*(cells for _, cells in shown), strict=True)]


def _merged(rows: Sequence[Examined]) -> tuple[list[str], Sequence[Examined]]:
    """Block sizes and rows; a single row where a kernel is launched alike whatever the version's block size is."""
    from kbench.inspect.examine import shape

    if len(rows) > 1 and len({(shape(row.launch), row.times) for row in rows}) == 1:
        return [f"{rows[0].block}..{rows[-1].block}"], rows[:1]
    return [str(row.block) for row in rows], rows


def _optional(rows: Sequence[Examined]) -> dict[str, list[int]]:
    """What many kernels do without: title of the column to bytes."""
    return {
        "spill": [row.info.spill_bytes or 0 for row in rows],
        "stack": [row.info.local_bytes or 0 for row in rows],
        "static": [row.info.static_shared or 0 for row in rows],
        "dynamic": [row.launch.shared for row in rows],
    }


def _unused(rows: Sequence[Examined]) -> list[str]:
    words = {"spill": "spills", "stack": "stack", "static": "static shared memory", "dynamic": "dynamic shared memory"}
    return [words[title] for title, values in _optional(rows).items() if not any(values)]


def _cliffs(rows: Sequence[Examined]) -> tuple[list[Column], list[list[str]]]:
    """By block size: what gives more blocks, and what costs some."""
    columns = [Column("block", "right"), Column("more fit with", flexible=True), Column("fewer from", flexible=True)]
    lines = []
    for label, row in zip(*_merged(rows), strict=True):
        uses_shared = bool(row.launch.shared or row.info.static_shared)
        # What a kernel without shared memory could still take of it is far from a cliff.
        near = [cliff for cliff in row.cliffs if uses_shared or cliff.resource != "shared memory"]
        gains = "; ".join(_cliff(cliff) for cliff in near if cliff.change < 0)
        losses = "; ".join(_cliff(cliff) for cliff in near if cliff.change > 0)
        lines.append([label, gains, losses])
    return columns, [line for line in lines if line[1] or line[2]]


def _cliff(cliff: Cliff) -> str:
    """Such as `8 registers fewer: 4 (50%)`: the change, and the blocks and the occupancy that it leads to."""
    count = abs(cliff.change)
    if cliff.resource == "registers":
        what = f"{count} register{'s' if count > 1 else ''} {'fewer' if cliff.change < 0 else 'more'}"
    else:
        what = f"{count:,} B shared {'less' if cliff.change < 0 else 'more'}"
    then = f"{cliff.occupancy.blocks} ({cliff.occupancy.share:.0%})" if cliff.occupancy.blocks else "no launch"
    return f"{what}: {then}"


def _count(mix: Mapping[str, int], name: str) -> str:
    return f"{mix[name]:,}" if name in mix else ""


def _named(name: str) -> str:
    """`global loads (128 bits)` of `global loads, 128 bits`."""
    plain, _, width = name.partition(", ")
    return f"{plain} ({width})" if width else plain


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _significant(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
