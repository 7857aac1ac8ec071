"""Timing a plan on the GPU: what is timed is the very thing that was proved, launch by launch.

One sample: restore what the plan changes, flush the L2 cache, wait, hold the stream, queue start event, plan and
stop event, let go, wait for the whole device, read the events. Only the plan lies between the events.

Three modes: "cold" flushes the L2 cache before each sample, "hot" does not, and "graph" times a CUDA graph of many
runs of the plan, one after another, and shows the time of one: as in a program that does nothing else.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kbench.device.cuda.capture import CapturedPlan
from kbench.errors import CannotRunError, KbenchError, KernelFault
from kbench.family import Copy, Ref, Tensor
from kbench.measure.clocks import Clocks, conditions, remark
from kbench.measure.collect import Collected, Sample, collect, thrown_away, warm_up
from kbench.measure.empty import empty_launches
from kbench.measure.flush import Flush
from kbench.measure.hold import Hold
from kbench.measure.measurement import Measurement, summarise
from kbench.measure.replay import LONG_MS, Replayer, Second, allowed_ms, capturable, copies
from kbench.measure.statistics import StopRule, median, plural, valid_samples

if TYPE_CHECKING:
    from kbench.device.base import Bound
    from kbench.device.cuda.device import CudaDevice

Restore = Callable[[Any], None]
"""`restore(stream)` queues copies that give every inout tensor its start value again."""

MODES = ("cold", "hot", "graph")

# To be raised by whoever changes what a time means: times of two timers are not compared.
TIMER_VERSION = 1

# The interval of a slow plan's median is of no use within any budget that a sweep has; three samples show
# at least whether it repeats.
SLOW_SAMPLES = 3
# The host's clock encloses the events', so it must show more. What may be missing: the resolution of the
# events (0.5 us) and the drift of the two clocks, both with room to spare.
CLOCK_NOISE_MS = 0.005
CLOCK_DRIFT = 0.01
# How much longer than the events the host may see the device busy: letting go of the hold and noticing the
# end take some 20 us. Work on another stream shows in every sample, a busy host does not: so the least counts.
HIDDEN_WORK_MS = 0.2
HIDDEN_WORK_SHARE = 0.05
# Empty event pairs for the overhead: some, because the median of a few is stable enough to be shown.
OVERHEAD_SAMPLES = 21
# Under this multiple of the overhead, a time says more about launching than about the kernel.
LAUNCH_BOUND = 2.0
# The flush is tried on a copy whose two halves together fill half of L2: hot, it never leaves the cache.
# Cold must then be clearly slower; 10% is above the noise and far below what going to memory costs.
FLUSH_PROBE_SHARE = 4
FLUSH_SHOWS = 1.1
# The probe decides between two figures that are far apart, so a few samples will do.
PROBE_RULE = StopRule(minimum=7, maximum=7)
# The two timers differ by some microseconds at a kernel that does nothing (2.5 on an H200), which is taken off every
# second time: some samples more than a probe, so that it is good to a tenth of that.
GAP_RULE = StopRule(minimum=31, maximum=31)
# Runs of the plan in one sample of the mode "graph": as many as fill a millisecond, so that starting the graph is no
# part of it; few enough that sums in place do not overflow before they are restored.
GRAPH_SPAN_MS, MOST_RUNS = 1.0, 64


class Timer:
    """What timing needs on one device: the hold, the flush, two events, the card's clocks, and facts about the device.

    overhead_ms: what the events show with nothing between them. flush_gain: cold time over hot time of a
    copy that fits into L2, clearly above 1 if the flush works; None if the GPU does not report its L2. gap_ms, host_ms:
    what the two kinds of second timer (see `replay`; the host's clock around a sample) show more than the events for a
    kernel that does nothing; 0 where that could not be measured.
    """

    def __init__(self, device: CudaDevice, flush_bytes: int | None = None):
        if device.kind != "cuda":
            raise CannotRunError(f"times are taken on a GPU only, not on the {device.kind}", "use --device cuda")
        self._device = device
        self._clocks = Clocks(device.ordinal)
        with device.activate(), self._faults():
            self._hold = Hold(device)
            self._flush = Flush(device, flush_bytes)
            self._start, self._stop = device.xp.cuda.Event(), device.xp.cuda.Event()
        self._replayer = Replayer(device, self._flush)
        self.overhead_ms = self._measure_overhead()
        self.flush_gain: float | None = None
        self.flush_gain = self._probe_flush()
        self.gap_ms = self.host_ms = 0.0
        self.gap_ms, self.host_ms = self._measure_gaps()

    def facts(self) -> dict[str, Any]:
        """How this device is timed, for the record of a run."""
        return {
            "version": TIMER_VERSION,
            "overhead_ms": round(self.overhead_ms, 6),
            "flush_bytes": self._flush.nbytes,
            "flush_gain": None if self.flush_gain is None else round(self.flush_gain, 3),
            "gap_ms": round(self.gap_ms, 6),
            "host_ms": round(self.host_ms, 6),
            "clocks": self._clocks.available,
        }

    def measure(
        self,
        bound: Bound,
        restore: Restore | None = None,
        *,
        rule: StopRule | None = None,
        slow_limit_s: float = 0.1,
        on_launch: Callable[[], None] | None = None,
        mode: str = "cold",
        second: bool = True,
    ) -> Measurement:
        """Time all steps of a bound plan; see `time_plan`."""
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; it is one of {', '.join(MODES)}")
        rule = rule or StopRule()
        launched = on_launch or _nobody

        def take(hold: bool = True) -> Sample:
            launched()
            return self.sample(bound, restore, hold=hold, flush=mode == "cold")

        with self._device.activate():
            warmups = warm_up(take, slow_limit_s)
            fastest = min(valid_samples(warmups), default=0.0)
            slow = fastest > 1e3 * slow_limit_s
            if slow:
                count = min(SLOW_SAMPLES, rule.maximum)
                rule = replace(rule, minimum=count, maximum=count)
            runs = runs_of(fastest) if mode == "graph" else 1
            taker = self._replays(bound, runs, restore, launched) if mode == "graph" else take
            found = collect(taker, self._clocks.read, rule)
            times = [ms / runs for ms in found.times_ms]
            other = self._second(bound, restore, median(times), found, mode, launched) if second else None
        taken = conditions(found.readings, self._clocks.surroundings(), found.waits, found.kept)
        typical = median(times)
        return summarise(
            times,
            confidence=rule.confidence,
            warmups=len(warmups),
            overhead_ms=self.overhead_ms,
            mode=mode,
            stopped=found.stopped,
            runs=runs,
            conditions=taken,
            second=other.to_dict(typical) if other is not None else None,
            notes=(
                _flush_fails(self.flush_gain) if mode == "cold" else "",
                f"over {slow_limit_s:g} s a launch: {plural(len(times), 'sample')}" if slow else "",
                _launch_bound(typical, self.overhead_ms) if mode != "graph" else "",
                _hidden_work(found.samples),
                thrown_away(found),
                remark(taken, len(times)),
                other.remark(typical) if other is not None else "",
            ),
        )

    def sample(
        self,
        bound: Bound | CapturedPlan | None,
        restore: Restore | None = None,
        *,
        hold: bool = True,
        flush: bool = True,
    ) -> Sample:
        """Time one launch of the plan, or graph (of nothing, where `bound` is None). The device must be active.

        flush: empty the L2 cache before it. hold: queue all of it before any of it runs.
        """
        stream = self._device.stream
        with self._faults():
            if restore is not None:
                restore(stream)
            if flush:
                self._wait()  # the reset of persisting lines is not in the stream's order
                self._flush(stream)
            if flush or restore is not None:
                self._wait()  # so that memory is as idle when the plan begins as in a program, whatever went before
            try:
                if hold:
                    self._hold.begin(stream)
                self._start.record(stream)
                if isinstance(bound, CapturedPlan):
                    bound.launch(stream)
                elif bound is not None:
                    self._device.enqueue(bound, stream)
                self._stop.record(stream)
            finally:
                released = time.perf_counter()
                self._hold.release()
            self._wait()
            host_ms = 1e3 * (time.perf_counter() - released)
            event_ms = float(self._device.xp.cuda.get_elapsed_time(self._start, self._stop))
        return Sample(event_ms, host_ms, self._fault_of(event_ms, host_ms) if hold else "")

    def _fault_of(self, event_ms: float, host_ms: float) -> str:
        if self._hold.timed_out:
            return "the stream could not be held until the plan was queued"
        if event_ms > host_ms * (1 + CLOCK_DRIFT) + CLOCK_NOISE_MS:
            return f"the events say {event_ms:.4f} ms, the host's clock only {host_ms:.4f} ms"
        return ""

    def _wait(self) -> None:
        """Wait for the whole device: a plan must not hide work on another stream."""
        self._device.xp.cuda.runtime.deviceSynchronize()
        self._device.synchronize()

    def _replays(
        self, bound: Bound, runs: int, restore: Restore | None, launched: Callable[[], None]
    ) -> Callable[[], Sample]:
        """Takes samples of a graph that holds the plan `runs` times, started once before."""
        graph = self._device.capture(*[bound] * runs)

        def take() -> Sample:
            launched()
            return self.sample(graph, restore, flush=False)

        take()
        return take

    def _second(
        self,
        bound: Bound,
        restore: Restore | None,
        typical: float,
        found: Collected,
        mode: str,
        launched: Callable[[], None],
    ) -> Second | None:
        """What a second timer says of a plan whose median is `typical` milliseconds."""
        if not capturable(bound):
            return Second("none: what other processes do is no part of a graph")
        allowed = allowed_ms(typical, len(bound.prepared.plan))
        if typical >= LONG_MS and mode != "graph":
            host = median([sample.host_ms for sample in found.samples])
            return Second("the host's clock around each sample", host - self.host_ms, allowed)
        try:
            with self._faults():
                if mode == "graph":
                    runs = runs_of(typical)
                    ms = self._replayer.chained_ms(bound, runs, self._wait, launched)
                    return Second(f"the host's clock around graphs of {runs} and {2 * runs} runs", ms, allowed)
                ms = self._replayer.time_ms(
                    bound, restore, flush=mode == "cold", expected_ms=typical, wait=self._wait, on_launch=launched
                )
        except CannotRunError as error:  # a graph takes memory of its own
            return Second(f"none: {error}")
        return Second(f"the host's clock around graphs of {copies(typical)} runs", ms - self.gap_ms, allowed)

    def _measure_gaps(self) -> tuple[float, float]:
        """See the class: `gap_ms` and `host_ms`."""
        device = self._device
        try:
            (bound,) = empty_launches(device, 1)
            taken = self.measure(bound, rule=GAP_RULE)
            with device.activate():
                around = [self.sample(bound) for _ in range(GAP_RULE.minimum)]
        except KbenchError:
            return 0.0, 0.0
        second = (taken.second or {}).get("ms", taken.median_ms)
        return second - taken.median_ms, median([sample.host_ms - sample.event_ms for sample in around])

    def _measure_overhead(self) -> float:
        """Median of what the events show with nothing between them, in milliseconds."""
        with self._device.activate():
            samples = [self.sample(None, None, hold=True, flush=False).event_ms for _ in range(OVERHEAD_SAMPLES)]
        valid = valid_samples(samples)
        return median(valid) if valid else 0.0  # events of 0 ms: the overhead is below their resolution

    def _probe_flush(self) -> float | None:
        device = self._device
        count = device.props.l2_bytes // FLUSH_PROBE_SHARE
        if count == 0:
            return None
        tensors = tuple(Tensor(name, (count,), "uint8", "scratch") for name in ("from", "to"))
        buffers = {tensor.name: device.alloc(tensor) for tensor in tensors}
        try:
            plan = (Copy(Ref("to"), Ref("from"), count),)
            bound = device.bind(device.prepare(plan, None, tensors), buffers)
            cold, hot = (
                self.measure(bound, rule=PROBE_RULE, mode=mode, second=False).median_ms for mode in ("cold", "hot")
            )
        finally:
            for buffer in buffers.values():
                device.free(buffer)
        return cold / hot

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """A kernel's fault shows in whatever CUDA call comes next: let the device say what it was."""
        cuda = self._device.xp.cuda
        try:
            yield
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            self._device.synchronize()
            raise KernelFault("launch-failed", f"CUDA refused to go on while timing: {error}") from error


def time_plan(
    device: CudaDevice,
    bound: Bound,
    restore: Restore | None = None,
    *,
    rule: StopRule | None = None,
    slow_limit_s: float = 0.1,
    on_launch: Callable[[], None] | None = None,
    mode: str = "cold",
    second: bool = True,
) -> Measurement:
    """Time all steps of a bound plan, in milliseconds.

    restore: gives inout tensors their start value before each launch, outside the timed span.
    rule: when to stop (default `StopRule()`). slow_limit_s: plans above it get three samples and a note.
    on_launch: called before each launch, to tell a watchdog that the last one ended.
    mode: "cold" flushes the L2 cache before each launch, "hot" does not, "graph" times a CUDA graph of many runs.
    second: whether a second timer is asked too; the measurement notes where the two differ.

    Raises KernelFault if the plan fails, or if not one sample is valid; CannotRunError on a device that is
    no GPU, or without memory for the flush.
    """
    return timer_of(device).measure(
        bound, restore, rule=rule, slow_limit_s=slow_limit_s, on_launch=on_launch, mode=mode, second=second
    )


@functools.lru_cache(maxsize=1)  # a process works on one device at a time
def timer_of(device: CudaDevice) -> Timer:
    """The one timer of this process's device."""
    return Timer(device)


def runs_of(expected_ms: float) -> int:
    """How many runs of a plan one sample of the mode "graph" holds."""
    return min(MOST_RUNS, max(1, math.ceil(GRAPH_SPAN_MS / max(expected_ms, 1e-6))))


def _nobody() -> None:
    """Told of a launch where nobody watches."""


def _launch_bound(median_ms: float, overhead_ms: float) -> str:
    if median_ms > LAUNCH_BOUND * overhead_ms:
        return ""
    return f"launch bound: two events with nothing between them show {overhead_ms:.4f} ms"


def _flush_fails(gain: float | None) -> str:
    if gain is None or gain >= FLUSH_SHOWS:
        return ""
    return f"maybe not cold: flushing L2 makes a copy that fits into it only {gain:.2f} times slower"


def _hidden_work(samples: list[Sample]) -> str:
    least = min(samples, key=lambda sample: sample.host_ms - sample.event_ms)
    excess = least.host_ms - least.event_ms
    if excess <= HIDDEN_WORK_MS + HIDDEN_WORK_SHARE * least.event_ms:
        return ""
    return f"the device was busy {excess:.3f} ms longer than the events say: the plan works outside its stream"


def remarks(timer: Timer, samples: list[Sample]) -> list[str]:
    """What a reader must know beside the times of one plan that were taken sample by sample, cold."""
    middle = median([sample.event_ms for sample in samples])
    notes = (_flush_fails(timer.flush_gain), _launch_bound(middle, timer.overhead_ms), _hidden_work(samples))
    return [note for note in notes if note]
