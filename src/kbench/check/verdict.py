"""What a check found, as data, as one line, and as lines for the reader who has to mend the kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Location:
    """One wrong element: where, what it should be and what it is."""

    index: tuple[int, ...]
    axes: tuple[str, ...]
    flat: int
    reference: float
    got: float
    bound: float

    @property
    def place(self) -> str:
        """The index in tensor coordinates: "[b=0, t=7]"; plain numbers where the axes have no names."""
        named = len(self.axes) == len(self.index)
        names = [f"{axis}=" for axis in self.axes] if named else [""] * len(self.index)
        return f"[{', '.join(f'{name}{i}' for name, i in zip(names, self.index, strict=True))}]"

    def __str__(self) -> str:
        return f"at {self.place}: reference {number(self.reference)}, got {number(self.got)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "index": list(self.index), "flat": self.flat, "reference": json_number(self.reference),
            "got": json_number(self.got), "bound": json_number(self.bound),
        }  # fmt: skip


@dataclass(frozen=True)
class OutputVerdict:
    """One output of one launch.

    compared: elements that were compared; total: all of them. used: largest error over bound, None where it is
    not a finite number (NaN, Inf, or any error where the bound is 0). kind: what the wrong elements look like, one
    of explain.KINDS or "". notes: which elements they are.
    """

    name: str
    compared: int
    total: int
    wrong: int
    used: float | None
    first: Location | None = None
    worst: Location | None = None
    kind: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.wrong == 0

    def reason(self) -> str:
        """One line; "" if it passed."""
        if self.passed:
            return ""
        looks = f" ({self.kind})" if self.kind else ""
        place = f", worst {self.worst}" if self.worst else ""
        return f"{self.name}: {self.wrong} of {self.compared} elements wrong{looks}{place}"

    def details(self) -> list[str]:
        """The located lines of a failure; empty if it passed."""
        if self.passed:
            return []
        lines = [f"{self.name}: {note}" for note in self.notes]
        if self.first is not None and self.worst is not None and self.first != self.worst:
            lines.insert(0, f"{self.name}: first wrong {self.first}")
        if self.worst is not None:
            lines.append(f"{self.name}: the error allowed there is {number(self.worst.bound)}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name, "compared": self.compared, "wrong": self.wrong, "used": self.used}
        if not self.passed:
            data |= {"kind": self.kind, "notes": list(self.notes)}
            for name, location in (("first", self.first), ("worst", self.worst)):
                if location is not None:
                    data[name] = location.to_dict()
        return data


@dataclass(frozen=True)
class Finding:
    """Something wrong other than a wrong value. kind: "fault", "redzone", "input" or "determinism"."""

    kind: str
    text: str
    details: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "details": list(self.details)}


# What to name first: a kernel that was stopped or wrote where it must not explains the wrong values, not they it.
_ORDER = ("fault", "redzone", "input", "output", "determinism")


@dataclass(frozen=True)
class Verdict:
    """Pass or fail for one (version, problem, block size).

    outputs: each output's first failing launch, else its first. deterministic: bitwise equal over all launches,
    None with fewer than two. launches: how many were judged. judge: the module that computed the reference.
    remarks: what sets failing and passing launches apart.
    """

    outputs: tuple[OutputVerdict, ...]
    findings: tuple[Finding, ...] = ()
    deterministic: bool | None = None
    launches: int = 0
    judge: str = "numpy"
    remarks: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.findings and all(output.passed for output in self.outputs)

    def reason(self) -> str:
        """One line that says what is wrong first of all; "" if it passed."""
        said = [(finding.kind, finding.text) for finding in self.findings]
        wrong = [output for output in self.outputs if not output.passed]
        if wrong:
            remark = f"; {self.remarks[0]}" if self.remarks else ""
            said.append(("output", f"{wrong[0].reason()}{remark}"))
        if not said:
            return ""
        return min(said, key=lambda pair: _ORDER.index(pair[0]))[1]

    def details(self) -> list[str]:
        """Everything else that is known, a line each."""
        lines = [line for finding in self.findings for line in (finding.text, *finding.details)]
        for output in self.outputs:
            if not output.passed:
                lines += [output.reason(), *output.details()]
        first = self.reason()
        return [line for line in (*lines, *self.remarks) if line not in first]

    def to_dict(self) -> dict[str, Any]:
        """As `results.schema.Row.verdict`: strict JSON."""
        data: dict[str, Any] = {
            "outputs": [output.to_dict() for output in self.outputs],
            "deterministic": self.deterministic,
            "judge": self.judge,
            "launches": self.launches,
        }
        if self.findings:
            data["findings"] = [finding.to_dict() for finding in self.findings]
        return data


def number(value: float) -> str:
    """A number as it is read: enough digits to tell neighbours of fp32 apart."""
    return f"{value:.10g}"


def json_number(value: float) -> float | str:
    """JSON has no NaN and no Inf: they are written as words."""
    return value if math.isfinite(value) else str(value)


def join_axes(index: tuple[int, ...], axes: tuple[str, ...]) -> str:
    """An index in tensor coordinates, for places other than a wrong value."""
    return Location(index, axes, 0, 0.0, 0.0, 0.0).place
