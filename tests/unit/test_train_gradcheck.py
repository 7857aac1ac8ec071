"""The judge of a step's gradients: what it allows, and what it finds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kbench.train.gradcheck import CHAIN, MOST_FLOPS, Finding, affordable, compare, longest_sum, relative_error
from kbench.train.initial import initial_weights
from kbench.train.model import PRESETS, Model
from kbench.train.reference import loss_and_gradients

MODEL = Model(2, 2, 8, vocab=30, context=6)
BATCH = tuple(np.random.default_rng(3).integers(30, size=(2, 3, 5)))


def weights() -> dict[str, Any]:
    return initial_weights(MODEL, 1)


def single() -> tuple[float, dict[str, Any]]:
    """Loss and gradients as a numpy run in float32 has them."""
    loss, _, gradients = loss_and_gradients(MODEL, weights(), *BATCH, dtype=np.float32)
    return float(loss), gradients


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if not finding.right]


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_a_float32_run_is_right_in_every_dtype(dtype: str) -> None:
    findings = compare(MODEL, dtype, weights(), BATCH, *single())
    assert [finding.name for finding in findings] == ["loss", *(p.name for p in MODEL.parameters)]
    assert not wrong(findings)


@pytest.mark.parametrize("name", [p.name for p in MODEL.parameters])
@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1e-5), ("tf32", 5e-3), ("bf16", 0.05)])
def test_a_tensor_that_is_off_is_named(name: str, dtype: str, factor: float) -> None:
    loss, gradients = single()
    gradients[name] = gradients[name] * np.float32(1.0 + factor)
    assert wrong(compare(MODEL, dtype, weights(), BATCH, loss, gradients)) == [name]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_wrong(bad: float) -> None:
    loss, gradients = single()
    gradients["ln2b"][1, 3] = bad
    assert wrong(compare(MODEL, "bf16", weights(), BATCH, bad, gradients)) == ["loss", "ln2b"]


def test_a_loss_that_is_off_is_found() -> None:
    loss, gradients = single()
    assert wrong(compare(MODEL, "fp32", weights(), BATCH, loss * (1 + 1e-5), gradients)) == ["loss"]


def test_a_gradient_of_zeros_is_wrong() -> None:
    loss, gradients = single()
    gradients = {name: np.zeros_like(values) for name, values in gradients.items()}
    assert len(wrong(compare(MODEL, "bf16", weights(), BATCH, loss, gradients))) == 16


def test_weights_are_taken_as_the_step_stores_them() -> None:
    """The reference starts from the rounded weights: rounding them is no error of the step."""
    rounded = {name: values.astype(ml_dtypes.bfloat16) for name, values in weights().items()}
    wide = {name: values.astype(np.float32) for name, values in rounded.items()}
    loss, _, gradients = loss_and_gradients(MODEL, wide, *BATCH, dtype=np.float32)
    assert not wrong(compare(MODEL, "fp32", rounded, BATCH, float(loss), gradients))


def test_relative_error() -> None:
    assert relative_error(np.float32([3.0, 4.0]), np.array([3.0, 4.0])) == 0.0
    assert relative_error(np.float32([3.0, 0.0]), np.array([3.0, 4.0])) == pytest.approx(0.8)
    assert relative_error(np.float32([0.5]), np.array([0.0])) == 0.5, "of nothing: as it is"
    assert np.isnan(relative_error(np.float32([np.nan]), np.array([1.0])))


@pytest.mark.parametrize(
    ("name", "batch", "seq"), [("nano", 4, 64), ("d6", 4, 64), ("d12", 4, 1024), ("d48", 64, 1024), ("d48", 1, 3)]
)
def test_what_is_checked_is_what_the_reference_can_do(name: str, batch: int, seq: int) -> None:
    model = PRESETS[name]
    small, short = affordable(model, batch, seq)
    assert 1 <= small <= batch and 1 <= short <= seq
    assert model.flops_per_token(short) * small * short <= MOST_FLOPS
    if (small, short) != (batch, seq):  # and no smaller than it has to be
        more = (2 * small, short) if small < batch and short == seq else (small, 2 * short)
        assert model.flops_per_token(more[1]) * more[0] * more[1] > MOST_FLOPS
    else:
        assert name != "d12"


def test_long_sums_may_err_as_a_chain_of_additions_does() -> None:
    """Where numpy adds in blocks: for nano twice its error is more, for a real vocabulary the chain is."""
    from kbench.train.model import PRESETS

    assert longest_sum(PRESETS["nano"], 256) == 256
    assert longest_sum(PRESETS["d12"], 4096) == 50304
    assert longest_sum(PRESETS["nano"], 5000) == 5000
    assert 2.0e-7 < CHAIN * 256**0.5 * 2.0**-24 < 3.0e-7
    assert 3.0e-6 < CHAIN * 50304**0.5 * 2.0**-24 < 4.0e-6
