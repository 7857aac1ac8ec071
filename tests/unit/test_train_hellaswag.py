"""HellaSwag's file: what is read, how it is laid out in batches, and how answers are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.hellaswag import HellaSwag, read_hellaswag

VOCAB = 50257
EXAMPLES = [
    (2, [11, 12, 13], [[21], [22, 23], [24, 25, 26], [27]]),
    (0, [14], [[31, 32], [33, 34], [35], [36]]),
    (3, [15, 16], [[41], [42], [43], [44, 45]]),
]


def numbers(index: int, label: int, context: list[int], endings: list[list[int]]) -> list[int]:
    rest = [index, label, len(endings), len(context), *context]
    for ending in endings:
        rest += [len(ending), *ending]
    return [65535, 2 * (len(rest) + 2), *rest]


def stream() -> list[int]:
    return [number for index, example in enumerate(EXAMPLES) for number in numbers(index, *example)]


def written(
    path: Path, body: list[int], count: int = 3, longest: int = 46, magic: int = 20240522, version: int = 1
) -> Path:
    header = np.zeros(256, "<i4")
    header[:4] = magic, version, count, longest
    path.write_bytes(header.tobytes() + np.array(body, "<u2").tobytes())
    return path


@pytest.fixture
def questions(tmp_path: Path) -> HellaSwag:
    return read_hellaswag(written(tmp_path / "hellaswag_val.bin", stream()), VOCAB)


def test_examples_come_back(questions: HellaSwag) -> None:
    assert [example.label for example in questions.examples] == [2, 0, 3]
    assert questions.examples[0].context.tolist() == [11, 12, 13]
    assert [ending.tolist() for ending in questions.examples[0].endings] == EXAMPLES[0][2]
    assert questions.longest == 6


def test_an_example_takes_four_rows(questions: HellaSwag) -> None:
    batch = next(questions.batches(4, 8))
    assert batch.inputs[2].tolist() == [11, 12, 13, 24, 25, 26, 0, 0]
    assert batch.targets[2].tolist() == [0, 0, 24, 25, 26, 0, 0, 0]
    assert batch.mask[2].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert batch.mask.sum(axis=1).tolist() == [1, 2, 3, 1]
    assert batch.labels == (2,) and batch.inputs.dtype == np.int32 and batch.mask.dtype == np.float32


@pytest.mark.parametrize(("rows", "sizes"), [(4, [1, 1, 1]), (7, [1, 1, 1]), (8, [2, 1]), (13, [3])])
def test_a_batch_holds_as_many_as_fit(questions: HellaSwag, rows: int, sizes: list[int]) -> None:
    batches = list(questions.batches(rows, 6))
    assert [len(batch.labels) for batch in batches] == sizes
    assert all(batch.inputs.shape == (rows, 6) for batch in batches)
    assert [label for batch in batches for label in batch.labels] == [2, 0, 3]


def test_ranks_share_the_examples_in_as_many_batches(questions: HellaSwag) -> None:
    parts = [list(questions.batches(4, 6, rank, 2)) for rank in range(2)]
    assert [[batch.labels for batch in part] for part in parts] == [[(2,), (0,)], [(3,), ()]]
    assert parts[1][1].correct(np.zeros((4, 6))) == 0
    assert [batch.labels for rank in range(5) for batch in questions.batches(8, 6, rank, 5)] == [
        (2,),
        (0,),
        (3,),
        (),
        (),
    ]


def test_the_lowest_mean_of_the_masked_losses_is_the_answer(questions: HellaSwag) -> None:
    batch = next(questions.batches(13, 6))
    losses = np.where(batch.mask > 0, 2.0, np.nan).astype(np.float32)  # what is not predicted does not count
    for place, label in enumerate((2, 0, 1)):  # the last answer is wrong
        row = 4 * place + label
        losses[row] = np.where(batch.mask[row] > 0, 1.0, np.inf)
    assert batch.correct(losses) == 2


def test_a_mean_is_taken_not_a_sum(questions: HellaSwag) -> None:
    batch = next(questions.batches(4, 6))
    losses = np.full((4, 6), 1.5)
    losses[2] = 1.0  # three tokens: a sum of 3, twice that of the others
    assert batch.correct(losses) == 1


def test_losses_that_are_no_numbers_answer_nothing(questions: HellaSwag) -> None:
    batch = next(questions.batches(8, 6))
    losses = np.full((8, 6), 1.0)
    losses[:4] = np.nan  # all of the first example
    losses[7] = np.nan  # a wrong ending of the second
    losses[4] = 0.5
    assert batch.correct(losses) == 1


@pytest.mark.parametrize(
    ("batch", "seq", "words"),
    [
        (3, 64, "needs a row for each of 4 endings, and --batch is 3; give --batch 4 or more"),
        (4, 5, "hellaswag_val.bin: example 0 has 6 tokens, and --seq is 5; give --seq 6 or more"),
    ],
)
def test_what_does_not_fit_is_said(questions: HellaSwag, batch: int, seq: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        next(questions.batches(batch, seq))


def changed(place: int, value: int) -> list[int]:
    body = stream()
    body[place] = value
    return body


SECOND = len(numbers(0, *EXAMPLES[0]))
FAULTS = [
    (stream(), {"magic": 20240520}, "not a HellaSwag file: the file holds tokens of 16 bits"),
    (stream(), {"version": 2}, "HellaSwag file of version 2, and only version 1"),
    (stream(), {"count": 0}, "its header counts 0 examples"),
    (stream(), {"count": -1}, "its header counts -1 examples"),
    (stream(), {"count": 70000}, "its header counts 70000 examples"),
    (stream(), {"count": 4}, "example 3 is not there"),
    (stream(), {"count": 2}, "bytes follow the last of its 2 examples"),
    (stream(), {"longest": 30}, "example 0 has 40 bytes, and the longest is to have 30"),
    (stream()[:-1], {}, "example 2 is cut off"),
    (stream()[: SECOND + 3], {}, "example 1 is cut off"),
    (stream()[: SECOND + 7], {}, "example 1 is cut off"),
    (changed(0, 1), {}, "example 0 begins with 1, not 65535"),
    (changed(1, 30), {}, "example 0 says that it has 30 bytes, and it has 40"),
    (changed(SECOND + 2, 7), {}, "example 1 has the number 7"),
    (changed(3, 4), {}, "example 0 has the label 4"),
    (changed(4, 5), {}, "example 0 has 5 endings, not 4"),
    (changed(5, 0), {}, "example 0 has an empty context"),
    (changed(9, 0), {}, "example 0 has an empty ending 0"),
    (changed(6, 50257), {}, "example 0 holds token 50257, and the model's vocabulary ends at 50256"),
]


@pytest.mark.parametrize(("body", "header", "words"), FAULTS, ids=[words for _, _, words in FAULTS])
def test_a_malformed_file_is_one_line(tmp_path: Path, body: list[int], header: dict[str, int], words: str) -> None:
    path = written(tmp_path / "bad.bin", body, **header)
    with pytest.raises(UsageError) as error:
        read_hellaswag(path, VOCAB)
    assert str(path) in str(error.value) and words in str(error.value) and "\n" not in str(error.value)


def test_half_a_number_at_the_end_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.bin", stream())
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UsageError, match="ends in the middle of a number"):
        read_hellaswag(path, VOCAB)
