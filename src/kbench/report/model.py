"""A report as data: what `kbench report` decided, before any of its surfaces puts it into words.

Every surface (terminal, Markdown, JUnit, annotations, SARIF, JSON, HTML) shows a `Report` and decides nothing itself,
so that no table can say other than the exit status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# In the order in which a reader wants them: what must be acted on first, what changed nothing last.
VERDICTS = (
    "wrong",  # a version that gave wrong results, crashed, or does not compile any more
    "slower",  # a regression: of time, or of any other metric, in the direction that is worse
    "over budget",  # a limit of kbench.toml is broken
    "unclear",  # the samples cannot tell; `reason` says how many more would
    "incomparable",  # another GPU, clock, driver, compiler or harness
    "gone",  # only before
    "new",  # only after
    "faster",  # better by more than the threshold
    "same",
)
# Those that a user can make an error of, by the names that --fail-on takes.
FAIL_ON = {
    "regression": ("slower", "over budget"),
    "unclear": ("unclear",),
    "incomparable": ("incomparable",),
    "gone": ("gone",),
}


@dataclass(frozen=True)
class Metric:
    """Something that is compared. worse: +1 where more is worse (time, registers), -1 where less is (bandwidth).

    exact: counts that a compiler gives, of which any change is real; others are known by samples.
    """

    name: str
    unit: str
    worse: int = 1
    exact: bool = False


TIME = Metric("time", "ms")


@dataclass(frozen=True)
class Subject:
    """What is compared: a version at a problem and block size, on a device; kernel: one kernel of it, for counts that
    are a kernel's own. file, line: where the kernel stands, "" and 0 where that is not known."""

    family: str
    version: int
    problem: str
    dtype: str
    block: int
    params: str = ""
    cache_mode: str = "cold"
    device: str = ""
    kernel: str = ""
    file: str = ""
    line: int = 0

    @property
    def name(self) -> str:
        """Such as "layernorm_forward:6 @256 bf16 B=8 T=1024 C=768"."""
        block = f" @{self.block}" if self.block else ""
        words = [f"{self.family}:{self.version}{block}", self.dtype, self.problem, self.params, self.kernel]
        if self.cache_mode not in ("", "cold"):
            # Rows that were only compiled differ by nothing but the architecture where there are several.
            words.append(f"({self.cache_mode}, {self.device})" if self._compiled else f"({self.cache_mode})")
        return " ".join(word for word in words if word)

    @property
    def _compiled(self) -> bool:
        return self.cache_mode == "static" and bool(self.device)


@dataclass(frozen=True)
class Change:
    """One compared number. before, after: in the metric's unit, None where a side has none.

    ratio: after over before, low..high its interval with the confidence `confidence`; None where nothing was compared
    or the metric is exact. threshold: the least change that counts, as a share (0.03). reason: one sentence, empty only
    for "same". reproduce: a command that shows it again. rounds_before, rounds_after: raw samples by round.
    """

    subject: Subject
    metric: Metric
    verdict: str
    before: float | None = None
    after: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    threshold: float = 0.0
    reason: str = ""
    reproduce: str = ""
    rounds_before: Sequence[Sequence[float]] = ()
    rounds_after: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Side:
    """Where one side's records come from. name: as the user gave it. files, runs: their paths and ids. facts: device,
    driver, compiler, kbench, started... as text, those that are known; revision: the commit that the kernels were of,
    committed: the commit that the records themselves were taken from."""

    name: str
    files: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0


@dataclass(frozen=True)
class Report:
    """All of it. changes: sorted by `VERDICTS`, then worst first. findings: sentences about the whole report, such as
    that the machine differs.

    limits: the thresholds and confidences that were used, as text by name. fail_on: what the user makes an error of.
    held: how many numbers were held against a budget. first_run: there is no BEFORE yet, and the user knows.
    """

    before: Side
    after: Side
    changes: tuple[Change, ...]
    findings: tuple[str, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    fail_on: tuple[str, ...] = ("regression",)
    exit_status: int = 0
    held: int = 0
    first_run: bool = False

    @property
    def counts(self) -> Counter[str]:
        """How many changes have each verdict."""
        return Counter(change.verdict for change in self.changes)

    @property
    def verdict(self) -> str:
        """One word for programs: "wrong", "regression", "unclear", "nothing" or "fine"."""
        counts = self.counts
        if counts["wrong"]:
            return "wrong"
        if counts["slower"] or counts["over budget"]:
            return "regression"
        if not (self.held or self.first_run or any(counts[name] for name in ("faster", "same", "unclear"))):
            return "nothing"
        return "unclear" if counts["unclear"] else "fine"

    def to_dict(self) -> dict[str, Any]:
        """As `--json` gives it: strict JSON, every number finite."""
        from dataclasses import asdict

        changes = []
        for change in self.changes:
            known = asdict(change)
            known["subject"]["name"] = change.subject.name
            for side in ("rounds_before", "rounds_after"):  # raw samples are arrays, which JSON does not know
                known[side] = [list(samples) for samples in known[side]]
            changes.append(known)
        return {
            "verdict": self.verdict,
            "exit_status": self.exit_status,
            "counts": {name: self.counts[name] for name in VERDICTS},
            "before": {**asdict(self.before), "facts": dict(self.before.facts)},
            "after": {**asdict(self.after), "facts": dict(self.after.facts)},
            "findings": list(self.findings),
            "limits": dict(self.limits),
            "fail_on": list(self.fail_on),
            "held": self.held,
            "first_run": self.first_run,
            "changes": changes,
        }
