"""`kbench ceilings`: what it shows of what its worker says, and what it says without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kbench.ceilings import Ceilings, Evidence
from kbench.cli.app import run_command
from kbench.device.cuda import probe
from kbench.device.worker import WorkerLost
from kbench.errors import CannotRunError, Exit, KernelFault
from kbench.measure import ceilings_worker

FOUND = Ceilings(
    4256.4, "a kernel", 2 << 30, {"fp32": 51.2, "bf16": 812.34}, 8192, read_gbs=4461.0, launch_us=1.234,
    evidence={
        "copy": Evidence(4250.0, 4260.0, "2 GiB read and written, a kernel, 4 loads a thread, cold L2"),
        "bf16 GEMM": Evidence(809.1, 815.0, "M = N = K = 8,192, cuBLASLt, cold L2"),
        "launch": Evidence(1.23, 1.24, "what each adds from 64 to 512 of an empty kernel, queued"),
    },
    measured="2026-11-29T12:00:05Z",
)  # fmt: skip
ANSWER = {
    "device": {"name": "Test GPU", "arch": "sm_90", "driver": "580.1", "compiler": "NVRTC 13.0"},
    "card": {"uuid": "u", "power_limit_w": 700.0, "sm_clock_mhz": 1980, "application_clock_mhz": 1980},
    "ceilings": FOUND.to_dict(),
    "cached": True,
    "busy": "",
}


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command beside a GPU whose worker gives an answer; its status, stdout, stderr and what was asked."""

    def run(*words: str, **changes: Any) -> tuple[int, str, str, list[bool]]:
        asked: list[bool] = []
        monkeypatch.setattr(probe, "probe_gpu", lambda: "")
        monkeypatch.setattr(ceilings_worker, "ask", lambda again, note: asked.append(again) or {**ANSWER, **changes})
        status = run_command(["ceilings", *words])
        streams = capsys.readouterr()
        return status, streams.out, streams.err, asked

    return run


def test_the_table_has_value_unit_interval_and_how(ceilings: Any) -> None:
    status, out, err, asked = ceilings()
    assert (status, err, asked) == (Exit.OK, "", [False])
    assert all(len(line) <= 80 for line in out.splitlines())
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("Test GPU (sm_90, driver 580.1, NVRTC 13.0)\n")
    assert "  limits    700 W, SM clock 1980 MHz" in out
    assert "  measured  2026-11-29 12:00:05 UTC, from the cache (--again measures anew)" in out
    first = [line[:4] for line in lines if line[:1] in (["copy"], ["read"], ["launch"])]
    assert first == [["copy", "4,256", "GB/s", "4,250..4,260"], ["read", "4,461", "GB/s"],
                     ["launch", "1.234", "us", "1.230..1.240"]]  # fmt: skip
    assert ["bf16", "GEMM", "812.3", "TFLOP/s", "809.1..815.0"] in [line[:5] for line in lines]
    assert "cuBLASLt" in out


@pytest.mark.parametrize("columns", ["50", "60", "120"])
def test_the_table_fits_the_terminal(ceilings: Any, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = ceilings()[1]
    assert all(len(line) <= int(columns) for line in out.splitlines()) and "4,256" in out and "1.234" in out


def test_anew_and_what_it_remarks_on(ceilings: Any) -> None:
    found = {**FOUND.to_dict(), "notes": ["measured beside others: 1 other process uses this GPU (pid 7)"]}
    card = {"uuid": None, "power_limit_w": None, "sm_clock_mhz": 1980, "application_clock_mhz": 1095}
    status, out, err, asked = ceilings("--again", cached=False, ceilings=found, card=card, busy="1 other process")
    assert (status, err, asked) == (Exit.OK, "", [True])
    assert "measured  2026-11-29 12:00:05 UTC\n" in out and out.endswith("\n" + found["notes"][0] + "\n")
    assert "power limit not known, SM clock 1980 MHz, application clock 1095 MHz" in out


def test_a_busy_gpu_is_remarked_on_beside_what_is_kept(ceilings: Any) -> None:
    _, _, err, _ = ceilings(busy="2 other processes use this GPU (pids 7, 8)")
    assert err == "kbench: 2 other processes use this GPU (pids 7, 8): what is measured now would be less\n"


def test_the_document(ceilings: Any) -> None:
    status, out, err, _ = ceilings("--json")
    document = json.loads(out)
    assert (status, err) == (Exit.OK, "")
    assert document["command"] == "ceilings" and document["exit_status"] == 0 and document["cached"] is True
    assert Ceilings.from_dict(document["ceilings"]) == FOUND
    assert document["card"]["sm_clock_mhz"] == 1980 and document["device"]["driver"] == "580.1"


def test_nothing_measured_is_no_success(ceilings: Any) -> None:
    nothing = Ceilings(notes=("copy, read and write not measured: no memory",), measured="2026-11-29T12:00:05Z")
    status, out, err, _ = ceilings(ceilings=nothing.to_dict(), cached=False)
    assert status == Exit.CANNOT and "no memory" in out and err == "kbench: nothing could be measured\n"


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probe, "probe_gpu", lambda: "no NVIDIA driver")
    assert run_command(["ceilings"]) == Exit.CANNOT
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err.count("\n") == 1
    assert "no NVIDIA driver; the emulator has no ceilings" in streams.err
    assert run_command(["ceilings", "--json"]) == Exit.CANNOT
    assert json.loads(capsys.readouterr().out)["exit_status"] == 5
    assert run_command(["ceilings", "attention_backward"]) == Exit.USAGE


# ---------------------------------------------------------------------------------------------- the worker


class Worker:
    """Answers one request, or ends; remembers how it was let go."""

    answer: Any = None
    ended: ClassVar[list[str]]

    def __init__(self, target: str, options: dict[str, Any], note: Any):
        assert target == "kbench.measure.ceilings_worker:serve" and options == {}

    def call(self, request: dict[str, Any]) -> Any:
        assert request == {"again": True}
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.ended.append("closed")

    def kill(self) -> None:
        self.ended.append("killed")


FAULT = KernelFault("timeout", "measuring the GPU's ceilings did not end within its time limit", context_lost=True)


@pytest.mark.parametrize(
    ("answer", "raised", "ended"),
    [
        (ANSWER, None, "closed"),
        (WorkerLost(FAULT), KernelFault, "killed"),
        (CannotRunError("no"), CannotRunError, "killed"),
        (KeyboardInterrupt(), KeyboardInterrupt, "killed"),
    ],
)
def test_the_worker_is_let_go_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, answer: Any, raised: type[BaseException] | None, ended: str
) -> None:
    how: list[str] = []
    worker = type("Worker", (Worker,), {"answer": answer, "ended": how})
    monkeypatch.setattr(ceilings_worker, "Worker", worker)
    if raised is None:
        assert ceilings_worker.ask(True, print) == ANSWER
    else:
        with pytest.raises(raised):
            ceilings_worker.ask(True, print)
    assert how == [ended]


def test_a_real_worker_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CannotRunError, match="cannot use a GPU"):
        ceilings_worker.ask(False, print)
