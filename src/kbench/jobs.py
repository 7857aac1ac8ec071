"""A row that is still to be evaluated."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from kbench.params import place_text


@dataclass(frozen=True)
class Job:
    """One row to be. purpose: "check" proves, on patterned inputs too; "prove" proves; "time" proves, and times where
    the device is a GPU. source: `kbench.source.fingerprint` of the version's files, "" where they cannot be read."""

    family: str
    version: int
    idea: str
    sizes: dict[str, int]
    dtype: str
    block: int
    purpose: str = "time"
    params: dict[str, int] = field(default_factory=dict)
    source: str = ""

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, self.params)

    def command(self, seed: int, device: str, family_dirs: Sequence[str], options: Sequence[str] = ()) -> str:
        """The command line that repeats this job on the same inputs. options: further words, such as --rtol."""
        check = self.purpose == "check"
        words = ["kbench", "check" if check else "run", self.family, "--version", str(self.version)]
        for name, size in self.sizes.items():
            words += ["--size", f"{name}={size}"]
        words += [
            "--block-sizes" if check else "--block-size",
            str(self.block),
            *(word for name, value in self.params.items() for word in ("--param", f"{name}={value}")),
            "--dtype",
            self.dtype,
            "--seed",
            str(seed),
            "--device",
            device,
        ]
        for folder in family_dirs:
            words += ["--family-dir", folder]
        return shlex.join([*words, *options])
