"""Taking samples: launch until the times have settled, then until the rule is content, without what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kbench.errors import KernelFault
from kbench.measure.clocks import Reading
from kbench.measure.statistics import NO_SAMPLES, StopRule, plural, settled, valid_samples

# Clocks that fell while the host was computing a reference need some milliseconds of work to come back.
WARMUP_AT_LEAST_S = 0.02
# Times that still fall after this long are drifting, not warming up: the samples will show it.
WARMUP_AT_MOST_S = 0.3
# A plan this many times slower than the limit is not slow for being launched first: one warm-up is enough.
CLEARLY_SLOW = 10
# Samples are thrown away for rare mishaps of the host. More than a few in one measurement have a cause.
MAX_DISCARDED = 5
# A card that holds itself back is left alone for this long, twice as long each time. Three quarters of a second in all:
# a card that needs longer is at its limit, and its times are then what it can do.
FIRST_PAUSE_S, MAX_WAITS = 0.05, 4


@dataclass(frozen=True)
class Sample:
    """One timed span in milliseconds: by the events, and by the host from letting go to the idle device.

    fault: why it must not be used; "" if it may.
    """

    event_ms: float
    host_ms: float
    fault: str = ""


@dataclass
class Collected:
    """Valid samples with the reading after each, and what became of the others.

    discarded: the faults of those thrown away. waits: samples thrown away because the card held itself back. kept: how
    many count although it did, after all waiting. stopped: why sampling ended.
    """

    samples: list[Sample] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    waits: int = 0
    kept: int = 0
    stopped: str = ""

    @property
    def times_ms(self) -> list[float]:
        return [sample.event_ms for sample in self.samples]

    def add(self, sample: Sample, reading: Reading) -> None:
        self.samples.append(sample)
        self.readings.append(reading)
        self.kept += bool(reading.throttles)


def warm_up(take: Callable[[bool], Sample], slow_limit_s: float) -> list[float]:
    """Launch until the times stop falling; what the events showed, in milliseconds.

    take: takes a sample, holding the stream or not. The first launch is not held: what the driver loads lazily would
    wait for the hold to end.
    """
    started = time.perf_counter()
    times = [take(False).event_ms]
    while times[0] <= 1e3 * slow_limit_s * CLEARLY_SLOW:
        times.append(take(True).event_ms)
        elapsed = time.perf_counter() - started
        if elapsed >= WARMUP_AT_MOST_S or (elapsed >= WARMUP_AT_LEAST_S and settled(times)):
            break
    return times


def collect(take: Callable[[], Sample], read: Callable[[], Reading], rule: StopRule) -> Collected:
    """Samples until the rule is content. A faulty one is thrown away; one of a card that holds itself back too, after a
    pause, until there was enough waiting.

    Raises KernelFault if there is not one valid sample.
    """
    found = Collected()
    started = time.perf_counter()
    while not (stopped := rule.done(found.times_ms, time.perf_counter() - started)):
        sample, reading = take(), read()
        fault = sample.fault or ("" if valid_samples([sample.event_ms]) else f"an event time of {sample.event_ms} ms")
        if fault:
            found.discarded.append(fault)
            if len(found.discarded) >= MAX_DISCARDED:
                stopped = f"{len(found.discarded)} samples thrown away"
                break
        elif reading.throttles and found.waits < MAX_WAITS:
            time.sleep(FIRST_PAUSE_S * 2**found.waits)
            found.waits += 1
        else:
            found.add(sample, reading)
    if not found.samples:
        last = found.discarded[-1]
        raise KernelFault("launch-failed", f"{NO_SAMPLES}: {last}, {len(found.discarded)} times in a row")
    found.stopped = stopped
    return found


def thrown_away(found: Collected) -> str:
    """That samples were thrown away, and why the last one was; "" if none was."""
    discarded = found.discarded
    return f"{plural(len(discarded), 'sample')} thrown away: {discarded[-1]}" if discarded else ""
