"""Who computes a reference, and drawing large inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kbench.check import judge
from kbench.check.draw import ChunkedGenerator, draw_inputs
from kbench.check.judge import Judges, agree, is_large
from kbench.family import CheckShape, Expected, Family, Launch, Problem, Tensor, Version, normal


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
    assert agree(ROOT, "fp32", other_module())


@pytest.mark.parametrize("factor", [1 + 1e-9, 2.0])
def test_a_module_that_computes_something_else_does_not(factor):
    assert not agree(ROOT, "fp32", other_module(sqrt=lambda x: factor * np.sqrt(x)))


def test_a_module_that_lacks_a_function_does_not_agree():
    lacking = other_module()
    del lacking.sqrt
    assert not agree(ROOT, "fp32", lacking)


def test_only_large_problems_go_to_the_gpu(monkeypatch):
    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 100)
    judges = Judges(Card(other_module()))
    assert [judges.make_case(ROOT, Problem({"N": n}, "fp32"), 1, False).judge for n in (50, 51)] == ["numpy", "other"]
    assert is_large(ROOT.tensors(Problem({"N": 51}, "fp32")))


def test_numpy_judges_where_the_two_disagree_or_memory_is_short(monkeypatch):
    monkeypatch.setattr(judge, "_NUMPY_ELEMENTS", 100)
    problem = Problem({"N": 51}, "fp32")
    wrong = Judges(Card(other_module(sqrt=lambda x: x)))
    short = Judges(Card(other_module(), free=1000))
    assert wrong.make_case(ROOT, problem, 1, False).judge == "numpy"
    assert short.make_case(ROOT, problem, 1, False).judge == "numpy"


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
