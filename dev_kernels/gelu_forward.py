"""GELU in its tanh form: out = x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), x = inp."""

from __future__ import annotations

import math
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
    Param,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    ceil_div,
)

DTYPES = ("bf16", "fp32", "fp16")


# ---------------------------------------------------------------------------------------------- tensors


def _activations(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Mostly of the order of 1; some where GELU is 0 or x to the last bit."""
    values = rng.normal(0.1, 1.2, shape)
    values[::31] *= 10.0
    return values


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    shape, dtype = (problem["N"],), problem.storage
    return (
        Tensor("inp", shape, dtype, "in", ("i",), draw=_activations),
        Tensor("out", shape, dtype, "out", ("i",)),
    )


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """With h = (1 + tanh(u)) / 2, out = x h. In units of the fp32 roundoff, whichever way h is computed:

    - u has a relative error of 8: two constants, seven products and sums along the longest way. Then h, whose slope is
      2 h (1 - h), has an absolute one of 16 |u| h (1 - h).
    - tanhf, with 2 ulp, gives h an error of 2 |tanh(u)|, and the sum 1 + tanh(u) one of h. The exponential of -2 u,
      with 2 ulp, gives one of 4 h (1 - h) <= 1, the sum 1 + e one of h, and the quotient, with 2 ulp, one of 4 h.
    - Two products more: 2 h. For h it makes 7, of which 8 leave something.
    """
    x = inputs["inp"]
    u = x * x
    u *= 0.044715
    u += 1.0
    u *= x
    u *= math.sqrt(2.0 / math.pi)
    t = xp.tanh(u)
    bound = xp.abs(u)
    bound *= 4.0 * (1.0 - t * t)  # 16 h (1 - h)
    bound += 2.0 * xp.abs(t) + 1.0
    t += 1.0
    t *= 0.5
    bound += 8.0 * t
    bound *= xp.abs(x)
    bound *= error.fp32
    t *= x
    return {"out": Expected(t, bound.astype(xp.float32))}


# ------------------------------------------------------------------------------------------------ plans


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N = problem["N"]
    return (Launch(f"gelu_forward1<{problem.c_type}>", (ceil_div(N, block),), (block,), ("out", "inp", N)),)


def _plan2(problem: Problem, block: int, props: Props, PACKETS: int) -> tuple[Step, ...]:
    """Several packets per thread, so that enough bytes are under way, unless there are threads for one packet each."""
    N = problem["N"]
    packets = ceil_div(N, PACKET_BYTES // ITEM_SIZES[problem.storage])
    each = 1 if packets <= props.multiprocessors * props.threads_per_multiprocessor else PACKETS
    kernel = f"gelu_forward2<{problem.c_type}, {each}>"
    return (Launch(kernel, (ceil_div(packets, each * block),), (block,), ("out", "inp", N)),)


# ----------------------------------------------------------------------------------------------- family


FAMILY = Family(
    name="gelu_forward",
    summary="GELU in its tanh form, element by element",
    sizes={"N": "number of elements"},
    dtypes=DTYPES,
    presets={"default": {"N": 8 * 1024 * 768}, "small": {"N": 16 * 64 * 64}, "large": {"N": 1 << 28}},
    check_shapes=(
        CheckShape({"N": 1}, "one element, less than a packet"),
        CheckShape({"N": 7}, "prime, one element less than a packet of 16-bit types"),
        CheckShape({"N": 64}, "whole packets, fewer than a block has threads"),
        CheckShape({"N": 4099}, "prime: several blocks of most sizes, and a tail"),
        CheckShape({"N": 60_001}, "several packets per thread on the emulator", (2,), (64, 1024)),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(1, "one thread per element", _plan1, DTYPES, aliases=(("inp", "out"),)),
        Version(
            2,
            "as 1, 16 bytes per access, two per thread; an exponential in place of the tanh",
            _plan2,
            DTYPES,
            aliases=(("inp", "out"),),
            params={"PACKETS": Param(default=2, values=(1, 2, 4), meaning="packets of a thread in large problems")},
        ),
    ),
)
