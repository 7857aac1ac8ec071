"""The worker process: answers, errors, deaths and deadlines reach the parent as what they are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kbench.device import worker
from kbench.device.worker import Worker, WorkerError, WorkerLost
from kbench.errors import CannotRunError, CompileError, KernelFault

HELPERS = Path(__file__).parent / "helpers"


@pytest.fixture
def notes():
    return []


@pytest.fixture
def child(notes, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    monkeypatch.setattr(worker, "GRACE_SECONDS", 0.2)
    started = Worker("worker_handler:make", {"greeting": "hello"}, notes.append)
    yield started
    started.close()


def test_answers_and_notes(child, notes):
    assert child.call({"do": "greet", "with": {"name": "warp"}}) == "hello, warp"
    assert notes == ["about to greet warp"]


def test_errors_arrive_as_they_were_raised(child):
    with pytest.raises(CannotRunError, match="no GPU; buy one"):
        child.call({"do": "cannot"})
    with pytest.raises(CompileError) as caught:
        child.call({"do": "compile"})
    assert caught.value.log == "line one\nline two"
    with pytest.raises(KernelFault) as fault:
        child.call({"do": "fault"})
    assert (fault.value.kind, fault.value.location, fault.value.row_status) == ("out-of-bounds", "x.cu:7", "fail")
    assert child.call({"do": "greet", "with": {"name": "again"}}) == "hello, again"


def test_a_bug_of_kbench_keeps_its_traceback(child):
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        child.call({"do": "bug"})


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_death_by_signal_is_named(child, name):
    with pytest.raises(WorkerLost, match=name) as lost:
        child.call({"do": "die", "with": {"signal_name": name}})
    assert lost.value.fault.row_status == "crashed"
    with pytest.raises(WorkerLost):
        child.call({"do": "greet", "with": {"name": "nobody"}})


def test_an_exit_is_a_loss(child):
    with pytest.raises(WorkerLost, match="status 9"):
        child.call({"do": "leave"})


def test_a_hang_is_ended_by_the_deadline(child):
    started = time.monotonic()
    with pytest.raises(WorkerLost, match="a launch of spin did not end") as lost:
        child.call({"do": "hang"})
    assert time.monotonic() - started < 10
    assert lost.value.fault.row_status == "hung"


def test_restarting_the_clock_keeps_slow_work_alive(child):
    assert child.call({"do": "slow_but_alive"}) == "done"


def test_prints_of_the_child_stay_off_stdout(tmp_path):
    script = (
        "from kbench.device.worker import Worker\n"
        "w = Worker('worker_handler:make', {'greeting': ''}, print)\n"
        "assert w.call({'do': 'print'}) == 'printed'\nw.close()\n"
    )
    path = os.pathsep.join((str(HELPERS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "from a kernel" not in done.stdout


def test_the_child_ends_when_its_parent_is_killed():
    script = (
        "import os, signal\nfrom kbench.device.worker import Worker\n"
        "w = Worker('worker_handler:make', {'greeting': ''}, print)\n"
        "w.call({'do': 'greet', 'with': {'name': 'x'}})\nprint(w._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join((str(HELPERS), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    pid = int(done.stdout.split()[-1])
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"the child {pid} outlived its parent")


def test_several_children_work_at_once(child, notes):
    other = Worker("worker_handler:make", {"greeting": "good day"}, notes.append)
    for each in (child, other):
        each.post({"do": "greet", "with": {"name": "warp"}})
    assert [each.answer() for each in (child, other)] == ["hello, warp", "good day, warp"]
    other.close()


def test_a_child_that_was_killed_is_a_loss_whatever_is_asked(child):
    assert child.call({"do": "greet", "with": {"name": "warp"}}) and child.alive
    child.kill()
    assert not child.alive
    for ask in (child.answer, lambda: child.post({"do": "greet"}), lambda: child.call({"do": "greet"})):
        with pytest.raises(WorkerLost, match="SIGKILL"):
            ask()


def test_a_child_inherits_open_files_under_their_numbers(notes, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(HELPERS))
    with (tmp_path / "shared").open("w+") as file:
        heir = Worker("worker_handler:make", {"greeting": ""}, notes.append, (file.fileno(),))
        heir.call({"do": "write", "with": {"descriptor": file.fileno(), "text": "from the child"}})
        heir.close()
        assert file.read() == "from the child"
