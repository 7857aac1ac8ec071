"""GPT-2 in Hugging Face's safetensors: names, turned weights, sizes, and everything that a stranger's file may hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.model import Model
from kbench.train.weights import export_safetensors, load_weights

MODEL = Model(2, 2, 8, vocab=30, context=6)
Tensors = dict[str, np.ndarray]


def varied(seed: int = 1, model: Model = MODEL) -> Tensors:
    source = np.random.default_rng(seed)
    weights = {p.name: source.normal(0, 1, p.shape).astype(np.float32) for p in model.parameters}
    weights["wte"][model.vocab :] = 0
    return weights


def hugging_face(weights: Tensors, model: Model = MODEL, prefix: str = "") -> Tensors:
    """The tensors as Hugging Face lays them out, by rules written down here a second time."""
    linear = {"qkvw": "attn.c_attn", "attprojw": "attn.c_proj", "fcw": "mlp.c_fc", "fcprojw": "mlp.c_proj"}
    vectors = {"ln1": "ln_1", "ln2": "ln_2"}
    found = {"wte.weight": weights["wte"][: model.vocab], "wpe.weight": weights["wpe"]}
    for layer in range(model.layers):
        for ours, theirs in linear.items():
            found[f"h.{layer}.{theirs}.weight"] = weights[ours][layer].T
            found[f"h.{layer}.{theirs}.bias"] = weights[ours[:-1] + "b"][layer]
        for ours, theirs in vectors.items():
            found[f"h.{layer}.{theirs}.weight"] = weights[ours + "w"][layer]
            found[f"h.{layer}.{theirs}.bias"] = weights[ours + "b"][layer]
    found |= {"ln_f.weight": weights["lnfw"], "ln_f.bias": weights["lnfb"]}
    return {prefix + name: np.ascontiguousarray(array) for name, array in found.items()}


DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "bool": "BOOL", "float64": "F64"}


def write(
    path: Path, tensors: Tensors, metadata: dict[str, str] | None = None, edit: Callable[[Any], None] = id
) -> Path:
    """A safetensors file by a writer of the test's own; edit: changes the header."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    data = b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    edit(header)
    return write_raw(path, json.dumps(header).encode(), data)


def write_raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    return tmp_path / "model.safetensors"


def refused(path: Path, *words: str, model: Model | None = None) -> None:
    with pytest.raises(UsageError) as caught:
        load_weights(str(path), model)
    text = str(caught.value)
    assert str(path.parent) in text and "\n" not in text and len(text) < 400
    for word in words:
        assert word in text, text


def same(path: Path, expected: Tensors) -> None:
    loaded = load_weights(str(path))
    assert loaded.model == MODEL and list(loaded.weights) == [p.name for p in MODEL.parameters]
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded.weights[name], array)
        assert loaded.weights[name].dtype == np.float32


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_with_and_without_prefix(file: Path, prefix: str) -> None:
    same(write(file, hugging_face(varied(), prefix=prefix)), varied())


def test_tensors_in_any_order(file: Path) -> None:
    tensors = hugging_face(varied())
    same(write(file, dict(sorted(tensors.items(), reverse=True))), varied())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sixteen_bits_widen_exactly(file: Path, dtype: Any) -> None:
    rounded = {name: array.astype(dtype) for name, array in hugging_face(varied()).items()}
    same(write(file, rounded), {name: array.astype(dtype).astype(np.float32) for name, array in varied().items()})


def test_masks_and_a_tied_classifier_are_passed_over(file: Path) -> None:
    tensors = hugging_face(varied())
    tensors["h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.bool_)
    tensors["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
    tensors["lm_head.weight"] = tensors["wte.weight"].copy()
    same(write(file, tensors), varied())
    tensors["lm_head.weight"][3, 3] += 1
    refused(write(file, tensors), "lm_head.weight differs")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].copy()
    refused(write(file, tensors), "lm_head.weight differs")


def test_strangers_outside_the_layers_are_noted_and_inside_refused(file: Path) -> None:
    tensors = hugging_face(varied()) | {"score.weight": np.ones((2, 8), np.float32)}
    assert "score.weight" in load_weights(str(write(file, tensors))).notes[0]
    tensors["h.0.crossattention.c_attn.weight"] = np.ones((8, 8), np.float32)
    refused(write(file, tensors), "h.0.crossattention")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_and_back(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "new" / "model.safetensors"
    export_safetensors(path, MODEL, varied(), dtype)
    stored = np.float32 if dtype == "fp32" else ml_dtypes.bfloat16
    same(path.parent, {name: array.astype(stored).astype(np.float32) for name, array in varied().items()})
    config = json.loads((path.parent / "config.json").read_text())
    assert (config["n_head"], config["vocab_size"], config.get("n_inner")) == (2, 30, None)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0 and header["__metadata__"] == {"format": "pt", "n_head": "2"}
    assert header["transformer.h.1.mlp.c_fc.weight"]["shape"] == [8, 32]


def test_the_library_reads_what_is_exported(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    path = tmp_path / "model.safetensors"
    export_safetensors(path, MODEL, varied())
    read = library.load_file(path)
    expected = hugging_face(varied(), prefix="transformer.")
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(read[name], array)
    library.save_file(expected, path)
    same(path, varied())


def test_heads_by_config_metadata_request_or_habit(tmp_path: Path) -> None:
    wide = Model(1, 4, 128, vocab=30, context=6)
    tensors = hugging_face(varied(model=wide), wide)
    path = write(tmp_path / "m.safetensors", tensors)
    assumed = load_weights(str(path))
    assert assumed.model.heads == 2 and "2, of size 64, are assumed" in assumed.notes[0]
    assert load_weights(str(path), wide).model.heads == 4
    assert load_weights(str(write(path, tensors, {"n_head": "8"}))).model.heads == 8
    (tmp_path / "config.json").write_text('{"n_head": 4}')
    refused(path, "8 heads", "says 4")
    assert load_weights(str(write(path, tensors))).model.heads == 4
    (tmp_path / "config.json").write_text('{"n_head": 3}')
    refused(path, "divided among 3 heads", "n_head in config.json")


def test_a_head_size_that_cannot_be_guessed(tmp_path: Path) -> None:
    refused(write(tmp_path / "m.safetensors", hugging_face(varied())), "how many heads", "config.json")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"n_head": 2, "n_layer": 3}', "n_layer is 3, and the weights have 2"),
        ('{"n_head": 2, "vocab_size": 31}', "vocab_size is 31"),
        ('{"n_head": 2, "activation_function": "relu"}', "activation_function"),
        ('{"n_head": 2, "layer_norm_epsilon": 1e-6}', "layer_norm_epsilon"),
        ('{"n_head": 2, "scale_attn_by_inverse_layer_idx": true}', "scale_attn"),
        ('{"n_head": 2, "model_type": "gpt_neo"}', "gpt_neo"),
        ('{"n_head": 2, "n_embd": 8, "n_inner": 16}', "n_inner"),
        ('{"n_head": "2"}', "n_head is '2'"),
        ('{"n_head": true}', "n_head is True"),
        ('{"n_head": 2', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[2]", "not a JSON object"),
        (" " * 2_000_000, "too large"),
    ],
)
def test_configs_that_do_not_fit(file: Path, config: str, words: str) -> None:
    write(file, hugging_face(varied()))
    (file.parent / "config.json").write_text(config)
    refused(file, words, "config.json")


def test_export_never_overwrites_the_config_of_another_model(file: Path) -> None:
    (file.parent / "config.json").write_text('{"n_head": 2, "n_layer": 12}')
    with pytest.raises(UsageError, match="config.json is of another model: n_layer is 12"):
        export_safetensors(file, MODEL, varied())
    assert [p.name for p in file.parent.iterdir()] == ["config.json"]
    with pytest.raises(UsageError, match="name is the config's"):
        export_safetensors(file.with_name("config.json"), MODEL, varied())


def test_a_missing_tensor_and_one_of_another_shape_are_named(file: Path) -> None:
    tensors = hugging_face(varied())
    refused(write(file, {k: v for k, v in tensors.items() if k != "h.1.mlp.c_fc.bias"}), "h.1.mlp.c_fc.bias is missing")
    refused(write(file, {k: v for k, v in tensors.items() if k != "wpe.weight"}), "wpe.weight is missing", "no GPT-2")
    refused(write(file, tensors | {"wte.weight": np.ones(8, np.float32)}), "wte.weight has shape [8]")
    turned = tensors | {"h.0.mlp.c_fc.weight": np.ascontiguousarray(tensors["h.0.mlp.c_fc.weight"].T)}
    refused(write(file, turned), "h.0.mlp.c_fc.weight has shape [32, 8], not [8, 32]")
    far = tensors | {"h.999999.ln_1.bias": np.ones(8, np.float32)}
    refused(write(file, far), "h.2.ln_1.weight is missing")
    refused(write(file, {}), "wte.weight is missing")
    twice = tensors | {"transformer.wte.weight": tensors["wte.weight"]}
    refused(write(file, twice), "with and without")


def test_values_and_types_that_cannot_train(file: Path) -> None:
    tensors = hugging_face(varied())
    tensors["h.1.attn.c_attn.weight"][2, 5] = np.nan
    refused(write(file, tensors), "h.1.attn.c_attn.weight[2, 5] is nan")
    tensors = hugging_face(varied())
    refused(write(file, tensors | {"ln_f.bias": tensors["ln_f.bias"].astype(np.float64)}), "ln_f.bias is F64")


def set_in(name: str, **fields: Any) -> Callable[[Any], None]:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (set_in("wpe.weight", dtype="F31"), "unknown dtype 'F31'"),
        (set_in("wpe.weight", dtype=32), "lacks a proper dtype"),
        (set_in("wpe.weight", shape=[6, 9]), "takes 192 bytes, and F32 [6, 9] needs 216"),
        (set_in("wpe.weight", shape=[-6, -8]), "lacks a proper"),
        (set_in("wpe.weight", shape=[6.0, 8]), "lacks a proper"),
        (set_in("wpe.weight", shape=[True, 48]), "lacks a proper"),
        (set_in("wpe.weight", shape=None), "lacks a proper"),
        (set_in("wpe.weight", data_offsets=[0]), "lacks a proper"),
        (set_in("wpe.weight", data_offsets=[192, 0]), "takes -192 bytes"),
        (set_in("wpe.weight", data_offsets=[0, 192]), "overlaps"),
        (set_in("wpe.weight", data_offsets=[10**9, 10**9 + 192]), "cut off in 'wpe.weight'"),
        (set_in("wpe.weight", data_offsets=[10**30, 10**30 + 192]), "cut off in 'wpe.weight'"),
        (lambda header: header.pop("wpe.weight"), "leaves a gap after 'wte.weight'"),
        (lambda header: header.pop("ln_f.bias"), "is too long"),
        (lambda header: header.update({"x": 3}), "lacks a proper"),
        (lambda header: header.update({"__metadata__": {"n_head": 2}}), "__metadata__"),
        (lambda header: header.update({"__metadata__": "pt"}), "__metadata__"),
    ],
)
def test_headers_that_lie(file: Path, edit: Callable[[Any], None], words: str) -> None:
    refused(write(file, hugging_face(varied()), edit=edit), words)


@pytest.mark.parametrize(
    ("header", "length", "words"),
    [
        (b"{}", 3, "cut off"),
        (b"{}", 2**40, "a header of 1099511627776 bytes"),
        (b"{}", 90_000_000, "cut off"),
        (b'{"a": ', None, "not proper JSON"),
        (b'{"a": 1, "a": 2}', None, "stands twice"),
        (b'{"\xff": 1}', None, "not proper JSON"),
        (b'{"a":' + b"[" * 100_000, None, "not proper JSON"),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b"]}}", None, "not proper JSON"),
        (b"{} []", None, "not proper JSON"),
    ],
)
def test_headers_that_are_none(file: Path, header: bytes, length: int | None, words: str) -> None:
    refused(write_raw(file, header, length=length), words)


def test_every_truncation_is_an_error(file: Path) -> None:
    whole = write(file, hugging_face(varied())).read_bytes()
    for size in [*range(0, 40), *range(40, len(whole), 97), len(whole) - 1]:
        file.write_bytes(whole[:size])
        refused(file)
    file.write_bytes(whole + b"\0")
    refused(file, "too long")
