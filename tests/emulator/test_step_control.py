"""step_control where the check does not look: values that are not finite, and many steps in a row."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Iterator

import numpy as np
import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import make_case
from kbench.device.dtypes import store
from kbench.device.emulator.device import EmulatorDevice
from kbench.family import Array, Problem, kernels_of
from kbench.source import load_source

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

FAMILY = load_catalog()["step_control"]
N, S, W = 37, 30, 8


class Control:
    """A step's numbers in memory, from a case; each call is one step."""

    def __init__(self, seed: int):
        self._device = EmulatorDevice()
        case = make_case(FAMILY, Problem({"N": N, "S": S, "W": W}, "fp32"), seed)
        version, tensors = FAMILY.by_number[1], tuple(case.tensors.values())
        plan = version.plan(case.problem, 64, self._device.props)
        module = self._device.build(load_source(kernel_folder() / "step_control.cu"), kernels_of(plan))
        self.tensors = case.tensors
        self._buffers = Buffers(self._device, FAMILY, version, case.problem, 64, plan)
        self._buffers.__enter__()
        self._buffers.reset(case, 0xFF)
        self._bound = self._device.bind(self._device.prepare(plan, module, tensors), self._buffers.by_name)

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        """What all tensors hold after a step with these inputs."""
        for name, values in inputs.items():
            self._device.upload(self._buffers.by_name[name], store(self.tensors[name], np.asarray(values)))
        self._device.enqueue(self._bound)
        return {name: np.array(self._device.download(buffer)) for name, buffer in self._buffers.by_name.items()}

    def close(self) -> None:
        self._buffers.__exit__(None, None, None)
        self._device.close()


@pytest.fixture
def control() -> Iterator[Control]:
    opened = Control(seed=1)
    yield opened
    opened.close()


def settings(max_norm: float = 0.0, loss_limit: float = 0.0, norm_limit: float = 0.0) -> Array:
    return np.array([1.0 / N, max_norm, loss_limit, norm_limit, 0.9, 0.95, 1e-8, 0.0])


def losses(mean: float) -> Array:
    return np.full(N, mean)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of_norm", [False, True])
@pytest.mark.parametrize("filled", [3, 20])
def test_what_is_not_finite_skips_the_step_and_stays_out_of_the_windows(
    control: Control, bad: float, of_norm: bool, filled: int
) -> None:
    window = np.float32(np.arange(2 * W).reshape(2, W))
    found = losses(3.0)
    if not of_norm:
        found[11] = bad
    after = control(
        losses=found, squares=[abs(bad) if of_norm else 4.0], window=window, filled=[filled], step=[5, 9],
        settings=settings(max_norm=1.0, loss_limit=2.0, norm_limit=2.0),
    )  # fmt: skip
    loss, norm, rate, scale, loss_z, norm_z, index, skipped = after["report"]
    assert (scale, skipped, index, loss_z, norm_z) == (0.0, 1.0, 5.0, 0.0, 0.0)
    assert after["scalars"][6] == 0.0 and after["scalars"][0] == rate == after["schedule"][5, 0]
    assert np.array_equal(after["window"], window) and after["filled"][0] == filled
    assert list(after["step"]) == [6, 9]
    assert not math.isfinite(norm if of_norm else loss) and math.isfinite(loss if of_norm else norm)


def test_steps_in_a_row_advance_by_themselves(control: Control) -> None:
    """Only losses and squares are given to the steps, as when a captured graph is replayed: windows fill and turn,
    the one step that stands out is skipped and remembered, a schedule that has ended stays at its last row."""
    rng = np.random.default_rng(2)
    first = {"step": [0, 123], "filled": [0], "settings": settings(max_norm=1.5, loss_limit=2.5, norm_limit=2.5)}
    schedule = rng.uniform(0.1, 1.0, (S, 3)).astype(np.float32)
    seen: list[list[float]] = [[], []]
    seeds, skipped = set(), []
    for index in range(S + 4):
        mean, norm = float(rng.normal(4.0, 0.1)), float(rng.normal(1.5, 0.1))
        mean += 9.0 * (index == 5) + 9.0 * (index == 20)
        after = control(
            losses=losses(mean), squares=[norm**2], **({**first, "schedule": schedule} if not index else {})
        )
        zs = []
        for row, value in zip(seen, (mean, norm), strict=True):
            row.append(value)
            tested = row[-W:] if len(row) > W else []
            zs.append((value - statistics.fmean(tested)) / statistics.pstdev(tested) if tested else 0.0)
        skip = max(zs) > 2.5
        scale = 0.0 if skip else min(1.0, 1.5 / norm)
        rate, correction1, correction2 = schedule[min(index, S - 1)]
        np.testing.assert_allclose(after["report"], [mean, norm, rate, scale, *zs, index, skip], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(
            after["scalars"], [rate, 0.9, 0.95, correction1, correction2, 1e-8, scale, 0], rtol=1e-6
        )
        assert list(after["step"]) == [index + 1, 123] and after["filled"][0] == index + 1
        seeds.add(int(after["seed"][0]))
        skipped += [index] if skip else []
    assert skipped == [20]  # step 5 came before the windows were full
    assert len(seeds) == S + 4
