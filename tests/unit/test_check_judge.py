"""Who computes a reference, and drawing large inputs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kbench.check import judge
from kbench.check.draw import ChunkedGenerator, draw_inputs
from kbench.check.judge import Judges, disagreement, is_large
from kbench.check.memory import memory_needed
from kbench.errors import CannotRunError
from kbench.family import CheckShape, Expected, Family, Launch, Problem, Rule, Tensor, Version, normal, uniform


def family(reference: Any) -> Family:
    return Family(
        name="root", summary="", sizes={"N": "elements"}, dtypes=("fp32",),
        presets={"default": {"N": 8}, "small": {"N": 8}}, check_shapes=(CheckShape({"N": 5}, "odd"),),
        tensors=lambda p: (
            Tensor("x", (p["N"],), "fp32", "in", draw=normal(3.0, 0.1)), Tensor("y", (p["N"],), "fp32", "out"),
        ),
        reference=reference,
        versions=(Version(1, "", lambda p, b, d: (Launch("k", (1,), (32,), ("y", "x")),), ("fp32",)),),
    )  # fmt: skip


ROOT = family(lambda p, inputs, error, xp: {"y": Expected(xp.sqrt(inputs["x"]), 1e-7 * xp.sqrt(inputs["x"]))})


def other_module(**changed: Any) -> Any:
    """An array module that is not numpy, and computes like it but for what is `changed`."""
    return SimpleNamespace(**{**vars(np), "__name__": "other", **changed})


class Card:
    """As much of a GPU as choosing a judge needs."""

    kind = "cuda"

    def __init__(self, xp: Any, free: int = 1 << 40):
        self.xp, self._free = xp, free

    def activate(self) -> Any:
        return np.errstate()

    def free_memory(self) -> int:
        return self._free


def test_modules_that_compute_alike_agree():
    assert disagreement(ROOT, "fp32", other_module()) == ""


@pytest.mark.parametrize("factor", [1 + 1e-9, 2.0])
def test_a_module_that_computes_something_else_does_not(factor):
    module = other_module(sqrt=lambda x: factor * np.sqrt(x))
    assert disagreement(ROOT, "fp32", module) == "the two disagree about y at N=5"


def test_a_module_that_lacks_a_function_does_not_agree():
    lacking = other_module()
    del lacking.sqrt
    assert "the reference fails at N=5" in disagreement(ROOT, "fp32", lacking)


def test_they_are_compared_where_the_family_and_a_version_take_the_dtype():
    seen = []

    def reference(problem, inputs, error, xp):
        seen.append(problem["N"])
        return {"y": Expected(inputs["x"])}

    shapes = tuple(CheckShape({"N": n}, "") for n in (3, 5, 8, 11))
    odd = Rule("N odd", lambda problem: problem["N"] % 2 == 1)
    short = Rule("N up to 10", lambda problem: problem["N"] <= 10)
    version = replace(ROOT.versions[0], rules=(short,), dtypes=("fp32", "bf16"))
    picky = replace(family(reference), check_shapes=shapes, rules=(odd,), versions=(version,))
    assert disagreement(picky, "fp32", other_module()) == "" and seen == [5, 5]
    assert "no check shape takes fp16" in disagreement(picky, "fp16", other_module())


def test_a_module_that_flushes_bounds_below_the_smallest_normal_number_agrees():
    def reference(problem, inputs, error, xp):
        return {"y": Expected(inputs["x"] * 0.0, xp.tiny(inputs["x"]))}

    def tiny(of):
        return np.full(of.shape, 1e-39, np.float32)

    def flushed(of):
        return np.zeros(of.shape, np.float32)

    family_of_tiny, numpy_like = family(reference), other_module(tiny=flushed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "tiny", tiny, raising=False)
        assert disagreement(family_of_tiny, "fp32", numpy_like) == ""
        patch.setattr(np, "tiny", lambda of: np.full(of.shape, 1e-30, np.float32))
        assert disagreement(family_of_tiny, "fp32", numpy_like) != ""


def test_only_large_problems_go_to_the_gpu(monkeypatch):
    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 100)
    judges = Judges(Card(other_module()))
    assert [judges.make_case(ROOT, Problem({"N": n}, "fp32"), 1, False).judge for n in (50, 51)] == ["numpy", "other"]
    assert is_large(ROOT.tensors(Problem({"N": 51}, "fp32")))


LARGE_ROOT = Problem({"N": 51}, "fp32")


@pytest.fixture
def small_is_large(monkeypatch):
    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 100)


def test_numpy_judges_where_the_two_disagree_or_memory_is_short(small_is_large):
    wrong, short = [], []
    judges = Judges(Card(other_module(sqrt=lambda x: x)), wrong.append)
    assert [judges.make_case(ROOT, LARGE_ROOT, seed, False).judge for seed in (1, 2)] == ["numpy", "numpy"]
    assert Judges(Card(other_module(), free=1000), short.append).make_case(ROOT, LARGE_ROOT, 1, False).judge == "numpy"
    assert len(wrong) == len(short) == 1
    why = "the two disagree about y at N=5"
    assert wrong[0] == f"root at N=51: numpy judges, which may take minutes, not the GPU: {why}"
    assert "of GPU memory, 0.0 MiB are free" in short[0]


def test_the_memory_of_the_rows_is_counted_with_the_references(small_is_large):
    needed = memory_needed(ROOT.tensors(LARGE_ROOT), judge_on_gpu=True).device
    assert [Judges(Card(other_module(), free)).on_gpu(ROOT, LARGE_ROOT) for free in (needed - 1, needed)] == [
        False,
        True,
    ]


def test_all_cases_of_a_problem_have_one_judge(small_is_large):
    card = Card(other_module())
    judges = Judges(card)
    first = judges.make_case(ROOT, LARGE_ROOT, 1, False)
    card._free = 0  # as if the first case had taken it all
    assert [first.judge, judges.make_case(ROOT, LARGE_ROOT, 2, False).judge] == ["other", "other"]
    twin = replace(ROOT, name="twin")
    assert judges.make_case(twin, LARGE_ROOT, 2, False).judge == "numpy"


def test_no_memory_on_the_gpu_is_not_taken_for_main_memory(small_is_large):
    """As `CudaDevice.activate` raises it: the two cannot be compared, which is no error of a row."""

    class FullCard(Card):
        @contextlib.contextmanager
        def activate(self):
            try:
                yield
            except MemoryError as error:
                raise CannotRunError("not enough GPU memory") from error

    def full(x):
        raise MemoryError

    notes = []
    judges = Judges(FullCard(other_module(sqrt=full)), notes.append)
    assert judges.make_case(ROOT, LARGE_ROOT, 1, False).judge == "numpy"
    assert "not enough GPU memory" in notes[0]


# ------------------------------------------------------------------------------------------------ large draws

LARGE = (3, ChunkedGenerator.CHUNK)


def test_large_draws_follow_from_the_seed_alone(monkeypatch):
    first = ChunkedGenerator(7).normal(2.0, 0.5, LARGE)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    again, other = ChunkedGenerator(7).normal(2.0, 0.5, LARGE), ChunkedGenerator(8).normal(2.0, 0.5, LARGE)
    assert first.shape == LARGE and first.dtype == np.float32
    assert np.array_equal(first, again)
    assert not (first == other).any(axis=1).all()
    assert abs(first.mean() - 2.0) < 0.01 and abs(first.std() - 0.5) < 0.01


def test_chunks_and_calls_differ_from_each_other():
    rng = ChunkedGenerator(7)
    first, second = rng.uniform(-1.0, 3.0, LARGE), rng.uniform(-1.0, 3.0, LARGE)
    for one, other in ((first[0], first[1]), (first[1], first[2]), (first[0], second[0])):
        assert np.mean(one == other) < 0.01
    assert first.min() >= -1.0 and first.max() <= 3.0 and abs(first.mean() - 1.0) < 0.01


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.7), (0.1, 0.7), (1000.0, 1000.001), (-3.0, -2.0)])
def test_large_uniform_draws_stay_below_their_end(monkeypatch, low, high):
    rng = ChunkedGenerator(7)
    largest = 1 - 2.0**-24  # of the values that a float32 draw makes
    monkeypatch.setattr(rng, "_filled", lambda size, fill: np.full(size, largest, rng.dtype))
    values = rng.uniform(low, high, LARGE)
    assert values.dtype == np.float32 and low <= values.max() < high


def test_large_uniform_draws_refuse_what_small_ones_do():
    for size in (3, LARGE):
        with pytest.raises(ValueError, match="high - low < 0"):
            ChunkedGenerator(7).uniform(1.0, 0.0, size)


def test_tensors_of_fp64_hold_all_of_its_digits():
    shape = (ChunkedGenerator.CHUNK + 1,)
    tensors = [
        Tensor("wide", shape, "fp64", "in", draw=normal(0.0, 1.0)),
        Tensor("share", shape, "fp64", "in", draw=uniform(0.0, 0.7)),
        Tensor("narrow", shape, "fp32", "in", draw=lambda rng, shape, drawn: seen(rng.normal(0.0, 1.0, shape))),
    ]
    drawn = []

    def seen(values):
        drawn.append(values.dtype)
        return values

    stored, _ = draw_inputs("f", tensors, 1, False)
    for name in ("wide", "share"):
        assert (stored[name] != stored[name].astype(np.float32)).mean() > 0.9
    assert stored["share"].max() < 0.7 and drawn == [np.float32]


def test_large_draws_take_a_mean_and_spread_per_row():
    mean = np.array([[3.0], [1000.0], [0.0]])
    values = ChunkedGenerator(1).normal(mean, [[0.1], [1.0], [2.0]], LARGE)
    assert np.allclose(values.mean(axis=1), mean[:, 0], atol=0.01) and abs(values[0].std() - 0.1) < 0.01


def test_what_is_drawn_reaches_later_tensors_as_float64():
    seen = {}
    tensors = [
        Tensor("a", (4,), "bf16", "in", draw=normal(0.0, 1.0)),
        Tensor("b", (4,), "fp32", "in", draw=lambda rng, shape, drawn: seen.setdefault("a", drawn["a"])),
    ]
    stored, exact = draw_inputs("f", tensors, 1, False)
    assert seen["a"].dtype == np.float64 and np.array_equal(seen["a"], stored["a"].astype(np.float64))
    assert set(exact) == {"a", "b"} and not exact["b"].flags.writeable
