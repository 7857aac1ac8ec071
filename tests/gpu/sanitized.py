"""Check versions of a family in this very process: what compute-sanitizer runs (see test_sanitizer.py).

    python3 sanitized.py FAMILY SIZE=N,... BLOCK,... [VERSION] [FAMILY_FOLDER]

kbench itself works in a child process that ends abruptly, before the sanitizer has summed up.
"""

import sys
from pathlib import Path

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import make_case
from kbench.check.prove import prove
from kbench.device.cuda.device import CudaDevice
from kbench.family import Problem, kernels_of
from kbench.source import load_source


def main(name: str, sizes: str, blocks: str, only: str = "", folder: str = "") -> None:
    device = CudaDevice()
    family = load_catalog([Path(folder)] if folder else [])[name]
    problem = Problem({size: int(value) for size, value in (word.split("=") for word in sizes.split(","))}, "fp32")
    case = make_case(family, problem, seed=1)
    for version in [family.by_number[int(only)]] if only else family.versions:
        source = load_source(Path(family.sources[version.number]), (kernel_folder(),))
        for block in map(int, blocks.split(",")):
            if family.refusal(version, problem, block):
                continue
            plan = version.plan(problem, block, device.props)
            module = device.build(source, kernels_of(plan))
            prepared = device.prepare(plan, module, family.tensors(problem))
            with Buffers(device, family, version, problem, block, plan) as buffers:
                verdict = prove(device, family, version, prepared, buffers, case, repeats=1)
            print(
                f"version {version.number} block {block}: {'pass' if verdict.passed else verdict.reason()}", flush=True
            )
    device.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
