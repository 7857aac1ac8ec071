"""The two sides of a comparison as they are typed."""

from dataclasses import replace

import pytest

from kbench.errors import UsageError
from kbench.sides import Side, labels, parse_sides, shortened


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old@1").mkdir()
    for name in ("mine.cu", "mine@2.cu", "softmax.cu", "old@1/softmax.cu", "softmax.extra.cu", "softmax.extra.py"):
        (tmp_path / name).touch()


MEANING = [
    (["softmax:5", "softmax:6"], {}, (Side("softmax", 5), Side("softmax", 6))),
    (["softmax:5,6"], {}, (Side("softmax", 5), Side("softmax", 6))),
    (["softmax"], {"version": "5,6"}, (Side("softmax", 5), Side("softmax", 6))),
    (["softmax:6", "softmax:6"], {}, (Side("softmax", 6), Side("softmax", 6))),
    (["softmax:6@128", "softmax:6@512"], {}, (Side("softmax", 6, 128), Side("softmax", 6, 512))),
    (["softmax:6"], {"blocks": "512,128"}, (Side("softmax", 6, 512), Side("softmax", 6, 128))),
    (["softmax:5,6"], {"blocks": "64"}, (Side("softmax", 5, 64), Side("softmax", 6, 64))),
    (["softmax:5@64", "softmax:6"], {}, (Side("softmax", 5, 64), Side("softmax", 6))),
    (
        ["softmax:6@64,ROWS=1", "softmax:6@64,ROWS=2"],
        {},
        (Side("softmax", 6, 64, params={"ROWS": 1}), Side("softmax", 6, 64, params={"ROWS": 2})),
    ),
    (
        ["softmax:5,6@ROWS=2,TILE=16"],
        {},
        (Side("softmax", 5, params={"ROWS": 2, "TILE": 16}), Side("softmax", 6, params={"ROWS": 2, "TILE": 16})),
    ),
    (["softmax:6@64,ROWS=2", "softmax:6"], {}, (Side("softmax", 6, 64, params={"ROWS": 2}), Side("softmax", 6, 64))),
    (
        ["softmax@ROWS=2"],
        {"version": "6", "blocks": "64,128"},
        (Side("softmax", 6, 64, params={"ROWS": 2}), Side("softmax", 6, 128, params={"ROWS": 2})),
    ),
    (
        ["softmax:6", "softmax:6@ROWS=2"],
        {"params": {"TILE": [16]}},
        (Side("softmax", 6), Side("softmax", 6, params={"ROWS": 2})),
    ),
    (
        ["old@1/softmax.cu@64,ROWS=2", "mine.cu@ROWS=1"],
        {"family": "softmax", "version": "6"},
        (
            Side("softmax", 6, 64, "old@1/softmax.cu", {"ROWS": 2}),
            Side("softmax", 6, 64, "mine.cu", {"ROWS": 1}),
        ),
    ),
    (["softmax:6", "mine.cu"], {}, (Side("softmax", 6), Side("softmax", 6, None, "mine.cu"))),
    (["softmax:6", "mine@2.cu"], {}, (Side("softmax", 6), Side("softmax", 6, None, "mine@2.cu"))),
    (["softmax:6@64", "mine.cu"], {}, (Side("softmax", 6, 64), Side("softmax", 6, 64, "mine.cu"))),
    (["softmax:5", "mine.cu"], {"version": "6"}, (Side("softmax", 5), Side("softmax", 6, None, "mine.cu"))),
    (
        ["mine.cu", "softmax.cu"],
        {"family": "softmax", "version": "6"},
        (Side("softmax", 6, None, "mine.cu"), Side("softmax", 6, None, "softmax.cu")),
    ),
    (
        ["old@1/softmax.cu", "softmax.cu@64"],
        {"version": "6"},
        (Side("softmax", 6, 64, "old@1/softmax.cu"), Side("softmax", 6, 64, "softmax.cu")),
    ),
]


@pytest.mark.parametrize(("words", "options", "sides"), MEANING, ids=lambda value: str(value)[:40])
def test_what_words_mean(words, options, sides):
    assert parse_sides(words, **options) == sides


WRONG = [
    (["softmax:6"], {}, "only 'softmax:6' is given"),
    (["softmax:1-3"], {}, "3 are given"),
    (["softmax:1", "softmax:2", "softmax:3"], {}, "3 are given"),
    (["softmax:6", "gelu:1"], {}, "softmax and gelu are different families"),
    (["softmax:6", "softmax"], {}, "'softmax' names no version"),
    (["softmax:5,6"], {"version": "7"}, "name them in one place"),
    (["softmax:5@64", "softmax:6"], {"blocks": "128"}, "name it in one place"),
    (["softmax:6"], {"blocks": "32,64,128"}, "two block sizes can be compared, not 3"),
    (["softmax:5,6@100"], {}, "block size 100 cannot be launched"),
    (["softmax:5@", "softmax:6"], {}, "'@' is empty or has an empty part"),
    (["softmax:5@x", "softmax:6"], {}, "block size 'x' is not a whole number"),
    (["softmax:5@1..4", "softmax:6"], {}, "one block size is wanted here, not '1..4'"),
    (["softmax:5@64,", "softmax:6"], {}, "'@64,' is empty or has an empty part"),
    (["softmax:5@,ROWS=1", "softmax:6"], {}, "'@,ROWS=1' is empty or has an empty part"),
    (["softmax:5@64, ROWS=1", "softmax:6"], {}, "'@64, ROWS=1' has a space; write @128, @ROWS=2 or @128,ROWS=2"),
    (["softmax:5@ROWS =1", "softmax:6"], {}, "'@ROWS =1' has a space"),
    (["softmax:5@ROWS=1,ROWS=2", "softmax:6"], {}, "'@ROWS=1,ROWS=2' names ROWS twice"),
    (
        ["softmax:5@ROWS=1,2", "softmax:6"],
        {},
        "cannot read '2' of '@ROWS=1,2'; write @128, @ROWS=2 or @128,ROWS=2: the",
    ),
    (["softmax:5@ROWS=1,64", "softmax:6"], {}, "the block size first, one value each"),
    (["softmax:5@64,128", "softmax:6"], {}, "cannot read '128' of '@64,128'"),
    (["softmax:5@ROWS=1..4", "softmax:6"], {}, "cannot read 'ROWS=1..4'"),
    (["softmax:5@ROWS=-1", "softmax:6"], {}, "cannot read 'ROWS=-1'"),
    (["softmax:5@ROWS=", "softmax:6"], {}, "cannot read 'ROWS='"),
    (["softmax:5@=1", "softmax:6"], {}, "cannot read '=1'"),
    (["softmax:5@ROWS=" + "9" * 5000, "softmax:6"], {}, "(5000 digits) is too large"),
    (["softmax:5@ROWS=1", "softmax:6"], {"params": {"ROWS": [2]}}, "a side names ROWS and so does --param ROWS"),
    (["softmax:5", "mine.cu@ROWS=2"], {"params": {"ROWS": [2]}}, "name it in one place"),
    (["softmax:6", "nope.cu@ROWS=1"], {}, "there is no file nope.cu;"),
    (["softmax:6", "nope.cu"], {}, "there is no file nope.cu"),
    (["softmax:6", "./softmax"], {}, "neither FAMILY:VERSION nor a .cu file"),
    (["mine.cu", "softmax.cu"], {"version": "6"}, "give --family NAME"),
    (["softmax.cu", "old@1/softmax.cu"], {}, "give --version N"),
    (["mine.cu", "softmax.cu"], {"family": "softmax", "version": "5,6"}, "give --version N"),
    (["softmax:6", "softmax.extra.cu"], {}, "compare them by number: --family-dir ."),
    (["softmax:6", "mine.cu"], {"family": "gelu"}, "gelu and softmax are different families"),
]


@pytest.mark.parametrize(("words", "options", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_refused(words, options, message):
    with pytest.raises(UsageError) as refused:
        parse_sides(words, **options)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_labels_tell_the_sides_apart():
    five, six, mine = Side("softmax", 5), Side("softmax", 6), Side("softmax", 6, None, "mine.cu")
    none = [{}, {}]
    assert labels([five, six], [256, 128], none) == ("softmax:5", "softmax:6")
    assert labels([six, mine], [256, 256], none) == ("softmax:6", "mine.cu")
    both = labels([Side("softmax", 6, 64), Side("softmax", 6, 128)], [64, 128], none)
    assert both == ("softmax:6@64", "softmax:6@128")
    assert labels([six, six], [256, 256], none) == ("softmax:6@256 (A)", "softmax:6@256 (B)")
    assert labels([Side("softmax", 5, 64), six], [64, 256], none) == ("softmax:5@64", "softmax:6@256")


def test_labels_name_the_parameters_that_a_side_names():
    five, six, mine = Side("softmax", 5), Side("softmax", 6), Side("softmax", 6, None, "mine.cu")
    one, two = ({"ROWS": rows, "TILE": 16} for rows in (1, 2))
    at_one = replace(six, params={"ROWS": 1})
    assert labels([at_one, six], [64, 256], [one, two]) == ("softmax:6@64,ROWS=1", "softmax:6@256,ROWS=2")
    assert labels([five, at_one], [64, 64], [{}, one]) == ("softmax:5", "softmax:6@ROWS=1")
    assert labels([at_one, replace(mine, block=64)], [64, 64], [one, two]) == (
        "softmax:6@64,ROWS=1",
        "mine.cu@64,ROWS=2",
    )
    assert labels([at_one, six], [64, 64], [one, one]) == ("softmax:6@64,ROWS=1 (A)", "softmax:6@64,ROWS=1 (B)")
    assert labels([six, six], [64, 128], [one, one]) == ("softmax:6@64", "softmax:6@128")
    assert parse_sides(labels([at_one, six], [64, 256], [one, two])) == (
        Side("softmax", 6, 64, params={"ROWS": 1}),
        Side("softmax", 6, 256, params={"ROWS": 2}),
    )


def test_a_family_is_named_once_in_a_sentence():
    assert shortened("softmax:5", "softmax:6") == ":5"
    assert shortened("mine.cu", "softmax:6") == "mine.cu"
