"""Forward pass of causal multi-head attention, from packed queries, keys and values.

preatt = q k^T,  att = softmax over t2 <= t of preatt / sqrt(HS),  out = att v
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kbench.family import (
    WARP,
    Array,
    CheckShape,
    Draw,
    ErrorModel,
    Expected,
    Family,
    Gemm,
    Heads,
    Launch,
    Matrix,
    Problem,
    Props,
    Rule,
    Sdpa,
    Step,
    Tensor,
    Version,
    ceil_div,
)

DTYPES = ("fp32", "tf32", "bf16", "fp16")
WITHOUT_GEMM = ("fp32", "bf16", "fp16")
SIXTEEN_BITS = ("bf16", "fp16")
BLOCK_SIZES = (32, 64, 128, 256, 512)

# Elements of attention matrices that are worked on at once in numpy: 8 MB in float64, so temporaries stay in the cache.
SLICE = 1 << 20

PACKET = {"fp32": 4, "bf16": 8, "fp16": 8}  # elements of 16 bytes
# The kernels that only move data are the same in all versions; the block size of a version is not theirs.
LAYOUT_BLOCK = 256


# ---------------------------------------------------------------------------------------------- tensors


PEAK = 20.0


def _tokens(HS: int) -> Draw:
    """Every token's queries and keys of the order of 1, but for two of which the scaled scores are far away from 0.

    The last token has about PEAK^2 = 400 with itself, whose exponential overflows, so the maximum has to be subtracted;
    the first one has -400, whose exponential is 0, so the maximum must not come from an empty lane.
    """

    def draw(rng: Any, shape: tuple[int, ...], drawn: Mapping[str, Array]) -> Array:
        values = rng.normal(0.1, 1.1, shape)
        C = shape[-1] // 3
        # Scores of HS products are divided by sqrt(HS). A whole number of quarters is exact in every type: where all
        # elements are equal, so would be their errors, which bounds take for random.
        peak = round(4.0 * PEAK / HS**0.25) / 4.0
        values[:, -1, : 2 * C] = peak
        values[:, 0, :C] = peak
        values[:, 0, C : 2 * C] = -peak
        return values

    return draw


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS, dtype = C // NH, problem.storage
    heads, square = (B, NH, T, HS), (B, NH, T, T)
    return (
        Tensor("inp", (B, T, 3 * C), dtype, "in", ("b", "t", "c"), draw=_tokens(HS)),
        Tensor("qkvr", (3, *heads), dtype, "out", ("part", "b", "h", "t", "d"), intermediate=True, exact=True),
        Tensor(
            "preatt", square, dtype, "out", ("b", "h", "t", "t2"), intermediate=True,
            unspecified=lambda xp: xp.broadcast_to(_above_diagonal(T, xp), square),
        ),
        Tensor("att", square, dtype, "out", ("b", "h", "t", "t2"), intermediate=True),
        Tensor("vaccum", heads, dtype, "out", ("b", "h", "t", "d"), intermediate=True),
        Tensor("lse", (B, NH, T), "fp32", "out", ("b", "h", "t"), intermediate=True),
        Tensor("out", (B, T, C), dtype, "out", ("b", "t", "c")),
    )  # fmt: skip


def _above_diagonal(T: int, xp: Any) -> Array:
    return xp.arange(T)[None, :] > xp.arange(T)[:, None]


def _slices(heads: int, T: int) -> Iterator[slice]:
    """Consecutive heads, as many at a time as SLICE allows."""
    step = max(1, SLICE // (T * T))
    return (slice(start, min(start + step, heads)) for start in range(0, heads, step))


# -------------------------------------------------------------------------------------------- reference


class _Bounds:
    """What errors add up to. All arrays are magnitudes, in float32: bounds need three digits, not sixteen.

    GEMM: a tensor core may cut an fp32 operand to TF32 instead of rounding it, so with u = 2^-11 its relative error
    lies in [0, 2u), all of one sign. Its mean shrinks every product alike, hence the result, by at most `BIAS` u. What
    remains is of random sign, with a standard deviation of 0.6 u for the two operands of a product: `SPREAD` u times
    the root of the sum of squares is 13 of them, where the extreme of 1e8 elements is 6.

    16-bit storage: rounding makes a relative error of at most u. A score may be rounded twice, unscaled and scaled, a
    probability or an exponential once, and any result once more than the check counts. All of these are allowed twice
    over, so that a right version, whose errors do reach u, stays below 60% of its bound. In sums their signs are
    random: they are spread evenly, with a standard deviation of 0.6 u, of which `RANDOM` times twice the root of the
    sum of squares is 7.
    """

    BIAS = 2.0
    SPREAD = 8.0
    RANDOM = 2.0
    # Rounding of scores, probabilities and results to 16 bits, in units of u, as above.
    SCORE, PROBABILITY, RESULT = 4.0, 2.0, 1.0
    # Rounding in fp32, in units of its u: an exponential with 2 ulp, its argument (of magnitude |s| + max |s|: a
    # difference, a product, a rounded constant), a quotient, and a product.
    EXPONENTIAL, ARGUMENT = 8.0, 4.0
    # Below this magnitude, the spacing of fp16 stays the same.
    SMALLEST_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}

    def __init__(self, problem: Problem, error: ErrorModel, xp: Any):
        self.error, self.xp = error, xp
        # fp32 is rounded to with every operation, which is counted as such.
        self.stored = error.storage if problem.storage != "fp32" else 0.0
        self.smallest = self.SMALLEST_NORMAL.get(problem.storage, 0.0)

    def rounding(self, times: float, magnitude: Array) -> Array:
        """Of a number that is stored."""
        return times * self.stored * (magnitude + self.smallest)

    def gemm(self, a: Array, b: Array, relative: float = 0.0) -> Array:
        """Of a @ b, where each product may be rounded before it is added, and is off by up to `relative`."""
        bound = (self.error.accumulation(a.shape[2]) + 2.0 * self.error.fp32 + relative) * self.xp.matmul(a, b)
        if self.error.gemm:
            bound += self.SPREAD * self.error.gemm * self.root(a, b)
        return bound

    def root(self, a: Array, b: Array) -> Array:
        """Of a sum over a @ b whose terms have errors of these magnitudes, of independent signs."""
        if self.error.structured:
            return self.xp.matmul(a, b)
        return self.xp.sqrt(self.xp.matmul(a * a, b * b))

    def bias(self, gemms: int, value: Array) -> Array:
        """One-sided error of a value that `gemms` GEMMs, one after the other, lead to."""
        return gemms * self.BIAS * self.error.gemm * self.xp.abs(value)

    def mean(self, weights: Array, errors: Array) -> Array:
        """Of the weighted mean of each row of `errors`: (heads, T, T) twice to (heads, T, 1)."""
        terms = weights * errors
        bound = terms.sum(axis=2, keepdims=True)
        if not self.error.structured:
            root = self.xp.sqrt(self.xp.einsum("htu,htu->ht", terms, terms))[..., None]
            bound = self.xp.minimum(bound, self.RANDOM * root)
        return bound

    def factor(self, exponent: Array) -> Array:
        """At least exp(x) - 1, as exp(x) - 1 <= x exp(x). More than exp(20) says nothing, and overflows further on."""
        return exponent * self.xp.exp(self.xp.minimum(exponent, self.xp.float32(20.0)))


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64 and bounds in float32, a few heads at a time: besides the results it takes about 200 MB."""
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS, heads = C // NH, B * NH
    qkvr = xp.ascontiguousarray(inputs["inp"].reshape(B, T, 3, NH, HS).transpose(2, 0, 3, 1, 4))

    shapes = {"preatt": (heads, T, T), "att": (heads, T, T), "vaccum": (heads, T, HS), "lse": (heads, T, 1)}
    values = {name: xp.empty(shape) for name, shape in shapes.items()}
    bounds = {name: xp.empty(shape, xp.float32) for name, shape in shapes.items()}
    of = _Bounds(problem, error, xp)
    for h in _slices(heads, T):
        part = [{name: array[h] for name, array in arrays.items()} for arrays in (values, bounds)]
        _some_heads(qkvr.reshape(3, heads, T, HS)[:, h], 1.0 / math.sqrt(HS), part[0], part[1], of, xp)

    full = {"preatt": (B, NH, T, T), "att": (B, NH, T, T), "vaccum": (B, NH, T, HS), "lse": (B, NH, T)}
    expected = {
        name: Expected(values[name].reshape(shape), bounds[name].reshape(shape)) for name, shape in full.items()
    }
    by_token = [
        part["vaccum"].reshape(B, NH, T, HS).transpose(0, 2, 1, 3).reshape(B, T, C) for part in (values, bounds)
    ]
    return {**expected, "qkvr": Expected(qkvr), "out": Expected(*by_token)}


def _some_heads(
    qkv: Array, scale: float, value: Mapping[str, Array], bound: Mapping[str, Array], of: _Bounds, xp: Any
) -> None:
    """Fill the values and bounds of some heads.

    With an error d of each score of a row, att becomes att[t2] exp(d[t2]) / sum of att exp(d). That is off by a factor
    of at most exp(d[t2] + m), where m, the mean of exp(|d|) - 1 weighted by att, bounds the logarithm of the divisor.
    So out, a sum of att v, is off by at most the sum of att (exp(d + m) - 1) |v|; where signs are random, to first
    order by the root of the sum of squares of att d (v - out).
    """
    q, k, v = qkv
    turned = (0, 2, 1)
    single = xp.float32
    above = _above_diagonal(q.shape[1], xp)
    below = (~above).astype(single)

    raw, att, out, lse = (value[name] for name in ("preatt", "att", "vaccum", "lse"))
    xp.matmul(q, k.transpose(turned), out=raw)
    xp.multiply(raw, scale, out=att)
    att += xp.where(above, -xp.inf, 0.0)
    largest = att.max(axis=2, keepdims=True)
    att -= largest
    xp.exp(att, out=att)
    sums = att.sum(axis=2, keepdims=True)
    att /= sums
    lse[...] = largest + xp.log(sums)
    xp.matmul(att, v, out=out)

    q, k, v = (abs(part).astype(single) for part in (q, k, v))
    size, result = abs(raw.astype(single)), abs(out).astype(single)
    # No smaller than fp32's smallest normal number: CuPy takes what is smaller for 0, numpy does not.
    p = xp.maximum(att, 2.0**-126).astype(single) * below
    fp32 = of.error.fp32

    score = of.gemm(q, k.transpose(turned))
    score += of.bias(1, size)
    bound["preatt"][...] = score + of.rounding(of.RESULT, size)
    size *= scale * below
    score *= scale * below
    score += of.ARGUMENT * fp32 * (size + size.max(axis=2, keepdims=True))
    # Only versions that keep their scores in fp32 leave the sums of a row; exponentials may be rounded, though.
    row = of.error.accumulation(p.shape[2]) + of.EXPONENTIAL * fp32
    bound["lse"][...] = of.mean(p, score + of.PROBABILITY * of.stored) + row + 4.0 * fp32 * (abs(largest) + abs(lse))

    score += of.rounding(of.SCORE, size)
    d = of.factor(score)
    score += of.mean(p, d)
    if of.error.gemm:  # what shrinks all scores alike is of one sign
        score += of.bias(1, (p * size).sum(axis=2, keepdims=True))
    off = of.factor(score)
    off += row
    off *= p
    off = xp.minimum(off, single(1.0))  # probabilities are at most 1
    bound["att"][...] = off + of.rounding(of.RESULT, p) * below

    rounded = (of.PROBABILITY * of.stored) * p
    off += rounded
    largest_error = xp.matmul(off, v)
    if not of.error.structured:
        # (v - out)^2 <= 2 (v^2 + out^2)
        d *= p
        d *= d
        d *= 2.0
        squares = d.sum(axis=2, keepdims=True) * (result * result)
        d += rounded * rounded
        squares += xp.matmul(d, v * v)
        largest_error = xp.minimum(largest_error, of.RANDOM * xp.sqrt(squares))
    bound["vaccum"][...] = largest_error + of.gemm(p, v, row) + of.bias(1, result) + of.rounding(of.RESULT, result)


# ------------------------------------------------------------------------------------------------ plans


def _scale(problem: Problem) -> float:
    return 1.0 / math.sqrt(problem["C"] // problem["NH"])


def _plan1(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    heads, HS = B * NH, C // NH

    def launch(kernel: str, threads: int, *args: str | int | float) -> Launch:
        return Launch(f"{kernel}<{problem.c_type}>", (ceil_div(threads, block),), (block,), args)

    return (
        launch("scores1", heads * T * T, "preatt", "inp", heads, T, NH, HS),
        launch("softmax1", heads * T, "att", "preatt", heads, T, _scale(problem)),
        launch("values1", heads * T, "out", "att", "inp", B * T, T, NH, HS),
    )


LARGEST_HEAD = 256  # of flash_attention2: what a lane holds of a row of the output is in registers


def _plan2(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """Keys per tile: one for each lane, or as many as fit into the shared memory that a block has without asking."""
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS, rows = C // NH, block // WARP
    floats = props.shared_per_block // 4 - rows * HS
    keys = min(WARP, floats // (2 * HS + 1))
    chunks = next(count for count in (1, 2, 4, 8) if count * WARP >= HS)
    return (
        Launch(
            f"flash_attention2<{problem.c_type}, {chunks}>",
            (B * NH * ceil_div(T, rows),),
            (block,),
            ("out", "lse", "inp", B * NH, T, NH, HS, keys, _scale(problem)),
            shared=4 * (rows * HS + keys * (2 * HS + 1)),
        ),
    )


Softmax = Callable[[Problem, int], tuple[Launch, ...]]


def _between_layouts(softmax: Softmax) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    """Split the heads, a GEMM, a version's own kernels, a GEMM, merge the heads."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
        HS, heads = C // NH, B * NH

        def part(tensor: str, index: int = 0, transpose: bool = False) -> Matrix:
            return Matrix(tensor, T, HS, offset=index * heads * T * HS, stride=T * HS, transpose=transpose)

        def square(tensor: str) -> Matrix:
            return Matrix(tensor, T, T, stride=T * T)

        def gemm(a: Matrix, b: Matrix, out: Matrix) -> Gemm:
            return Gemm(a, b, out, problem.dtype, batch=heads)

        return (
            _layout("split_heads", problem, 3 * C, ("qkvr", "inp", B, T, NH, HS)),
            gemm(part("qkvr", 0), part("qkvr", 1, transpose=True), square("preatt")),
            *softmax(problem, block),
            gemm(square("att"), part("qkvr", 2), part("vaccum")),
            _layout("merge_heads", problem, C, ("out", "vaccum", T, NH, HS)),
        )

    return plan


def _layout(kernel: str, problem: Problem, per_token: int, args: tuple[str | int, ...]) -> Launch:
    """Move `per_token` elements of each token: 16 bytes per access where a head's elements fill such packets."""
    packet = PACKET[problem.storage]
    if problem["C"] // problem["NH"] % packet:
        packet = 1
    block = min(LAYOUT_BLOCK, WARP * ceil_div(per_token // packet, WARP))
    return Launch(f"{kernel}<{problem.c_type}, {packet}>", (problem["B"] * problem["T"],), (block,), args)


def _softmax3(problem: Problem, block: int) -> tuple[Launch, ...]:
    heads, T = problem["B"] * problem["NH"], problem["T"]
    masked = ("att", "preatt", heads, T, _scale(problem))
    return (
        Launch(f"scale_and_mask3<{problem.c_type}>", (ceil_div(heads * T * T, block),), (block,), masked),
        Launch(f"softmax3<{problem.c_type}>", (heads * T,), (block,), ("att", T)),
    )


def _softmax_by_warp(kernel: str) -> Softmax:
    def launch(problem: Problem, block: int) -> tuple[Launch, ...]:
        heads, T = problem["B"] * problem["NH"], problem["T"]
        aligned = "true" if T % PACKET[problem.storage] == 0 else "false"
        args = ("att", "preatt", heads, T, _scale(problem) * math.log2(math.e))
        blocks = ceil_div(heads * T, block // WARP)
        return (Launch(f"{kernel}<{problem.c_type}, {aligned}>", (blocks,), (block,), args),)

    return launch


def _plan6(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """Heads lie HS apart within a token, sequences T tokens. One stride leads from one member of a batch to the next,
    so a GEMM takes all heads of a sequence or all sequences of a head, whichever are more."""
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS = C // NH
    by_sequence = NH >= B
    count, batch = (B, NH) if by_sequence else (NH, B)

    def packed(tensor: str, parts: int, index: int, i: int, transpose: bool = False) -> Matrix:
        """Part `index` of the `parts` parts of every token, for batch i."""
        sequence = T * parts * C
        offset, stride = (i * sequence, HS) if by_sequence else (i * HS, sequence)
        return Matrix(tensor, T, HS, ld=parts * C, offset=offset + index * C, stride=stride, transpose=transpose)

    def square(tensor: str, i: int) -> Matrix:
        offset, stride = (i * NH, 1) if by_sequence else (i, NH)
        return Matrix(tensor, T, T, offset=offset * T * T, stride=stride * T * T)

    def gemm(a: Matrix, b: Matrix, out: Matrix) -> Gemm:
        return Gemm(a, b, out, problem.dtype, batch=batch)

    def scores(i: int) -> Gemm:
        return gemm(packed("inp", 3, 0, i), packed("inp", 3, 1, i, transpose=True), square("preatt", i))

    def outputs(i: int) -> Gemm:
        return gemm(square("att", i), packed("inp", 3, 2, i), packed("out", 1, 0, i))

    return (*map(scores, range(count)), *_softmax_by_warp("softmax5")(problem, block), *map(outputs, range(count)))


def _plan10(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS = C // NH

    def packed(tensor: str, parts: int, index: int = 0) -> Heads:
        return Heads(tensor, T * parts * C, HS, parts * C, index * C)

    q, k, v = (packed("inp", 3, index) for index in range(3))
    return (Sdpa(q, k, v, packed("out", 1), (B, NH, T, HS), _scale(problem), stats="lse"),)


def _head_size(problem: Problem) -> int:
    return problem["C"] // problem["NH"]


VERSIONS = (
    Version(
        1, "naive: a thread per score, then per row of the softmax, then per row of out", _plan1, WITHOUT_GEMM,
        BLOCK_SIZES, saves=("att",),
    ),
    Version(
        2, "flash attention: no (T, T) matrix; a warp per row keeps a running maximum and sum", _plan2,
        WITHOUT_GEMM, BLOCK_SIZES, saves=("lse",),
        rules=(Rule(f"head size of at most {LARGEST_HEAD}", lambda problem: _head_size(problem) <= LARGEST_HEAD),),
    ),
    Version(
        3, "two GEMMs, and a kernel each to split heads, scale and mask, softmax, merge heads",
        _between_layouts(_softmax3), DTYPES, BLOCK_SIZES, saves=("qkvr", "att"),
    ),
    Version(
        4, "as 3, scale, mask and softmax in one kernel: a warp per row, online",
        _between_layouts(_softmax_by_warp("softmax4")), DTYPES, BLOCK_SIZES, saves=("qkvr", "att"),
    ),
    Version(
        5, "as 4, a row is read once, and waits in registers",
        _between_layouts(_softmax_by_warp("softmax5")), DTYPES, BLOCK_SIZES, saves=("qkvr", "att"),
    ),
    Version(
        6, "as 5, no splitting and merging: the GEMMs read inp and write out in place", _plan6,
        DTYPES, BLOCK_SIZES, saves=("att",),
    ),
    Version(
        # No kernel of ours: the block size is only a number in the table.
        10, "cuDNN's fused attention", _plan10, SIXTEEN_BITS, fixed=128, saves=("lse",),
        gpu_only="it is cuDNN's attention",
        rules=(
            Rule("head size divisible by 8", lambda problem: _head_size(problem) % 8 == 0),
            Rule("head size of at most 256", lambda problem: _head_size(problem) <= 256),
        ),
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- family


def _shape(
    B: int, T: int, C: int, NH: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0
) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C, "NH": NH}, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, "one of everything"),
    _shape(5, 1, 16, 2, "one token: out is v; more sequences than heads"),
    _shape(3, 2, 10, 2, "two tokens, odd head size"),
    _shape(1, 7, 5, 1, "prime length, one head"),
    _shape(2, 33, 48, 3, "one past a warp and a tile of keys, head size 16"),
    _shape(1, 65, 8, 1, "odd length with head size 8: rows of 65 elements are not aligned, heads are"),
    _shape(1, 96, 128, 2, "a multiple of 32 that is no power of two, head size 64: aligned rows"),
    _shape(3, 37, 8, 4, "prime length, head size 2"),
    _shape(1, 132, 4, 1, "rows of 132: aligned in fp32, not in 16 bits"),
    _shape(1, 3, 1030, 2, "more channels than a block of the layout kernels has threads, head size 515"),
    _shape(1, 19, 100, 1, "head size 100", (2,), 128),
    _shape(1, 18, 256, 1, "head size 256: fewer keys per tile than lanes", (2,)),
    _shape(1, 161, 2, 1, "a long odd row", (1, 2, 3, 4), 64),
    _shape(1, 1040, 1, 1, "a row that registers do not hold", (5, 6), 128),
    _shape(1, 1033, 1, 1, "the same, not aligned", (5, 6), 64),
)

FAMILY = Family(
    name="attention_forward",
    summary="causal multi-head attention from packed queries, keys and values",
    sizes={"B": "batch size", "T": "sequence length", "C": "channels", "NH": "number of heads"},
    dtypes=DTYPES,
    presets={"default": {"B": 8, "T": 1024, "C": 768, "NH": 12}, "small": {"B": 2, "T": 64, "C": 64, "NH": 4}},
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    rules=(Rule("C divisible by NH", lambda problem: problem["C"] % problem["NH"] == 0),),
    # Two products of T x T x HS per head, of which the causal half is useful.
    flops=lambda problem: 2.0 * problem["B"] * problem["T"] ** 2 * problem["C"],
)
