"""Every version of every family on the emulator: all check shapes, in every order of threads."""

from __future__ import annotations

import shutil

import pytest
from family_runner import FamilyRunner, assert_proved

from kbench.catalog import load_catalog

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]

CATALOG = load_catalog()
OTHERS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}") for name in CATALOG.names for dtype in CATALOG[name].dtypes[1:]
]


def prove_all(name: str, dtype: str, one_block: bool, structured: bool = False) -> None:
    runner = FamilyRunner(name)
    try:
        runner.compile(dtype, one_block)
        proved = set()
        for shape in runner.family.check_shapes:
            case = runner.case(shape, dtype, seed=1, structured=structured)
            for version, block in runner.pairs(shape, dtype, one_block):
                verdict = runner.prove(version, block, case)
                if verdict is not None:
                    assert_proved(verdict, version, f"{name} version {version.number} block {block} {case.problem}")
                proved.add(version.number)
        expected = {version.number for version in runner.family.versions if dtype in version.dtypes}
        assert proved == expected, "some version takes none of the check shapes"
    finally:
        runner.device.close()


@pytest.mark.parametrize("name", CATALOG.names)
def test_every_version_is_right_at_every_block_size(name: str) -> None:
    prove_all(name, CATALOG[name].dtypes[0], one_block=False)


@pytest.mark.parametrize("name", CATALOG.names)
def test_patterned_inputs_are_within_their_bound(name: str) -> None:
    prove_all(name, CATALOG[name].dtypes[0], one_block=True, structured=True)


@pytest.mark.parametrize("name, dtype", OTHERS)
def test_every_version_is_right_in_other_dtypes(name: str, dtype: str) -> None:
    prove_all(name, dtype, one_block=True)
