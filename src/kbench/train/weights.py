"""Weights to start from, and to take away: from scratch, llm.c's model files, Hugging Face's safetensors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kbench.device.host_memory import available_memory
from kbench.errors import CannotRunError, UsageError
from kbench.train.initial import DEFAULT_SEED, initial_weights
from kbench.train.model import Model
from kbench.train.safetensors import looks_like_safetensors
from kbench.train.weights_binary import (
    TEMPORARY,
    Array,
    DamagedFile,
    TensorFile,
    replace_files,
    require_tensors,
    stage,
    unwritable,
)
from kbench.train.weights_huggingface import CONFIG, config_differs, config_text, huggingface_buffers, read_config
from kbench.train.weights_huggingface import read_huggingface as _read_huggingface
from kbench.train.weights_llmc import llmc_buffers, read_llmc

SCRATCH = "scratch"
_FOLDER_FILE = "model.safetensors"  # how Hugging Face names it
# Files that are no weights, but are often taken for them, by how they start.
_STARTS = {
    b"PK\x03\x04": ("a PyTorch file (a pickle in a zip)", "convert it to safetensors"),
    b"\x80\x02": ("a PyTorch file (a pickle)", "convert it to safetensors"),
    b"version https": ("a pointer of Git LFS, not the file itself", "fetch it with `git lfs pull`"),
    b"\x89HDF": ("an HDF5 file", "convert it to safetensors"),
    b"GGUF": ("a GGUF file", "convert it to safetensors"),
    b"<": ("a web page or XML", "download the file itself"),
    b"{": ("JSON", "name the .safetensors file; a model split into several is not read"),
}
_SNIFF_BYTES = 16


@dataclass(frozen=True)
class LoadedWeights:
    """weights: name -> float32 array of the full shape, wte padded. description: one line. notes: one line each."""

    model: Model
    weights: dict[str, Array]
    description: str
    notes: tuple[str, ...] = ()


def load_weights(spec: str, model: Model | None = None, seed: int = DEFAULT_SEED) -> LoadedWeights:
    """Weights by what a user names: "scratch", a file told by its content, or a folder that holds model.safetensors.

    model: the sizes that were asked for, needed for scratch. Raises UsageError for a file that is damaged, of another
    kind or of other sizes, CannotRunError where memory does not suffice.
    """
    try:
        if spec == SCRATCH:
            if model is None:
                raise UsageError("weights from scratch need a model's sizes", "choose one with --model")
            needed, free = 4 * model.parameter_count, available_memory()
            if needed > free:
                raise CannotRunError(
                    f"{model}: its {model.parameter_count:,} parameters take {needed / 1e9:.1f} GB of main memory, "
                    f"{free / 1e9:.1f} GB are free",
                    "choose a smaller model",
                )
            return LoadedWeights(model, initial_weights(model, seed), f"from scratch, seed {seed}")
        loaded = _load_file(Path(spec), model)
    except MemoryError as error:
        raise CannotRunError(f"weights {spec}: this machine has too little memory for them ({error})") from error
    if model is not None and loaded.model != model:
        raise UsageError(
            f"{spec} holds {loaded.model}; asked for were {model}", "leave out the sizes, or name other weights"
        )
    return loaded


def export_llmc(path: Path, model: Model, weights: Mapping[str, Array], dtype: str = "fp32") -> None:
    """Write an llm.c model file: version 3 (dtype fp32) or 5 (bf16, rounded to nearest even).

    weights: the 16 tensors in full shapes, float32 or bf16. A file of that name is replaced in one step, and stays as
    it was on any failure. Raises CannotRunError.
    """
    require_tensors(model, weights)
    _make_folder(path)
    replace_files([stage(path, llmc_buffers(model, weights, dtype))])


def require_exportable(path: Path, model: Model) -> None:
    """Prove, before any training, that weights of `model` can be exported to `path`; makes its folder.

    Raises UsageError for a name that ends in neither .bin nor .safetensors, a path that is no place for a file, and a
    config.json of another model beside safetensors; CannotRunError where the folder cannot be written.
    """
    if path.suffix not in (".bin", ".safetensors"):
        raise UsageError(f"--export {path}: the name ends in neither .bin nor .safetensors")
    if os.path.exists(path) and not path.is_file():
        raise UsageError(f"--export {path}: it is there, and no file", "choose another name")
    _make_folder(path)
    try:
        # By the name that it will be written under first, which is longer than its own.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{TEMPORARY}{path.name}-"):
            pass
    except OSError as error:
        raise CannotRunError(f"cannot write {path}: {error.strerror}", "choose another place") from error
    if path.suffix == ".safetensors":
        _config_beside(path, model)


def _config_beside(path: Path, model: Model) -> Path | None:
    """Where the config.json that belongs to safetensors at `path` is missing; None where a right one is there."""
    config = path.parent / CONFIG
    found = read_config(config)
    if found and (difference := config_differs(found, model)):
        raise UsageError(f"{config} is of another model: {difference}", "export to a folder of its own")
    return None if found else config


def export_safetensors(path: Path, model: Model, weights: Mapping[str, Array], dtype: str = "fp32") -> None:
    """Write Hugging Face's safetensors and, where there is none, the config.json beside it that names the heads.

    As `export_llmc`; raises UsageError too, where a config.json of another model stands there.
    """
    require_tensors(model, weights)
    _make_folder(path)
    if path.name == CONFIG:
        raise UsageError(f"{path}: that name is the config's", "choose another, such as model.safetensors")
    config = _config_beside(path, model)
    staged = []
    try:
        if config is not None:
            staged.append(stage(config, [config_text(model, dtype).encode()]))
        staged.append(stage(path, huggingface_buffers(model, weights, dtype)))
    except BaseException:
        for file in staged:
            file.discard()
        raise
    replace_files(staged)


def _load_file(path: Path, model: Model | None) -> LoadedWeights:
    if path.is_dir():
        if not (path / _FOLDER_FILE).is_file():
            some = sorted(p.name for pattern in ("*.safetensors", "*.bin") for p in path.glob(pattern))[:3]
            hint = (
                f"name one of its files: {', '.join(some)}" if some else f"name a file, or a folder with {_FOLDER_FILE}"
            )
            raise UsageError(f"{path} is a folder", hint)
        path = path / _FOLDER_FILE
    with TensorFile(path) as file:
        start = file.read(min(file.size, _SNIFF_BYTES))
        file.seek(0)
        if not start:
            raise DamagedFile(f"{path} is empty", "copy or download it again")
        if looks_like_safetensors(start):
            kind, (found, weights, notes) = "safetensors", _read_huggingface(file, model)
        else:
            for magic, (what, hint) in _STARTS.items():
                if start.startswith(magic):
                    raise UsageError(f"{path} is {what}", hint)
            kind, (found, weights, notes) = "llm.c", read_llmc(file)
    return LoadedWeights(found, weights, f"{path} ({kind}): {found}", tuple(notes))


def _make_folder(path: Path) -> None:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder", "name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path.parent, error) from error
