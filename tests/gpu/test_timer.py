"""The timer against kernels whose time is known by other means."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kbench.family import Copy, Launch, Ref, Tensor, kernels_of
from kbench.measure.hold import Hold
from kbench.measure.statistics import StopRule
from kbench.measure.timer import FLUSH_SHOWS, MODES, Timer, time_plan
from kbench.source import load_source

KERNELS = Path(__file__).parent / "kernels" / "timing.cu"
MS = 1_000_000  # in nanoseconds


def exactly(count):
    """A rule that takes this many samples."""
    return StopRule(minimum=count, maximum=count)


def spin(ms):
    return Launch("spin", (1,), (1,), (int(ms * MS),))


class Workbench:
    """Binds plans on a device and frees their buffers."""

    def __init__(self, device):
        self.device = device
        self.buffers = {}

    def bind(self, *plan, tensors=()):
        device = self.device
        kernels = kernels_of(plan)
        module = device.build(load_source(KERNELS), kernels) if kernels else None
        self.buffers.update({tensor.name: device.alloc(tensor) for tensor in tensors})
        for tensor in tensors:
            device.poison(self.buffers[tensor.name], 0)
        return device.bind(device.prepare(plan, module, tensors), self.buffers)

    def copy(self, nbytes):
        """A bound plan that copies this many bytes."""
        names = f"from{nbytes}", f"to{nbytes}"
        tensors = tuple(Tensor(name, (nbytes,), "uint8", "scratch") for name in names)
        return self.bind(Copy(Ref(names[1]), Ref(names[0]), nbytes), tensors=tensors)

    def close(self):
        for buffer in self.buffers.values():
            self.device.free(buffer)


@pytest.fixture
def bench(device):
    workbench = Workbench(device)
    yield workbench
    workbench.close()


@pytest.fixture(scope="module")
def timer(device):
    return Timer(device)


class SlowHost:
    """The device, with a host that sleeps before and after queueing each part of a plan."""

    def __init__(self, device, seconds):
        self._device, self._seconds = device, seconds

    def __getattr__(self, name):
        return getattr(self._device, name)

    def enqueue(self, bound, stream):
        for part in bound if isinstance(bound, list) else [bound]:
            time.sleep(self._seconds)
            self._device.enqueue(part, stream)
            time.sleep(self._seconds)


@pytest.mark.parametrize("repeats", [1, 10, 1000])
def test_spin_of_one_millisecond_is_one_millisecond(bench, timer, repeats):
    result = timer.measure(bench.bind(spin(1)), rule=exactly(repeats))
    assert result.count == repeats
    assert result.median_ms == pytest.approx(1.0, rel=0.01)
    assert result.note == ""


@pytest.mark.parametrize("mode", MODES)
def test_spin_is_as_long_in_every_mode_and_by_the_second_timer(bench, timer, mode):
    result = timer.measure(bench.bind(spin(0.1)), mode=mode)
    assert result.median_ms == pytest.approx(0.1, rel=0.03)
    assert result.second["agrees"] and result.second["ms"] == pytest.approx(result.median_ms, rel=0.03)
    assert result.runs == (10 if mode == "graph" else 1)


def test_second_timer_of_a_long_plan(bench, timer):
    result = timer.measure(bench.bind(spin(20)), rule=exactly(5))
    assert result.second["agrees"] and "each sample" in result.second["by"]


def test_second_timer_agrees_on_what_moves_memory(bench, timer):
    for mib in (1, 16, 96, 384):
        for mode in ("cold", "hot"):
            result = timer.measure(bench.copy(mib << 20), mode=mode)
            assert result.second["agrees"], (mib, mode, result.median_ms, result.second)


def test_the_card_is_read_while_it_is_timed(bench, timer):
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    found = timer.measure(bench.bind(spin(1))).conditions
    assert found["throttled"] == 0 and 100 < found["sm_mhz"][0] <= found["sm_mhz"][1] < 5000
    assert 0 < found["temperature_c"] < 120 and found["power_w"] > 0


def test_steps_of_a_plan_add_up(bench, timer):
    result = timer.measure(bench.bind(spin(0.5), spin(1), spin(0.5)), rule=exactly(10))
    assert result.median_ms == pytest.approx(2.0, rel=0.01)


def test_empty_kernel_takes_microseconds(bench, timer):
    result = timer.measure(bench.bind(Launch("nothing", (1,), (1,), ())), rule=exactly(20))
    assert 0.0 < result.median_ms < 0.010
    assert 0.0 <= timer.overhead_ms < 0.010


def test_host_delay_does_not_change_the_figure(bench, device):
    nothing = Launch("nothing", (1,), (1,), ())
    parts = [bench.bind(nothing), bench.bind(spin(0.05)), bench.bind(nothing)]
    quick, slow = (
        Timer(SlowHost(device, seconds)).measure(parts, rule=exactly(10), second=False).median_ms
        for seconds in (0.0, 0.01)
    )
    assert slow == pytest.approx(quick, abs=0.003)


def test_first_and_last_of_a_sequence_agree(bench, device):
    first, small, large = (bench.copy(mib << 20) for mib in (96, 1, 384))
    medians = [time_plan(device, bound).median_ms for bound in (first, small, large, first)]
    assert medians[-1] == pytest.approx(medians[0], rel=0.03)


def test_cold_differs_from_hot_for_what_fits_into_l2(bench, device, timer):
    count = device.props.l2_bytes // 4 // 4
    tensors = (Tensor("values", (count,), "fp32", "scratch"), Tensor("unused", (1,), "fp32", "scratch"))
    grid = (4 * device.props.multiprocessors,)
    bound = bench.bind(Launch("read", grid, (512,), ("values", "unused", count)), tensors=tensors)
    cold, hot = (timer.measure(bound, mode=mode) for mode in ("cold", "hot"))
    assert (cold.mode, hot.mode) == ("cold", "hot")
    assert cold.median_ms > FLUSH_SHOWS * hot.median_ms
    assert timer.flush_gain > FLUSH_SHOWS


def test_flush_of_twice_the_size_gives_the_same_figure(bench, device, timer):
    bound = bench.copy(device.props.l2_bytes // 4)
    twice = Timer(device, flush_bytes=2 * timer._flush.nbytes)
    once_ms, twice_ms = (each.measure(bound, rule=exactly(50)).median_ms for each in (timer, twice))
    assert twice_ms == pytest.approx(once_ms, rel=0.05)


def test_inout_is_restored_before_each_launch(bench, device, timer):
    count = 1000
    tensor = Tensor("values", (count,), "fp32", "scratch")
    bound = bench.bind(Launch("add_one", (4,), (256,), ("values", count)), tensors=(tensor,))
    buffer = bench.buffers["values"]

    def restore(stream):
        device.xp.cuda.runtime.memsetAsync(buffer.address, 0, tensor.nbytes, stream.ptr)

    timer.measure(bound, restore, second=False)
    assert (device.download(buffer) == 1.0).all()
    result = timer.measure(bound, None, rule=exactly(10), second=False)
    assert (device.download(buffer) == 1.0 + result.warmups + 10).all(), "the test would not see a missing restore"


def test_another_current_stream_does_not_take_the_work_out_of_the_span(bench, device, timer):
    bound = bench.bind(spin(1))
    with device.xp.cuda.Stream(non_blocking=True):
        assert timer.measure(bound, rule=exactly(5)).median_ms == pytest.approx(1.0, rel=0.01)


def test_hold_gives_up_by_itself_and_works_again(device):
    hold = Hold(device, limit_s=0.05)
    with device.activate():
        hold.begin(device.stream)
        device.synchronize()
        assert hold.timed_out
        hold.begin(device.stream)
        hold.release()
        device.synchronize()
        assert not hold.timed_out


def test_hold_really_holds(bench, device):
    bound = bench.bind(Launch("nothing", (1,), (1,), ()))
    hold = Hold(device)
    with device.activate():
        device.enqueue(bound, device.stream)  # a first launch may load the kernel, which would wait for the hold
        device.synchronize()
        hold.begin(device.stream)
        device.enqueue(bound, device.stream)
        time.sleep(0.05)
        assert not device.stream.done
        hold.release()
        device.synchronize()
        assert device.stream.done
    assert not hold.timed_out


def test_fault_in_the_timed_loop_comes_through():
    # In a process of its own, because the fault takes the CUDA context along.
    script = f"""
        from pathlib import Path
        from kbench.device.cuda.device import CudaDevice
        from kbench.errors import KernelFault
        from kbench.family import Launch, Tensor
        from kbench.measure.timer import time_plan
        from kbench.source import load_source

        device = CudaDevice()
        tensor = Tensor("values", (1,), "fp32", "scratch")
        module = device.build(load_source(Path({str(KERNELS)!r})), ["wild"])
        prepared = device.prepare((Launch("wild", (1,), (1,), ("values",)),), module, (tensor,))
        bound = device.bind(prepared, {{"values": device.alloc(tensor)}})
        try:
            time_plan(device, bound)
        except KernelFault as fault:
            print(fault.kind, fault.context_lost)
        else:
            print("timed")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["illegal-access", "True"], done.stderr
