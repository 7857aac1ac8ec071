"""Where a step's time goes: role by role, as predicted from kernels timed alone and as measured in the step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kbench.params import place_text
from kbench.train.chooser import Answer, Chooser
from kbench.train.engine import Engine
from kbench.train.program import Action
from kbench.train.setup import Chosen

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

# Calls that are queued behind a held stream at once. Each is several launches and two events; a stream takes about a
# thousand before queueing waits, and a held stream would then wait for itself.
_CHUNK = 40


@dataclass(frozen=True)
class Line:
    """One need of one slot in the step. predicted_ms: sum of its launches, timed alone with a cold L2. measured_ms: the
    same inside the step. Both per micro-step; None where nothing was measured. other, other_ms: the next best choice
    for the whole slot, and how much slower it is; "" and None but at the slot's first need."""

    slot: str
    family: str
    version: int
    block: int
    times: int
    predicted_ms: float | None
    measured_ms: float | None
    other: str = ""
    other_ms: float | None = None
    params: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, self.params)


def explain(chosen: Chosen, measured: dict[str, float] | None, chooser: Chooser) -> list[Line]:
    """Line by line. measured: milliseconds by role, of one step, None on a device that has no times."""
    lines = []
    for answer in chosen.answers:
        other = _runner_up(answer, chooser)
        for candidate in answer.candidates:
            need = candidate.need
            predicted = None if candidate.ms is None else candidate.ms * need.times
            found = measured.get(need.role) if measured is not None else None
            lines.append(
                Line(
                    answer.slot.name, need.family, candidate.version.number, candidate.block, need.times, predicted,
                    found, *other, params=dict(candidate.params),
                )
            )  # fmt: skip
            other = ("", None)
    return lines


def _runner_up(answer: Answer, chooser: Chooser) -> tuple[str, float | None]:
    """The best choice for the slot with another version somewhere, and the milliseconds that it adds to the step."""
    best = None
    for alternative in chooser.alternatives(answer.slot):
        numbers = [c.version.number for c in alternative.candidates]
        same = alternative.way == answer.way and numbers == [c.version.number for c in answer.candidates]
        if not same and alternative.cost < float("inf") and (best is None or alternative.cost < best.cost):
            best = alternative
    if best is None or answer.cost == float("inf"):
        return "", None
    names = "+".join(f"{c.need.family}:{c.version.number}" for c in best.candidates)
    return names, best.cost - answer.cost


def measure_roles(engine: Engine, actions: tuple[Action, ...]) -> dict[str, float]:
    """Milliseconds on the GPU of each role, all its calls in a step together: events around every call, queued behind a
    held stream so that no launch is waited for."""
    from kbench.measure.hold import Hold

    device = cast("CudaDevice", engine.device)
    cuda = device.xp.cuda
    totals: dict[str, float] = defaultdict(float)
    with device.activate():
        hold = Hold(device)
        for start in range(0, len(actions), _CHUNK):
            chunk = actions[start : start + _CHUNK]
            events = [cuda.Event() for _ in range(len(chunk) + 1)]
            hold.begin(device.stream)
            events[0].record(device.stream)
            for bound, event in zip(engine.bounds(chunk), events[1:], strict=True):
                device.enqueue(bound)
                event.record(device.stream)
            hold.release()
            device.synchronize()
            for action, before, after in zip(chunk, events, events[1:], strict=False):
                totals[action.role] += cuda.get_elapsed_time(before, after)
    return dict(totals)
