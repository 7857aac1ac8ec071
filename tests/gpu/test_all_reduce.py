"""The all-reduce through NCCL on real GPUs: alone, over all that there are, timed, captured, and with a rank that dies.

A machine that keeps NVLink multicast off does so by NCCL_NVLS_ENABLE=0, which the ranks' processes inherit.
"""

import os
import signal
import time

import numpy as np
import pytest

from kbench.device.cuda.all_reduce import PreparedAllReduce
from kbench.device.dtypes import numpy_dtype
from kbench.errors import GpusMissing, KernelFault, LaunchRefused
from kbench.family import AllReduce, Tensor
from kbench.grammar import Target
from kbench.selection import Selection
from kbench.sweep import Bench, Options

FAMILY = "nccl_all_reduce"


def gpus() -> int:
    """Without CUDA in this process, or in one without a GPU."""
    from kbench.device.cuda.probe import probe_gpu

    if probe_gpu():
        return 0
    from cupy.cuda import runtime

    return int(runtime.getDeviceCount())


def over(ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gpus() < ranks, reason=f"needs {ranks} GPUs, this machine has {gpus()}")


TWO = over(2)
RANKS = [1, pytest.param(2, marks=over(2)), pytest.param(3, marks=over(3)), pytest.param(8, marks=over(8))]


@pytest.fixture(scope="module", autouse=True)
def nccl():
    pytest.importorskip("cupy")
    from kbench.device.cuda.nccl import load_nccl
    from kbench.errors import LibraryMissing

    try:
        return load_nccl()
    except LibraryMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def bench():
    with Bench(Options(device="cuda"), print) as opened:
        yield opened


def rows_of(bench, **select):
    return list(bench.rows(bench.jobs(Selection([Target(FAMILY, None)], **select))))


def said(rows):
    return "\n".join(f"{row.problem} {row.dtype}: {row.status}: {row.reason}" for row in rows)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_check_shapes_pass_and_those_for_more_gpus_are_skipped(bench, dtype):
    rows = rows_of(bench, mode="check", dtype=dtype)
    there = gpus()
    for row in rows:
        if row.sizes["R"] <= there:
            assert row.status == "pass" and row.verdict["deterministic"], said([row])
            assert row.verdict["outputs"][0]["used"] <= 0.6, said([row])
        else:
            assert row.status == "skipped", said([row])
            assert row.reason == f"needs {row.sizes['R']} GPUs, this process sees {there}"


def test_more_ranks_than_gpus_cannot_run_here(bench):
    (row,) = rows_of(bench, mode="run", sizes={"R": [gpus() + 1], "N": [64]})
    assert row.status == "unable" and row.reason.startswith(f"needs {gpus() + 1} GPUs"), said([row])


@pytest.mark.parametrize("ranks", RANKS)
def test_the_default_size_is_proven_and_timed(bench, ranks):
    (row,) = rows_of(bench, mode="run", sizes={"R": [ranks]})
    assert row.status == "pass", said([row])
    assert row.verdict["outputs"][0]["compared"] == ranks * row.sizes["N"]
    taken = row.measurement
    assert taken["low_ms"] <= taken["median_ms"] <= taken["high_ms"]
    # 256 MiB of memory traffic: 0.03 ms at 8 TB/s is out of reach; the slowest links take tens of milliseconds.
    assert 0.03 < taken["median_ms"] < 200.0
    print(f"{ranks} ranks: {taken['median_ms']:.4f} ms, {row.traffic / taken['median_ms'] / 1e6:.0f} GB/s, {taken}")


# ---------------------------------------------------------------------------------------------- the step itself


class Step:
    """One all-reduce with memory of its own."""

    def __init__(self, device, ranks, n=4099, dtype="fp32", in_place=False):
        tensors = [Tensor(name, (ranks, n), dtype, "scratch") for name in ("send", "recv")]
        self.device = device
        self.buffers = {tensor.name: device.alloc(tensor) for tensor in tensors}
        step = AllReduce("send" if in_place else "recv", "send", n, ranks)
        self.prepared = device.prepare((step,), None, tensors)
        self.bound = device.bind(self.prepared, self.buffers)
        rng = np.random.default_rng(5)
        self.send = rng.integers(-8, 8, (ranks, n)).astype(numpy_dtype(dtype))  # sums are exact in every type
        self.load()

    def load(self):
        self.device.upload(self.buffers["send"], self.send)
        self.device.poison(self.buffers["recv"], 0xFF)

    def run(self):
        self.device.distribute(self.bound)
        with self.device.activate():
            self.device.enqueue(self.bound)
        self.device.synchronize()
        self.device.collect(self.bound)

    def assert_sum(self, name="recv"):
        got = self.device.download(self.buffers[name]).astype(np.float32)
        assert (got == self.send.astype(np.float32).sum(axis=0)).all()
        assert all(self.device.damage(buffer) is None for buffer in self.buffers.values())

    def close(self):
        for buffer in self.buffers.values():
            self.device.free(buffer)


@pytest.fixture
def make(device):
    made = []

    def make_step(*args, **options):
        made.append(Step(device, *args, **options))
        return made[-1]

    yield make_step
    for step in made:
        step.close()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int32"])
def test_every_rank_receives_the_sum_at_every_launch(make, ranks, dtype):
    step = make(ranks, dtype=dtype)
    for _ in range(3):
        step.load()
        step.run()
        step.assert_sum()
    assert (step.device.download(step.buffers["send"]) == step.send).all()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_sum_may_replace_what_is_added_up(make, ranks):
    step = make(ranks, in_place=True)
    step.run()
    step.assert_sum("send")


@pytest.mark.parametrize("ranks", RANKS)
def test_two_bindings_have_rows_of_their_own(make, ranks):
    small, large = make(ranks, n=33), make(ranks, n=1 << 20)
    for step in (small, large, small):
        step.run()
        step.assert_sum()


def test_alone_it_is_captured_into_a_graph(make, device):
    step = make(1)
    step.run()
    step.load()
    graph = device.capture(step.bound)
    with device.activate():
        graph.launch(device.stream)
    device.synchronize()
    step.assert_sum()


@TWO
def test_over_two_gpus_a_capture_is_refused_and_nothing_is_lost(make, device):
    step = make(2)
    step.run()
    with pytest.raises(LaunchRefused, match="cannot be captured"):
        device.capture(step.bound)
    step.run()
    step.assert_sum()


@TWO
def test_a_held_stream_makes_no_rank_wait_for_ever(make, device):
    """What the timer does: everything is queued behind a kernel that holds rank 0's stream."""
    from kbench.measure.hold import Hold

    step = make(2, n=1 << 20)
    step.run()
    hold = Hold(device, limit_s=5.0)
    with device.activate():
        hold.begin(device.stream)
        device.enqueue(step.bound)
        time.sleep(0.05)
        hold.release()
    device.synchronize()
    assert not hold.timed_out
    device.collect(step.bound)
    step.assert_sum()


def test_too_many_ranks_are_refused_when_prepared(device):
    many = gpus() + 1
    tensors = [Tensor(name, (many, 4), "fp32", "scratch") for name in ("send", "recv")]
    with pytest.raises(GpusMissing, match=f"needs {many} GPUs, this process sees {gpus()}"):
        device.prepare((AllReduce("recv", "send", 4, many),), None, tensors)


@TWO
def test_a_rank_that_dies_ends_the_wait_for_it(make, device):
    """In a group of its own, because it is of no use afterwards."""
    from kbench.device.cuda.all_reduce import Group, Groups

    whole = Groups(0)
    tensors = [Tensor(name, (2, 1 << 20), "fp32", "scratch") for name in ("send", "recv")]
    step = make(2, n=1 << 20)
    prepared = PreparedAllReduce(AllReduce("recv", "send", 1 << 20, 2), tensors, whole.of)
    run = prepared.bind(lambda name: step.buffers[name].address)
    group: Group = whole.of(2)
    with device.activate():
        run.distribute(device.stream)
        run(device.stream.ptr)
        device.synchronize()
        os.kill(group._peers._workers[0]._process.pid, signal.SIGKILL)
        started = time.monotonic()
        # This rank's part alone, as if the other had died right after it had queued its own.
        try:
            group.communicator.all_reduce(
                step.buffers["send"].address, step.buffers["recv"].address, 1 << 20, "fp32", device.stream.ptr
            )
            device.synchronize()
        except KernelFault:
            pass  # the communicator may have been given up before the launch
        assert time.monotonic() - started < 20
        with pytest.raises(KernelFault, match="rank 1 of the all-reduce: the worker process was ended by SIGKILL"):
            run(device.stream.ptr)
    whole.close()
