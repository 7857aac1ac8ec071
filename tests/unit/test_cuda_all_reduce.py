"""AllReduce steps without a GPU: what is refused, who is told what, and what becomes of ranks that fail.

Ranks above 0 are real processes; see helpers/peer_process.py for the NCCL that they are given.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

import peer_process as ranks
from kbench.device.cuda import all_reduce, nccl, peers
from kbench.device.cuda.all_reduce import Group, Groups, PreparedAllReduce
from kbench.device.cuda.peers import Peers, SharedMemory
from kbench.device.dtypes import numpy_dtype
from kbench.errors import CannotRunError, GpusMissing, KernelFault, LaunchRefused, LibraryMissing
from kbench.family import AllReduce, Tensor

HELPERS = Path(__file__).parent / "helpers"
POISON = 0x7F


def tensors(count: int, n: int, dtype: str = "fp32") -> list[Tensor]:
    return [Tensor(name, (count, n), dtype, "scratch") for name in ("send", "recv")]


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("step", "given", "words"),
    [
        (AllReduce("recv", "sent", 4, 2), tensors(2, 4), "names the tensor 'sent'; the family has send, recv"),
        (AllReduce("recv", "send", 4, 3), tensors(2, 4), "tensor send of 8 elements is not 3 rows of 4 elements"),
        (AllReduce("recv", "send", 3, 2), tensors(2, 4), "is not 2 rows of 3"),
        (AllReduce("recv", "send", 0, 2), tensors(2, 4), "0 elements over 2 ranks: both must be over 0"),
        (AllReduce("recv", "send", 8, 0), tensors(2, 4), "over 0 ranks"),
        (AllReduce("recv", "send", 4, 2), tensors(2, 4, "uint8"), "cannot add up tensor send, which holds uint8"),
        (
            AllReduce("recv", "send", 4, 2),
            [tensors(2, 4)[0], tensors(2, 4, "bf16")[1]],
            r"send \(fp32\) to recv \(bf16\): types differ",
        ),
    ],
)
def test_an_all_reduce_that_does_not_fit_is_refused_before_any_process_starts(step, given, words):
    def never(count):
        pytest.fail("a group was made")

    with pytest.raises(LaunchRefused, match=words):
        PreparedAllReduce(step, given, never)


def fake_cupy(monkeypatch, gpus, **module):
    library = types.ModuleType("nccl")
    vars(library).update(module)
    cuda = types.SimpleNamespace(
        nccl=library,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: gpus, runtimeGetVersion=lambda: 13000),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return library


def test_more_ranks_than_gpus_are_said_in_numbers(monkeypatch):
    fake_cupy(monkeypatch, 1, available=True)
    with pytest.raises(GpusMissing, match="^needs 4 GPUs, this process sees 1$"):
        Groups(0).of(4)


def test_a_missing_library_names_its_extra(monkeypatch):
    fake_cupy(monkeypatch, 2, available=False)
    with pytest.raises(LibraryMissing, match=r"the library NCCL is not installed; pip install .*nccl13"):
        Groups(0).of(2)


def test_ranks_take_the_gpus_from_the_devices_own_on(monkeypatch):
    made = []
    fake_cupy(monkeypatch, 4, available=True)
    monkeypatch.setattr(all_reduce, "Group", lambda count, ordinals: made.append((count, ordinals)) or "group")
    groups = Groups(3)
    assert groups.of(3) == groups.of(3) == "group"
    groups.of(1)
    assert made == [(3, [3, 0, 1]), (1, [3])]


@pytest.mark.parametrize(
    "error", [CannotRunError("no link", "look"), KernelFault("timeout", "did not find each other", context_lost=True)]
)
def test_a_group_that_failed_to_form_is_not_formed_again(monkeypatch, error):
    tried = []

    def group(count, ordinals):
        tried.append(count)
        if count == 2:
            raise error
        return "group"

    fake_cupy(monkeypatch, 4, available=True)
    monkeypatch.setattr(all_reduce, "Group", group)
    groups = Groups(0)
    for _ in range(3):
        with pytest.raises(type(error), match=str(error)):
            groups.of(2)
        assert groups.of(3) == "group", "other numbers of ranks are other groups"
    assert tried == [2, 3]


class NcclError(RuntimeError):
    pass


def test_nccls_errors_are_kbenchs(monkeypatch):
    class Broken:
        def __init__(self, count, name, rank):
            if count == 3:
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR")

        def allReduce(self, *args):
            raise NcclError("NCCL_ERROR_INTERNAL_ERROR")

    def no_name():
        raise NcclError("no network")

    constants = {constant: number for number, constant in enumerate((*nccl.TYPES.values(), "NCCL_SUM"))}
    fake_cupy(
        monkeypatch, 2, available=True, NcclError=NcclError, NcclCommunicator=Broken, get_unique_id=no_name, **constants
    )
    with pytest.raises(CannotRunError, match="NCCL cannot start: no network; NCCL_DEBUG"):
        nccl.unique_id()
    with pytest.raises(CannotRunError, match="a communicator of 3 GPUs: NCCL_ERROR_SYSTEM_ERROR"):
        nccl.Communicator(3, b"name", 0)
    with pytest.raises(KernelFault, match="NCCL_ERROR_INTERNAL_ERROR") as fault:
        nccl.Communicator(1, b"name", 0).all_reduce(1, 2, 3, "bf16", 4)
    assert fault.value.context_lost and fault.value.row_status == "crashed"


# ---------------------------------------------------------------------------------------------- one rank


class Recording:
    """A communicator that takes down its calls."""

    def __init__(self, *made):
        self.calls = [made]

    def all_reduce(self, *args):
        self.calls.append(args)

    def abort(self):
        self.calls.append("abort")


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    """All that `all_reduce` has of a GPU, on the host."""
    monkeypatch.setattr(Group, "_use_gpu", lambda self: None)
    monkeypatch.setattr(all_reduce, "unique_id", lambda: str(tmp_path).encode())
    monkeypatch.setattr(all_reduce, "_refuse_capture", lambda stream, count: None)
    monkeypatch.setattr(all_reduce, "copy_out", lambda a, v, stream: ctypes.memmove(v.ctypes.data, a, v.nbytes))
    monkeypatch.setattr(all_reduce, "copy_in", lambda a, v, stream: ctypes.memmove(a, v.ctypes.data, v.nbytes))
    monkeypatch.setattr(peers, "START_SECONDS", 30.0)
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    return monkeypatch


def test_a_group_of_one_has_no_peers_and_moves_no_rows(without_gpu, tmp_path):
    without_gpu.setattr(all_reduce, "Communicator", Recording)
    group = Group(1, [0])
    prepared = PreparedAllReduce(AllReduce("recv", "send", 5, 1), tensors(1, 5, "bf16"), lambda count: group)
    run = prepared.bind({"send": 4096, "recv": 8192}.__getitem__)
    run.distribute(None)
    run(77)
    run.collect(None)
    group.close()
    name = str(tmp_path).encode()
    assert group.communicator.calls == [(1, name, 0), (4096, 8192, 5, "bf16", 77), "abort"]


def test_a_group_of_one_that_nccl_refuses_is_said(without_gpu):
    def refuse(*args):
        raise CannotRunError("NCCL cannot make a communicator")

    without_gpu.setattr(all_reduce, "Communicator", refuse)
    with pytest.raises(CannotRunError, match="cannot make"):
        Group(1, [0])


@pytest.mark.parametrize("capturing", [0, 1])
def test_only_a_group_of_one_is_captured_into_a_graph(monkeypatch, capturing):
    driver = types.SimpleNamespace(cuStreamIsCapturing=lambda stream: (0, capturing))
    monkeypatch.setattr(all_reduce, "driver_api", lambda: driver)
    if not capturing:
        return all_reduce._refuse_capture(7, 2)
    with pytest.raises(LaunchRefused, match="over 2 GPUs cannot be captured"):
        all_reduce._refuse_capture(7, 2)


# ---------------------------------------------------------------------------------------------- several ranks


class Ranks:
    """A group of processes with rank 0 in this one, and whole tensors in host memory."""

    def __init__(self, gpus, n=5, dtype="fp32", in_place=False):
        self.group = Group(len(gpus) + 1, [0, *gpus], lambda ordinals: Peers(ordinals, "peer_process:serve"))
        count = len(gpus) + 1
        rng = np.random.default_rng(3)
        self.send = rng.normal(0.1, 0.7, (count, n)).astype(numpy_dtype(dtype))
        self.recv = np.full((count, n), POISON, np.uint8).repeat(self.send.itemsize, 1).view(self.send.dtype)
        self.sum = self.send.astype(np.float32).sum(axis=0).astype(self.send.dtype)
        names = ("send", "send") if in_place else ("recv", "send")
        step = AllReduce(*names, n, count)
        self.prepared = PreparedAllReduce(step, tensors(count, n, dtype), lambda ranks: self.group)
        self.bound = self.prepared.bind(lambda name: getattr(self, name).ctypes.data)

    def run(self):
        self.bound.distribute(None)
        self.bound(0)
        self.bound.collect(None)

    @property
    def pids(self):
        return [worker._process.pid for worker in self.group._peers._workers]


@pytest.fixture
def make(without_gpu):
    without_gpu.setattr(all_reduce, "Communicator", ranks.FileCommunicator)
    made = []

    def make_ranks(*gpus, **options):
        made.append(Ranks(gpus, **options))
        return made[-1]

    yield make_ranks
    for each in made:
        each.group.close()


@pytest.mark.parametrize(("dtype", "n"), [("fp32", 1), ("fp32", 4099), ("bf16", 7), ("fp16", 3)])
def test_every_rank_gets_the_sum_of_all_rows(make, dtype, n):
    three = make(1, 2, n=n, dtype=dtype)
    sent = three.send.copy()
    three.run()
    assert (three.recv == three.sum).all() and (three.send == sent).all()
    three.send *= 2
    three.run()
    assert (three.recv == 2 * three.sum).all()


def test_the_sum_may_replace_what_is_added_up(make):
    two = make(1, in_place=True)
    two.run()
    assert (two.send == two.sum).all() and (two.recv.view(np.uint8) == POISON).all()


def test_a_rank_that_writes_nothing_leaves_its_poison(make):
    three = make(1, ranks.WRITES_NOTHING)
    three.run()
    assert (three.recv[:2] == three.sum).all()
    assert (three.recv[2].view(np.uint8) == POISON).all()


def test_a_rank_that_writes_past_its_row_fails_the_check(make):
    two = make(ranks.WRITES_TOO_MUCH)
    with pytest.raises(KernelFault, match="rank 1: the all-reduce writes outside a target row") as fault:
        two.run()
    assert fault.value.row_status == "fail" and not fault.value.context_lost


def test_launches_need_no_new_rows_and_old_rows_are_freed(make):
    two = make(1)
    for _ in range(3):
        two.run()
    first = two.bound._number
    two.bound = two.prepared.bind(lambda name: getattr(two, name).ctypes.data)
    assert two.group._unused == [first] and two.bound._number == first + 1
    two.run()
    again = two.prepared.bind(lambda name: getattr(two, name).ctypes.data)
    assert two.group._unused == [] and again._number == first + 2
    assert (two.recv == two.sum).all()


# ---------------------------------------------------------------------------------------------- ranks that fail


@pytest.mark.parametrize(
    ("gpu", "error", "words"),
    [
        (ranks.DIES_AT_START, KernelFault, "rank 2 of the all-reduce: the worker process ended with status 7"),
        (ranks.HANGS_AT_START, KernelFault, "rank 2 of the all-reduce: the start of its process did not end"),
        (ranks.DIES_JOINING, KernelFault, "rank 2 of the all-reduce: the worker process ended with status 7"),
        (ranks.NEVER_JOINS, KernelFault, "the ranks of an all-reduce over 3 GPUs did not find each other in 2 s"),
        (ranks.CANNOT_JOIN, CannotRunError, "rank 2: no link to the other GPUs"),
        (ranks.NO_MEMORY, CannotRunError, "rank 2: not enough GPU memory: tensor source row needs much"),
    ],
)
def test_a_rank_that_does_not_come_is_an_error_in_time(make, monkeypatch, gpu, error, words):
    if gpu == ranks.HANGS_AT_START:
        monkeypatch.setattr(peers, "START_SECONDS", 2.0)
    monkeypatch.setattr(all_reduce, "JOIN_SECONDS", 2.0 if gpu == ranks.NEVER_JOINS else 30.0)
    started = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        make(1, gpu)
    assert time.monotonic() - started < 20
    assert not getattr(caught.value, "context_lost", False), "this process goes on, and remembers"


@pytest.mark.parametrize(
    ("gpu", "status", "words"),
    [
        (ranks.DIES_LAUNCHING, "crashed", "rank 1 of the all-reduce: the worker process ended with status 7"),
        (ranks.HANGS_LAUNCHING, "hung", "rank 1 of the all-reduce: queueing its all-reduce did not end"),
        (ranks.LAUNCH_FAILS, "crashed", "rank 1: an internal error"),
    ],
)
def test_a_rank_that_fails_in_a_launch_is_a_fault_in_time(make, monkeypatch, gpu, status, words):
    monkeypatch.setattr(all_reduce, "ANSWER_SECONDS", 2.0)
    two = make(gpu)
    # NCCL queues a sum and comes back, where the stand-in waits for the other rank.
    monkeypatch.setattr(two.group.communicator, "all_reduce", lambda *args: None)
    started = time.monotonic()
    with pytest.raises(KernelFault, match=words) as fault:
        two.run()
    assert time.monotonic() - started < 20
    assert fault.value.row_status == status and fault.value.context_lost


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (ranks.LAUNCH_FAILS, "^rank 1: an internal error$"),
        (ranks.LAUNCH_RAISES, "^rank 1: ZeroDivisionError: by zero$"),
    ],
)
def test_a_rank_whose_launch_fails_ends_the_wait_of_this_one_which_says_why(make, gpu, words):
    two = make(gpu)
    # Rank 0 waits in NCCL for a rank that will not come. Without help it would for ever: this ends the test.
    late = threading.Timer(20, two.group.communicator.abort)
    late.start()
    started = time.monotonic()
    with pytest.raises(KernelFault, match=words) as fault:
        two.run()
    late.cancel()
    assert time.monotonic() - started < 10 and fault.value.context_lost
    time.sleep(3 * all_reduce._WATCH_SECONDS)
    with pytest.raises(KernelFault, match=words):  # and not that its process has ended
        two.bound(0)
    assert_gone_soon(two.pids)


def test_a_rank_that_dies_while_this_one_waits_for_it_ends_the_wait(make):
    two = make(1)
    two.run()
    os.kill(two.pids[0], signal.SIGKILL)
    # Rank 0 is inside NCCL: what ends the wait is that the communicator is given up.
    with pytest.raises(KernelFault, match="aborted"):
        two.group.communicator.all_reduce(two.send.ctypes.data, two.recv.ctypes.data, 5, "fp32", 0)
    for use in (lambda: two.bound(0), lambda: two.bound.collect(None), two.run):
        with pytest.raises(KernelFault, match="rank 1 of the all-reduce: the worker process was ended by SIGKILL"):
            use()


# ---------------------------------------------------------------------------------------------- no orphans


def gone(pid: int) -> bool:
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def assert_gone_soon(pids) -> None:
    for _ in range(100):
        if all(map(gone, pids)):
            return
        time.sleep(0.1)
    pytest.fail(f"of {pids}, some outlived rank 0")


def test_closing_ends_the_processes(make):
    three = make(1, 2)
    pids = three.pids
    three.group.close()
    assert_gone_soon(pids)


@pytest.mark.parametrize("gpu", [1, ranks.NEVER_JOINS])
def test_no_process_outlives_rank_0_that_is_killed(tmp_path, gpu):
    """In a process of its own, as rank 0; the second also while its peer is inside NCCL."""
    script = f"""
        import os, signal, threading, time
        from kbench.device.cuda.peers import Peers
        peers = Peers([{gpu}], "peer_process:serve")
        print(peers._workers[0]._process.pid, flush=True)
        peers.post({{"do": "join", "ranks": 2, "name": {str(tmp_path).encode().hex()!r}}})
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = os.pathsep.join((str(HELPERS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines())],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert_gone_soon([int(done.stdout)])


def test_shared_memory_grows_and_has_no_name_that_could_be_left_behind():
    mine = SharedMemory()
    theirs = SharedMemory(mine.descriptor)
    mine.view(4)[...] = 7
    assert theirs.view(4).tolist() == [7] * 4
    mine.view(10_000)[9_999] = 9
    assert theirs.view(10_000)[9_999] == 9 and theirs.view(4).tolist() == [7] * 4
    assert "memfd" in os.readlink(f"/proc/self/fd/{mine.descriptor}")
    mine.close()
