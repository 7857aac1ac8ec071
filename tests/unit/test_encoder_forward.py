"""The contract of encoder_forward: its reference bit for bit, what the check tells apart, its plans and traffic."""

from __future__ import annotations

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.probe import probe
from kbench.device.dtypes import store
from kbench.family import ErrorModel, Launch, Problem, Props, Tensor

FAMILY = load_catalog()["encoder_forward"]
PROPS = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)


def problem(B: int, T: int, C: int, V: int, dtype: str = "fp32") -> Problem:
    return Problem({"B": B, "T": T, "C": C, "V": V}, dtype)


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_reference_is_the_rounded_sum_of_two_rows(dtype: str) -> None:
    """Element by element, against the type's own rounding; terms of different sizes, so that there are ties."""
    B, T, C, V = 3, 5, 64, 7
    rng = np.random.default_rng(0)
    stored = Tensor("x", (1, C), dtype, "scratch")

    def table(rows: int) -> list[list[float]]:
        values = rng.normal(0.0, 1.0, (rows, C)) * 2.0 ** rng.integers(-6, 6, (rows, C))
        return [store(stored, row[None]).astype(np.float64)[0] for row in values]

    inp, wte, wpe = rng.integers(0, V, (B, T)), table(V), table(T)
    inputs = {"inp": inp.astype(np.float64), "wte": np.array(wte), "wpe": np.array(wpe)}
    got = FAMILY.reference(problem(B, T, C, V, dtype), inputs, ErrorModel(dtype), np)["out"].value
    for b in range(B):
        for t in range(T):
            row = np.array([[wte[inp[b, t]][c] + wpe[t][c] for c in range(C)]])
            np.testing.assert_array_equal(got[b, t], store(stored, row).astype(np.float64)[0])


@pytest.mark.parametrize("dtype", FAMILY.dtypes)
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (3, 5, 16, 40)])
def test_the_check_tells_right_from_wrong(sizes: tuple[int, int, int, int], dtype: str) -> None:
    of = probe(FAMILY, problem(*sizes, dtype), seed=3)["out"]
    assert of.rounded == 0.0 and of.weakest > 3


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (8, 1024, 768, 50257), (9, 1024, 770, 50257), (4096, 1024, 8192, 9)])
def test_grids_cover_all_elements_once(sizes: tuple[int, int, int, int]) -> None:
    """The last has over 2^31 elements."""
    B, T, C, _ = sizes
    for dtype, packet in (("bf16", 8), ("fp32", 4)):
        width = packet if C % packet == 0 else 1
        for version in FAMILY.versions:
            for block in version.blocks:
                (launch,) = version.plan(problem(*sizes, dtype), block, PROPS)
                assert isinstance(launch, Launch) and launch.block == (block,) and launch.grid[0] < 2**31
                rows = int(launch.kernel.split(",")[2]) if version.number == 3 else 1
                threads = {1: B * T, 2: B * T * C, 3: -(-B // rows) * T * (C // width)}[version.number]
                assert 0 <= launch.grid[0] * block - threads < block


@pytest.mark.parametrize(
    "sizes, kernel",
    [
        ((8, 1024, 768, 50257), "encoder_forward3<__nv_bfloat16, 8, 4, unsigned>"),
        ((1, 1024, 768, 50257), "encoder_forward3<__nv_bfloat16, 8, 1, unsigned>"),
        ((1, 8192, 8192, 50257), "encoder_forward3<__nv_bfloat16, 8, 1, unsigned>"),
        ((8, 1024, 770, 50257), "encoder_forward3<__nv_bfloat16, 1, 4, unsigned>"),
        ((1, 4_194_303, 8192, 50257), "encoder_forward3<__nv_bfloat16, 8, 1, unsigned>"),
        ((4, 8_388_608, 4096, 9), "encoder_forward3<__nv_bfloat16, 8, 4, Offset>"),
    ],
)
def test_width_rows_and_index_follow_from_the_sizes(sizes: tuple[int, int, int, int], kernel: str) -> None:
    (launch,) = FAMILY.by_number[3].plan(problem(*sizes, "bf16"), 256, PROPS)
    assert isinstance(launch, Launch) and launch.kernel == kernel


def test_traffic_counts_rows_that_are_read_not_the_whole_table() -> None:
    """Two bytes for each element of out, of the rows of wte that the positions have, and of wpe; four for each id."""
    assert FAMILY.least_traffic(problem(2, 3, 8, 1000, "bf16")) == 2 * 8 * (6 + 6 + 3) + 4 * 6
    assert FAMILY.least_traffic(problem(2, 3, 8, 4, "bf16")) == 2 * 8 * (6 + 4 + 3) + 4 * 6
    assert 2**30 <= FAMILY.least_traffic(Problem(FAMILY.presets["large"], "bf16")) <= 2.5 * 2**30
