"""run, check and sweep on a bench of made-up rows: what they print, write and end in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import FakeBench, failed, make_row
from gpu_rows import gpu_row, kernel
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, CompileError, Exit, UsageError
from kbench.grammar import Target
from kbench.results.best import load_best
from kbench.results.schema import Row
from kbench.results.store import latest_run, read_run

Script = Iterable[Row | BaseException]
Runner = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs a command line on a bench that hands out `script`; returns exit status, stdout and stderr."""

    def runner(command: str, script: Script = (), **settings: Any) -> tuple[int, str, str]:
        bench = type("Bench", (FakeBench,), {"script": list(script), **settings})
        monkeypatch.setattr("kbench.sweep.Bench", bench)
        runner.bench = bench
        status = run_command(command.split())
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return runner


def narrow(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


# ------------------------------------------------------------------------------------------------- run


def test_run_reports_one_version(kbench: Runner) -> None:
    status, out, err = kbench("run toy --version 5", [make_row(5, median_ms=0.4981)])
    assert status == 0 and err == ""
    assert "toy version 5: idea number 5" in out
    assert "Test GPU (sm_90, driver 580.1, NVRTC 13.0)" in out
    assert "N=64, fp32, block size 256, seed 7" in out
    assert "pass, 2 launches, bitwise equal each time, judged by numpy" in out
    assert "4,096" in out and "12%" in out
    assert "0.4981 ms median, 95% interval 0.4931..0.5031, cold L2, 3 samples" in out


def test_run_tells_what_the_kernel_takes_of_the_card(kbench: Runner) -> None:
    row = gpu_row(6, 256, 0.01693, [kernel("layernorm_forward6<float>", 1024, 256, 40, shared=30720)], 1e6)
    out = " ".join(kbench("run layernorm_forward:6", [row])[1].split())
    assert "cold L2, 3 samples, 2,977 GB/s" in out
    assert (
        "kernel layernorm_forward6<float>: 40 registers, 30,720 bytes of shared memory, occupancy 75% (limited" in out
    )
    assert "1,024 blocks are" not in out, "the record does not say how many multiprocessors there are"
    assert "kernel" not in kbench("run toy:5", [make_row(5, median_ms=1.0, steps={"Gemm": 1})])[1]


def test_run_asks_the_bench_for_what_was_typed(kbench: Runner) -> None:
    line = "run toy --versions 1,3-4 --block-size 96 --size N=2,3 --size M=1..4 --preset small --dtype tf32"
    kbench(line, [make_row(1)])
    assert kbench.bench.asked == {
        "targets": [Target("toy", (1, 3, 4))],
        "mode": "run",
        "block_sizes": [96],
        "sizes": {"N": [2, 3], "M": [1, 2, 4]},
        "preset": "small",
        "dtype": "tf32",
        "params": {},
        "whole": False,
        "usual": False,
    }


def test_run_on_the_emulator_shows_no_time(kbench: Runner) -> None:
    status, out, _ = kbench("run toy:5", [make_row(5)], kind="emulator")
    assert status == 0
    assert "no times: the emulator is not a GPU" in out
    assert " ms " not in out
    status, out, _ = kbench("run toy", [make_row(1), make_row(2)], kind="emulator")
    assert "median" not in out and "speed-up" not in out and "*" not in out
    assert "no times: the emulator is not a GPU" in out


def test_a_wrong_version_says_where_and_how_to_see_it_again(kbench: Runner) -> None:
    row = failed(5, details=["out[0, 3]: 1 is 2", "blocks 0 to 3"], reproduce="kbench run toy --version 5 --seed 7")
    status, out, _ = kbench("run toy:5", [row])
    assert status == Exit.WRONG
    assert "FAIL: out: 3 of 4096 elements wrong" in out
    assert f"{' ' * 11}out[0, 3]: 1 is 2\n{' ' * 11}blocks 0 to 3\n" in out
    assert "again    kbench run toy --version 5 --seed 7" in out
    assert "time " not in out


def test_long_compiler_logs_are_cut_unless_debugging(kbench: Runner) -> None:
    row = failed(5, "invalid", "toy.cu:3: expected ;", details=[f"line {n}" for n in range(100)])
    status, out, _ = kbench("run toy:5", [row])
    assert status == Exit.USAGE
    assert "line 19" in out and "line 20" not in out and "80 more lines" in out
    assert "line 99" in kbench("run toy:5 --debug", [row])[1]


@pytest.mark.parametrize(
    ("status", "expected", "words"),
    [
        ("refused", Exit.USAGE, "toy version 5 refuses this: needs T even"),
        ("skipped", Exit.CANNOT, "--device cuda"),
        ("unable", Exit.CANNOT, "cannot run here: needs T even"),
    ],
)
def test_a_named_version_that_did_not_run_is_an_error(kbench: Runner, status: str, expected: Exit, words: str) -> None:
    got, out, err = kbench("run toy:5", [failed(5, status, "needs T even", device="emulator")])
    assert got == expected and out == ""
    assert err.startswith("kbench: error: ") and words in err and err.count("\n") == 1


def test_a_family_of_one_version_needs_no_ladder(kbench: Runner) -> None:
    status, out, _ = kbench("run toy", [make_row(1, median_ms=0.5)])
    assert status == 0
    assert "toy version 1: idea number 1" in out and "0.5000 ms median" in out and "speed-up" not in out
    assert kbench("run toy", [failed(1, "refused", "needs T even")])[0] == Exit.USAGE
    # One row of two that were planned is a ladder that was interrupted.
    assert "speed-up" in kbench("run toy", [make_row(1, median_ms=0.5), KeyboardInterrupt()])[1]


def test_both_commands_that_repeat_a_failure_are_lines_to_be_copied(kbench: Runner, tmp_path: Path) -> None:
    again = "kbench run toy --version 5 " + "--size N=64 " * 8 + "--seed 7"
    row = failed(5, reproduce=again, smaller="kbench run toy --version 5 --size N=3")
    for command, first, second in (
        ("run toy:5", "  again    ", "  smaller  "),
        ("run toy", "    again:   ", "    smaller: "),
        ("check toy", "  again:   ", "  smaller: "),
        ("sweep toy", "    again:   ", "    smaller: "),
    ):
        rows = [row] if command == "run toy:5" else [row, make_row(6)]
        lines = kbench(command, rows)[1].splitlines()
        at = lines.index(first + again)
        assert lines[at + 1] == second + "kbench run toy --version 5 --size N=3"
    assert "smaller" not in kbench("check toy", [failed(5)])[1]


def test_the_ladder_compares_versions_with_the_first_timed(kbench: Runner) -> None:
    rows = [
        failed(1, "refused", "block size 256 is not supported"),
        make_row(2, median_ms=172.8, idea="one thread per element " * 6),
        make_row(3, median_ms=14.4, used=0.004),
        failed(4, "hung", "a launch took over 30 s"),
        make_row(5, median_ms=14.45),
    ]
    status, out, _ = kbench("run toy", rows)
    assert status == Exit.CRASHED
    assert narrow(out)
    lines = {
        line.split()[1] if line[:1] in "*~" else line.split()[0]: line for line in out.splitlines() if line.strip()
    }
    assert "172.8" in lines["2"] and "1.00x" in lines["2"]
    assert lines["3"].startswith("*") and "12.00x" in lines["3"] and "<1%" in lines["3"]
    assert lines["5"].startswith("~")
    assert "ms" not in lines["4"].split()
    assert "version 1 refused at block size 256: block size 256 is not supported" in out
    assert "version 4 hung at block size 256: a launch took over 30 s" in out
    assert sum(line.count("thread") for line in out.splitlines()) == 6  # an idea is wrapped, never cut


def test_each_problem_has_its_own_ladder(kbench: Runner) -> None:
    rows = [make_row(v, median_ms=v * n, sizes={"N": n}) for n in (8, 16) for v in (2, 1)]
    out = kbench("run toy", rows)[1]
    assert "toy: N=8, fp32" in out and "toy: N=16, fp32" in out
    assert out.count("1.00x") == out.count("2.00x") == 2
    assert "\n\ntoy: N=16" in out and out.count("speed-up over the first") == 1
    emulated = kbench("run toy", rows, kind="emulator")[1]
    assert emulated.count("no times") == 1 and emulated.endswith("\nno times: the emulator is not a GPU\n")


def test_a_ladder_of_refusals_alone_checked_nothing(kbench: Runner) -> None:
    status, _, err = kbench("run toy", [failed(1, "refused"), failed(2, "skipped")])
    assert status == Exit.NOTHING and "nothing was checked" in err
    assert kbench("run toy", [])[0] == Exit.NOTHING
    assert kbench("run toy", [failed(1, "refused"), make_row(2)])[0] == Exit.OK


def test_wrong_outranks_crashed(kbench: Runner) -> None:
    assert kbench("run toy", [failed(1, "crashed"), failed(2), make_row(3)])[0] == Exit.WRONG


# ----------------------------------------------------------------------------------------------- check


def test_check_sums_up_each_version_and_lists_failures_first(kbench: Runner) -> None:
    rows = [make_row(1, block=b, sizes={"N": n}, used=0.1 * b / 32) for b in (32, 64) for n in (1, 2, 3)]
    rows += [failed(1, "refused")]
    rows += [failed(2, block=b, reason=f"wrong at block {b}") for b in (32, 64, 96, 128, 160)] + [make_row(2, block=32)]
    rows += [failed(3, "hung", "endless")]
    status, out, _ = kbench("check toy", rows)
    assert status == Exit.WRONG
    assert narrow(out)
    assert out.index("FAIL toy version 2") < out.index("verdict")
    assert "wrong at block 96" in out and "wrong at block 128" not in out
    assert "version 2: not shown are 2 fail; --debug shows all rows" in out
    table = [
        line.split() for line in out.splitlines() if line.strip()[:1] in "123" and "%" in line or "stopped " in line
    ]
    assert ["1", "pass", "6", "0", "0", "1", "3", "2", "20%", "yes"] in table
    assert ["2", "fail", "1", "5", "0", "0", "1", "5", "12%", "yes"] in table
    assert "wrong at block 160" in kbench("check toy --debug", rows)[1]


def test_an_interrupted_check_calls_nothing_right_that_it_did_not_finish(kbench: Runner) -> None:
    rows = [make_row(1), make_row(1), failed(2), KeyboardInterrupt(), make_row(1), make_row(2), make_row(3)]
    status, out, err = kbench("check toy", rows)
    assert status == Exit.INTERRUPTED and narrow(out)
    assert err == "kbench: interrupted after 3 of 7 rows\n"  # and not that anything is kept
    verdicts = [line.split()[:5] for line in out.splitlines() if line.strip()[:1] in ("1", "2", "3")]
    assert verdicts[0][1:5] == ["2", "of", "3", "rows"]
    assert verdicts[1][1] == "fail"  # what is wrong already stays wrong
    assert verdicts[2][1:5] == ["0", "of", "1", "rows"]
    document = json.loads(kbench("check toy --json", rows)[1])
    assert [(entry["rows"], entry["planned"]) for entry in document["summary"]] == [(2, 3), (1, 3), (0, 1)]


def test_an_interrupted_run_does_not_say_that_rows_are_kept(kbench: Runner) -> None:
    err = kbench("run toy", [make_row(1), KeyboardInterrupt()])[2]
    assert err == "kbench: interrupted after 1 of 2 rows\n"


@pytest.mark.parametrize("command", ["check toy", "sweep toy", "run toy", "run toy:1"])
def test_tolerances_in_place_of_the_bound_are_said(kbench: Runner, command: str) -> None:
    rows = [make_row(1, overridden=True)] * (1 if command == "run toy:1" else 2)
    out = " ".join(kbench(f"{command} --rtol 1e-3", rows)[1].split())
    assert "--rtol 0.001 --atol 0 in place of the family's error bound" in out and " tol." in out
    assert "in place of" not in kbench(command, [make_row(1), make_row(2)])[1]


@pytest.mark.parametrize("command", ["run toy", "sweep toy"])
def test_modes_reach_the_bench_and_are_said(kbench: Runner, command: str) -> None:
    for words, mode, text in (("", "cold", "cold L2"), ("--hot", "hot", "hot L2"), ("--graph", "graph", "CUDA graph")):
        rows = [make_row(1, cache_mode=mode), make_row(2, cache_mode=mode)]
        out = kbench(f"{command} {words}", rows)[1]
        assert kbench.bench.asked_mode == mode and text in " ".join(out.split())
    status, _, err = kbench(f"{command} --hot --graph", [])
    assert status == Exit.USAGE and "--hot and --graph are two ways to time" in err


@pytest.mark.parametrize(
    ("command", "preset"),
    [
        ("run toy", True),
        ("sweep toy --block-sizes 32", True),
        ("check toy --size M=2", True),
        ("check toy", False),
        ("run toy --preset small", False),
        ("run toy --size N=64", False),
    ],
)
def test_the_emulator_in_place_of_a_gpu_is_one_note(kbench: Runner, command: str, preset: bool) -> None:
    settings = {"kind": "emulator", "fallback": "no driver"}
    note = f"kbench: no GPU (no driver): running on the CPU emulator{', with the `small` preset' if preset else ''}\n"
    assert kbench(command, [make_row(1), make_row(2)], **settings)[2] == note
    wrong = UsageError("unknown family 'toy'")
    assert kbench(command, jobs_error=wrong, **settings)[2] == "kbench: error: unknown family 'toy'\n"


def test_check_covers_every_family_if_none_is_named(kbench: Runner, tmp_path: Path) -> None:
    kbench("check --version 1", [make_row(1)])
    names = [target.family for target in kbench.bench.asked["targets"]]
    assert "attention_backward" in names
    assert kbench.bench.asked["mode"] == "check"


def test_check_of_nothing_is_not_a_success(kbench: Runner) -> None:
    status, out, err = kbench("check toy", [failed(1, "refused", "needs T even")])
    assert status == Exit.NOTHING
    assert "refused" in out and "nothing was checked" in err
    assert "version 1 refused: needs T even" in out


def test_check_says_how_a_version_stopped(kbench: Runner) -> None:
    rows = [failed(1, "invalid", "toy.cu:3: expected ;"), make_row(1), failed(2, "hung", "30 s"), failed(2, "crashed")]
    status, out, _ = kbench("check toy", rows)
    lines = [line.split()[:2] for line in out.splitlines()]
    assert status == Exit.CRASHED and ["1", "invalid"] in lines and ["2", "stopped"] in lines
    document = json.loads(kbench("check toy --json", rows)[1])
    assert document["summary"][0]["statuses"] == {"invalid": 1, "pass": 1}


def test_check_counts_and_tells_what_this_machine_skips(kbench: Runner) -> None:
    skipped = "needs 8 GPUs, this process sees 1"
    rows = [make_row(1), failed(1, "skipped", skipped), failed(1, "skipped", skipped), failed(1, "refused", "odd")]
    rows += [failed(2, "skipped", "no NCCL")]
    status, out, _ = kbench("check toy", rows)
    assert status == Exit.OK and narrow(out)
    heading, one, two = (line.split() for line in out.splitlines() if line.split() and line.split()[0] in "ver12")
    assert heading[:7] == ["ver", "verdict", "passed", "wrong", "stopped", "refused", "skipped"]
    assert one[:7] == ["1", "pass", "1", "0", "0", "1", "2"] and two[:7] == ["2", "skipped", "0", "0", "0", "0", "1"]
    assert f"version 1 skipped: {skipped} (2 rows)" in out and "odd" not in out
    document = json.loads(kbench("check toy --json", rows)[1])
    assert [(entry["refused"], entry["skipped"]) for entry in document["summary"]] == [(1, 2), (0, 1)]
    assert "skipped" not in kbench("check toy", rows[:1])[1], "no column where nothing was"


def test_a_preset_of_some_families_needs_no_names(kbench: Runner) -> None:
    kbench("check --preset large", [make_row(1)])
    assert kbench.bench.asked["targets"] == [], "all families: those that have the preset are meant"


def test_check_tells_a_rule_once_for_all_problems_that_break_it(kbench: Runner) -> None:
    rows = [replace(failed(1, "refused", f"needs T even (here T={T})"), sizes={"T": T}) for T in (3, 5)]
    assert "version 1 refused: needs T even (2 rows)\n" in kbench("check toy", rows)[1]


def test_check_says_determinism_as_it_was_seen(kbench: Runner) -> None:
    loose = make_row(1)
    assert loose.verdict is not None
    loose.verdict["deterministic"] = False
    document = json.loads(kbench("check toy --json", [loose, make_row(1)])[1])
    assert document["summary"][0]["deterministic"] is False


# ----------------------------------------------------------------------------------------------- sweep


def test_sweep_marks_the_winner_and_writes_everything(kbench: Runner, tmp_path: Path) -> None:
    rows = [make_row(v, block=b, median_ms=v + b / 1000) for v in (1, 2) for b in (32, 64)]
    rows += [failed(3, block=32, reason="out: 4 of 64 elements wrong"), failed(3, "refused", "fixed block size 64")]
    status, out, err = kbench(f"sweep toy --results {tmp_path / 'r'}", rows)
    assert status == Exit.WRONG and err == ""
    assert narrow("\n".join(line for line in out.splitlines() if str(tmp_path) not in line))
    assert "* fastest: version 1 at block size 32, 1.032 ms" in out
    starred = [line.split() for line in out.splitlines() if line.startswith("*") and "pass" in line]
    assert [words[1:3] for words in starred] == [["1", "32"]]
    assert "out: 4 of 64 elements wrong" in " ".join(out.split())
    run = read_run(latest_run(tmp_path / "r"))
    assert run.rows == rows and run.footer is not None
    assert str(run.path) in out
    assert run.header["options"]["seed"] == 7
    folder = tmp_path / "r" / "tables" / run.id
    assert {path.name for path in folder.iterdir()} == {"toy.csv", "toy.md"}
    assert list(load_best(tmp_path / "r")["gpus"]["Test GPU"]) == ["toy"]


def test_sweep_on_the_emulator_has_verdicts_only(kbench: Runner, tmp_path: Path) -> None:
    rows = [make_row(1, device="emulator"), make_row(2, device="emulator")]
    status, out, _ = kbench(f"sweep toy --results {tmp_path}", rows, kind="emulator")
    assert status == 0
    assert out.count("no times") == 1 and "no times: the emulator is not a GPU, so there is no winner" in out
    assert "median" not in out and "fastest" not in out and "*" not in out
    assert not (tmp_path / "best.json").exists()
    assert len(read_run(latest_run(tmp_path)).rows) == 2


def test_a_sweep_of_failures_alone_takes_back_what_it_disproves(kbench: Runner, tmp_path: Path) -> None:
    kbench(f"sweep toy --results {tmp_path}", [make_row(1, median_ms=1.0)])
    assert load_best(tmp_path)["gpus"]
    status, out, _ = kbench(f"sweep toy --results {tmp_path}", [failed(1)])
    assert status == Exit.WRONG and "fastest" not in out
    assert load_best(tmp_path)["gpus"] == {}


def test_statuses_have_colours_on_a_terminal(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row(1), failed(2), failed(3, "refused", "[red]not markup[/red]")]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = kbench("sweep toy", rows)[1]
    assert "\x1b[32mpass" in out and "\x1b[1;31mfail" in out and "\x1b[33mrefused" in out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = kbench("sweep toy", rows)[1]
    assert "\x1b" not in plain and "[red]not markup[/red]" in " ".join(plain.split())


def test_each_problem_has_its_own_table(kbench: Runner) -> None:
    rows = [make_row(1, median_ms=1.0, sizes={"N": n}) for n in (8, 16)]
    _, out, _ = kbench("sweep toy", rows)
    assert out.count("* fastest") == 2 and "toy: N=8, fp32" in out and "toy: N=16, fp32" in out


def test_results_follow_the_environment(kbench: Runner, tmp_path: Path) -> None:
    kbench("sweep toy", [make_row(1)])
    assert latest_run(tmp_path / "results").is_file()


@pytest.mark.parametrize("obstacle", ["results", "best"])
def test_unusable_results_are_found_before_any_work(kbench: Runner, tmp_path: Path, obstacle: str) -> None:
    def never(position: int) -> None:
        pytest.fail("a row was run")

    if obstacle == "results":
        (tmp_path / "r").write_text("a file")
    else:
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "best.json").write_text("{")
    status, out, err = kbench(f"sweep toy --results {tmp_path / 'r'}", [make_row(1)], before_row=staticmethod(never))
    assert status == (Exit.CANNOT if obstacle == "results" else Exit.USAGE)
    assert out == "" and err.count("\n") == 1 and "kbench: error: cannot" in err


def test_ctrl_c_keeps_the_rows_already_measured(kbench: Runner, tmp_path: Path) -> None:
    rows = [make_row(1, median_ms=1.0), make_row(2, median_ms=2.0), KeyboardInterrupt(), make_row(3)]
    status, out, err = kbench(f"sweep toy --results {tmp_path}", rows)
    assert status == Exit.INTERRUPTED
    where = f"{latest_run(tmp_path)} (`kbench sweep --resume` goes on)"
    assert err == f"kbench: interrupted after 2 of 4 rows; they are kept in {where}\n"
    assert "* fastest: version 1" in out
    run = read_run(latest_run(tmp_path))
    assert [row.version for row in run.rows] == [1, 2]
    assert run.footer is not None and run.footer["ended"] == "interrupted"
    # The bench has to see the interruption, or it waits for a worker that is still busy.
    assert kbench.bench.closed_with is KeyboardInterrupt


def test_ctrl_c_before_the_first_row(kbench: Runner) -> None:
    for command in ("run toy", "check toy", "sweep toy"):
        status, out, err = kbench(command, [KeyboardInterrupt()])
        assert status == Exit.INTERRUPTED and out == "" and err == "kbench: interrupted\n"
        document = json.loads(kbench(f"{command} --json", [KeyboardInterrupt()])[1])
        assert document == {"error": "interrupted", "exit_status": 130}


def test_an_error_after_some_rows_still_shows_them(kbench: Runner, tmp_path: Path) -> None:
    rows = [make_row(1, median_ms=1.0), CannotRunError("the GPU is gone", "restart the machine"), make_row(2)]
    status, out, err = kbench(f"sweep toy --results {tmp_path}", rows)
    assert status == Exit.CANNOT
    assert "* fastest: version 1" in out
    assert err == "kbench: error: the GPU is gone; restart the machine\n"
    wrong = [failed(1), CannotRunError("the GPU is gone")]
    assert kbench("check toy", wrong)[0] == Exit.WRONG


def test_a_disk_that_fills_up_ends_the_sweep_with_its_rows(kbench: Runner, tmp_path: Path) -> None:
    def fill(position: int) -> None:
        if position == 1:
            for path in (tmp_path / "runs").iterdir():
                path.chmod(0o400)
            raise CannotRunError("cannot write: No space left on device")

    status, out, err = kbench(
        f"sweep toy --results {tmp_path}", [make_row(1), make_row(2)], before_row=staticmethod(fill)
    )
    assert status == Exit.CANNOT and "No space left" in err
    assert "pass" in out


# ------------------------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize("command", ["run toy", "run toy:1", "check toy", "sweep toy"])
def test_json_is_one_strict_document_and_nothing_else(kbench: Runner, command: str) -> None:
    rows = [make_row(1, median_ms=1.0, used=float("inf"))]
    status, out, err = kbench(f"{command} --json", rows)
    document = json.loads(out, parse_constant=pytest.fail)
    assert status == document["exit_status"] == 0 and err == ""
    assert document["command"] == command.split()[0]
    assert document["device"]["name"] == "Test GPU" and document["seed"] == 7
    assert Row.from_dict(document["rows"][0]).measurement == rows[0].measurement


def test_json_of_a_sweep_names_run_and_winners(kbench: Runner, tmp_path: Path) -> None:
    rows = [make_row(1, median_ms=2.0), make_row(2, median_ms=1.0)]
    document = json.loads(kbench(f"sweep toy --json --results {tmp_path}", rows)[1])
    (winner,) = document["winners"]
    assert winner.pop("why").startswith("version 2 is 2.00x (1.96x..2.04x) as fast as version 1 (its best: 2.000 ms")
    assert winner == {"family": "toy", "version": 2, "dtype": "fp32", "block": 256, "N": 64}
    assert [row["facts"]["gbs"] for row in document["rows"]] == [None, None]
    assert Path(document["run"]) == latest_run(tmp_path)


def test_json_keeps_notes_and_errors_on_stderr(kbench: Runner) -> None:
    status, out, err = kbench("check toy --json", [failed(1, "refused")])
    assert status == json.loads(out)["exit_status"] == Exit.NOTHING
    assert "nothing was checked" in err
    status, out, err = kbench("check toy --json", jobs_error=UsageError("unknown family 'toy'"))
    assert status == Exit.USAGE and "unknown family" in err and err.count("\n") == 1
    assert json.loads(out) == {"error": "unknown family 'toy'", "exit_status": 2}


def test_json_is_one_document_also_where_an_error_comes_late(kbench: Runner) -> None:
    status, out, err = kbench("run toy:5 --json", [failed(5, "refused", "needs T even")])
    document = json.loads(out)
    assert status == document["exit_status"] == Exit.USAGE
    assert document["error"] in err and document["rows"][0]["status"] == "refused"
    late = [make_row(1), CannotRunError("the GPU is gone")]
    status, out, _ = kbench("check toy --json", late)
    document = json.loads(out)
    assert status == document["exit_status"] == Exit.CANNOT
    assert document["error"] == "the GPU is gone" and len(document["rows"]) == 1
    status, out, _ = kbench("run toy --json", [ValueError("odd")])
    assert json.loads(out) == {"error": "internal error: ValueError: odd", "exit_status": Exit.INTERNAL}
    status, out, _ = kbench("run --nosuch --json")
    assert status == Exit.USAGE and json.loads(out)["exit_status"] == 2 and "--nosuch" in json.loads(out)["error"]


# ---------------------------------------------------------------------------------------------- errors


def test_a_compile_error_shows_the_start_of_its_log(kbench: Runner) -> None:
    error = CompileError("toy.cu:7: expected ;", log="\n".join(f"log {n}" for n in range(50)), hint="mend it")
    status, out, err = kbench("run toy", jobs_error=error)
    lines = err.splitlines()
    assert status == Exit.USAGE and out == ""
    assert lines[0] == "kbench: error: toy.cu:7: expected ;; mend it"
    assert lines[1] == "    log 0" and lines[20] == "    log 19" and "30 more lines" in lines[21] and len(lines) == 22
    assert "log 49" in kbench("run toy --debug", jobs_error=error)[2]


def test_an_unexpected_error_is_one_line_and_debug_shows_the_traceback(kbench: Runner) -> None:
    status, out, err = kbench("run toy", [ValueError("odd\nthing")])
    assert status == Exit.INTERNAL and out == ""
    assert err == "kbench: internal error: ValueError: odd thing; run with --debug for the traceback\n"
    status, _, err = kbench("run toy --debug", [ValueError("odd")])
    assert status == Exit.INTERNAL and "Traceback" in err and "raise row" in err


def test_an_internal_error_keeps_the_rows_on_disk(kbench: Runner, tmp_path: Path) -> None:
    status, _, _ = kbench(f"sweep toy --results {tmp_path}", [make_row(1), ValueError("odd")])
    assert status == Exit.INTERNAL
    assert len(read_run(latest_run(tmp_path)).rows) == 1
