"""`kbench list`: the families, or one family's versions with the idea of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kbench.catalog import load_catalog
from kbench.cli import options as o
from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.errors import Exit, KbenchError
from kbench.family import Family, Param, Version
from kbench.grammar import parse_targets

EXAMPLES = ("kbench list", "kbench list attention_backward", "kbench list attention_backward:5 --json")


def list_(
    target: o.OptionalTargetArgument = None,
    version: o.VersionsOption = None,
    family_dir: o.FamilyDirOption = None,
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Show the families; of one family its versions, with the idea of each, dtypes, block sizes and rules.

    TARGET is FAMILY, or FAMILY:VERSIONS such as attention_backward:5. Without one, all families are shown.
    """
    screen = Screen(json)
    catalog = load_catalog(family_dir or ())
    if target is None:
        return _all(catalog, screen)
    wanted = parse_targets([target], version)[0]
    family = catalog[wanted.family]
    numbers = wanted.versions or tuple(family.by_number)
    versions = [catalog.version(family.name, number) for number in numbers]
    screen.document("list", {"family": _contract(family), "versions": [_version(v) for v in versions]})
    _show(family, versions, screen)
    return int(Exit.OK)


def _all(catalog: Mapping[str, Family], screen: Screen) -> int:
    families, faults = [], []
    for name in catalog:
        try:
            families.append(catalog[name])
        except KbenchError as error:  # a broken file hides no other family
            faults.append(error)
    screen.document("list", {"families": [_contract(family) for family in families], "faults": list(map(str, faults))})
    columns = [
        Column("family"),
        Column("versions", "right", short="ver"),
        Column("dtypes", drop=1),
        Column("what it computes", flexible=True),
    ]
    screen.table(columns, [[f.name, str(len(f.versions)), " ".join(f.dtypes), f.summary] for f in families])
    for fault in faults:
        screen.note(f"left out: {fault}")
    return int(Exit.USAGE if faults else Exit.OK)


def _show(family: Family, versions: list[Version], screen: Screen) -> None:
    screen.prose(f"{family.name}: {family.summary}", rest="  ")
    screen.say()
    screen.prose(", ".join(f"{name} ({meaning})" for name, meaning in family.sizes.items()), "sizes: ")
    for name, sizes in family.presets.items():
        screen.prose(" ".join(f"{size}={value}" for size, value in sizes.items()), f"preset {name}: ")
    screen.prose(f"{', '.join(family.dtypes)} ({family.dtypes[0]} if none is named)", "dtypes: ")
    if family.flags:
        screen.prose(f"{', '.join(family.flags)} (0 or 1)", "flags: ")
    for rule in family.rules:
        screen.prose(rule.text, "rule: ")
    screen.say()
    columns = [Column("ver", "right"), Column("idea", flexible=True), Column("blocks"), Column("det")]
    lines = [[str(v.number), _idea(v), _blocks(v), "yes" if v.claims_deterministic else "no"] for v in versions]
    if any(set(v.dtypes) != set(family.dtypes) for v in versions):
        columns.insert(2, Column("dtypes", drop=1))
        for line, version in zip(lines, versions, strict=True):
            line.insert(2, " ".join(version.dtypes))
    screen.table(columns, lines)
    screen.prose("the same bits at every launch; `kbench check` proves it", "det: ")


def _idea(version: Version) -> str:
    notes = [f"needs {rule.text}" for rule in version.rules]
    notes += [_param(name, param) for name, param in version.params.items()]
    notes += [f"only on a GPU: {version.gpu_only}"] if version.gpu_only else []
    notes += [f"compiled for {version.arch}"] if version.arch else []
    return "; ".join([version.idea, *notes])


def _param(name: str, param: Param) -> str:
    """Such as "parameter PACKETS=2 of 1,2,4 (packets of a thread)": the default, and all values."""
    meaning = f" ({param.meaning})" if param.meaning else ""
    return f"parameter {name}={param.default} of {','.join(map(str, param.values))}{meaning}"


def _blocks(version: Version) -> str:
    """Block sizes in the notation that --block-sizes reads, where it is shorter."""
    if version.fixed is not None:
        return f"{version.fixed} (fixed)"
    blocks = version.block_sizes
    doubled = [blocks[0] << step for step in range(len(blocks))]
    if len(blocks) > 2 and list(blocks) == doubled and blocks[0].bit_count() == 1:
        return f"{blocks[0]}..{blocks[-1]}"
    return ",".join(map(str, blocks))


def _contract(family: Family) -> dict[str, Any]:
    return {
        "name": family.name,
        "summary": family.summary,
        "sizes": dict(family.sizes),
        "dtypes": list(family.dtypes),
        "presets": {name: dict(sizes) for name, sizes in family.presets.items()},
        "flags": list(family.flags),
        "rules": [rule.text for rule in family.rules],
        "check_shapes": [{"sizes": dict(shape.sizes), "why": shape.why} for shape in family.check_shapes],
        "versions": [version.number for version in family.versions],
    }


def _version(version: Version) -> dict[str, Any]:
    return {
        "number": version.number,
        "idea": version.idea,
        "dtypes": list(version.dtypes),
        "block_sizes": list(version.blocks),
        "fixed": version.fixed is not None,
        "params": {name: asdict(param) for name, param in version.params.items()},
        "rules": [rule.text for rule in version.rules],
        "needs": list(version.needs),
        "saves": list(version.saves),
        "deterministic": version.claims_deterministic,
        "gpu_only": version.gpu_only,
        "arch": version.arch,
    }
