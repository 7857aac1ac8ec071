"""`kbench ceilings`: what the card does at most, measured on that very card or kept from an earlier time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.ceilings import Ceilings
from kbench.cli import options as o
from kbench.cli.screen import Screen
from kbench.cli.session import describe
from kbench.cli.table import Column
from kbench.errors import CannotRunError, Exit

if TYPE_CHECKING:
    from kbench.ceilings import Figure

EXAMPLES = ("kbench ceilings", "kbench ceilings --again --json")
COLUMNS = (
    Column("ceiling"),
    Column("value", "right"),
    Column("unit"),
    Column("95% interval", "right", short="95%", drop=1),
    Column("how", flexible=True),
)


def ceilings(
    again: Annotated[bool, typer.Option("--again", help="Measure anew what the cache has.")] = False,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show what the GPU does at most: bandwidths, arithmetic, launches, measured on this very card.

    They are what every "of ceiling" in tables and pages is a share of. Measuring takes some seconds; the result is
    kept for this card, its power and clock limits, driver, compiler and cuBLASLt. What was measured on a busy card,
    or drew a remark, is shown and not kept. The emulator has no ceilings.
    """
    from kbench.device.cuda.probe import probe_gpu
    from kbench.measure.ceilings_worker import ask

    screen = Screen(json)
    if reason := probe_gpu():
        what = f"there is no GPU whose ceilings could be measured: {reason}"
        raise CannotRunError(what, "the emulator has no ceilings; `kbench doctor` says what is missing")
    answer = ask(again, screen.note)
    found = Ceilings.from_dict(answer["ceilings"])
    status = Exit.OK if found.figures() else Exit.CANNOT
    screen.document("ceilings", {"exit_status": int(status), **answer})
    if answer["cached"] and answer["busy"]:
        screen.note(f"{answer['busy']}: what is measured now would be less")
    _show(answer, found, screen)
    if status != Exit.OK:
        screen.note("nothing could be measured")
    return int(status)


def _show(answer: dict[str, Any], found: Ceilings, screen: Screen) -> None:
    screen.prose(describe(answer["device"]), rest="  ")
    screen.prose(_limits(answer["card"]), "  limits    ")
    when = found.measured.replace("T", " ").replace("Z", " UTC") or "at an unknown time"
    screen.prose(f"{when}, from the cache (--again measures anew)" if answer["cached"] else when, "  measured  ")
    screen.say()
    if figures := found.figures():
        screen.table(COLUMNS, [_cells(figure) for figure in figures])
    for note in found.notes:
        screen.say()
        screen.prose(note, rest="  ")


def _limits(card: dict[str, Any]) -> str:
    """The limits of power and clock, as far as NVML tells them."""
    power, clock, application = (card.get(name) for name in ("power_limit_w", "sm_clock_mhz", "application_clock_mhz"))
    parts = ["power limit not known" if power is None else f"{power:g} W"]
    parts.append("SM clock limit not known" if clock is None else f"SM clock {clock} MHz")
    if application is not None and application != clock:
        parts.append(f"application clock {application} MHz")
    return ", ".join(parts)


def _cells(figure: Figure) -> list[str]:
    if figure.evidence is None:
        return [figure.name, value_text(figure.value), figure.unit, "", ""]
    low, high = value_text(figure.evidence.low), value_text(figure.evidence.high)
    return [figure.name, value_text(figure.value), figure.unit, f"{low}..{high}", figure.evidence.how]


def value_text(value: float) -> str:
    """Four digits or all before the point: neighbours of an interval have to differ."""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:,.{digits}f}"
