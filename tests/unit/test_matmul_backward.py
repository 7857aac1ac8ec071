"""The contract of matmul_backward: its reference against sums written out, its bound, its plan."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.family import Array, ErrorModel, Gemm, Launch, Problem, Props

FAMILY = load_catalog()["matmul_backward"]
(VERSION,) = FAMILY.versions
PROPS = (
    Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30),
    Props("b", "emulator", 3, 1536, 1024, 49152, 65536, 65536, 65536, 1 << 20, 1 << 30),
)


def problem(B: int, T: int, C: int, OC: int, accumulate: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "C": C, "OC": OC, "accumulate": accumulate}, dtype)


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 4)])
def test_reference_is_the_slope_of_the_forward_pass(sizes: tuple[int, ...], accumulate: int) -> None:
    """The loss is dout . (inp weight^T + bias), linear in each of them: differences are exact."""
    B, T, C, OC = sizes
    rng = np.random.default_rng(1)
    parameters = {"dinp": rng.normal(size=(B, T, C)), "dweight": rng.normal(size=(OC, C)), "dbias": rng.normal(size=OC)}
    dout, before = rng.normal(size=(B, T, OC)), {"dweight": rng.normal(size=(OC, C)), "dbias": rng.normal(size=OC)}
    inputs = {"dout": dout, "inp": parameters["dinp"], "weight": parameters["dweight"]}
    if accumulate:
        inputs |= before
    got = FAMILY.reference(problem(*sizes, accumulate), inputs, ErrorModel("fp32"), np)

    def loss(changed: dict[str, Array]) -> float:
        inp, weight, bias = changed["dinp"], changed["dweight"], changed["dbias"]
        return float(sum(dout[b, t, o] * (inp[b, t] @ weight[o] + bias[o]) for b, t, o in np.ndindex(B, T, OC)))

    for name, values in parameters.items():
        for index in np.ndindex(values.shape):
            moved = values.copy()
            moved[index] += 1.0
            slope = loss({**parameters, name: moved}) - loss(parameters)
            start = before[name][index] if accumulate and name in before else 0.0
            assert got[name].value[index] == pytest.approx(start + slope, abs=1e-11)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 33, 12, 132, 1), (2, 3, 5, 7, 0)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, ...], dtype: str) -> None:
    for name, shares in probe(FAMILY, problem(*sizes, dtype), seed=3).items():
        assert shares.rounded <= 1.0 and shares.weakest > 3.0, (name, shares)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_over_many_rows_are_numbers_of_fp16(seed: int) -> None:
    """Of each pattern of inputs."""
    case = make_case(FAMILY, problem(1, 16384, 3, 4, 1, "fp16"), seed, True)
    assert max(abs(case.expected[name].value).max() for name in ("dinp", "dweight", "dbias")) < 65504


def cut(values: Array) -> Array:
    """TF32 as a tensor core may take it: the last 13 bits of fp32 dropped."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("structured", [False, True])
def test_operands_cut_to_tf32_use_at_most_60_percent(structured: bool) -> None:
    for seed in range(3):
        case = make_case(FAMILY, problem(1, 300, 60, 40, 1, "tf32"), seed, structured)
        dout, inp, weight = (cut(case.inputs[name]) for name in ("dout", "inp", "weight"))
        dinp = dout @ weight
        dweight = np.float32(case.inputs["dweight"]) + dout[0].T @ inp[0]
        assert used_share(case, case.tensors["dinp"], dinp) <= 0.6
        assert used_share(case, case.tensors["dweight"], dweight) <= 0.6


@pytest.mark.parametrize("props", PROPS, ids=lambda props: props.name)
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_stretches_cover_all_rows_once(dtype: str, props: Props) -> None:
    for sizes in (*(tuple(s.sizes.values()) for s in FAMILY.check_shapes), (8, 1024, 768, 3072, 1), (1, 9999, 8, 3, 1)):
        of = problem(*sizes, dtype)
        first, second = VERSION.plan(of, 256, props)[:2]
        assert isinstance(first, Launch) and isinstance(second, Launch)
        (partials,) = VERSION.scratch(of, 256, props)
        stretches, rows, N = partials.shape[0], first.args[-1], of["B"] * of["T"]
        assert (stretches - 1) * rows < N <= stretches * rows, "each stretch has a row"
        assert partials.dtype == "fp32" and partials.shape[1] == of["OC"]
        assert first.grid[0] % stretches == 0 and second.args[2] == stretches


def test_the_first_stage_fills_the_gpu_at_the_default_problem() -> None:
    of = Problem(FAMILY.presets["default"], "fp32")
    (blocks,) = VERSION.plan(of, 256, PROPS[0])[0].grid
    assert 0.9 * 132 * 8 < blocks <= 132 * 8


def test_only_the_gradient_of_the_weight_adds_to_what_is_there() -> None:
    for accumulate in (0, 1):
        gemms = [
            step for step in VERSION.plan(problem(2, 3, 4, 5, accumulate), 256, PROPS[0]) if isinstance(step, Gemm)
        ]
        assert [(gemm.out.tensor, gemm.beta) for gemm in gemms] == [("dinp", 0.0), ("dweight", float(accumulate))]
