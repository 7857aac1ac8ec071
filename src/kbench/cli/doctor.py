"""`kbench doctor`: what this machine has, and what is missing for which command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kbench.cli import options as o
from kbench.cli.machine import Fact, can_run, facts
from kbench.cli.screen import Screen
from kbench.errors import Exit

EXAMPLES = ("kbench doctor", "kbench doctor --json")


def doctor(
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show what this machine has for kbench, and the command that installs what is missing.

    Exit status 5 if kernels can run neither on a GPU nor on the emulator.
    """
    screen = Screen(json)
    found = facts(results)
    status = Exit.OK if can_run(found) else Exit.CANNOT
    screen.document("doctor", {"exit_status": int(status), "facts": [asdict(fact) for fact in found]})
    # Lines, not a table: its cells would cut paths in two.
    widest = max(len(fact.name) for fact in found)
    for fact in found:
        screen.prose(fact.value, f"{fact.name:<{widest}}  {fact.state:<7}  ", status=fact.state)
    for remedy, lacking in remedies(found).items():
        screen.say()
        kind = "needed" if any(fact.state == "missing" for fact in lacking) else "optional,"
        names, uses = (dict.fromkeys(texts) for texts in zip(*((f.name, f.needed_by) for f in lacking), strict=True))
        screen.prose(f"{', '.join(names)}: {kind} for {'; '.join(uses)}", rest="  ")
        screen.say(f"    {remedy}")
    if status != Exit.OK:
        screen.note("kernels can run neither on a GPU nor on the emulator here")
    return int(status)


def remedies(found: Sequence[Fact]) -> dict[str, list[Fact]]:
    """What mends something, each command once, with all that it mends."""
    by_remedy: dict[str, list[Fact]] = {}
    for fact in found:
        if fact.remedy:
            by_remedy.setdefault(fact.remedy, []).append(fact)
    return by_remedy
