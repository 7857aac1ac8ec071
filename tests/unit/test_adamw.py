"""The contract of adamw: its reference and bound, what the check tells apart, its plans."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import store
from kbench.family import Launch, Problem, Props

FAMILY = load_catalog()["adamw"]
MODULE: ModuleType = sys.modules[FAMILY.tensors.__module__]
# What a problem may be: dtype, and whether it is that of a training step.
KINDS = [(dtype, 0) for dtype in FAMILY.dtypes] + [("fp32", 1), ("bf16", 1)]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


def problem(count: int, dtype: str = "fp32", training: int = 0) -> Problem:
    return Problem({"N": count, "training": training}, dtype)


def test_reference_is_the_step_parameter_by_parameter() -> None:
    """In the form in which the weights decay first."""
    case = make_case(FAMILY, problem(200), seed=1)
    rate, beta1, beta2, epsilon, decay = (float(np.float32(value)) for value in (1e-3, 0.9, 0.999, 1e-8, 0.1))
    params, grads, m, v = (np.float64(case.inputs[name]) for name in ("params", "grads", "m", "v"))
    for i in range(200):
        m[i] += (1.0 - beta1) * (grads[i] - m[i])
        v[i] += (1.0 - beta2) * (grads[i] ** 2 - v[i])
        m_hat, v_hat = m[i] / (1.0 - beta1**10), v[i] / (1.0 - beta2**10)
        params[i] = params[i] * (1.0 - rate * decay) - rate * m_hat / (math.sqrt(v_hat) + epsilon)
    for name, direct in (("params", params), ("m", m), ("v", v)):
        np.testing.assert_allclose(case.expected[name].value, direct, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_reference_of_a_training_step_parameter_by_parameter(dtype: str) -> None:
    """Scalars as they are drawn, scaled gradients, decay by group; all of it in the master's weights."""
    case = make_case(FAMILY, problem(300, dtype, 1), seed=1)
    rate, beta1, beta2, correction1, correction2, epsilon, scale, _ = map(float, case.inputs["scalars"])
    weights = np.float64(case.inputs["params" if dtype == "fp32" else "master"])
    grads, m, v = (np.float64(case.inputs[name]) for name in ("grads", "m", "v"))
    assert 0 < scale < 1 and len(set(case.inputs["decays"])) == 2
    for i in range(300):
        decay = float(case.inputs["decays"][i // 128])
        m[i] = beta1 * m[i] + (1.0 - beta1) * scale * grads[i]
        v[i] = beta2 * v[i] + (1.0 - beta2) * (scale * grads[i]) ** 2
        step = m[i] / correction1 / (math.sqrt(v[i] / correction2) + epsilon)
        weights[i] = weights[i] * (1.0 - rate * decay) - rate * step
    outputs = {"m": m, "v": v, "params": weights} | ({"master": weights} if dtype == "bf16" else {})
    assert set(outputs) == set(case.expected)
    for name, direct in outputs.items():
        np.testing.assert_allclose(case.expected[name].value, direct, rtol=1e-6, atol=1e-9)


def test_without_training_all_versions_have_the_same_constants() -> None:
    case = make_case(FAMILY, problem(300), seed=1)
    constants = [MODULE.RATE, MODULE.BETA1, MODULE.BETA2, *MODULE.CORRECTIONS, MODULE.EPSILON, 1.0, 0.0]
    assert list(case.inputs["scalars"]) == constants and set(case.inputs["decays"]) == {np.float32(MODULE.DECAY)}


def test_stochastic_rounding_may_go_to_either_neighbour_and_no_further() -> None:
    case = make_case(FAMILY, problem(2000, "bf16", 1), seed=2)
    tensor, exact = case.tensors["params"], np.float32(case.expected["master"].value)
    assert tensor.role == "out"
    towards_zero = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    away = ((exact.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    assert used_share(case, tensor, store(tensor, towards_zero)) <= 1.0
    assert used_share(case, tensor, store(tensor, away)) <= 1.0
    beyond = (away.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    for i in (0, 7, 1999):
        got = store(tensor, away)
        got[i] = beyond[i]
        assert used_share(case, tensor, got) > 1.0


@pytest.mark.parametrize("dtype, training", KINDS)
@pytest.mark.parametrize("count", [2, 300])
def test_the_check_tells_right_from_wrong(count: int, dtype: str, training: int) -> None:
    for of in probe(FAMILY, problem(count, dtype, training), seed=3).values():
        assert of.rounded <= 1.0 and of.weakest > 3


@pytest.mark.parametrize("dtype, training", KINDS)
def test_weights_that_are_not_updated_are_noticed(dtype: str, training: int) -> None:
    """Even in bf16, which keeps 8 bits: parameters are drawn small enough for that."""
    case = make_case(FAMILY, problem(300, dtype, training), seed=3)
    weights = "master" if MODULE.has_master(case.problem) else "params"
    assert used_share(case, case.tensors[weights], case.inputs[weights]) > 3


@pytest.mark.parametrize("left_out", ["decay", "corrections", "epsilon"])
def test_a_missing_part_of_the_formula_is_noticed(left_out: str) -> None:
    case = make_case(FAMILY, problem(300), seed=3)
    params, m, v = np.float64(case.inputs["params"]), case.expected["m"].value, case.expected["v"].value
    correction1, correction2 = (1.0, 1.0) if left_out == "corrections" else MODULE.CORRECTIONS
    decay = 0.0 if left_out == "decay" else MODULE.DECAY
    epsilon = 1e-30 if left_out == "epsilon" else MODULE.EPSILON  # where v is 0, m is 0, too
    direction = (m / correction1) / (np.sqrt(v / correction2) + epsilon) + decay * params
    tensor = case.tensors["params"]
    assert used_share(case, tensor, store(tensor, params - MODULE.RATE * direction)) > 3


def test_the_smaller_v_the_larger_the_bound_of_the_parameter() -> None:
    """m has an error that is divided by sqrt(v)."""
    case = make_case(FAMILY, problem(4000), seed=1)
    ordinary = case.inputs["v"] > 1e-9  # m is smaller, too, where v is drawn smaller
    params, order = case.expected["params"], np.argsort(case.expected["v"].value[ordinary])
    of_update = (np.asarray(params.bound) - 2.0 * 2.0**-24 * np.abs(params.value))[ordinary]
    assert of_update[order[:100]].mean() > 5.0 * of_update[order[-100:]].mean()


@pytest.mark.parametrize("count", [1, 3, 13, 1025, 1 << 20, 2**33 + 5])
def test_grids_cover_all_parameters_once(count: int) -> None:
    """2^33 parameters do not fit into 32-bit indices, their blocks do."""
    for dtype, training in KINDS:
        for version, per_thread in ((3, 4),) if training else ((1, 1), (2, 4), (3, 4)):
            for block in FAMILY.by_number[version].blocks:
                (launch,) = FAMILY.by_number[version].plan(problem(count, dtype, training), block, PROPS)
                assert isinstance(launch, Launch) and launch.block == (block,)
                per_block = block * per_thread
                assert 0 <= launch.grid[0] * per_block - count < per_block and launch.grid[0] < 2**31


def test_traffic_is_seven_passes() -> None:
    """One of the gradients, two of parameters and each of the moments, which are fp32 in every dtype."""
    assert FAMILY.least_traffic(problem(10)) == 10 * 4 * 7
    assert FAMILY.least_traffic(problem(10, "bf16")) == 10 * (2 * 3 + 4 * 4)
    assert 2**30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], "fp32")) <= 2.5 * 2**30


def test_traffic_of_a_training_step() -> None:
    """In 16 bits the parameter is only written, its master is read and written."""
    assert FAMILY.least_traffic(problem(10, "fp32", 1)) == 10 * 4 * 7
    assert FAMILY.least_traffic(problem(10, "bf16", 1)) == 10 * (2 + 4 * 4 + 4 * 2 + 2)


def test_versions_refuse_what_is_not_theirs() -> None:
    for number in (1, 2):
        assert "training = 0" in FAMILY.refusal(FAMILY.by_number[number], problem(10, "bf16", 1), 64)
    assert "fp32 or bf16" in FAMILY.refusal(FAMILY.by_number[3], problem(10, "fp16", 1), 64)
    for dtype, training in KINDS:
        assert FAMILY.refusal(FAMILY.by_number[3], problem(10, dtype, training), 64) == ""
