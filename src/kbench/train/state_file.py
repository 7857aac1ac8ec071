"""llm.c's optimizer state: a header of 256 int32, then m, v and perhaps master weights, all fp32.

Written for one process and without the position in the data, which stands in the checkpoint's document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kbench.train.model import Model
from kbench.train.weights_binary import FP32, Array, DamagedFile, TensorFile, tensor_buffers

MAGIC = 20240527
VERSION = 1
_HEADER_INTS = 256
_HEADER_BYTES = 4 * _HEADER_INTS
# Where the header holds what; all else is 0.
_PROCESSES, _RANK, _MASTER, _SHUFFLED, _STEP = 2, 3, 4, 5, 10


@dataclass(frozen=True)
class OptimizerState:
    """m and v of AdamW, and master weights where parameters are stored in 16 bits: name -> float32, full shapes."""

    m: dict[str, Array]
    v: dict[str, Array]
    master: dict[str, Array] | None


def state_buffers(model: Model, step: int, state: OptimizerState) -> Iterator[bytes | memoryview]:
    """The bytes of a state file, in chunks."""
    header = np.zeros(_HEADER_INTS, "<i4")
    header[:2] = (MAGIC, VERSION)
    header[_PROCESSES], header[_MASTER], header[_STEP] = 1, state.master is not None, step
    yield header.tobytes()
    for kind, tensors in _blocks(state):
        for parameter in model.parameters:
            yield from tensor_buffers(tensors[parameter.name], FP32, f"{kind} of {parameter.name}")


def read_state(file: TensorFile, model: Model) -> tuple[int, OptimizerState]:
    """The step and the state of `model`, from the file's start.

    Whether there are master weights is the file's own word, and its size has to bear it out: a run that wants none
    drops what it was given. Raises DamagedFile.
    """
    path = file.path
    if file.size < _HEADER_BYTES:
        raise DamagedFile(f"{path} has {file.size} bytes, fewer than the {_HEADER_BYTES} of a header")
    header = [int(value) for value in np.frombuffer(file.read(_HEADER_BYTES), "<i4")]
    if header[:2] != [MAGIC, VERSION]:
        raise DamagedFile(f"{path} starts with {header[:2]}, and an optimizer state with {[MAGIC, VERSION]}")
    if (header[_PROCESSES], header[_RANK], header[_SHUFFLED]) != (1, 0, 0) or header[_MASTER] not in (0, 1):
        raise DamagedFile(f"{path} is of several processes, or was written by another program")
    blocks = 2 + header[_MASTER]
    expected = _HEADER_BYTES + blocks * model.parameter_count * FP32.itemsize
    if file.size != expected:
        state = "is cut off" if file.size < expected else "is too long"
        raise DamagedFile(f"{path} {state}: {file.size} bytes, and {expected} are needed for {model}")
    kinds = ("m", "v", "master")[:blocks]
    found = {kind: _read_block(file, model, kind) for kind in kinds}
    return header[_STEP], OptimizerState(found["m"], found["v"], found.get("master"))


def _blocks(state: OptimizerState) -> list[tuple[str, Mapping[str, Array]]]:
    blocks: list[tuple[str, Mapping[str, Array]]] = [("m", state.m), ("v", state.v)]
    return blocks + ([("master", state.master)] if state.master is not None else [])


def _read_block(file: TensorFile, model: Model, kind: str) -> dict[str, Array]:
    block = {}
    for parameter in model.parameters:
        block[parameter.name] = np.empty(parameter.shape, FP32)
        file.read_tensor(block[parameter.name], FP32, f"{kind} of {parameter.name}")
    return block
