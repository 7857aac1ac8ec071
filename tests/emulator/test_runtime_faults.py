"""What stops a kernel is named with kind, kernel, block, thread and line, and the next launch works."""

from __future__ import annotations

import os
import platform
import time

import numpy as np
import pytest
from runtime_support import Runner, line_of, needs_compiler

from kbench.device.emulator.device import EmulatorDevice
from kbench.errors import FAULT_KINDS, KernelFault

pytestmark = needs_compiler

FILE = "runtime_faults.cu"
KERNELS = [
    "good", "write_past_end", "read_past_end", "write_before_start", "wild", "misaligned", "divergent_barrier",
    "divergent_warp", "reads_lane_outside_mask", "reads_exited_lane", "not_in_own_mask", "deadlock", "failed_assert",
    "trap", "recursion", "huge_local", "division", "endless", "endless_barriers", "slow_blocks", "dynamic_shared",
    "inlined_helper", "prints_bad_pointer", "clears_too_much",
]  # fmt: skip
# Many blocks of two dimensions; exactly one thread of one of them misbehaves: see `chosen` in the .cu.
GRID, BLOCK = (3, 4, 2), (5, 3, 2)
CHOSEN_BLOCK, CHOSEN_THREAD = (1, 2, 0), (3, 1, 0)
FLOATS = np.zeros(100, np.float32)
INTS = np.zeros(64, np.int32)


@pytest.fixture(scope="module")
def run() -> Runner:
    return Runner(FILE, KERNELS, EmulatorDevice(workers=2))


@pytest.fixture(scope="module")
def hasty() -> Runner:
    """With a time limit that only an endless kernel reaches."""
    return Runner(FILE, KERNELS, EmulatorDevice(workers=2, time_limit=0.5))


@pytest.fixture(autouse=True)
def works_afterwards(run: Runner):
    yield
    for schedule in ("forward", "reverse"):
        result = run("good", 2, 32, {"out": INTS}, schedule=schedule)["out"]
        assert (result == np.tile(np.arange(32), 2)).all()


def check(fault: KernelFault, kind: str, kernel: str, mark: str) -> None:
    """The chosen thread is to blame, at the marked line."""
    assert (fault.kind, fault.kernel, fault.location) == (kind, kernel, line_of(FILE, mark))
    assert (fault.block, fault.thread) == (CHOSEN_BLOCK, CHOSEN_THREAD)
    assert kind in FAULT_KINDS and not fault.context_lost
    assert "\n" not in fault.message


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])
def test_write_past_the_end(run: Runner, schedule: str) -> None:
    fault = run.fault("write_past_end", GRID, BLOCK, {"out": FLOATS}, 100, schedule=schedule)
    check(fault, "out-of-bounds", "write_past_end", "write past end")
    assert fault.message == "write past the end of tensor out: element 100 (byte 400) of 100 elements"


def test_read_past_the_end(run: Runner) -> None:
    fault = run.fault("read_past_end", GRID, BLOCK, {"out": FLOATS}, 100)
    check(fault, "out-of-bounds", "read_past_end", "read past end")
    assert fault.message == "read past the end of tensor out: element 105 (byte 420) of 100 elements"


def test_far_past_the_end(run: Runner) -> None:
    """A whole megabyte off is still this tensor's fault, with another tensor not far away."""
    other = np.zeros(5000, np.float32)
    fault = run.fault("write_past_end", GRID, BLOCK, {"out": other}, 5000 + 200_000)
    check(fault, "out-of-bounds", "write_past_end", "write past end")
    assert "element 205000" in fault.message


def test_before_the_start(run: Runner) -> None:
    fault = run.fault("write_before_start", GRID, BLOCK, {"out": FLOATS}, 20_000)
    check(fault, "out-of-bounds", "write_before_start", "write before start")
    assert fault.message == "write before the start of tensor out: element -20000 (byte -80000) of 100 elements"


@pytest.mark.parametrize("address", [0, 0x1234, 0x7FFF_0000_0000_0000])
def test_wild_pointer(run: Runner, address: int) -> None:
    fault = run.fault("wild", GRID, BLOCK, {"out": FLOATS}, address)
    check(fault, "illegal-access", "wild", "wild write")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs than x86-64 load 16 bytes from anywhere")
def test_misaligned(run: Runner) -> None:
    check(run.fault("misaligned", GRID, BLOCK, {"out": FLOATS}), "misaligned", "misaligned", "misaligned store")


def test_barrier_divergence(run: Runner) -> None:
    fault = run.fault("divergent_barrier", 1, 128, {"out": np.zeros(128, np.int32)})
    assert (fault.kind, fault.location) == ("barrier-divergence", line_of(FILE, "barrier of the second half"))
    assert (fault.block, fault.thread) == ((0, 0, 0), (64, 0, 0))
    assert (
        f"64 other threads of the block wait in __syncthreads at {line_of(FILE, 'barrier of the first half')}"
        in fault.message
    )


def test_barrier_divergence_in_reverse(run: Runner) -> None:
    fault = run.fault("divergent_barrier", 1, 128, {"out": np.zeros(128, np.int32)}, schedule="reverse")
    assert (fault.thread, fault.location) == ((63, 0, 0), line_of(FILE, "barrier of the first half"))


def test_warp_divergence(run: Runner) -> None:
    fault = run.fault("divergent_warp", 1, 32, {"out": INTS})
    assert (fault.kind, fault.location) == ("warp-divergence", line_of(FILE, "vote of the other half"))
    assert fault.thread == (16, 0, 0)
    assert f"__shfl_xor_sync at {line_of(FILE, 'shuffle of one half')}" in fault.message


def test_lane_outside_the_mask(run: Runner) -> None:
    fault = run.fault("reads_lane_outside_mask", 1, 32, {"out": INTS})
    assert (fault.kind, fault.location) == ("inactive-lane", line_of(FILE, "lane outside the mask"))
    assert "lane 4 reads lane 8, which is not in the mask" in fault.message


def test_exited_lane(run: Runner) -> None:
    fault = run.fault("reads_exited_lane", 1, 32, {"out": INTS})
    assert (fault.kind, fault.location) == ("inactive-lane", line_of(FILE, "exited lane"))
    assert "lane 0 reads lane 5, which has exited" in fault.message


def test_not_in_own_mask(run: Runner) -> None:
    fault = run.fault("not_in_own_mask", 1, 32, {"out": INTS})
    assert (fault.kind, fault.thread, fault.location) == ("inactive-lane", (0, 0, 0), line_of(FILE, "not in own mask"))


def test_deadlock_lists_who_waits_where(run: Runner) -> None:
    fault = run.fault("deadlock", 1, 64, {"out": INTS})
    assert (fault.kind, fault.block, fault.thread) == ("deadlock", (0, 0, 0), None)
    waits, others = line_of(FILE, "waits for the others"), line_of(FILE, "the others wait here")
    assert f"threads 0-15 wait in __shfl_down_sync at {waits} (mask 0xffffffff)" in fault.message
    assert f"threads 16-63 wait in __syncthreads at {others}" in fault.message
    assert fault.location == waits


def test_assert(run: Runner) -> None:
    fault = run.fault("failed_assert", GRID, BLOCK, {"out": INTS})
    check(fault, "assert", "failed_assert", "assertion")
    assert "!chosen()" in fault.message


def test_trap(run: Runner) -> None:
    check(run.fault("trap", GRID, BLOCK, {"out": INTS}), "trap", "trap", "trap")


def test_stack_overflow(run: Runner) -> None:
    fault = run.fault("recursion", GRID, BLOCK, {"out": INTS})
    assert (fault.kind, fault.block, fault.thread) == ("stack-overflow", CHOSEN_BLOCK, CHOSEN_THREAD)
    assert fault.location.startswith(FILE)


def test_local_array_larger_than_the_stack(run: Runner) -> None:
    fault = run.fault("huge_local", 1, 32, {"out": INTS}, 0)
    assert (fault.kind, fault.kernel) == ("stack-overflow", "huge_local")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 traps at an integer division by zero")
def test_division_by_zero(run: Runner) -> None:
    check(run.fault("division", GRID, BLOCK, {"out": INTS}, 0), "arithmetic", "division", "division by zero")


@pytest.mark.parametrize("schedule", ["forward", "reverse"])
def test_endless_loop(hasty: Runner, schedule: str) -> None:
    start = time.monotonic()
    fault = hasty.fault("endless", GRID, BLOCK, {"out": INTS}, schedule=schedule)
    assert 0.4 < time.monotonic() - start < 5
    assert (fault.kind, fault.block, fault.thread) == ("timeout", CHOSEN_BLOCK, CHOSEN_THREAD)
    # Either line of the loop, or the inlined condition that it asks.
    assert fault.location.startswith(FILE) and "0.5 s" in fault.message


def test_endless_loop_of_barriers(hasty: Runner) -> None:
    fault = hasty.fault("endless_barriers", 1, 64, {"out": INTS})
    assert (fault.kind, fault.location) == ("timeout", line_of(FILE, "endless barriers"))


def test_too_many_blocks_for_the_time_limit(hasty: Runner) -> None:
    fault = hasty.fault("slow_blocks", 2_000_000, 32, {"out": INTS}, 300)
    assert (fault.kind, fault.kernel) == ("timeout", "slow_blocks")


@pytest.mark.parametrize(("shared", "index"), [(64, 16), (60, 15), (64, 500), (48 * 1024, 100_000)])
def test_past_dynamic_shared_memory(run: Runner, shared: int, index: int) -> None:
    """At a multiple of 16 bytes at once, otherwise in the few bytes of slack when the block ends."""
    fault = run.fault("dynamic_shared", 1, 1, {"out": INTS}, index, shared=shared)
    assert (fault.kind, fault.block) == ("out-of-bounds", (0, 0, 0))
    assert f"past the end of dynamic shared memory of {shared} bytes" in fault.message
    if shared % 16 == 0:
        assert fault.location == line_of(FILE, "past dynamic shared memory")


def test_before_dynamic_shared_memory(run: Runner) -> None:
    fault = run.fault("dynamic_shared", 1, 1, {"out": INTS}, -5000, shared=64)
    assert (fault.kind, fault.location) == ("out-of-bounds", line_of(FILE, "past dynamic shared memory"))
    assert fault.message == "write before the start of dynamic shared memory of 64 bytes"


def test_faults_leave_no_stacks_behind(run: Runner) -> None:
    """Threads that are dropped where they stand give their stacks back."""

    def address_space() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    out = {"out": np.zeros(1024, np.int32)}
    run.fault("divergent_barrier", 1, 1024, out)
    before = address_space()
    for _ in range(50):
        run.fault("divergent_barrier", 1, 1024, out)
    assert address_space() - before < 50 * 2**20  # 50 times the stacks of 64 threads would be a gigabyte


def test_line_is_that_of_the_helper(run: Runner) -> None:
    check(
        run.fault("inlined_helper", GRID, BLOCK, {"out": FLOATS}, 100), "out-of-bounds", "inlined_helper", "in a helper"
    )


def test_line_is_that_of_the_call_of_a_library_function(run: Runner) -> None:
    fault = run.fault("clears_too_much", GRID, BLOCK, {"out": FLOATS}, 4 * 5000)
    check(fault, "out-of-bounds", "clears_too_much", "memset")
    assert fault.message.startswith("write past the end of tensor out")


def test_bad_pointer_in_printf(run: Runner) -> None:
    """The C library is left in the middle of formatting; it must not keep a lock."""
    fault = run.fault("prints_bad_pointer", GRID, BLOCK, {"out": INTS})
    assert (fault.kind, fault.block, fault.thread) == ("illegal-access", CHOSEN_BLOCK, CHOSEN_THREAD)
