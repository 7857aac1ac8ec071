"""Close choices are decided by the time of whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kbench.catalog import load_catalog
from kbench.train.chooser import Answer, Candidate, Chooser, Timed, Times, Wanted
from kbench.train.layout import Layout
from kbench.train.model import PRESETS
from kbench.train.rerank import alternatives, rerank
from kbench.train.slots import Need, Shape, slots

CATALOG = load_catalog()
SHAPE = Shape(PRESETS["nano"], 4, 64, "bf16")


@dataclass(frozen=True)
class Step:
    """Stands for kbench.train.setup.Chosen."""

    answers: tuple[Answer, ...]


def chooser(times: dict[str, dict[int, float]]) -> Chooser:
    """With the given milliseconds by family and version, at whatever problem."""

    class Known(Times):
        def __init__(self) -> None:
            super().__init__({}, "", lambda family, number: "")

        def of(self, need: Need) -> dict[int, Timed]:
            return {number: Timed(256, {}, ms) for number, ms in times.get(need.family, {}).items()}

    return Chooser(CATALOG, Wanted(), Known())


def answers(by: Chooser, *names: str) -> list[Answer]:
    found = {slot.name: slot for slot in slots(SHAPE, Layout(SHAPE.model).count)}
    return [by.answers(found[name])[0] for name in names]


def numbers(step: Step) -> list[int]:
    return [candidate.version.number for answer in step.answers for candidate in answer.candidates]


def test_only_what_is_near_in_a_slot_that_matters_is_tried() -> None:
    by = chooser(
        {
            "global_norm": {3: 1.0, 4: 1.04, 5: 1.06},
            "encoder_backward": {1: 1.0, 3: 1.049},
            "encoder_forward": {2: 0.001, 3: 0.001},
        }
    )
    tried = list(alternatives(answers(by, "global norm", "encoder backward", "encoder"), by))
    assert [(number, other.candidates[0].version.number) for number, other in tried] == [(0, 4), (1, 3)]


def test_at_most_two_are_tried_of_a_slot_the_nearest() -> None:
    by = chooser({"global_norm": {1: 1.03, 2: 1.02, 3: 1.0, 4: 1.01}})
    tried = list(alternatives(answers(by, "global norm"), by))
    assert [other.candidates[0].version.number for _, other in tried] == [4, 2]


@pytest.mark.parametrize(
    "milliseconds, expected",
    [
        ({(3, 1): 10.0, (4, 1): 9.0, (3, 3): 9.5, (4, 3): 8.0}, [4, 3]),
        ({(3, 1): 10.0, (4, 1): 9.99, (3, 3): 10.5, (4, 3): 7.0}, [3, 1]),
        ({(3, 1): 10.0, (4, 1): float("inf"), (3, 3): 9.9, (4, 3): 1.0}, [3, 3]),
    ],
    ids=["one after the other", "not clearly faster", "one that cannot run"],
)
def test_the_faster_step_stays(milliseconds: dict[tuple[int, int], float], expected: list[int]) -> None:
    by = chooser({"global_norm": {3: 1.0, 4: 1.01}, "encoder_backward": {1: 1.0, 3: 1.01}})
    first = Step(tuple(answers(by, "global norm", "encoder backward")))

    def time_step(step: Step) -> float:
        norm, encoder = numbers(step)
        return milliseconds[norm, encoder]

    def built(found: Sequence[Answer]) -> Step:
        return Step(tuple(found))

    best = rerank(first, alternatives(first.answers, by), built, time_step)
    assert numbers(best) == expected


def test_no_step_is_timed_without_an_alternative() -> None:
    def never(step: Step) -> float:
        raise AssertionError("timed")

    step = Step(())
    assert rerank(step, [], lambda found: step, never) is step


def test_a_candidate_costs_what_all_its_launches_cost() -> None:
    need = Need("x", "gelu_forward", {"N": 1}, "bf16", times=12)
    assert Candidate(need, CATALOG.version("gelu_forward", 2), 256, 0.5).cost == 6.0
