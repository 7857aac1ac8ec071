"""How often `kbench report` is wrong, and what it finds, on times made up with known noise. No GPU.

    python3 benchmarks/report_simulation.py [--reports 1000] [--rows 200] [--only TEXT] [--json FILE]
    python3 benchmarks/report_simulation.py --speed 100000

Each report compares rows whose two sides are the same but for noise. Of a sample: log-normal within a round, and one in
twenty is late by an exponential time of five times that noise on average. Of a round: normal. The columns:

  noise, between   relative standard deviations within a round and between rounds
  rounds           rounds a side x samples in each
  error            standard error of the log ratio as it really is, over all rows of all reports
  false at 0       reports with any row called slower, where the threshold is 0: nothing but the interval protects
  false            the same with the default threshold of 3%
  found at 0       rows made slower by 7 errors that are called slower, threshold 0; one row in 20 is made slower
  found            rows made slower by 7 errors, and by at least 3 errors beyond 3%, at the default threshold

Below the grid stand cases that are not as the model has it: rows that all differ in noise, disturbed rounds, a second
session in which each kernel is a little off, a machine that is a little slower, few rows, uneven rounds.
--speed decides one report of that many rows, all the way from samples to sentences, and says how long it takes.
It ends with status 1 if more than 1% of reports are false, or (in the grid) under 99% of the slowdowns are found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kbench.report.decide import Comparison, decide_all
from kbench.report.decision import FLOOR_MS, THRESHOLD
from kbench.report.estimate import Estimates, estimate
from kbench.report.family_wise import REPORT_ERROR
from kbench.report.judge import SLOWER, Judgement, Limits, judge
from kbench.report.noise import Noise, noise_of
from kbench.report.side import Side

INJECTED = 7.0  # errors
BEYOND = 3.0  # errors beyond the threshold, so that the estimate itself is above it 999 times in 1,000
ONE_IN = 20
LATE, LATE_BY = 0.05, 5.0  # part of the samples, and multiple of the noise
BASE_MS = 1.0


@dataclass(frozen=True)
class Case:
    """One row of the table.

    noise, between: per row drawn evenly (on a log scale) from the range. disturbed: part of the rounds that are 10 to
    50% slower. session: relative standard deviation of a row's whole second side. shift: of all second sides.
    identical: part of the rows that are known to be the same machine code. uneven: rounds have 4 to `samples` samples.
    power: slowdowns are put in, too.
    """

    name: str
    noise: tuple[float, float]
    between: tuple[float, float]
    rounds: int = 3
    samples: int = 10
    rows: int | None = None
    disturbed: float = 0.0
    session: float = 0.0
    shift: float = 0.0
    identical: float = 0.0
    uneven: bool = False
    power: bool = False


@dataclass(frozen=True)
class Result:
    case: Case
    reports: int
    error: float
    false_at_zero: float
    false: float
    found_at_zero: float
    found: float
    seconds: float


def grid() -> Iterator[Case]:
    for rounds, samples in ((3, 10), (3, 64), (5, 20)):
        for noise in (0.01, 0.05, 0.20):
            for between in (0.005, 0.01, 0.02):
                yield Case("grid", (noise, noise), (between, between), rounds, samples, power=True)


def others() -> Iterator[Case]:
    usual = Case("", (0.01, 0.2), (0.005, 0.02))
    yield replace(usual, name="rows differ")
    yield replace(usual, name="rows differ", samples=64)
    yield replace(usual, name="rows differ", rounds=5, samples=20)
    yield replace(usual, name="uneven rounds", samples=64, uneven=True)
    yield replace(usual, name="disturbed rounds", noise=(0.01, 0.01), between=(0.01, 0.01), disturbed=0.02)
    yield replace(usual, name="disturbed rounds", disturbed=0.02, samples=64)
    yield replace(usual, name="off session", noise=(0.02, 0.02), between=(0.005, 0.005), session=0.01, identical=0.5)
    yield replace(usual, name="all 0.9% slower", noise=(0.02, 0.02), between=(0.005, 0.005), shift=0.009)
    for rows in (1, 2, 3, 8, 20):
        yield replace(usual, name=f"rows differ: {rows}", rows=rows)


def draw(case: Case, rows: int, rng: np.random.Generator) -> Estimates:
    """Estimates of the rows of one report."""
    shape = (rows, 2, case.rounds)

    def spread(limits: tuple[float, float]) -> np.ndarray:
        return np.exp(rng.uniform(np.log(limits[0]), np.log(limits[1]), (rows, 1, 1)))

    noise, between = spread(case.noise), spread(case.between)
    surroundings = between * rng.standard_normal(shape)
    if case.disturbed:
        surroundings += (rng.random(shape) < case.disturbed) * np.log(rng.uniform(1.1, 1.5, shape))
    surroundings[:, 1] += np.log1p(case.shift) + case.session * rng.standard_normal((rows, 1))
    samples = rng.standard_normal((*shape, case.samples))
    samples *= noise[..., None]
    late = np.flatnonzero(rng.random(samples.size) < LATE)
    place = late // (2 * case.rounds * case.samples)
    samples.reshape(-1)[late] += np.log1p(LATE_BY * noise[place, 0, 0] * rng.standard_exponential(len(late)))
    values = BASE_MS * np.exp(samples + surroundings[..., None])
    sizes = np.full(shape, case.samples)
    if case.uneven:
        sizes = rng.integers(4, case.samples + 1, shape)
        sizes[..., 0] = case.samples  # enough samples for a verdict
        values = values[np.arange(case.samples) < sizes[..., None]]
    return estimate(values.ravel(), sizes.ravel(), np.full(2 * rows, case.rounds))


def slowed(estimates: Estimates, chosen: np.ndarray, log: np.ndarray) -> Estimates:
    """The same rows, some of them slower on the second side."""
    location = estimates.location.copy()
    location[chosen, 1] += log[chosen]
    return replace(estimates, location=location)


def judged(estimates: Estimates, threshold: float, identical: np.ndarray, noise: Noise) -> Judgement:
    rows = len(estimates)
    return judge(
        estimates,
        Limits(
            sign=np.ones(rows),
            threshold=np.full(rows, threshold),
            floor=np.full(rows, FLOOR_MS if threshold else 0.0),
            min_rounds=np.full(rows, 3),
            min_samples=np.full(rows, 30),
            identical=identical,
            kernels=np.arange(rows),
        ),
        REPORT_ERROR,
        noise=noise,
    )


def simulate(case: Case, reports: int, rows: int, seed: int) -> Result:
    begun = time.perf_counter()
    rng = np.random.default_rng(seed)
    rows = case.rows or rows
    identical = np.arange(rows) < case.identical * rows
    chosen = np.arange(rows) % ONE_IN == ONE_IN - 1
    every = [draw(case, rows, rng) for _ in range(reports)]
    error = float(np.std([report.location[:, 1] - report.location[:, 0] for report in every]))
    false = {0.0: 0, THRESHOLD: 0}
    found = {0.0: 0, THRESHOLD: 0}
    for report in every:
        noise = noise_of(report)  # which a slower row does not change
        for threshold in false:
            verdicts = judged(report, threshold, identical, noise).verdict
            false[threshold] += bool((verdicts == SLOWER).any())
            if not case.power:
                continue
            log = INJECTED * error if not threshold else max(INJECTED * error, np.log1p(threshold) + BEYOND * error)
            verdicts = judged(slowed(report, chosen, np.full(rows, log)), threshold, identical, noise).verdict
            found[threshold] += int((verdicts[chosen] == SLOWER).sum())
    injected = reports * max(int(chosen.sum()), 1)
    return Result(
        case,
        reports,
        error,
        false[0.0] / reports,
        false[THRESHOLD] / reports,
        found[0.0] / injected,
        found[THRESHOLD] / injected,
        time.perf_counter() - begun,
    )


HEAD = "case              noise     between    rounds  error  false at 0   false  found at 0   found  seconds"


def line(result: Result) -> str:
    case = result.case

    def span(limits: tuple[float, float]) -> str:
        low, high = (f"{100 * limit:g}" for limit in limits)
        return f"{low}%" if low == high else f"{low}-{high}%"

    found = f"{result.found_at_zero:11.2%} {result.found:7.2%}" if case.power else f"{'-':>11} {'-':>7}"
    return (
        f"{case.name:16}  {span(case.noise):8}  {span(case.between):8}  {case.rounds:2} x {case.samples:2}"
        f"  {result.error:5.2%}  {result.false_at_zero:10.2%} {result.false:7.2%} {found}  {result.seconds:7.1f}"
    )


def speed(rows: int) -> None:
    rng = np.random.default_rng(0)
    samples = np.exp(0.01 * rng.standard_normal((rows, 2, 3, 10)))
    compared = [Comparison(Side(list(before)), Side(list(after))) for before, after in samples]
    lists = [Comparison(Side(before), Side(after)) for before, after in samples.tolist()]
    for name, of_a_kind in (("arrays", compared), ("lists", lists)):
        wall, cpu = time.perf_counter(), time.process_time()
        decide_all(of_a_kind)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(f"{rows:,} rows of 2 x 3 x 10 samples in {name}: {wall:.2f} s, {cpu:.2f} s of the processor")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--seed", type=int, default=20240607)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--speed", type=int, metavar="ROWS", help="no simulation: the time that one report takes")
    options = parser.parse_args()
    if options.speed:
        speed(options.speed)
        return 0
    print(HEAD, flush=True)
    results = []
    for number, case in enumerate([*grid(), *others()]):
        if options.only not in case.name:
            continue
        results.append(simulate(case, options.reports, options.rows, options.seed + number))
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    missed = [result for result in results if result.case.power and min(result.found_at_zero, result.found) < 0.99]
    false = [result for result in results if result.false > 0.01]
    print(f"{len(results)} cases: {len(false)} with over 1% false reports, {len(missed)} with under 99% found")
    return 1 if false or missed else 0


if __name__ == "__main__":
    sys.exit(main())
