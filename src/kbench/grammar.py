"""What people type: targets, versions, ranges and sizes, turned into data or into a one-line UsageError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kbench.errors import UsageError
from kbench.family import DTYPES, MAX_BLOCK

# More values than this in one range is a slip of the keyboard: each value is a row that compiles and runs.
MAX_VALUES = 1024
MAX_VERSION = 9999  # version numbers count up inside one file
MAX_DIGITS = 15  # 10^15 elements fit no machine, and products of a few such sizes are still exact integers

_NUMBER = re.compile(r"[0-9]+")
_VERSIONS = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)(?::([0-9]+))?")
_SIZE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)", re.DOTALL)
_VALUE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([0-9]+)")

VERSIONS_FORM = "write 5, or 1,3-5"
RANGE_FORM = "write 32..1024 for the powers of two, 32..256:32 for steps of 32, or 32,96,768"
SIZE_FORM = "write NAME=VALUE, such as --size T=128 --size B=2, or T=128..1024"
PARAM_FORM = "write NAME=VALUES, such as --param ROWS=1,2,4 or ROWS=1..8"
PLACE_FORM = "write @128, @ROWS=2 or @128,ROWS=2: the block size first, one value each, no spaces"
DTYPES_FORM = f"write one or some of {','.join(DTYPES)}, or all"
BLOCK_FORM = "give a multiple of 32 from 32 to 1024, such as 256"


@dataclass(frozen=True)
class Target:
    """A family and some of its versions in rising order; None means all of them."""

    family: str
    versions: tuple[int, ...] | None = None


def parse_targets(arguments: Iterable[str], versions_option: str | None = None) -> list[Target]:
    """Targets such as "softmax_forward" or "softmax_forward:1,3-5", each family once, in the order given.

    versions_option is what --version said; it applies to every target that names no versions itself.
    Raises UsageError for a malformed target and for versions given twice.
    """
    shared = parse_versions(versions_option) if versions_option is not None else None
    found: dict[str, tuple[int, ...] | None] = {}
    for argument in arguments:
        target = _parse_target(argument)
        if target.versions is not None and shared is not None:
            raise UsageError(
                f"{argument!r} names versions and so does --version {versions_option}", "name them in one place"
            )
        versions = target.versions if target.versions is not None else shared
        known = found.get(target.family, ())
        # A family without versions means all of them, which swallows any that were named elsewhere.
        found[target.family] = None if versions is None or known is None else tuple(sorted({*known, *versions}))
    return [Target(family, versions) for family, versions in found.items()]


def parse_versions(text: str) -> tuple[int, ...]:
    """Version numbers from "5" or "1,3-5", each once, in rising order. Raises UsageError."""
    numbers: set[int] = set()
    for part in _parts(text, "version", VERSIONS_FORM):
        match = _VERSIONS.fullmatch(part)
        if match is None:
            raise UsageError(f"cannot read version {part!r}", VERSIONS_FORM)
        first, last = _integer(match[1]), _integer(match[2] or match[1])
        if last < first:
            raise UsageError(f"the versions {part!r} are reversed", f"write {last}-{first}")
        if last > MAX_VERSION:
            raise UsageError(f"there is no version {last}", VERSIONS_FORM)
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def parse_range(text: str, what: str = "range") -> list[int]:
    """Numbers from "32..1024" (the powers of two in it), "32..256:32" (steps), "32,96" or a mixture.

    Each number once, in rising order. `what` names the thing in messages. Raises UsageError.
    """
    values: set[int] = set()
    for part in _parts(text, what, RANGE_FORM):
        values.update(_parse_part(part, what))
        if len(values) > MAX_VALUES:
            raise _too_many(text, what)
    return sorted(values)


def parse_sizes(settings: Sequence[str]) -> dict[str, list[int]]:
    """Sizes from "T=128", "T=256,512" or "T=128..1024"; settings of one name are merged. Raises UsageError."""
    return _parse_settings(settings, "size", SIZE_FORM)


def several(values: Mapping[str, Sequence[int]]) -> str | None:
    """The first name that has more than one value, for commands that take one; None where there is none."""
    return next((name for name, found in values.items() if len(found) != 1), None)


def parse_params(settings: Sequence[str]) -> dict[str, list[int]]:
    """Parameters of versions, in the grammar of sizes: "ROWS=1,2,4". Raises UsageError."""
    return _parse_settings(settings, "param", PARAM_FORM)


def _parse_settings(settings: Sequence[str], what: str, form: str) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for setting in settings:
        match = _SIZE.fullmatch(setting.strip())
        if match is None:
            raise UsageError(f"cannot read {what} {setting!r}", form)
        name, text = match[1], match[2]
        if "=" in text:
            raise UsageError(f"cannot read {what} {setting!r}", f"one --{what} for each name: {form}")
        found.setdefault(name, set()).update(parse_range(text, f"{what} {name}"))
    return {name: sorted(values) for name, values in found.items()}


def parse_dtypes(text: str) -> tuple[str, ...] | None:
    """dtypes from "bf16" or "fp32,bf16", each once, in the order given; None for "all". Raises UsageError."""
    names = tuple(dict.fromkeys(_parts(text, "--dtype", DTYPES_FORM)))
    if names == ("all",):
        return None
    if unknown := [name for name in names if name not in DTYPES]:
        if unknown == ["all"]:
            raise UsageError(f"--dtype {text!r} names all dtypes and some beside them", DTYPES_FORM)
        raise UsageError(f"unknown dtype {unknown[0]!r}", f"dtypes: {', '.join(DTYPES)}")
    return names


def parse_dtype(text: str | None, command: str) -> str | None:
    """The dtype of a command that takes one only. Raises UsageError for several; unknown ones are left to others."""
    if text is not None and ("," in text or text.strip() == "all"):
        raise UsageError(f"{command} takes one dtype, not {text!r}", "sweep and check take lists and all")
    return text


def parse_block_sizes(text: str) -> list[int]:
    """The block sizes of a sweep, a range as of `parse_range`. What some GPU could launch but a version does not
    support is its row's business; what no GPU launches is a UsageError."""
    sizes = parse_range(text, "--block-sizes")
    wrong = next((size for size in sizes if not 1 <= size <= MAX_BLOCK), None)
    if wrong is not None:
        raise UsageError(f"--block-sizes: {wrong} is not from 1 to {MAX_BLOCK}, what a GPU can launch", RANGE_FORM)
    return sizes


def parse_block_size(text: str) -> int:
    """One number of threads per block: whole warps, or a power of two below a warp. Raises UsageError."""
    if re.search(r"\d\s*(\.\.|,)", text):
        raise UsageError(f"one block size is wanted here, not {text!r}", "sweep and check take ranges and lists")
    if not _NUMBER.fullmatch(text.strip()):
        raise UsageError(f"block size {text!r} is not a whole number", BLOCK_FORM)
    block = _integer(text.strip())
    if block > MAX_BLOCK:
        raise UsageError(f"block size {block} is too large: the largest block is {MAX_BLOCK} threads", BLOCK_FORM)
    # A tile of 4 x 4 threads is a block, too; 33 or 48 is likelier a slip than a version's choice.
    if block == 0 or (block % 32 and block not in (1, 2, 4, 8, 16)):
        raise UsageError(f"block size {block} cannot be launched in whole warps of 32", BLOCK_FORM)
    return block


def parse_place(text: str) -> tuple[int | None, dict[str, int]]:
    """A block size, None where it is left open, and values of parameters: from "128", "ROWS=2" or "128,ROWS=2,TILE=64".

    Raises UsageError.
    """
    pieces = text.split(",")
    if not all(pieces):
        raise UsageError(f"'@{text}' is empty or has an empty part", PLACE_FORM)
    if re.search(r"\s", text):
        raise UsageError(f"'@{text}' has a space", PLACE_FORM)
    # Elsewhere a number would read as a second value: "ROWS=1,2".
    block = parse_block_size(pieces.pop(0)) if "=" not in pieces[0] else None
    params: dict[str, int] = {}
    for piece in pieces:
        match = _VALUE.fullmatch(piece)
        if match is None:
            raise UsageError(f"cannot read {piece!r} of '@{text}'", PLACE_FORM)
        if match[1] in params:
            raise UsageError(f"'@{text}' names {match[1]} twice", PLACE_FORM)
        params[match[1]] = _integer(match[2])
    return block, params


def _parse_target(argument: str) -> Target:
    family, colon, versions = argument.strip().partition(":")
    if not family or (colon and not versions.strip()):
        raise UsageError(f"cannot read target {argument!r}", "write FAMILY or FAMILY:VERSIONS, such as softmax:1,3-5")
    return Target(family, parse_versions(versions) if colon else None)


def _parts(text: str, what: str, form: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{what} {text!r} is empty or has an empty part", form)
    return parts


def _parse_part(part: str, what: str) -> Iterable[int]:
    if _NUMBER.fullmatch(part):
        return (_integer(part),)
    match = _RANGE.fullmatch(part)
    if match is None:
        negative = re.fullmatch(r"-[0-9]+(\.\..*)?", part)
        problem = "is negative" if negative else "is neither a whole number nor a range"
        raise UsageError(f"{what}: {part!r} {problem}", RANGE_FORM)
    first, last = _integer(match[1]), _integer(match[2])
    if last < first:
        raise UsageError(f"{what}: {part!r} is reversed", f"write {last}..{first}")
    return _steps(part, first, last, match[3], what) if match[3] else _powers_of_two(part, first, last, what)


def _steps(part: str, first: int, last: int, step_text: str, what: str) -> range:
    step = _integer(step_text)
    if step == 0:
        raise UsageError(f"{what}: {part!r} has a step of 0", RANGE_FORM)
    if (last - first) // step >= MAX_VALUES:
        raise _too_many(part, what)
    return range(first, last + 1, step)


def _powers_of_two(part: str, first: int, last: int, what: str) -> list[int]:
    powers = [1 << bit for bit in range(last.bit_length()) if first <= 1 << bit <= last]
    if first == 0:
        powers.insert(0, 0)  # whoever writes 0..1 means both values of a flag
    if not powers:
        raise UsageError(f"{what}: {part!r} holds no power of two", f"write {first}..{last}:1 for every number in it")
    return powers


def _too_many(text: str, what: str) -> UsageError:
    return UsageError(f"{what}: {text!r} holds more than {MAX_VALUES} values", "narrow it, or take larger steps")


def _integer(digits: str) -> int:
    significant = digits.lstrip("0") or "0"
    if len(significant) > MAX_DIGITS:
        raise UsageError(
            f"{significant[:12]}... ({len(significant)} digits) is too large", f"at most {MAX_DIGITS} digits"
        )
    return int(significant)
