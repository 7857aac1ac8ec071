"""Slips in family files are told where they are made, in the words of the nouns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kbench.family import Expected, Family, Launch, Ref, Tensor, Version, checked_plan, checked_tensors


def launch(**wrong: Any) -> Launch:
    return Launch(**({"kernel": "k", "grid": (4, 2), "block": (64,), "args": ("x", Ref("y", 3), 1, 0.5)} | wrong))


def version(**wrong: Any) -> Version:
    return Version(**({"number": 1, "idea": "naive", "plan": lambda p, b, d: (), "dtypes": ("fp32",)} | wrong))


def test_what_is_right_is_taken() -> None:
    assert checked_plan([launch(), launch(grid=[np.int64(3)], args=(np.float32(2), True))])
    assert version(block_sizes=(96,)).blocks == (96,)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"kernel": None}, "a kernel's name"),
        ({"kernel": " "}, "a kernel's name"),
        ({"grid": (10 / 2,)}, "grid must be a tuple of 1 to 3 ints, not (5.0,)"),
        ({"grid": 5}, "grid must be"),
        ({"grid": (1, 1, 1, 1)}, "grid must be"),
        ({"block": ("64",)}, "block must be"),
        ({"block": ()}, "block must be"),
        ({"shared": -1}, "shared must be"),
        ({"shared": 1.5}, "shared must be"),
        ({"args": None}, "args must be"),
        ({"args": "xy"}, "args must be"),
        ({"args": ("x", [1])}, "args must be"),
    ],
)
def test_a_launch_that_is_none(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as error:
        launch(**wrong)
    assert words in str(error.value)


@pytest.mark.parametrize("offset", [1.0, "1", None])
def test_a_ref_needs_a_whole_offset(offset: Any) -> None:
    with pytest.raises(TypeError, match="a Ref is"):
        Ref("x", offset)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"number": "1"}, "number"),
        ({"number": -3}, "number"),
        ({"number": 1.5}, "number"),
        ({"idea": None}, "idea"),
        ({"plan": ()}, "plan is a function"),
        ({"block_sizes": ()}, "block sizes"),
        ({"block_sizes": 256}, "block sizes"),
        ({"block_sizes": (0,)}, "block sizes"),
        ({"block_sizes": ("256",)}, "block sizes"),
        ({"fixed": 2048}, "block sizes"),
    ],
)
def test_a_version_that_is_none(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        version(**wrong)


@pytest.mark.parametrize("plan", [None, "k", ("k",), launch(), (launch(), None)])
def test_a_plan_that_is_none(plan: Any) -> None:
    with pytest.raises(TypeError, match="a plan is|a step is"):
        checked_plan(plan)


X = Tensor("x", (3,), "fp32", "scratch")


@pytest.mark.parametrize("tensors", [None, "x", (X, None), (Tensor("y", 3, "fp32", "out"),), (X, X)])
def test_tensors_that_are_none(tensors: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        checked_tensors(tensors)


def family(**changes: Any) -> Family:
    sizes = {"N": "elements", "accumulate": "1 adds to what is there"}
    usual: dict[str, Any] = {
        "name": "toy", "summary": "", "sizes": sizes, "dtypes": ("fp32",), "presets": {}, "check_shapes": (),
        "tensors": lambda problem: (X,), "reference": lambda problem, inputs, error, xp: {"x": Expected(0.0)},
        "versions": (version(),), "flags": ("accumulate",),
    }  # fmt: skip
    return Family(**(usual | changes))


@pytest.mark.parametrize("flags", ["N", "accumulate", None, {"accumulate"}, (0,), ("acumulate",), ("N", "M")])
def test_flags_are_a_tuple_of_names_of_sizes(flags: Any) -> None:
    assert family().size_fault("accumulate", 0) == "" and family(flags=()).flags == ()
    with pytest.raises(TypeError, match="flags are a tuple of names of its sizes"):
        family(flags=flags)
