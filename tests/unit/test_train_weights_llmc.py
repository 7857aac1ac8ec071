"""llm.c's model files, and how weights are named: what comes back, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kbench.errors import CannotRunError, UsageError
from kbench.train import weights_binary
from kbench.train.initial import initial_weights
from kbench.train.model import PRESETS, Model
from kbench.train.weights import export_llmc, load_weights

SMALL = Model(2, 2, 8, vocab=30, context=6)


def varied(model: Model = SMALL, seed: int = 1) -> dict[str, np.ndarray]:
    """Weights in which no two elements agree, but for the padding."""
    source = np.random.default_rng(seed)
    weights = {p.name: source.normal(0, 1, p.shape).astype(np.float32) for p in model.parameters}
    weights["wte"][model.vocab :] = 0
    return weights


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    export_llmc(path, SMALL, varied())
    return path


def patch(path: Path, at: int, value: int) -> None:
    """Overwrite one int32 of the header."""
    data = bytearray(path.read_bytes())
    data[4 * at : 4 * at + 4] = value.to_bytes(4, "little", signed=True)
    path.write_bytes(data)


def refused(path: Path, *words: str, model: Model | None = None) -> None:
    with pytest.raises(UsageError) as caught:
        load_weights(str(path), model)
    text = str(caught.value)
    assert path.name in text and "\n" not in text
    for word in words:
        assert word in text, text


def test_fp32_comes_back_bit_for_bit(saved: Path) -> None:
    loaded = load_weights(str(saved), SMALL)
    assert loaded.model == SMALL and loaded.notes == () and "2 layers" in loaded.description
    for name, array in varied().items():
        np.testing.assert_array_equal(loaded.weights[name], array)


def test_the_layout_is_the_documented_one(saved: Path) -> None:
    ints = np.fromfile(saved, "<i4", 256)
    assert ints[:8].tolist() == [20240326, 3, 6, 30, 2, 2, 8, 128] and not ints[8:].any()
    floats = np.fromfile(saved, "<f4", offset=1024)
    np.testing.assert_array_equal(floats, np.concatenate([array.ravel() for array in varied().values()]))


def test_bf16_rounds_to_nearest_even_and_widens_exactly(tmp_path: Path) -> None:
    weights = varied()
    # Ties go to the even neighbour: 1 + 2^-8 down to 1, 1 + 3 * 2^-8 up.
    weights["lnfw"][:3] = (1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20)
    export_llmc(tmp_path / "m.bin", SMALL, weights, "bf16")
    assert np.fromfile(tmp_path / "m.bin", "<i4", 2)[1] == 5
    loaded = load_weights(str(tmp_path / "m.bin")).weights
    assert loaded["lnfw"][:3].tolist() == [1, 1 + 2**-6, 1 + 2**-7]
    for name, array in weights.items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], array.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_sizes_of_files_are_the_published_ones() -> None:
    assert 1024 + 4 * PRESETS["d12"].parameter_count == 497_904_640
    assert 1024 + 2 * PRESETS["d12"].parameter_count == 248_952_832


def test_chunks_leave_no_seam(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_binary, "CHUNK", 7)
    again = saved.with_name("again.bin")
    export_llmc(again, SMALL, load_weights(str(saved)).weights)
    assert again.read_bytes() == saved.read_bytes()


def test_padding_that_is_not_zero_becomes_zero_with_a_note(tmp_path: Path) -> None:
    weights = varied()
    weights["wte"][30, 2] = 1
    export_llmc(tmp_path / "m.bin", SMALL, weights)
    loaded = load_weights(str(tmp_path / "m.bin"))
    assert not loaded.weights["wte"][30:].any() and "beyond the vocabulary" in loaded.notes[0]


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, 20240520, "token data"),
        (0, 20240527, "optimizer state"),
        (0, 17, "something else"),
        (1, 1, "before the vocabulary was padded"),
        (1, 7, "version 7"),
        (2, 0, "context = 0"),
        (3, -5, "vocab = -5"),
        (4, 2**31 - 1, "is cut off"),
        (5, 3, "divided among 3 heads"),
        (6, 0, "channels = 0"),
        (7, 30, "padded to 30"),
        (2, 5, "is too long"),
    ],
)
def test_headers_that_cannot_be(saved: Path, at: int, value: int, words: str) -> None:
    patch(saved, at, value)
    refused(saved, words)


def test_sizes_of_damaged_files_name_both_counts(saved: Path) -> None:
    whole = saved.read_bytes()
    for data, found in ((whole[:-1], len(whole) - 1), (whole + b"\0", len(whole) + 1), (whole[:1024], 1024)):
        saved.write_bytes(data)
        refused(saved, str(len(whole)), str(found))
    saved.write_bytes(whole[:1000])
    refused(saved, "1000 bytes", "1024")
    saved.write_bytes(b"")
    refused(saved, "is empty")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_named(
    tmp_path: Path, dtype: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_binary, "CHUNK", 50)
    path = tmp_path / "m.bin"
    export_llmc(path, SMALL, varied(), dtype)
    stored = np.float32 if dtype == "fp32" else ml_dtypes.bfloat16
    before = 128 * 8 + 6 * 8 + 2 * 16 + 24 * 8 + 3 * 8 + 5  # wte, wpe, ln1w and ln1b, a layer, then row 3, column 5
    data = np.frombuffer(path.read_bytes()[1024:], stored).copy()
    data[before] = value
    path.write_bytes(path.read_bytes()[:1024] + data.tobytes())
    refused(path, "qkvw[1, 3, 5]", str(value))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04" + b"\0" * 2000, "PyTorch"),
        (b"\x80\x02}" + b"\0" * 2000, "PyTorch"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b'{"weight_map": {}}', "JSON"),
        (b"GGUF" + b"\0" * 2000, "GGUF"),
        (b"abc", "3 bytes"),
    ],
)
def test_files_of_other_kinds_are_told_by_their_content(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    refused(path, words)


def test_names_that_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "absent.bin", "does not exist")
    (tmp_path / "gpt2_124M.bin").touch()
    refused(tmp_path, "folder", "gpt2_124M.bin")


def test_other_sizes_than_asked_for_are_named(saved: Path) -> None:
    refused(saved, "2 layers, 2 heads, 8 channels", "4 heads", model=Model(2, 4, 8, vocab=30, context=6))


def test_scratch() -> None:
    loaded = load_weights("scratch", SMALL, seed=9)
    assert "seed 9" in loaded.description
    np.testing.assert_array_equal(loaded.weights["fcw"], initial_weights(SMALL, 9)["fcw"])
    with pytest.raises(UsageError, match="--model"):
        load_weights("scratch")


def test_too_little_memory_is_an_answer(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise MemoryError("12 GiB")

    monkeypatch.setattr("kbench.train.weights.read_llmc", full)
    with pytest.raises(CannotRunError, match="too little memory"):
        load_weights(str(saved))


def test_a_failed_export_leaves_the_old_file_and_no_rubbish(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved.read_bytes()
    diverged = varied(seed=2)
    diverged["fcb"][1, 4] = np.nan
    with pytest.raises(CannotRunError, match=r"fcb\[1, 4\] is nan"):
        export_llmc(saved, SMALL, diverged)
    monkeypatch.setattr(weights_binary.os, "fsync", _no_space)
    with pytest.raises(CannotRunError, match="No space left"):
        export_llmc(saved, SMALL, varied(seed=2))
    assert saved.read_bytes() == old and [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_value_that_bf16_cannot_hold_is_not_saved_as_infinity(tmp_path: Path) -> None:
    weights = varied()
    weights["lnfb"][7] = 3.4e38
    with pytest.raises(CannotRunError, match=r"lnfb\[7\] is inf"):
        export_llmc(tmp_path / "m.bin", SMALL, weights, "bf16")


def test_wrong_tensors_are_a_mistake_of_the_caller(tmp_path: Path) -> None:
    weights = varied()
    weights["wte"] = weights["wte"][:30]
    with pytest.raises(ValueError, match="wte is float32"):
        export_llmc(tmp_path / "m.bin", SMALL, weights)
    del weights["wte"]
    with pytest.raises(ValueError, match="tensors"):
        export_llmc(tmp_path / "m.bin", SMALL, weights)


def _no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")
