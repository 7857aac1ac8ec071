"""Timing a plan on the GPU: what is timed is the very thing that was proved, launch by launch.

One sample: restore what the plan changes, flush the L2 cache, hold the stream, queue start event, plan and
stop event, let go, wait for the whole device, read the events. Only the plan lies between the events.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kbench.errors import CannotRunError, KernelFault
from kbench.family import Copy, Ref, Tensor
from kbench.measure.flush import Flush
from kbench.measure.hold import Hold
from kbench.measure.measurement import Measurement, summarise
from kbench.measure.statistics import NO_SAMPLES, StopRule, median, plural, settled, valid_samples

if TYPE_CHECKING:
    from kbench.device.base import Bound
    from kbench.device.cuda.device import CudaDevice

Restore = Callable[[Any], None]
"""`restore(stream)` queues copies that give every inout tensor its start value again."""

MODES = ("cold", "hot")

# Clocks that fell while the host was computing a reference need some milliseconds of work to come back.
WARMUP_AT_LEAST_S = 0.02
# Times that still fall after this long are drifting, not warming up: the samples will show it.
WARMUP_AT_MOST_S = 0.3
# A plan this many times slower than the limit is not slow for being launched first: one warm-up is enough.
CLEARLY_SLOW = 10
# The interval of a slow plan's median is of no use within any budget that a sweep has; three samples show
# at least whether it repeats.
SLOW_SAMPLES = 3
# Samples are thrown away for rare mishaps of the host. More than a few in one measurement have a cause.
MAX_DISCARDED = 5
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


@dataclass(frozen=True)
class Sample:
    """One timed span in milliseconds: by the events, and by the host from letting go to the idle device.

    fault: why it must not be used; "" if it may.
    """

    event_ms: float
    host_ms: float
    fault: str = ""


class Timer:
    """What timing needs on one device: the hold, the flush, two events, and two facts about the device.

    overhead_ms: what the events show with nothing between them. flush_gain: cold time over hot time of a
    copy that fits into L2, clearly above 1 if the flush works; None if the GPU does not report its L2.
    """

    def __init__(self, device: CudaDevice, flush_bytes: int | None = None):
        if device.kind != "cuda":
            raise CannotRunError(f"times are taken on a GPU only, not on the {device.kind}", "use --device cuda")
        self._device = device
        with device.activate(), self._faults():
            self._hold = Hold(device)
            self._flush = Flush(device, flush_bytes)
            self._start, self._stop = device.xp.cuda.Event(), device.xp.cuda.Event()
        self.overhead_ms = self._measure_overhead()
        self.flush_gain: float | None = None
        self.flush_gain = self._probe_flush()

    def measure(
        self,
        bound: Bound,
        restore: Restore | None = None,
        *,
        rule: StopRule | None = None,
        slow_limit_s: float = 0.1,
        on_launch: Callable[[], None] | None = None,
        mode: str = "cold",
    ) -> Measurement:
        """Time all steps of a bound plan; see `time_plan`."""
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}; it is one of {', '.join(MODES)}")
        rule = rule or StopRule()

        def take(hold: bool = True) -> Sample:
            if on_launch is not None:
                on_launch()
            return self.sample(bound, restore, hold=hold, flush=mode == "cold")

        with self._device.activate():
            warmups = _warm_up(take, slow_limit_s)
            slow = min(valid_samples(warmups), default=0.0) > 1e3 * slow_limit_s
            if slow:
                count = min(SLOW_SAMPLES, rule.maximum)
                rule = replace(rule, minimum=count, maximum=count)
            samples, discarded, stopped = _collect(take, rule)
        times = [sample.event_ms for sample in samples]
        return summarise(
            times,
            confidence=rule.confidence,
            warmups=len(warmups),
            overhead_ms=self.overhead_ms,
            mode=mode,
            stopped=stopped,
            notes=(
                _flush_fails(self.flush_gain) if mode == "cold" else "",
                f"over {slow_limit_s:g} s a launch: {plural(len(times), 'sample')}" if slow else "",
                _launch_bound(median(times), self.overhead_ms),
                _hidden_work(samples),
                _thrown_away(discarded),
            ),
        )

    def sample(
        self, bound: Bound | None, restore: Restore | None = None, *, hold: bool = True, flush: bool = True
    ) -> Sample:
        """Time one launch of the plan (of nothing, where `bound` is None). The device must be active.

        flush: empty the L2 cache before it. hold: queue all of it before any of it runs.
        """
        stream = self._device.stream
        with self._faults():
            if restore is not None:
                restore(stream)
            if flush:
                self._wait()  # the reset of persisting lines is not in the stream's order
                self._flush(stream)
            try:
                if hold:
                    self._hold.begin(stream)
                self._start.record(stream)
                if bound is not None:
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
            cold, hot = (self.measure(bound, rule=PROBE_RULE, mode=mode).median_ms for mode in MODES)
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
) -> Measurement:
    """Time all steps of a bound plan, in milliseconds.

    restore: gives inout tensors their start value before each launch, outside the timed span.
    rule: when to stop (default `StopRule()`). slow_limit_s: plans above it get three samples and a note.
    on_launch: called before each launch, to tell a watchdog that the last one ended.
    mode: "cold" flushes the L2 cache before each launch, "hot" does not.

    Raises KernelFault if the plan fails, or if not one sample is valid; CannotRunError on a device that is
    no GPU, or without memory for the flush.
    """
    timer = timer_of(device)
    return timer.measure(bound, restore, rule=rule, slow_limit_s=slow_limit_s, on_launch=on_launch, mode=mode)


@functools.lru_cache(maxsize=1)  # a process works on one device at a time
def timer_of(device: CudaDevice) -> Timer:
    """The one timer of this process's device."""
    return Timer(device)


def _warm_up(take: Callable[[bool], Sample], slow_limit_s: float) -> list[float]:
    """Launch until the times stop falling; what the events showed, in milliseconds.

    The first launch is not held: what the driver loads lazily would wait for the hold to end.
    """
    started = time.perf_counter()
    times = [take(False).event_ms]
    while times[0] <= 1e3 * slow_limit_s * CLEARLY_SLOW:
        times.append(take(True).event_ms)
        elapsed = time.perf_counter() - started
        if elapsed >= WARMUP_AT_MOST_S or (elapsed >= WARMUP_AT_LEAST_S and settled(times)):
            break
    return times


def _collect(take: Callable[[], Sample], rule: StopRule) -> tuple[list[Sample], list[str], str]:
    """Valid samples, the faults of those thrown away, and why sampling stopped.

    Raises KernelFault if there is not one valid sample.
    """
    samples: list[Sample] = []
    discarded: list[str] = []
    started = time.perf_counter()
    while not (stopped := rule.done([sample.event_ms for sample in samples], time.perf_counter() - started)):
        sample = take()
        fault = sample.fault or ("" if valid_samples([sample.event_ms]) else f"an event time of {sample.event_ms} ms")
        if not fault:
            samples.append(sample)
            continue
        discarded.append(fault)
        if len(discarded) >= MAX_DISCARDED:
            stopped = f"{len(discarded)} samples thrown away"
            break
    if not samples:
        raise KernelFault("launch-failed", f"{NO_SAMPLES}: {discarded[-1]}, {len(discarded)} times in a row")
    return samples, discarded, stopped


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


def _thrown_away(discarded: list[str]) -> str:
    return f"{plural(len(discarded), 'sample')} thrown away: {discarded[-1]}" if discarded else ""


def remarks(timer: Timer, samples: list[Sample]) -> list[str]:
    """What a reader must know beside the times of one plan that were taken sample by sample, cold."""
    middle = median([sample.event_ms for sample in samples])
    notes = (_flush_fails(timer.flush_gain), _launch_bound(middle, timer.overhead_ms), _hidden_work(samples))
    return [note for note in notes if note]
