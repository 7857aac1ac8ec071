"""Every version of every family on the GPU, through the interface that the commands use."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.judge import disagreement
from kbench.grammar import Target
from kbench.selection import Selection
from kbench.sweep import Bench, Options

CATALOG = load_catalog()
# fp16 takes the paths of bf16, tf32 those of fp32 but for the GEMMs.
DTYPES = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name in CATALOG.names for dtype in CATALOG[name].dtypes]


@pytest.fixture(scope="module")
def bench():
    with Bench(Options(device="cuda"), lambda note: None) as opened:
        yield opened


@pytest.fixture(scope="module")
def device():
    from kbench.device.cuda.device import CudaDevice

    opened = CudaDevice()
    yield opened
    opened.close()


@pytest.mark.parametrize("name, dtype", DTYPES)
def test_every_version_is_right_on_the_check_shapes(bench, name, dtype):
    every_block = dtype in ("fp32", "bf16")
    rows = list(bench.rows(bench.jobs(Selection([Target(name)], "check", dtype=dtype))[:: 1 if every_block else 7]))
    wrong = [row for row in rows if row.status not in ("pass", "refused", "skipped")]
    assert not wrong, "\n".join(f"v{r.version} block {r.block} {r.problem}: {r.status}: {r.reason}" for r in wrong)
    if not every_block:
        return
    passed = defaultdict(set)
    for row in rows:
        if row.status in ("pass", "skipped"):
            passed[row.version].add(row.block)
    for version in CATALOG[name].versions:
        if dtype in version.dtypes:
            assert passed[version.number] == set(version.blocks), f"version {version.number}"


@pytest.mark.parametrize("name, dtype", DTYPES)
def test_gpu_and_numpy_compute_the_same_reference(device, name, dtype):
    with device.activate():
        assert disagreement(CATALOG[name], dtype, device.xp) == ""


def test_a_large_problem_is_judged_by_the_gpu(bench):
    (row,) = bench.rows(bench.jobs(Selection([Target("residual_forward", (2,))], "run", preset="large")))
    assert row.status == "pass", row.reason
    assert row.verdict["judge"] == "cupy"
    assert np.isfinite(row.measurement["median_ms"])
