"""What people type, right and wrong."""

from __future__ import annotations

import pytest

from kbench import grammar
from kbench.errors import Exit, UsageError
from kbench.grammar import Target, parse_block_size, parse_range, parse_sizes, parse_targets, parse_versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", (5,)),
        ("1,3-5", (1, 3, 4, 5)),
        ("3-5,4,1", (1, 3, 4, 5)),
        (" 2 , 1 ", (1, 2)),
        ("7-7", (7,)),
        ("008", (8,)),
    ],
)
def test_versions(text: str, expected: tuple[int, ...]) -> None:
    assert parse_versions(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32..1024", [32, 64, 128, 256, 512, 1024]),
        ("32,96,768", [32, 96, 768]),
        ("32..256:32", [32, 64, 96, 128, 160, 192, 224, 256]),
        ("768,32..128,96", [32, 64, 96, 128, 768]),
        ("33..100", [64]),
        ("0..4", [0, 1, 2, 4]),
        ("0..1", [0, 1]),
        ("64,64,32", [32, 64]),
        ("0", [0]),
        ("1..10:4", [1, 5, 9]),
        ("64..64", [64]),
    ],
)
def test_ranges(text: str, expected: list[int]) -> None:
    assert parse_range(text) == expected


def test_sizes_of_one_name_are_merged() -> None:
    assert parse_sizes(["T=128", "B=2", "T=256,512", "T=128..1024"]) == {"T": [128, 256, 512, 1024], "B": [2]}
    assert parse_sizes([]) == {}


def test_targets() -> None:
    assert parse_targets(["a", "b:2"]) == [Target("a"), Target("b", (2,))]
    assert parse_targets(["a", "b"], "1-2") == [Target("a", (1, 2)), Target("b", (1, 2))]
    assert parse_targets(["a:1", "b", "a:3"]) == [Target("a", (1, 3)), Target("b")]
    assert parse_targets(["a:1", "a"]) == parse_targets(["a", "a:1"]) == [Target("a")]


@pytest.mark.parametrize("block", [1, 16, 32, 96, 1024])
def test_block_size(block: int) -> None:
    assert parse_block_size(f" {block} ") == block


# Each case: a call, the part that its message must name, and the remedy that it must show.
BAD = [
    (lambda: parse_versions("abc"), "'abc'", grammar.VERSIONS_FORM),
    (lambda: parse_versions(""), "empty", grammar.VERSIONS_FORM),
    (lambda: parse_versions("1,,3"), "'1,,3'", grammar.VERSIONS_FORM),
    (lambda: parse_versions("5-3"), "'5-3'", "3-5"),
    (lambda: parse_versions("100000"), "version", grammar.VERSIONS_FORM),
    (lambda: parse_versions("-1"), "'-1'", grammar.VERSIONS_FORM),
    (lambda: parse_versions("1..3"), "'1..3'", grammar.VERSIONS_FORM),
    (lambda: parse_versions("1-1000000000"), "1000000000", "1,3-5"),
    (lambda: parse_versions("\u0665"), "'\u0665'", grammar.VERSIONS_FORM),
    (lambda: parse_versions("9" * 5000), "5000 digits", "at most"),
    (lambda: parse_range("abc"), "'abc'", grammar.RANGE_FORM),
    (lambda: parse_range(""), "empty", grammar.RANGE_FORM),
    (lambda: parse_range("32,"), "'32,'", grammar.RANGE_FORM),
    (lambda: parse_range("1024..32"), "'1024..32'", "32..1024"),
    (lambda: parse_range("33..63"), "'33..63'", "33..63:1"),
    (lambda: parse_range("-5"), "'-5' is negative", grammar.RANGE_FORM),
    (lambda: parse_range("32..64:0"), "step of 0", grammar.RANGE_FORM),
    (lambda: parse_range("1..1000000000:1"), "more than 1024", "narrow"),
    (lambda: parse_range("1..1000:1,2001..3000:1"), "more than 1024", "narrow"),
    (lambda: parse_range("32..64..128"), "'32..64..128'", grammar.RANGE_FORM),
    (lambda: parse_range("1.5"), "'1.5'", grammar.RANGE_FORM),
    (lambda: parse_range("32-64"), "'32-64'", "32..1024"),
    (lambda: parse_range("1" + "0" * 40), "41 digits", "at most"),
    (lambda: parse_sizes(["T"]), "'T'", "NAME=VALUE"),
    (lambda: parse_sizes(["=3"]), "'=3'", "NAME=VALUE"),
    (lambda: parse_sizes(["T="]), "size T", "32..1024"),
    (lambda: parse_sizes(["T=-4"]), "size T: '-4' is negative", "32..1024"),
    (lambda: parse_sizes(["T=128,B=2"]), "'T=128,B=2'", "--size T=128 --size B=2"),
    (lambda: parse_targets([":3"]), "':3'", "FAMILY:VERSIONS"),
    (lambda: parse_targets(["a:"]), "'a:'", "FAMILY:VERSIONS"),
    (lambda: parse_targets([""]), "''", "FAMILY:VERSIONS"),
    (lambda: parse_targets(["a:1"], "2"), "'a:1'", "one place"),
    (lambda: parse_block_size("abc"), "'abc'", grammar.BLOCK_FORM),
    (lambda: parse_block_size("0"), "block size 0", grammar.BLOCK_FORM),
    (lambda: parse_block_size("33"), "block size 33", grammar.BLOCK_FORM),
    (lambda: parse_block_size("2048"), "the largest block is 1024 threads", grammar.BLOCK_FORM),
    (lambda: parse_block_size("32..256"), "one block size", "sweep and check take ranges"),
    (lambda: parse_block_size("32,64"), "one block size", "sweep and check take ranges"),
    (lambda: parse_block_size("-32"), "'-32'", grammar.BLOCK_FORM),
    (lambda: parse_block_size("1e3"), "'1e3'", grammar.BLOCK_FORM),
]


@pytest.mark.parametrize(("call", "named", "remedy"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_input_is_one_line_that_names_the_part_and_the_remedy(call, named: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    message = str(caught.value)
    assert named in message
    assert remedy in message
    assert "\n" not in message
    assert caught.value.exit_status == Exit.USAGE


def test_a_huge_range_is_refused_before_it_is_built() -> None:
    # Building 10^14 integers would never end, so this test ends only if the count is worked out first.
    with pytest.raises(UsageError, match="more than 1024"):
        parse_range("1..100000000000000:1")
