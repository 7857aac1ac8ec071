"""Every kernel that a plan of kbench's own families names compiles, for every architecture that is supported."""

from __future__ import annotations

import importlib.util
import itertools
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.family import Family, Launch, Problem, Props, Version
from kbench.params import combinations
from kbench.source import load_source

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
CATALOG = load_catalog()
VERSIONS = [
    pytest.param(name, version.number, id=f"{name}:{version.number}")
    for name in CATALOG.names
    for version in CATALOG[name].versions
]
PROPS = Props("any GPU", "sm_90", 132, 2048, 1024, 48 << 10, 227 << 10, 228 << 10, 65536, 50 << 20, 80 << 30)
has_nvrtc = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


# The same for every GPU from sm_80 to sm_100: registers of a multiprocessor, handed out to warps in lots of 256.
REGISTERS, LOT = 65536, 256


def kernels(family: Family, version: Version, choices: Sequence[Mapping[str, int]] = ({},)) -> dict[str, int]:
    """Over all presets, check shapes, dtypes and block sizes that the version takes: kernels, and the largest block
    that each is launched with. choices: of its parameters."""
    threads: dict[str, int] = {}
    for sizes in [*family.presets.values(), *(shape.sizes for shape in family.check_shapes)]:
        for dtype, block, params in itertools.product(version.dtypes, version.blocks, choices):
            problem = Problem(sizes, dtype)
            if not family.refusal(version, problem, block, params):
                for step in version.plan(problem, block, PROPS, **params):
                    if isinstance(step, Launch):
                        threads[step.kernel] = max(threads.get(step.kernel, 0), math.prod(step.block))
    return threads


@pytest.mark.skipif(not has_nvrtc, reason="cuda-bindings, and with it NVRTC, is not installed")
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name, number", VERSIONS)
def test_every_kernel_compiles(name: str, number: int, arch: str) -> None:
    from kbench.device.cuda.compile import compile_cubin, nvrtc_version

    family = CATALOG[name]
    version = family.by_number[number]
    if version.arch and version.arch.rstrip("af") != arch:
        pytest.skip(f"it is for {version.arch} only")
    # Other values of parameters are tried where somebody tunes; that they compile is seen on one architecture.
    whole = arch == "sm_90"
    wanted = kernels(family, version, combinations(version.params, {}, whole))
    cubin = compile_cubin(load_source(Path(family.sources[number]), (kernel_folder(),)), wanted, version.arch or arch)
    assert set(cubin.infos) == set(wanted)
    for kernel, info in cubin.infos.items():
        assert info.registers is not None and 0 < info.registers <= 255, kernel
        of_warp = -(-info.registers * 32 // LOT) * LOT
        warps = -(-wanted[kernel] // 32)
        assert warps * of_warp <= REGISTERS, f"{kernel} cannot be launched: {info.registers} registers, {warps} warps"
        assert info.max_threads is None or wanted[kernel] <= info.max_threads, kernel
        # CUDA 12.9 hands out registers otherwise, and spills some bytes of two kernels on sm_100.
        spills = info.spill_bytes if nvrtc_version() >= (13, 0) else 0
        assert not spills, f"{kernel} spills {spills} bytes of registers"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
@pytest.mark.parametrize("name", CATALOG.names)
def test_the_source_compiles_alone_with_nvcc(name: str, tmp_path: Path) -> None:
    for source in sorted(set(CATALOG[name].sources.values())):
        command = [
            "nvcc",
            "-std=c++17",
            "-arch=sm_90",
            "-Werror",
            "all-warnings",
            "-c",
            source,
            "-o",
            str(tmp_path / "out.o"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
