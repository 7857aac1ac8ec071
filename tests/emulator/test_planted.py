"""Every planted bug is found on the emulator, in the right words, and costs its own row only."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from kbench.catalog import load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.check.prove import prove, recheck
from kbench.family import Problem, kernels_of
from kbench.grammar import Target
from kbench.selection import Selection
from kbench.source import load_source
from kbench.sweep import Bench, Options
from planted_symptoms import AFTER_TIMING, EMULATOR

PLANTED = Path(__file__).resolve().parents[1] / "planted"

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")), reason="no C++ compiler for the emulator"
)

FAMILY = load_catalog([PLANTED])["planted"]
SMALL = Problem(FAMILY.presets["small"], "fp32")


@pytest.fixture(scope="module")
def rows():
    """One row per version and block size that a symptom is about, from one bench: as a user would get them."""
    options = Options(device="emulator", family_dirs=(PLANTED,), seed=1, time_limit=1.5)
    with Bench(options, lambda note: None) as bench:
        jobs = bench.jobs(Selection([Target("planted")], "check", block_sizes=[128, 512]))
        wanted = [job for job in jobs if job.version in EMULATOR and job.block == EMULATOR[job.version].block]
        return {row.version: row for row in bench.rows(wanted)}


@pytest.mark.parametrize("number", EMULATOR, ids=lambda number: f"{number}-{FAMILY.by_number[number].idea}")
def test_a_planted_bug_is_found_and_named(rows, number):
    assert EMULATOR[number].missing(rows[number]) == ""
    json.dumps(rows[number].to_dict(), allow_nan=False)


def test_every_version_has_its_symptom():
    assert set(FAMILY.by_number) == set(EMULATOR) | set(AFTER_TIMING)


def test_the_right_version_is_deterministic_and_far_from_its_bound(rows):
    verdict = rows[1].verdict
    assert verdict["deterministic"] is True and verdict["launches"] == 3
    assert [(output["name"], output["compared"]) for output in verdict["outputs"]] == [
        ("out", 2107), ("total", 7), ("ids", 7)
    ]  # fmt: skip
    assert max(output["used"] for output in verdict["outputs"]) < 0.6


def test_the_bound_tells_zeros_stale_and_shifted_results_apart():
    for name, found in probe(FAMILY, SMALL, 1).items():
        assert found.rounded < 0.6 and found.weakest > 100, name


@pytest.fixture(scope="module")
def device():
    from kbench.device.emulator.device import EmulatorDevice

    made = EmulatorDevice(time_limit=10.0)
    yield made
    made.close()


def after_launches(device, number, launches, block, problem=SMALL):
    """The verdicts before and after `launches` launches that nobody looks at, as the timer makes them."""
    version = FAMILY.by_number[number]
    plan = version.plan(problem, block, device.props)
    module = device.build(load_source(PLANTED / "planted.cu"), kernels_of(plan))
    prepared = device.prepare(plan, module, FAMILY.tensors(problem))
    first, other = (make_case(FAMILY, problem, seed) for seed in (1, 2))
    with Buffers(device, FAMILY, version, problem, block, plan) as buffers:
        before = prove(device, FAMILY, version, prepared, buffers, first)
        bound = buffers.bind(prepared)
        for _ in range(launches):
            buffers.restore()
            device.enqueue(bound)
        device.synchronize()
        return before, recheck(device, FAMILY, version, prepared, buffers, other)


@pytest.mark.parametrize("number", AFTER_TIMING)
def test_state_that_outlives_the_proof_is_found_after_the_timing(device, number):
    # A block size that no other test uses: the versions' state is kept per block size, for as long as the module.
    before, after = after_launches(device, number, launches=10, block=256)
    assert before.passed and re.search(AFTER_TIMING[number].words, after.reason())


def test_a_right_version_passes_after_the_timing_too(device):
    before, after = after_launches(device, 1, launches=3, block=64)
    assert before.passed and after.passed


@pytest.mark.parametrize("block", FAMILY.by_number[7].block_sizes)
def test_a_version_that_is_right_at_one_block_size_passes_there_alone(device, block):
    before, _ = after_launches(device, 7, launches=0, block=block)
    assert before.passed == (block == 256)


@pytest.mark.parametrize("columns", [128, 129, 130, 131, 512])
def test_a_write_past_the_end_is_found_wherever_the_tensor_ends(device, columns):
    """Whether the next byte is slack behind the tensor or a page that nobody may touch."""
    before, _ = after_launches(device, 9, launches=0, block=64, problem=Problem({"N": 8, "C": columns}, "fp32"))
    assert not before.passed and "out" in before.reason() and re.search("past|beyond|outside", before.reason())
