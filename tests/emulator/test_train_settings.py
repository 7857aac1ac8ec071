"""What the host tells the step once, before the first: that each number reaches the place where it counts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kbench.device.emulator.device import EmulatorDevice
from kbench.train.setup import Workshop
from kbench.train.slots import OUTLIER_WINDOW
from train_runs import batches, run_on, same_bits, trainer_of, workshop_on

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

SMALL: dict[str, Any] = {"batch": 2, "seq": 16, "val_batches": 1}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    device = EmulatorDevice()
    yield workshop_on(device, tmp_path_factory.mktemp("results"))
    device.close()


@pytest.mark.parametrize(("outlier", "limit"), [("loss", "skip_loss_z"), ("norm", "skip_norm_z")])
def test_each_limit_is_of_its_own_value(workshop: Workshop, outlier: str, limit: str) -> None:
    """One of the two is far above its window, the other in the middle of it."""
    unusual = np.linspace(0.0, 0.1, OUTLIER_WINDOW)
    usual = np.linspace(-100.0, 100.0, OUTLIER_WINDOW)
    window = np.stack([unusual, usual] if outlier == "loss" else [usual, unusual]).astype(np.float32)
    for given in ("skip_loss_z", "skip_norm_z"):
        run = run_on(workshop, **SMALL, **{given: 3.0})
        with trainer_of(run) as trainer:
            trainer.load(replace(run.inputs.state, window=window, filled=OUTLIER_WINDOW))
            trainer.step(batches(run, 1))
            assert trainer.report().skipped == (given == limit)


def test_the_seed_decides_how_bf16_is_rounded(workshop: Workshop) -> None:
    one, other = (run_on(workshop, **SMALL, dtype="bf16", seed=seed, lr=1e-3) for seed in (42, 43))
    given = batches(one, 1)
    after = []
    for run in (one, other, one):
        with trainer_of(run) as trainer:
            trainer.load(one.inputs.state)
            trainer.step(given)
            trainer.report()
            after.append(trainer.state())
    assert not any(same_bits(state.master or {}, after[0].master or {}) for state in after), "masters are not rounded"
    assert not same_bits(after[2].params, after[0].params)
    assert "qkvw" in same_bits(after[1].params, after[0].params)


def test_what_lies_between_parameters_takes_no_part_in_the_norm(workshop: Workshop) -> None:
    """Memory that a GPU gives holds anything."""
    run = run_on(workshop, **SMALL)
    reports = []
    with trainer_of(run) as trainer:
        for garbage in (0.0, np.nan):
            trainer.engine.fill("grads", np.full(trainer.layout.count, garbage, np.float32))
            trainer.load(run.inputs.state)
            trainer.step(batches(run, 1))
            reports.append(trainer.report())
    assert reports[1].finite and reports[1] == reports[0]
