"""Run files of every schema, compressed, cut, damaged, doubled: what is read of them and what is said."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from fakes import failed, make_row
from kbench.cli.app import run_command
from kbench.errors import Exit, UsageError
from kbench.results.baselines import compressed
from kbench.results.scan import Scan
from kbench.results.schema import SCHEMA_VERSION
from kbench.results.store import COMPRESSED, RunWriter, find_run, read_run, run_files

SAMPLES = sorted((Path(__file__).parent / "records").glob("schema*.jsonl"))
DEVICE = {"kind": "cuda", "name": "Test GPU", "arch": "sm_90"}


def written(folder: Path, *rows: object) -> Path:
    with RunWriter(
        folder, device=DEVICE, command=["kbench", "sweep"], options={"seed": 7}, kbench_version="0.1.0"
    ) as run:
        for row in rows or (make_row(1, median_ms=2.5), failed(2), make_row(3, idea="naïve | \u2028 line")):
            run.append(row)  # type: ignore[arg-type]  # rows made by hand
    return run.path


# --------------------------------------------------------------------------------------------- schemas


def test_there_is_a_sample_of_every_older_schema() -> None:
    numbers = {json.loads(path.read_text().partition("\n")[0])["schema"] for path in SAMPLES}
    assert numbers >= set(range(1, 5))
    assert all(
        f"schema{json.loads(path.read_text().partition(chr(10))[0])['schema']}_" in path.name for path in SAMPLES
    )


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_older_files_are_read_shown_and_plotted(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_gpu = path.stem.endswith("gpu")
    run = read_run(path)
    assert len(run.rows) >= 2 and not run.warnings
    assert {row.device for row in run.rows} == ({"NVIDIA H200"} if on_gpu else {"emulator"})
    assert all(row.may_win for row in run.rows) == on_gpu
    assert run_command(["results", "show", str(path)]) == Exit.OK
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert (
        all(f"{row.version:>5}  {row.block:>5}  pass" in shown.replace("*", " ") for row in run.rows[:2]) or not on_gpu
    )
    assert ("* fastest: version" in shown) == on_gpu
    page = tmp_path / "page.html"
    assert run_command(["plot", str(path), "-o", str(page)]) == Exit.OK
    assert run.rows[0].family in page.read_text()


def test_the_device_of_the_first_schema_is_the_card_that_its_header_names() -> None:
    path = next(path for path in SAMPLES if path.name == "schema1_gpu.jsonl")
    assert '"device": "cuda"' in path.read_text()
    assert {row.device for _, row in Scan(path)} == {row.device for row in read_run(path).rows} == {"NVIDIA H200"}


# ------------------------------------------------------------------------------------------ compressed


@pytest.mark.parametrize("name", ["run.jsonl.gz", "run.jsonl"], ids=["by name", "by content"])
def test_compressed_files_read_as_the_plain_ones(tmp_path: Path, name: str) -> None:
    plain = written(tmp_path)
    packed = tmp_path / name
    packed.write_bytes(compressed(plain.read_bytes()))
    assert read_run(packed).rows == read_run(plain).rows
    assert read_run(packed).footer == read_run(plain).footer
    assert [row for _, row in Scan(packed)] == read_run(plain).rows


def test_two_streams_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    lines = written(tmp_path).read_bytes().splitlines(keepends=True)
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(compressed(lines[0]) + compressed(b"".join(lines[1:])) + b"\0" * 512)
    assert [row.version for row in read_run(packed).rows] == [1, 2, 3] and not read_run(packed).warnings


def test_a_compressed_file_that_was_cut_gives_the_rows_that_are_whole(tmp_path: Path) -> None:
    rows = [make_row(number, idea=f"{number * 7919 % 10007}" * 40, median_ms=1.0) for number in range(1, 60)]
    data = compressed(written(tmp_path, *rows).read_bytes())
    packed = tmp_path / "run.jsonl.gz"
    lengths = []
    for kept in (len(data) - 1, len(data) - 9, 3 * len(data) // 4, len(data) // 2):
        packed.write_bytes(data[:kept])
        run = read_run(packed)
        assert run.rows == rows[: len(run.rows)]
        assert len(run.warnings) == 1 and "is cut off" in run.warnings[0] and str(packed) in run.warnings[0]
        with pytest.raises(UsageError, match="is cut off"):
            list(Scan(packed))  # a report must not be held against a part of a baseline
        lengths.append(len(run.rows))
    assert lengths[0] == len(rows) > lengths[2] > lengths[3] > 0


def test_a_cut_at_the_end_of_a_line_is_seen(tmp_path: Path) -> None:
    lines = written(tmp_path).read_bytes().splitlines(keepends=True)
    packer = zlib.compressobj(wbits=31)
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(packer.compress(b"".join(lines[:3])) + packer.flush(zlib.Z_SYNC_FLUSH))
    run = read_run(packed)
    assert [row.version for row in run.rows] == [1, 2]
    assert run.warnings == [f"{packed} is cut off after line 3: it is compressed, and its end is missing"]


def test_compressed_runs_of_a_folder_are_found_by_their_id(tmp_path: Path) -> None:
    plain = written(tmp_path)
    data = compressed(plain.read_bytes())
    plain.unlink()
    packed = plain.with_name(plain.stem + COMPRESSED)
    packed.write_bytes(data)
    assert run_files(tmp_path) == {plain.stem: packed}
    assert find_run(tmp_path, plain.stem[-6:]) == packed


# --------------------------------------------------------------------------------------------- damaged


HEADER = json.dumps({"kind": "header", "schema": SCHEMA_VERSION, "device": DEVICE})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a run file of kbench: it is empty"),
        (b"\n", "is not a run file of kbench: it is empty"),
        (b"\xef\xbb\xbf" + HEADER.encode(), "begins with a byte-order mark"),
        (HEADER.encode("utf-16"), "it begins as UTF-16 does"),
        (HEADER.encode()[:30], ":1 is cut off: nothing of the run is left"),
        (b"PK\x03\x04" + bytes(100), "is not a run file of kbench"),
        (b"\x1f\x8b\x08\x00garbage that is no stream", "is not what its name says"),
        (compressed(b"hello\n"), "is not a run file of kbench"),
        (compressed(HEADER.encode() + b"\n{oops\n{}\n"), "run.jsonl:2 is not JSON"),
        (HEADER.encode() + b"\n[1]\n", "run.jsonl:2 is not a row of results"),
        (HEADER.encode() + b"\n" + HEADER.encode() + b"\n", "run.jsonl:2 is a second header"),
    ],
)
def test_foreign_and_damaged_files_are_one_line_that_names_them(
    tmp_path: Path, data: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_run(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    for command in (["results", "show"], ["plot"], ["results", "export"]):
        assert run_command([*command, str(path)]) == Exit.USAGE
        told = capsys.readouterr()
        assert told.err.count("\n") == 1 and not told.out


def test_a_flipped_bit_in_a_compressed_file_is_an_error(tmp_path: Path) -> None:
    data = bytearray(compressed(written(tmp_path).read_bytes()))
    data[-6] ^= 1  # of the checksum
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="run.jsonl.gz"):
        read_run(path)


def test_rows_that_stand_twice_are_kept_and_said(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], lines[1], lines[3], lines[2], lines[4]]))
    run = read_run(path)
    assert [row.version for row in run.rows] == [1, 2, 1, 3, 2]
    assert len(run.warnings) == 1
    assert "line 4 repeats line 2, and 1 other row is repeated" in run.warnings[0]


def test_rows_that_went_on_are_no_copies(tmp_path: Path) -> None:
    path = written(tmp_path, make_row(1, median_ms=1.0), make_row(1, median_ms=1.1))
    assert not read_run(path).warnings


def test_only_one_family_is_read_where_one_is_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, make_row(1, family="a"), make_row(2, family="b"), make_row(3, family="a"))
    run = read_run(path, "a")
    assert [row.version for row in run.rows] == [1, 3]
    assert run.footer is not None and run.footer["ended"] == "complete"
