"""nccl_all_reduce: its reference against a plain sum, its bound, and its plan."""

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe, used_share
from kbench.device.dtypes import numpy_dtype
from kbench.family import AllReduce, Problem, kernels_of, tensors_of

FAMILY = load_catalog()["nccl_all_reduce"]
DTYPES = ("fp32", "bf16", "fp16")


def problem(n: int, ranks: int, dtype: str = "fp32") -> Problem:
    return Problem({"N": n, "R": ranks}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_is_to_receive_the_sum(dtype: str, ranks: int) -> None:
    case = make_case(FAMILY, problem(7, ranks, dtype), seed=3)
    sent = case.inputs["send"].astype(np.float64)
    for rank in range(ranks):
        for i in range(7):
            expected = sum(float(sent[other, i]) for other in range(ranks))
            assert case.expected["recv"].value[rank, i] == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_one_rank_receives_what_it_sent_bit_for_bit() -> None:
    case = make_case(FAMILY, problem(100, 1, "bf16"), seed=3)
    sent = case.inputs["send"]
    assert case.tensors["recv"].exact
    assert used_share(case, case.tensors["recv"], sent) == 0.0
    changed = sent.copy()
    changed[0, 5] = np.nextafter(changed[0, 5], numpy_dtype("bf16").type(9))
    assert used_share(case, case.tensors["recv"], changed) > 1.0


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_a_ring_that_rounds_every_partial_sum_stays_well_within_the_bound(
    dtype: str, ranks: int, structured: bool
) -> None:
    """Each chunk starts at another rank; every addition is done in fp32 and rounded to the type that travels."""
    case = make_case(FAMILY, problem(999, ranks, dtype), seed=4, structured=structured)
    sent = case.inputs["send"]
    total = np.empty_like(sent[0])
    for chunk in range(ranks):
        part = slice(chunk * 999 // ranks, (chunk + 1) * 999 // ranks)
        carried = sent[chunk, part]
        for step in range(1, ranks):
            arriving = sent[(chunk + step) % ranks, part].astype(np.float32)
            carried = (carried.astype(np.float32) + arriving).astype(sent.dtype)
        total[part] = carried
    assert used_share(case, case.tensors["recv"], np.broadcast_to(total, sent.shape).copy()) <= 0.6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("n", [33, 4099])
def test_the_bound_tells_right_from_wrong(dtype: str, ranks: int, n: int) -> None:
    found = probe(FAMILY, problem(n, ranks, dtype), seed=5)["recv"]
    assert found.rounded <= 1.0 and found.weakest >= 3.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_that_was_left_out_is_seen(dtype: str) -> None:
    case = make_case(FAMILY, problem(64, 8, dtype), seed=6)
    sent = case.inputs["send"]
    without_the_last = sent[:-1].astype(np.float32).sum(axis=0).astype(sent.dtype)
    got = np.broadcast_to(without_the_last, sent.shape).copy()
    assert used_share(case, case.tensors["recv"], got) > 3.0


def test_the_plan_is_one_step_of_a_library() -> None:
    (version,) = FAMILY.versions
    plan = version.plan(problem(10, 4), version.blocks[0], None)
    assert plan == (AllReduce(target="recv", source="send", count=10, ranks=4),)
    assert kernels_of(plan) == () and tensors_of(plan) == ("send", "recv")
    assert version.gpu_only and version.claims_deterministic


def test_traffic_is_that_of_one_rank() -> None:
    assert FAMILY.least_traffic(problem(1000, 1)) == FAMILY.least_traffic(problem(1000, 8)) == 2 * 4 * 1000
    assert FAMILY.least_traffic(problem(1000, 2, "bf16")) == 2 * 2 * 1000
    large = Problem(FAMILY.presets["large"], "fp32")
    assert 1 << 30 <= FAMILY.least_traffic(large) <= 2.5 * (1 << 30)
    assert dict(FAMILY.presets["default"]) == {"N": 32 << 20, "R": 1}
