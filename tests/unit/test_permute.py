"""The contract of permute: its reference, what the check tells apart, its plans."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.check.probe import probe
from kbench.family import Launch, Problem, Props

FAMILY = load_catalog()["permute"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)

Sizes = tuple[int, int, int, int]


def problem(sizes: Sizes, dtype: str = "fp32") -> Problem:
    return Problem(dict(zip(("D1", "D2", "D3", "D4"), sizes, strict=True)), dtype)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 4, 5), (5, 1, 2, 7)])
def test_reference_moves_every_element_to_its_place(sizes: Sizes) -> None:
    case = make_case(FAMILY, problem(sizes), seed=1)
    D1, D2, D3, _ = sizes
    inp, out = case.inputs["inp"].reshape(sizes), case.expected["out"].value.reshape(-1)
    for i1, i2, i3, i4 in np.ndindex(*sizes):
        assert out[((i4 * D3 + i3) * D1 + i1) * D2 + i2] == inp[i1, i2, i3, i4]


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 2, 1, 3), (3, 5, 7, 2)])
def test_the_check_tells_right_from_wrong(sizes: Sizes, dtype: str) -> None:
    of = probe(FAMILY, problem(sizes, dtype), seed=3)["out"]
    assert of.rounded == 0.0 and of.weakest > 3


@pytest.mark.parametrize(
    "sizes, dtype, kernel, tiles",
    [
        ((24, 42, 20, 32), "fp32", "permute1<float, 4, 4, 32>", 32 * 20),
        ((24, 42, 20, 32), "bf16", "permute1<__nv_bfloat16, 8, 8, 32>", 32 * 20),
        ((5, 13, 8, 9), "fp32", "permute1<float, 4, 1, 32>", 3 * 3),
        ((8, 8, 5, 13), "fp16", "permute1<__half, 1, 8, 32>", 2 * 3),
        ((3, 4, 3, 4), "bf16", "permute1<__nv_bfloat16, 1, 1, 32>", 1),
        ((32, 44, 48, 32), "fp32", "permute1<float, 4, 4, 64>", 22 * 24),
        ((96, 168, 80, 128), "fp32", "permute1<float, 4, 4, 64>", 252 * 160),
        ((40_000, 50_000, 1, 1), "fp32", "permute1<float, 1, 4, 64>", 31_250_000),
    ],
)
def test_accesses_follow_alignment_and_tiles_the_number_of_multiprocessors(
    sizes: Sizes, dtype: str, kernel: str, tiles: int
) -> None:
    for block in FAMILY.by_number[1].blocks:
        (launch,) = FAMILY.by_number[1].plan(problem(sizes, dtype), block, PROPS)
        assert isinstance(launch, Launch)
        assert (launch.kernel, launch.grid, launch.block) == (kernel, (tiles,), (block,))


def test_rows_and_columns_must_fit_into_an_int() -> None:
    version = FAMILY.by_number[1]
    assert "below 2^31" in FAMILY.refusal(version, problem((1 << 16, 1 << 15, 1, 1)), 256)
    assert not FAMILY.refusal(version, problem((1 << 15, 1 << 15, 1 << 15, 1 << 15)), 256)


def test_large_moves_a_gibibyte() -> None:
    assert 2**30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], "fp32")) <= 2.5 * 2**30
