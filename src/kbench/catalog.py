"""Finding and loading families: pairs of `NAME.cu` and `NAME.py`, and `NAME.EXTRA.cu` + `.py` that add versions."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kbench.errors import KbenchError, UsageError
from kbench.family import DTYPES, Family, Problem, Version
from kbench.source import fingerprint

_PAIR = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\.(?P<extra>\w+))?\.py")


def kernel_folder() -> Path:
    """kbench's own families: inside an installed wheel, else at the top of the source tree."""
    package = Path(__file__).resolve().parent
    installed = package / "dev_kernels"
    return installed if installed.is_dir() else package.parents[1] / "dev_kernels"


@dataclass(frozen=True)
class _Files:
    main: Path | None = None
    extras: tuple[Path, ...] = ()


class Catalog(Mapping[str, Family]):
    """Families by name, loaded when they are asked for: one broken file does not hide the others."""

    def __init__(self, folders: Sequence[Path]):
        self.folders = tuple(folders)
        self._files = _scan(self.folders)
        self._loaded: dict[str, Family] = {}
        self._fingerprints: dict[tuple[str, int], str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._files))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> Family:
        """The family of this name. Raises UsageError, suggesting the nearest name, or naming the broken file."""
        if name not in self._files:
            raise UsageError(f"unknown family {name!r}", self._hint(name))
        if name not in self._loaded:
            self._loaded[name] = _load_family(name, self._files[name])
        return self._loaded[name]

    def _hint(self, name: str) -> str:
        for folder in self.folders:
            there = [half for half in (folder / f"{name}.cu", folder / f"{name}.py") if half.is_file()]
            if len(there) == 2:  # not a family although it is a pair: its name has a dot
                family = name.partition(".")[0]
                return f"{shown(there[0])} adds versions to {family}: name that"
            if there:
                other = ".py" if there[0].suffix == ".cu" else ".cu"
                return f"{shown(there[0])} is there, but a family needs {name}{other} beside it"
            if next(folder.glob(f"{name}.*.cu"), None):
                return f"{shown(folder)} only adds versions to it; the family's own {name}.cu and {name}.py are missing"
        near = difflib.get_close_matches(name, self.names, n=1)
        if near:
            return f"did you mean {near[0]}?"
        return f"families: {', '.join(self.names) or 'none'}; --family-dir DIR adds a folder of your own"

    def fingerprint(self, family: str, number: int) -> str:
        """What a version and its family's contract are in their files, as one text (`kbench.source.fingerprint`)."""
        key = (family, number)
        if key not in self._fingerprints:
            sources = self[family].sources
            paths = dict.fromkeys((sources[number], sources[min(sources)]))
            self._fingerprints[key] = "+".join(fingerprint(Path(path), (kernel_folder(),)) for path in paths)
        return self._fingerprints[key]

    def version(self, family: str, number: int) -> Version:
        """Raises UsageError, listing the versions, if the family lacks this one."""
        found = self[family]
        if number not in found.by_number:
            have = ", ".join(str(version.number) for version in found.versions)
            raise UsageError(f"{family} has no version {number}", f"it has {have}")
        return found.by_number[number]


def load_catalog(folders: Sequence[Path] = ()) -> Catalog:
    """All families of kbench and of `folders`, whose families win over kbench's of the same name."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"family folder {folder} is not a folder")
    return Catalog((kernel_folder(), *(folder.resolve() for folder in folders)))


def _scan(folders: Sequence[Path]) -> dict[str, _Files]:
    found: dict[str, _Files] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            match = _PAIR.fullmatch(path.name)
            if match is None or not path.with_suffix(".cu").is_file():
                continue
            name, entry = match["name"], found.get(match["name"], _Files())
            found[name] = replace(entry, extras=(*entry.extras, path)) if match["extra"] else replace(entry, main=path)
    return {name: files for name, files in found.items() if files.main is not None}


def _load_family(name: str, files: _Files) -> Family:
    assert files.main is not None
    family = _only_family(_load_module(files.main), files.main)
    if family.name != name:
        raise UsageError(f"{files.main.name}: the family is named {family.name!r}, the file {name!r}; they must agree")
    sources = {version.number: str(files.main.with_suffix(".cu")) for version in family.versions}
    versions = list(family.versions)
    for path in files.extras:
        for version in _extra_versions(_load_module(path), path):
            if version.number in sources:
                raise UsageError(
                    f"{path.name}: version {version.number} of {name} exists already; choose another number"
                )
            sources[version.number] = str(path.with_suffix(".cu"))
            versions.append(version)
    versions.sort(key=lambda version: version.number)
    family = replace(family, versions=tuple(versions), sources=sources)
    _validate(family, files.main)
    return family


def _load_module(path: Path) -> ModuleType:
    # The name keeps two folders' files apart; the folder is not put on sys.path, a family stands alone.
    name = f"kbench_families.{path.stem.replace('.', '_')}_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except KbenchError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{describe_fault(error, path)}") from error
    return module


def shown(path: Path) -> str:
    """A path as a user would type it here: relative where it lies below the current folder."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def describe_fault(error: BaseException, path: Path) -> str:
    """One line for an exception raised by a family file: file, line, kind and message."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{shown(path)}:{error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{shown(path)}:{lines[-1]}" if lines else shown(path)
    return f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"


def _only_family(module: ModuleType, path: Path) -> Family:
    families = _objects(module, Family)
    if len(families) != 1:
        raise UsageError(f"{path.name} must define exactly one Family, it defines {len(families)}")
    return families[0]


def _extra_versions(module: ModuleType, path: Path) -> tuple[Version, ...]:
    versions = getattr(module, "versions", None)
    if not isinstance(versions, tuple | list) or not all(isinstance(version, Version) for version in versions):
        raise UsageError(f"{path.name} must define `versions`, a tuple of Version")
    return tuple(versions)


def _objects(module: ModuleType, kind: type) -> list[Any]:
    return [value for value in vars(module).values() if isinstance(value, kind)]


def _validate(family: Family, path: Path) -> None:
    """Raise UsageError for a contract that cannot be used, naming the file."""
    numbers = [version.number for version in family.versions]
    if not numbers:
        raise UsageError(f"{path.name}: the family has no versions")
    if len(set(numbers)) != len(numbers):
        raise UsageError(f"{path.name}: version numbers {numbers} are not unique")
    for preset in ("default", "small"):
        if preset not in family.presets:
            raise UsageError(f"{path.name}: the presets must include {preset!r}")
    strange = sorted({*family.dtypes, *(d for version in family.versions for d in version.dtypes)} - set(DTYPES))
    if strange or not family.dtypes:
        raise UsageError(f"{path.name}: dtypes {strange or 'missing'}; a family has some of {', '.join(DTYPES)}")
    shapes = [*family.presets.values(), *(shape.sizes for shape in family.check_shapes)]
    for sizes in shapes:
        if set(sizes) != set(family.sizes):
            raise UsageError(f"{path.name}: sizes {dict(sizes)} do not name exactly {', '.join(family.sizes)}")
        for rule in family.rules:
            try:
                holds = rule.holds(Problem(sizes, family.dtypes[0]))
            except Exception as error:
                raise UsageError(f"the rule {rule.text!r} fails: {describe_fault(error, path)}") from error
            if not holds:
                raise UsageError(f"{path.name}: sizes {dict(sizes)} break the rule '{rule.text}'")
    for version in family.versions:
        unknown = set(version.dtypes) - set(family.dtypes)
        if unknown:
            raise UsageError(f"{path.name}: version {version.number} has dtypes that the family lacks: {unknown}")
        for name in version.params:
            if name in family.sizes:  # tables have a column for each
                what = f"version {version.number} has a parameter {name}, which is a size of the family"
                raise UsageError(f"{path.name}: {what}", "give it another name")
