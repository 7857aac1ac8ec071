"""Backward pass of GELU in its tanh form: dinp = gelu'(inp) * dout.

gelu(x) = x / 2 * (1 + tanh(u)) with u = s (x + c x^3), s = sqrt(2 / pi), c = 0.044715, so
gelu'(x) = (1 + tanh(u)) / 2 + x / 2 * sech(u)^2 * u' with u' = s (1 + 3 c x^2).
"""

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
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
)

DTYPES = ("bf16", "fp32", "fp16")

S, C = math.sqrt(2.0 / math.pi), 0.044715


# ---------------------------------------------------------------------------------------------- tensors


def _activations(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Mostly of the order of 1; some where the slope of GELU is 0 or 1 to the last bit."""
    values = rng.normal(0.1, 1.2, shape)
    values[::31] *= 10.0
    return values


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    shape, dtype = (problem["N"],), problem.storage
    return (
        Tensor("inp", shape, dtype, "in", ("i",), draw=_activations),
        Tensor("dout", shape, dtype, "in", ("i",), draw=normal(0.2, 0.8)),
        Tensor("dinp", shape, dtype, "out", ("i",)),
    )


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """With h = (1 + tanh(u)) / 2 and q = h (1 - h) = sech(u)^2 / 4, dinp = dout (h + 2 x q u'). In units of the fp32
    roundoff, whichever way h and q are computed:

    - u has a relative error of 8: two constants, seven products and sums along the longest way. Then h, whose slope is
      2 q, has an absolute one of 16 |u| q, and q, whose slope is -2 q tanh(u), a relative one of at most 16 |u|.
    - tanhf, with 2 ulp, gives h an error of 2 |tanh(u)|, and the sum 1 + tanh(u) one of h. The exponential of -2 u,
      with 2 ulp, gives one of 4 q <= 1, the sum 1 + e one of h, and the quotient, with 2 ulp, one of 4 h: 5 h, of which
      8 h leave something, as around x = 0 nearly all of it may come together.
    - q from coshf, with 2 ulp, has 8 and two roundings; from exponential and quotient 4 + 2 * 4, two for 1 + e, two for
      products: 16. u' has 5, and the three products with x, q and u' give 4: 25 in all.
    - The last sum, a product with h and the one with dout: 3.
    """
    x = inputs["inp"]
    square = x * x
    u = C * square
    u += 1.0
    u *= x
    u *= S
    h = xp.tanh(u)
    bound = 2.0 * xp.abs(h)  # tanhf
    h += 1.0
    h *= 0.5
    q = h * (1.0 - h)
    xp.abs(u, out=u)
    u *= 16.0
    bound += u * q + 1.0 + 8.0 * h
    square *= 6.0 * S * C
    square += 2.0 * S
    q *= square
    q *= x  # 2 x q u'
    h += q
    u += 25.0
    bound += u * xp.abs(q) + 3.0 * xp.abs(h)
    bound *= xp.abs(inputs["dout"])
    bound *= error.fp32
    h *= inputs["dout"]
    return {"dinp": Expected(h, bound.astype(xp.float32))}


# ------------------------------------------------------------------------------------------------ plans


def _launch(kernel: str, blocks: int, block: int, count: int) -> tuple[Step, ...]:
    return (Launch(kernel, (blocks,), (block,), ("dinp", "inp", "dout", count)),)


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N = problem["N"]
    return _launch(f"gelu_backward1<{problem.c_type}>", ceil_div(N, block), block, N)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    N = problem["N"]
    per_block = block * (PACKET_BYTES // ITEM_SIZES[problem.storage])
    return _launch(f"gelu_backward2<{problem.c_type}>", ceil_div(N, per_block), block, N)


# ----------------------------------------------------------------------------------------------- family


IN_PLACE = (("dout", "dinp"),)

FAMILY = Family(
    name="gelu_backward",
    summary="backward pass of GELU in its tanh form, element by element",
    sizes={"N": "number of elements"},
    dtypes=DTYPES,
    presets={"default": {"N": 8 * 1024 * 768}, "small": {"N": 16 * 64 * 64}, "large": {"N": 64 * 1024 * 3072}},
    check_shapes=(
        CheckShape({"N": 1}, "one element, less than a packet"),
        CheckShape({"N": 7}, "prime, one element less than a packet of 16-bit types"),
        CheckShape({"N": 64}, "whole packets, fewer than a block has threads"),
        CheckShape({"N": 4099}, "prime: several blocks of most sizes, and a tail"),
        CheckShape({"N": 9003}, "a whole block of every size, then a part of one", (2,)),
    ),
    tensors=_tensors,
    reference=_reference,
    versions=(
        Version(1, "one thread per element", _plan1, DTYPES, aliases=IN_PLACE),
        Version(
            2,
            "as 1, 16 bytes per access; one exponential in place of tanh and cosh",
            _plan2,
            DTYPES,
            aliases=IN_PLACE,
        ),
    ),
)
