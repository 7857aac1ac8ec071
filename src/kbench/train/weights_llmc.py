"""llm.c's model files: a header of 256 int32, then the 16 tensors, all fp32 (version 3) or all bf16 (version 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kbench.errors import UsageError
from kbench.train.model import Model
from kbench.train.weights_binary import BF16, FP32, STORED, Array, DamagedFile, TensorFile, tensor_buffers

MAGIC = 20240326
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
VERSIONS: dict[int, np.dtype[Any]] = {3: FP32, 5: BF16}
# The program's other files, which carry the same ending and are easily taken for a model.
OTHER_FILES = {
    20240327: "llm.c's debug state",
    20240328: "llm.c's tokenizer",
    20240520: "llm.c's token data",
    20240522: "llm.c's evaluation data",
    20240527: "llm.c's optimizer state",
}
_MENDING = "copy or download it again"


def read_llmc(file: TensorFile, *, exact: bool = False) -> tuple[Model, dict[str, Array], list[str]]:
    """A model file from its start: sizes, the 16 tensors in full shapes, and notes.

    exact: leave tensors as they are stored, bit for bit. Otherwise bf16 becomes float32, without loss, and padding rows
    of wte that are not 0 become 0 with a note, because everything relies on logits of 0 there. Raises DamagedFile,
    UsageError.
    """
    model, stored = read_header(file)
    weights = {}
    for parameter in model.parameters:
        array = np.empty(parameter.shape, stored if exact else FP32)
        file.read_tensor(array, stored, parameter.name)
        weights[parameter.name] = array
    notes = []
    padding = weights["wte"][model.vocab :]
    if not exact and padding.any():
        padding[...] = 0
        notes.append(f"{file.path}: rows of wte beyond the vocabulary ({model.vocab}) were not 0 and are now")
    return model, weights, notes


def read_header(file: TensorFile) -> tuple[Model, np.dtype[Any]]:
    """Sizes and element type, once the file's size is proven to be theirs. Raises DamagedFile, UsageError."""
    path = file.path
    if file.size < HEADER_BYTES:
        raise DamagedFile(f"{path} has {file.size} bytes, fewer than the {HEADER_BYTES} of a header", _MENDING)
    header = [int(value) for value in np.frombuffer(file.read(HEADER_BYTES), "<i4")]
    magic, version, context, vocab, layers, heads, channels, padded = header[:8]
    if magic != MAGIC:
        what = OTHER_FILES.get(magic, f"something else: it starts with {magic} instead of {MAGIC}")
        raise DamagedFile(f"{path} is not a model of llm.c but {what}")
    if version not in VERSIONS:
        old = ", which is from before the vocabulary was padded," if version == 1 else ""
        raise UsageError(f"{path} has version {version}{old} and only 3 (fp32) and 5 (bf16) are read", "export it anew")
    try:
        model = Model(layers, heads, channels, vocab, context)
    except UsageError as error:
        raise DamagedFile(f"{path}: its header holds {error.message}", _MENDING) from error
    if padded != model.padded_vocab:
        raise DamagedFile(f"{path}: a vocabulary of {vocab} padded to {padded}: {model.padded_vocab} is needed")
    expected = HEADER_BYTES + model.parameter_count * VERSIONS[version].itemsize
    if file.size != expected:
        state = "is cut off" if file.size < expected else "is too long"
        raise DamagedFile(f"{path} {state}: {file.size} bytes, and {expected} are needed for {model}", _MENDING)
    return model, VERSIONS[version]


def llmc_buffers(model: Model, weights: Mapping[str, Array], dtype: str) -> Iterator[bytes | memoryview]:
    """The bytes of a model file that stores `dtype` (fp32 or bf16), in chunks."""
    stored = STORED[dtype]
    header = np.zeros(HEADER_INTS, "<i4")
    version = next(number for number, of in VERSIONS.items() if of == stored)
    sizes = (model.context, model.vocab, model.layers, model.heads, model.channels, model.padded_vocab)
    header[:8] = (MAGIC, version, *sizes)
    yield header.tobytes()
    for parameter in model.parameters:
        yield from tensor_buffers(weights[parameter.name], stored, parameter.name)
