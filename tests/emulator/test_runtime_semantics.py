"""Threads, warps and blocks behave as CUDA says, in every order of running them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from runtime_support import KERNELS, Runner, needs_compiler

from kbench.device.emulator.device import EmulatorDevice

pytestmark = needs_compiler

FILE = "runtime_semantics.cu"
NAMES = [
    "positions", "block_sum", "missing_barrier", "fresh_shared", "quarters", "halves", "tiles", "sources",
    "converging_lines", "active_lanes", "counters", "early_exit", "vote_without", "speaks", "many",
    "written_from_both_ends",
]  # fmt: skip
ORDERS = ["forward", "reverse", "random"]
LANES = np.arange(32)


@pytest.fixture(scope="module")
def run() -> Runner:
    return Runner(FILE, NAMES, EmulatorDevice(workers=4))


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize(
    ("grid", "block"),
    [((3, 5, 2), (4, 3, 7)), ((1, 1, 1), (1, 1, 1)), ((7, 1, 1), (1024, 1, 1)), ((2, 3, 4), (33, 1, 1))],
)
def test_every_thread_runs_once_with_its_own_position(run: Runner, grid: tuple, block: tuple, schedule: str) -> None:
    count = int(np.prod(grid) * np.prod(block))
    out = run("positions", grid, block, {"out": np.full((count, 6), -1, np.int32)}, schedule=schedule)["out"]
    axes = [range(n) for n in (*grid[::-1], *block[::-1])]
    expected = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 6)[:, [2, 1, 0, 5, 4, 3]]
    assert (out == expected).all()


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("block", [32, 64, 256, 1024])
def test_barriers_and_dynamic_shared_memory(run: Runner, block: int, schedule: str) -> None:
    values = np.random.default_rng(1).integers(0, 100, 777).astype(np.float32)
    arrays = {"out": np.zeros(5, np.float32), "values": values}
    out = run("block_sum", 5, block, arrays, values.size, shared=4 * block, schedule=schedule)["out"]
    assert (out == values.sum()).all()


@pytest.mark.parametrize("block", [32, 33, 256, 1024])
def test_a_race_that_is_right_from_both_ends_shows_in_a_random_order_and_every_time(run: Runner, block: int) -> None:
    assert EmulatorDevice.schedules == ("forward", "reverse", "random")  # what a check runs
    results = [
        run("written_from_both_ends", 1, block, {"out": np.zeros(block, np.float32)}, schedule=schedule)["out"]
        for schedule in ("forward", "reverse", "random", "random")
    ]
    assert (results[0] == 3).all() and (results[1] == 3).all()
    assert np.isnan(results[2]).any() and np.array_equal(results[2], results[3], equal_nan=True)


def test_a_missing_barrier_shows_in_one_of_two_orders(run: Runner) -> None:
    for step, wrong_order in ((1, "forward"), (63, "reverse")):
        right = (np.arange(64) + step) % 64
        results = {
            order: run("missing_barrier", 1, 64, {"out": np.zeros(64, np.int32)}, step, schedule=order)["out"]
            for order in ("forward", "reverse")
        }
        wrong = results.pop(wrong_order)
        assert (wrong != right).sum() == 63  # all but the thread that wraps around
        assert (next(iter(results.values())) != right).sum() == 1


@pytest.mark.parametrize("schedule", ORDERS)
def test_shared_memory_is_poisoned_for_every_block(run: Runner, schedule: str) -> None:
    out = run("fresh_shared", 20, 32, {"out": np.zeros(640, np.uint32)}, shared=128, schedule=schedule)["out"]
    assert (out == 0xFFFFFFFF).all()


@pytest.mark.parametrize("schedule", ORDERS)
def test_masks_of_different_length_in_flight(run: Runner, schedule: str) -> None:
    out = run("quarters", 1, 32, {"out": np.zeros(32, np.int32)}, schedule=schedule)["out"]
    rounds = LANES // 8 + 1
    assert (out == np.where(rounds % 2, LANES ^ 1, LANES) + rounds).all()


@pytest.mark.parametrize("schedule", ORDERS)
def test_divergent_halves_with_different_masks_and_operations(run: Runner, schedule: str) -> None:
    out = run("halves", 1, 32, {"out": np.zeros(32, np.int32)}, schedule=schedule)["out"]
    assert (out == np.where(LANES < 16, 120, np.where(LANES % 2, 1 + 17, 2))).all()


@pytest.mark.parametrize("schedule", ORDERS)
def test_tiles(run: Runner, schedule: str) -> None:
    out = run("tiles", 1, 96, {"out": np.zeros(96, np.int32)}, schedule=schedule)["out"]
    lanes = np.arange(96)
    assert (out == lanes.reshape(-1, 8).sum(1).repeat(8) + 1000 * (lanes % 8)).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_shuffle_sources(run: Runner, width: int) -> None:
    """As PTX defines them: up and down stay in the segment, xor may reach into lower ones."""
    out = run("sources", 1, 32, {"out": np.zeros(128, np.int32)}, width)["out"].reshape(4, 32)
    first = LANES // width * width
    last = first + width - 1
    assert (out[0] == np.where(first <= LANES - 3, LANES - 3, LANES)).all()
    assert (out[1] == np.where(last >= LANES + 3, LANES + 3, LANES)).all()
    assert (out[2] == np.where(last >= (LANES ^ 5), LANES ^ 5, LANES)).all()
    assert (out[3] == first + (LANES + 1) % width).all()


@pytest.mark.parametrize("schedule", ORDERS)
def test_one_operation_from_two_lines(run: Runner, schedule: str) -> None:
    out = run("converging_lines", 1, 32, {"out": np.zeros(32, np.int32)}, schedule=schedule)["out"]
    assert (out == np.where(LANES < 16, LANES ^ 16, -(LANES ^ 16))).all()


@pytest.mark.parametrize("schedule", ORDERS)
def test_active_mask_names_the_lanes_of_the_branch(run: Runner, schedule: str) -> None:
    out = run("active_lanes", 1, 32, {"out": np.zeros(32, np.uint32)}, schedule=schedule)["out"]
    thirds = sum(1 << lane for lane in range(0, 32, 3))
    assert (out == np.where(LANES % 3 == 0, thirds, 0xFFFFFFFF ^ thirds)).all()


@pytest.mark.parametrize("schedule", ORDERS)
def test_atomics_of_several_workers(run: Runner, schedule: str) -> None:
    blocks, threads, rounds = 400, 64, 10
    out = run("counters", blocks, threads, {"out": np.zeros(3, np.int32)}, rounds, schedule=schedule)["out"]
    total = blocks * threads * rounds
    assert out.tolist() == [total, blocks * threads - 1, 2 * total]


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("stay", [1, 20, 32, 45, 100])
def test_exited_threads_count_as_arrived(run: Runner, stay: int, schedule: str) -> None:
    out = run("early_exit", 2, 100, {"out": np.zeros(100, np.int32)}, stay, schedule=schedule)["out"]
    assert (out[:stay] == stay // 2 + 1000 + 2000 * (stay > 7)).all()
    assert (out[stay:] == 0).all()


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("leaver", [0, 13, 31])
def test_lanes_do_not_wait_for_one_that_has_left(run: Runner, leaver: int, schedule: str) -> None:
    out = run("vote_without", 1, 32, {"out": np.zeros(32, np.uint32)}, leaver, schedule=schedule)["out"]
    assert (out == np.where(leaver == LANES, 0, 0xFFFFFFFF ^ (1 << leaver))).all()


def test_printf_goes_to_stderr(run: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    run("speaks", 2, 32, {"out": np.zeros(1, np.int32)})
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "value 42 1.50 text\n")


def test_arguments_of_every_type(run: Runner) -> None:
    out = run("many", 1, 1, {"out": np.zeros(7, np.int32)}, -5, 7, 3 << 32, 1.5, 2.25, True, 200)["out"]
    assert out.tolist() == [-5, 7, 3, 3, 9, 1, 200]


def test_random_order_depends_on_the_seed_only() -> None:
    def result(seed: int) -> list[int]:
        runner = Runner(FILE, NAMES, EmulatorDevice(workers=1, seed=seed))
        return runner("missing_barrier", 1, 64, {"out": np.zeros(64, np.int32)}, 7, schedule="random")["out"].tolist()

    assert result(1) == result(1)
    assert len({tuple(result(seed)) for seed in range(5)}) > 1


def test_launches_from_several_python_threads(run: Runner) -> None:
    failures: list[object] = []

    def work() -> None:
        for _ in range(30):
            out = run("counters", 20, 32, {"out": np.zeros(3, np.int32)}, 1)["out"]
            if out[0] != 640:
                failures.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_process_has_workers_of_its_own(run: Runner) -> None:
    run("counters", 20, 32, {"out": np.zeros(3, np.int32)}, 1)
    child = os.fork()
    if child == 0:
        try:
            out = run("counters", 20, 32, {"out": np.zeros(3, np.int32)}, 1)["out"]
            os._exit(0 if out[0] == 640 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ctrl_c_ends_a_launch(tmp_path) -> None:
    script = f"""
import sys, numpy as np
sys.path.insert(0, {str(KERNELS.parent / "helpers")!r})
from runtime_support import Runner
from kbench.device.emulator.device import EmulatorDevice
run = Runner("runtime_faults.cu", ["endless_barriers", "good"], EmulatorDevice(time_limit=60))
print("ready", flush=True)
try:
    run("endless_barriers", 1, 32, {{"out": np.zeros(1, np.int32)}})
except KeyboardInterrupt:
    print(run("good", 1, 32, {{"out": np.zeros(32, np.int32)}})["out"].sum())
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=_environment())
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(2)
    assert process.communicate(timeout=20)[0].strip() == str(sum(range(32)))


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
