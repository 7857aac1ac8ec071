"""What --data names: kinds of sources, the part that is held out, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train import text
from kbench.train.corpus import corpus
from kbench.train.dataset import Dataset, open_data
from kbench.train.model import PRESETS, Model
from kbench.train.text import Bytes
from kbench.train.tokens import write_tokens

NANO, D12 = PRESETS["nano"], PRESETS["d12"]
needs_gpt2 = pytest.mark.skipif(bool(text.can_encode_gpt2()), reason=text.can_encode_gpt2() or "GPT-2's BPE is here")

Opener = Callable[..., Dataset]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> Opener:
    """open_data in a folder of its own, with a batch of 2 x 4."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KBENCH_DATA", str(tmp_path / "data"))

    def opener(spec: str | None, val: str | None = None, model: Model = NANO, **sizes: int) -> Dataset:
        return open_data(spec, val, model, **{"batch": 2, "seq": 4, **sizes}, note=notes.append)

    return opener


def tokens(name: str, count: int, first: int = 0, largest: int = 200) -> np.ndarray:
    ids = (first + np.arange(count)) % largest
    write_tokens(Path(name), ids)
    return ids


def joined(data: Dataset) -> np.ndarray:
    return np.concatenate([shard.ids for side in (data.train, data.val) for shard in side.shards])


# --------------------------------------------------------------------------------------------- sources


def test_no_data_is_the_story_as_bytes(opened: Opener, notes: list[str]) -> None:
    for model in (NANO, D12):
        data = opened(None, model=model)
        assert joined(data).astype(np.uint8).tobytes() == corpus()
        assert data.val.count == len(corpus()) // 10
        assert data.decode([104, 105]) == "hi" and data.tokenizer == Bytes()
        assert "held out (bytes)" in data.description
    assert notes == []
    with pytest.raises(UsageError, match="a vocabulary of 100 is too small"):
        opened(None, model=Model(1, 1, 4, vocab=100))


def test_the_story_is_repeated_where_it_is_shorter_than_a_batch(opened: Opener, notes: list[str]) -> None:
    data = opened(None, model=D12, batch=64, seq=1024)
    assert data.train.count == data.val.count == 64 * 1024 + 1
    assert len(notes) == 1 and "shorter than a batch of 65536 tokens and is repeated; --data FILE" in notes[0]
    train = data.train.shards[0].ids[: len(corpus()) - len(corpus()) // 10].astype(np.uint8).tobytes()
    val = data.val.shards[0].ids[: len(corpus()) // 10].astype(np.uint8).tobytes()
    assert train + val == corpus()
    notes.clear()
    opened(None, batch=2, seq=1000)  # only what is held out is repeated: nobody has to know
    assert notes == []


def test_text_is_bytes_for_a_small_vocabulary(opened: Opener) -> None:
    Path("book.txt").write_bytes(b"abcdefghij" * 10)
    data = opened("book.txt")
    assert joined(data).tolist() == list(b"abcdefghij" * 10) and data.val.count == 10
    assert data.description == "book.txt: 90 tokens to train on, 10 held out (bytes)"


@needs_gpt2
def test_text_is_gpt2_for_its_vocabulary(opened: Opener) -> None:
    Path("book.txt").write_bytes(b"Hello world. " * 30)
    data = opened("book.txt", model=D12)
    assert joined(data)[:3].tolist() == [50256, 15496, 995]
    assert "GPT-2's BPE" in data.description


def test_without_the_extra_text_is_bytes_and_that_is_said(
    opened: Opener, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "can_encode_gpt2", lambda: "tiktoken is not installed")
    Path("book.txt").write_bytes(b"abcdefghij" * 10)
    assert opened("book.txt", model=D12).train.count == 90
    assert len(notes) == 1 and "bytes are used as tokens" in notes[0]


def test_one_token_file_is_split(opened: Opener) -> None:
    ids = tokens("tokens.bin", 1000)
    data = opened("tokens.bin")
    np.testing.assert_array_equal(joined(data), ids)
    assert (data.train.count, data.val.count, data.train.vocab) == (900, 100, 256)
    assert isinstance(data.train.shards[0].ids, np.memmap)


def test_of_shards_in_the_order_of_their_names_the_last_is_held_out(opened: Opener) -> None:
    for number in (2, 0, 1):
        tokens(f"shards_{number}.bin", 100 + number, first=number)
    data = opened("shards_*.bin")
    assert [shard.count for shard in data.train.shards] == [100, 101] and data.val.count == 102
    assert "in 3 shards" in data.description


def test_a_pattern_of_texts_is_one_source(opened: Opener) -> None:
    Path("b.txt").write_bytes(b"bbbb" * 10)
    Path("a.txt").write_bytes(b"aaaa" * 10)
    assert joined(opened("?.txt")).tolist() == list(b"aaaa" * 10 + b"bbbb" * 10)


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(opened: Opener) -> None:
    tokens("a[1].bin", 100)
    assert opened("a[1].bin").train.count == 90


def test_shakespeare_is_what_was_prepared(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(f"not in {tmp_path / 'data'}; run `kbench data shakespeare` once")):
        opened("shakespeare")
    Path("data").mkdir()
    Path("data/shakespeare.txt").write_bytes(b"To be or not to be. " * 10)
    assert opened("shakespeare").train.count == 180
    tokens("data/shakespeare_train.bin", 500, largest=50257)
    tokens("data/shakespeare_val.bin", 60, first=300, largest=50257)
    data = opened("shakespeare", model=D12)
    assert (data.train.count, data.val.count) == (500, 60)
    assert opened("shakespeare").train.count == 180  # a byte model reads the text


# --------------------------------------------------------------------------------------- what is held out


@pytest.mark.parametrize("count", [18, 19, 50, 90, 99, 100, 1000])
def test_a_split_leaves_a_batch_on_either_side_and_nothing_on_both(opened: Opener, count: int) -> None:
    ids = tokens("tokens.bin", count)
    data = opened("tokens.bin")
    np.testing.assert_array_equal(joined(data), ids)
    assert min(data.train.count, data.val.count) >= 9
    assert data.val.count == max(9, count // 10)


def test_too_little_for_a_split_says_what_is_needed_and_what_fits(opened: Opener) -> None:
    tokens("tokens.bin", 17)
    with pytest.raises(UsageError) as error:
        opened("tokens.bin")
    assert str(error.value) == (
        "tokens.bin has 17 tokens here, and one batch to train on and one held out of --batch 2 --seq 4 needs 18; "
        "--batch 1 is the largest that fits this --seq"
    )
    opened("tokens.bin", batch=1)
    with pytest.raises(UsageError, match="--batch 1 --seq 7 is the longest that fits"):
        opened("tokens.bin", batch=1, seq=8)
    opened("tokens.bin", batch=1, seq=7)
    with pytest.raises(UsageError, match="--seq 4 on 2 GPUs needs 34"):
        opened("tokens.bin", ranks=2)


def test_a_shard_that_is_too_short_is_named(opened: Opener) -> None:
    for name, count in (("s1.bin", 100), ("s2.bin", 5), ("s3.bin", 100)):
        tokens(name, count)
    with pytest.raises(UsageError, match="s2.bin has 5 tokens here, and one batch of"):
        opened("s*.bin")


def test_validation_data_of_its_own_leaves_all_others_to_train_on(opened: Opener) -> None:
    tokens("a.bin", 100)
    tokens("v.bin", 50, first=3)
    data = opened("a.bin", "v.bin")
    assert (data.train.count, data.val.count) == (100, 50)
    Path("v.txt").write_bytes(b"abcdefghij" * 10)
    assert opened(None, "v.txt").train.count == len(corpus())


def test_validation_data_is_never_trained_on(opened: Opener, notes: list[str]) -> None:
    for number in range(3):
        tokens(f"x_{number}.bin", 100, first=number)
    Path("copy.bin").write_bytes(Path("x_1.bin").read_bytes())
    for val in ("x_1.bin", "copy.bin"):
        notes.clear()
        data = opened("x_*.bin", val)
        assert [shard.ids[0] for shard in data.train.shards] == [0, 2] and data.val.shards[0].ids[0] == 1
        assert notes == ["1 shards of x_*.bin are those of --val-data: not trained on"]
    with pytest.raises(UsageError, match="--data and --val-data name the same tokens: copy.bin; leave out"):
        opened("x_1.bin", "copy.bin")


@needs_gpt2
def test_both_sides_need_the_same_tokenizer(opened: Opener) -> None:
    Path("book.txt").write_bytes(b"Hello world. " * 30)
    tokens("bytes.bin", 100)
    with pytest.raises(UsageError, match="book.txt holds GPT-2's BPE, and bytes.bin holds bytes; both have to be"):
        opened("book.txt", "bytes.bin", model=D12)


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("none.bin", "none.bin: no such file"),
        ("none.txt", "none.txt: no such file"),
        ("", ". is a folder, not a file"),
        ("folder", "folder is a folder, not a file"),
        ("none_*.bin", "no file matches the pattern 'none_*.bin'"),
        ("empty.txt", "empty.txt is empty"),
        ("empty.bin", "empty.bin is empty"),
        ("e*.*", "e*.* matches token files (empty.bin) and others (empty.txt)"),
        ("large.bin", "large.bin: token 90 is 300, and the model's vocabulary ends at 255"),
    ],
)
def test_bad_sources_are_named(opened: Opener, spec: str, words: str) -> None:
    Path("folder").mkdir()
    for name in ("empty.txt", "empty.bin"):
        Path(name).write_bytes(b"")
    ids = np.zeros(100, int)
    ids[90] = 300  # in the part that is held out
    write_tokens(Path("large.bin"), ids)
    with pytest.raises(UsageError) as error:
        opened(spec)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_large_files_are_searched_batch_by_batch(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.train.dataset.SEARCHED_WHEN_OPENED", 99)
    tokens("large.bin", 100, first=250, largest=1000)
    assert opened("large.bin").train.count == 90
