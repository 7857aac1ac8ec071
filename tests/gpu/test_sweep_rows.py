"""Rows that explain themselves, on a GPU: their figures beside the driver's, and a sweep that goes on after a kill."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.family import Problem, checked_plan, kernels_of
from kbench.results.facts import Card, facts_of, main_kernel
from kbench.results.schema import Row
from kbench.results.store import latest_run, read_run, row_key
from kbench.source import load_source

CATALOG = load_catalog()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def sweep(results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kbench", "sweep", *words, "--results", str(results)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("swept")
    done = sweep(folder, "layernorm_forward:1-6", "--block-sizes", "64,256", "--dtype", "fp32,bf16", "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_every_row_has_its_facts(swept: dict[str, Any]) -> None:
    assert {row["dtype"] for row in swept["rows"]} == {"fp32", "bf16"}
    assert swept["device"]["props"]["multiprocessors"] > 0
    for row in swept["rows"]:
        facts = row["facts"]
        for name in ("gbs", "share", "registers", "local_bytes", "spill_bytes", "fit", "occupancy", "waves", "tail"):
            assert facts[name] is not None, (row["version"], row["block"], name)
        assert 0 < facts["tail"] <= 1 and 0 < facts["occupancy"] <= 1 and facts["limiter"]
    assert len(swept["winners"]) == 2 and all("version" in winner["why"] for winner in swept["winners"])


def test_blocks_that_fit_are_those_that_the_driver_counts(device: Any, swept: dict[str, Any]) -> None:
    from kbench.device.cuda.steps import driver_api

    driver, card = driver_api(), Card.of(swept["device"])
    for entry in swept["rows"]:
        row = Row.from_dict(entry)
        version = CATALOG.version(row.family, row.version)
        plan = checked_plan(version.plan(Problem(row.sizes, row.dtype), row.block, device.props))
        source = load_source(Path(CATALOG[row.family].sources[row.version]), (kernel_folder(),))
        module = device.build(source, kernels_of(plan), version.arch)
        kernel = main_kernel(row)
        assert kernel is not None
        with device.activate():
            status, fit = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                driver.CUfunction(module.kernels[kernel["name"]].function), math.prod(kernel["block"]), kernel["shared"]
            )
        assert not int(status)
        assert facts_of(row, card).fit == fit, (row.version, row.block, row.dtype)


def test_a_killed_sweep_goes_on_with_every_row_once(tmp_path: Path) -> None:
    words = ["layernorm_forward:3-6", "--block-sizes", "64..512", "--results", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-m", "kbench", "sweep", *words], env=environment()) as running:
        deadline = time.monotonic() + 120
        while not (path := next(iter((tmp_path / "runs").glob("*.jsonl")), None)) or path.read_text().count("\n") < 4:
            assert time.monotonic() < deadline and running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    before = read_run(latest_run(tmp_path))
    done = sweep(tmp_path, "--resume")
    assert done.returncode == 0 and f"{len(before.rows)} of 16 rows kept" in done.stderr, done.stderr
    after = read_run(before.path)
    assert after.rows[: len(before.rows)] == before.rows
    assert len(after.rows) == len({row_key(row) for row in after.rows}) == 16
    assert "fastest" in done.stdout and "best.json" in done.stdout
    assert after.footer is not None and after.footer["ended"] == "complete"
