"""`kbench sweep --static` and `--counts`: rows of what compilers made of versions, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.errors import UsageError
from kbench.inspect.architectures import ARCHITECTURES, architecture_of
from kbench.results.schema import COUNTS, STATIC

if TYPE_CHECKING:
    from kbench.sweep import Bench, Options

_USUAL_ARCH = "sm_90"  # `kbench.inspect.examine.USUAL_ARCH`, which would load the compiler's bindings
ALL = "all"
# What such a row does not depend on, by the names of sweep's parameters.
_NEEDLESS = (
    "seed", "device", "rtol", "atol", "full", "hot", "graph", "strategy", "max_rows", "html", "rounds", "workers",
    "resume",
)  # fmt: skip


def _archs(text: str) -> tuple[str, ...]:
    """Architectures of "sm_90,sm_100", each once. Raises UsageError for one that is not known."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        architecture_of(name)
    return tuple(dict.fromkeys(names))


StaticOption = Annotated[
    bool,
    typer.Option("--static", help="Compile by NVRTC and run nothing: registers, spills, occupancy. Needs no GPU."),
]
ArchOption = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="LIST",
        help=f"With --static: some of {', '.join(ARCHITECTURES)}. {_USUAL_ARCH} if left out.",
        autocompletion=lambda incomplete: [name for name in ARCHITECTURES if name.startswith(incomplete)],
    ),
]
CountsOption = Annotated[
    bool, typer.Option("--counts", help="Count accesses to memory on the emulator, once: sectors, bank conflicts.")
]


@dataclass(frozen=True)
class Unproven:
    """A sweep whose rows are compiled or counted alone. mode: of UNPROVEN."""

    mode: str
    archs: tuple[str, ...] = ()

    def options(self, options: Options) -> Options:
        """The bench's, for such rows."""
        return replace(options, mode=self.mode, archs=self.archs)

    def bench(self, options: Options, note: Callable[[str], None]) -> Bench:
        """What makes the rows, with their compilers loaded only now."""
        if self.mode == STATIC:
            from kbench.compiled import CompiledBench

            return CompiledBench(options, note)
        from kbench.counted import CountedBench

        return CountedBench(options, note)


def unproven(context: typer.Context, static: bool, counts: bool, arch: str | None) -> Unproven | None:
    """What was asked for instead of a check; None without either option. Raises UsageError for options that do not go
    together."""
    if static and counts:
        raise UsageError("--static and --counts are two different sweeps", "ask for one of them, then for the other")
    if arch is not None and not static:
        raise UsageError("--arch belongs to --static: else versions run where they are compiled", "add --static")
    if not static and not counts:
        return None
    option = "--static" if static else "--counts"
    needless = (*_NEEDLESS, "time_limit") if static else _NEEDLESS
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in needless and source is not None and source.name == "COMMANDLINE":
            raise UsageError(
                f"{option} takes no {parameter.opts[0]}: it {'runs' if static else 'times'} nothing", "leave one out"
            )
    return Unproven(STATIC, _archs(arch or _USUAL_ARCH)) if static else Unproven(COUNTS)
