"""The timer's order of work and its judgement of samples, on a simulated GPU whose clock is a variable."""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kbench.device.cuda.capture import CapturedPlan
from kbench.errors import CannotRunError, KernelFault
from kbench.family import AllReduce, Launch
from kbench.measure import collect as collect_module
from kbench.measure import replay as replay_module
from kbench.measure import timer as timer_module
from kbench.measure.clocks import Reading
from kbench.measure.collect import FIRST_PAUSE_S, MAX_DISCARDED, MAX_WAITS, WARMUP_AT_LEAST_S, Sample
from kbench.measure.flush import FLUSH_AT_LEAST, flush_bytes
from kbench.measure.hold import HOLD_LIMIT_S
from kbench.measure.replay import MOST_COPIES
from kbench.measure.statistics import StopRule
from kbench.measure.timer import MOST_RUNS, Timer, time_plan

HOST_CALL_MS = 0.001  # what each look at the host's clock costs, so that loops over time end


class SimulatedError(RuntimeError):
    """Stands for CuPy's CUDARuntimeError."""


class Plan(str):
    """Stands for a bound plan."""

    prepared = SimpleNamespace(plan=("a step",))


PLAN = Plan("plan")


class Bound(tuple):
    """A bound plan of real steps."""

    def __new__(cls, plan, buffers):
        return super().__new__(cls, (plan, buffers))


class SimulatedGpu:
    """A device whose stream is a list of operations, run at the next synchronisation.

    `plan_ms` gives the time of each launch of the plan in turn, the last one for ever. Copies (the probe of
    the flush) take 1 ms after a flush, else 0.1 ms. `log` is what was queued and waited for, in order.
    """

    kind = "cuda"
    ordinal = 0

    def __init__(self, *plan_ms, host_extra_ms=0.02, stall=False, fault=None, hidden_ms=0.0, node_ms=0.0):
        self.plan_ms = list(plan_ms) or [1.0]
        self.host_extra_ms = host_extra_ms
        self.stall = stall  # queueing the plan makes the host wait, so the hold runs out
        self.fault = fault
        self.hidden_ms = hidden_ms
        self.node_ms = node_ms  # what a plan takes longer in a graph
        self.capturing = False
        self.now_ms = 0.0
        self.cold = False
        self.queue, self.log, self.freed = [], [], []
        self.props = SimpleNamespace(l2_bytes=1 << 20)
        self.stream = SimpleNamespace(ptr=7)
        self.xp = self._array_module()

    def _array_module(self):
        gpu = self

        class Event:
            at = 0.0

            def record(self, stream):
                assert stream is gpu.stream
                gpu.log.append("event")
                gpu.queue.append(lambda: setattr(self, "at", gpu.now_ms))

        def pinned(size, flags):
            memory = ctypes.create_string_buffer(size)
            return SimpleNamespace(ptr=ctypes.addressof(memory), keep=memory)

        def memset(pointer, value, size, stream_pointer):
            assert stream_pointer == gpu.stream.ptr
            gpu.log.append("flush" if size > 4 else "word")
            if size > 4:
                gpu.queue.append(gpu._run_flush)

        runtime = SimpleNamespace(
            hostAllocMapped=2, memsetAsync=memset, deviceSynchronize=self._drain, CUDARuntimeError=SimulatedError,
            deviceGetPCIBusId=lambda ordinal: "0000:00:00.0",
        )  # fmt: skip
        cuda = SimpleNamespace(
            Event=Event,
            PinnedMemory=pinned,
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=SimulatedError),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            get_elapsed_time=lambda start, stop: stop.at - start.at,
        )
        return SimpleNamespace(cuda=cuda, empty=lambda size, dtype: SimpleNamespace(data=SimpleNamespace(ptr=1)))

    def sleep(self, seconds):
        self.log.append("sleep")
        self.now_ms += 1e3 * seconds

    def perf_counter(self):
        self.now_ms += HOST_CALL_MS
        return self.now_ms / 1e3

    @contextmanager
    def activate(self):
        yield

    def build(self, source, kernels):
        assert source.kernels == tuple(kernels)
        return "module"

    def alloc(self, tensor):
        return tensor

    def free(self, buffer):
        self.freed.append(buffer.name)

    def prepare(self, plan, module, tensors):
        return plan

    def bind(self, plan, buffers):
        bound = Bound(plan, buffers)
        bound.prepared = SimpleNamespace(plan=plan)
        return bound

    def capture(self, *bounds):
        return self.capture_work(lambda: [self.enqueue(bound, self.stream) for bound in bounds], bounds)

    def capture_work(self, queue, bounds):
        held, self.queue, self.capturing = self.queue, [], True
        queue()
        nodes, self.queue, self.capturing = self.queue, held, False

        def launch(stream):
            self.log.append("graph")
            self.queue += nodes

        return CapturedPlan(SimpleNamespace(launch=launch), bounds)

    def enqueue(self, bound, stream):
        assert stream is self.stream
        extra = self.node_ms if self.capturing else 0.0
        if bound == "plan":
            self.log.append("plan")
            if self.stall:
                self._drain()
            self.queue.append(lambda: self._run_plan(extra))
            return
        (step,), buffers = bound
        if isinstance(step, Launch) and step.kernel == "empty":
            self.queue.append(lambda: self._advance(0.001 + extra))
        elif isinstance(step, Launch):
            self.log.append("hold")
            self.queue.append(lambda: self._run_hold(buffers["words"].array, step.args[1] / 1e6))
        else:
            self.queue.append(self._run_copy)

    def synchronize(self):
        if self.fault and "plan" in self.log:
            raise self.fault

    def _advance(self, ms):
        self.now_ms += ms

    def _run_hold(self, words, limit_ms):
        if not words[0]:
            self._advance(limit_ms)
            words[1] = 1

    def _run_copy(self):
        self._advance(1.0 if self.cold else 0.1)
        self.cold = False

    def _run_flush(self):
        self.cold = True
        self._advance(0.05)

    def _run_plan(self, extra):
        self._advance(self.plan_ms[0] + extra)
        if len(self.plan_ms) > 1:
            self.plan_ms.pop(0)

    def _drain(self):
        if self.queue:
            self.log.append("wait")
        while self.queue:
            self.queue.pop(0)()
        self._advance(self.host_extra_ms + (self.hidden_ms if "plan" in self.log else 0.0))
        if self.fault and "plan" in self.log:
            raise SimulatedError("sticky")


@pytest.fixture
def measure(monkeypatch):
    """`measure(gpu, ...)`: a measurement on a simulated GPU; the timer it was taken with is `measure.timer`."""

    def run(gpu, restore=None, second=False, reading=None, **options):
        for module in (timer_module, collect_module, replay_module):
            monkeypatch.setattr(module, "time", gpu)
        run.timer = Timer(gpu)
        if reading is not None:
            run.timer._clocks = reading
        gpu.log.clear()
        return run.timer.measure(PLAN, restore, second=second, **options)

    return run


FIVE = StopRule(minimum=5, maximum=5)


def test_only_the_plan_lies_between_the_events_and_everything_is_queued_before_the_stream_is_let_go(measure):
    gpu = SimulatedGpu(1.0)
    result = measure(gpu, restore=lambda stream: gpu.log.append("restore"), rule=FIVE)
    first, *held = " ".join(gpu.log).split("restore ")[1:]
    assert first.split() == ["flush", "wait", "event", "plan", "event", "wait"]
    assert held
    assert all(sample.split() == ["flush", "wait", "hold", "event", "plan", "event", "wait"] for sample in held)
    assert result.samples_ms == (1.0,) * 5
    assert result.warmups == len(held) + 1 - 5
    assert (result.mode, result.stopped, result.note) == ("cold", "5 samples", "")


def test_hot_mode_does_not_flush_and_says_so(measure):
    gpu = SimulatedGpu(1.0)
    assert measure(gpu, mode="hot").mode == "hot"
    assert "flush" not in gpu.log
    with pytest.raises(ValueError, match="cold, hot, graph"):
        measure.timer.measure(PLAN, mode="warm")


def test_hot_mode_waits_for_the_restore_so_that_it_is_not_hidden_behind_the_hold(measure):
    gpu = SimulatedGpu(1.0)

    def restore(stream):
        gpu.log.append("restore")
        gpu.queue.append(lambda: None)

    measure(gpu, restore=restore, mode="hot", rule=FIVE)
    last = " ".join(gpu.log).split("restore ")[-1]
    assert last.split() == ["wait", "hold", "event", "plan", "event", "wait"]


def test_warm_up_gives_the_clocks_time_to_come_back(measure):
    gpu = SimulatedGpu(1.0)
    assert measure(gpu, rule=FIVE).warmups * 1.2 > 1e3 * WARMUP_AT_LEAST_S
    assert measure(SimulatedGpu(50.0), rule=FIVE).warmups == 2


def test_warm_up_goes_on_while_times_fall(measure):
    gpu = SimulatedGpu(40.0, 30.0, 20.0, 10.0, 10.0)
    result = measure(gpu, rule=FIVE)
    assert result.warmups == 5
    assert result.samples_ms == (10.0,) * 5


def test_warm_up_ends_although_times_go_on_falling(measure):
    gpu = SimulatedGpu(*[90.0 * 0.9**i for i in range(40)])
    assert 2 <= measure(gpu, rule=FIVE).warmups < 20


def test_slow_plan_gets_three_samples_and_says_so(measure):
    result = measure(SimulatedGpu(150.0))
    assert (len(result.samples_ms), result.warmups) == (3, 2)
    assert result.note == "over 0.1 s a launch: 3 samples"
    assert result.confidence == 0.75


def test_very_slow_plan_is_warmed_up_once(measure):
    result = measure(SimulatedGpu(1500.0))
    assert (result.warmups, result.count) == (1, 3), "three, though each of them is beyond the budget"


def test_plan_that_was_slow_only_the_first_time_is_not_called_slow(measure):
    result = measure(SimulatedGpu(300.0, 1.0))
    assert "over" not in result.note
    assert len(result.samples_ms) == 10


def test_repeats_do_not_change_the_figure(measure):
    medians = [measure(SimulatedGpu(1.0), rule=StopRule(minimum=n, maximum=n)).median_ms for n in (1, 10, 64)]
    assert medians == [1.0] * 3


def test_watchdog_hears_of_every_launch(measure):
    gpu, launches = SimulatedGpu(1.0), []
    measure(gpu, on_launch=lambda: launches.append(gpu.log.count("plan")))
    assert launches == list(range(gpu.log.count("plan")))


def test_hold_that_runs_out_leaves_no_sample(measure):
    with pytest.raises(KernelFault, match="no valid samples: the stream could not be held"):
        measure(SimulatedGpu(1.0, stall=True))
    assert measure.timer._device.now_ms > MAX_DISCARDED * 1e3 * HOLD_LIMIT_S


def test_samples_without_time_are_thrown_away(measure):
    with pytest.raises(KernelFault, match="no valid samples: an event time of 0.0 ms"):
        measure(SimulatedGpu(0.0))


def test_a_mishap_costs_its_sample_only(measure):
    gpu = SimulatedGpu(0.5)
    queue_plan, seen = gpu.enqueue, []

    def stall_once(bound, stream):
        seen.append(bound)
        gpu.stall = seen.count("plan") == 60 and bound == "plan"
        queue_plan(bound, stream)

    gpu.enqueue = stall_once
    result = measure(gpu, rule=StopRule(minimum=64, maximum=64, relative=0.0))
    assert result.warmups < 60 < seen.count("plan"), "the mishap must fall into the sampling, not into the warm-up"
    assert result.samples_ms == (0.5,) * 64
    assert result.note == "1 sample thrown away: the stream could not be held until the plan was queued"


def test_events_that_say_more_than_the_host_saw_are_not_believed(measure):
    gpu = SimulatedGpu(1.0)
    gpu.xp.cuda.get_elapsed_time = lambda start, stop: 2.0 if "plan" in gpu.log else 0.001
    with pytest.raises(KernelFault, match=f"the events say 2.0000 ms.*{MAX_DISCARDED} times in a row"):
        measure(gpu)


def test_work_outside_the_stream_is_noted(measure):
    assert "busy 5.0" in measure(SimulatedGpu(1.0, hidden_ms=5.0)).note
    assert measure(SimulatedGpu(1.0, hidden_ms=0.01)).note == ""


def test_a_host_that_was_busy_once_is_not_taken_for_work_outside_the_stream():
    assert timer_module._hidden_work([Sample(1.0, 6.0), Sample(1.0, 1.02)]) == ""
    assert "busy 5.000 ms" in timer_module._hidden_work([Sample(1.0, 6.0), Sample(1.0, 7.0)])


def test_short_plan_is_marked_launch_bound(measure):
    gpu = SimulatedGpu(0.002)
    monkey = gpu.xp.cuda.get_elapsed_time
    gpu.xp.cuda.get_elapsed_time = lambda start, stop: monkey(start, stop) + 0.0015
    result = measure(gpu)
    assert measure.timer.overhead_ms == pytest.approx(0.0015)
    assert "launch bound" not in result.note
    gpu.plan_ms = [0.0004]
    assert "launch bound" in measure.timer.measure(PLAN).note


def test_a_fault_of_the_kernel_comes_through_as_what_it_is_and_the_stream_is_let_go(measure):
    fault = KernelFault("illegal-access", "kernel read where nothing is", context_lost=True)
    gpu = SimulatedGpu(1.0, fault=fault)
    with pytest.raises(KernelFault) as caught:
        measure(gpu)
    assert caught.value is fault


def test_cuda_error_that_the_device_cannot_explain_is_a_fault_too(measure):
    gpu = SimulatedGpu(1.0, fault=KernelFault("trap", "unused"))
    gpu.synchronize = lambda: None
    with pytest.raises(KernelFault, match="CUDA refused to go on while timing: sticky"):
        measure(gpu)


def test_stream_is_let_go_when_queueing_raises(measure):
    gpu = SimulatedGpu(1.0)
    measure(gpu, rule=FIVE)
    released = []
    gpu.enqueue = lambda bound, stream: (_ for _ in ()).throw(RuntimeError("queueing failed"))
    measure.timer._hold.release = lambda: released.append(True)
    with pytest.raises(RuntimeError, match="queueing failed"):
        measure.timer.measure(PLAN)
    assert released


def test_flush_is_proved_to_work_or_the_row_says_so(measure):
    gpu = SimulatedGpu(1.0)
    measure(gpu)
    assert measure.timer.flush_gain == pytest.approx(10.0)
    assert gpu.freed == ["from", "to"]
    useless = SimulatedGpu(1.0)
    useless._run_flush = lambda: None
    assert "maybe not cold" in measure(useless).note
    assert measure(useless, mode="hot").note == ""


def test_no_memory_for_the_flush_is_said(measure):
    gpu = SimulatedGpu(1.0)
    gpu.xp.empty = lambda size, dtype: (_ for _ in ()).throw(MemoryError)
    with pytest.raises(CannotRunError, match="128 MiB that flush"):
        measure(gpu)


def test_flush_is_well_above_the_l2_size():
    assert flush_bytes(50 << 20) == 200 << 20
    assert flush_bytes(0) == FLUSH_AT_LEAST
    assert flush_bytes(4 << 20) == FLUSH_AT_LEAST


def test_emulator_is_not_timed():
    gpu = SimulatedGpu()
    gpu.kind = "emulator"
    with pytest.raises(CannotRunError, match="on a GPU only, not on the emulator"):
        time_plan(gpu, "plan")


def test_time_plan_sets_a_device_up_once(monkeypatch):
    gpu = SimulatedGpu(1.0)
    for module in (timer_module, collect_module, replay_module):
        monkeypatch.setattr(module, "time", gpu)
    built = []
    gpu.build = lambda source, kernels: built.append(*kernels)
    assert time_plan(gpu, PLAN).median_ms == time_plan(gpu, PLAN).median_ms == 1.0
    assert built == ["hold", "empty"]


class Card:
    """Stands for NVML: what each look at the card says, the last for ever."""

    available = True

    def __init__(self, *readings):
        self.readings = list(readings)

    def read(self):
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def surroundings(self):
        return {"memory_mhz": 3201, "temperature_c": 40, "power_w": None}


WELL, HELD_BACK = Reading(1980, ()), Reading(1500, ("power cap",))


def test_what_the_card_said_is_in_the_record(measure):
    result = measure(SimulatedGpu(1.0), rule=FIVE, reading=Card(Reading(1965), WELL))
    assert result.conditions == {
        "memory_mhz": 3201, "temperature_c": 40, "sm_mhz": [1965, 1980], "throttle_waits": 0, "throttled": 0,
        "throttles": [],
    }  # fmt: skip
    assert result.note == ""


def test_sample_of_a_card_that_holds_itself_back_is_taken_again_after_a_pause(measure):
    gpu = SimulatedGpu(1.0)
    result = measure(gpu, rule=FIVE, reading=Card(WELL, HELD_BACK, HELD_BACK, WELL))
    assert gpu.log.count("sleep") == 2
    assert (result.count, result.conditions["throttle_waits"], result.conditions["throttled"]) == (5, 2, 0)
    assert result.conditions["sm_mhz"] == [1980, 1980], "what was thrown away does not count"
    assert result.note == ""


def test_card_that_goes_on_holding_itself_back_is_timed_as_it_is_and_the_row_says_so(measure):
    gpu = SimulatedGpu(1.0)
    result = measure(gpu, rule=FIVE, reading=Card(HELD_BACK))
    assert gpu.log.count("sleep") == MAX_WAITS
    assert result.note == "the card held itself back (power cap) in 5 of 5 samples"
    assert sum(FIRST_PAUSE_S * 2**i for i in range(MAX_WAITS)) < 1.0


def test_clock_that_moves_is_said(measure):
    assert measure(SimulatedGpu(1.0), rule=FIVE, reading=Card(Reading(1700), WELL)).note == (
        "the SM clock moved between 1700 and 1980 MHz"
    )


def test_second_timer_agrees_though_a_graph_adds_a_gap_to_each_node(measure):
    gpu = SimulatedGpu(0.02, node_ms=0.0012)
    result = measure(gpu, second=True)
    assert measure.timer.gap_ms == pytest.approx(0.0012, abs=2e-4)
    assert result.second["ms"] == pytest.approx(0.02, abs=2e-4)
    assert (result.second["agrees"], result.note) == (True, "")
    assert result.second["by"] == f"the host's clock around graphs of {MOST_COPIES} runs"


def test_second_timer_that_says_less_is_said_too(measure):
    gpu = SimulatedGpu(0.5)
    measure(gpu)
    gpu.node_ms = -0.1
    result = measure.timer.measure(PLAN)
    assert result.second["agrees"] is False
    assert "a second timer says 0.4" in result.note and "20% apart" in result.note


@pytest.mark.parametrize("mode", ["cold", "hot"])
def test_second_timer_that_differs_is_said(measure, mode):
    gpu = SimulatedGpu(0.5)
    measure(gpu)
    gpu.node_ms = 0.1
    result = measure.timer.measure(PLAN, mode=mode)
    assert result.second["agrees"] is False
    assert result.second["ms"] == pytest.approx(0.6, rel=0.01)
    assert "a second timer says 0.6" in result.note and "20% apart" in result.note


def test_second_timer_does_before_each_run_what_samples_do(measure):
    gpu = SimulatedGpu(0.5)
    result = measure(gpu, restore=lambda stream: gpu.log.append("restore"), second=True, rule=FIVE)
    captured = " ".join(gpu.log).split("sleep")[-1]
    assert captured.count("restore flush plan restore flush plan") >= 5
    assert captured.count("restore flush restore flush restore flush") >= 3
    assert result.second["ms"] == pytest.approx(0.5, rel=0.01), "neither is in the figure"


def test_long_plan_is_timed_by_the_hosts_clock_around_the_samples(measure):
    gpu = SimulatedGpu(20.0)
    result = measure(gpu, second=True)
    assert "graph" not in gpu.log
    assert result.second == {
        "by": "the host's clock around each sample", "ms": pytest.approx(20.0, rel=0.01),
        "allowed_ms": pytest.approx(1.002), "agrees": True,
    }  # fmt: skip


def test_what_the_hosts_clock_always_shows_more_is_no_part_of_a_long_plan(measure):
    second = measure(SimulatedGpu(20.0, host_extra_ms=0.1), second=True).second
    assert second["ms"] == pytest.approx(20.0, abs=0.01)


def test_plan_that_no_graph_can_hold_has_no_second_timer(measure):
    class Apart(Plan):
        prepared = SimpleNamespace(plan=(AllReduce("to", "from", 1, 2),))

    measure(SimulatedGpu(1.0))
    second = measure.timer.measure(Apart("plan")).second
    assert second == {"by": "none: what other processes do is no part of a graph", "agrees": None}


def test_graph_mode_shows_the_time_of_one_run_among_many(measure):
    gpu = SimulatedGpu(0.03, node_ms=-0.004)
    result = measure(gpu, mode="graph", rule=FIVE)
    assert (result.mode, result.runs, result.count) == ("graph", 34, 5)
    assert result.median_ms == pytest.approx(0.026)
    assert "flush" not in gpu.log[gpu.log.index("graph") :]
    result = measure(SimulatedGpu(0.03, node_ms=-0.004), mode="graph", second=True)
    assert result.second["by"] == "the host's clock around graphs of 39 and 78 runs"
    assert result.second["ms"] == pytest.approx(0.026) and result.second["agrees"]
    assert measure(SimulatedGpu(0.001), mode="graph", rule=FIVE).runs == MOST_RUNS
    assert measure(SimulatedGpu(30.0), mode="graph", rule=FIVE).runs == 1


def test_thousand_samples_are_taken_and_64_of_them_kept(measure):
    result = measure(SimulatedGpu(1.0), rule=StopRule(minimum=1000, maximum=1000))
    assert (result.count, len(result.samples_ms), result.median_ms) == (1000, 64, 1.0)
