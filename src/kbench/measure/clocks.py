"""What the card says of itself while it is timed: clocks, temperature, power, and why it runs slower than it could.

A time taken while the card holds itself back is a time of the cooling, not of the kernel. NVML tells: it is asked after
each sample, which costs tens of microseconds outside the timed span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kbench.device.cuda.nvml import Nvml

# NVML's clock event reasons (nvml.h) that take speed away. The others (idle, clocks set by an application or for a
# display) are how a card is meant to run.
THROTTLES = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "heat (software)",
    0x040: "heat (hardware)",
    0x080: "power brake",
}
# Boost moves a clock by a step of 15 MHz or two. One that moves by more than a twentieth moves times with it.
CLOCK_MOVES = 0.05


@dataclass(frozen=True)
class Reading:
    """One look at the card. sm_mhz: None where the driver does not tell. throttles: why it is held back, if it is."""

    sm_mhz: int | None = None
    throttles: tuple[str, ...] = ()


class Clocks:
    """Asks NVML about one card. Without NVML, or where it refuses, readings are empty and `available` is False."""

    def __init__(self, ordinal: int):
        self._nvml = Nvml(ordinal)

    @property
    def available(self) -> bool:
        return self._nvml.available

    def read(self) -> Reading:
        """SM clock and reasons now."""
        mask = self._nvml.ask(lambda nvml, card: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))) or 0
        return Reading(
            self._nvml.ask(lambda nvml, card: int(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))),
            tuple(name for bit, name in THROTTLES.items() if mask & bit),
        )

    def surroundings(self) -> dict[str, float | int | None]:
        """What changes too slowly to be asked after each sample: memory clock, temperature, power draw."""
        if not self.available:
            return {}
        ask = self._nvml.ask
        return {
            "memory_mhz": ask(lambda nvml, card: int(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM))),
            "temperature_c": ask(
                lambda nvml, card: int(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))
            ),
            "power_w": ask(lambda nvml, card: round(nvml.nvmlDeviceGetPowerUsage(card) / 1e3, 1)),
        }


def _temperature(nvml: Any, card: Any) -> int:
    return int(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))


def conditions(
    readings: Sequence[Reading], surroundings: dict[str, float | int | None], waits: int, kept: int
) -> dict[str, Any]:
    """The conditions of one measurement, as records hold them; empty where NVML said nothing.

    readings: after each sample that counts. waits: how often a held-back card was waited for. kept: how many samples
    count although the card was held back.
    """
    clocks = [reading.sm_mhz for reading in readings if reading.sm_mhz is not None]
    reasons = sorted({name for reading in readings for name in reading.throttles})
    known: dict[str, Any] = {name: value for name, value in surroundings.items() if value is not None}
    if clocks:
        known["sm_mhz"] = [min(clocks), max(clocks)]
    if known:
        known |= {"throttle_waits": waits, "throttled": kept, "throttles": reasons}
    return known


def remark(found: dict[str, Any], count: int) -> str:
    """What a reader must know of the conditions of `count` samples; "" if nothing."""
    if found.get("throttled"):
        why = " and ".join(found["throttles"])
        return f"the card held itself back ({why}) in {found['throttled']} of {count} samples"
    low, high = found.get("sm_mhz", (0, 0))
    if low < high * (1 - CLOCK_MOVES):
        return f"the SM clock moved between {low} and {high} MHz"
    return ""
