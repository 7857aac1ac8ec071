"""CUDA graphs as a second way to time a plan: no events, no hold, another clock.

A graph holds the same plan several times, with all that goes before each sample (start values restored, L2 flushed);
a second graph holds all but the plan. The host's clock times both from launch to idle device, and what they differ by,
for each plan, is the plan's time: starting a graph, noticing its end and the flushes cancel. What stays in is the gap
between two nodes of a graph, which a kernel that does nothing shows.

For the mode "graph", where the plans follow each other without anything between them, the second graph holds twice as
many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kbench.family import AllReduce
from kbench.measure.statistics import median

if TYPE_CHECKING:
    from kbench.device.base import Bound
    from kbench.device.cuda.device import CudaDevice
    from kbench.measure.flush import Flush

# Copies of the plan in one graph: as many as 10 ms hold, so that a microsecond of the host's clock is a small part of
# the span; at most 16, which bring it below 0.1 us a plan.
SPAN_MS, MOST_COPIES = 10.0, 16
# Replays of each graph, after one that warms up; the median of five shrugs off two mishaps of the host.
REPLAYS = 5
# From here on the host's clock around each sample is a second timer by itself: the jitter of its 20 us is under 0.5%.
# Also, work this long that follows upon itself draws more power than one launch alone, and may lower the clock.
LONG_MS = 1.0
# The two timers agree within this share of the time, which is what clean or dirty lines that a plan leaves in L2 may
# change in the flush after it, and this time for each step: the gaps between kernels in a stream and between the nodes
# of a graph differ by that.
AGREES_SHARE, AGREES_MS = 0.05, 0.001


@dataclass(frozen=True)
class Second:
    """What a second timer says of a plan. by: how it was taken. ms: None where it could not be taken.

    allowed_ms: how far it may be from the median.
    """

    by: str
    ms: float | None = None
    allowed_ms: float = 0.0

    def agrees(self, median_ms: float) -> bool | None:
        """Whether both timers say the same; None where there is no second figure."""
        return None if self.ms is None else abs(self.ms - median_ms) <= self.allowed_ms

    def to_dict(self, median_ms: float) -> dict[str, Any]:
        known: dict[str, Any] = {"by": self.by}
        if self.ms is not None:
            known |= {"ms": round(self.ms, 6), "allowed_ms": round(self.allowed_ms, 6)}
        return {**known, "agrees": self.agrees(median_ms)}

    def remark(self, median_ms: float) -> str:
        """What a reader must know; "" where both agree or there is only one."""
        if self.ms is None or self.agrees(median_ms):
            return ""
        apart = abs(self.ms / median_ms - 1)
        return f"a second timer says {self.ms:.4f} ms, {apart:.0%} apart ({self.by})"


def allowed_ms(median_ms: float, steps: int) -> float:
    """How far two timers of one plan of so many steps may be apart."""
    return AGREES_SHARE * median_ms + AGREES_MS * (1 + steps)


def copies(expected_ms: float) -> int:
    """How often a plan of this time is put into one graph."""
    return int(min(MOST_COPIES, max(2.0, SPAN_MS / max(expected_ms, 1e-6))))


def capturable(bound: Bound) -> bool:
    """Whether a plan can be part of a graph: other GPUs' processes cannot be captured from here."""
    return not any(isinstance(step, AllReduce) for step in bound.prepared.plan)


class Replayer:
    """Times plans by the host's clock around CUDA graphs."""

    def __init__(self, device: CudaDevice, flush: Flush):
        self._device, self._flush = device, flush

    def chained_ms(self, bound: Bound, count: int, wait: Callable[[], None], on_launch: Callable[[], None]) -> float:
        """Milliseconds of one run of the plan among many that follow each other."""

        def work() -> None:
            self._device.enqueue(bound, self._device.stream)

        once, twice = (self._replay_ms(work, times * count, bound, wait=wait, on_launch=on_launch) for times in (1, 2))
        return (twice - once) / count

    def time_ms(
        self,
        bound: Bound,
        restore: Callable[[Any], None] | None,
        *,
        flush: bool,
        expected_ms: float,
        wait: Callable[[], None],
        on_launch: Callable[[], None],
    ) -> float:
        """Milliseconds of one run of the plan; may be negative for one that takes less than the clock shows."""
        stream = self._device.stream
        count = copies(expected_ms)

        def before() -> None:
            if restore is not None:
                restore(stream)
            # One node before each plan in any case, so that both graphs start, and go on, alike.
            self._flush.write(stream, whole=flush)

        def whole() -> None:
            before()
            self._device.enqueue(bound, stream)

        with_plan, without = (
            self._replay_ms(work, count, bound, wait=wait, on_launch=on_launch) for work in (whole, before)
        )
        return (with_plan - without) / count

    def _replay_ms(
        self,
        work: Callable[[], None],
        count: int,
        bound: Bound,
        *,
        wait: Callable[[], None],
        on_launch: Callable[[], None],
    ) -> float:
        """Median milliseconds of `count` times the work, from launching its graph to the idle device."""

        def queue() -> None:
            for _ in range(count):
                work()

        graph = self._device.capture_work(queue, (bound,))
        times = []
        for _ in range(1 + REPLAYS):
            on_launch()
            wait()
            started = time.perf_counter()
            graph.launch(self._device.stream)
            wait()
            times.append(1e3 * (time.perf_counter() - started))
        return median(times[1:])
