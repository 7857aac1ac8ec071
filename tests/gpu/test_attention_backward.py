"""attention_backward on the GPU, through the interface that the commands use."""

from collections import defaultdict

import pytest

from kbench.catalog import load_catalog
from kbench.grammar import Target
from kbench.selection import Selection
from kbench.sweep import Bench, Options

FAMILY = "attention_backward"


@pytest.fixture(scope="module")
def bench():
    notes = []
    with Bench(Options(device="cuda"), notes.append) as opened:
        yield opened


def rows_of(bench, versions=None, **select):
    return list(bench.rows(bench.jobs(Selection([Target(FAMILY, versions)], **select))))


def said(rows):
    return [f"v{row.version} block {row.block} {row.problem}: {row.status}: {row.reason}" for row in rows]


@pytest.mark.parametrize("dtype", load_catalog()[FAMILY].dtypes)
def test_every_version_is_right_at_every_block_size_on_the_check_shapes(bench, dtype):
    rows = rows_of(bench, mode="check", dtype=dtype)
    wrong = [row for row in rows if row.status not in ("pass", "refused", "skipped")]
    assert not wrong, "\n".join(said(wrong))

    passed = defaultdict(set)
    for row in rows:
        # A length that no tile and no vector divides: the shape that careless kernels fail.
        if row.status == "pass" and row.sizes["T"] % 2:
            passed[row.version].add(row.block)
    skipped = {row.version for row in rows if row.status == "skipped"}
    assert skipped <= {10}, "\n".join(said(rows))  # where cuDNN is not installed
    for version in load_catalog()[FAMILY].versions:
        if dtype not in version.dtypes or version.number in skipped:
            continue
        assert passed[version.number] == set(version.blocks), "\n".join(said(rows))


def test_odd_shape_of_the_users_own_is_right(bench):
    sizes = {"B": [1], "T": [67], "C": [66], "NH": [6]}
    rows = rows_of(bench, versions=tuple(range(1, 10)), mode="sweep", sizes=sizes, dtype="tf32")
    assert {row.version for row in rows} == set(range(1, 10))
    assert all(row.status == "pass" for row in rows), "\n".join(said(rows))
    assert all(row.sizes == {"B": 1, "T": 67, "C": 66, "NH": 6} for row in rows)


@pytest.mark.parametrize("version", [7, 8, 9])
def test_default_problem_is_right_and_timed(bench, version):
    (row,) = rows_of(bench, versions=(version,), mode="run", block_sizes=[256], dtype="tf32")
    assert row.status == "pass", said([row])
    assert row.sizes == {"B": 4, "T": 1024, "C": 768, "NH": 12}
    timed = row.measurement
    assert timed is not None
    assert timed["mode"] == "cold"
    assert timed["low_ms"] <= timed["median_ms"] <= timed["high_ms"]
    # datt and dpreatt are 201 MB each, written and read: 0.1 ms at 8 TB/s, so half of that is out of reach.
    assert 0.05 < timed["median_ms"] < 10.0
    assert all(output["compared"] > 0 for output in row.verdict["outputs"])
