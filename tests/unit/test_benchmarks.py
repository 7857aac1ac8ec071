"""The scripts in benchmarks/, without a GPU: what they make of gaps in what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fakes import failed, make_row
from kbench.ceilings import Ceilings
from kbench.errors import CannotRunError, UsageError
from kbench.inspect.counts import KernelCounts, Place, Tally
from kbench.jobs import Job
from kbench.results.best import update_best
from kbench.results.schema import Row
from kbench.results.store import RunWriter
from kbench.selection import Selection

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------- results_page


WHOLE = Ceilings(4000.0, "a kernel", 2 << 30, {"fp32": 50.0, "bf16": 800.0}, 8192)
ROW = make_row(7, family="gelu_forward", median_ms=2.0, traffic=4e9)


@pytest.mark.parametrize(
    ("ceilings", "words", "share"),
    [
        (WHOLE, "ceilings: copy 4,000 GB/s, GEMM fp32 50, bf16 800 TFLOP/s. 2 rows.", "50% copy"),
        (Ceilings(4000.0, notes=("fp32 GEMM not measured: x",)), "copy 4,000 GB/s; fp32 GEMM not measured: x.", "50%"),
        (Ceilings(None, gemm_tflops={"fp32": 50.0}), "ceilings: GEMM fp32 50 TFLOP/s.", "2,000 |  |  |"),
        (Ceilings(), "ceilings: not known. 2 rows.", "2,000 |  |  |"),
        (None, "ceilings: not known. 2 rows.", "2,000 |  |  |"),
    ],
)
@pytest.mark.parametrize("driver", ["580.1", None])
def test_the_page_says_as_much_of_the_ceilings_as_the_run_knows(
    ceilings: Ceilings | None, words: str, share: str, driver: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    device = {"name": "Test GPU", "driver": driver, "compiler": "NVRTC 13.0"}
    device |= {"ceilings": ceilings.to_dict()} if ceilings is not None else {}
    with RunWriter(tmp_path, device=device, command=[], options={}, kbench_version="0") as writer:
        for row in (ROW, failed(1, family="permute")):
            writer.append(row)
    monkeypatch.setattr(sys, "argv", ["results_page.py", f"Some problems={writer.path}"])
    script("results_page").main()
    page = capsys.readouterr().out
    assert "## Some problems\n" in page and words in page and ("driver 580.1" in page) == (driver is not None)
    (line,) = (line for line in page.splitlines() if line.startswith("| gelu_forward"))
    assert line.startswith("| gelu_forward | N=64 | fp32 | 7 | 256 | 2.000 |") and share in line
    assert "| permute" not in page, "nothing of it was proven"


# ---------------------------------------------------------------------------------------------- families


SIZES = {"N": 64}


class Bench:
    """Has every family but one; gelu_backward fails now, although it was right once."""

    device_name = "Test GPU"

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None: ...

    def jobs(self, selection: Selection) -> list[Job]:
        (target,) = selection.targets
        if target.family == "permute":
            raise UsageError("permute has no preset 'default'")
        return [Job(target.family, v, "", SIZES, "fp32", block) for v in (1, 2) for block in (128, 256)]

    def rows(self, jobs: list[Job]) -> Iterator[Row]:
        for job in jobs:
            facts = {k: v for k, v in asdict(job).items() if k in ("family", "version", "sizes", "dtype", "block")}
            bad = {"status": "fail", "reason": "wrong"} if job.family == "gelu_backward" else {"median_ms": 1.0}
            yield make_row(**facts, **bad)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs benchmarks/families.py for some families; its exit status and the figures that it wrote."""
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Test GPU", empty_cache=lambda: None)
    torch = SimpleNamespace(
        __version__="2", cuda=cuda, compile=lambda operation: operation, _dynamo=SimpleNamespace(reset=lambda: None),
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False))),
    )  # fmt: skip
    names = ("gelu_forward", "gelu_backward", "permute", "adamw", "global_norm")
    anchors = SimpleNamespace(ANCHORS=dict.fromkeys(names, lambda sizes, dtype: "operation"), DTYPES={"fp32": "fp32"})
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "anchors", anchors)
    module = script("families")
    monkeypatch.setattr(module, "Bench", Bench)
    monkeypatch.setattr(module, "_device", lambda: None)
    monkeypatch.setattr(module, "_torch_ms", lambda device, torch, operation: 3.0)
    kept = [make_row(2, family=name, block=128, median_ms=1.0, sizes=SIZES) for name in names if name != "adamw"]
    kept += [make_row(1, family="global_norm", median_ms=0.5, sizes=SIZES, block=512)]  # a block size that is no more
    update_best(tmp_path, kept, "run")

    def run(*chosen: str) -> tuple[int, list[dict[str, Any]]]:
        options = ["--results", str(tmp_path), "--json", str(tmp_path / "figures.json")]
        monkeypatch.setattr(sys, "argv", ["families.py", *chosen, *options])
        status = module.main()
        return status, json.loads((tmp_path / "figures.json").read_text())

    return run


def test_families_that_are_missing_or_fail_are_told_and_the_others_are_compared(
    families: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    status, figures = families("adamw", "gelu_backward", "permute", "global_norm", "gelu_forward")
    assert status == 1
    assert [(row["family"], row["version"], row["block"], row["ratio"]) for row in figures] == [
        ("gelu_forward", 2, 128, 3.0)
    ]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["adamw"].endswith("best.json has no row of fp32 default: first `kbench sweep`")
    assert lines["global_norm"].endswith("best.json has no row of fp32 default: first `kbench sweep`")
    assert lines["gelu_backward"] == "fp32 fail: wrong"
    assert lines["permute"] == "permute has no preset 'default'"
    assert lines["gelu_forward"].startswith("fp32 2 1.0000 3.0000")


def test_without_gaps_the_status_is_0(families: Any) -> None:
    assert families("gelu_forward")[0] == 0


# ---------------------------------------------------------------------------------------------- counts_ncu


def test_counts_stand_beside_those_of_ncu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two kernels in one plan; ncu sees the second twice, and another grid of the first."""
    module = script("counts_ncu")
    job = Job("gelu_forward", 1, "", {"N": 8}, "fp32", 64)

    def places(**sectors: int) -> dict[Any, Any]:
        return {Place("", 0, "", kind, "inp", 4): Tally(sectors=count) for kind, count in sectors.items()} | {
            Place("", 0, "", "load", "", 4): Tally(wavefronts=5)
        }

    ours = SimpleNamespace(
        kernels=(KernelCounts("first<float>", 1, 4, 4, places(load=10, store=20, atomic=1)),
                 KernelCounts("second", 2, 6, 6, places(load=7)))
    )  # fmt: skip
    header = ["Kernel Name", "Grid Size", "Block Size", *sum(module.COUNTERS.values(), ())]
    lines = [
        header,
        ["kbench_marker(int)", "(1, 1, 1)", "(1, 1, 1)", "0", "0", "0", "0"],
        ["void first<float>(float *)", "(2, 1, 1)", "(64, 1, 1)", "20", "20", "1", "4"],
        ["second(int)", "(3, 1, 1)", "(64, 1, 1)", "3", "0", "2", "0"],
        ["second(int)", "(3, 1, 1)", "(64, 1, 1)", "4", "0", "3", "0"],
    ]
    raw = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    monkeypatch.setattr(module, "profile", lambda *anything, **options: SimpleNamespace(raw=raw))
    launches = module.ncu_counts(None, [job], 1)
    rows = [module.figure(job, *pair) for pair in module.paired(ours.kernels, launches[0])]
    assert rows[0]["ours"] == {"loads": 10, "stores": 20, "wavefronts": 5}, "atomics are neither"
    assert rows[0]["ncu"] == {"loads": 20, "stores": 20, "wavefronts": 5}
    assert rows[1]["ncu"] == {"loads": 7, "stores": 0, "wavefronts": 5} and rows[1]["ncu_blocks"] == 6
    module.show(rows)
    first, second = capsys.readouterr().err.splitlines()[1:]
    assert "OTHER" in first and "0.500" in first and "same" in second and "1.000" in second
    with pytest.raises(CannotRunError, match="ncu saw 1 launches of 2"):
        module.ncu_counts(None, [job, job], 1)
