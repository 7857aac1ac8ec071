"""The cache of cubins: hits, misses, damage, races, and folders that cannot be written to."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kbench.device.cuda import cache
from kbench.device.cuda.compile import Cubin, compile_cubin, nvrtc_version
from kbench.errors import CannotRunError
from kbench.source import load_source

try:
    nvrtc_version()
    MISSING = ""
except CannotRunError as error:
    MISSING = str(error)

needs_nvrtc = pytest.mark.skipif(bool(MISSING), reason=MISSING or "NVRTC is there")
TEXT = "template <int N> __global__ void k(float* a) { a[threadIdx.x] = N; }\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled(folder: Path, text: str = TEXT, kernel: str = "k<1>", arch: str = "sm_90") -> Cubin:
    folder.mkdir(exist_ok=True)
    (folder / "a.cu").write_text(text)
    return compile_cubin(load_source(folder / "a.cu"), [kernel], arch)


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cubin").iterdir())


@needs_nvrtc
def test_the_second_time_nothing_is_compiled(tmp_path: Path, folder: Path) -> None:
    first, second = compiled(tmp_path), compiled(tmp_path)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (first.data, first.infos, first.signatures) == (second.data, second.infos, second.signatures)
    assert first.lowered == second.lowered and first.log == second.log
    assert len(entries(folder)) == 1


@needs_nvrtc
@pytest.mark.parametrize("change", [{"text": TEXT + "\n"}, {"kernel": "k<2>"}, {"arch": "sm_80"}])
def test_any_change_is_a_miss(tmp_path: Path, change: dict[str, str]) -> None:
    compiled(tmp_path)
    assert not compiled(tmp_path, **change).from_cache


@needs_nvrtc
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40], lambda b: b"", lambda b: b"x" * 500, lambda b: b + b"\0"]
)
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, folder: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    good = compiled(tmp_path)
    (entry,) = entries(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    with caplog.at_level(logging.WARNING):
        again = compiled(tmp_path)
    # Not the same to the last byte: the compiler writes a second of the clock into what it makes.
    assert not again.from_cache and (again.lowered, len(again.data)) == (good.lowered, len(good.data))
    assert "is damaged" in caplog.text
    kept = compiled(tmp_path)
    assert kept.from_cache and kept.data == again.data


@needs_nvrtc
def test_an_entry_of_another_key_is_not_taken(tmp_path: Path, folder: Path) -> None:
    compiled(tmp_path)
    (other,) = entries(folder)
    compiled(tmp_path, kernel="k<2>")
    (mine,) = set(entries(folder)) - {other}
    mine.write_bytes(other.read_bytes())
    assert "k<2>" in compiled(tmp_path, kernel="k<2>").lowered


@needs_nvrtc
def test_a_folder_that_cannot_be_written_to_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "file" / "below"))
    assert not compiled(tmp_path).from_cache
    assert not compiled(tmp_path).from_cache


@needs_nvrtc
def test_processes_at_once_do_not_clash(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.cu").write_text(TEXT)
    program = (
        "import sys; from pathlib import Path; from kbench.source import load_source\n"
        "from kbench.device.cuda.compile import compile_cubin\n"
        "print(len(compile_cubin(load_source(Path(sys.argv[1])), ['k<1>'], 'sm_90').data))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "a.cu")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate() for process in running]
    assert {error for _, error in outputs} == {""}
    assert len({out for out, _ in outputs}) == 1
    assert len(entries(folder)) == 1  # and no temporary file is left
    assert compiled(tmp_path).from_cache


def test_the_place_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("KBENCH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "kbench"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "kbench"
