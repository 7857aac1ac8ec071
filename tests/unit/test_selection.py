"""From what was typed to rows: dtypes of families and versions, flags, sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.catalog import load_catalog
from kbench.errors import UsageError
from kbench.family import Problem
from kbench.grammar import Target
from kbench.inspect.architectures import architecture_of
from kbench.selection import Selection
from kbench.subject import subject_of
from toys import plant_toy

CATALOG = load_catalog()


def jobs(*targets, mode="check", **select):
    return list(Selection(list(targets), mode, **select).jobs(CATALOG, "cuda"))


def test_a_dtype_that_a_family_lacks_is_an_error_for_one_target_and_a_row_per_version_among_several():
    with pytest.raises(UsageError, match="gelu_forward has no dtype 'tf32'"):
        jobs(Target("gelu_forward"), dtype="tf32")
    rows = [job for job in jobs(Target("gelu_forward"), Target("trimat_forward"), dtype="tf32", mode="sweep")]
    assert [(job.version, job.dtype) for job in rows if job.family == "gelu_forward"] == [(1, "tf32"), (2, "tf32")]
    assert {job.version for job in rows if job.family == "trimat_forward"} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("targets", [(), ("gelu_forward",), ("gelu_forward", "trimat_forward")])
def test_a_dtype_that_does_not_exist_is_an_error_whatever_is_named(targets):
    with pytest.raises(UsageError, match="unknown dtype 'fp23'; dtypes: fp32, tf32, bf16, fp16"):
        jobs(*map(Target, targets), dtype="fp23")


def test_where_no_dtype_is_named_all_chosen_versions_share_the_first_that_they_all_take():
    def dtypes(*versions, mode="check"):
        return {job.dtype for job in jobs(Target("attention_forward", versions or None), mode=mode)}

    assert dtypes() == dtypes(mode="run") == dtypes(mode="sweep") == {"bf16"}, "5, 6 and 10 have no fp32"
    assert dtypes(1, 2, 3, 4) == {"fp32"}
    assert dtypes(5, 6, 10, mode="run") == {"bf16"}
    assert {job.dtype for job in jobs(Target("attention_forward"), dtype="fp32")} == {"fp32"}


def test_flags_are_0_or_1_and_sizes_start_at_1():
    family = Target("matmul_backward_bias", (1,))
    assert {job.sizes["accumulate"] for job in jobs(family, mode="sweep", sizes={"accumulate": [0, 1]})} == {0, 1}
    with pytest.raises(UsageError, match="accumulate is 0 or 1, not 2"):
        jobs(family, sizes={"accumulate": [2]})
    with pytest.raises(UsageError, match="size T=0 must be at least 1"):
        jobs(family, sizes={"T": [0]})


def test_a_block_of_every_version_of_every_family_is_a_job():
    rows = jobs()
    for name in CATALOG.names:
        for version in CATALOG[name].versions:
            blocks = {job.block for job in rows if (job.family, job.version) == (name, version.number)}
            assert blocks == set(version.blocks), f"{name}:{version.number}"
    assert {job.family for job in rows} == set(CATALOG.names)


def test_a_preset_that_not_all_families_have_selects_those_that_have_it():
    named = {job.family for job in jobs(mode="sweep", preset="large")}
    assert named == {name for name in CATALOG.names if "large" in CATALOG[name].presets} != set(CATALOG.names)
    with pytest.raises(UsageError, match="trimat_forward has no preset 'large'"):
        jobs(Target("trimat_forward"), Target("gelu_forward"), mode="sweep", preset="large")
    with pytest.raises(UsageError, match="no family has a preset 'larg'"):
        jobs(mode="sweep", preset="larg")


def test_large_presets_move_a_gib_in_the_dtype_that_the_family_takes_by_itself():
    for family in (CATALOG[name] for name in CATALOG.names):
        if "large" in family.presets:
            traffic = family.least_traffic(Problem(family.presets["large"], family.dtypes[0]))
            assert traffic >= 2**30, f"{family.name}: {traffic:,.0f} bytes"


def test_several_dtypes_are_one_table_after_the_other():
    found = jobs(Target("gelu_forward", (1,)), mode="sweep", dtype="fp32,bf16", block_sizes=[64, 128])
    assert [(job.dtype, job.block) for job in found] == [("fp32", 64), ("fp32", 128), ("bf16", 64), ("bf16", 128)]
    every = {job.dtype for job in jobs(Target("gelu_forward"), mode="sweep", dtype="all")}
    assert (
        every == {job.dtype for job in jobs(Target("gelu_forward"), dtype="all")} == set(CATALOG["gelu_forward"].dtypes)
    )
    several = jobs(Target("gelu_forward"), Target("trimat_forward"), mode="sweep", dtype="tf32,bf16")
    assert {job.dtype for job in several if job.family == "gelu_forward"} == {"tf32", "bf16"}, (
        "rows say what is refused"
    )
    with pytest.raises(UsageError, match="gelu_forward has no dtype 'tf32'"):
        jobs(Target("gelu_forward"), mode="sweep", dtype="bf16,tf32")
    with pytest.raises(UsageError, match="run takes one dtype, not 'fp32,bf16'; sweep and check take lists and all"):
        jobs(Target("gelu_forward"), mode="run", dtype="fp32,bf16")


@pytest.mark.parametrize("mode", ["check", "run", "sweep"])
@pytest.mark.parametrize("fault", ["tensors", "rule"])
def test_a_contract_that_fails_is_for_its_rows_to_say(tmp_path: Path, mode: str, fault: str):
    """Problems are put in order, and held against the family's rules, before there is a row."""
    path = plant_toy(tmp_path, "", "", 'Version(1, "one", lambda problem, block, props: (), ("fp32",)),') / "toy.py"
    text = path.read_text()
    if fault == "tensors":
        path.write_text(text.replace("normal(0, 1)", "normal()"))
    else:  # one that fails at sizes that no preset has: those are tried when the file is loaded
        path.write_text(
            text.replace("    versions=", '    rules=(Rule("M", lambda p: p["N"] % (p["N"] - 5) < 9),), versions=')
        )
    assert path.read_text() != text
    catalog = load_catalog([tmp_path])
    sizes = {"N": [5]} if fault == "rule" else {}
    rows = list(Selection([Target("toy")], mode, sizes=sizes).jobs(catalog, "emulator"))
    assert {row.version for row in rows} == {1}
    with pytest.raises(
        UsageError, match=r"the contract of toy version 1 fails: .*toy\.py:\d+: (Type|ZeroDivision)Error"
    ):
        subject_of(catalog, rows[0], architecture_of("sm_90").props())


def test_a_family_that_cannot_be_loaded_is_one_row_whose_command_says_why(tmp_path: Path):
    (tmp_path / "torn.cu").write_text("")
    (tmp_path / "torn.py").write_text("import nothing_here")
    selection = Selection([Target("torn"), Target("permute")], "check")
    first, *others = selection.jobs(load_catalog([tmp_path]), "emulator")
    assert {job.family for job in others} == {"permute"}
    for command in (
        first.command(7, "emulator", ["my kernels"], ("--rtol", "1")),
        first.inspecting(["my kernels"], ("--counts",)),
    ):
        assert command == "kbench list torn --family-dir 'my kernels'", "there is no version 0 at block size 0"
