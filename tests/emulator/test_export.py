"""Exported programs, built and run as they are on the emulator: right ones pass, and each planted fault is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from exported_program import build_on_cpu, run

from kbench.catalog import load_catalog
from kbench.export.problem import data_of, subject_of
from kbench.export.program import program
from kbench.jobs import Job

CATALOG = load_catalog()
LAYERNORM = Job("layernorm_forward", 6, "", {"B": 1, "T": 5, "C": 33}, "fp32", 128)
# Repeating inputs, sampled outputs with start values, sums that are filled first, and 16-bit types.
LARGE = Job("layernorm_backward", 8, "", {"B": 4, "T": 300, "C": 264, "accumulate": 1}, "bf16", 256)
# Outputs that may hold anything in places, and -0 that is not 0.
TRIANGLE = Job("trimat_forward", 3, "", {"B": 1, "T": 33, "C": 32, "NH": 2}, "fp16", 256)
EXACT = Job("encoder_forward", 2, "", {"B": 2, "T": 9, "C": 24, "V": 50}, "bf16", 64)
# Matrix products: batched, across and strided; with bias and GELU; back through GELU.
HEADS = Job("attention_backward", 9, "", {"B": 2, "T": 9, "C": 16, "NH": 2}, "bf16", 128)
GELU = Job("matmul_forward", 5, "", {"B": 1, "T": 5, "C": 24, "OC": 16, "gelu": 1, "bias": 1}, "tf32", 256)
BACK = Job(
    "matmul_backward", 2, "", {"B": 1, "T": 8, "C": 16, "OC": 24, "accumulate": 1, "gelu": 1, "bias": 1}, "fp16", 256
)  # fmt: skip


def text_of(job: Job) -> str:
    subject = subject_of(CATALOG, job, None)
    return program(subject, data_of(subject, seed=3), "a", "kbench export")


def changed(before: str, after: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(before) == 1, f"{before!r} stands {text.count(before)} times in the program"
        return text.replace(before, after)

    return change


def as_it_is(text: str) -> str:
    return text


CASES: dict[str, tuple[Job, Callable[[str], str], int, str]] = {
    # (name) what is exported, the fault planted in its text, exit status, what has to be said
    "right": (LAYERNORM, as_it_is, 0, r"out: 165 of 165 elements compared, 0 wrong"),
    "large": (LARGE, as_it_is, 0, r"dinp: 1024 of 316800 elements compared, 0 wrong"),
    "triangle": (TRIANGLE, as_it_is, 0, r"out: \d+ of 2178 elements compared, 0 wrong"),
    "exact": (EXACT, as_it_is, 0, r"out: 432 of 432 elements compared, 0 wrong"),
    "heads": (HEADS, as_it_is, 0, r"dinp: 864 of 864 elements compared, 0 wrong"),
    "gelu": (GELU, as_it_is, 0, r"out: 80 of 80 elements compared, 0 wrong"),
    "back": (BACK, as_it_is, 0, r"dinp: 128 of 128 elements compared, 0 wrong"),
    "a constant": (
        LAYERNORM, changed("kEpsilon = 1e-5f", "kEpsilon = 2e-5f"), 1,
        r"(?m)^rstd: WRONG, first at \[0, \d\]: expected \d\.\d+ \(\d\.\d+ to \d\.\d+\), got \d\.\d+$",
    ),
    "a block too few": (
        LAYERNORM, changed("dim3(2), dim3(128)", "dim3(1), dim3(128)"), 1,
        r"out: WRONG, 33 elements NaN \(as before the launch\) or infinite, the first at \[0, 4, 0\]",
    ),
    "an input written to": (
        LAYERNORM, changed("if (lane_index() == 0) {\n            mean[row] = m;",
                           "if (lane_index() == 0) {\n            ((T*)bias)[C - 1] = 0, mean[row] = m;"), 1,
        r"bias: WRONG, it is an input and was written to",
    ),
    "one element in a large output": (
        LARGE, changed("d_dweight, ", "d_dweight + 1, "), 1, r"dweight: WRONG, first at \[0\]",
    ),
    "one bit": (
        EXACT, changed("+ to_float(wpe[place])", "+ 1.004f * to_float(wpe[place])"), 1,
        r"out: WRONG, first at \[0, 0, \d+\]: expected -?[\d.]+, got",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Path]]:
    folder = tmp_path_factory.mktemp("exported")
    texts: dict[str, str] = {}
    made: dict[str, Future[Path]] = {}
    pool = ThreadPoolExecutor(4)
    for name, (job, change, _, _) in CASES.items():
        key = f"{job.family}:{job.version}"
        texts[key] = texts.get(key) or text_of(job)
        made[name] = pool.submit(build_on_cpu, change(texts[key]), folder / name.replace(" ", "-"))
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_program_says_whether_it_is_right(name: str, programs: dict[str, Future[Path]]) -> None:
    _, _, status, said = CASES[name]
    done = run(programs[name].result(), "--check-only")
    assert done.returncode == status, done.stdout
    assert re.search(said, done.stdout), done.stdout
    assert ("WRONG" in done.stdout) == (status == 1)


def test_it_times_and_checks_again(programs: dict[str, Future[Path]]) -> None:
    """Start values are restored before each launch, or the second check would fail."""
    for options, flushed in ((["--samples", "3"], "flushed"), (["--samples", "2", "--hot"], "not flushed")):
        done = run(programs["large"].result(), *options)
        assert done.returncode == 0, done.stdout
        assert f"of {options[1]} samples, quartiles 10000.00 to 10000.00 us, L2 {flushed} before each" in done.stdout
        assert done.stdout.count("elements compared, 0 wrong") == 6


@pytest.mark.parametrize("options", [["--samples", "0"], ["--samples", "x"], ["--sample", "3"], ["--samples"]])
def test_wrong_use_of_a_program_is_an_error(options: list[str], programs: dict[str, Future[Path]]) -> None:
    done = run(programs["right"].result(), *options)
    assert done.returncode == 2 and "error: " in done.stdout
