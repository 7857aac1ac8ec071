"""How many CPUs this process may use."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """At least one; fewer than the machine has where the process is held to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
