"""The planted bugs compile for every GPU, so that their tests there test the check and not the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench.catalog import load_catalog
from kbench.errors import CannotRunError
from kbench.family import Problem, Props, kernels_of
from kbench.source import load_source

PLANTED = Path(__file__).resolve().parents[1] / "planted"
PROPS = Props("none", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 1 << 37)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_all_planted_kernels_compile(arch, tmp_path, monkeypatch):
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path))
    compiling = pytest.importorskip("kbench.device.cuda.compile")
    family = load_catalog([PLANTED])["planted"]
    problem = Problem(family.presets["small"], "fp32")
    kernels = sorted({name for v in family.versions for name in kernels_of(v.plan(problem, 128, PROPS))})
    try:
        cubin = compiling.compile_cubin(load_source(PLANTED / "planted.cu"), kernels, arch)
    except CannotRunError as error:
        pytest.skip(str(error))
    assert len(kernels) > 20 and set(cubin.lowered) == set(kernels)
