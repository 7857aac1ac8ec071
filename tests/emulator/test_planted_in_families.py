"""The check finds the bugs planted into the families' kernels, and nothing in the kernels as they are."""

from __future__ import annotations

import importlib
import shutil

import pytest
from family_runner import FamilyRunner, assert_proved
from planted_bugs.bug import Bug

from kbench.catalog import load_catalog

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"),
]


def bugs_of(family: str) -> dict[str, Bug]:
    try:
        module = importlib.import_module(f"planted_bugs.{family}")
    except ModuleNotFoundError as error:
        assert error.name == f"planted_bugs.{family}", error
        return {}
    bugs: dict[str, Bug] = module.BUGS
    return bugs


PLANTED = [pytest.param(name, words, id=f"{name}: {words}") for name in load_catalog().names for words in bugs_of(name)]


@pytest.mark.parametrize("name, words", PLANTED)
def test_a_planted_bug_is_found(name: str, words: str) -> None:
    bug = bugs_of(name)[words]
    runner = FamilyRunner(name)
    try:
        version = runner.family.by_number[bug.version]
        case = runner.case(dict(bug.sizes), bug.dtype or runner.family.dtypes[0], seed=6)
        right = runner.prove(version, bug.block, case)
        assert right is not None
        assert_proved(right, version, case, "without the bug")
        wrong = runner.prove(version, bug.block, case, runner.broken(bug.old, bug.new))
        assert wrong is not None and not wrong.passed and wrong.reason()
    finally:
        runner.device.close()
