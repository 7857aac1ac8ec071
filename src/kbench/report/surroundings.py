"""What a number depends on beside the kernel: two numbers are compared only where all of it is the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# By the kind of a step, the library that computes it, as a record of a device names its version.
LIBRARIES = {"Gemm": "cublaslt", "Sdpa": "cudnn", "SdpaBackward": "cudnn", "AllReduce": "nccl"}
_LIMITS = ("power_limit_w", "sm_clock_mhz", "application_clock_mhz")
# Of an older record that lacks them nothing can be said against it.
_WHERE_RECORDED = (*_LIMITS, "timer", "kbench")
# What decides on counts. The rest of a device, and who measured, decides on times too.
_OF_COUNTS = ("compiler", "options", "machine")
_OF_TIMES = ("compiler", "options", "driver", "kbench", "timer", *_LIMITS)
_NAMES = {
    "power_limit_w": "power limit in W",
    "sm_clock_mhz": "highest SM clock in MHz",
    "application_clock_mhz": "application clock in MHz",
    "options": "compiler options",
    "cublaslt": "cuBLASLt",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "timer": "version of the timer",
}


@dataclass(frozen=True)
class Surroundings:
    """Of one run. facts: texts by name; what is not known is not there."""

    facts: Mapping[str, str] = field(default_factory=dict)
    _met: dict[tuple[int, frozenset[str]], Difference] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Surroundings:
        """From the header of a run file; what is damaged there is not known."""
        device = _mapping(header.get("device"))
        limits, timer = _mapping(device.get("limits")), _mapping(device.get("timer"))
        names = ("driver", "compiler", "options", "machine", *LIBRARIES.values())
        found = {name: device.get(name) for name in names}
        found |= {name: limits.get(name) for name in _LIMITS}
        found |= {"kbench": header.get("kbench"), "timer": timer.get("version")}
        return cls({name: _text(value) for name, value in found.items() if value not in (None, "", [])})

    def against(self, other: Surroundings, uses: frozenset[str]) -> Difference:
        """Why numbers of this run and another one cannot be compared. uses: kinds of steps that the row has."""
        key = (id(other), uses)
        if key not in self._met:
            libraries = tuple(dict.fromkeys(LIBRARIES[kind] for kind in sorted(uses) if kind in LIBRARIES))
            times, counts = (*_OF_TIMES, *libraries), _OF_COUNTS
            self._met[key] = Difference(self._differ(other, times), self._differ(other, counts))
        return self._met[key]

    def _differ(self, other: Surroundings, names: Iterable[str]) -> Unlike | None:
        for name in names:
            one, two = self.facts.get(name), other.facts.get(name)
            if one == two or (name in _WHERE_RECORDED and None in (one, two)):
                continue
            return Unlike(_NAMES.get(name, name), one or "none", two or "none")
        return None


@dataclass(frozen=True)
class Unlike:
    """A fact that two runs do not share."""

    name: str
    one: str
    other: str

    def __str__(self) -> str:
        return f"{self.name} {self.one} before, {self.other} after"


@dataclass(frozen=True)
class Difference:
    """Why times, and why counts, cannot be compared; None where they can."""

    times: Unlike | None = None
    counts: Unlike | None = None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
