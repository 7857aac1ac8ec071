"""The two sides of a comparison as they are typed: a version or a file in its place, at a block size and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kbench.errors import UsageError
from kbench.grammar import parse_block_size, parse_place, parse_targets, parse_versions

SIDES_FORM = "write FAMILY:N FAMILY:M, or FAMILY:N@128,ROWS=1 FAMILY:N@128,ROWS=2, or FAMILY:N mine.cu"

_SUFFIX = ".cu"


@dataclass(frozen=True)
class Side:
    """One side. block: None where it was left open. file: the `.cu` whose kernels take the place of the family's;
    the plan that launches them stays the version's. "" for the family's own. params: the values that it names."""

    family: str
    version: int
    block: int | None = None
    file: str = ""
    params: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.file or f"{self.family}:{self.version}"

    def at(self, block: int | None, params: Mapping[str, int]) -> str:
        """This side as it would be typed: "softmax:5@128,ROWS=2"; without what is None or empty."""
        place = [str(block)] if block is not None else []
        place += [f"{name}={value}" for name, value in params.items()]
        return f"{self.name}@{','.join(place)}" if place else self.name


@dataclass(frozen=True)
class _Word:
    """What one word on the command line says of a side, or of several of one family."""

    family: str = ""
    version: int | None = None
    block: int | None = None
    file: str = ""
    params: dict[str, int] = field(default_factory=dict)


def parse_sides(
    words: Sequence[str],
    family: str | None = None,
    version: str | None = None,
    blocks: str | None = None,
    params: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Side, Side]:
    """The two sides that words and the options --family, --version and --block-sizes name. params: what --param names,
    which no side may name as well.

    A word is a target ("softmax_forward:5", or "softmax_forward:5,6" for both sides at once) or a `.cu` file, and may
    end in "@128", a block size, "@ROWS=2", a value of a parameter, or "@128,ROWS=2". What a word leaves open, the
    options say, then the other side; but a parameter has its default, whatever the other side names. --block-sizes
    takes one number for both sides or two, and with two a single side is compared with itself. Files alone take their
    family from their name up to the first dot.
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
    if name := next((name for name in params or {} if any(name in side.params for side in found)), None):
        raise UsageError(f"a side names {name} and so does --param {name}", "name it in one place")
    first, second = (
        (replace(side, block=size) for side, size in zip(found, sizes * 2, strict=False)) if sizes else found
    )
    name = _family([first, second], family)
    a, b = _complete(first, second, name, versions), _complete(second, first, name, versions)
    if a.version == b.version:  # of one plan and two sources only the source is to differ
        a, b = replace(a, block=a.block or b.block), replace(b, block=b.block or a.block)
    return a, b


def labels(sides: Sequence[Side], blocks: Sequence[int], params: Sequence[Mapping[str, int]]) -> tuple[str, str]:
    """What to call the two: with their block sizes where these tell them apart or were asked for, and with the values
    of the parameters that a side names. blocks, params: what each runs at, the defaults among them."""
    sized = sides[0].name == sides[1].name or any(side.block is not None for side in sides)
    named = {name for side in sides for name in side.params}
    first, second = (
        side.at(block if sized else None, {name: value for name, value in chosen.items() if name in named})
        for side, block, chosen in zip(sides, blocks, params, strict=True)
    )
    return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def shortened(label: str, before: str) -> str:
    """ ":5" of "layernorm_forward:5" in a sentence that has named "layernorm_forward:6" already."""
    family, colon, rest = label.partition(":")
    return colon + rest if colon and before.startswith(family + colon) else label


def _parse_word(word: str, versions: Sequence[int]) -> list[_Word]:
    text, at, place = word.rpartition("@")
    if not at or word.endswith(_SUFFIX) or "/" in place or "\\" in place:  # the @ of a file or of its folder
        text, at = word, ""
    block, params = parse_place(place) if at else (None, {})
    if text.endswith(_SUFFIX):
        if not Path(text).is_file():
            raise UsageError(f"there is no file {text}", SIDES_FORM)
        return [_Word(block=block, file=text, params=params)]
    if "/" in text or "\\" in text:
        raise UsageError(f"{word!r} is neither FAMILY:VERSION nor a .cu file", SIDES_FORM)
    target = parse_targets([text])[0]
    chosen = target.versions or versions
    numbers = chosen or (None,)
    return [_Word(target.family, number, block, params=params) for number in numbers]


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
        return Side(family, side.version, side.block, params=side.params)
    if not side.file:
        raise UsageError(f"{side.family!r} names no version", SIDES_FORM)
    path = Path(side.file)
    if path.name.startswith(f"{family}.") and path.stem != family and path.with_suffix(".py").is_file():
        what = f"{side.file} adds versions of its own to {family}, in {path.stem}.py"
        raise UsageError(what, f"compare them by number: --family-dir {path.parent}")
    known = list(versions) or ([other.version] if other.version is not None else [])
    if len(known) != 1:
        raise UsageError(f"which version's plan is to launch the kernels of {side.file}?", "give --version N")
    return Side(family, known[0], side.block, side.file, side.params)
