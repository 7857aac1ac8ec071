"""HellaSwag: questions with four endings each, of which the model has to find the likeliest (llm.c's file format).

The file is a header of 256 int32, (magic, version, number of examples, bytes of the longest, zeros), then for every
example, in uint16: 65535, its length in bytes with these fields, its index, its label, 4, the length of its context,
the context, and of every ending the length and the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kbench.errors import UsageError
from kbench.train.tokens import HEADER_BYTES, Ids, read_header, require_kind

MAGIC = 20240522
VERSION = 1
ENDINGS = 4
_DELIMITER = 65535
_FIELDS = 6  # numbers before an example's context

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Example:
    """context, endings: token ids, none of them empty. label: which of the endings is right."""

    context: Ids
    endings: tuple[Ids, ...]
    label: int

    @property
    def longest(self) -> int:
        """Tokens of the context and its longest ending."""
        return len(self.context) + max(len(ending) for ending in self.endings)


@dataclass(frozen=True, eq=False)
class EvalBatch:
    """Rows of a forward pass: four for each example, and rows of zeros where none is left.

    inputs, targets: (B, T) int32. mask: (B, T) float32, 1 where a token of an ending is predicted. labels: one for
    each example.
    """

    inputs: Int32s
    targets: Int32s
    mask: Float32s
    labels: tuple[int, ...]

    def correct(self, losses: npt.NDArray[np.floating]) -> int:
        """How many examples are answered rightly: of its four rows the right ending has the lowest mean loss.

        losses: (B, T), of every position.
        """
        rows = ENDINGS * len(self.labels)
        mask = self.mask[:rows].astype(np.float64)
        # Not a product: what a row says where nothing is predicted may be infinite.
        sums = np.where(mask > 0, losses[:rows], 0.0).sum(axis=1, dtype=np.float64)
        means = (sums / mask.sum(axis=1)).reshape(-1, ENDINGS)
        # A NaN is never the lowest; argmin would take it for that.
        answers = np.where(np.isnan(means), np.inf, means).argmin(axis=1)
        finite = np.isfinite(means).any(axis=1)
        return int(np.sum((answers == np.array(self.labels)) & finite))


@dataclass(frozen=True)
class HellaSwag:
    """The examples of a file."""

    name: str
    examples: tuple[Example, ...]

    @property
    def longest(self) -> int:
        return max(example.longest for example in self.examples)

    def require_fit(self, batch: int, seq: int) -> None:
        """Raises UsageError where batches of this size cannot hold an example."""
        if batch < ENDINGS:
            raise UsageError(
                f"HellaSwag needs a row for each of {ENDINGS} endings, and --batch is {batch}",
                f"give --batch {ENDINGS} or more, or leave out HellaSwag",
            )
        if self.longest > seq:
            index = next(number for number, example in enumerate(self.examples) if example.longest > seq)
            raise UsageError(
                f"{self.name}: example {index} has {self.examples[index].longest} tokens, and --seq is {seq}",
                f"give --seq {self.longest} or more, or leave out HellaSwag",
            )

    def batches(self, batch: int, seq: int, rank: int = 0, ranks: int = 1) -> Iterator[EvalBatch]:
        """All examples, batch // 4 at a time; of several ranks each gets its own part of them. Raises UsageError.

        Every rank gets as many batches as the others, so that they can wait for one another: at the end some may be
        empty.
        """
        self.require_fit(batch, seq)
        each = batch // ENDINGS
        part = -(-len(self.examples) // ranks)
        stop = min((rank + 1) * part, len(self.examples))
        for start in range(rank * part, (rank + 1) * part, each):
            yield _laid_out(self.examples[start : min(start + each, stop)], batch, seq)


def read_hellaswag(path: Path, vocab: int) -> HellaSwag:
    """Read a file whole. Raises UsageError, naming file, example and reason, where anything in it is not as it must."""
    header = read_header(path)
    require_kind(path, header, MAGIC, VERSION, "HellaSwag")
    count, longest = header[2], header[3]
    if not 0 < count < _DELIMITER + 1:
        raise UsageError(f"{path}: its header counts {count} examples", "the file is damaged: make it again")
    try:
        data = path.read_bytes()[HEADER_BYTES:]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) % 2:
        raise UsageError(f"{path} ends in the middle of a number", "the file is cut off or damaged: make it again")
    stream = np.frombuffer(data, "<u2")
    examples, start = [], 0
    for index in range(count):
        example, size = _example(path, stream[start:], index, vocab)
        if 2 * size > longest:
            raise UsageError(f"{path}: example {index} has {2 * size} bytes, and the longest is to have {longest}")
        examples.append(example)
        start += size
    if start != len(stream):
        raise UsageError(f"{path}: {2 * (len(stream) - start)} bytes follow the last of its {count} examples")
    return HellaSwag(str(path), tuple(examples))


def _example(path: Path, stream: Ids, index: int, vocab: int) -> tuple[Example, int]:
    """The example that a stream begins with, and how many numbers it takes."""

    def fail(why: str) -> UsageError:
        return UsageError(f"{path}: example {index} {why}", "the file is cut off or damaged: make it again")

    if len(stream) < _FIELDS:
        raise fail("is not there" if not len(stream) else "is cut off")
    delimiter, size, number, label, endings, context = (int(field) for field in stream[:_FIELDS])
    if delimiter != _DELIMITER:
        raise fail(f"begins with {delimiter}, not {_DELIMITER}")
    if number != index:
        raise fail(f"has the number {number}")
    if endings != ENDINGS:
        raise fail(f"has {endings} endings, not {ENDINGS}")
    if label >= ENDINGS:
        raise fail(f"has the label {label}; labels are 0 to {ENDINGS - 1}")
    parts: list[Ids] = []
    place = _FIELDS
    for length in (context, *(None,) * ENDINGS):
        if length is None:  # an ending says its own length
            if place >= len(stream):
                raise fail("is cut off")
            length, place = int(stream[place]), place + 1
        if length == 0:
            raise fail("has an empty context" if not parts else f"has an empty ending {len(parts) - 1}")
        if place + length > len(stream):
            raise fail("is cut off")
        parts.append(stream[place : place + length])
        place += length
    if 2 * place != size:
        raise fail(f"says that it has {size} bytes, and it has {2 * place}")
    largest = max(int(part.max()) for part in parts)
    if largest >= vocab:
        raise UsageError(
            f"{path}: example {index} holds token {largest}, and the model's vocabulary ends at {vocab - 1}",
            "HellaSwag needs a model with GPT-2's vocabulary",
        )
    return Example(parts[0], tuple(parts[1:]), label), place


def _laid_out(examples: tuple[Example, ...], batch: int, seq: int) -> EvalBatch:
    inputs, targets = np.zeros((batch, seq), np.int32), np.zeros((batch, seq), np.int32)
    mask = np.zeros((batch, seq), np.float32)
    row = 0
    for example in examples:
        known = len(example.context)
        for ending in example.endings:
            end = known + len(ending)
            inputs[row, :known], inputs[row, known:end] = example.context, ending
            # A token of the ending is predicted at the place before it: the first at the context's last.
            targets[row, known - 1 : end - 1] = ending
            mask[row, known - 1 : end - 1] = 1.0
            row += 1
    return EvalBatch(inputs, targets, mask, tuple(example.label for example in examples))
