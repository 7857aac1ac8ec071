"""What is known of a row beside its time: rates, occupancy, waves, and where nothing is known."""

from __future__ import annotations

import json

import pytest

from fakes import make_row
from gpu_rows import DEVICE, gpu_row, kernel, layernorm_rows
from kbench.ceilings import Ceilings
from kbench.family import Copy, Fill, Gemm, Launch, Matrix, Ref, Tensor
from kbench.results.facts import Card, Facts, facts_of, main_kernel, waves_of
from kbench.work import steps_of, touched_bytes

CEILINGS = Ceilings(4000.0, "", 1, {"fp32": 50.0})
CARD = Card.of({**DEVICE, "ceilings": CEILINGS.to_dict()})


def facts(*kernels, card=CARD, **more) -> Facts:
    return facts_of(gpu_row(1, 256, more.pop("ms", 1.0), list(kernels), 1e6, **more), card)


def test_rates_and_the_ceiling_that_binds() -> None:
    row = make_row(1, median_ms=2.0, traffic=4e9, flops=80e9)
    found = facts_of(row, CARD)
    assert (found.gbs, found.tflops) == (pytest.approx(2000.0), pytest.approx(40.0))
    assert (found.share, found.ceiling) == (pytest.approx(0.8), "gemm")
    unknown = facts_of(row, Card())
    assert unknown.gbs == found.gbs and unknown.share is None and unknown.ceiling is None
    assert facts_of(make_row(1, traffic=4e9), CARD) == Facts(), "no time, no rate"


def test_short_plans_are_held_against_launches_but_not_in_a_graph() -> None:
    card = Card.of({"ceilings": Ceilings(40_000.0, launch_us=2.5).to_dict()})
    steps = [kernel(f"k{i}", 1, 32, 32) for i in range(3)]
    found = facts(*steps, card=card, ms=0.01)
    assert (found.share, found.ceiling) == (pytest.approx(0.75), "launch"), "three launches of 2.5 us"
    assert facts(*steps, card=card, ms=0.01, cache_mode="graph").ceiling == "copy"


def test_occupancy_with_its_limiter() -> None:
    found = facts(kernel("k<float>", 8192, 256, 40, static_shared=264))
    # 40 registers x 32 threads = 1,280 a warp, 12 warps a partition, 48 of 64: six blocks of eight warps.
    assert (found.fit, found.occupancy, found.limiter) == (6, 0.75, "registers")
    assert (found.registers, found.static_shared, found.dynamic_shared) == (40, 264, 0)
    found = facts(kernel("k", 8192, 128, 32, static_shared=1024, shared=56 * 1024))
    assert (found.fit, found.limiter) == (3, "shared memory"), "static and dynamic together"
    assert facts(kernel("k", 1, 1024, 32, max_threads=512)).fit == 0


def test_counts_of_all_kernels_and_their_shares() -> None:
    counts = {"global_bytes": 300, "global_sectors": 20, "global_unused": 160, "barriers": 3, "atomics": 5}
    shared = {"shared_wavefronts": 12, "shared_conflicts": 4}
    found = facts_of(make_row(1, metrics={"a": {**counts, **shared}, "b": {"global_bytes": 100, "barriers": 1}}), CARD)
    assert (found.asked, found.sectors, found.barriers, found.atomics) == (400, 20, 4, 5)
    assert found.used == pytest.approx(0.75), "160 of 640 bytes were not asked for"
    assert (found.wavefronts, found.conflicts) == (12, pytest.approx(1.5)), "eight would do without conflicts"
    assert facts_of(make_row(1), CARD).asked is None


def test_waves_and_how_full_the_last_is() -> None:
    assert waves_of(2 * 132 * 6, 6, 132) == (2.0, 1.0)
    assert waves_of(1, 6, 132) == (pytest.approx(1 / 792), pytest.approx(1 / 792))
    waves, tail = waves_of(792 * 3 + 396, 6, 132)
    assert (waves, tail) == (3.5, 0.5)
    found = facts(kernel("k", 1188, 256, 40))
    assert (found.waves, found.tail) == (1.5, 0.5)
    without = facts(kernel("k", 1188, 256, 40), card=Card.of({**DEVICE, "props": None}))
    assert without.occupancy == 0.75 and without.waves is None


def test_a_block_that_does_not_fit_has_no_waves() -> None:
    found = facts(kernel("k", 8, 256, 32, shared=300_000))
    assert (found.fit, found.occupancy, found.waves, found.tail) == (0, 0.0, None, None)


def test_the_kernel_with_the_most_threads_stands_for_the_plan() -> None:
    small, large, equal = kernel("small", 10, 1024), kernel("large", 100, 128, 99), kernel("equal", 50, 256)
    row = gpu_row(1, 128, 1.0, [small, large, equal], 0.0)
    assert main_kernel(row) is large
    assert facts(small, large, equal).registers == 99 and facts(small, large, equal).kernel == "large"


def test_a_plan_of_library_steps_has_no_kernel() -> None:
    found = facts(steps={"Gemm": 2, "Fill": 1})
    assert (found.launches, found.library, found.kernel, found.registers, found.occupancy) == (3, 2, None, None, None)


def test_what_an_older_or_a_damaged_record_lacks_is_not_known() -> None:
    old = {"name": "k", "grid": [8192], "block": [256], "shared": 0, "registers": 40, "static_shared": 0}
    found = facts(old, steps={})
    assert found.occupancy == 0.75 and found.spill_bytes is None and found.launches is None
    assert facts({"name": "k"}).grid is None
    for damaged in ({}, {"props": 3}, {"arch": "sm_999", "props": {"multiprocessors": "many"}}, {"ceilings": [1]}):
        assert Card.of({"kind": "cuda", **damaged}) == Card()
    assert facts(old, card=Card.of({**DEVICE, "arch": "sm_103"})).occupancy is None


def test_the_emulator_has_neither_registers_nor_occupancy() -> None:
    card = Card.of({"kind": "emulator", "arch": "sm_90", "props": {"multiprocessors": 3}})
    assert card.architecture is None
    row = make_row(1, kernels=[{"name": "k", "grid": [7], "block": [64], "shared": 8, "registers": None}])
    found = facts_of(row, card)
    assert (found.grid, found.dynamic_shared, found.occupancy, found.waves) == (7, 8, None, None)


def test_facts_of_rows_come_back_from_json() -> None:
    for row in layernorm_rows():
        again = type(row).from_dict(json.loads(json.dumps(row.to_dict())))
        assert facts_of(again, CARD) == facts_of(row, CARD)


TENSORS = (Tensor("a", (100,), "fp32", "scratch"), Tensor("b", (10,), "bf16", "scratch"))


def test_touched_counts_a_tensor_once_for_each_kernel() -> None:
    def launch(name: str, *args: str | Ref) -> Launch:
        return Launch(name, (1,), (32,), args)

    assert touched_bytes([launch("k", "a", "b")], TENSORS) == 420
    assert touched_bytes([launch("k", "a"), launch("l", "a")], TENSORS) == 800
    pieces = [launch("k", Ref("a", 50 * piece)) for piece in range(2)]
    assert touched_bytes(pieces, TENSORS) == 400, "a kernel in two pieces goes through memory once"
    assert touched_bytes([Fill(Ref("a"), 0.0, 1)], TENSORS) == 4
    assert touched_bytes([Fill(Ref("a")), Copy(Ref("b"), Ref("b"), 2)], TENSORS) == 404
    matrix = Matrix("a", 10, 10)
    assert touched_bytes([Gemm(matrix, matrix, Matrix("c", 10, 10), "fp32")], TENSORS) == 400
    assert steps_of([*pieces, Fill(Ref("a"))]) == {"Launch": 2, "Fill": 1}
