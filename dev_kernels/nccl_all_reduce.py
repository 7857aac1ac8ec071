"""All-reduce over GPUs: every rank, a GPU with a process of its own, gets the sum of what all ranks have.

What is timed is rank 0's part, its waiting for ranks that come late included. With one rank it is a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kbench.family import (
    AllReduce,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")

# NCCL launches its own kernels; no block size of a plan reaches them.
NO_BLOCK = 1


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    R, N = problem["R"], problem["N"]
    # The sum over one rank is what it sent, bit for bit.
    return (
        Tensor("send", (R, N), problem.storage, "in", ("rank", "n"), draw=normal(0.1, 0.7)),
        Tensor("recv", (R, N), problem.storage, "out", ("rank", "n"), exact=R == 1),
    )


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """The bound: R - 1 additions in any order, each of which may round its partial sum to the type that travels between
    GPUs, and none of whose partial sums is above the sum of magnitudes; NCCL may add in fp32 in between. The check adds
    half an ulp, so two ranks, whose one addition is rounded once, use half of the bound at most."""
    R, send = problem["R"], inputs["send"]
    if R == 1:
        return {"recv": Expected(send)}
    total, magnitudes = send.sum(axis=0), xp.abs(send).sum(axis=0)
    share = (R - 1) * error.storage + error.accumulation(R)
    return {
        "recv": Expected(
            xp.broadcast_to(total, send.shape), xp.broadcast_to((share * magnitudes).astype(xp.float32), send.shape)
        )
    }


def _plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    return (AllReduce(target="recv", source="send", count=problem["N"], ranks=problem["R"]),)


def _traffic(problem: Problem) -> float:
    """Of one rank's own memory: its row read once, the sum written once."""
    return float(sum(tensor.nbytes for tensor in _tensors(problem)) / problem["R"])


FAMILY = Family(
    name="nccl_all_reduce",
    summary="sum over GPUs, one process per GPU: every rank receives the sum of what all ranks send",
    sizes={"N": "elements of each rank", "R": "ranks, that is GPUs"},
    dtypes=DTYPES,
    presets={
        "default": {"N": 33_554_432, "R": 1},
        "small": {"N": 4096, "R": 1},
        "large": {"N": 134_217_728, "R": 1},
    },
    # Shapes for more GPUs than there are, are skipped by name.
    check_shapes=(
        CheckShape({"N": 1, "R": 1}, "a single element"),
        CheckShape({"N": 1009, "R": 1}, "a prime"),
        CheckShape({"N": 262_145, "R": 1}, "one past a power of two"),
        CheckShape({"N": 1, "R": 2}, "fewer elements than ranks"),
        CheckShape({"N": 4099, "R": 2}, "a prime: chunks of unequal length, rows that are not aligned"),
        CheckShape({"N": 1_048_576, "R": 2}, "long enough for NCCL's protocol for large messages"),
        CheckShape({"N": 65_537, "R": 3}, "ranks that are no power of two"),
        CheckShape({"N": 65_537, "R": 8}, "all GPUs of a usual machine"),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(
            1,
            "NCCL's all-reduce: chunks of partial sums travel from GPU to GPU",
            _plan,
            DTYPES,
            fixed=NO_BLOCK,
            gpu_only="NCCL adds up over GPUs",
            # A communicator's ring, and with it the order of the additions, stays the same from launch to launch.
            claims_deterministic=True,
        ),
    ),
    traffic=_traffic,
)
