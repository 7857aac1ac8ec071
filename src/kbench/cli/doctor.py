"""`kbench doctor`: what this machine has, and what is missing for which command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kbench.cli import options as o
from kbench.cli.machine import can_run, facts
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
    for fact in found:
        if fact.remedy:
            screen.say()
            kind = "needed" if fact.state == "missing" else "optional,"
            screen.prose(f"{fact.name}: {kind} for {fact.needed_by}", rest="  ")
            screen.say(f"    {fact.remedy}")
    if status != Exit.OK:
        screen.note("kernels can run neither on a GPU nor on the emulator here")
    return int(status)
