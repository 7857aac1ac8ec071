"""The command line as such: help, bad input, completion, start-up, `list` and `doctor`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kbench import __version__
from kbench.catalog import load_catalog
from kbench.cli import machine
from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.family import AllReduce, Problem, Props, Sdpa, SdpaBackward
from kbench.install import install_command

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "list", "run", "check", "sweep", "compare", "report", "plot", "results", "history", "bisect", "inspect", "ceilings",
    "profile", "export", "train", "data", "doctor",
)  # fmt: skip

TOY = """
from kbench.family import CheckShape, Family, Rule, Tensor, Version
from kbench.family import normal

def plan(problem, block, props):
    return ()

toy = Family(
    name="toy", summary="doubles [numbers]", sizes={"N": "how many"}, dtypes=("fp32",),
    presets={"default": {"N": 1024}, "small": {"N": 8}}, check_shapes=(CheckShape({"N": 3}, "odd"),),
    tensors=lambda problem: (Tensor("x", (problem["N"],), "fp32", "in", draw=normal(0, 1)),),
    reference=lambda problem, inputs, error, xp: {},
    versions=(
        Version(1, "one thread an element", plan, ("fp32",)),
        Version(2, "one block", plan, ("fp32",), fixed=256, rules=(Rule("N even", lambda p: p["N"] % 2 == 0),)),
        Version(3, "some sizes", plan, ("fp32",), block_sizes=(32, 96), gpu_only="tensor cores"),
    ),
    rules=(Rule("N below 2^31", lambda p: p["N"] < 2**31),),
)
"""


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    folder = tmp_path / "toys"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    (folder / "toy.cu").write_text("")
    return folder


def kbench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kbench", *arguments]
    paths = os.pathsep.join(sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths, **environment}, timeout=60
    )


# ------------------------------------------------------------------------------------------------ help


def test_help_names_commands_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in out
    for status in Exit:
        assert f"\n  {int(status):>4}  " in out
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_its_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([command, "-h"]) == 0
    text = capsys.readouterr().out
    examples = text.partition("Examples:\n")[2].splitlines()
    assert examples and all(line.strip().startswith(f"kbench {command}") for line in examples)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_targets_are_readable_in_every_usage_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command, usage in (("list", "[TARGET]"), ("check", "[TARGET]..."), ("sweep", "[TARGET]..."), ("run", "TARGET")):
        assert run_command([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert usage in text.splitlines()[0] and "[[" not in text and "list[" not in text
        assert "TARGET is FAMILY" in text


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list"]])
def test_help_and_list_import_nothing_heavy(arguments: list[str]) -> None:
    """What keeps them quick: `kbench --help` takes 0.1 s, numpy alone takes as long again, pandas several times it."""
    program = "import sys; from kbench.cli.app import run_command; run_command(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", program, *arguments]
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "kbench.cli.app" in loaded
    assert not loaded & {"cupy", "pandas", "numpy"}


def test_version_and_module_entry() -> None:
    done = kbench("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kbench {__version__}\n", "")


def test_no_command_is_wrong_usage_and_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([]) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "Usage: kbench" in captured.err


# ------------------------------------------------------------------------------------------- bad input

BAD = [
    ("chekc", "'chekc'"),
    ("run", "missing argument"),
    ("run attention_backward --nosuch", "--nosuch"),
    ("run attention_bakward", "did you mean attention_backward?"),
    ("list attention_bakward", "did you mean attention_backward?"),
    ("list attention_backward:99", "no version 99"),
    ("run attention_backward --version abc", "'abc'"),
    ("run attention_backward --version 99", "no version 99"),
    ("run attention_backward --version", "--version"),
    ("run attention_backward:", "'attention_backward:'"),
    ("run attention_backward --block-size 0", "block size 0"),
    ("run attention_backward --block-size 33", "block size 33"),
    ("run attention_backward --block-size 2048", "the largest block is 1024"),
    ("run attention_backward --block-size 32..256", "sweep and check take ranges"),
    ("run attention_backward --block-size abc", "'abc'"),
    ("sweep attention_backward --block-sizes 1024..32", "reversed"),
    ("sweep attention_backward --block-sizes ,", "empty part"),
    ("sweep gelu_forward --dtype fp32,", "--dtype 'fp32,' is empty or has an empty part"),
    ("sweep gelu_forward --dtype BF16", "unknown dtype 'BF16'; dtypes: fp32, tf32, bf16, fp16"),
    ("check gelu_forward --dtype all,bf16", "names all dtypes and some beside them"),
    ("run gelu_forward --dtype fp32,bf16", "run takes one dtype, not 'fp32,bf16'; sweep and check take lists"),
    ("train gpt2 --dtype fp32,bf16", "train takes one dtype, not 'fp32,bf16'"),
    ("sweep attention_backward --size T=0", "T=0"),
    ("sweep attention_backward --size T=-3", "'-3' is negative"),
    ("check attention_backward --seed 1.5", "'1.5'"),
    ("check attention_backward --seed -1", "'-1'"),
    ("check attention_backward --rtol nan", "nan"),
    ("check attention_backward --atol -1", "-1"),
    ("check attention_backward --time-limit 0", "--time-limit 0"),
    ("check attention_backward --workers 0", "'0'"),
    ("check attention_backward --device gpu", "auto, cuda or emulator"),
    ("check --family-dir /no/such/folder", "/no/such/folder"),
]


@pytest.mark.parametrize(("command", "words"), BAD, ids=[command for command, _ in BAD])
def test_bad_input_is_one_line_and_status_2(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    device = [] if "--device" in command or command.split()[0] in ("list", "chekc") else ["--device", "emulator"]
    words_of = command.split()
    # The device goes first, so that an option that lacks its value stays the last word.
    assert run_command([words_of[0], *device, *words_of[1:]]) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kbench: error: ") and captured.err.count("\n") == 1
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback_of_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "a", "--version", "abc", "--debug"]) == Exit.USAGE
    assert "Traceback" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- streams


def test_a_reader_that_goes_away_is_no_error_and_hides_none(toys: Path) -> None:
    (toys / "broken.py").write_text("import nosuchmodule\n")
    (toys / "broken.cu").write_text("")
    paths = os.pathsep.join(sys.path)
    broken = ["list", "--family-dir", str(toys)]
    for arguments, status in ((["list"], 0), (["--help"], 0), (["list", "--json"], 0), (broken, Exit.USAGE)):
        command = [sys.executable, "-m", "kbench", *arguments]
        read, write = os.pipe()
        os.close(read)
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
        os.close(write)
        assert done.returncode == status
        assert "Traceback" not in done.stderr and "Broken" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["list", "list attention_backward", "--help", "run -h", "list --json", "doctor"])
def test_a_stdout_that_cannot_be_written_is_one_line_and_status_5(line: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "kbench", *line.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == Exit.CANNOT
    assert done.stderr.startswith("kbench: error: cannot write to standard output: ") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_stderr_that_cannot_be_written_changes_no_status() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kbench", "list", "nosuch"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, env=environment).returncode == Exit.USAGE


def test_an_encoding_without_the_characters_is_no_error(toys: Path) -> None:
    (toys / "toy.py").write_text(TOY.replace("one block", "≤ one block"))
    done = kbench("list", "toy", "--family-dir", str(toys), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "? one block" in done.stdout


def test_colour_only_where_it_is_wanted(toys: Path) -> None:
    assert "\x1b[" not in kbench("list", "toy", "--family-dir", str(toys)).stdout
    forced = kbench("list", "toy", "--family-dir", str(toys), FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[" in forced.stdout
    unwanted = kbench("list", "toy", "--family-dir", str(toys), FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in unwanted.stdout  # neither colour nor bold


# ------------------------------------------------------------------------------------------------ make


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("run", "-S", "lacks numpy ml_dtypes typer rich pandas; install with: "),
        ("test", "-S", "pytest xdist ruff mypy"),
        ("gpu-test", "-S", "pandas pytest; install with: "),
        ("run", "--no-such-option", "needs Python 3.11 or later"),
    ],
)
def test_make_with_an_interpreter_that_will_not_do(target: str, options: str, words: str) -> None:
    """-S hides the installed packages. Only make's own last line stands beside the one that says what to do."""
    # The tests may themselves run under make, which talks to the makes below it.
    inherited = ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    command = ["make", target, f"PYTHON={sys.executable} {options}", "VENV="]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode != 0 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith("make: ") and words in lines[0]
    assert ("pip install -e" in lines[0]) == (options == "-S")


# ------------------------------------------------------------------------------------------ completion


def complete(line: str) -> list[str]:
    words = line.split(" ")
    environment = {"_KBENCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return kbench(**environment).stdout.split()


def test_the_shell_completes_commands_families_and_options(toys: Path) -> None:
    assert complete("kbench sw") == ["sweep"]
    assert complete("kbench run attention_b") == ["attention_backward"]
    assert complete(f"kbench check --family-dir {toys} to") == ["toy"]
    assert complete("kbench run --device em") == ["emulator"]
    assert "1" in complete("kbench run attention_backward --version ")
    assert complete("kbench run attention_backward:1 --dtype t") == ["tf32"]
    assert complete("kbench run --dtype b") == ["bf16"]
    assert complete(f"kbench check --family-dir {toys} toy --dtype ") == ["fp32"]
    assert complete("kbench sweep attention_backward --preset s") == ["small"]
    assert complete("kbench check nosuch --preset ") == ["default", "small", "large"]
    assert complete("kbench run attention_backward:") == [f"attention_backward:{n}" for n in range(1, 11)]
    assert complete(f"kbench check --family-dir {toys} toy:3") == ["toy:3"]


def test_ctrl_c_while_modules_are_loaded_is_one_line() -> None:
    program = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'kbench.cli.app': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from kbench.__main__ import main\n"
        "main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (Exit.INTERRUPTED, "kbench: interrupted\n")


def test_completion_imports_nothing_heavy() -> None:
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    program += "; from kbench.cli.app import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "_KBENCH_COMPLETE": "complete_bash"}
    environment |= {"COMP_WORDS": "kbench run attention_backward:", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "attention_backward:8" in done.stdout.split()
    loaded = set(done.stderr.split())
    assert "kbench.family" in loaded and not loaded & {"cupy", "pandas", "numpy"}


def test_completion_installs_for_a_shell(tmp_path: Path) -> None:
    shown = kbench("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert shown.returncode == 0 and "_KBENCH_COMPLETE" in shown.stdout
    done = kbench("--install-completion", "bash", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert list(tmp_path.rglob("kbench*"))


# ------------------------------------------------------------------------------------------------ list


def test_list_shows_families_and_survives_a_broken_one(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (toys / "broken.py").write_text("import nosuchmodule\n")
    (toys / "broken.cu").write_text("")
    assert run_command(["list", "--family-dir", str(toys)]) == Exit.USAGE
    captured = capsys.readouterr()
    assert "attention_backward" in captured.out and "doubles [numbers]" in captured.out
    assert "broken.py:1" in captured.err


def test_list_of_a_family_shows_its_contract(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", "toy", "--family-dir", str(toys)]) == 0
    out = capsys.readouterr().out
    for words in ("N (how many)", "preset small: N=8", "rule: N below 2^31", "one thread an element", "32..1024"):
        assert words in out
    for words in ("needs N even", "256 (fixed)", "32,96", "only on a GPU: tensor cores"):
        assert words in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())


def test_list_as_json(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", "toy:2-3", "--family-dir", str(toys), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [version["number"] for version in document["versions"]] == [2, 3]
    assert document["family"]["check_shapes"] == [{"sizes": {"N": 3}, "why": "odd"}]
    assert run_command(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


# ---------------------------------------------------------------------------------------------- doctor


def test_doctor_names_what_is_missing_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kbench.device.cuda.probe.probe_gpu", lambda: "no NVIDIA driver")
    monkeypatch.setattr(machine, "gpu_name_and_driver", lambda: None)
    monkeypatch.setenv("KBENCH_CXX", "no-such-compiler")
    _forget_compiler()
    try:
        assert run_command(["doctor", "--results", str(tmp_path)]) == Exit.CANNOT
        captured = capsys.readouterr()
        text = " ".join(captured.out.split())
        assert "apt install g++" in text and "no NVIDIA driver" in text and "no-such-compiler" in text
        # Of paths alone may a line be longer: one that is cut cannot be copied.
        long = [line for line in captured.out.splitlines() if len(line) > 80]
        assert all("/" in line.split()[-1] for line in long)
        assert "neither" in captured.err
        assert run_command(["doctor", "--json"]) == Exit.CANNOT
        facts = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)["facts"]}
        assert facts["C++ compiler"]["state"] == "missing"
    finally:
        _forget_compiler()


def test_doctor_is_content_with_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kbench.device.cuda.probe.probe_gpu", lambda: "")
    monkeypatch.setattr(machine, "gpu_name_and_driver", lambda: ("NVIDIA H200", "580.1"))
    monkeypatch.setenv("KBENCH_CXX", "no-such-compiler")
    _forget_compiler()
    try:
        assert run_command(["doctor"]) == 0
        assert "NVIDIA H200, driver 580.1" in capsys.readouterr().out
    finally:
        _forget_compiler()


def test_doctor_finds_read_only_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    run_command(["doctor", "--results", str(tmp_path / "file"), "--json"])
    facts = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)["facts"]}
    assert facts["results"]["state"] == "missing" and "--results DIR" in facts["results"]["remedy"]


def test_doctor_names_a_cache_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for folder, state in ((tmp_path / "file" / "cache", "missing"), (tmp_path / "not" / "yet", "note")):
        monkeypatch.setenv("KBENCH_CACHE", str(folder))
        run_command(["doctor", "--json"])
        facts = {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)["facts"]}
        assert facts["cache"]["state"] == state and str(folder) in facts["cache"]["value"]
        assert ("KBENCH_CACHE" in facts["cache"]["remedy"]) == (state == "missing")
        assert not folder.exists()


def test_doctor_counts_families_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, words in ((("a",), "1 family in "), (("a", "b"), "2 families in ")):
        monkeypatch.setattr(machine, "load_catalog", lambda names=names: SimpleNamespace(names=names))
        assert machine._kernels().value.startswith(words)


def test_doctor_tells_the_command_that_installs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.device.cuda.probe.driver_version", lambda: 12090)
    monkeypatch.setattr(machine, "_has_module", lambda module: False)
    fact = machine._distribution("CuPy", "cupy", ("no-such-distribution",))
    assert fact.state == "missing" and fact.remedy == install_command("cuda12")


@pytest.mark.parametrize(
    ("library", "there", "lacking"),
    [
        ("cuDNN", (), "nvidia-cudnn-frontend"),
        ("cuDNN", ("nvidia-cudnn-frontend",), "nvidia-cudnn-cu13 or nvidia-cudnn-cu12"),
        ("cuDNN", ("nvidia-cudnn-frontend", "nvidia-cudnn-cu12"), ""),
        ("cuDNN", ("nvidia-cudnn-frontend", "cudnn"), ""),  # the library from the system's packages
        ("NCCL", (), "nvidia-nccl-cu13 or nvidia-nccl-cu12"),
        ("NCCL", ("nvidia-nccl-cu13",), ""),
    ],
)
def test_doctor_tells_what_optional_libraries_are_for(
    monkeypatch: pytest.MonkeyPatch, library: str, there: tuple[str, ...], lacking: str
) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise machine.metadata.PackageNotFoundError(name)
        return "9.13"

    monkeypatch.setattr(machine.metadata, "version", version)
    monkeypatch.setattr(machine, "find_library", lambda name: f"lib{name}.so.9" if name in there else None)
    wanted = next(each for each in machine.OPTIONAL if each.name == library)
    for driver, extra in ((13000, "13"), (12090, "12"), (0, "")):
        monkeypatch.setattr("kbench.device.cuda.probe.driver_version", lambda driver=driver: driver)
        fact = machine._optional(wanted)
        if not lacking:
            assert fact.state == "ok" and "9" in fact.value and not fact.remedy
            continue
        assert fact.state == "note" and fact.value.startswith(f"{lacking} is not installed")
        assert fact.remedy == (install_command(f"{library.lower()}{extra}") if extra else "")
        assert (wanted.needed_by in fact.value) == bool(extra)


def test_doctor_shows_an_optional_library_with_its_command_and_is_content(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fact = machine.Fact("NCCL", "note", "not installed", "nccl_all_reduce", "pip install nccl13")
    monkeypatch.setattr(machine, "_optional", lambda library: fact)
    monkeypatch.setattr("kbench.device.cuda.probe.probe_gpu", lambda: "")
    assert run_command(["doctor"]) == 0
    assert "NCCL: optional, for nccl_all_reduce\n    pip install nccl13\n" in capsys.readouterr().out


def test_doctor_gives_each_advice_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        fact.name: fact
        for fact in (
            machine.Fact("kernels", "ok", "here"),
            machine.Fact("GPU", "missing", "none", "times", "get one"),
            machine.Fact("CUDA device", "missing", "no driver", "times", "get one"),
            machine.Fact("C++ compiler", "ok", "g++"),
            machine.Fact("library", "note", "not there", "version 10", "pip install it"),
            machine.Fact("other", "missing", "not there", "compiling", "pip install it"),
            machine.Fact("last", "note", "not there", "text", "pip install that"),
        )
    }
    monkeypatch.setattr("kbench.cli.doctor.facts", lambda results: list(known.values()))
    assert run_command(["doctor"]) == Exit.OK
    assert capsys.readouterr().out.partition("\n\n")[2].split("\n\n") == [
        "GPU, CUDA device: needed for times\n    get one",
        "library, other: needed for version 10; compiling\n    pip install it",
        "last: optional, for text\n    pip install that\n",
    ]
    run_command(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert [fact["remedy"] for fact in facts].count("get one") == 2, "programs look at each by itself"


def test_the_versions_that_need_optional_libraries_are_those_that_doctor_names() -> None:
    steps = {"cuDNN": Sdpa | SdpaBackward, "NCCL": AllReduce}
    props = Props("a", "sm_90", 132, 2048, 1024, 49152, 232448, 233472, 65536, 50 << 20, 140 << 30)
    named = {library.name: library.needed_by for library in machine.OPTIONAL}
    found: dict[str, set[str]] = {name: set() for name in steps}
    for family in load_catalog().values():
        for version in family.versions:
            problem = Problem(family.presets["small"], version.dtypes[0])
            plan = version.plan(problem, version.blocks[-1], props)
            for name, kind in steps.items():
                if any(isinstance(step, kind) for step in plan):
                    all_of_it = len(family.versions) == 1
                    found[name].add(family.name if all_of_it else f"{family.name} version {version.number}")
    assert found == {name: set(text.split(", ")) for name, text in named.items()}


def test_doctor_tells_what_training_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KBENCH_DATA", str(tmp_path))
    monkeypatch.setattr("kbench.train.text.can_encode_gpt2", lambda: "tiktoken is not installed")
    tokens = machine._tokens()
    assert (tokens.state, tokens.remedy) == ("note", install_command("data")) and "bytes" in tokens.value
    monkeypatch.setattr("kbench.train.text.can_encode_gpt2", lambda: "")
    assert (machine._tokens().state, machine._tokens().remedy) == ("ok", "")
    for files, state, words in (
        ((), "note", f"no Shakespeare in {tmp_path}"),
        (("shakespeare.txt",), "note", "without GPT-2's tokens"),
        (("shakespeare_train.bin", "shakespeare_val.bin"), "ok", "text and tokens"),
    ):
        for name in files:
            (tmp_path / name).write_text("")
        data = machine._data()
        assert data.state == state and words in data.value and str(tmp_path) in data.value
        assert data.remedy == ("" if state == "ok" else "kbench data shakespeare")


def test_nvidia_smi_is_read_or_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for answer, expected in (
        ("echo 'NVIDIA H200, 580.159.04'; echo 'NVIDIA H200, 580.159.04'", ("NVIDIA H200", "580.159.04")),
        ("echo 'NVIDIA-SMI has failed'; exit 9", None),
        ("exit 0", None),
        ("echo garbage", None),
    ):
        tool.write_text(f"#!/bin/sh\n{answer}\n")
        tool.chmod(0o755)
        assert machine.gpu_name_and_driver() == expected


def _forget_compiler() -> None:
    from kbench.device.emulator.compiler import find_compiler

    find_compiler.cache_clear()
