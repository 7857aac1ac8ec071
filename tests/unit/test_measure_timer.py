"""The timer's order of work and its judgement of samples, on a simulated GPU whose clock is a variable."""

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kbench.errors import CannotRunError, KernelFault
from kbench.family import Launch
from kbench.measure import timer as timer_module
from kbench.measure.flush import FLUSH_AT_LEAST, flush_bytes
from kbench.measure.hold import HOLD_LIMIT_S
from kbench.measure.statistics import StopRule
from kbench.measure.timer import MAX_DISCARDED, WARMUP_AT_LEAST_S, Timer, time_plan

HOST_CALL_MS = 0.001  # what each look at the host's clock costs, so that loops over time end


class SimulatedError(RuntimeError):
    """Stands for CuPy's CUDARuntimeError."""


class SimulatedGpu:
    """A device whose stream is a list of operations, run at the next synchronisation.

    `plan_ms` gives the time of each launch of the plan in turn, the last one for ever. Copies (the probe of
    the flush) take 1 ms after a flush, else 0.1 ms. `log` is what was queued and waited for, in order.
    """

    kind = "cuda"

    def __init__(self, *plan_ms, host_extra_ms=0.02, stall=False, fault=None, hidden_ms=0.0):
        self.plan_ms = list(plan_ms) or [1.0]
        self.host_extra_ms = host_extra_ms
        self.stall = stall  # queueing the plan makes the host wait, so the hold runs out
        self.fault = fault
        self.hidden_ms = hidden_ms
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
            gpu.log.append("flush")
            gpu.queue.append(gpu._run_flush)

        runtime = SimpleNamespace(
            hostAllocMapped=2, memsetAsync=memset, deviceSynchronize=self._drain, CUDARuntimeError=SimulatedError
        )
        cuda = SimpleNamespace(
            Event=Event,
            PinnedMemory=pinned,
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=SimulatedError),
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
            get_elapsed_time=lambda start, stop: stop.at - start.at,
        )
        return SimpleNamespace(cuda=cuda, empty=lambda size, dtype: SimpleNamespace(data=SimpleNamespace(ptr=1)))

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
        return plan, buffers

    def enqueue(self, bound, stream):
        assert stream is self.stream
        if bound == "plan":
            self.log.append("plan")
            if self.stall:
                self._drain()
            self.queue.append(self._run_plan)
            return
        (step,), buffers = bound
        if isinstance(step, Launch):
            self.log.append("hold")
            self.queue.append(lambda: self._run_hold(buffers["words"].array, step.args[1] / 1e6))
        else:
            self.queue.append(lambda: self._advance(1.0 if self.cold else 0.1))

    def synchronize(self):
        if self.fault and "plan" in self.log:
            raise self.fault

    def _advance(self, ms):
        self.now_ms += ms

    def _run_hold(self, words, limit_ms):
        if not words[0]:
            self._advance(limit_ms)
            words[1] = 1

    def _run_flush(self):
        self.cold = True
        self._advance(0.05)

    def _run_plan(self):
        self._advance(self.plan_ms[0])
        if len(self.plan_ms) > 1:
            self.plan_ms.pop(0)

    def _drain(self):
        if self.queue:
            self.log.append("wait")
        while self.queue:
            self.queue.pop(0)()
        self.cold = False
        self._advance(self.host_extra_ms + (self.hidden_ms if "plan" in self.log else 0.0))
        if self.fault and "plan" in self.log:
            raise SimulatedError("sticky")


@pytest.fixture
def measure(monkeypatch):
    """`measure(gpu, ...)`: a measurement on a simulated GPU; the timer it was taken with is `measure.timer`."""

    def run(gpu, restore=None, **options):
        monkeypatch.setattr(timer_module, "time", gpu)
        run.timer = Timer(gpu)
        gpu.log.clear()
        return run.timer.measure("plan", restore, **options)

    return run


FIVE = StopRule(minimum=5, maximum=5)


def test_only_the_plan_lies_between_the_events_and_everything_is_queued_before_the_stream_is_let_go(measure):
    gpu = SimulatedGpu(1.0)
    result = measure(gpu, restore=lambda stream: gpu.log.append("restore"), rule=FIVE)
    first, *held = " ".join(gpu.log).split("restore ")[1:]
    assert first.split() == ["flush", "event", "plan", "event", "wait"]
    assert held
    assert all(sample.split() == ["flush", "hold", "event", "plan", "event", "wait"] for sample in held)
    assert result.samples_ms == (1.0,) * 5
    assert result.warmups == len(held) + 1 - 5
    assert (result.mode, result.stopped, result.note) == ("cold", "5 samples", "")


def test_hot_mode_does_not_flush_and_says_so(measure):
    gpu = SimulatedGpu(1.0)
    assert measure(gpu, mode="hot").mode == "hot"
    assert "flush" not in gpu.log
    with pytest.raises(ValueError, match="cold, hot"):
        measure.timer.measure("plan", mode="warm")


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
    assert measure(SimulatedGpu(1500.0)).warmups == 1


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


def test_short_plan_is_marked_launch_bound(measure):
    gpu = SimulatedGpu(0.002)
    monkey = gpu.xp.cuda.get_elapsed_time
    gpu.xp.cuda.get_elapsed_time = lambda start, stop: monkey(start, stop) + 0.0015
    result = measure(gpu)
    assert measure.timer.overhead_ms == pytest.approx(0.0015)
    assert "launch bound" not in result.note
    gpu.plan_ms = [0.0004]
    assert "launch bound" in measure.timer.measure("plan").note


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
        measure.timer.measure("plan")
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
    monkeypatch.setattr(timer_module, "time", gpu)
    built = []
    gpu.build = lambda source, kernels: built.append(kernels)
    assert time_plan(gpu, "plan").median_ms == time_plan(gpu, "plan").median_ms == 1.0
    assert len(built) == 1
