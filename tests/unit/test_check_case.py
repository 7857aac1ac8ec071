"""Cases: reproducible draws, references that are refused when they cannot judge, and the cache of both."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from kbench.check.case import Case, CaseCache, make_case
from kbench.check.draw import PatternedGenerator
from kbench.check.probe import probe
from kbench.errors import KbenchError
from kbench.family import Expected, Family, Problem, Tensor, derived, integers, normal, uniform


def family_of(tensors, reference):
    return Family(
        name="sample", summary="", sizes={"N": "elements"}, dtypes=("fp32",), presets={}, check_shapes=(),
        tensors=tensors if callable(tensors) else lambda problem: tensors, reference=reference, versions=(),
    )  # fmt: skip


PROBLEM = Problem({"N": 6}, "fp32")
INP = Tensor("inp", (6,), "bf16", "in", ("n",), normal(0.5, 1.0))
OUT = Tensor("out", (6,), "fp32", "out", ("n",))


def case_with(expected, out=OUT, **options):
    return make_case(family_of((INP, out), lambda problem, inputs, error, xp: {"out": expected}), PROBLEM, 7, **options)


def test_the_reference_sees_what_the_kernel_sees():
    seen = {}

    def reference(problem, inputs, error, xp):
        seen.update(inputs)
        return {"out": Expected(2 * inputs["inp"])}

    case = make_case(family_of((INP, OUT), reference), PROBLEM, 7)
    assert case.inputs["inp"].dtype == ml_dtypes.bfloat16 and seen["inp"].dtype == np.float64
    assert np.array_equal(seen["inp"], case.inputs["inp"].astype(np.float64))
    assert (case.judge, case.family) == ("numpy", "sample") and case.nbytes == 6 * 2 + 6 * 8


def test_a_seed_gives_the_same_inputs_and_another_seed_others():
    family = family_of((INP, OUT), lambda problem, inputs, error, xp: {"out": Expected(inputs["inp"])})
    first, again, other = (make_case(family, PROBLEM, seed).inputs["inp"] for seed in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_later_tensors_may_follow_from_earlier_ones_as_stored():
    follower = Tensor("twice", (6,), "fp32", "in", ("n",), derived(lambda drawn: 2 * drawn["inp"]))
    family = family_of((INP, follower, OUT), lambda problem, inputs, error, xp: {"out": Expected(inputs["inp"])})
    case = make_case(family, PROBLEM, 3)
    assert np.array_equal(case.inputs["twice"], 2 * case.inputs["inp"].astype(np.float32))


def test_a_reference_cannot_spoil_its_inputs():
    def reference(problem, inputs, error, xp):
        inputs["inp"] *= 0
        return {"out": Expected(inputs["inp"])}

    with pytest.raises(KbenchError, match="family sample: the reference fails at N=6: .*ValueError"):
        make_case(family_of((INP, OUT), reference), PROBLEM, 7)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (None, "reference of output out is missing"),
        (Expected(np.zeros((6, 1))), r"has shape \(6, 1\), the tensor \(6,\)"),
        (Expected(np.zeros(6, np.float32)), "is float32; it must be float64"),
        (Expected(np.array([0, 1, 2, math.nan, 4, 5])), r"value at \[3\] is nan"),
        (Expected(np.array([0, 1, 2, 3, -math.inf, 5])), r"value at \[4\] is -inf"),
        (Expected(np.full(6, 1e39)), r"value at \[0\] is 1e\+39, no finite fp32"),
        (Expected(np.zeros(6), np.zeros((6, 6))), "the bound has shape"),
        (Expected(np.zeros(6), np.array([0, 0, -1e-9, 0, 0, 0])), r"the bound at \[2\] is -1e-09"),
        (Expected(np.zeros(6), np.array([0, math.nan, 0, 0, 0, 0])), r"the bound at \[1\] is nan"),
        (Expected(np.zeros(6), math.inf), "the bound inf"),
    ],
)
def test_a_reference_that_cannot_judge_is_the_familys_fault(expected, words):
    with pytest.raises(KbenchError, match=words) as caught:
        case_with(expected)
    assert "fault of the family" in str(caught.value)


@pytest.mark.parametrize(("dtype", "value"), [("int32", 1.5), ("int32", 2.0**31), ("bf16", 1.001), ("fp16", 7e4)])
def test_an_exact_output_must_be_a_number_of_its_type(dtype, value):
    with pytest.raises(KbenchError, match=r"value at \[0\]"):
        case_with(Expected(np.full(6, value)), Tensor("out", (6,), dtype, "out", ("n",), exact=True))


def test_integer_references_are_taken():
    case = case_with(Expected(np.arange(6)), Tensor("out", (6,), "int32", "out", ("n",), exact=True))
    assert np.array_equal(case.expected["out"].value, np.arange(6.0))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Tensor("x", (3,), "fp32", "in", (), lambda rng, shape, drawn: [0, math.nan, 1]), r"makes nan at \[1\]"),
        (
            Tensor("x", (3,), "fp16", "in", (), lambda rng, shape, drawn: [0, 1, 1e6]),
            r"makes inf at \[2\], stored as fp16",
        ),
        (Tensor("x", (3,), "fp32", "in", (), lambda rng, shape, drawn: [0, 1]), "has shape"),
        (
            Tensor("x", (3,), "int32", "in", (), lambda rng, shape, drawn: [0, 1, 2**40]),
            "not all of its values are int32",
        ),
        (Tensor("x", (3,), "fp32", "in", (), lambda rng, shape, drawn: drawn["y"]), "KeyError"),
    ],
)
def test_a_draw_that_fails_is_the_familys_fault(tensor, words):
    with pytest.raises(KbenchError, match=words) as caught:
        make_case(family_of((tensor, OUT), lambda problem, inputs, error, xp: {}), PROBLEM, 1)
    assert "draw of tensor x" in str(caught.value)


@pytest.mark.parametrize("seed", range(6))
def test_patterns_keep_the_domains_of_the_draws(seed):
    rng = PatternedGenerator(seed)
    values = normal(3.0, 0.5)(rng, (5, 7), {})
    assert values.shape == (5, 7) and np.isfinite(values).all() and np.unique(values).size <= 6
    share = uniform(0.0, 1.0)(rng, (5, 7), {})
    assert ((share >= 0) & (share < 1)).all()
    ids = integers(0, 50)(rng, (9,), {})
    assert np.unique(ids).size == 1 and 0 <= ids[0] < 50
    assert rng.permutation(4).shape == (4,)


def test_a_structured_case_says_so_to_the_error_model():
    seen = []

    def reference(problem, inputs, error, xp):
        seen.append(error.structured)
        return {"out": Expected(inputs["inp"])}

    make_case(family_of((INP, OUT), reference), PROBLEM, 0, structured=True)
    assert seen == [True]


# ---------------------------------------------------------------------------------------------- the cache


class Counting:
    """A family that counts its references, each of `nbytes` of expected values."""

    def __init__(self, nbytes=8000):
        self.calls = []
        self.entered, self.release = threading.Event(), threading.Event()
        self.release.set()
        shape = (nbytes // 8,)
        self.family = family_of((replace(OUT, shape=shape),), self.reference)
        self.shape = shape

    def reference(self, problem, inputs, error, xp):
        self.entered.set()
        assert self.release.wait(10)
        self.calls.append(problem["N"])
        return {"out": Expected(np.ones(self.shape))}


@pytest.fixture
def cache():
    made = CaseCache(20_000)
    yield made
    made.close()


def problem(size):
    return Problem({"N": size}, "fp32")


def test_a_case_is_computed_once_for_all_who_ask(cache):
    counting = Counting()
    futures = [cache.submit(counting.family, problem(1), 5) for _ in range(4)]
    assert len({id(future.result()) for future in futures}) == 1 and counting.calls == [1]
    cache.submit(counting.family, problem(1), 6).result()
    assert counting.calls == [1, 1]


def test_a_reference_runs_while_its_asker_does_something_else(cache):
    counting = Counting()
    counting.release.clear()
    future = cache.submit(counting.family, problem(1), 5)
    assert counting.entered.wait(10) and not future.done()
    counting.release.set()
    assert future.result().seed == 5


def test_the_least_recently_used_is_dropped_first(cache):
    counting = Counting()
    for size in (1, 2):
        cache.submit(counting.family, problem(size), 0).result()
    cache.submit(counting.family, problem(1), 0).result()
    for size in (3, 4):  # 8 kB each, 20 kB at most: 2 goes, though 1 is older
        cache.submit(counting.family, problem(size), 0).result()
    cache.submit(counting.family, problem(1), 0).result()
    assert counting.calls == [1, 2, 3, 4]
    cache.submit(counting.family, problem(2), 0).result()
    assert counting.calls == [1, 2, 3, 4, 2]


def test_the_case_in_use_stays_though_it_is_too_large(cache):
    counting = Counting(nbytes=80_000)
    assert (
        cache.submit(counting.family, problem(1), 0).result() is cache.submit(counting.family, problem(1), 0).result()
    )


def test_a_failed_reference_fails_each_time_and_runs_once(cache):
    calls = []

    def reference(problem, inputs, error, xp):
        calls.append(1)
        return {}

    family = family_of((OUT,), reference)
    for _ in range(2):
        with pytest.raises(KbenchError, match="missing"):
            cache.submit(family, PROBLEM, 0).result()
    assert len(calls) == 1
    cache.use(family, problem(1))
    with pytest.raises(KbenchError, match="missing"):
        cache.submit(family, PROBLEM, 0).result()
    assert len(calls) == 2  # it may have been for want of memory, which another problem has given back


def test_the_cases_of_one_problem_stay_though_together_they_are_too_large(cache):
    counting = Counting(nbytes=16_000)
    for _ in range(3):
        cases = [cache.submit(counting.family, problem(1), seed).result() for seed in (0, 1)]
    assert counting.calls == [1, 1] and cases[0] is cache.submit(counting.family, problem(1), 0).result()
    cache.submit(counting.family, problem(2), 0).result()
    cache.submit(counting.family, problem(2), 1).result()
    cache.submit(counting.family, problem(1), 0).result()
    assert counting.calls == [1, 1, 2, 2, 1]  # 20 kB at most: the problem before made room


def on_a_gpu(family, of, seed, structured):
    """A case that was judged by a GPU: 1 kB of inputs, answers of 1 GB each in its memory."""
    answer = SimpleNamespace(nbytes=10**9)
    return Case(
        family.name, of, seed, structured, {}, {"inp": np.zeros(250, np.float32)}, {"out": Expected(answer)}, "cupy"
    )


class FakeGpu:
    """As much of a device as keeping copies needs."""

    xp = SimpleNamespace(ndarray=SimpleNamespace, asarray=lambda array: SimpleNamespace(nbytes=array.nbytes))


@pytest.fixture
def gpu_cache():
    made = CaseCache(20_000, on_a_gpu)
    yield made
    made.close()


SAMPLE = family_of((INP, OUT), lambda problem, inputs, error, xp: {})


def test_answers_on_a_gpu_take_no_main_memory(gpu_cache):
    case = gpu_cache.submit(SAMPLE, problem(1), 0).result()
    assert case.on_gpu and case.nbytes == 1000


def test_another_problem_releases_copies_and_drops_answers_on_the_gpu(gpu_cache):
    case = gpu_cache.submit(SAMPLE, problem(1), 0).result()
    case.on(FakeGpu).pristine("inp")
    assert case.uploaded == 1000
    assert gpu_cache.made(SAMPLE, problem(1), 0) is case and gpu_cache.made(SAMPLE, problem(1), 1) is None
    gpu_cache.use(SAMPLE, problem(1))
    assert case.uploaded == 1000
    gpu_cache.use(SAMPLE, problem(2))
    assert case.uploaded == 0 and gpu_cache.made(SAMPLE, problem(1), 0) is None


def test_answers_on_the_host_outlive_their_copies(cache):
    family = family_of((replace(INP, shape=(6,)), OUT), lambda p, inputs, error, xp: {"out": Expected(inputs["inp"])})
    case = cache.submit(family, PROBLEM, 0).result()
    case.on(FakeGpu).pristine("inp")
    cache.use(family, problem(7))
    assert case.uploaded == 0 and cache.submit(family, PROBLEM, 0).result() is case


def test_a_family_of_the_same_sizes_is_another_problem(gpu_cache):
    case = gpu_cache.submit(SAMPLE, problem(1), 0).result()
    case.on(FakeGpu).pristine("inp")
    gpu_cache.submit(replace(SAMPLE, name="other"), problem(1), 0)
    assert case.uploaded == 0 and gpu_cache.made(SAMPLE, problem(1), 0) is None


def test_another_problem_waits_for_a_reference_under_way(cache):
    counting = Counting()
    counting.release.clear()
    future = cache.submit(counting.family, problem(1), 0)
    threading.Timer(0.1, counting.release.set).start()
    cache.use(counting.family, problem(2))
    assert future.done()


# ---------------------------------------------------------------------------------------------- probes


def test_a_probe_tells_a_bound_that_separates_from_one_that_does_not():
    def family(bound):
        return family_of((INP, OUT), lambda problem, inputs, error, xp: {"out": Expected(inputs["inp"] / 3, bound)})

    tight, loose = (probe(family(bound), PROBLEM, 1)["out"] for bound in (1e-6, 1e3))
    assert tight.rounded < 0.6 and tight.weakest > 100
    assert loose.weakest < 0.6


def test_a_probe_of_an_exact_output_is_all_or_nothing():
    out = Tensor("out", (6,), "int32", "out", ("n",), exact=True)
    tags = Tensor("tags", (6,), "int32", "in", ("n",), integers(1, 1000))
    family = family_of((tags, out), lambda problem, inputs, error, xp: {"out": Expected(inputs["tags"])})
    found = probe(family, PROBLEM, 1)["out"]
    assert found.rounded == 0 and found.weakest == math.inf
