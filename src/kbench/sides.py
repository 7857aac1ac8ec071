"""The two sides of a comparison as they are typed: a version, a version at a block size, or a file in its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kbench.errors import UsageError
from kbench.grammar import parse_block_size, parse_targets, parse_versions

SIDES_FORM = "write FAMILY:N FAMILY:M, or FAMILY:N@128 FAMILY:N@512, or FAMILY:N mine.cu"

_BLOCK = re.compile(r"(?P<side>.*)@(?P<block>[^@/\\.]*)", re.DOTALL)
_SUFFIX = ".cu"


@dataclass(frozen=True)
class Side:
    """One side. block: None where it was left open. file: the `.cu` whose kernels take the place of the family's;
    the plan that launches them stays the version's. "" for the family's own."""

    family: str
    version: int
    block: int | None = None
    file: str = ""

    @property
    def name(self) -> str:
        return self.file or f"{self.family}:{self.version}"


@dataclass(frozen=True)
class _Word:
    """What one word on the command line says of a side, or of several of one family."""

    family: str = ""
    version: int | None = None
    block: int | None = None
    file: str = ""


def parse_sides(
    words: Sequence[str], family: str | None = None, version: str | None = None, blocks: str | None = None
) -> tuple[Side, Side]:
    """The two sides that words and the options --family, --version and --block-sizes name.

    A word is a target ("softmax_forward:5", or "softmax_forward:5,6" for both sides at once) or a `.cu` file, and may
    end in "@128", a block size. What a word leaves open, the options say, then the other side; --block-sizes takes one
    number for both sides or two, and with two a single side is compared with itself. Files alone take their family
    from their name up to the first dot.
    Raises UsageError for anything else than two sides of one family, and for a file that is not there.
    """
    versions = parse_versions(version) if version is not None else ()
    found = [side for word in words for side in _parse_word(word, versions)]
    if versions and all(not side.file for side in found) and any(":" in word for word in words):
        raise UsageError(f"{words[0]!r} names versions and so does --version {version}", "name them in one place")
    sizes = [parse_block_size(text) for text in blocks.split(",")] if blocks is not None else []
    if len(sizes) > 2:
        raise UsageError(f"two block sizes can be compared, not {len(sizes)}", SIDES_FORM)
    if len(found) == 1 and len(sizes) == 2:
        found *= 2
    if len(found) != 2:
        only = f"only {words[0]!r} is" if len(found) == 1 else f"{len(found)} are"
        raise UsageError(f"two sides are compared, and {only} given", SIDES_FORM)
    if sizes and any(side.block is not None for side in found):
        raise UsageError(f"a side names its block size and so does --block-sizes {blocks}", "name it in one place")
    first, second = (
        (replace(side, block=size) for side, size in zip(found, sizes * 2, strict=False)) if sizes else found
    )
    name = _family([first, second], family)
    a, b = _complete(first, second, name, versions), _complete(second, first, name, versions)
    if a.version == b.version:  # of one plan and two sources only the source is to differ
        a, b = replace(a, block=a.block or b.block), replace(b, block=b.block or a.block)
    return a, b


def labels(sides: Sequence[Side], blocks: Sequence[int]) -> tuple[str, str]:
    """What to call the two: with their block sizes where these tell them apart or were asked for."""
    first, second = (side.name for side in sides)
    if first == second or any(side.block is not None for side in sides):
        first, second = (f"{name}@{block}" for name, block in zip((first, second), blocks, strict=True))
    return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def shortened(label: str, before: str) -> str:
    """ ":5" of "layernorm_forward:5" in a sentence that has named "layernorm_forward:6" already."""
    family, colon, rest = label.partition(":")
    return colon + rest if colon and before.startswith(family + colon) else label


def _parse_word(word: str, versions: Sequence[int]) -> list[_Word]:
    match = _BLOCK.fullmatch(word)
    text = match["side"] if match else word
    block = parse_block_size(match["block"]) if match else None
    if text.endswith(_SUFFIX):
        if not Path(text).is_file():
            raise UsageError(f"there is no file {text}", SIDES_FORM)
        return [_Word(block=block, file=text)]
    if "/" in text or "\\" in text:
        raise UsageError(f"{word!r} is neither FAMILY:VERSION nor a .cu file", SIDES_FORM)
    target = parse_targets([text])[0]
    chosen = target.versions or versions
    return [_Word(target.family, number, block) for number in chosen] or [_Word(target.family, None, block)]


def _family(sides: Sequence[_Word], option: str | None) -> str:
    names = list(dict.fromkeys(name for name in (option, *(side.family for side in sides)) if name))
    if not names:
        names = list(dict.fromkeys(Path(side.file).name.partition(".")[0] for side in sides))
        if len(names) > 1:
            raise UsageError(f"the family of {sides[0].file} and {sides[1].file} is not known", "give --family NAME")
    if len(names) > 1:
        what = f"{names[0]} and {names[1]} are different families"
        raise UsageError(what, "two versions of one family can be compared")
    return names[0]


def _complete(side: _Word, other: _Word, family: str, versions: Sequence[int]) -> Side:
    if side.version is not None:
        return Side(family, side.version, side.block)
    if not side.file:
        raise UsageError(f"{side.family!r} names no version", SIDES_FORM)
    path = Path(side.file)
    if path.name.startswith(f"{family}.") and path.stem != family and path.with_suffix(".py").is_file():
        what = f"{side.file} adds versions of its own to {family}, in {path.stem}.py"
        raise UsageError(what, f"compare them by number: --family-dir {path.parent}")
    known = list(versions) or ([other.version] if other.version is not None else [])
    if len(known) != 1:
        raise UsageError(f"which version's plan is to launch the kernels of {side.file}?", "give --version N")
    return Side(family, known[0], side.block, side.file)
