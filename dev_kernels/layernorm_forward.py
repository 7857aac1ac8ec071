"""LayerNorm over rows of C elements: out = (x - mean) * rstd * weight + bias. mean and rstd are outputs, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
    UNIT_ROUNDOFF,
    Array,
    CheckShape,
    Draw,
    ErrorModel,
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Step,
    Tensor,
    Version,
    normal,
)

DTYPES = ("fp32", "bf16", "fp16")
EPSILON = 1e-5

WARP = 32
PACKET_BYTES = 16


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    dtype = problem.storage
    return (
        Tensor("inp", (B, T, C), dtype, "in", ("b", "t", "c"), draw=_rows_of_three_kinds(dtype)),
        Tensor("weight", (C,), dtype, "in", ("c",), draw=normal(1.1, 0.3)),
        Tensor("bias", (C,), dtype, "in", ("c",), draw=normal(-0.2, 0.5)),
        Tensor("out", (B, T, C), dtype, "out", ("b", "t", "c")),
        Tensor("mean", (B, T), "fp32", "out", ("b", "t")),
        Tensor("rstd", (B, T), "fp32", "out", ("b", "t")),
    )


def _rows_of_three_kinds(dtype: str) -> Draw:
    """Most rows have a mean of 0.1 and a spread of 0.7. Some have a mean of 3 and a spread of 0.1, and some a mean of
    1000 and a spread of 1, or of two units in the last place of 1000 where the type cannot tell less apart."""
    spread = max(1.0, 4.0 * 1000.0 * UNIT_ROUNDOFF[dtype])

    def draw(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        values = rng.normal(0.0, 1.0, shape)
        rows = values.reshape(-1, shape[-1])
        for start, step, row_mean, row_spread in ((0, 2, 0.1, 0.7), (1, 4, 3.0, 0.1), (3, 4, 1000.0, spread)):
            rows[start::step] *= row_spread
            rows[start::step] += row_mean
        return values

    return draw


# -------------------------------------------------------------------------------------------- reference


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64, bounds in float32, and besides these one float32 array of the size of `out`.

    What a right version may do: add up in any order, in one pass or in two, where a single pass shifts by the row's
    first element; it keeps everything between input and output in fp32. With a = the error of a sum of C terms per unit
    of their magnitude:

    mean: a times the root mean square of what is added up, x or x - x[0] (no less than the mean magnitude); 4 more
        roundings for x - x[0], the quotient, and adding x[0] again.
    variance: in two passes a times the variance, plus the square of the mean's error; in a single pass a times the
        mean square of x - x[0], and twice that for the square of its mean, which is no larger. Squared deviations of
        16-bit numbers take few values, so where one thread adds up a whole row, roundings of many terms are the same,
        and their sum grows with C, not its root: a sixteenth of the worst case, C u, is added to a.
    rstd: what the variance's error makes of it, on the side where it makes more, and 8 roundings: rsqrtf is allowed 2
        units in the last place, which are 4, the argument and the epsilon have one each.
    out: the error of the mean times rstd, that of rstd times x - mean, and a rounding for each operation.
    """
    B, T, C = (problem[name] for name in ("B", "T", "C"))
    weight, bias = inputs["weight"], inputs["bias"]
    x = inputs["inp"].reshape(B * T, C)
    mean = x.mean(axis=1)
    out = x - mean[:, None]
    variance = xp.einsum("rc,rc->r", out, out) / C
    rstd = 1.0 / xp.sqrt(variance + EPSILON)

    u = error.fp32
    a = error.accumulation(C) + 4.0 * u
    shifted = variance + (mean - x[:, 0]) ** 2  # mean square of x - x[0]
    mean_error = a * xp.sqrt(xp.maximum(variance + mean * mean, shifted))
    of_squares = a + (C / 16.0 * u if error.storage > u else 0.0)
    variance_error = 3.0 * of_squares * shifted + mean_error * mean_error
    largest = 1.0 / xp.sqrt(xp.maximum(variance - variance_error, 0.0) + EPSILON)
    smallest = 1.0 / xp.sqrt(variance + variance_error + EPSILON)
    rstd_error = xp.maximum(largest - rstd, rstd - smallest) + 8.0 * u * rstd

    single = xp.float32
    bound = out.astype(single)
    xp.abs(bound, out=bound)
    bound *= (rstd_error + 4.0 * u * rstd).astype(single)[:, None]
    bound += (mean_error * (rstd + rstd_error)).astype(single)[:, None]
    bound *= xp.abs(weight).astype(single)
    out *= rstd[:, None]
    out *= weight
    out += bias
    # Adding the bias is one more rounding in fp32.
    magnitude = out.astype(single)
    xp.abs(magnitude, out=magnitude)
    magnitude *= u
    bound += magnitude
    return {
        "out": Expected(out.reshape(B, T, C), bound.reshape(B, T, C)),
        "mean": Expected(mean.reshape(B, T), mean_error.reshape(B, T)),
        "rstd": Expected(rstd.reshape(B, T), rstd_error.reshape(B, T)),
    }


# ------------------------------------------------------------------------------------------------ plans


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


INPUTS = ("inp", "weight", "bias")

PlanOfVersion = Callable[[Problem, int, Props], tuple[Step, ...]]


def _by_rows(kernel: str, threads_per_row: int) -> PlanOfVersion:
    """Blocks that hold as many rows as they have groups of this many threads."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        grid = _ceil_div(_rows(problem), block // threads_per_row)
        args = ("out", "mean", "rstd", *INPUTS, _rows(problem), problem["C"])
        return (Launch(f"{kernel}<{problem.c_type}>", (grid,), (block,), args),)

    return plan


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    rows, C, element = _rows(problem), problem["C"], problem.c_type
    elements = ("out", "inp", "mean", "rstd", "weight", "bias", rows, C)
    return (
        Launch(f"mean2<{element}>", (rows,), (block,), ("mean", "inp", C)),
        Launch(f"rstd2<{element}>", (rows,), (block,), ("rstd", "inp", "mean", C)),
        Launch(f"normalise2<{element}>", (_ceil_div(rows * C, block),), (block,), elements),
    )


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    args = ("out", "mean", "rstd", *INPUTS, problem["C"])
    return (Launch(f"layernorm_forward5<{problem.c_type}>", (_rows(problem),), (block,), args),)


def _plan6(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """Version 5 where weight, bias and a row per warp do not fit into shared memory."""
    C, warps = problem["C"], block // WARP
    per_packet = PACKET_BYTES // ITEM_SIZES[problem.storage]
    shared = (2 + warps) * _ceil_div(C, per_packet) * PACKET_BYTES
    if shared > props.shared_per_block_optin:
        return _plan5(problem, block, props)
    aligned = "true" if C % per_packet == 0 else "false"
    kernel = f"layernorm_forward6<{problem.c_type}, {aligned}>"
    args = ("out", "mean", "rstd", *INPUTS, _rows(problem), C)
    return (Launch(kernel, (_ceil_div(_rows(problem), warps),), (block,), args, shared),)


IDEAS: tuple[tuple[str, PlanOfVersion], ...] = (
    ("one thread per row, three passes: mean, variance, output", _by_rows("layernorm_forward1", 1)),
    ("a kernel each for mean and variance (a block per row) and output: coalesced loads", _plan2),
    (
        "one warp per row, one kernel: shuffles, no shared memory; streaming accesses",
        _by_rows("layernorm_forward3", WARP),
    ),
    ("as 3, mean and variance in a single pass", _by_rows("layernorm_forward4", WARP)),
    ("as 4, one block per row: enough threads for long rows", _plan5),
    ("one warp per row, nothing is read twice: row, weight, bias stay in shared memory", _plan6),
)


# ----------------------------------------------------------------------------------------------- family


def _shape(B: int, T: int, C: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C}, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, "one of everything: the variance is 0, the output is the bias"),
    _shape(2, 3, 5, "odd, rows shorter than a packet of eight"),
    _shape(1, 5, 33, "one past a warp, rows of all kinds, one row past a block of four warps"),
    _shape(1, 37, 8, "more rows than the warps of a block, one aligned packet"),
    _shape(1, 1, 129, "one row, one past 128"),
    _shape(3, 1, 1031, "prime, one pass over the largest block and a bit"),
    _shape(1, 4, 768, "aligned rows of all kinds, several packets per lane"),
    _shape(1, 2, 1288, "aligned, more packets per lane than a batch, the last ones of some lanes missing"),
    _shape(1, 3, 132, "rows of whole halves of a 16-bit packet", (6,), 64),
    _shape(1, 3, 130, "rows of whole halves of an fp32 packet", (6,), 64),
    _shape(1, 2, 3424, "rows too long for the shared memory of 32 warps", (6,), 1024),
)

FAMILY = Family(
    name="layernorm_forward",
    summary="LayerNorm: rows normalised to mean 0 and variance 1, then scaled and shifted",
    sizes={"B": "batch size", "T": "sequence length", "C": "channels"},
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "C": 768},
        "small": {"B": 2, "T": 64, "C": 256},
        "large": {"B": 192, "T": 1024, "C": 768},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=tuple(Version(number, idea, plan, DTYPES) for number, (idea, plan) in enumerate(IDEAS, start=1)),
)
