"""The two sides of a comparison as they are typed."""

import pytest

from kbench.errors import UsageError
from kbench.sides import Side, labels, parse_sides, shortened


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old@1").mkdir()
    for name in ("mine.cu", "softmax.cu", "old@1/softmax.cu", "softmax.extra.cu", "softmax.extra.py"):
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
    (["softmax:6", "mine.cu"], {}, (Side("softmax", 6), Side("softmax", 6, None, "mine.cu"))),
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
    (["softmax:5@", "softmax:6"], {}, "block size '' is not a whole number"),
    (["softmax:5@x", "softmax:6"], {}, "block size 'x' is not a whole number"),
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
    assert message in str(refused.value)


def test_labels_tell_the_sides_apart():
    five, six, mine = Side("softmax", 5), Side("softmax", 6), Side("softmax", 6, None, "mine.cu")
    assert labels([five, six], [256, 128]) == ("softmax:5", "softmax:6")
    assert labels([six, mine], [256, 256]) == ("softmax:6", "mine.cu")
    assert labels([Side("softmax", 6, 64), Side("softmax", 6, 128)], [64, 128]) == ("softmax:6@64", "softmax:6@128")
    assert labels([six, six], [256, 256]) == ("softmax:6@256 (A)", "softmax:6@256 (B)")
    assert labels([Side("softmax", 5, 64), six], [64, 256]) == ("softmax:5@64", "softmax:6@256")


def test_a_family_is_named_once_in_a_sentence():
    assert shortened("softmax:5", "softmax:6") == ":5"
    assert shortened("mine.cu", "softmax:6") == "mine.cu"
