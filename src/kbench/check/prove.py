"""Proving a prepared plan: launches from poisoned memory in every order that the device knows, each one judged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from kbench.check.arrays import count_different, words
from kbench.check.bound import Tolerance
from kbench.check.buffers import Buffers, ChangedInput
from kbench.check.case import Case
from kbench.check.compare import compare
from kbench.check.explain import Clues
from kbench.check.verdict import Finding, OutputVerdict, Verdict, join_axes, number
from kbench.device.base import Bound, Damage, Device, Prepared
from kbench.errors import KernelFault
from kbench.family import ITEM_SIZES, Array, Family, Tensor, Version

Guard = Callable[[], AbstractContextManager[Any]]

# What outputs and scratch hold before a launch. 0xFF is a NaN in every floating-point type and spreads through
# sums. The second is finite, because maxima drop NaNs: above most data (12,690 in fp32, 6.3 in fp16), and small
# enough for a sum to show what was added to it.
POISONS = (0xFF, 0x46)


def prove(
    device: Device,
    family: Family,
    version: Version,
    prepared: Prepared,
    buffers: Buffers,
    case: Case,
    *,
    tolerance: Tolerance | None = None,
    repeats: int = 2,
    guard: Guard = nullcontext,
) -> Verdict:
    """Launch the plan once per schedule of the device, at least `repeats` times, then once per schedule for each
    allowed alias, and judge every launch.

    guard: entered around each launch alone, for a time limit. A KernelFault that only a wrong kernel can
    have becomes a finding; any other (a crash, a hang, a lost context) is raised.
    """
    trial = _Trial(device, version, prepared, buffers, case, tolerance, guard)
    with device.activate():
        schedules = device.schedules or ("",)
        for i in range(max(repeats, len(schedules))):
            trial.launch(schedules[i % len(schedules)], POISONS[i % len(POISONS)])
        if trial.partly_wrong:
            # Schedule and poison changed together above: all their pairs tell which of them matters.
            for poison in POISONS:
                for schedule in schedules:
                    trial.launch(schedule, poison)
        for alias in buffers.aliases():
            for schedule in schedules:
                trial.launch(schedule, POISONS[0], alias)
        return trial.verdict()


def recheck(
    device: Device,
    family: Family,
    version: Version,
    prepared: Prepared,
    buffers: Buffers,
    case: Case,
    *,
    tolerance: Tolerance | None = None,
    guard: Guard = nullcontext,
) -> Verdict:
    """One launch more, on another case than the buffers hold, after launches that nobody looked at."""
    trial = _Trial(device, version, prepared, buffers, case, tolerance, guard, earlier=buffers.case)
    with device.activate():
        trial.launch(device.schedules[0] if device.schedules else "", POISONS[0])
        return trial.verdict()


@dataclass
class _Launch:
    """One launch that was judged. outputs is empty if it did not come to an end."""

    schedule: str
    poison: int
    alias: tuple[str, str] | None
    outputs: dict[str, OutputVerdict] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs.values())


@dataclass
class _Trial:
    """The launches of one proof and what they have shown so far."""

    device: Device
    version: Version
    prepared: Prepared
    buffers: Buffers
    case: Case
    tolerance: Tolerance | None
    guard: Guard
    earlier: Case | None = None
    launches: list[_Launch] = field(default_factory=list)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    stopped: bool = False
    # The first launch's outputs as bits, and how many elements of each later differed from them.
    _first: dict[str, Array] = field(default_factory=dict)
    _unsteady: dict[str, int] = field(default_factory=dict)
    _bounds: dict[tuple[str, str] | None, Bound] = field(default_factory=dict)

    @property
    def separate(self) -> list[_Launch]:
        return [launch for launch in self.launches if launch.alias is None]

    @property
    def partly_wrong(self) -> bool:
        return not self.stopped and len({launch.passed for launch in self.separate}) == 2

    def launch(self, schedule: str, poison: int, alias: tuple[str, str] | None = None) -> None:
        """Reset, run and judge; nothing after a launch that was stopped."""
        if self.stopped:
            return
        launch = _Launch(schedule, poison, alias)
        self.launches.append(launch)
        if alias not in self._bounds:
            self._bounds[alias] = self.buffers.bind(self.prepared, alias)
        bound = self._bounds[alias]
        self.buffers.reset(self.case, poison)
        try:
            self.device.distribute(bound)
            with self.guard():
                self.device.enqueue(bound, schedule=schedule)
                self.device.synchronize()
            self.device.collect(bound)
        except KernelFault as fault:
            if fault.row_status != "fail" or fault.context_lost:
                raise
            self.stopped = True
            self._find(Finding("fault", f"{fault}{_told_apart(schedule, alias)}", tuple(fault.details())))
            return
        self._inspect_memory(launch)
        self._judge_outputs(launch)

    # ------------------------------------------------------------------------------------------ one launch

    def _inspect_memory(self, launch: _Launch) -> None:
        for damage in self.buffers.damages():
            self._find(_redzone_finding(damage, self.buffers.by_name[damage.tensor].tensor))
        for changed in self.buffers.changed_inputs(but=launch.alias[0] if launch.alias else ""):
            self._find(_input_finding(changed))

    def _judge_outputs(self, launch: _Launch) -> None:
        xp, on_device = self.device.xp, self.case.on(self.device)
        for name, buffer in self.buffers.by_name.items():
            if buffer.tensor.role not in ("out", "inout"):
                continue
            holder = self.buffers.by_name[launch.alias[0]] if launch.alias and launch.alias[1] == name else buffer
            expected = on_device.expected(name)
            same = self._same_as_first(name, words(holder.array, xp), expected.skip, launch)
            # A failure is judged anew: the same bits over other poison are not unwritten.
            if same and self.launches[0].outputs[name].passed:
                launch.outputs[name] = self.launches[0].outputs[name]
                continue
            launch.outputs[name] = compare(
                buffer.tensor, holder.array, expected, xp, self.tolerance,
                clues=self._clues(name, launch), locate=self._unexplained(name, launch.poison),
            )  # fmt: skip

    def _unexplained(self, name: str, poison: int) -> bool:
        """Whether a failure is worth explaining: the first is, and the next if the first may only look unwritten,
        since a CPU hands a NaN on unchanged through any arithmetic."""
        explained = [
            other for other in self.launches if name in other.outputs and other.outputs[name].first is not None
        ]
        return all(other.outputs[name].kind == "unwritten" and other.poison != poison for other in explained)

    def _same_as_first(self, name: str, bits: Array, skip: Array | None, launch: _Launch) -> bool:
        """Bit for bit, as far as elements are specified; counts the difference, and keeps the first launch's bits."""
        if name not in self._first:
            self._first[name] = bits.copy()
            return False
        different = count_different(bits, self._first[name], skip, self.device.xp)
        if launch.alias is None:
            self._unsteady[name] = max(self._unsteady.get(name, 0), different)
        return different == 0

    def _clues(self, name: str, launch: _Launch) -> Clues:
        """An aliased output started as the input, an "inout" as its start value: there is no poison to recognise."""
        tensor = self.buffers.by_name[name].tensor
        poisoned = tensor.role == "out" and not (launch.alias and launch.alias[1] == name)
        # The earlier case's own answer, not a copy of what that launch left: it costs no memory.
        previous = self.earlier.on(self.device).expected(name) if self.earlier not in (None, self.case) else None
        return Clues(launch.poison if poisoned else None, previous, self.buffers.block)

    def _find(self, finding: Finding) -> None:
        self.findings.setdefault((finding.kind, finding.text), finding)

    # ------------------------------------------------------------------------------------------ all launches

    def verdict(self) -> Verdict:
        judged = [launch for launch in self.launches if launch.outputs]
        deterministic = None if len([launch for launch in judged if launch.alias is None]) < 2 else self._steady()
        outputs = self._outputs(judged)
        if deterministic is False and self.version.claims_deterministic and all(output.passed for output in outputs):
            name, count = next((name, count) for name, count in self._unsteady.items() if count)
            text = f"claims to be deterministic, but {count} elements of {name} differ between launches"
            self._find(Finding("determinism", text))
        remarks = tuple(self._remarks(judged))
        findings = tuple(self.findings.values())
        return Verdict(outputs, findings, deterministic, len(self.launches), self.case.judge, remarks)

    def _steady(self) -> bool:
        return not any(self._unsteady.values())

    def _outputs(self, judged: list[_Launch]) -> tuple[OutputVerdict, ...]:
        """Each output's first failing launch, else the one that used most of its bound."""
        chosen = []
        for name in judged[0].outputs if judged else ():
            verdicts = [launch.outputs[name] for launch in judged]
            failed = [verdict for verdict in verdicts if not verdict.passed]
            chosen.append(_told(failed) if failed else max(verdicts, key=lambda verdict: verdict.used or 0.0))
        return tuple(chosen)

    def _remarks(self, judged: list[_Launch]) -> list[str]:
        separate = [launch for launch in judged if launch.alias is None]
        wrong = [launch for launch in separate if not launch.passed]
        if wrong:
            return [self._what_matters(separate, wrong)] if len(wrong) < len(separate) else self._all_wrong(separate)
        aliased = [launch for launch in judged if launch.alias is not None and not launch.passed]
        if aliased and aliased[0].alias is not None:
            source, target = aliased[0].alias
            return [f"only where {target} is the same memory as {source}, which the version allows"]
        return []

    def _what_matters(self, launches: list[_Launch], wrong: list[_Launch]) -> str:
        """What tells the wrong launches from the right ones."""
        right = [launch for launch in launches if launch.passed]
        how_often = f"in {len(wrong)} of {len(launches)} launches"
        if launches.index(wrong[0]) >= len(right):
            first = "the first" if len(right) == 1 else f"the first {len(right)}"
            return f"{how_often}, all but {first}: it keeps something between launches"
        if not {launch.schedule for launch in wrong} & {launch.schedule for launch in right}:
            order = wrong[0].schedule
            return f"{how_often}, only with threads in {order} order: a missing barrier or a race"
        if not {launch.poison for launch in wrong} & {launch.poison for launch in right}:
            held = _poison_words(wrong[0].poison)
            return f"{how_often}, only where memory held {held}: it reads what it has not written"
        return f"{how_often}: a race, or it keeps something between launches"

    def _all_wrong(self, launches: list[_Launch]) -> list[str]:
        outputs = [output for output in self._outputs(launches) if not output.passed]
        if any(output.kind == "unwritten" for output in outputs) or len(launches) < 2 or self._steady():
            return []
        return ["the wrong elements differ from launch to launch: memory that was not initialised, or a race"]


def _told(failed: list[OutputVerdict]) -> OutputVerdict:
    """The first failure; a NaN where elements only look unwritten and other poison came out as something else."""
    first = failed[0]
    computed = any(verdict.first is not None and verdict.kind != "unwritten" for verdict in failed[1:])
    return replace(first, kind="nan") if first.kind == "unwritten" and computed else first


def _told_apart(schedule: str, alias: tuple[str, str] | None) -> str:
    if alias is not None:
        return f" (with {alias[1]} in the memory of {alias[0]})"
    return f" (with threads in {schedule} order)" if schedule not in ("", "forward") else ""


def _poison_words(poison: int) -> str:
    return "NaNs" if poison == 0xFF else f"bytes 0x{poison:02X}"


def _redzone_finding(damage: Damage, tensor: Tensor) -> Finding:
    size = ITEM_SIZES[tensor.dtype]
    if damage.offset < 0:
        where = f"{-damage.offset} bytes before the start of"
    else:
        past = damage.offset - tensor.nbytes
        where = f"{past} bytes past the end of" if past else "right past the end of"
    element = damage.offset // size
    return Finding(
        "redzone",
        f"writes outside {tensor.name}: {damage.count} bytes changed {where} it",
        (f"as if element {element} of {tensor.count} elements in memory had been written",),
    )


def _input_finding(changed: ChangedInput) -> Finding:
    tensor = changed.tensor
    return Finding(
        "input",
        f"changes its input {tensor.name}: {changed.count} of {tensor.count} elements, first at "
        f"{join_axes(changed.index, tensor.axes)}: was {number(changed.before)}, is {number(changed.after)}",
    )
