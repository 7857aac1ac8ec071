"""Parameters of versions, and searches over them, on a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kbench.catalog import load_catalog
from kbench.cli.app import run_command
from kbench.results.best import load_best
from kbench.results.store import latest_run, read_run

CATALOG = load_catalog()
VERSIONS = [
    pytest.param(name, version.number, id=f"{name}:{version.number}")
    for name in CATALOG.names
    for version in CATALOG[name].versions
    if version.params
]
WHOLE = ["--strategy", "brute_force"]  # all values


def sweep(target: str, folder: Path, *options: str) -> Any:
    """The rows of a sweep over block sizes and parameters, by place."""
    status = run_command(["sweep", target, "--results", str(folder), "--seed", "1", "--device", "cuda", *options])
    rows = read_run(latest_run(folder)).rows
    assert status == 0, [f"{row.place}: {row.status}: {row.reason}" for row in rows if row.status != "pass"]
    return rows


@pytest.mark.parametrize("name, number", VERSIONS)
def test_every_value_is_proven_and_timed_with_a_kernel_of_its_own(name: str, number: int, tmp_path: Path) -> None:
    version = CATALOG[name].by_number[number]
    # At its default size permute has too few large tiles to go round, and takes small ones whatever it is told.
    rows = sweep(f"{name}:{number}", tmp_path, *WHOLE, "--preset", "large" if name == "permute" else "default")
    assert all(row.status == "pass" and row.measurement for row in rows)
    values = {tuple(row.params.values()) for row in rows}
    assert values == {(value,) for param in version.params.values() for value in param.values}
    kernels: dict[Any, set[str]] = {value: set() for value in values}
    for row in rows:
        kernels[tuple(row.params.values())] |= {kernel["name"] for kernel in row.kernels}
    assert len({frozenset(names) for names in kernels.values()}) == len(values), kernels


@pytest.mark.parametrize("name, number", VERSIONS)
def test_every_value_is_proven_at_check_shapes(name: str, number: int) -> None:
    assert run_command(["check", f"{name}:{number}", "--seed", "1", "--device", "cuda"]) == 0


def test_the_fastest_value_is_kept(tmp_path: Path) -> None:
    rows = sweep("residual_forward:2", tmp_path, "--param", "PACKETS=1,2,4")
    fastest = min(rows, key=lambda row: row.measurement["median_ms"])
    (gpu,) = load_best(tmp_path)["gpus"].values()
    kept = gpu["residual_forward"][fastest.dtype]["cold"][fastest.problem]["2"]["row"]
    assert (kept["block"], kept["params"]) == (fastest.block, fastest.params)


@pytest.mark.skipif(importlib.util.find_spec("kernel_tuner") is None, reason="kernel-tuner is not installed")
@pytest.mark.parametrize("strategy", ["random_sample", "genetic_algorithm", "greedy_ils", "bayes_opt"])
def test_a_search_measures_some_rows_and_comes_near_the_fastest(strategy: str, tmp_path: Path, capsys: Any) -> None:
    rows = sweep("global_norm:4", tmp_path, *WHOLE)
    fastest = min(row.measurement["median_ms"] for row in rows)
    capsys.readouterr()
    found = sweep("global_norm:4", tmp_path, "--strategy", strategy, "--max-rows", "12", "--json")
    (searched,) = json.loads(capsys.readouterr().out)["searched"]
    assert len(found) == searched["rows"] <= 12 < searched["size"] == len(rows)
    assert min(row.measurement["median_ms"] for row in found) < 1.5 * fastest
