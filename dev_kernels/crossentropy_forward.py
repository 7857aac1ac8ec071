"""Cross-entropy loss from probabilities: losses[b, t] = -log(probs[b, t, targets[b, t]])."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
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
)

DTYPES = ("fp32", "bf16", "fp16")
SECTOR = 32  # bytes: the least that a GPU reads from memory


def _probabilities(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Rows of sum 1, none of whose elements is so small that a 16-bit type makes it zero."""
    values = rng.uniform(0.05, 1.0, shape)
    values /= values.sum(axis=-1, keepdims=True)
    return values


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, V = (problem[name] for name in ("B", "T", "V"))
    return (
        Tensor("probs", (B, T, V), problem.storage, "in", ("b", "t", "v"), draw=_probabilities),
        Tensor("targets", (B, T), "int32", "in", ("b", "t"), draw=integers(0, V)),
        Tensor("losses", (B, T), "fp32", "out", ("b", "t")),
    )


# Of logf, whose largest error is 1 ulp, that is 2 u; twice as much, so that a right version uses half.
LOG_ULPS = 4.0


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    B, T, V = (problem[name] for name in ("B", "T", "V"))
    targets = inputs["targets"].reshape(-1).astype(xp.int64)
    losses = -xp.log(inputs["probs"].reshape(B * T, V)[xp.arange(B * T), targets]).reshape(B, T)
    return {"losses": Expected(losses, LOG_ULPS * error.fp32 * xp.abs(losses))}


def _traffic(problem: Problem) -> float:
    """A sector of each row of probabilities, or all of them where rows are shorter than a sector."""
    B, T, V = (problem[name] for name in ("B", "T", "V"))
    return float(B * T * (min(SECTOR, V * ITEM_SIZES[problem.storage]) + 2 * 4))


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    rows = problem["B"] * problem["T"]
    grid = (-(-rows // block),)
    args = ("losses", "probs", "targets", rows, problem["V"])
    return (Launch(f"crossentropy_forward1<{problem.c_type}>", grid, (block,), args),)


def _shape(B: int, T: int, V: int, why: str) -> CheckShape:
    return CheckShape({"B": B, "T": T, "V": V}, why)


FAMILY = Family(
    name="crossentropy_forward",
    summary="cross-entropy loss from probabilities",
    sizes={"B": "batch size", "T": "sequence length", "V": "vocabulary size"},
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "V": 50257},
        "small": {"B": 4, "T": 64, "V": 257},
        # Rows of 32 bytes: a loss costs one sector, and all that is read counts.
        "large": {"B": 32768, "T": 1024, "V": 8},
    },
    check_shapes=(
        _shape(1, 1, 1, "one of everything: the loss of a certainty is 0"),
        _shape(2, 3, 5, "fewer rows than a block has threads"),
        _shape(3, 11, 257, "one row past a warp"),
        _shape(5, 257, 2, "one past a block of 256, and of 1024"),
        _shape(1, 16, 50257, "rows as long as a vocabulary: targets of more than 15 bits"),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(Version(1, "one thread per (b, t): one gather, one logarithm", _plan1, DTYPES),),
    traffic=_traffic,
)
