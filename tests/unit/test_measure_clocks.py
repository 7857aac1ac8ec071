"""What NVML says of a card, through a driver that is made up."""

import sys
from types import SimpleNamespace

import pytest

from kbench.measure.clocks import Clocks, Reading, conditions, remark
from kbench.results.conditions import card_text, mode_text, second_text
from kbench.results.schema import Row


class Nvml:
    """Stands for pynvml. Answers that are None are refused."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "memory", "gpu"

    def __init__(self, reasons=0, sm=1980, memory=3201, temperature=41, milliwatts=123456, card="card"):
        self.answers = {"reasons": reasons, "sm": sm, "memory": memory, "gpu": temperature, "power": milliwatts}
        self.card = card

    def nvmlInit(self):
        if self.card is None:
            raise self.NVMLError("driver not loaded")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetHandleByPciBusId(self, place):
        assert place == b"0000:01:00.0"
        return self.card

    def _answer(self, card, what):
        assert card == self.card
        if self.answers[what] is None:
            raise self.NVMLError("not supported")
        return self.answers[what]

    def nvmlDeviceGetClockInfo(self, card, which):
        return self._answer(card, which)

    def nvmlDeviceGetTemperature(self, card, which):
        return self._answer(card, which)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return self._answer(card, "reasons")

    def nvmlDeviceGetPowerUsage(self, card):
        return self._answer(card, "power")


@pytest.fixture
def clocks(monkeypatch):
    def make(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        runtime = SimpleNamespace(deviceGetPCIBusId=lambda ordinal: "0000:01:00.0")
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
        monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
        return Clocks(0)

    return make


def test_a_reading(clocks):
    card = clocks(Nvml())
    assert card.available and card.read() == Reading(1980, ())
    assert card.surroundings() == {"memory_mhz": 3201, "temperature_c": 41, "power_w": 123.5}


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x1, ()),
        (0x2, ()),
        (0x100, ()),
        (0x4, ("power cap",)),
        (0x68, ("hardware slowdown", "heat (software)", "heat (hardware)")),
    ],
)
def test_idling_and_chosen_clocks_are_no_throttling(clocks, mask, names):
    assert clocks(Nvml(reasons=mask)).read().throttles == names


def test_a_card_that_refuses_questions(clocks):
    card = clocks(Nvml(reasons=None, sm=None, milliwatts=None))
    assert card.read() == Reading(None, ())
    assert card.surroundings()["power_w"] is None
    assert conditions([card.read()], card.surroundings(), 0, 0)["temperature_c"] == 41


def test_no_driver_and_no_package(clocks):
    for nvml in (Nvml(card=None), None):  # None in sys.modules: the import fails
        card = clocks(nvml)
        assert not card.available
        assert card.read() == Reading() and card.surroundings() == {}
        assert conditions([Reading()], {}, 0, 0) == {}


def test_remarks():
    steady = conditions([Reading(1980), Reading(1950)], {}, 0, 0)
    assert remark(steady, 2) == ""
    assert "between 1800 and 1980" in remark(conditions([Reading(1980), Reading(1800)], {}, 0, 0), 2)
    held = conditions([Reading(1980, ("power cap",)), Reading(1980)], {}, 4, 1)
    assert remark(held, 2) == "the card held itself back (power cap) in 1 of 2 samples"
    assert remark({}, 2) == ""


def row(mode="cold", **measurement):
    return Row("f", 1, "", {}, "fp32", 32, "gpu", "pass", 0, measurement=measurement or None, cache_mode=mode)


def test_the_words():
    assert [mode_text(row(mode)) for mode in ("cold", "hot", "graph", "warm")] == [
        "cold L2", "hot L2", "one after another in a CUDA graph, hot L2", "warm L2",
    ]  # fmt: skip
    assert second_text(row()) == "" and card_text(row()) == "", "an old record"
    second = {"by": "the host's clock around graphs of 16 runs", "ms": 0.0201, "allowed_ms": 0.002, "agrees": True}
    assert second_text(row(second=second)) == (
        "0.0201 ms by the host's clock around graphs of 16 runs: agrees (allowed: 0.0020 ms apart)"
    )
    assert "DIFFERS" in second_text(row(second={**second, "agrees": False}))
    assert second_text(row(second={"by": "none: no memory", "agrees": None})) == "no second timer: no memory"
    known = {"sm_mhz": [1950, 1980], "temperature_c": 41, "power_w": 300.5, "throttle_waits": 2, "throttled": 0}
    assert card_text(row(conditions=known)) == "SM 1950 to 1980 MHz, 41 C, 300.5 W, not held back (2 samples repeated)"
    held = {"sm_mhz": [1500, 1500], "throttle_waits": 4, "throttled": 3, "throttles": ["power cap"]}
    assert card_text(row(conditions=held)) == "SM 1500 MHz, held back in 3 samples (power cap)"
