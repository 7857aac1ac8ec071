"""Rows of plans without kernels, and of steps that need a library or more GPUs than there are."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kbench.errors import GpusMissing
from kbench.evaluate import Evaluator
from kbench.jobs import Job

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

FAMILY = """
from kbench.family import AllReduce, CheckShape, Copy, Expected, Family, Ref, Tensor, Version, normal

def tensors(problem):
    return (Tensor("send", (problem["N"],), "fp32", "in", draw=normal(0.1, 0.7)),
            Tensor("recv", (problem["N"],), "fp32", "out", exact=True))

FAMILY = Family(
    "toy", "", {"N": "elements"}, ("fp32",), {"default": {"N": 9}, "small": {"N": 9}}, (CheckShape({"N": 9}, ""),),
    tensors, lambda problem, inputs, error, xp: {"recv": Expected(inputs["send"])},
    (Version(1, "a copy", lambda p, block, props: (Copy(Ref("recv"), Ref("send"), p["N"]),), ("fp32",)),
     Version(2, "an all-reduce", lambda p, block, props: (AllReduce("recv", "send", p["N"], 1),), ("fp32",))),
    flops=lambda problem: 3.0 * problem["N"],
)
"""


class SilentChannel:
    """Stands in for a worker's channel where there is no parent."""

    def note(self, text: str) -> None: ...

    @contextlib.contextmanager
    def limit(self, seconds: float, doing: str) -> Iterator[Callable[[], None]]:
        yield lambda: None


@pytest.fixture
def evaluator(tmp_path: Path) -> Iterator[Evaluator]:
    (tmp_path / "toy.py").write_text(FAMILY)
    (tmp_path / "toy.cu").write_text("this would not compile\n")  # and nothing asks a compiler for it
    made = Evaluator(
        SilentChannel(), device="emulator", family_dirs=[str(tmp_path)], seed=1, rtol=None, atol=None, time_limit=5.0,
        workers=1,
    )  # fmt: skip
    yield made
    made.device.close()


def job(version: int, purpose: str = "time") -> Job:
    return Job("toy", version, "", {"N": 9}, "fp32", 256, purpose)


def test_a_plan_without_kernels_compiles_nothing_and_is_proved(evaluator: Evaluator) -> None:
    evaluator.announce([job(1), job(2)])
    row = evaluator.row(job(1))
    assert (row.status, row.reason, row.kernels) == ("pass", "", [])


def test_rows_say_what_has_to_be_moved_and_computed(evaluator: Evaluator) -> None:
    for version in (1, 2):
        row = evaluator.row(job(version))
        assert (row.traffic, row.flops) == (2 * 4 * 9, 27.0)


def test_the_emulator_skips_an_all_reduce_by_name(evaluator: Evaluator) -> None:
    row = evaluator.row(job(2))
    assert (row.status, row.reason) == ("skipped", "the emulator has no NCCL")


@pytest.mark.parametrize(("purpose", "status"), [("check", "skipped"), ("time", "unable"), ("prove", "unable")])
def test_check_shapes_for_more_gpus_are_skipped_and_what_was_asked_for_cannot_run(
    monkeypatch: pytest.MonkeyPatch, evaluator: Evaluator, purpose: str, status: str
) -> None:
    def prepare(*args: Any) -> Any:
        raise GpusMissing("needs 4 GPUs, this process sees 1")

    monkeypatch.setattr(evaluator.device, "prepare", prepare)
    row = evaluator.row(job(2, purpose))
    assert (row.status, row.reason) == (status, "needs 4 GPUs, this process sees 1")
