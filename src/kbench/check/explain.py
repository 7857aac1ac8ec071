"""What wrong elements have in common: what they hold, and which they are. Run only after a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kbench.check.arrays import as_float64, parts, poison_word, to_host, words
from kbench.check.bound import Tolerance
from kbench.check.expected import DeviceExpected
from kbench.family import Array, Tensor

# What all wrong elements of an output can be, in the order in which it is tried.
KINDS = ("unwritten", "nan", "infinite", "stale", "zeros", "shifted", "scaled")

# A common factor this near 1 is rounding and not a wrong scale.
_ROUNDING = 1e-4

# Wrong elements looked at singly to recognise stale, shifted and scaled values: enough that chance cannot
# agree with all of them, few enough to cost nothing.
_SAMPLE = 4096

# Ranges listed per axis before they are only counted: a line has to stay readable.
_MOST_RANGES = 4


@dataclass(frozen=True)
class Clues:
    """What is known beside the output: the byte that the memory was filled with, the answer to the inputs of the
    launch before, and the block size."""

    poison: int | None = None
    previous: DeviceExpected | None = None
    block: int | None = None


def explain(
    tensor: Tensor,
    got: Array,
    expected: DeviceExpected,
    wrong: Array,
    count: int,
    xp: Any,
    tolerance: Tolerance | None,
    clues: Clues,
) -> tuple[str, list[str]]:
    """The kind (one of KINDS, or "") that all wrong elements are of, and notes on which and what they are.

    wrong: boolean mask over the flat output, with `count` elements set.
    """
    flat = got.reshape(-1)
    sample = _sample(wrong, count, xp)
    values = as_float64(flat[sample], tensor.dtype, xp)
    kind, notes = _uniform_kind(tensor, flat, wrong, count, xp, clues)
    if not kind:
        kind, note = _sampled_kind(tensor, sample, values, expected, xp, tolerance, clues)
        notes += [note] if note else []
    return kind, notes + where_wrong(tensor, wrong, count, xp, clues.block)


# ---------------------------------------------------------------------------------------------- what they hold


def _uniform_kind(
    tensor: Tensor, flat: Array, wrong: Array, count: int, xp: Any, clues: Clues
) -> tuple[str, list[str]]:
    """The kinds that are seen from an element's bits alone, counted over all wrong elements."""
    held = {"unwritten": 0, "nan": 0, "infinite": 0, "zeros": 0}
    for part in parts(tensor.count, xp):
        values, mask = as_float64(flat[part], tensor.dtype, xp), wrong[part]
        if clues.poison is not None:
            word = poison_word(tensor.dtype, clues.poison)
            held["unwritten"] += int(xp.count_nonzero(mask & (words(flat[part], xp) == word)))
        held["nan"] += int(xp.count_nonzero(mask & xp.isnan(values)))
        held["infinite"] += int(xp.count_nonzero(mask & xp.isinf(values)))
        held["zeros"] += int(xp.count_nonzero(mask & (values == 0)))
    if clues.poison == 0xFF:
        held["nan"] -= held["unwritten"]  # an unwritten element is a NaN too and is named once
    for kind, number in held.items():
        if number == count:
            return kind, []
    words_for = {"unwritten": "unwritten", "nan": "NaN", "infinite": "infinite", "zeros": "zero"}
    mixed = [f"{number} {words_for[kind]}" for kind, number in held.items() if number > 0]
    return "", [f"of the {count} wrong elements {', '.join(mixed)}"] if mixed else []


def _sampled_kind(
    tensor: Tensor,
    sample: Array,
    values: Array,
    expected: DeviceExpected,
    xp: Any,
    tolerance: Tolerance | None,
    clues: Clues,
) -> tuple[str, str]:
    """The kinds that need the reference of other elements or other inputs, tried on a sample."""
    if clues.previous is not None and _agree(values, *clues.previous.take(sample, tolerance), xp):
        return "stale", "they hold the results for the inputs of an earlier launch"
    for distance, what in _distances(tensor, clues.block):
        source = sample - distance
        inside = (source >= 0) & (source < tensor.count)
        # Half of them may lie outside: a shift by a row or a block leaves an edge without a source.
        if 2 * int(xp.count_nonzero(inside)) < max(sample.size, 2):
            continue
        if _agree(values[inside], *expected.take(source[inside], tolerance), xp):
            direction = "before" if distance > 0 else "after"
            return "shifted", f"each holds the reference of the element {what} {direction} it"
    factor = _common_factor(values, expected.take(sample, tolerance)[0], xp)
    if factor is None or abs(factor - 1) < _ROUNDING:
        return "", ""
    return "scaled", f"they are the reference times {factor:.5g}"


def _agree(values: Array, reference: Array, bound: Array | float, xp: Any) -> bool:
    return values.size > 0 and bool((xp.abs(values - reference) <= bound).all())


def _distances(tensor: Tensor, block: int | None) -> list[tuple[int, str]]:
    """Displacements to try, in elements, with their names: one element, one step of each axis, one block."""
    steps = {1: "1 element"}
    for axis in range(len(tensor.shape) - 1):
        stride = math.prod(tensor.shape[axis + 1 :])
        name = tensor.axes[axis] if len(tensor.axes) == len(tensor.shape) else f"axis {axis}"
        steps.setdefault(stride, f"1 step of {name}")
    if block is not None:
        steps.setdefault(block, f"1 block ({block} elements)")
    return [(sign * step, name) for step, name in steps.items() if step < tensor.count for sign in (1, -1)]


def _common_factor(values: Array, reference: Array, xp: Any) -> float | None:
    """The number by which all references are multiplied, within a thousandth; None if there is none."""
    usable = (reference != 0) & xp.isfinite(values)
    if values.size < 4 or int(xp.count_nonzero(usable)) < values.size:
        return None
    ratios = to_host(values / reference)
    middle = float(np.median(ratios))
    # A thousandth: the ratio must be far steadier than wrong values in general, whose ratios vary by their size.
    return middle if np.all(np.abs(ratios - middle) <= 1e-3 * abs(middle)) else None


def _sample(wrong: Array, count: int, xp: Any) -> Array:
    """Flat indices of at most _SAMPLE wrong elements, spread over all of them, first and last included."""
    picks = np.unique(np.linspace(0, count - 1, min(count, _SAMPLE)).astype(np.int64))
    found: list[Array] = []
    seen = 0
    for part in parts(wrong.size, xp):
        here = int(xp.count_nonzero(wrong[part]))
        chosen = picks[(picks >= seen) & (picks < seen + here)] - seen
        if chosen.size:
            found.append(xp.flatnonzero(wrong[part])[xp.asarray(chosen)] + part.start)
        seen += here
    return xp.concatenate(found)


# ---------------------------------------------------------------------------------------------- which they are


def where_wrong(tensor: Tensor, wrong: Array, count: int, xp: Any, block: int | None) -> list[str]:
    """Notes on which elements of the mask `wrong` are set: a run or tail in memory, ranges per axis, whole rows,
    one side of the diagonal. Empty if all are."""
    if count == tensor.count:
        return ["all elements are wrong"]
    return [
        note
        for note in (
            _run(tensor, wrong, count, xp, block),
            _axis_ranges(tensor, wrong, xp),
            _whole_rows(tensor, wrong, count, xp),
            _one_side(tensor, wrong, xp),
        )
        if note
    ]


def _run(tensor: Tensor, wrong: Array, count: int, xp: Any, block: int | None) -> str:
    first = int(wrong.argmax())
    last = tensor.count - 1 - int(wrong[::-1].argmax())
    if last - first + 1 != count or count == 1:
        return "only the very last element" if count == 1 and last == tensor.count - 1 else ""
    aligned = block is not None and first > 0 and first % block == 0
    multiple = f", from {first // (block or 1)} times the block size {block} on" if aligned else ""
    if last == tensor.count - 1:
        return f"only the last {count} elements in memory{multiple}"
    return f"elements {first} to {last} in memory{multiple}"


def _axis_ranges(tensor: Tensor, wrong: Array, xp: Any) -> str:
    """ "t 96..127, h 1": the axes along which only a part is wrong."""
    shaped = wrong.reshape(tensor.shape)
    found = []
    for axis, size in enumerate(tensor.shape):
        others = tuple(a for a in range(len(tensor.shape)) if a != axis)
        touched = to_host(shaped.any(axis=others) if others else shaped)
        if not touched.all():
            name = tensor.axes[axis] if len(tensor.axes) == len(tensor.shape) else f"axis {axis}"
            found.append(f"{name} {_ranges(np.flatnonzero(touched))} of 0..{size - 1}")
    return f"wrong at {', '.join(found)}" if found else ""


def _ranges(indices: Array) -> str:
    """Sorted indices as "1, 4..7"."""
    breaks = np.flatnonzero(np.diff(indices) != 1)
    starts = indices[np.concatenate(([0], breaks + 1))]
    ends = indices[np.concatenate((breaks, [indices.size - 1]))]
    if starts.size > _MOST_RANGES:
        return f"{starts[0]}..{ends[-1]} in {starts.size} ranges"
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(starts, ends, strict=True))


def _whole_rows(tensor: Tensor, wrong: Array, count: int, xp: Any) -> str:
    if len(tensor.shape) < 2 or tensor.shape[-1] < 2 or count % tensor.shape[-1]:
        return ""
    rows = wrong.reshape(-1, tensor.shape[-1])
    whole = int(xp.count_nonzero(rows.all(axis=1)))
    return f"{whole} whole rows of {rows.shape[0]}, all others right" if whole * tensor.shape[-1] == count else ""


def _one_side(tensor: Tensor, wrong: Array, xp: Any) -> str:
    """For square matrices on the last two axes: wrong elements on one side of the diagonal only."""
    if len(tensor.shape) < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 3:
        return ""
    size = tensor.shape[-1]
    square = to_host(wrong.reshape(-1, size, size).any(axis=0))
    above, on, below = np.triu(square, 1).any(), np.diagonal(square).any(), np.tril(square, -1).any()
    if above and not on and not below:
        return "only above the diagonal"
    if below and not above:
        return "only on and below the diagonal" if on else "only below the diagonal"
    return "only on the diagonal" if on and not above and not below else ""
