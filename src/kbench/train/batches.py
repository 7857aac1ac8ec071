"""Batches of tokens: windows that do not overlap, in an order that a seed decides, from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from kbench.errors import UsageError
from kbench.train.tokens import Shard, Tokens

Int32s = npt.NDArray[np.int32]


def require_batch(shard: Shard, batch: int, seq: int, ranks: int = 1, parts: int = 1) -> None:
    """Raises UsageError, with the sizes that fit, where a shard is too short for `parts` batches of all ranks.

    A batch needs one token more than it has inputs, because targets are the inputs shifted by one.
    """
    if min(batch, seq, ranks) < 1:
        raise UsageError(f"--batch {batch} --seq {seq} on {ranks} ranks: at least 1 is needed of each")
    needed = parts * (batch * seq * ranks + 1)
    if shard.count >= needed:
        return
    room = shard.count // parts - 1  # inputs of one batch of all ranks
    if room >= seq * ranks:
        fits = f"--batch {room // (seq * ranks)} is the largest that fits this --seq"
    elif room >= ranks:
        fits = f"--batch 1 --seq {room // ranks} is the longest that fits"
    else:
        fits = "give more text"
    what = "one batch to train on and one held out" if parts == 2 else "one batch"
    many = f" on {ranks} GPUs" if ranks > 1 else ""
    raise UsageError(
        f"{shard.name} has {shard.count} tokens here, and {what} of --batch {batch} --seq {seq}{many} needs {needed}",
        fits,
    )


class Batches:
    """Batches without end: one epoch after the other.

    tokens: every shard has to hold at least one batch of all ranks. batch B, seq T: sizes of a batch on one rank.
    shuffle_seed: shuffles the shards of every epoch and the windows within each shard; None reads all in order, as
    validation does. rank, ranks: windows that lie side by side go to one rank each. Raises UsageError where a shard
    is too short, and while reading where an id is outside the vocabulary.
    """

    def __init__(
        self, tokens: Tokens, batch: int, seq: int, *, shuffle_seed: int | None, rank: int = 0, ranks: int = 1
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        for shard in tokens.shards:
            require_batch(shard, batch, seq, ranks)
        self.tokens, self.batch, self.seq = tokens, batch, seq
        self.shuffle_seed, self.rank, self.ranks = shuffle_seed, rank, ranks
        self.drawn = 0  # batches handed out so far: the whole of the state
        self._windows = [(shard.count - 1) // (ranks * batch * seq) for shard in tokens.shards]
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    @property
    def batches_per_epoch(self) -> int:
        return sum(self._windows)

    def __iter__(self) -> Iterator[tuple[Int32s, Int32s]]:
        return self

    def __next__(self) -> tuple[Int32s, Int32s]:
        """The next batch: inputs and targets, each (B, T) int32."""
        inputs, targets = (np.empty((self.batch, self.seq), np.int32) for _ in range(2))
        self.fill(inputs, targets)
        return inputs, targets

    def fill(self, inputs: Int32s, targets: Int32s) -> None:
        """Put the next batch into arrays of shape (B, T), such as page-locked ones."""
        shard, window = self._place(self.drawn)
        size = self.batch * self.seq
        start = (window * self.ranks + self.rank) * size
        shard.require_vocabulary(self.tokens.vocab, start, start + size + 1)
        ids = shard.ids[start : start + size + 1]
        inputs[...] = ids[:-1].reshape(self.batch, self.seq)
        targets[...] = ids[1:].reshape(self.batch, self.seq)
        self.drawn += 1

    def rewind(self) -> None:
        """Start again at the first batch of the first epoch."""
        self.drawn = 0

    def position(self) -> dict[str, Any]:
        """Where the next batch comes from, for JSON, with what this place belongs to. The same on all ranks."""
        shards = [[PurePath(shard.name).name, shard.count, shard.fingerprint] for shard in self.tokens.shards]
        return {"drawn": self.drawn, **self._sizes(), "shards": shards}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on at a place that `position` has told. Raises UsageError where it is of other data or other sizes."""
        drawn = position.get("drawn")
        if not isinstance(drawn, int) or isinstance(drawn, bool) or drawn < 0:
            raise UsageError(f"the place in the data that was saved is damaged: {drawn!r} batches were drawn")
        for name, here in self._sizes().items():
            if position.get(name) != here:
                option = {"shuffle_seed": "the seed of the data's order"}.get(name, f"--{name}")
                raise UsageError(
                    f"the place in the data was saved with {option} {position.get(name)}, and here it is {here}",
                    "resume with the same, or start anew",
                )
        self._require_same_data(position.get("shards"))
        self.drawn = drawn

    def _sizes(self) -> dict[str, int | None]:
        return {"batch": self.batch, "seq": self.seq, "ranks": self.ranks, "shuffle_seed": self.shuffle_seed}

    def _require_same_data(self, saved: Any) -> None:
        here = self.position()["shards"]
        remedy = "resume with the --data of the run that was saved, or start anew"
        if not isinstance(saved, list) or len(saved) != len(here):
            many = len(saved) if isinstance(saved, list) else "no"
            raise UsageError(f"the place in the data was saved for {many} shards, and here are {len(here)}", remedy)
        for then, now in zip(saved, here, strict=True):
            # A file may have got another name; its contents decide.
            if not isinstance(then, list | tuple) or len(then) != 3 or list(then[1:]) != now[1:]:
                name, count = (*then, "?", "?")[:2] if isinstance(then, list | tuple) else ("?", "?")
                what = "with other contents" if (name, count) == (now[0], now[1]) else f"({now[1]} tokens)"
                raise UsageError(
                    f"the place in the data was saved for {name} ({count} tokens), and here is {now[0]} {what}", remedy
                )

    def _place(self, drawn: int) -> tuple[Shard, int]:
        """Shard and window of batch number `drawn`, counted from the first epoch on."""
        epoch, left = divmod(drawn, self.batches_per_epoch)
        order = self._order(epoch, 0, len(self._windows))
        ends = list(accumulate(self._windows[index] for index in order))
        place = next(number for number, end in enumerate(ends) if left < end)
        index = int(order[place])
        windows = self._order(epoch, 1 + index, self._windows[index])
        return self.tokens.shards[index], int(windows[left - (ends[place] - self._windows[index])])

    def _order(self, epoch: int, what: int, count: int) -> Sequence[int] | npt.NDArray[np.int64]:
        """A permutation of `count`; what: 0 for the shards, 1 + index for the windows of one shard."""
        if self.shuffle_seed is None:
            return range(count)
        if (epoch, what) not in self._orders:
            if len(self._orders) > 1:  # one of the shards and one of windows are in use at a time
                self._orders.clear()
            # Sorting raw numbers: NumPy keeps the stream of a bit generator, but not that of Generator.permutation,
            # the same over its versions.
            raw = np.random.PCG64([self.shuffle_seed, epoch, what]).random_raw(count)
            self._orders[epoch, what] = np.argsort(raw, kind="stable")
        return self._orders[epoch, what]
