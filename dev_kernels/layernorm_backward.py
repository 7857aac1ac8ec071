"""Backward pass of LayerNorm: gradients of its input, weight and bias from the gradient of its output.

n = (inp - mean) * rstd,  d = weight * dout,  dinp += rstd * (d - mean(d) - n * mean(d * n))
dweight = sum over rows of n * dout,  dbias = sum over rows of dout
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kbench.contracts import EPSILON
from kbench.family import (
    WARP,
    Array,
    CheckShape,
    ErrorModel,
    Expected,
    Family,
    Fill,
    Launch,
    Problem,
    Props,
    Ref,
    Step,
    Tensor,
    Version,
    ceil_div,
    derived,
    normal,
)

DTYPES = ("bf16", "fp32", "fp16")


# Elements of a row-major array that the reference works on at once: 32 MB in float64.
SLICE = 1 << 22

CONVERT_BLOCK = 256  # of convert_sums, which is the same in versions 1 to 4; the block size of a version is not its own
COLUMNS = 32  # of sum_areas, per block
SLICES = 32  # warps of a block of sum_areas

# Static shared memory of the kernels, rounded up, and what the hardware takes for itself per block.
STATIC_SHARED = 1024
RESERVED_SHARED = 1024


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    dtype, btc = problem.storage, ("b", "t", "c")
    gradient = _gradient_scale(B * T)
    # What earlier micro-batches of the same size have left.
    earlier = normal(0.3 * gradient * math.sqrt(B * T), 0.7 * gradient * math.sqrt(B * T))
    role = "inout" if problem["accumulate"] else "out"
    return (
        Tensor("dout", (B, T, C), dtype, "in", btc, draw=normal(0.1 * gradient, 0.7 * gradient)),
        Tensor("inp", (B, T, C), dtype, "in", btc, draw=_activations),
        Tensor("weight", (C,), dtype, "in", ("c",), draw=normal(0.9, 0.3)),
        Tensor("mean", (B, T), "fp32", "in", ("b", "t"), draw=_means),
        Tensor("rstd", (B, T), "fp32", "in", ("b", "t"), draw=derived(_rstds)),
        Tensor("dinp", (B, T, C), dtype, "inout", btc, draw=normal(-0.1 * gradient, 0.6 * gradient)),
        Tensor("dweight", (C,), dtype, role, ("c",), draw=earlier),
        Tensor("dbias", (C,), dtype, role, ("c",), draw=earlier),
    )


def _gradient_scale(rows: int) -> float:
    """Gradients of a mean over many rows are small, so their sums over all rows are not large: fp16 ends at 65504."""
    return min(1.0, 1000.0 / rows)


def _activations(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Channels have offsets of their own, as in trained models. Of each seven rows one has mean 3 and spread 0.1, and
    one has mean 1000, of which a bf16 number leaves multiples of 4."""
    import numpy as np  # here, so that `kbench list` need not wait for it

    B, T, C = shape
    level, spread = np.zeros(B * T), np.ones(B * T)
    level[2::7], spread[2::7] = 3.0, 0.1
    level[5::7], spread[5::7] = 1000.0, 3.0
    values = rng.normal(0.1, 0.7, shape) + 0.5 * np.sin(1.7 * np.arange(C))
    return level.reshape(B, T, 1) + spread.reshape(B, T, 1) * values


def _means(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
    """Not quite the means of the rows: what a version is given counts, not what it could compute from `inp`. It also
    makes n differ from 0 where all elements of a row are the same."""
    return drawn["inp"].mean(axis=2) + rng.normal(0.02, 0.003, shape)


def _rstds(drawn: Mapping[str, Array]) -> Array:
    """From the sum of squares about `mean`, so that n has a spread of 1."""
    import numpy as np

    centered = drawn["inp"] - drawn["mean"][..., None]
    return 1.0 / np.sqrt(np.square(centered, out=centered).mean(axis=2) + EPSILON)


# -------------------------------------------------------------------------------------------- reference


def _slices(rows: int, C: int) -> Iterator[slice]:
    """Consecutive rows, as many at a time as SLICE allows."""
    step = max(1, SLICE // C)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64, and the bound of dinp in float32, some rows at a time: temporaries are slices.

    Nothing is stored on the way but fp32, so the bound consists of fp32 roundings, of u each. With s1 and s2 the means
    of |d| and |d n| over a row, the relative errors add up as follows:
        n               2 u: subtraction, product
        d               1 u: product
        mean(d)         (accumulation + 3 u) s1: each d, the product with 1 / C, and 1 / C
        mean(d n)       (accumulation + 6 u) s2: each d and n, their product, 1 / C as before
        n * mean(d n)   (accumulation + 9 u) |n| s2: n, product
        dinp            + 3 u on each of |d|, s1 and |n| s2: two subtractions, the product with rstd; 1 u on the sum
    Terms of dweight have 3 u (n, product), and there is the addition to what it holds.
    """
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    rows = B * T
    u, of_row, of_column = error.fp32, error.accumulation(C), error.accumulation(rows)
    dout, inp, start = (inputs[name].reshape(rows, C) for name in ("dout", "inp", "dinp"))
    mean, rstd = (inputs[name].reshape(rows, 1) for name in ("mean", "rstd"))
    weight = inputs["weight"]

    dinp, bound = xp.empty((rows, C)), xp.empty((rows, C), xp.float32)
    dweight, dbias, dweight_terms, dbias_terms = (xp.zeros(C) for _ in range(4))
    for part in _slices(rows, C):
        dy = dout[part]
        n = inp[part] - mean[part]
        n *= rstd[part]
        dbias += dy.sum(axis=0)
        dbias_terms += abs(dy).sum(axis=0)
        product = n * dy
        dweight += product.sum(axis=0)
        dweight_terms += abs(product).sum(axis=0)

        product *= weight
        dn = product.mean(axis=1, keepdims=True)
        dn_terms = abs(product).mean(axis=1, keepdims=True)
        d = xp.multiply(dy, weight, out=product)
        gradient = d - d.mean(axis=1, keepdims=True)
        magnitude = xp.abs(d, out=d)
        d_terms = magnitude.mean(axis=1, keepdims=True)
        gradient -= n * dn
        gradient *= rstd[part]
        xp.add(start[part], gradient, out=dinp[part])

        magnitude *= 4.0 * u
        magnitude += (of_row + 6.0 * u) * d_terms
        magnitude += xp.abs(n, out=n) * ((of_row + 12.0 * u) * dn_terms)
        magnitude *= rstd[part]
        magnitude += u * abs(dinp[part])
        bound[part] = magnitude

    answers = {"dinp": Expected(dinp.reshape(B, T, C), bound.reshape(B, T, C))}
    for name, value, terms, roundings in (("dweight", dweight, dweight_terms, 3.0), ("dbias", dbias, dbias_terms, 0.0)):
        before = inputs[name] if problem["accumulate"] else xp.zeros(C)
        bounds = (of_column + roundings * u) * terms + 2.0 * u * (abs(before) + terms)
        answers[name] = Expected(before + value, bounds)
    return answers


# ------------------------------------------------------------------------------------------------ plans


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


def _packet(problem: Problem) -> int:
    """Elements in 16 bytes."""
    return 4 if problem.storage == "fp32" else 8


def _aligned(problem: Problem) -> str:
    return _boolean(problem["C"] % _packet(problem) == 0)


def _fits(shared: int, props: Props) -> bool:
    return shared + STATIC_SHARED <= props.shared_per_block_optin


def _blocks(problem: Problem, rows_per_block: int, per_multiprocessor: int, props: Props) -> int:
    """Persistent blocks, but no more than there are rows for."""
    return min(max(1, per_multiprocessor) * props.multiprocessors, ceil_div(_rows(problem), rows_per_block))


def _scratch(name: str, count: int, dtype: str = "fp32") -> Tensor:
    return Tensor(name, (count,), dtype, "scratch")


INPUTS = ("dout", "inp", "weight", "mean", "rstd")
SizeOfSums = Callable[[Problem], int]


def _unpadded(problem: Problem) -> int:
    """Floats that the sums of dweight and dbias take."""
    return 2 * problem["C"]


def _padded(problem: Problem) -> int:
    """The same where rows are padded to whole packets in all lanes of a warp."""
    chunk = WARP * _packet(problem)
    return 2 * chunk * ceil_div(problem["C"], chunk)


# Versions 1 to 4: sums of all blocks, then convert_sums.


def _sums(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    return (_scratch("sums", _unpadded(problem)),)


def _converted(problem: Problem, kernel: str, blocks: int, block: int, shared: int = 0) -> tuple[Step, ...]:
    C = problem["C"]
    return (
        Fill(Ref("sums")),
        Launch(kernel, (blocks,), (block,), ("dinp", "sums", *INPUTS, _rows(problem), C), shared),
        Launch(
            f"convert_sums<{problem.c_type}>", (ceil_div(C, CONVERT_BLOCK),), (CONVERT_BLOCK,),
            ("dweight", "dbias", "sums", C, problem["accumulate"]),
        ),
    )  # fmt: skip


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    kernel = f"layernorm_backward1<{problem.c_type}>"
    return _converted(problem, kernel, ceil_div(_rows(problem), block), block)


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    shared = 4 * _unpadded(problem)
    fits = _fits(shared, props)
    kernel = f"layernorm_backward2<{problem.c_type}, {_boolean(fits)}>"
    return _converted(problem, kernel, ceil_div(_rows(problem), block // WARP), block, shared if fits else 0)


def _resident(problem: Problem, block: int, props: Props) -> int:
    """Blocks of versions 3, 4 and 6 to 8: 1024 threads per multiprocessor, which fit whatever registers they take."""
    return _blocks(problem, block // WARP, 1024 // block, props)


def _persistent(number: int) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    """Plan of versions 3 and 4."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        shared = 4 * _unpadded(problem)
        fits = _fits(shared, props)
        kernel = f"layernorm_backward{number}<{problem.c_type}, {_boolean(fits)}>"
        return _converted(problem, kernel, _resident(problem, block, props), block, shared if fits else 0)

    return plan


# Versions 6 to 8: sums of all blocks and, behind them, the counter that elects the last block. 0.0 is 0 in any type.


def _counted_sums(floats: SizeOfSums) -> Callable[[Problem, int, Props], tuple[Tensor, ...]]:
    return lambda problem, block, props: (_scratch("sums", floats(problem) + 1),)


def _elected(number: int, floats: SizeOfSums, packets: bool) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        shared = 4 * floats(problem)
        fits = _fits(shared, props)
        aligned = f", {_aligned(problem)}" if packets else ""
        kernel = f"layernorm_backward{number}<{problem.c_type}{aligned}, {_boolean(fits)}>"
        outputs, sizes = ("dinp", "dweight", "dbias"), (_rows(problem), problem["C"], problem["accumulate"])
        blocks = _resident(problem, block, props)
        return (
            Fill(Ref("sums")),
            Launch(kernel, (blocks,), (block,), (*outputs, "sums", *INPUTS, *sizes), shared if fits else 0),
        )

    return plan


# Versions 5 and 9: an area of sums per block, and a counter.


def _blocks5(problem: Problem, block: int, props: Props) -> int:
    return _blocks(problem, block // WARP, 1, props)


def _blocks9(problem: Problem, block: int, props: Props) -> int:
    """Up to four per multiprocessor: more would gain less than the last block loses in adding up their areas."""
    return _blocks(problem, block // WARP, min(4, 1024 // block), props)


def _areas(
    blocks: Callable[[Problem, int, Props], int], floats: SizeOfSums
) -> Callable[[Problem, int, Props], tuple[Tensor, ...]]:
    return lambda problem, block, props: (
        _scratch("areas", blocks(problem, block, props) * floats(problem)),
        _scratch("counter", 1, "uint32"),
    )


def _with_areas(problem: Problem, kernel: str, blocks: int, block: int, shared: int) -> tuple[Step, ...]:
    outputs, sizes = ("dinp", "dweight", "dbias"), (_rows(problem), problem["C"], problem["accumulate"])
    return (
        Fill(Ref("counter")),
        Launch(kernel, (blocks,), (block,), (*outputs, "areas", "counter", *INPUTS, *sizes), shared),
    )


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    shared = 4 * _unpadded(problem)
    fits = _fits(shared, props)
    kernel = f"layernorm_backward5<{problem.c_type}, {_boolean(fits)}>"
    return _with_areas(problem, kernel, _blocks5(problem, block, props), block, shared if fits else 0)


def _plan9(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    handed = 4 * 2 * block
    shared = handed + 4 * _padded(problem)
    fits = _fits(shared, props)
    kernel = f"layernorm_backward9<{problem.c_type}, {_aligned(problem)}, {_boolean(fits)}>"
    return _with_areas(problem, kernel, _blocks9(problem, block, props), block, shared if fits else handed)


# Version 10: an area per block, then sum_areas.

# Packets per row that a thread keeps, to rows that it takes at a time and threads that fit into a multiprocessor: a
# thread takes 80 or 128 registers.
KEPT = {1: (2, 768), 2: (1, 512)}
WIDE_THREADS = 768


def _width10(problem: Problem) -> int:
    """Channels of an area: whole packets."""
    return _packet(problem) * ceil_div(problem["C"], _packet(problem))


def _kept(problem: Problem, block: int) -> int:
    """How many packets of a row each thread keeps in registers; 0 where a row is too wide for that."""
    packets = ceil_div(problem["C"], _packet(problem))
    return next((kept for kept in KEPT if packets <= kept * block), 0)


def _launch10(problem: Problem, block: int, props: Props) -> Launch:
    C, c_type, aligned = problem["C"], problem.c_type, _aligned(problem)
    args = ("dinp", "areas", *INPUTS, _rows(problem), C)
    sums = 4 * 2 * _width10(problem)
    kept = _kept(problem, block)
    if kept:
        warps_per_row = ceil_div(ceil_div(C, _packet(problem) * kept), WARP)
        groups = block // WARP // warps_per_row
        rows, threads = KEPT[kept]
        blocks = _blocks(problem, rows * groups, threads // block, props)
        kernel = f"layernorm_backward10<{c_type}, {kept}, {aligned}>"
        return Launch(kernel, (blocks,), (block,), (*args, warps_per_row), sums if groups > 1 else 0)
    fits = _fits(sums, props)
    per_multiprocessor = WIDE_THREADS // block
    if fits:
        per_multiprocessor = min(per_multiprocessor, props.shared_per_multiprocessor // (sums + RESERVED_SHARED))
    kernel = f"layernorm_backward10_wide<{c_type}, {aligned}, {_boolean(fits)}>"
    blocks = _blocks(problem, 1, per_multiprocessor, props)
    return Launch(kernel, (blocks,), (block,), args, sums if fits else 0)


def _areas10(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    (blocks,) = _launch10(problem, block, props).grid
    return (_scratch("areas", blocks * 2 * _width10(problem)),)


def _plan10(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    launch = _launch10(problem, block, props)
    width = _width10(problem)
    return (
        launch,
        Launch(
            f"sum_areas<{problem.c_type}>", (ceil_div(2 * width, COLUMNS),), (SLICES * WARP,),
            ("dweight", "dbias", "areas", launch.grid[0], problem["C"], width, problem["accumulate"]),
        ),
    )  # fmt: skip


VERSIONS = (
    Version(
        1, "one thread per row, two global atomics per element", _plan1, DTYPES,
        claims_deterministic=False, scratch=_sums,
    ),
    Version(
        2, "one warp per row: shared-memory atomics, then global ones for the blocks' sums", _plan2, DTYPES,
        claims_deterministic=False, scratch=_sums,
    ),
    Version(
        3, "as 2, persistent blocks with many rows each: fewer sums of blocks; streaming loads", _persistent(3), DTYPES,
        claims_deterministic=False, scratch=_sums,
    ),
    Version(
        4, "as 3, sums of blocks added in pairs, by 64-bit compare-and-swap", _persistent(4), DTYPES,
        claims_deterministic=False, scratch=_sums,
    ),
    Version(
        5, "one block per multiprocessor, an area of sums each; the last to end adds them up", _plan5, DTYPES,
        claims_deterministic=False, scratch=_areas(_blocks5, _unpadded),
    ),
    Version(
        6, "as 3, in one kernel: the last block to end converts the sums", _elected(6, _unpadded, False), DTYPES,
        claims_deterministic=False, scratch=_counted_sums(_unpadded),
    ),
    Version(
        7, "as 6, four channels loaded at once; both means in one chain of shuffles",
        _elected(7, _unpadded, False), DTYPES, claims_deterministic=False, scratch=_counted_sums(_unpadded),
    ),
    Version(
        8, "as 7, 16 bytes per access; shared-memory atomics without bank conflicts", _elected(8, _padded, True),
        DTYPES, claims_deterministic=False, scratch=_counted_sums(_padded),
    ),
    Version(
        9, "as 8, no atomic sums: warps hand their terms to warp 0; areas as in 5", _plan9, DTYPES,
        scratch=_areas(_blocks9, _padded),
    ),
    Version(
        10, "as 9, nothing handed over: threads keep their channels, whose sums stay in registers", _plan10,
        DTYPES, block_sizes=(32, 64, 96, 128, 224, 256, 384), scratch=_areas10,
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- family


def _shape(
    B: int, T: int, C: int, accumulate: int, why: str, versions: tuple[int, ...] | None = None,
    blocks: tuple[int, ...] | None = None,
) -> CheckShape:  # fmt: skip
    return CheckShape({"B": B, "T": T, "C": C, "accumulate": accumulate}, why, versions, blocks)


CHECK_SHAPES = (
    _shape(1, 1, 1, 0, "one of everything"),
    _shape(2, 3, 5, 1, "fewer channels than a packet"),
    _shape(1, 7, 33, 0, "one past a warp, rows of two odd levels"),
    _shape(1, 10, 64, 1, "aligned rows, fewer packets than lanes"),
    _shape(3, 5, 131, 1, "prime length: rows are not aligned, more than one batch of four channels per lane"),
    _shape(1, 6, 264, 0, "aligned, one packet past a chunk of 256"),
    _shape(1, 211, 3, 1, "more rows than warps: persistent blocks take several", None, (32, 224, 256, 1024)),
    _shape(1, 400, 8, 0, "the same in packets, several groups of rows per block", (8, 9, 10), (64, 384, 512)),
    _shape(1, 3, 132, 1, "rows of whole halves of a 16-bit packet", (8, 9, 10), (64, 256)),
    _shape(1, 3, 130, 0, "rows of whole halves of an fp32 packet", (8, 9, 10), (64, 256)),
    _shape(1, 150, 264, 0, "version 10: several rows per warp, one packet past a warp's", (10,), (64,)),
    _shape(1, 37, 1032, 0, "version 10: several rows per block, one packet past four warps'", (10,), (64,)),
    _shape(1, 3, 2056, 1, "version 10: one packet past eight warps'", (10,), (384,)),
    _shape(1, 3, 1288, 0, "version 10: a second packet for some threads only", (10,), (128,)),
    _shape(1, 3, 1600, 1, "a long row, aligned", None, (64, 128, 256)),
    _shape(1, 3, 1601, 0, "a long row, not aligned", None, (64, 128, 256)),
    _shape(1, 2, 29064, 1, "sums that do not fit into shared memory, aligned", tuple(range(2, 11)), (256,)),
    _shape(1, 2, 29059, 0, "sums that do not fit into shared memory, not aligned", tuple(range(2, 11)), (256,)),
)

FAMILY = Family(
    name="layernorm_backward",
    summary="backward pass of LayerNorm: gradients of input, weight and bias",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "C": "channels",
        "accumulate": "1: add to dweight and dbias, 0: replace them; dinp is always added to",
    },
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "C": 1600, "accumulate": 1},
        "small": {"B": 4, "T": 32, "C": 256, "accumulate": 1},
        "large": {"B": 96, "T": 1024, "C": 1600, "accumulate": 1},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    flags=("accumulate",),
)
