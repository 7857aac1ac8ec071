"""Sweeps and proofs before a training run: what is done at all, what is remembered, and what makes it be done again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from check_fakes import FakeDevice
from kbench.catalog import load_catalog
from kbench.errors import Exit
from kbench.jobs import Job
from kbench.results.best import merge
from kbench.results.schema import Row
from kbench.train.chooser import Chooser, Times, Wanted
from kbench.train.layout import Layout
from kbench.train.model import PRESETS
from kbench.train.program import Use
from kbench.train.slots import Need, Shape
from kbench.train.trials import Trials, Unproven

CATALOG = load_catalog()
GPU = "Test GPU"
SMALL = Shape(PRESETS["nano"], 2, 16, "bf16")
# Over 8192 tokens: swept in two rounds.
LARGE = Shape(PRESETS["nano"], 256, 64, "bf16")


class Card(FakeDevice):
    """A GPU with a library, of which nothing else is known."""

    cublaslt = 130000

    def describe(self) -> dict[str, Any]:
        return {"name": GPU, "cublaslt": self.cublaslt}


class Bench:
    """Every version passes in `milliseconds` of its number, and takes longer in smaller blocks."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.status = "pass"
        self.milliseconds: dict[int, float] = {}

    def rows(self, jobs: Sequence[Job]) -> Iterator[Row]:
        for job in jobs:
            self.jobs.append(job)
            ms = self.milliseconds.get(job.version, 1.0) + 1e-3 / job.block
            yield Row(
                job.family, job.version, job.idea, job.sizes, job.dtype, job.block, GPU, self.status, 0,
                reason="as told", params=job.params,
                measurement={"median_ms": ms}, source=CATALOG.fingerprint(job.family, job.version),
            )  # fmt: skip


class Bed:
    """Trials with a results folder of their own, and what ran in them."""

    def __init__(self, device: Card):
        self.bench, self.document = Bench(), {"schema": 1, "gpus": {}}
        self.trials = Trials(
            lambda: nullcontext(cast(Any, self.bench)), device, CATALOG, lambda text: None, self.keep,
            lambda names: nullcontext(lambda: None),
        )  # fmt: skip

    def keep(self, rows: Sequence[Row]) -> None:
        merge(self.document, rows, "run")

    def missing(self, shape: Shape) -> list[Need]:
        times = Times(self.document, GPU, CATALOG.fingerprint)
        return self.trials.missing(shape, Layout(shape.model).count, Chooser(CATALOG, Wanted(), times), times)

    def sweep(self, shape: Shape) -> list[Job]:
        """What is missing; the jobs that ran."""
        before = len(self.bench.jobs)
        chooser = Chooser(CATALOG, Wanted(), Times(self.document, GPU, CATALOG.fingerprint))
        self.trials.sweep(shape, Layout(shape.model).count, chooser, self.missing(shape))
        return self.bench.jobs[before:]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "cache"))


def test_a_sweep_tries_everything_once() -> None:
    bed = Bed(Card())
    jobs = bed.sweep(SMALL)
    assert {job.purpose for job in jobs} == {"time"}
    tried = {(job.version, job.block) for job in jobs if job.family == "global_norm"}
    assert tried == {(v.number, block) for v in CATALOG["global_norm"].versions for block in v.blocks}
    assert len({repr(job) for job in jobs}) == len(jobs), "a problem of two roles runs once"
    assert not bed.missing(SMALL) and not bed.sweep(SMALL)


def test_versions_that_failed_are_not_tried_again_while_another_has_a_time() -> None:
    bed = Bed(Card())
    keep = bed.keep
    bed.trials.keep = lambda rows: keep([row for row in rows if row.version == 1])
    bed.sweep(SMALL)
    assert not [need for need in bed.missing(SMALL) if need.family == "global_norm"]


def test_another_results_folder_is_swept_again() -> None:
    Bed(Card()).sweep(SMALL)
    assert Bed(Card()).sweep(SMALL)


def test_of_a_large_batch_only_what_is_near_with_one_sequence_runs_at_its_size() -> None:
    bed = Bed(Card())
    bed.bench.milliseconds = {1: 9.0, 2: 2.5, 3: 1.9, 4: 1.0}
    jobs = [job for job in bed.sweep(LARGE) if job.family == "gelu_forward"]
    tokens = LARGE.batch * LARGE.seq * 4 * LARGE.model.channels
    first = [job for job in jobs if job.sizes["N"] == tokens // LARGE.batch]
    second = [job for job in jobs if job.sizes["N"] == tokens]
    versions = CATALOG["gelu_forward"].versions
    assert {(job.version, job.block) for job in first} == {(v.number, b) for v in versions for b in v.blocks}
    fastest = min(bed.bench.milliseconds[version.number] for version in versions)
    near = {v.number for v in versions if bed.bench.milliseconds[v.number] <= 1.99 * fastest}
    assert {job.version for job in second} == near and len(near) < len(versions)
    for number in near:
        blocks = sorted(CATALOG.version("gelu_forward", number).blocks)
        assert sorted(job.block for job in second if job.version == number) == blocks[-3:], "the three fastest"
    assert not bed.missing(LARGE)


def use(version: int, block: int = 128) -> Use:
    return Use("gelu_forward", version, block, (("N", 100),), "fp32")


def test_a_proof_is_done_once_and_again_with_other_libraries() -> None:
    bed, card = Bed(Card()), Card()
    for _ in range(2):
        bed.trials.prove([use(1), use(1), use(2)])
    assert [(job.version, job.purpose) for job in bed.bench.jobs] == [(1, "prove"), (2, "prove")]
    card.cublaslt += 1
    again = Bed(card)
    again.trials.prove([use(1)])
    assert len(again.bench.jobs) == 1


def test_what_was_swept_is_proven() -> None:
    bed = Bed(Card())
    job = next(job for job in bed.sweep(SMALL) if job.family == "gelu_forward")
    before = len(bed.bench.jobs)
    bed.trials.prove([Use(job.family, job.version, job.block, tuple(job.sizes.items()), job.dtype)])
    assert len(bed.bench.jobs) == before


@pytest.mark.parametrize(("status", "code"), [("fail", Exit.WRONG), ("hung", Exit.CRASHED), ("skipped", Exit.CANNOT)])
def test_a_version_that_is_not_proven_does_not_train_and_is_not_remembered(status: str, code: Exit) -> None:
    bed = Bed(Card())
    bed.bench.status = status
    for _ in range(2):
        with pytest.raises(
            Unproven, match="gelu_forward version 2, block size 128, cannot train: .*: as told"
        ) as caught:
            bed.trials.prove([use(2)])
        assert caught.value.exit_status == code
    assert len(bed.bench.jobs) == 2
