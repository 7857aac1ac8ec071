"""The contract of layernorm_backward: its reference against finite differences and loops, its bound, its plans."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Array, ErrorModel, Expected, Fill, Launch, Problem, Props, Ref, tensors_of

FAMILY = load_catalog()["layernorm_backward"]
H200 = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)
SMALL = Props("b", "sm_86", 3, 1536, 1024, 49152, 101376, 102400, 65536, 1 << 20, 1 << 30)


def problem(B: int, T: int, C: int, accumulate: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "C": C, "accumulate": accumulate}, dtype)


def draw(of: Problem, seed: int = 0) -> dict[str, Array]:
    rng, drawn = np.random.default_rng(seed), {}
    for tensor in FAMILY.tensors(of):
        if tensor.draw is not None and tensor.role != "out":
            drawn[tensor.name] = np.float64(np.float32(tensor.draw(rng, tensor.shape, drawn)))
    return drawn


def reference(of: Problem, inputs: dict[str, Array]) -> dict[str, Expected]:
    return FAMILY.reference(of, inputs, ErrorModel(of.dtype), np)


@pytest.mark.parametrize("accumulate", (0, 1))
def test_reference_agrees_with_finite_differences(accumulate: int) -> None:
    """Of the loss sum(dout * layernorm(inp)), with mean and rstd as a forward pass has them."""
    of = problem(2, 3, 5, accumulate)
    inputs = draw(of)
    inputs["inp"] = np.random.default_rng(1).normal(3.0, 0.7, (2, 3, 5))
    inputs["mean"] = inputs["inp"].mean(axis=2)
    inputs["rstd"] = 1.0 / np.sqrt(inputs["inp"].var(axis=2) + 1e-5)

    def loss(inp: Array, weight: Array, bias: Array) -> float:
        centered = inp - inp.mean(axis=2, keepdims=True)
        normalized = centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + 1e-5)
        return float((inputs["dout"] * (normalized * weight + bias)).sum())

    at = {"dinp": inputs["inp"], "dweight": inputs["weight"], "dbias": np.zeros(5)}
    for name, expected in reference(of, inputs).items():
        before = inputs[name] if name == "dinp" or accumulate else np.zeros(expected.value.shape)
        for index in np.ndindex(expected.value.shape):
            losses = []
            for step in (1e-5, -1e-5):
                moved = {key: values.copy() for key, values in at.items()}
                moved[name][index] += step
                losses.append(loss(*moved.values()))
            gradient = (losses[0] - losses[1]) / 2e-5
            assert expected.value[index] == pytest.approx(before[index] + gradient, abs=1e-7), (name, index)


def test_reference_takes_mean_and_rstd_as_given_and_slices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row in loops; rows with a mean of 1000 are among them."""
    of = problem(1, 9, 7, 1)
    inputs = draw(of)
    assert inputs["mean"].max() > 900
    dout, inp, mean, rstd = (inputs[name][0] for name in ("dout", "inp", "mean", "rstd"))
    dinp, dweight, dbias = inputs["dinp"][0].copy(), inputs["dweight"].copy(), inputs["dbias"].copy()
    for t in range(9):
        n = [(x - mean[t]) * rstd[t] for x in inp[t]]
        d = [w * dy for w, dy in zip(inputs["weight"], dout[t], strict=True)]
        mean_d, mean_dn = sum(d) / 7, sum(a * b for a, b in zip(d, n, strict=True)) / 7
        for c in range(7):
            dinp[t, c] += rstd[t] * (d[c] - mean_d - n[c] * mean_dn)
            dweight[c] += n[c] * dout[t, c]
            dbias[c] += dout[t, c]
    monkeypatch.setitem(FAMILY.reference.__globals__, "SLICE", 14)  # two rows at a time
    answers = reference(of, inputs)
    for name, values in (("dinp", dinp[None]), ("dweight", dweight), ("dbias", dbias)):
        np.testing.assert_allclose(answers[name].value, values, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(2, 3, 5, 0), (1, 37, 131, 1)])
def test_the_bound_tells_right_from_wrong(sizes: tuple[int, int, int, int], dtype: str) -> None:
    for name, found in probe(FAMILY, problem(*sizes, dtype), seed=3).items():
        assert found.rounded <= 1.0 and found.weakest >= 20.0, (name, found)


@pytest.mark.parametrize("seed", range(3))
def test_sums_over_many_patterned_rows_are_finite_in_fp16(seed: int) -> None:
    make_case(FAMILY, problem(96, 1024, 2, 1, "fp16"), seed, structured=True)


@pytest.mark.parametrize("props", (H200, SMALL), ids=("H200", "small"))
@pytest.mark.parametrize("C", (1, 1600, 1601, 12288, 30000))
def test_plans_fit_the_device(C: int, props: Props) -> None:
    """Launches have the block size, shared memory suffices or is not used, and scratch is what the grid needs."""
    for dtype in FAMILY.dtypes:
        of = problem(8, 1024, C, 1, dtype)
        for version in FAMILY.versions:
            for block in version.blocks:
                plan = version.plan(of, block, props)
                assert version.scratch is not None
                scratch = {tensor.name: tensor for tensor in version.scratch(of, block, props)}
                outputs = {"dinp", "dweight", "dbias"}
                assert set(tensors_of(plan)) == outputs | {"dout", "inp", "weight", "mean", "rstd", *scratch}
                main = next(step for step in plan if isinstance(step, Launch))
                assert main.block == (block,)
                assert main.shared <= props.shared_per_block_optin - 1024
                assert f"backward{version.number}" in main.kernel
                if "areas" in scratch:
                    assert scratch["areas"].count >= main.grid[0] * 2 * C
                    assert scratch["areas"].count % main.grid[0] == 0


def test_what_atomics_add_to_is_cleared_by_the_plan() -> None:
    for version in FAMILY.versions:
        plan = version.plan(problem(2, 64, 100, 0), 64, H200)
        filled = {step.target for step in plan if isinstance(step, Fill) and step.value == 0.0 and step.count is None}
        if version.number == 10:
            assert not filled
        else:
            assert filled == {Ref("counter" if version.number in (5, 9) else "sums")}


def test_only_sums_of_fixed_order_claim_to_be_deterministic() -> None:
    assert [version.number for version in FAMILY.versions if version.claims_deterministic] == [9, 10]


def test_version_10_at_the_default_sizes() -> None:
    """A packet per thread, all multiprocessors busy, and areas that are small beside what has to be moved."""
    version = FAMILY.by_number[10]
    of = Problem(FAMILY.presets["default"], "bf16")
    main, add_up = version.plan(of, 224, H200)
    assert isinstance(main, Launch) and isinstance(add_up, Launch)
    assert main.kernel == "layernorm_backward10<__nv_bfloat16, 1, true>"
    assert main.grid[0] == 3 * 132 and main.args[-1] == 7
    assert add_up.grid[0] * 32 == 2 * 1600
    assert version.scratch is not None
    (areas,) = version.scratch(of, 224, H200)
    assert areas.nbytes < 0.06 * FAMILY.least_traffic(of)


def test_least_traffic_reads_dinp_and_writes_it() -> None:
    assert FAMILY.least_traffic(problem(1, 2, 4, 0)) == 4 * (2 * 8 + 2 * 8 + 4 + 2 * 2 + 2 * 4)
    large = Problem(FAMILY.presets["large"], FAMILY.dtypes[0])
    assert 2**30 <= FAMILY.least_traffic(large) <= 2.5 * 2**30
