"""GPT-2 as Hugging Face stores it: safetensors with one tensor per layer, and the sizes in config.json beside it.

Its linear layers are "Conv1D", with weights stored (in, out). Names come with and without the prefix "transformer.".
The number of heads shows in no shape: it stands in config.json, or in the metadata of files written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kbench.errors import UsageError
from kbench.train.model import Model, Parameter
from kbench.train.safetensors import Entry, header_bytes, read_header, read_into
from kbench.train.weights_binary import FP32, STORED, Array, DamagedFile, TensorFile, tensor_buffers

CONFIG = "config.json"
PREFIX = "transformer."
CLASSIFIER = "lm_head.weight"
# Buffers that older files hold beside the weights: the causal mask, and what masked scores become.
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_LAYER = re.compile(r"h\.(\d{1,6})\.")
# Of all published GPT-2 sizes; assumed where nothing says how many heads there are.
USUAL_HEAD_SIZE = 64
_CONFIG_LIMIT = 1 << 20  # a config has 1 KB
# Options that change what the model computes, with what is computed here, which is also what an absent one means.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_SIZES = {"n_layer": "layers", "n_head": "heads", "n_embd": "channels", "vocab_size": "vocab", "n_positions": "context"}


@dataclass(frozen=True)
class _Piece:
    """What one tensor of the file is here: a layer's part of a parameter, or a whole one (layer None)."""

    name: str
    parameter: Parameter
    layer: int | None
    shape: tuple[int, ...]

    def of(self, weights: Mapping[str, Array]) -> Array:
        """The part of our arrays, in our layout: a view, without the padding of the vocabulary."""
        array = weights[self.parameter.name]
        return array[: self.shape[0]] if self.layer is None else array[self.layer]


def _pieces(model: Model) -> Iterator[_Piece]:
    for parameter in model.parameters:
        if not parameter.layered:
            shape = (model.vocab, model.channels) if parameter.name == "wte" else parameter.shape
            yield _Piece(parameter.hf_name, parameter, None, shape)
            continue
        shape = parameter.slice_shape[::-1] if parameter.turned else parameter.slice_shape
        for layer in range(parameter.slices):
            yield _Piece(parameter.hf_name.format(layer), parameter, layer, shape)


def read_huggingface(file: TensorFile, asked: Model | None) -> tuple[Model, dict[str, Array], list[str]]:
    """A safetensors file from its start: sizes, the 16 tensors as float32 in our layout, notes.

    asked: sizes that were asked for, of which only the heads are used, where no file says them.
    Raises DamagedFile, UsageError.
    """
    entries, metadata = read_header(file)
    for name in [name for name in entries if name.startswith(PREFIX)]:
        short = name.removeprefix(PREFIX)
        if short in entries:
            raise DamagedFile(f"{file.path}: {short[:80]} stands there with and without {PREFIX}")
        entries[short] = entries.pop(name)
    model, notes = _sizes(file, entries, metadata, asked)
    pieces = list(_checked(file, model, entries))
    notes += _require_only(file, {piece.name for piece in pieces}, entries)
    weights = {
        p.name: np.zeros(p.shape, FP32) if p.name == "wte" else np.empty(p.shape, FP32) for p in model.parameters
    }
    for piece in pieces:
        target = piece.of(weights)
        if piece.parameter.turned:
            stored = np.empty(piece.shape, FP32)
            read_into(file, piece.name, entries[piece.name], stored)
            target[...] = stored.T
        else:
            read_into(file, piece.name, entries[piece.name], target)
    _require_tied(file, entries, weights["wte"][: model.vocab])
    return model, weights, notes


def huggingface_buffers(model: Model, weights: Mapping[str, Array], dtype: str) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file that stores `dtype` (fp32 or bf16), in chunks."""
    stored = STORED[dtype]
    pieces = list(_pieces(model))
    metadata = {"format": "pt", "n_head": str(model.heads)}
    yield header_bytes([(PREFIX + piece.name, piece.shape) for piece in pieces], stored, metadata)
    for piece in pieces:
        array = piece.of(weights)
        turned = np.ascontiguousarray(array.T) if piece.parameter.turned else array
        yield from tensor_buffers(turned, stored, piece.name)


def config_text(model: Model, dtype: str) -> str:
    """config.json for `model`."""
    config: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"]}
    config |= {name: values[0] for name, values in _COMPUTED.items()}
    config |= {name: getattr(model, ours) for name, ours in _SIZES.items()}
    config |= {"torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype]}
    config |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)  # kbench trains without dropout
    ends = 50256 if model.vocab == 50257 else None  # the last token of GPT-2's own vocabulary ends a text
    config |= {"bos_token_id": ends, "eos_token_id": ends}
    return json.dumps(config, indent=2) + "\n"


def read_config(path: Path) -> dict[str, Any] | None:
    """config.json, proven to describe what is computed here, or None if there is none. Raises UsageError."""
    try:
        if path.stat().st_size > _CONFIG_LIMIT:
            raise UsageError(f"{path} is too large for a model's config")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is not JSON", "mend or remove it") from error
    if not isinstance(config, dict):
        raise DamagedFile(f"{path} is not a JSON object", "mend or remove it")
    for name, allowed in _COMPUTED.items():
        if config.get(name, allowed[0]) not in allowed:
            raise UsageError(f"{path}: {name} is {config[name]!r}, and kbench computes {allowed[0]!r} only")
    for name in _SIZES:
        if name in config and (type(config[name]) is not int or config[name] < 1):
            raise DamagedFile(f"{path}: {name} is {config[name]!r}", "mend or remove it")
    inner, channels = config.get("n_inner"), config.get("n_embd")
    if inner is not None and channels is not None and inner != 4 * channels:
        raise UsageError(f"{path}: n_inner is {inner!r}, and kbench computes 4 times n_embd ({channels}) only")
    return config


def config_differs(config: Mapping[str, Any], model: Model) -> str | None:
    """The first size in which a config is not of `model`, in words, or None."""
    for name, ours in _SIZES.items():
        if name in config and config[name] != getattr(model, ours):
            return f"{name} is {config[name]}, and the weights have {getattr(model, ours)}"
    return None


def _sizes(
    file: TensorFile, entries: Mapping[str, Entry], metadata: Mapping[str, str], asked: Model | None
) -> tuple[Model, list[str]]:
    rows = {}
    for name in ("wte.weight", "wpe.weight"):
        if name not in entries:
            some = ", ".join(list(entries)[:3]) or "none"
            raise DamagedFile(f"{file.path}: {name} is missing, so this is no GPT-2 (its tensors: {some[:100]} ...)")
        if len(entries[name].shape) != 2 or 0 in entries[name].shape:
            raise DamagedFile(f"{file.path}: {name} has shape {list(entries[name].shape)}, and needs two sizes")
        rows[name] = entries[name].shape[0]
    channels = entries["wte.weight"].shape[1]
    layers = 1 + max((int(found[1]) for name in entries if (found := _LAYER.match(name))), default=0)
    heads, notes = _heads(file, metadata, channels, asked)
    try:
        model = Model(layers, heads, channels, rows["wte.weight"], rows["wpe.weight"])
    except UsageError as error:
        raise UsageError(f"{file.path}: {error.message}", f"mend n_head in {CONFIG} beside it") from error
    config = read_config(file.path.parent / CONFIG)
    if config and (difference := config_differs(config, model)):
        raise UsageError(
            f"{file.path} and {CONFIG} beside it disagree: {difference}", "one of them is of another model"
        )
    return model, notes


def _heads(file: TensorFile, metadata: Mapping[str, str], channels: int, asked: Model | None) -> tuple[int, list[str]]:
    config = read_config(file.path.parent / CONFIG) or {}
    told = [int(value) for value in (str(config.get("n_head")), metadata.get("n_head", "")) if value.isdecimal()]
    if len(set(told)) > 1:
        raise UsageError(f"{file.path} was written with {told[1]} heads, and {CONFIG} beside it says {told[0]}")
    if told:
        return told[0], []
    if asked is not None and asked.channels == channels:
        return asked.heads, []
    if channels % USUAL_HEAD_SIZE:
        raise UsageError(f"{file.path} does not say how many heads there are", f"put its {CONFIG} beside it")
    heads = channels // USUAL_HEAD_SIZE
    return heads, [
        f"{file.path} does not say how many heads there are: {heads}, of size {USUAL_HEAD_SIZE}, are assumed"
    ]


def _checked(file: TensorFile, model: Model, entries: Mapping[str, Entry]) -> Iterator[_Piece]:
    for piece in _pieces(model):
        entry = entries.get(piece.name)
        if entry is None:
            raise DamagedFile(f"{file.path}: tensor {piece.name} is missing, for {model}")
        if entry.shape != piece.shape:
            raise DamagedFile(
                f"{file.path}: tensor {piece.name} has shape {list(entry.shape)}, not {list(piece.shape)}, for {model}"
            )
        yield piece


def _require_only(file: TensorFile, known: set[str], entries: Mapping[str, Entry]) -> list[str]:
    """Notes on tensors that are passed over. Raises UsageError for one that belongs to the layers."""
    notes = []
    for name in entries:
        if name in known or name == CLASSIFIER or _MASK.fullmatch(name):
            continue
        if _LAYER.match(name):
            raise UsageError(f"{file.path}: {name[:80]} is no part of GPT-2, so its layers compute something else")
        notes.append(f"{file.path}: {name[:80]} is no part of GPT-2 and was left out")
    return notes


def _require_tied(file: TensorFile, entries: Mapping[str, Entry], wte: Array) -> None:
    """A classifier in the file has to be the token embedding. Raises UsageError."""
    entry = entries.get(CLASSIFIER)
    if entry is None:
        return
    same = entry.shape == wte.shape
    if same:
        classifier = np.empty(entry.shape, FP32)
        read_into(file, CLASSIFIER, entry, classifier)
        same = np.array_equal(classifier, wte)
    if not same:
        raise UsageError(f"{file.path}: {CLASSIFIER} differs from wte.weight, and kbench trains them as one")
