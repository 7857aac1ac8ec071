"""Check versions of families in this very process: what compute-sanitizer runs (see test_sanitizer.py).

    python3 sanitized.py FAMILY,... [--version N] [--folder FAMILY_FOLDER] [--shared-only]

kbench itself works in a child process that ends abruptly, before the sanitizer has summed up. Each version runs at one
odd check shape, in the family's default dtype at its smallest, middle and largest block, and in a 16-bit one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import make_case
from kbench.check.prove import prove
from kbench.device.cuda.device import CudaDevice
from kbench.errors import GpusMissing, LibraryMissing
from kbench.family import Family, Problem, Version, kernels_of
from kbench.source import load_source

# Every access of a thread takes the sanitizer about a microsecond.
MOST_ELEMENTS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families")
    parser.add_argument("--version", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shared-only", action="store_true", help="only versions whose kernels use shared memory")
    options = parser.parse_args()
    device = CudaDevice()
    catalog = load_catalog([options.folder] if options.folder else [])
    for name in options.families.split(","):
        family = catalog[name]
        for version in family.versions:
            if options.version in (None, version.number):
                for problem, block in jobs(family, version):
                    said = proved(device, family, version, problem, block, options.shared_only)
                    print(f"{name}:{version.number} {problem.dtype} block {block}: {said}", flush=True)
    device.close()


def jobs(family: Family, version: Version) -> Iterator[tuple[Problem, int]]:
    default = next(dtype for dtype in family.dtypes if dtype in version.dtypes)
    narrow = [dtype for dtype in ("bf16", "fp16") if dtype in version.dtypes and dtype != default]
    for dtype in (default, *narrow[:1]):
        problem = odd_problem(family, version, dtype)
        taken = [block for block in version.blocks if not family.refusal(version, problem, block)]
        few = dict.fromkeys((taken[0], taken[len(taken) // 2], taken[-1]) if dtype == default else (taken[-1],))
        yield from ((problem, block) for block in few)


def odd_problem(family: Family, version: Version, dtype: str) -> Problem:
    """The check shape with most elements that is small enough and open to all of the version's blocks; oddest first."""
    open_to_all = [
        shape
        for shape in family.check_shapes
        if shape.versions is None and shape.block_sizes is None
        and not family.refusal(version, Problem(shape.sizes, dtype), version.blocks[0])
    ]  # fmt: skip

    def rank(problem: Problem) -> tuple[int, int]:
        elements = sum(tensor.count for tensor in family.tensors(problem))
        odd = sum(size % 2 for size in problem.sizes.values())
        return (odd, elements) if elements <= MOST_ELEMENTS else (-1, -elements)

    return max((Problem(shape.sizes, dtype) for shape in open_to_all), key=rank)


def proved(device: Any, family: Family, version: Version, problem: Problem, block: int, shared_only: bool) -> str:
    plan = version.plan(problem, block, device.props)
    scratch = version.scratch(problem, block, device.props) if version.scratch is not None else ()
    kernels = kernels_of(plan)
    source = load_source(Path(family.sources[version.number]), (kernel_folder(),))
    module = device.build(source, kernels) if kernels else None
    try:
        prepared = device.prepare(plan, module, (*family.tensors(problem), *scratch))
    except (GpusMissing, LibraryMissing) as missing:
        return f"skipped: {missing}"
    dynamic = any(getattr(step, "shared", 0) for step in plan)
    if shared_only and not dynamic and not any(info.static_shared for info in prepared.infos):
        return "skipped: no shared memory"
    case = make_case(family, problem, seed=1)
    with Buffers(device, family, version, problem, block, plan) as buffers:
        verdict = prove(device, family, version, prepared, buffers, case, repeats=1)
    return "pass" if verdict.passed else verdict.reason()


if __name__ == "__main__":
    main()
