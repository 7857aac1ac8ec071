"""Why the winner wins: what is said for hand-made rows, and what is not."""

from __future__ import annotations

import json

import pytest

from fakes import make_row, measured
from gpu_rows import CEILINGS, DEVICE, gpu_row, kernel, layernorm_rows
from kbench.results.best import winners
from kbench.results.facts import Card
from kbench.results.why import tied_rows, why

CARD = Card.of({**DEVICE, "ceilings": CEILINGS.to_dict()})
PLAIN = kernel("k", 8192, 256, 32)


def said(mine, its, card=CARD, ms=(1.0, 2.0), touched=(1e6, 1e6), steps=None):
    """The reasons for a winner with these kernels over another version with those."""
    steps = steps or ({"Launch": len(mine)}, {"Launch": len(its)})
    winner = gpu_row(2, 256, ms[0], mine, touched[0], steps=steps[0])
    other = gpu_row(1, 256, ms[1], its, touched[1], steps=steps[1])
    found = why(winner, [other, winner], card)
    assert found is not None
    return found.reasons


def test_the_next_best_version_is_another_version_than_the_winners() -> None:
    rows = layernorm_rows()
    (winner,) = winners(rows).values()
    found = why(winner, rows, CARD)
    assert found is not None
    assert (winner.version, found.other.version, found.other.block) == (6, 5, 256), "not block size 64 of version 6"
    assert found.ratio == pytest.approx(0.01850 / 0.01693)
    assert found.low == pytest.approx(0.01850 * 0.996 / (0.01693 * 1.004)) and found.low < found.ratio < found.high
    text = str(found)
    assert text.startswith("version 6 is 1.09x (1.08x..1.10x) as fast as version 5 (its best: 0.01850 ms at block size")
    assert "70% of the copy ceiling in place of 64%" in text and "\n" not in text
    assert "30.7 kB of shared memory a block in place of 264 B" in text
    assert text.endswith('its idea: "one warp per row, nothing is read twice: row, weight, bias stay in shared memory"')


@pytest.mark.parametrize(
    ("mine", "its", "words"),
    [
        ([PLAIN], [PLAIN, PLAIN], ["1 step in place of 2"]),
        ([kernel("k", 8192, 256, 32)], [kernel("k", 8192, 256, 64)], ["occupancy 100% in place of 50%, limited by"]),
        ([kernel("k", 8192, 64, 128)], [kernel("k", 8192, 64, 144, max_threads=1024)], ["128 registers a thread in"]),
        ([PLAIN], [kernel("k", 8192, 256, 32, spill_bytes=64, local_bytes=48)], ["no bytes of spilled registers a th"]),
        ([PLAIN], [kernel("k", 8192, 256, 32, local_bytes=48)], ["no bytes of local memory a thread in place of 48"]),
        ([kernel("k", 2112, 256, 32)], [kernel("k", 1057, 256, 32)], ["blocks idle in 0% of the waves in place of"]),
        ([PLAIN], [kernel("k", 8192, 256, 32, shared=100)], []),
        ([kernel("k", 8192, 256, 64)], [PLAIN], []),
        ([PLAIN, PLAIN], [PLAIN], []),
    ],
)  # fmt: skip
def test_what_is_in_the_winners_favour(mine, its, words) -> None:
    found = said(mine, its)
    assert len(found) == len(words) and all(a.startswith(b) for a, b in zip(found, words, strict=True)), found


def test_fewer_passes_through_memory() -> None:
    assert said([PLAIN], [PLAIN], touched=(50e6, 100e6)) == ("its steps take 50 MB of tensors in place of 100 MB",)
    assert said([PLAIN], [PLAIN], touched=(98e6, 100e6)) == ()
    assert said([PLAIN], [PLAIN], touched=(100e6, 50e6)) == ()


def test_a_library_on_either_side() -> None:
    gemm, own = {"Gemm": 1, "Launch": 1}, {"Launch": 1}
    assert said([], [PLAIN], steps=({"Gemm": 1}, own)) == ("a library's GEMM in place of kernels of its own",)
    assert said([PLAIN], [PLAIN], steps=(own, {"Sdpa": 1})) == ("kernels of its own in place of a library's attention",)
    better = kernel("k", 8192, 256, 32)
    worse = kernel("k", 8192, 256, 64)
    assert said([better], [worse], steps=(gemm, gemm)) == (), "the kernel beside a GEMM is not the one that decides"


def test_the_weightiest_reasons_only() -> None:
    worst = kernel("k", 8192, 256, 64, spill_bytes=64)
    found = said([kernel("k", 8192, 256, 32, shared=8192)], [worst, worst], touched=(1.0, 2.0))
    assert len(found) == 3 and "step" in found[0] and "tensors" in found[1] and "spilled" in found[2]


def test_nothing_that_is_known_explains_it() -> None:
    rows = [gpu_row(1, 256, 2.0, [PLAIN], 1e6), gpu_row(2, 256, 1.0, [PLAIN], 1e6)]
    text = str(why(rows[1], rows, Card()))
    assert 'nothing that is recorded explains it; its idea: "a kernel each' in text and "ceiling" not in text


def test_a_tie_is_named_as_one() -> None:
    rows = [gpu_row(1, 256, 1.004, [PLAIN, PLAIN], 1e6), gpu_row(2, 256, 1.0, [PLAIN], 1e6)]
    found = why(rows[1], rows, CARD)
    assert found is not None and found.tied and found.low < 1 < found.high
    assert str(found).startswith("version 2 is within noise of version 1 (its best: 1.004 ms at block size 256): 1.00x")
    assert "they differ in: 1 step in place of 2" in str(found) and "idea" not in str(found)
    assert tied_rows(rows[1], rows) == "version 1 at 256"


def test_only_versions_that_may_win_are_compared() -> None:
    winner = make_row(1, median_ms=1.0)
    rows = [winner, make_row(1, block=64, median_ms=2.0), make_row(2, median_ms=1.5, overridden=True), make_row(3)]
    assert why(winner, rows, CARD) is None
    assert why(winner, [winner, make_row(2, median_ms=2.0, dtype="bf16")], CARD) is None, "another contest"
    zero = make_row(1, measurement=measured(0.0))
    assert why(zero, [zero, make_row(2, median_ms=1.0)], CARD) is None, "no ratio to a time of nothing"


def test_rows_of_an_older_kbench_are_compared_as_far_as_they_say() -> None:
    rows = [make_row(1, median_ms=2.0), make_row(2, median_ms=1.0)]
    text = str(why(rows[1], [type(row).from_dict(json.loads(json.dumps(row.to_dict()))) for row in rows], CARD))
    assert "2.00x (1.96x..2.04x)" in text
