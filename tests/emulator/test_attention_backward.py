"""attention_backward on the emulator: every version, block size and check shape, in every order of threads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import Case, make_case
from kbench.check.prove import prove
from kbench.check.verdict import Verdict
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator.device import EmulatorDevice
from kbench.family import STORAGE, Array, CheckShape, Launch, Problem, Version, kernels_of
from kbench.source import Source, load_source

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

FAMILY = load_catalog()["attention_backward"]
VERSIONS = tuple(version for version in FAMILY.versions if not version.gpu_only)
SHAPES = {" ".join(f"{name}{size}" for name, size in shape.sizes.items()): shape for shape in FAMILY.check_shapes}
# No right version may use more of its bound, or the bound says nothing about the next compiler or GPU.
LARGEST_USE = 0.6


class Runner:
    """Proves versions on one emulator, with every kernel of the check shapes and a type compiled in one go."""

    def __init__(self) -> None:
        self.device = EmulatorDevice()
        self.source = load_source(kernel_folder() / "attention_backward.cu")
        self._modules: dict[str, Any] = {}

    def module(self, dtype: str) -> Any:
        storage = STORAGE[dtype]
        if storage not in self._modules:
            problems = [Problem(shape.sizes, dtype) for shape in FAMILY.check_shapes]
            kernels = dict.fromkeys(
                kernel
                for problem in problems
                for version in VERSIONS
                for block in version.blocks
                for kernel in kernels_of(version.plan(problem, block, self.device.props))
            )
            self._modules[storage] = self.device.build(self.source, tuple(kernels))
        return self._modules[storage]

    def prove(self, version: Version, block: int, case: Case, source: Source | None = None) -> Verdict:
        plan = version.plan(case.problem, block, self.device.props)
        module = self.device.build(source, kernels_of(plan)) if source else self.module(case.problem.dtype)
        prepared = self.device.prepare(plan, module, tuple(case.tensors.values()))
        with Buffers(self.device, FAMILY, version, case.problem, block, plan) as buffers:
            return prove(self.device, FAMILY, version, prepared, buffers, case)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.device.close()


def pairs(shape: CheckShape) -> list[tuple[Version, int]]:
    return [
        (version, block)
        for version in VERSIONS
        if shape.versions is None or version.number in shape.versions
        for block in (shape.block_sizes or version.blocks)
    ]


def assert_proved(verdict: Verdict, what: str) -> None:
    assert verdict.passed, f"{what}: {verdict.reason()}"
    assert verdict.deterministic, what
    for output in verdict.outputs:
        assert output.used is not None, f"{what}: {output.name}"
        assert output.used <= LARGEST_USE, f"{what}: {output.name} uses {output.used} of its bound"


@pytest.mark.parametrize("name", SHAPES)
def test_every_version_is_right_at_every_block_size(runner: Runner, name: str) -> None:
    shape = SHAPES[name]
    case = make_case(FAMILY, Problem(shape.sizes, "fp32"), seed=1)
    for version, block in pairs(shape):
        assert_proved(runner.prove(version, block, case), f"version {version.number} block {block} {case.problem}")


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])  # fp16 takes the paths of bf16
@pytest.mark.parametrize("name", SHAPES)
def test_every_version_is_right_in_fewer_bits(runner: Runner, name: str, dtype: str) -> None:
    case = make_case(FAMILY, Problem(SHAPES[name].sizes, dtype), seed=2)
    for version, block in pairs(SHAPES[name]):
        if block == (SHAPES[name].block_sizes or (64,))[0]:
            assert_proved(runner.prove(version, block, case), f"version {version.number} block {block} {case.problem}")


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_patterned_inputs_are_within_their_bound(runner: Runner, dtype: str) -> None:
    case = make_case(FAMILY, Problem({"B": 2, "T": 33, "C": 12, "NH": 4}, dtype), seed=3, structured=True)
    for version in VERSIONS:
        assert_proved(runner.prove(version, 64, case), f"version {version.number} {case.problem}")


def test_the_small_preset_is_right(runner: Runner) -> None:
    case = make_case(FAMILY, Problem(FAMILY.presets["small"], "fp32"), seed=4)
    for version in VERSIONS:
        assert_proved(runner.prove(version, 256, case), f"version {version.number}")


def dpreatt_of_datt_with_nan(runner: Runner, version: Version, case: Case, source: Source | None = None) -> Array:
    """What a version's own kernel makes of a datt that holds NaN above the diagonal, where it may hold anything."""
    device, tensors = runner.device, tuple(case.tensors.values())
    steps = version.plan(case.problem, 64, device.props)
    softmax = next(step for step in steps if isinstance(step, Launch) and step.kernel.startswith("softmax"))
    datt_of = "datt" if "datt" in softmax.args else "dpreatt"  # in place
    module = device.build(source, (softmax.kernel,)) if source else runner.module(case.problem.dtype)
    prepared = device.prepare((softmax,), module, tensors)
    with Buffers(device, FAMILY, version, case.problem, 64, steps) as buffers:
        buffers.reset(case, 0xFF)
        above = np.triu(np.ones((case.problem["T"],) * 2, bool), 1)
        datt = np.where(above, np.nan, case.expected["datt"].value).astype(numpy_dtype(case.problem.storage))
        device.upload(buffers.by_name[datt_of], datt)
        device.enqueue(device.bind(prepared, buffers.by_name))
        return device.download(buffers.by_name["dpreatt"])


@pytest.mark.parametrize("dtype, atol", [("fp32", 1e-6), ("bf16", 0.02)])
@pytest.mark.parametrize("T", [68, 72])  # in 16 bits, packets move one by one and all at once
def test_nothing_above_the_diagonal_of_datt_is_used(runner: Runner, T: int, dtype: str, atol: float) -> None:
    case = make_case(FAMILY, Problem({"B": 1, "T": T, "C": 8, "NH": 2}, dtype), seed=5)
    for version in VERSIONS:
        got = dpreatt_of_datt_with_nan(runner, version, case).astype(np.float32)
        assert (np.triu(got, 1) == 0.0).all(), version.number
        np.testing.assert_allclose(got, case.expected["dpreatt"].value, rtol=1e-3, atol=atol)


def test_a_diagonal_that_is_not_masked_is_seen(runner: Runner) -> None:
    case = make_case(FAMILY, Problem({"B": 1, "T": 68, "C": 8, "NH": 2}, "fp32"), seed=5)
    broken = planted(runner.source, "diagonal && c > r + reach ? zero : tile.row[r][c];", "tile.row[r][c];")
    assert np.isnan(dpreatt_of_datt_with_nan(runner, FAMILY.by_number[8], case, broken)).any()


def planted(source: Source, old: str, new: str) -> Source:
    """The source with a bug in it."""
    assert source.text.count(old) == 1, f"the source no longer holds {old!r} exactly once"
    return replace(source, path=Path("broken.cu"), text=source.text.replace(old, new))


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in the source, and `version` at `block` threads must fail at the sizes."""

    old: str
    new: str
    version: int
    block: int
    sizes: Mapping[str, int]


ODD = {"B": 1, "T": 37, "C": 6, "NH": 2}
LONG = {"B": 1, "T": 132, "C": 6, "NH": 2}
PLANTED = {
    "no zeros above the diagonal": Bug("zero_right_of_diagonal(dpreatt, t3, 1, T);", "", 3, 64, ODD),
    "scale left out": Bug("(scale * sum);\n    }\n}\n", "(sum);\n    }\n}\n", 2, 64, ODD),
    "columns past the end": Bug("t3 <= t) row[t3]", "true) row[t3]", 5, 64, ODD),
    "indicator left out": Bug("sums[0] += product;", ";", 6, 64, ODD),
    "last tile dropped": Bug("first2 <= t; first2 +=", "first2 + BlockSize <= t; first2 +=", 6, 32, ODD),
    "tile overwritten too early": Bug(
        "__syncthreads();  // the tile before this one has been read by everybody", "", 6, 64, LONG
    ),
    "sum of one warp only": Bug("sum = block_sum<BlockSize>(sum);", "sum = warp_sum(sum);", 7, 64, LONG),
    "tail rows dropped": Bug("groups = ceil_div(T, kRows),", "groups = T / kRows,", 8, 64, ODD),
    "writes past the last row": Bug("if (r < count && column + c < T)", "", 8, 64, ODD),
    "heads swapped": Bug("((Offset(b) * NH + head)", "((Offset(b) * NH + (NH - 1 - head))", 1, 64, ODD),
    "q and v swapped": Bug("((Offset(part) * B + b)", "((Offset(2 - part) * B + b)", 1, 64, ODD),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(runner: Runner, bug: str) -> None:
    planned = PLANTED[bug]
    case = make_case(FAMILY, Problem(planned.sizes, "fp32"), seed=6)
    version = FAMILY.by_number[planned.version]
    assert_proved(runner.prove(version, planned.block, case, runner.source), "without the bug")
    verdict = runner.prove(version, planned.block, case, planted(runner.source, planned.old, planned.new))
    assert not verdict.passed
    assert verdict.reason()
