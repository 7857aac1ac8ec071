"""What the compilers make of a version, as plain data that one run can be compared with another by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.catalog import Catalog
from kbench.errors import UsageError
from kbench.family import Problem
from kbench.inspect.examine import Examined, Inspection, examine
from kbench.inspect.nvdisasm import DisassemblyError, find_nvdisasm


def static_facts(
    catalog: Catalog,
    name: str,
    number: int,
    dtype: str,
    block: int,
    arch: str | None = None,
    sizes: Mapping[str, int] | None = None,
    params: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """{"arch": ..., "compiler": ..., "kernels": {kernel: facts}} of one version at one block size, without a GPU.

    arch: "sm_90"; None takes the one that the version needs, or the usual one. sizes: of the problem, the family's
    preset "default" if left out; grids and dynamic shared memory follow from them. params: the version's defaults if
    left out.
    Facts of a kernel: registers; spill_bytes, stack_bytes (a thread); static_shared, dynamic_shared (a block, the most
    of all launches); blocks_per_multiprocessor, occupancy (the least of all launches); launches; ptx, sass:
    instructions by class, and sass None where there is no nvdisasm that knows the architecture.
    Raises UsageError where the version refuses the problem or the block size, else as `examine` does.
    """
    problem = Problem(dict(sizes if sizes is not None else catalog[name].presets["default"]), dtype)
    found = _examined(catalog, name, number, problem, block, arch, params)
    if found.refused:
        raise UsageError(f"{name} version {number} refuses this: {found.refused[block]}")
    return {"arch": found.arch, "compiler": found.compiler, "kernels": kernel_facts(found)}


def kernel_facts(found: Inspection) -> dict[str, dict[str, Any]]:
    """The facts of each kernel, by its name expression; see `static_facts`."""
    by_kernel: dict[str, list[Examined]] = {}
    for each in found.kernels:
        by_kernel.setdefault(each.launch.kernel, []).append(each)
    return {kernel: _facts(found, kernel, launches) for kernel, launches in by_kernel.items()}


def _examined(
    catalog: Catalog,
    name: str,
    number: int,
    problem: Problem,
    block: int,
    arch: str | None,
    params: Mapping[str, int] | None,
) -> Inspection:
    try:
        return examine(catalog, name, number, problem, [block], arch, params, nvdisasm=find_nvdisasm())
    except DisassemblyError:
        return examine(catalog, name, number, problem, [block], arch, params)


def _facts(found: Inspection, kernel: str, launches: list[Examined]) -> dict[str, Any]:
    info = launches[0].info
    code = found.machine_code
    return {
        "registers": info.registers,
        "spill_bytes": info.spill_bytes,
        "stack_bytes": info.local_bytes,
        "static_shared": info.static_shared,
        "dynamic_shared": max(each.launch.shared for each in launches),
        "blocks_per_multiprocessor": min(each.occupancy.blocks for each in launches),
        "occupancy": min(each.occupancy.share for each in launches),
        "launches": sum(each.times for each in launches),
        "ptx": dict(found.mixes[kernel]),
        "sass": dict(code.mixes[kernel]) if code is not None else None,
    }
