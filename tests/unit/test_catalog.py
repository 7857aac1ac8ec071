"""The catalogue: pairs of files, extras, and family files with faults."""

import subprocess
import sys

import pytest

from kbench.catalog import load_catalog
from kbench.errors import UsageError

FAMILY = """
from kbench.family import *
family = Family(
    name="{name}", summary="s", sizes={{"N": "elements"}}, dtypes=("fp32",),
    presets={{"default": {{"N": 8}}, "small": {{"N": 4}}}}, check_shapes=(),
    tensors=lambda p: (), reference=lambda p, i, e, xp: {{}},
    versions=(Version(1, "naive", plan=lambda p, b, d: (), dtypes=("fp32",)),), rules=(),
)
"""
THREE = "rules=(Rule('N divisible by 3', lambda p: p['N'] % 3 == 0),)"
EXTRA = """
from kbench.family import Version
versions = (Version({number}, "tried here", plan=lambda p, b, d: (), dtypes=("fp32",)),)
"""


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "scale", FAMILY.format(name="scale"))
    return tmp_path


def write(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    (folder / f"{name}.cu").write_text("")


def test_a_pair_is_a_family_and_a_lone_file_is_not(folder):
    (folder / "alone.py").write_text("")
    catalog = load_catalog([folder])
    assert "scale" in catalog.names and "alone" not in catalog.names
    assert catalog["scale"].sources == {1: str(folder / "scale.cu")}


def test_extras_add_versions_with_their_own_source(folder):
    write(folder, "scale.mine", EXTRA.format(number=9))
    family = load_catalog([folder])["scale"]
    assert [version.number for version in family.versions] == [1, 9]
    assert family.sources[9] == str(folder / "scale.mine.cu")


def test_the_name_of_an_extra_is_not_taken_for_half_a_family(folder):
    write(folder, "scale.mine", EXTRA.format(number=9))
    with pytest.raises(UsageError, match=r"scale\.mine\.cu adds versions to scale: name that"):
        load_catalog([folder])["scale.mine"]
    (folder / "scale.mine.py").unlink()
    with pytest.raises(UsageError, match=r"needs scale\.mine\.py beside it"):
        load_catalog([folder])["scale.mine"]


def test_an_extra_in_another_folder_extends_kbenchs_own_family(tmp_path):
    write(tmp_path, "attention_backward.mine", EXTRA.format(number=99))
    assert 99 in load_catalog([tmp_path])["attention_backward"].by_number


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("scale", "family = 1 +", "scale.py:1: invalid syntax"),
        ("scale", "\n\nraise ValueError('bad\\nthing')", "scale.py:3: ValueError: bad thing"),
        ("scale", "x = 1", "exactly one Family, it defines 0"),
        ("scale", FAMILY.format(name="other"), "named 'other', the file 'scale'"),
        ("scale", FAMILY.format(name="scale").replace('"default"', '"big"'), "must include 'default'"),
        ("scale", FAMILY.format(name="scale").replace('{"N": 4}', '{"M": 4}'), "do not name exactly N"),
        ("scale", FAMILY.format(name="scale").replace("rules=()", THREE), "break the rule"),
        (
            "scale",
            FAMILY.format(name="scale").replace("rules=()", THREE.replace("p['N']", "p['M']")),
            "the rule 'N divisible by 3' fails: ",
        ),
        ("scale", FAMILY.format(name="scale").replace('"fp32"', '"fp64"'), "'fp64'"),
        ("scale.again", EXTRA.format(number=1), "version 1 of scale exists already"),
        ("scale.none", "", "must define `versions`"),
    ],
)  # fmt: skip
def test_faults_of_family_files_are_one_line(folder, name, text, words):
    write(folder, name, text)
    with pytest.raises(UsageError) as error:
        load_catalog([folder])["scale"]
    assert words in str(error.value) and "\n" not in str(error.value)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UsageError, match="did you mean attention_backward"):
        load_catalog()["atention_backward"]
    with pytest.raises(UsageError, match="it has 1, 2, 3, 4, 5, 6, 7, 8"):
        load_catalog().version("attention_backward", 77)


@pytest.mark.parametrize(
    "files, words",
    [
        (["tanh.cu"], "a family needs tanh.py beside it"),
        (["tanh.py"], "a family needs tanh.cu beside it"),
        (["tanh.mine.cu", "tanh.mine.py"], "tanh.cu and tanh.py are missing"),
        ([], "--family-dir DIR adds a folder"),
    ],
)
def test_a_family_that_is_not_whole_says_what_is_missing(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError) as error:
        load_catalog([tmp_path])["tanh"]
    assert words in str(error.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        load_catalog([tmp_path / "nowhere"])


def test_loading_imports_neither_numpy_nor_cupy_nor_pandas():
    script = (
        "import sys, kbench.catalog as c; c.load_catalog()['attention_backward']\n"
        "print([m for m in ('numpy', 'cupy', 'pandas') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
        == "[]"
    )
