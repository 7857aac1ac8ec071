"""Every planted bug is found on a GPU, in the right words, and costs its own row only; none is ever timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kbench.catalog import load_catalog
from kbench.grammar import Target
from kbench.selection import Selection
from kbench.sweep import Bench, Options
from planted_symptoms import AFTER_TIMING, GPU

PLANTED = Path(__file__).resolve().parents[1] / "planted"
FAMILY = load_catalog([PLANTED])["planted"]


def open_bench():
    return Bench(Options(device="cuda", family_dirs=(PLANTED,), seed=1, time_limit=5.0), lambda note: None)


def sweep(bench, symptoms, sizes):
    """One row per version and block size that a symptom is about, proved and, where that passes, timed."""
    jobs = bench.jobs(Selection([Target("planted")], "sweep", block_sizes=[128, 512], sizes=sizes))
    wanted = [job for job in jobs if job.version in symptoms and job.block == symptoms[job.version].block]
    return {row.version: row for row in bench.rows(wanted)}


@pytest.fixture(scope="module")
def rows():
    with open_bench() as bench:
        return sweep(bench, GPU, {})


@pytest.fixture(scope="module")
def small_rows():
    # A bench of its own: state that a kernel keeps on the device would be left over from the rows above.
    with open_bench() as bench:
        return sweep(bench, AFTER_TIMING, {"N": [7], "C": [301]})


@pytest.mark.parametrize("number", GPU, ids=lambda number: f"{number}-{FAMILY.by_number[number].idea}")
def test_a_planted_bug_is_found_and_named(rows, number):
    row = rows[number]
    assert GPU[number].missing(row) == ""
    assert (row.measurement is not None) == (row.status == "pass")
    json.dumps(row.to_dict(), allow_nan=False)


@pytest.mark.parametrize("number", AFTER_TIMING)
def test_state_that_outlives_the_proof_is_found_after_the_timing(small_rows, number):
    row = small_rows[number]
    assert AFTER_TIMING[number].missing(row) == ""
    assert row.reason.startswith("after the timed launches: ") and row.measurement is None


def test_the_right_version_is_deterministic_and_far_from_its_bound(rows):
    verdict = rows[1].verdict
    assert verdict["deterministic"] is True
    assert max(output["used"] for output in verdict["outputs"]) < 0.6
