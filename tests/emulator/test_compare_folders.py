"""A comparison whose second side comes from other family folders: what a bisection runs for each commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.compare import CompareBench
from kbench.measure.ab_statistics import Rule
from kbench.selection import Selection
from kbench.sides import Side
from kbench.sweep import Options

pytestmark = pytest.mark.emulator

FAMILY = """
from kbench.family import *
family = Family(
    name="scale", summary="s", sizes={{"N": "elements"}}, dtypes=("fp32",),
    presets={{"default": {{"N": 256}}, "small": {{"N": 256}}}}, check_shapes=(),
    tensors=lambda p: (
        Tensor("inp", (p["N"],), "fp32", "in", ("n",), normal(0.5, 1.0)),
        Tensor("out", (p["N"],), "fp32", "out", ("n",)),
    ),
    reference=lambda p, i, e, xp: {{"out": Expected(2.0 * i["inp"])}},
    versions=(
        Version(1, "doubles", dtypes=("fp32",), plan=lambda p, b, d: (Launch("{kernel}", (-(-p["N"] // b),), (b,),
                ("out", "inp", p["N"])),)),
    ),
)
"""
KERNEL = """
__global__ void {kernel}(float* out, const float* inp, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = {factor} * inp[i];
}}
"""


def commit(folder: Path, kernel: str, factor: str = "2.0f", versions: int = 1) -> str:
    folder.mkdir()
    text = FAMILY.format(kernel=kernel)
    (folder / "scale.py").write_text(text if versions else text.replace("Version(1,", "Version(2,"))
    (folder / "scale.cu").write_text(KERNEL.format(kernel=kernel, factor=factor))
    return str(folder)


def test_each_side_has_its_own_plan_and_its_own_kernels(tmp_path: Path) -> None:
    good = commit(tmp_path / "good", "old_name")
    same, wrong = commit(tmp_path / "same", "new_name"), commit(tmp_path / "wrong", "old_name", "3.0f")
    options = Options(device="emulator", family_dirs=(Path(good),), seed=1)
    side = Side("scale", 1)
    with CompareBench(options, lambda text: None) as bench:
        planned = bench.sides((side, side), Selection([], "run"), tmp_path)
        first, second = bench.compare(planned, Rule(), "", [same]).rows
        assert (first.status, second.status) == ("pass", "pass")
        assert first.kernels[0]["name"] == "old_name" and second.kernels[0]["name"] == "new_name"
        assert first.source != second.source
        first, second = bench.compare(planned, Rule(), "", [wrong]).rows
        assert (first.status, second.status) == ("pass", "fail")
        # Afterwards the bench is what it was.
        first, second = bench.compare(planned, Rule(), "").rows
        assert (first.status, second.status) == ("pass", "pass") and first.source == second.source
