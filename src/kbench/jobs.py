"""A row that is still to be evaluated."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kbench.params import place_text


@dataclass(frozen=True)
class Job:
    """One row to be. purpose: "check" proves, on patterned inputs too; "prove" proves; "time" proves, and times where
    the device is a GPU. source: `kbench.source.fingerprint` of the version's files, "" where they cannot be read.
    arch: what to compile for where nothing is run, "sm_90"; "" for what the device is. block: 0 stands for a family
    that cannot be loaded, of which nothing else is known."""

    family: str
    version: int
    idea: str
    sizes: dict[str, int]
    dtype: str
    block: int
    purpose: str = "time"
    params: dict[str, int] = field(default_factory=dict)
    source: str = ""
    arch: str = ""

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, self.params)

    def command(self, seed: int, device: str, family_dirs: Sequence[str], options: Sequence[str] = ()) -> str:
        """The command line that repeats this job on the same inputs. options: further words, such as --rtol."""
        check = self.purpose == "check"
        words = [*self._words("check" if check else "run", "--block-sizes" if check else "--block-size")]
        if not self.block:
            return _line(words, family_dirs, ())
        words += ["--seed", str(seed), "--device", device]
        return _line(words, family_dirs, options)

    def inspecting(self, family_dirs: Sequence[str], options: Sequence[str]) -> str:
        """The command line that shows what is known of this job without running it on a GPU. options: such as
        --counts."""
        return _line([*self._words("inspect", "--block-sizes")], family_dirs, options if self.block else ())

    def _words(self, command: str, block: str) -> Iterator[str]:
        """A command and what tells this job from others. block: the option's name there."""
        if not self.block:
            yield from ("kbench", "list", self.family)  # says what is wrong, too
            return
        yield from ("kbench", command, self.family, "--version", str(self.version))
        for name, size in self.sizes.items():
            yield from ("--size", f"{name}={size}")
        yield from (block, str(self.block))
        for name, value in self.params.items():
            yield from ("--param", f"{name}={value}")
        yield from ("--dtype", self.dtype)


def _line(words: Sequence[str], family_dirs: Sequence[str], options: Sequence[str]) -> str:
    folders = [word for folder in family_dirs for word in ("--family-dir", folder)]
    return shlex.join([*words, *folders, *options])
