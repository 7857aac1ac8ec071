"""Sum of the squares of a long vector, such as all gradients of a model: the square of its norm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kbench.family import (
    WARP,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Fill,
    Launch,
    Param,
    PlanFunction,
    Problem,
    Props,
    Ref,
    Step,
    Tensor,
    Version,
)

DTYPES = ("bf16", "fp32", "fp16")
BLOCK_SIZES = (32, 64, 128, 256, 512, 768, 1024)

PACKET = {"fp32": 4, "bf16": 8, "fp16": 8}  # elements in 16 bytes
MOST_THREADS = 1024  # of a block


# -------------------------------------------------------------------------------- tensors and reference


def _gradients(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Small numbers whose scale differs from seed to seed: else the sums of long vectors would hardly differ, and what
    an earlier launch has left in `out` would pass for right."""
    values = rng.normal(0.2, 1.0, shape)
    values *= rng.uniform(0.02, 0.08)
    return values


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    return (
        Tensor("data", (problem["N"],), problem.storage, "in", ("i",), draw=_gradients),
        Tensor("out", (1,), "fp32", "out", ("i",)),
    )


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """The terms are positive, so their sum is the sum of their magnitudes.

    4 sqrt(N) u of it is what rounding errors of random sign amount to, and it is also enough for patterned inputs,
    whose errors may have one sign: a sum in two levels, of b terms each and then of N / b, has at most (b + N / b) u,
    which is 2 sqrt(N) u at its best. One running sum over N patterned terms would not do for long vectors: it stands
    still at 2^24 equal terms. The square itself is rounded once more.
    """
    data = inputs["data"]
    value = xp.dot(data, data)
    roundings = min(problem["N"], 4.0 * math.sqrt(problem["N"])) + 1.0
    return {"out": Expected(xp.reshape(value, (1,)), xp.reshape(error.fp32 * roundings * value, (1,)))}


# ------------------------------------------------------------------------------------------------ plans


def _blocks(problem: Problem, block: int, props: Props, per_thread: int) -> int:
    """As many blocks as the GPU holds at once, and not more than have something to do."""
    held = props.multiprocessors * props.threads_per_multiprocessor // block
    return max(1, min(held, -(-problem["N"] // (per_thread * block))))


def _elements(version: int, problem: Problem) -> int:
    """That a thread loads at once."""
    return 1 if version < 3 else PACKET[problem.storage]


def _atomic_plan(version: int) -> PlanFunction:
    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        grid = (_blocks(problem, block, props, _elements(version, problem)),)
        kernel = f"global_norm{version}<{problem.c_type}>"
        return Fill(Ref("out")), Launch(kernel, grid, (block,), ("out", "data", problem["N"]))

    return plan


# Of a thread, under way at the same time. Four fit into 32 registers, with which a multiprocessor holds all threads.
PACKETS = Param(default=4, values=(2, 4, 8), meaning="packets of a thread that are loaded at once")


def _plan4(problem: Problem, block: int, props: Props, PACKETS: int) -> tuple[Step, ...]:
    blocks = _blocks(problem, block, props, _elements(4, problem))
    kernel = f"global_norm4<{problem.c_type}, {PACKETS}>"
    threads = min(MOST_THREADS, WARP * -(-blocks // WARP))
    return (
        Launch(kernel, (blocks,), (block,), ("partials", "data", problem["N"])),
        Launch("add_partials", (1,), (threads,), ("out", "partials", blocks)),
    )


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    grid = (_blocks(problem, block, props, _elements(5, problem)),)
    args = ("out", "data", problem["N"], "partials", "counter")
    return Fill(Ref("counter")), Launch(f"global_norm5<{problem.c_type}>", grid, (block,), args)


def _partials(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    blocks = _blocks(problem, block, props, _elements(4, problem))
    return (Tensor("partials", (blocks,), "fp32", "scratch", ("block",)),)


def _scratch4(problem: Problem, block: int, props: Props, PACKETS: int) -> tuple[Tensor, ...]:
    """As many blocks whatever a thread loads at once."""
    return _partials(problem, block, props)


def _partials_and_counter(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    return (*_partials(problem, block, props), Tensor("counter", (1,), "uint32", "scratch", ("k",)))


# ----------------------------------------------------------------------------------------------- family


def _version(number: int, idea: str, plan: PlanFunction, **options: Any) -> Version:
    return Version(number, idea, plan, DTYPES, BLOCK_SIZES, **options)


VERSIONS = (
    _version(
        1, "one atomic per block: shuffles within each warp, shared memory between them", _atomic_plan(1),
        claims_deterministic=False,
    ),
    _version(
        2, "one atomic per warp: shuffles only, no shared memory, no barrier", _atomic_plan(2),
        claims_deterministic=False,
    ),
    _version(
        3, "as 1, 16 bytes per load, two loads under way in each thread", _atomic_plan(3),
        claims_deterministic=False,
    ),
    _version(
        4, "as 3, no atomics: a second kernel adds up the blocks' sums; four loads under way",
        _plan4, scratch=_scratch4, params={"PACKETS": PACKETS},
    ),
    _version(
        5, "as 4, one kernel: the last block to end adds up the blocks' sums",
        _plan5, scratch=_partials_and_counter,
    ),
)  # fmt: skip


def _shape(
    N: int, why: str, versions: tuple[int, ...] | None = None, blocks: tuple[int, ...] | None = None
) -> CheckShape:
    return CheckShape({"N": N}, why, versions, blocks)


CHECK_SHAPES = (
    _shape(1, "one element"),
    _shape(7, "less than a packet"),
    _shape(32, "whole packets, less than a block of them"),
    _shape(257, "one past whole packets"),
    _shape(1031, "prime: packets and a rest"),
    _shape(4613, "prime: several elements per thread, a block of packets"),
    _shape(40008, "more packets than the emulator has threads, no rest", None, (64, 256, 1024)),
    _shape(300007, "prime: several rounds of loads per thread, and a rest", (3, 4, 5), (32, 768)),
)

FAMILY = Family(
    name="global_norm",
    summary="sum of the squares of a long vector: the square of its norm",
    sizes={"N": "number of elements"},
    dtypes=DTYPES,
    # default: 2 * 12 * 5 * 768^2, not far from the number of weights in the layers of GPT-2 124M.
    presets={"default": {"N": 70778880}, "small": {"N": 100000}, "large": {"N": 1 << 29}},
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
)
