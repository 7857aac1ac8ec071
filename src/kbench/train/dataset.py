"""What `--data` and `--val-data` name: token files, text or nothing, as tokens to train on and tokens held out."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kbench.errors import UsageError
from kbench.train.batches import require_batch
from kbench.train.corpus import corpus
from kbench.train.model import Model
from kbench.train.shakespeare import prepared
from kbench.train.text import GPT2_VOCAB, Bytes, Numbers, Tokenizer, read_text, tokenizer_for, tokenizer_of
from kbench.train.tokens import SEARCHED_WHEN_OPENED, Shard, Tokens, held_out, is_token_file, read_tokens

SHAKESPEARE = "shakespeare"
_CORPUS = "kbench's own story"
_LOOKED_AT = 2**20  # tokens that decide how a token file is shown

Note = Callable[[str], None]


@dataclass(frozen=True)
class Dataset:
    """train and val never overlap. description: one line for people. tokenizer: shows tokens as text, and encodes
    what a sample is to begin with."""

    train: Tokens
    val: Tokens
    description: str
    tokenizer: Tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text."""
        return self.tokenizer.decode(ids)


@dataclass(frozen=True)
class _Source:
    """name: as typed. shards: at least one. held: tokens that were held out when the source was made."""

    name: str
    shards: tuple[Shard, ...]
    tokenizer: Tokenizer
    held: tuple[Shard, ...] = ()


def open_data(
    spec: str | None, val_spec: str | None, model: Model, *, batch: int, seq: int, ranks: int = 1, note: Note
) -> Dataset:
    """Open what `--data` names, and hold a part of it out, or take what `--val-data` names.

    spec: a token file, a text file, a quoted pattern of either, "shakespeare", or None for kbench's own story.
    batch, seq, ranks: every shard has to hold a batch of this size. note: takes a line for people.
    Of several shards the last is held out; of one the last tenth, or one batch if that is more. Raises UsageError,
    naming the file, for one that is malformed, too short or beyond the model's vocabulary.
    """
    source = _open(spec, model.vocab, note)
    if val_spec is not None:
        train, val = _apart(source, _open(val_spec, model.vocab, note), note)
    elif source.held:
        train, val = source.shards, source.held
    elif len(source.shards) > 1:
        train, val = source.shards[:-1], source.shards[-1:]
    else:
        train, val = _split(source.shards[0], batch, seq, ranks, must_fit=spec is not None)
    if spec is None:
        needed = batch * seq * ranks + 1
        if train[0].count < needed:
            note(f"{_CORPUS} is shorter than a batch of {needed - 1} tokens and is repeated; --data FILE names a text")
        train, val = _repeated(train, needed), val if val_spec is not None else _repeated(val, needed)
    data = Dataset(Tokens(train, model.vocab), Tokens(val, model.vocab), "", source.tokenizer)
    _require_usable(data, batch, seq, ranks)
    return Dataset(data.train, data.val, _describe(source.name, data), source.tokenizer)


def _open(spec: str | None, vocab: int, note: Note) -> _Source:
    if spec is None:
        # Bytes even where GPT-2's encoding is at hand: its few tokens would make hardly a batch.
        tokenizer_for(min(vocab, GPT2_VOCAB - 1), note)  # a vocabulary too small for bytes is an error
        return _Source(_CORPUS, (Shard(_CORPUS, Bytes().encode(corpus())),), Bytes())
    if spec == SHAKESPEARE:
        return _open_shakespeare(vocab, note)
    paths = _paths(spec)
    tokenised = [is_token_file(path) for path in paths]
    if all(tokenised):
        shards = tuple(read_tokens(path) for path in paths)
        largest = max(int(shard.ids[:_LOOKED_AT].max()) for shard in shards)
        return _Source(spec, shards, tokenizer_of(largest, vocab))
    if any(tokenised):
        bins, texts = paths[tokenised.index(True)], paths[tokenised.index(False)]
        raise UsageError(f"{spec} matches token files ({bins}) and others ({texts})", "name one kind")
    return _open_texts(spec, paths, vocab, note)


def _open_shakespeare(vocab: int, note: Note) -> _Source:
    files = prepared()
    if vocab >= GPT2_VOCAB and files.has_tokens:
        train, val = read_tokens(files.train), read_tokens(files.val)
        return _Source(SHAKESPEARE, (train,), tokenizer_of(GPT2_VOCAB - 1, vocab), (val,))
    if not files.text.is_file():
        raise UsageError(f"Shakespeare's works are not in {files.text.parent}", "run `kbench data shakespeare` once")
    return _open_texts(SHAKESPEARE, [files.text], vocab, note)


def _open_texts(spec: str, paths: Sequence[Path], vocab: int, note: Note) -> _Source:
    """Texts one after the other: each alone could be shorter than a batch."""
    tokenizer = tokenizer_for(vocab, note)
    ids = np.concatenate([tokenizer.encode(read_text(path), str(path)) for path in paths])
    return _Source(spec, (Shard(str(paths[0]) if len(paths) == 1 else spec, ids),), tokenizer)


def _paths(spec: str) -> list[Path]:
    """The files that a name or a pattern stands for, in the order of their names."""
    # The shell leaves "~" as it is in the quotes that a pattern needs.
    literal = os.path.expanduser(spec)
    if not glob.has_magic(literal) or os.path.exists(literal):
        return [Path(literal)]
    found = sorted(path for path in glob.glob(literal, recursive=True) if os.path.isfile(path))
    if not found:
        raise UsageError(f"no file matches the pattern {spec!r}", "see what there is with `ls`")
    return [Path(path) for path in found]


def _apart(source: _Source, val: _Source, note: Note) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Shards to train on without those of the validation data."""
    known = [each.tokenizer.name for each in (source, val) if not isinstance(each.tokenizer, Numbers)]
    if len(set(known)) > 1:
        raise UsageError(
            f"{source.name} holds {source.tokenizer.name}, and {val.name} holds {val.tokenizer.name}",
            "both have to be made with the same tokenizer",
        )
    held = {(shard.count, shard.fingerprint) for shard in (*val.shards, *val.held)}
    train = tuple(shard for shard in source.shards if (shard.count, shard.fingerprint) not in held)
    if not train:
        raise UsageError(f"--data and --val-data name the same tokens: {val.name}", "leave out --val-data")
    if len(train) < len(source.shards):
        note(f"{len(source.shards) - len(train)} shards of {source.name} are those of --val-data: not trained on")
    return train, val.shards


def _split(
    shard: Shard, batch: int, seq: int, ranks: int, must_fit: bool
) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """One shard as the tokens to train on and the last tenth of them, or one batch if that is more."""
    held = held_out(shard.count)
    if must_fit:
        require_batch(shard, batch, seq, ranks, parts=2)
        held = max(held, batch * seq * ranks + 1)
    cut = shard.count - held
    return (shard.part(0, cut),), (shard.part(cut, shard.count),)


def _repeated(shards: tuple[Shard, ...], needed: int) -> tuple[Shard, ...]:
    """Shards repeated until each holds a batch. Only for kbench's own story, so that training always runs: whoever
    names data wants a model that has read them, and not one that has them by heart."""
    return tuple(Shard(each.name, np.resize(each.ids, max(needed, each.count))) for each in shards)


def _require_usable(data: Dataset, batch: int, seq: int, ranks: int) -> None:
    for tokens in (data.train, data.val):
        for shard in tokens.shards:
            require_batch(shard, batch, seq, ranks)
    if data.train.count + data.val.count <= SEARCHED_WHEN_OPENED:
        for tokens in (data.train, data.val):
            for shard in tokens.shards:
                shard.require_vocabulary(tokens.vocab)


def _describe(name: str, data: Dataset) -> str:
    many = len(data.train.shards) + len(data.val.shards)
    shards = f" in {many} shards" if len(data.train.shards) > 1 else ""
    counts = f"{data.train.count:,} tokens to train on, {data.val.count:,} held out{shards}"
    return f"{name}: {counts} ({data.tokenizer.name})"
