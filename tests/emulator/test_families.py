"""Every version of every family on the emulator: all check shapes, in every order of threads."""

from __future__ import annotations

import shutil

import pytest
from family_runner import FamilyRunner, assert_proved

from kbench.catalog import load_catalog
from kbench.jobs import Job

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

CATALOG = load_catalog()
# The default dtype is tried at all block sizes. fp16 takes the paths of bf16, tf32 those of fp32: `make test-all`.
OTHERS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=() if dtype in ("fp32", "bf16") else pytest.mark.slow)
    for name in CATALOG.names
    for dtype in CATALOG[name].dtypes[1:]
]


# Versions that refuse a dtype by a rule, though they have it: at all shapes.
REFUSED = {("matmul_forward", "fp32"): {5}}


def prove_all(runner: FamilyRunner, dtype: str, one_block: bool, structured: bool = False) -> None:
    """All check shapes; every version must have taken some of them."""
    family, proved = runner.family, set()
    for shape in family.check_shapes:
        case = runner.case(shape, dtype, seed=1, structured=structured)
        for version, block in runner.pairs(shape, dtype, one_block):
            verdict = runner.prove(version, block, case)
            if verdict is not None:
                assert_proved(
                    verdict, version, case, f"{family.name} version {version.number} block {block} {case.problem}"
                )
            proved.add(version.number)
    refusing = REFUSED.get((family.name, dtype), set())
    assert proved == {version.number for version in family.versions if dtype in version.dtypes} - refusing


def prove_varied(runner: FamilyRunner, dtype: str, jobs: list[Job]) -> None:
    """Other values of parameters than the defaults, each of which must have run."""
    family, proved = runner.family, set()
    for job in jobs:
        version = family.by_number[job.version]
        case = runner.case(job.sizes, dtype, seed=1)
        verdict = runner.prove(version, job.block, case, params=job.params)
        assert verdict is not None
        assert_proved(verdict, version, case, f"{family.name} version {job.version} block {job.place} {case.problem}")
        proved |= {(job.version, *pair) for pair in job.params.items()}
    declared = [(v.number, name, value) for v in family.versions for name, p in v.params.items() for value in p.values]
    assert not [one for one in declared if one not in proved and one[2] != family.by_number[one[0]].defaults[one[1]]]


@pytest.mark.parametrize("name", CATALOG.names)
def test_every_version_is_right_at_every_block_size(name: str) -> None:
    runner = FamilyRunner(name)
    try:
        varied = runner.varied(runner.family.dtypes[0])
        runner.compile(runner.family.dtypes[0], varied=varied)
        prove_varied(runner, runner.family.dtypes[0], varied)
        prove_all(runner, runner.family.dtypes[0], one_block=False)
        prove_all(runner, runner.family.dtypes[0], one_block=True, structured=True)
    finally:
        runner.device.close()


@pytest.mark.parametrize("name, dtype", OTHERS)
def test_every_version_is_right_in_other_dtypes(name: str, dtype: str) -> None:
    runner = FamilyRunner(name)
    try:
        runner.compile(dtype, one_block=True)
        prove_all(runner, dtype, one_block=True)
    finally:
        runner.device.close()
