"""Inputs as a program can hold them: few bytes of text, and yet bit for bit what the reference has seen.

A small problem's are stored whole. A large one is drawn from few different rows, which stand in the program once: a
list says which of them is where. The family's own draw and derived tensors are left as they are, so what it promises
(ids in range, probabilities that add up to 1, statistics that belong to their rows) holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.check.arrays import words
from kbench.family import Array, Tensor

# Arrays up to this many elements are drawn as always.
_SMALL = 16384
# Different rows hold about this many elements together, so that a tensor takes some 100 KB of text.
_DISTINCT_ELEMENTS = 8192
# The least and the most of them: fewer would let a kernel mix rows up unseen, more are of no use.
_FEWEST, _MOST = 4, 256
# A tensor of one axis is cut into about this many rows, of at least so many elements.
_LINES, _SHORTEST = 8192, 128
# Rows longer than this are put together from pieces, which are drawn once.
_LONG, PIECE = 4096, 256
# A list of rows has four hexadecimal digits for each.
_MOST_ROWS = 1 << 16
# Where an axis is shorter, lists would take more room than values.
_SHORTEST_AXIS = 16


def row_length(shape: Sequence[int]) -> int:
    """Elements after which values of a large tensor may come again: its last axis, or a part of its only one."""
    if len(shape) > 1:
        return shape[-1]
    count = shape[0] if shape else 1
    return max(_SHORTEST, 1 << (max(count // _LINES, 1) - 1).bit_length())


class RepeatingGenerator:
    """A numpy Generator whose large arrays consist of few different rows, in random order.

    All arrays of one tensor that have as many rows have them in the same order, so that what a draw puts together from
    several has few different rows, too. Other methods draw as usual.
    """

    def __init__(self, seed: int):
        self._seed = seed
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._tensor = 0
        self._orders: dict[int, Array] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)

    def begin(self, tensor: Tensor) -> None:
        """The next values are those of `tensor`: another order of rows."""
        self._tensor += 1
        self._orders.clear()

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return self._drawn(size, self._rng.standard_normal, lambda values: loc + scale * values)

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self.normal(0.0, 1.0, size).astype(dtype)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return self._drawn(size, self._rng.random, lambda values: low + (high - low) * values)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> Any:
        return self.uniform(0.0, 1.0, size).astype(dtype)

    def integers(self, low: Any, high: Any = None, size: Any = None, **options: Any) -> Any:
        return self._drawn(size, lambda shape: self._rng.integers(low, high, shape, **options), lambda values: values)

    def _drawn(self, size: Any, draw: Callable[[Any], Any], scaled: Callable[[Any], Any]) -> Any:
        shape = tuple(size) if isinstance(size, Sequence) else () if size is None else (int(size),)
        count = math.prod(shape)
        if count <= _SMALL:
            return scaled(draw(size))
        length = row_length(shape)
        order = self._order(-(-count // length), length, len(shape))
        pieces = np.asarray(scaled(draw(self._distinct(length, int(order.max()) + 1))))
        if pieces.dtype == np.float64:
            pieces = pieces.astype(np.float32)  # half the memory, as the usual draw of large arrays
        if length > _LONG:
            places = self._rng.integers(0, len(pieces), (int(order.max()) + 1, -(-length // PIECE)))
            pieces = pieces[places].reshape(len(places), -1)[:, :length]
        return pieces[order].reshape(-1)[:count].reshape(shape)

    def _distinct(self, length: int, rows: int) -> tuple[int, int]:
        return (rows, length) if length <= _LONG else (_DISTINCT_ELEMENTS // PIECE, PIECE)

    def _order(self, rows: int, length: int, axes: int) -> Array:
        if rows not in self._orders:
            # Along a single axis draws treat every seventh element, say, in another way: rows multiply by seven.
            distinct = min(max(_FEWEST, _DISTINCT_ELEMENTS // length), _MOST) if axes > 1 else _FEWEST
            generator = np.random.Generator(np.random.PCG64([self._seed, self._tensor, rows]))
            self._orders[rows] = generator.integers(0, distinct, rows)
        return self._orders[rows]


# --------------------------------------------------------------------------------------------- packing


@dataclass(frozen=True)
class Packed:
    """A tensor as text. Element i is words[pieces[rows[i / row] * (pieces in a row) + i % row / piece]][i % piece].

    words: hexadecimal digits, 2 for each byte. row, piece: elements. rows, pieces: lists of four digits a number; both
    "" where all words stand one after the other, and row is 0.
    """

    words: str
    row: int = 0
    piece: int = 0
    rows: str = ""
    pieces: str = ""

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.words) + len(self.rows) + len(self.pieces)


def plain_size(tensor: Tensor) -> int:
    """Characters that a tensor takes as it is."""
    return 2 * tensor.nbytes


def pack(values: Array) -> Packed:
    """A tensor (numpy, as stored) as text, without what comes more than once where that is shorter."""
    bits = words(np.ascontiguousarray(values), np)
    length = row_length(values.shape)
    if bits.size <= _SMALL or length < _SHORTEST_AXIS:
        return Packed(hexadecimal(bits))
    rows, kept = _distinct_rows(bits, length)
    if rows is None:
        return Packed(hexadecimal(bits))
    piece = length
    places: Array | None = np.arange(len(kept))
    if length > 2 * PIECE:
        piece = PIECE
        padded = np.pad(kept, ((0, 0), (0, -length % PIECE)))
        places, kept = _distinct_rows(padded.reshape(-1), PIECE)
    if places is None:
        return Packed(hexadecimal(bits))
    packed = Packed(
        hexadecimal(kept.reshape(-1)), length, piece, hexadecimal(rows, np.uint16), hexadecimal(places, np.uint16)
    )
    return packed if packed.size < 2 * bits.nbytes else Packed(hexadecimal(bits))


def _distinct_rows(bits: Array, length: int) -> tuple[Array | None, Array]:
    """Which of the different rows each row is, and those; None where there are too many of them for a list."""
    whole = (
        np.pad(bits, (0, -bits.size % length)).reshape(-1, length) if bits.size % length else bits.reshape(-1, length)
    )
    found: dict[bytes, int] = {}
    places = np.empty(len(whole), np.int64)
    first: list[int] = []
    for i, row in enumerate(whole):
        places[i] = found.setdefault(row.tobytes(), len(found))
        if places[i] == len(first):
            first.append(i)
            if len(first) > _MOST_ROWS:
                return None, whole
    return places, whole[first]


def hexadecimal(values: Array, kind: Any = None) -> str:
    """Unsigned integers as digits, the most significant first, two for each byte."""
    numbers = np.ascontiguousarray(values if kind is None else values.astype(kind))
    return numbers.astype(numbers.dtype.newbyteorder(">")).tobytes().hex()


def unpack(packed: Packed, count: int, kind: Any) -> Array:
    """The words again, as the program makes them: `count` unsigned integers of type `kind`."""
    stored = np.frombuffer(bytes.fromhex(packed.words), np.dtype(kind).newbyteorder(">")).astype(kind)
    if not packed.row:
        return stored
    rows, pieces = (np.frombuffer(bytes.fromhex(text), ">u2").astype(np.int64) for text in (packed.rows, packed.pieces))
    in_row = -(-packed.row // packed.piece)
    i = np.arange(count)
    piece = pieces[rows[i // packed.row] * in_row + i % packed.row // packed.piece]
    return stored[piece * packed.piece + i % packed.row % packed.piece]
