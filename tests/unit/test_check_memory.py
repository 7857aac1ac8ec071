"""How much memory rows need, by who judges and by what their problem holds already."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from check_fakes import PLAN, PROBLEM, FakeDevice, doubling_family
from kbench.check import memory
from kbench.check.case import make_case
from kbench.check.expected import DeviceCase
from kbench.check.memory import memory_needed, require_memory
from kbench.errors import CannotRunError
from kbench.family import Problem, Tensor, normal

N = 10**9
TENSORS = (
    Tensor("x", (N,), "bf16", "in", draw=normal(0.0, 1.0)),
    Tensor("y", (N,), "bf16", "out"),
)
SMALL = 0.9e9  # for what does not grow with N: redzones and a comparison


def test_numpy_takes_main_memory_and_a_gpu_its_own():
    host, gpu = memory_needed(TENSORS), memory_needed(TENSORS, judge_on_gpu=True)
    # Two cases: inputs as stored, value and bound of the answer. One reference at work: its input, two temporaries.
    assert host.host == 2 * N * (2 + 16) + N * (8 + 16)
    # Two buffers, two inputs and the first output.
    assert 2 * N * 5 < host.device < 2 * N * 5 + SMALL
    # Inputs as stored; a draw may ask for one in float64.
    assert gpu.host == 2 * N * 2 + N * 8
    # Two answers, and the reference at work, which needs more than the launches and comes before them.
    assert gpu.device == 2 * N * 16 + N * (8 + 16)


def test_launches_that_need_more_than_the_reference_are_what_counts():
    scratch = tuple(Tensor(f"scratch{i}", (N,), "fp32", "scratch") for i in range(20))
    tensors = (*TENSORS, *scratch)
    assert memory_needed(tensors, judge_on_gpu=True).device == memory_needed(tensors).device + 2 * N * 16


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_problem_holds_is_not_asked_for_again(on_gpu):
    made = SimpleNamespace(uploaded=2 * N)
    none, one, both = (memory_needed(TENSORS, on_gpu, [made] * count) for count in (0, 1, 2))
    answers = 16 * N
    if on_gpu:
        assert none.device - one.device == answers
        assert 0 < both.device < N * 6 + SMALL  # two buffers, the first output
        assert (none.host - one.host, both.host) == (2 * N, 0)
    else:
        assert none.device - one.device == one.device - both.device == 2 * N
        assert (none.host - one.host, both.host) == (2 * N + answers, 0)


def test_masks_are_counted_where_there_are_any():
    masked = (TENSORS[0], replace(TENSORS[1], unspecified=lambda xp: xp.zeros(N, bool)))
    assert memory_needed(masked).device - memory_needed(TENSORS).device == 2 * N


class Gpu(FakeDevice):
    kind = "cuda"


def test_a_problem_too_large_for_main_memory_runs_where_the_gpu_judges(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 12 * N)
    family, problem = doubling_family(PLAN), Problem({"N": N // 4}, "fp32")
    row = (family, family.versions[0], problem, family.tensors(problem))
    with pytest.raises(CannotRunError, match="of main memory for the reference, 11.2 GiB are free"):
        require_memory(Gpu(), *row)
    require_memory(Gpu(), *row, judge_on_gpu=True)
    device = memory_needed(row[3], judge_on_gpu=True).device
    with pytest.raises(CannotRunError, match="of GPU memory"):
        require_memory(Gpu(free=device - 1), *row, judge_on_gpu=True)
    require_memory(Gpu(free=device), *row, judge_on_gpu=True)


def test_copies_on_a_gpu_are_counted_and_those_that_are_none_are_not():
    case = make_case(doubling_family(PLAN), PROBLEM, 1)
    gpu = SimpleNamespace(xp=SimpleNamespace(**vars(np)))
    for device, nbytes in ((gpu, 2 * 4 * PROBLEM["N"]), (FakeDevice(), 0)):
        placed = DeviceCase(device, case.tensors, case.inputs, case.expected)
        assert placed.nbytes == 0
        placed.pristine("inp")
        placed.pristine("tags")
        assert placed.nbytes == nbytes
