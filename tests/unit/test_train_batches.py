"""Batches: every window once an epoch, in an order that the seed decides, and exactly resumable."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.batches import Batches
from kbench.train.tokens import Shard, Tokens

B, T = 2, 3


def shard(count: int, first: int = 0) -> Shard:
    return Shard(f"shard{first}.bin", np.arange(first, first + count, dtype=np.uint16))


# Shards of different size: 3, 1 and 6 windows.
TOKENS = Tokens((shard(3 * 6 + 1), shard(12, 1000), shard(6 * 6 + 5, 2000)), 50257)


def starts(batches: Batches, count: int) -> list[int]:
    return [int(inputs[0, 0]) for inputs, _ in islice(batches, count)]


def test_targets_are_inputs_shifted_by_one() -> None:
    inputs, targets = next(Batches(TOKENS, B, T, shuffle_seed=None))
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5]] and targets.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert inputs.dtype == targets.dtype == np.int32 and inputs.flags.c_contiguous and targets.flags.c_contiguous


def test_without_a_seed_all_is_read_in_order_and_again() -> None:
    batches = Batches(TOKENS, B, T, shuffle_seed=None)
    order = [0, 6, 12, 1000, 2000, 2006, 2012, 2018, 2024, 2030]
    assert batches.batches_per_epoch == 10
    assert starts(batches, 23) == (order * 3)[:23]
    batches.rewind()
    assert starts(batches, 2) == order[:2]


def test_every_epoch_reads_every_window_once_in_another_order() -> None:
    order = starts(Batches(TOKENS, B, T, shuffle_seed=None), 10)
    batches = Batches(TOKENS, B, T, shuffle_seed=1)
    epochs = [starts(batches, 10) for _ in range(6)]
    assert all(sorted(epoch) == order for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    # The shards change places, and a shard is read to its end before the next is opened.
    assert len({epoch[0] // 1000 for epoch in epochs}) > 1
    for epoch in epochs:
        shards = [start // 1000 for start in epoch]
        assert sum(one != other for one, other in zip(shards, shards[1:], strict=False)) == 2


def test_the_order_is_that_of_the_seed() -> None:
    first = starts(Batches(TOKENS, B, T, shuffle_seed=1), 20)
    assert (
        first == starts(Batches(TOKENS, B, T, shuffle_seed=1), 20) != starts(Batches(TOKENS, B, T, shuffle_seed=2), 20)
    )
    # Fixed for ever: a checkpoint has to find its place with any NumPy.
    assert first[:10] == [2012, 2000, 2030, 2018, 2024, 2006, 6, 0, 12, 1000]


@pytest.mark.parametrize("stop", range(0, 21))
def test_eight_batches_are_four_and_four_more(stop: int) -> None:
    whole = list(islice(Batches(TOKENS, B, T, shuffle_seed=3), 25))
    before = Batches(TOKENS, B, T, shuffle_seed=3)
    list(islice(before, stop))
    position = json.loads(json.dumps(before.position()))
    after = Batches(TOKENS, B, T, shuffle_seed=3)
    after.seek(position)
    for (inputs, targets), (more_inputs, more_targets) in zip(whole[stop:], after, strict=False):
        np.testing.assert_array_equal(inputs, more_inputs)
        np.testing.assert_array_equal(targets, more_targets)


def test_asking_for_the_position_does_not_move_it() -> None:
    batches = Batches(TOKENS, B, T, shuffle_seed=3)
    next(batches)
    assert batches.position() == batches.position() and batches.position()["drawn"] == 1


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (Batches(TOKENS, 3, T, shuffle_seed=3), "--batch 2, and here it is 3"),
        (Batches(TOKENS, B, 4, shuffle_seed=3), "--seq 3, and here it is 4"),
        (Batches(TOKENS, B, T, shuffle_seed=4), "the seed of the data's order 3, and here it is 4"),
        (Batches(Tokens(TOKENS.shards[:2], 50257), B, T, shuffle_seed=3), "for 3 shards, and here are 2"),
        (
            Batches(Tokens((shard(19), shard(12, 1001), shard(41, 2000)), 50257), B, T, shuffle_seed=3),
            r"shard1000.bin \(12 tokens\), and here is shard1001.bin \(12 tokens\)",
        ),
        (
            Batches(
                Tokens((Shard("shard0.bin", np.ones(19, np.uint16)), *TOKENS.shards[1:]), 9999), B, T, shuffle_seed=3
            ),
            r"shard0.bin \(19 tokens\), and here is shard0.bin with other contents",
        ),
        (Batches(Tokens((*TOKENS.shards[1:], shard(19)), 9999), B, T, shuffle_seed=3), "saved for shard0.bin"),
    ],
)
def test_a_place_in_other_data_or_of_another_size_is_refused(batches: Batches, words: str) -> None:
    position = Batches(TOKENS, B, T, shuffle_seed=3).position()
    with pytest.raises(UsageError, match=words):
        batches.seek(position)


def test_the_same_data_under_another_name_is_the_same() -> None:
    position = Batches(TOKENS, B, T, shuffle_seed=3).position()
    moved = Tokens(tuple(Shard(f"/elsewhere/{each.count}", each.ids) for each in TOKENS.shards), 50257)
    Batches(moved, B, T, shuffle_seed=3).seek(position)


@pytest.mark.parametrize(
    "change",
    [
        {"drawn": -1},
        {"drawn": None},
        {"drawn": "3"},
        {"drawn": True},
        {"drawn": 1.5},
        {"shards": None},
        {"shards": "abc"},
    ]
    + [{"shards": [1, 2, 3]}, {"shards": [[], [], []]}, {"shards": [["a", "b", "c"]] * 3}, {"batch": None}],
)
def test_a_damaged_place_is_refused(change: dict[str, Any]) -> None:
    batches = Batches(TOKENS, B, T, shuffle_seed=3)
    with pytest.raises(UsageError, match="place in the data"):
        batches.seek({**batches.position(), **change})
    assert batches.drawn == 0


def test_ranks_read_windows_side_by_side() -> None:
    ranks = [Batches(TOKENS, 1, T, shuffle_seed=3, rank=rank, ranks=2) for rank in range(2)]
    both = Batches(TOKENS, 2, T, shuffle_seed=3)
    assert ranks[0].batches_per_epoch == both.batches_per_epoch
    for (first, first_targets), (second, second_targets), (inputs, targets) in islice(
        zip(*ranks, both, strict=True), 20
    ):
        np.testing.assert_array_equal(np.concatenate([first, second]), inputs)
        np.testing.assert_array_equal(np.concatenate([first_targets, second_targets]), targets)
    assert ranks[0].position() == ranks[1].position()
    with pytest.raises(UsageError, match="ranks 2, and here it is 1"):
        Batches(TOKENS, 1, T, shuffle_seed=3).seek(ranks[0].position())


@pytest.mark.parametrize(
    ("batch", "seq", "words"),
    [
        (
            4,
            3,
            "shard1000.bin has 12 tokens here, and one batch of --batch 4 --seq 3 needs 13; --batch 3 is the largest",
        ),
        (1, 12, "needs 13; --batch 1 --seq 11 is the longest that fits"),
        (0, 3, "--batch 0 --seq 3"),
    ],
)
def test_more_than_the_data_hold_is_refused_with_what_fits(batch: int, seq: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Batches(TOKENS, batch, seq, shuffle_seed=None)
    Batches(TOKENS, 3, 3, shuffle_seed=None)
    Batches(TOKENS, 1, 11, shuffle_seed=None)


def test_a_shard_of_one_token_has_no_batch() -> None:
    with pytest.raises(UsageError, match="has 1 tokens here, .*; give more text"):
        Batches(Tokens((shard(1),), 256), 1, 1, shuffle_seed=None)


def test_ids_beyond_the_vocabulary_are_found_when_they_are_read() -> None:
    batches = Batches(Tokens(TOKENS.shards, 1005), B, T, shuffle_seed=None)
    assert len(list(islice(batches, 3))) == 3
    with pytest.raises(UsageError, match="shard1000.bin: token 5 is 1005, .* ends at 1004"):
        next(batches)
