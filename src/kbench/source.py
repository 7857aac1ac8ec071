"""A `.cu` with everything it includes: found, hashed, and asked which kernels it defines."""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kbench.errors import UsageError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_LAUNCH_BOUNDS = r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*"
_KERNEL = re.compile(rf"__global__\s+(?:[\w:]+(?:\s*\([^;{{]*?\))?\s+)*?void\s+(?:{_LAUNCH_BOUNDS})?(\w+)\s*\(")


@dataclass(frozen=True)
class Source:
    """Device code of one or more versions.

    path: the `.cu`. text: what it holds. includes: files that it includes by quotes, found beside it or in
    kbench's own dev_kernels, as (name, path, text). digest: changes when any of them changes.
    """

    path: Path
    text: str
    includes: tuple[tuple[str, Path, str], ...]

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, text in (("", self.text), *((name, text) for name, _, text in self.includes)):
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the compiler has to look for quoted includes."""
        return tuple(dict.fromkeys((self.path.parent, *(path.parent for _, path, _ in self.includes))))

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the `__global__` functions defined here, templates without their arguments."""
        texts = (self.text, *(text for _, _, text in self.includes))
        return tuple(dict.fromkeys(name for text in texts for name in _KERNEL.findall(_strip_comments(text))))

    def lacks(self, kernels: Iterable[str]) -> str:
        """A message naming the first of `kernels` that is not found here; "" if all are.

        It sees a kernel only where `__global__ ... void name(` stands in the text: one that a macro defines is for the
        compiler to find. So this explains why a kernel did not compile, and forbids none.
        """
        for kernel in kernels:
            if "(" in kernel.split("<")[0] or "_cast<" in kernel:
                continue  # a cast that picks one of several overloads: the compiler judges it
            base = base_name(kernel)
            if base not in self.kernels:
                near = difflib.get_close_matches(base, self.kernels, n=1)
                known = f"did you mean {near[0]}?" if near else f"it has {', '.join(self.kernels) or 'none'}"
                return f"{self.path.name} has no kernel `{base}`, which the plan names as `{kernel}`: {known}"
        return ""

    def no_kernel(self, kernels: Iterable[str]) -> str:
        """A message naming the first of `kernels` that is a `__device__` function here; "" if none is."""
        text = "\n".join(_strip_comments(text) for text in (self.text, *(text for _, _, text in self.includes)))
        for kernel in kernels:
            base = base_name(kernel)
            if base not in self.kernels and re.search(rf"__device__[^;{{}}()=#]*\b{re.escape(base)}\s*\(", text):
                return f"{self.path.name}: `{kernel}`, which the plan names, is a __device__ function and no kernel"
        return ""


def fingerprint(path: Path, include_folders: Iterable[Path] = ()) -> str:
    """A hash of what the versions in a `.cu` do: its code, that of its includes, and of the `.py` beside it, without
    comments and layout. Times and proofs hold as long as it stays the same. Raises UsageError as `load_source`."""
    source = load_source(path, include_folders)
    digest = hashlib.sha256()
    for text in (source.text, *(text for _, _, text in source.includes)):
        digest.update(" ".join(_strip_comments(text).split()).encode())
    try:
        digest.update(ast.dump(ast.parse(_read(path.with_suffix(".py")))).encode())
    except SyntaxError as error:
        raise UsageError(f"{path.with_suffix('.py')}, line {error.lineno}: {error.msg}") from error
    return digest.hexdigest()


def kernel_line(text: str, kernel: str) -> int:
    """The line, from 1, on which a kernel is defined in the text of a `.cu`; 0 where no definition is seen."""
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL)
    wanted = base_name(kernel)
    return next((bare.count("\n", 0, found.start(1)) + 1 for found in _KERNEL.finditer(bare) if found[1] == wanted), 0)


def base_name(kernel: str) -> str:
    """`k` of the name expression `n::k<float, 32>`."""
    return kernel.split("<")[0].split("::")[-1].strip()


def load_source(path: Path, include_folders: Iterable[Path] = ()) -> Source:
    """Read a `.cu` and, recursively, what it includes by quotes.

    Raises UsageError if the file cannot be read. An include that is found nowhere is left to the compiler,
    whose message names the line.
    """
    text = _read(path)
    folders = (path.parent, *include_folders)
    includes: dict[str, tuple[str, Path, str]] = {}
    waiting = _INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if name in includes or found is None:
            continue
        includes[name] = (name, found, _read(found))
        waiting += _INCLUDE.findall(includes[name][2])
    return Source(path, text, tuple(sorted(includes.values())))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _strip_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
