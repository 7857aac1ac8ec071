"""How many blocks fit: known cases, the nearest cliffs, and CUDA's own calculator where it is installed."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kbench.device.cuda.compile import nvrtc_version
from kbench.device.cuda.headers import cuda_headers
from kbench.device.emulator.compiler import find_compiler
from kbench.errors import CannotRunError, UsageError
from kbench.inspect.architectures import ARCHITECTURES, architecture_of
from kbench.inspect.occupancy import Usage, cliffs, occupancy


def blocks(arch: str, threads: int, registers: int, shared: int = 0) -> int:
    return occupancy(Usage(threads, registers, shared), ARCHITECTURES[arch]).blocks


# By hand: a warp's registers in lots of 256, as many warps in each of four partitions as 16,384 registers give.
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("registers", "expected"), [(32, 8), (33, 6), (40, 6), (64, 4), (65, 3), (128, 2), (255, 1)])
def test_256_threads_by_registers(arch: str, registers: int, expected: int) -> None:
    found = occupancy(Usage(256, registers), ARCHITECTURES[arch])
    assert (found.blocks, found.warps, found.share) == (expected, 8 * expected, expected / 8)
    assert found.limiters == (("threads", "registers") if registers == 32 else ("registers",))


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected", "limiters"),
    [
        ("sm_80", 256, 32, 48 << 10, 3, ("shared memory",)),  # 3 x 49 of 164 KiB
        ("sm_86", 256, 32, 48 << 10, 2, ("shared memory",)),
        ("sm_90", 256, 32, 48 << 10, 4, ("shared memory",)),
        ("sm_90", 1024, 32, 113 << 10, 2, ("threads", "registers", "shared memory")),
        ("sm_90", 1024, 32, (113 << 10) + 1, 1, ("shared memory",)),
        ("sm_90", 128, 16, 227 << 10, 1, ("shared memory",)),
        ("sm_90", 128, 16, (227 << 10) + 1, 0, ("shared memory",)),
        ("sm_86", 32, 16, 0, 16, ("blocks",)),
        ("sm_89", 32, 16, 0, 24, ("blocks",)),
        ("sm_90", 32, 16, 0, 32, ("blocks",)),
        ("sm_86", 256, 32, 0, 6, ("threads",)),  # 48 warps
        ("sm_120", 1024, 32, 0, 1, ("threads",)),
        ("sm_90", 33, 32, 0, 32, ("threads", "blocks", "registers")),  # two warps
        ("sm_90", 1024, 65, 0, 0, ("registers",)),
    ],
)
def test_what_limits(
    arch: str, threads: int, registers: int, shared: int, expected: int, limiters: tuple[str, ...]
) -> None:
    found = occupancy(Usage(threads, registers, shared), ARCHITECTURES[arch])
    assert (found.blocks, found.limiters) == (expected, limiters)


def test_more_threads_than_the_kernel_was_compiled_for_do_not_launch() -> None:
    found = occupancy(Usage(512, 32, max_threads=256), ARCHITECTURES["sm_90"])
    assert (found.blocks, found.share, found.limiters) == (0, 0.0, ("threads",))


def changes(usage: Usage, arch: str) -> dict[tuple[str, bool], tuple[int, int]]:
    """Resource, and whether there is less of it: the change, and the blocks that it leads to."""
    return {
        (cliff.resource, cliff.change < 0): (cliff.change, cliff.occupancy.blocks)
        for cliff in cliffs(usage, ARCHITECTURES[arch])
    }


def test_four_registers_fewer_give_one_more_block() -> None:
    assert blocks("sm_90", 256, 44) == 5
    found = changes(Usage(256, 44), "sm_90")
    assert found["registers", True] == (-4, 6) and found["registers", False] == (5, 4)


def test_bytes_of_shared_memory_that_give_one_more_block() -> None:
    found = changes(
        Usage(128, 32, 58_000), "sm_90"
    )  # three blocks; four leave 57 KiB to each, one of them the system's
    assert found["shared memory", True] == (57_344 - 58_000, 4)
    assert found["shared memory", False] == (76 * 1024 - 1024 + 1 - 58_000, 2)
    assert ("registers", True) not in found


def test_where_two_resources_limit_neither_alone_helps() -> None:
    assert not any(less for _, less in changes(Usage(1024, 32, 113 << 10), "sm_90"))


def test_what_cannot_be_launched_has_only_gains() -> None:
    assert changes(Usage(1024, 70), "sm_90") == {("registers", True): (-6, 1)}


def test_cliffs_are_the_nearest() -> None:
    rng = random.Random(1)
    seen = 0
    for _ in range(200):
        architecture = rng.choice(list(ARCHITECTURES.values()))
        usage = Usage(32 * rng.randint(1, 32), rng.randint(16, 255), rng.choice((0, rng.randint(1, 100_000))))
        now = occupancy(usage, architecture).blocks
        for cliff in cliffs(usage, architecture):
            name = "registers" if cliff.resource == "registers" else "shared"
            short = cliff.change - (1 if cliff.change > 0 else -1)
            there = occupancy(replace(usage, **{name: getattr(usage, name) + cliff.change}), architecture)
            before = occupancy(replace(usage, **{name: getattr(usage, name) + short}), architecture)
            assert there == cliff.occupancy and before.blocks == now, (usage, architecture.name, cliff)
            assert (there.blocks > now) == (cliff.change < 0)
            seen += 1
    assert seen > 200


def test_variants_of_an_architecture_have_its_limits() -> None:
    assert architecture_of("sm_90a") is ARCHITECTURES["sm_90"] and architecture_of("sm_100f").name == "sm_100"
    assert ARCHITECTURES["sm_90"].props().shared_per_block_optin == 227 << 10
    for text in ("sm_77", "90", "sm_90b", "compute_90", ""):
        with pytest.raises(UsageError, match="known here: sm_80"):
            architecture_of(text)


# ------------------------------------------------------------------------------ CUDA's own calculator

PROGRAM = r"""
#include <cstddef>
#include <cstdio>
#include "cuda_occupancy.h"
int main() {
    int major, minor, warps, capacity, threads, registers;
    size_t shared;
    while (scanf("%d %d %d %d %d %d %zu", &major, &minor, &warps, &capacity, &threads, &registers, &shared) == 7) {
        cudaOccDeviceProp device;
        device.computeMajor = major, device.computeMinor = minor, device.warpSize = 32, device.numSms = 100;
        device.maxThreadsPerBlock = 1024, device.maxThreadsPerMultiprocessor = 32 * warps;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.sharedMemPerBlock = 49152, device.sharedMemPerMultiprocessor = capacity;
        device.reservedSharedMemPerBlock = 1024, device.sharedMemPerBlockOptin = capacity - 1024;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = 0;
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF, kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = device.sharedMemPerBlockOptin, kernel.numBlockBarriers = 1;
        cudaOccDeviceState state;
        state.cacheConfig = CACHE_PREFER_SHARED, state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
        printf("%d\n", failed ? -failed : result.activeBlocksPerMultiprocessor);
    }
}
"""


def test_as_many_blocks_as_cudas_calculator_says(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
        folder = next(folder for folder in cuda_headers(nvrtc_version()) if (folder / "cuda_occupancy.h").is_file())
    except (CannotRunError, StopIteration) as error:
        pytest.skip(f"needs a C++ compiler and the headers of CUDA 13's runtime: {error}")
    if nvrtc_version() < (13, 0):
        pytest.skip("the calculator of CUDA 12 does not know all architectures")
    (tmp_path / "calculator.cpp").write_text(PROGRAM)
    command = [*compiler.command, "-w", "-I", str(folder), "-o", str(tmp_path / "calculator")]
    subprocess.run([*command, str(tmp_path / "calculator.cpp")], check=True, timeout=60)
    rng = random.Random(2)
    cases = [
        (
            rng.choice(list(ARCHITECTURES.values())),
            rng.randint(1, 1024),
            rng.randint(1, 255),
            rng.choice((0, s, s // 9)),
        )
        for s in (rng.randint(0, 240_000) for _ in range(5000))
    ]
    numbers = [
        (*divmod(int(a.name.removeprefix("sm_")), 10), a.warps, a.shared, threads, registers, shared)
        for a, threads, registers, shared in cases
    ]
    text = "\n".join(" ".join(map(str, line)) for line in numbers)
    done = subprocess.run([tmp_path / "calculator"], input=text, capture_output=True, text=True, check=True)
    expected = list(map(int, done.stdout.split()))
    assert len(expected) == len(cases) and min(expected) == 0
    for (architecture, *usage), number in zip(cases, expected, strict=True):
        assert occupancy(Usage(*usage), architecture).blocks == number, (architecture.name, usage)
