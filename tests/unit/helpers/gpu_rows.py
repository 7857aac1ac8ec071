"""Rows as a sweep of layernorm_forward on an H200 has them, made by hand; run as a script, it shows their tables.

    PYTHONPATH=src:tests/unit/helpers COLUMNS=120 python3 tests/unit/helpers/gpu_rows.py sweep layernorm_forward --top 5

takes the options of `kbench sweep`, and needs no GPU: a bench hands the rows out. Results go where --results says.
"""

from __future__ import annotations

import sys
from typing import Any

from fakes import FakeBench, failed, make_row, measured
from kbench.ceilings import Ceilings
from kbench.results.schema import Row

SIZES = {"B": 8, "T": 1024, "C": 768}
ROWS = SIZES["B"] * SIZES["T"]
BYTES = 4.0 * ROWS * SIZES["C"]  # of one of the two large tensors, in fp32
CEILINGS = Ceilings(4250.0, "a kernel", 1 << 30, {"fp32": 51.0, "bf16": 732.0}, 8192)
DEVICE: dict[str, Any] = {
    "kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90", "driver": "580.159.04", "compiler": "NVRTC 13.0",
    "options": ["--std=c++17"], "props": {"multiprocessors": 132},
}  # fmt: skip

IDEAS = {
    1: "one thread per row, three passes: mean, variance, output",
    2: "a kernel each for mean and variance (a block per row) and output: coalesced loads",
    5: "as 4, one block per row: enough threads for long rows",
    6: "one warp per row, nothing is read twice: row, weight, bias stay in shared memory",
}


def kernel(name: str, grid: int, block: int, registers: int = 32, **more: Any) -> dict[str, Any]:
    """A kernel of a row, as the CUDA device records it."""
    usual = {"shared": 0, "static_shared": 0, "local_bytes": 0, "spill_bytes": 0, "max_threads": 1024}
    return {"name": name, "grid": [grid], "block": [block], "registers": registers, **usual, **more}


def gpu_row(version: int, block: int, ms: float, kernels: list[dict[str, Any]], touched: float, **more: Any) -> Row:
    """A row that passed and was timed on the H200."""
    return make_row(
        version, family="layernorm_forward", idea=IDEAS.get(version, f"idea number {version}"), sizes=dict(SIZES),
        block=block, device=DEVICE["name"], measurement=measured(ms, 0.004), kernels=kernels,
        steps=more.pop("steps", {"Launch": len(kernels)}), touched=touched, traffic=2 * BYTES + 4.0 * 2 * ROWS,
        source="of version " + str(version), **more,
    )  # fmt: skip


def layernorm_rows() -> list[Row]:
    """Four versions at three block sizes: one slow, one of three kernels, one refused once, one wrong once."""
    rows = []
    for block, ms in ((64, 0.3011), (256, 0.3502), (1024, 0.8123)):
        one = kernel("layernorm_forward1<float>", ROWS // block, block, 40)
        rows.append(gpu_row(1, block, ms, [one], 2 * BYTES, used=0.18))
    for block, ms in ((64, 0.0571), (256, 0.0522), (1024, 0.0603)):
        first = [kernel(f"{name}2<float>", ROWS, block, 24) for name in ("mean", "rstd")]
        last = kernel("normalise2<float>", ROWS * SIZES["C"] // block, block, 20)
        rows.append(gpu_row(2, block, ms, [*first, last], 4 * BYTES, used=0.02))
    for block, ms in ((64, 0.02014), (256, 0.01850), (1024, 0.02911)):
        one = kernel("layernorm_forward5<float>", ROWS, block, 40, static_shared=264)
        rows.append(gpu_row(5, block, ms, [one], 2 * BYTES, used=0.02))
    for block, ms in ((64, 0.01701), (256, 0.01693)):
        warps = block // 32
        one = kernel("layernorm_forward6<float, true>", ROWS // warps, block, 40, shared=(2 + warps) * 3072)
        rows.append(gpu_row(6, block, ms, [one], 2 * BYTES, used=0.02))
    rows.append(
        failed(6, "unlaunchable", "104,448 bytes of shared memory, the device allows 101,376", block=1024,
               family="layernorm_forward", sizes=dict(SIZES), idea=IDEAS[6], device=DEVICE["name"],
               reproduce="kbench run layernorm_forward --version 6 --block-size 1024")
    )  # fmt: skip
    return rows


class CardBench(FakeBench):
    """A bench on the H200 that hands the rows of layernorm_forward out."""

    script = layernorm_rows()
    card = CEILINGS.to_dict()

    def __init__(self, options: Any, note: Any):
        super().__init__(options, note)
        self.device = dict(DEVICE)


if __name__ == "__main__":
    import kbench.sweep
    from kbench.cli.app import run_command

    kbench.sweep.Bench = CardBench  # type: ignore[misc,assignment]  # the command takes it from there
    sys.exit(run_command(sys.argv[1:]))
