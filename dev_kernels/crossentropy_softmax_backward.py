"""Backward pass of softmax and cross-entropy together: dlogits = (probs - onehot(targets)) * dlosses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
    PACKET_BYTES,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    integers,
    uniform,
)

DTYPES = ("fp32", "bf16", "fp16")
PACKETS_PER_THREAD = 4


def _probabilities(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Rows of sum 1."""
    values = rng.uniform(0.05, 1.0, shape)
    values /= values.sum(axis=-1, keepdims=True)
    return values


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, V = (problem[name] for name in ("B", "T", "V"))
    return (
        Tensor("dlosses", (B, T), "fp32", "in", ("b", "t"), draw=uniform(-1.0, 1.0)),
        Tensor("probs", (B, T, V), problem.storage, "in", ("b", "t", "v"), draw=_probabilities),
        Tensor("targets", (B, T), "int32", "in", ("b", "t"), draw=integers(0, V)),
        Tensor("dlogits", (B, T, V), problem.storage, "out", ("b", "t", "v")),
    )


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """A difference and a product are rounded; nothing is stored before it is final."""
    B, T, V = (problem[name] for name in ("B", "T", "V"))
    rows = B * T
    value = inputs["probs"].reshape(rows, V).copy()
    value[xp.arange(rows), inputs["targets"].reshape(-1).astype(xp.int64)] -= 1.0
    value *= inputs["dlosses"].reshape(rows, 1)
    bound = value.astype(xp.float32)
    xp.abs(bound, out=bound)
    bound *= 3.0 * error.fp32
    return {"dlogits": Expected(value.reshape(B, T, V), bound.reshape(B, T, V))}


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    rows, V = problem["B"] * problem["T"], problem["V"]
    per_block = block * PACKETS_PER_THREAD * PACKET_BYTES // ITEM_SIZES[problem.storage]
    args = ("dlogits", "probs", "targets", "dlosses", rows, V)
    kernel = f"crossentropy_softmax_backward1<{problem.c_type}>"
    return (Launch(kernel, (-(-rows * V // per_block),), (block,), args),)


def _shape(B: int, T: int, V: int, why: str, block: int = 0) -> CheckShape:
    return CheckShape({"B": B, "T": T, "V": V}, why, None, (block,) if block else None)


FAMILY = Family(
    name="crossentropy_softmax_backward",
    summary="gradient of the logits from the probabilities of softmax and cross-entropy",
    sizes={"B": "batch size", "T": "sequence length", "V": "vocabulary size"},
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "V": 50257},
        "small": {"B": 4, "T": 32, "V": 1003},
        "large": {"B": 8, "T": 1024, "V": 32000},
    },
    check_shapes=(
        _shape(1, 1, 1, "one of everything: the gradient of a certainty is 0"),
        _shape(3, 5, 3, "several rows in a packet, a short packet at the end"),
        _shape(1, 31, 7, "a prime number of odd rows"),
        _shape(2, 2, 64, "rows of whole packets"),
        _shape(1, 4, 257, "rows that begin anywhere, several blocks of the smaller sizes"),
        _shape(2, 3, 1031, "rows longer than a block of the smallest size has elements"),
        _shape(1, 2, 9001, "a row with blocks of its own, and blocks with two rows"),
        _shape(1, 4, 50257, "rows as long as a vocabulary: targets of more than 16 bits", 1024),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1, "four packets of 16 bytes per thread, aligned wherever rows begin", _plan1, DTYPES,
            aliases=(("probs", "dlogits"),),
        ),
    ),
)  # fmt: skip
