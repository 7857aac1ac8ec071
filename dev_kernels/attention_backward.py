"""Backward pass of causal attention: gradients of q, k and v from the gradient of the output, and from the attention
matrix or, where that is computed again, the log-sum-exp of its rows.

datt = dout v^T,  dv = att^T dout,  dpreatt = softmax backward of datt,  dq = dpreatt k,  dk = dpreatt^T q
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kbench.family import (
    WARP,
    Array,
    CheckShape,
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
    SdpaBackward,
    Step,
    Tensor,
    Version,
    ceil_div,
    derived,
    normal,
)

DTYPES = ("fp32", "tf32", "bf16", "fp16")
SIXTEEN_BITS = ("bf16", "fp16")

# Elements of attention matrices that are worked on at once in numpy: 8 MB in float64, so temporaries stay in the cache.
SLICE = 1 << 20

# The two kernels that only move data are the same in all versions; the block size of a version is not theirs.
LAYOUT_BLOCK = 256
PACKET = {"fp32": 4, "bf16": 8, "fp16": 8}  # elements of 16 bytes
ROWS_PER_BLOCK = 4  # of softmax_backward8 and 9
COLUMNS_PER_WARP = 8  # of softmax_backward4 and 5


# ---------------------------------------------------------------------------------------------- tensors


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS, dtype = C // NH, problem.storage
    heads, square = (B, NH, T, HS), (B, NH, T, T)
    qkv = ("part", "b", "h", "t", "d")
    return (
        Tensor("dout", (B, T, C), dtype, "in", ("b", "t", "c"), draw=normal(0.1, 0.7)),
        Tensor("inp", (B, T, 3 * C), dtype, "in", ("b", "t", "c"), draw=normal(-0.1, 0.9)),
        # What the forward pass leaves. Each version reads of it what it needs.
        Tensor("qkvr", (3, *heads), dtype, "in", qkv, draw=derived(lambda drawn: _split(drawn, NH))),
        Tensor("att", square, dtype, "in", ("b", "h", "t", "t2"), draw=derived(_attention)),
        Tensor("out", (B, T, C), dtype, "in", ("b", "t", "c"), draw=derived(_output)),
        Tensor("lse", (B, NH, T), "fp32", "in", ("b", "h", "t"), draw=derived(_log_sum_exp)),
        Tensor("dvaccum", heads, dtype, "out", ("b", "h", "t", "d"), intermediate=True, exact=True),
        Tensor(
            "datt", square, dtype, "out", ("b", "h", "t", "t2"), intermediate=True,
            unspecified=lambda xp: xp.broadcast_to(_above_diagonal(T, xp), square),
        ),
        Tensor("dpreatt", square, dtype, "out", ("b", "h", "t", "t2"), intermediate=True),
        Tensor("dqkvr", (3, *heads), dtype, "out", qkv, intermediate=True),
        Tensor("dinp", (B, T, 3 * C), dtype, "out", ("b", "t", "c")),
    )  # fmt: skip


def _above_diagonal(T: int, xp: Any) -> Array:
    return xp.arange(T)[None, :] > xp.arange(T)[:, None]


def _slices(heads: int, T: int) -> Iterator[slice]:
    """Consecutive heads, as many at a time as SLICE allows."""
    step = max(1, SLICE // (T * T))
    return (slice(start, min(start + step, heads)) for start in range(0, heads, step))


def _split(drawn: Mapping[str, Array], NH: int) -> Array:
    """inp (B, T, 3, NH, HS) as queries, keys and values: (3, B, NH, T, HS)."""
    B, T, per_token = drawn["inp"].shape
    return drawn["inp"].reshape(B, T, 3, NH, per_token // (3 * NH)).transpose(2, 0, 3, 1, 4)


def _forward(drawn: Mapping[str, Array]) -> Iterator[tuple[slice, Array, Array]]:
    """Of some heads at a time: which, the causal softmax of q k^T / sqrt(HS) (heads, T, T), and the logarithm of the
    sum of exponentials of each row (heads, T, 1). In float32, as a forward pass computes them."""
    import numpy as np  # here, so that `kbench list` need not wait for it

    q, k = (np.asarray(part, np.float32) for part in drawn["qkvr"][:2])
    B, NH, T, HS = q.shape
    q, k = q.reshape(B * NH, T, HS), k.reshape(B * NH, T, HS)
    above = _above_diagonal(T, np)
    for heads in _slices(B * NH, T):
        scores = np.matmul(q[heads] / np.float32(math.sqrt(HS)), k[heads].transpose(0, 2, 1))
        scores[:, above] = -np.inf
        largest = scores.max(axis=2, keepdims=True)
        scores -= largest
        np.exp(scores, out=scores)
        sums = scores.sum(axis=2, keepdims=True)
        scores /= sums
        yield heads, scores, largest + np.log(sums)


def _attention(drawn: Mapping[str, Array]) -> Array:
    """(B, NH, T, T)."""
    import numpy as np

    _, B, NH, T, _ = drawn["qkvr"].shape
    att = np.empty((B * NH, T, T), np.float32)
    for heads, probabilities, _ in _forward(drawn):
        att[heads] = probabilities
    return att


def _output(drawn: Mapping[str, Array]) -> Array:
    """(B, T, C), from probabilities that have not been rounded to 16 bits."""
    import numpy as np

    v = np.asarray(drawn["qkvr"][2], np.float32)
    B, NH, T, HS = v.shape
    v = v.reshape(B * NH, T, HS)
    out = np.empty_like(v)
    for heads, probabilities, _ in _forward(drawn):
        np.matmul(probabilities, v[heads], out=out[heads])
    return out.reshape(B, NH, T, HS).transpose(0, 2, 1, 3)


def _log_sum_exp(drawn: Mapping[str, Array]) -> Array:
    """(B, NH, T)."""
    import numpy as np

    return np.concatenate([lse for _, _, lse in _forward(drawn)])


# -------------------------------------------------------------------------------------------- reference


class _Bounds:
    """Error bounds of GEMMs whose operands are rounded and whose sums are accumulated in fp32.

    A tensor core may cut an fp32 operand to TF32 instead of rounding it, so with u = 2^-11 its relative error
    lies in [0, 2u), all of one sign. Its mean shrinks every product alike, hence the result: at most `BIAS` u
    times the value, per GEMM on the way. What remains is of random sign, with a standard deviation of 0.6 u for the
    two operands of a product: `SPREAD` u times the root of the sum of squares is 13 of them, where the extreme of
    1e8 elements is 6. A single product has at most 4 u, less than half of what both parts allow.
    Errors that an operand brings along are independent, too, and add up in the same way. For structured inputs
    nothing is independent: sums of magnitudes take the place of roots of sums of squares.

    What is stored in 16 bits has a relative error of up to u, of which the check counts one for each output. One more
    is allowed, so that a right version, whose errors do reach u, stays below 60% of its bound. Where the stored number
    goes on into sums, its error is spread evenly, with a standard deviation of 0.6 u: `STORED` u are 7 of them.

    The reference takes att as it was stored. In 16 bits, versions may do without it, and compute it again: that differs
    by the rounding of the stored one, and by another if the new one is rounded before it is multiplied (`again`). They
    take sum(att datt) of a row for sum(dout out), whose out was rounded. None of this is allowed in fp32.
    """

    BIAS = 2.0
    SPREAD = 8.0
    STORED = 4.0
    # Rounding in fp32, in units of its u, of a probability that is computed again from a score and the log-sum-exp: of
    # both of them, of their difference, and of a constant and a product in the argument of the exponential.
    ARGUMENT = 8.0
    # Below this magnitude, the spacing of a type stays the same.
    SMALLEST_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}

    def __init__(self, problem: Problem, error: ErrorModel, xp: Any):
        self.error, self.xp = error, xp
        # fp32 is rounded to with every operation, which is counted as such.
        self.stored = error.storage if problem.storage != "fp32" else 0.0
        self.smallest = self.SMALLEST_NORMAL.get(problem.storage, 0.0)

    def rounded(self, magnitude: Array) -> Array:
        """Error of numbers that are stored. An exact zero has none."""
        if not self.stored:
            return 0.0
        return self.stored * self.xp.where(magnitude > 0, magnitude + self.smallest, magnitude)

    def carried(self, error: Array, rounded: Array) -> Array:
        """Of numbers with an `error`, and `rounded` to storage besides: what sums over them have to expect."""
        if not self.stored:
            return error
        if self.error.structured:
            return error + rounded
        return self.xp.sqrt(error * error + (self.STORED * rounded) ** 2)

    def joined(self, *errors: Array) -> Array:
        """Of a sum of numbers with these errors, which are independent."""
        if self.error.structured:
            return sum(errors)
        return self.xp.sqrt(sum(error * error for error in errors))

    def again(self, q: Array, k: Array, att: Array, lse: Array, scale: float) -> Array:
        """What sums have to expect of att, computed again: its error, above the diagonal 0. A score of HS products is
        off by what accumulating them costs, and so is the log-sum-exp, by that of the row's scores."""
        below = (~_above_diagonal(att.shape[1], self.xp)).astype(att.dtype)
        scores = self.xp.matmul(q, k.transpose(0, 2, 1))
        scores *= scale * below
        scores += scores.max(axis=2, keepdims=True) + abs(lse)
        scores *= self.error.accumulation(q.shape[2]) + self.ARGUMENT * self.error.fp32
        scores *= att
        roundings = 2.0 if self.error.structured else math.sqrt(2.0) * self.STORED
        scores += (roundings * self.stored) * (att + self.smallest)
        scores *= below
        return scores

    def accumulated(self, terms: int, magnitude: Array) -> Array:
        """Error of adding `terms` products in fp32: `magnitude` is the sum of their magnitudes. Each product may be
        rounded before it is added."""
        return (self.error.accumulation(terms) + 2.0 * self.error.fp32) * magnitude

    def sum(self, a: Array, b: Array) -> Array:
        """Error of a @ b when each product of elements has an error of up to |a| |b| (both not negative)."""
        if self.error.structured:
            return self.xp.matmul(a, b)
        return self.xp.sqrt(self.xp.matmul(a * a, b * b))

    def row_sum(self, a: Array, b: Array) -> Array:
        """As `sum`, of row times row: (heads, T, n) twice to (heads, T, 1)."""
        if self.error.structured:
            return self.xp.einsum("htu,htu->ht", a, b)[..., None]
        return self.xp.sqrt(self.xp.einsum("htu,htu->ht", a * a, b * b))[..., None]

    def gemm(self, a: Array, b: Array, a_error: Array | None = None) -> Array:
        """Error of the GEMM a @ b, without bias. a, b: magnitudes, (heads, m, k) and (heads, k, n); a_error: that of
        the elements of a."""
        bound = self.accumulated(a.shape[2], self.xp.matmul(a, b))
        rounding = self.SPREAD * self.error.gemm
        if a_error is None:
            return bound + rounding * self.sum(a, b) if rounding else bound
        if self.error.structured:
            return bound + self.sum(a_error + rounding * a, b)
        return bound + self.sum(self.xp.sqrt(a_error * a_error + (rounding * a) ** 2), b)

    def bias(self, gemms: int, value: Array) -> Array:
        """One-sided error of a value that `gemms` GEMMs, one after the other, lead to."""
        return gemms * self.BIAS * self.error.gemm * self.xp.abs(value)


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Values in float64 and bounds in float32, a few heads at a time: besides the results it takes about 200 MB."""
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS, heads = C // NH, B * NH
    douts = xp.ascontiguousarray(inputs["dout"].reshape(B, T, NH, HS).transpose(0, 2, 1, 3)).reshape(heads, T, HS)
    qkvr = inputs["qkvr"].reshape(3, heads, T, HS)
    atts = inputs["att"].reshape(heads, T, T)
    lses = inputs["lse"].reshape(heads, T, 1)
    outs = inputs["out"].reshape(B, T, NH, HS).transpose(0, 2, 1, 3).reshape(heads, T, HS)

    values = {
        "datt": xp.empty((heads, T, T)), "dpreatt": xp.empty((heads, T, T)), "dqkvr": xp.empty((3, heads, T, HS)),
    }  # fmt: skip
    bounds = {name: xp.empty(value.shape, xp.float32) for name, value in values.items()}
    of = _Bounds(problem, error, xp)
    scale = 1.0 / math.sqrt(HS)
    for h in _slices(heads, T):
        part = (
            (values["datt"][h], values["dpreatt"][h], values["dqkvr"][:, h]),
            (bounds["datt"][h], bounds["dpreatt"][h], bounds["dqkvr"][:, h]),
        )
        _some_heads(douts[h], qkvr[:, h], (atts[h], outs[h], lses[h]), scale, part, of, xp)

    shapes = {"datt": (B, NH, T, T), "dpreatt": (B, NH, T, T), "dqkvr": (3, B, NH, T, HS)}
    expected = {
        name: Expected(values[name].reshape(shape), bounds[name].reshape(shape)) for name, shape in shapes.items()
    }
    by_token = (part["dqkvr"].reshape(3, B, NH, T, HS).transpose(1, 3, 0, 2, 4) for part in (values, bounds))
    merged = (part.reshape(B, T, 3 * C) for part in by_token)
    return {**expected, "dvaccum": Expected(douts.reshape(B, NH, T, HS)), "dinp": Expected(*merged)}


def _some_heads(
    dout: Array, qkv: Array, saved: tuple[Array, Array, Array], scale: float, to: Any, of: _Bounds, xp: Any
) -> None:
    """Fill `to` = (values, bounds), each (datt, dpreatt, dqkvr), for some heads. saved: att, out and lse of the forward
    pass."""
    (datt, dpreatt, dqkv), (datt_bound, dpreatt_bound, dqkv_bound) = to
    (q, k, v), (att, out, lse) = qkv, saved
    T = att.shape[1]
    turned = (0, 2, 1)

    # att is 0 above the diagonal: whatever stands there in datt and in its bound drops out.
    xp.matmul(dout, v.transpose(turned), out=datt)
    row_sum = xp.einsum("htu,htu->ht", att, datt)[..., None]
    xp.subtract(datt, row_sum, out=dpreatt)
    # Bounds need three digits, not sixteen.
    single = xp.float32
    difference = abs(dpreatt).astype(single) if of.stored else None
    dpreatt *= att
    dpreatt *= scale
    xp.matmul(dpreatt, k, out=dqkv[0])
    xp.matmul(dpreatt.transpose(turned), q, out=dqkv[1])
    xp.matmul(att.transpose(turned), dout, out=dqkv[2])

    signed_k = k.astype(single)
    q, k, v, dout, out = (abs(part).astype(single) for part in (q, k, v, dout, out))
    att = att.astype(single)
    spread = of.gemm(dout, v.transpose(turned))
    magnitude = abs(datt).astype(single)
    rounded = of.rounded(magnitude)
    datt_bound[...] = spread + rounded + of.bias(1, datt)
    carried = of.carried(spread, rounded)
    row_magnitude = xp.einsum("htu,htu->ht", att, magnitude)[..., None]
    # Versions that add up att * (indicator - att) * datt term by term round each factor of a term: 4 more roundings.
    further = of.accumulated(T, magnitude + row_magnitude) + 4.0 * of.error.fp32 * (magnitude + row_magnitude)
    further += of.row_sum(att, carried)
    again, of_row = None, 0.0
    if difference is not None:
        again = of.again(q, k, att, lse.astype(single), scale)
        stored = of.carried(xp.zeros_like(out), of.rounded(out))
        of_row = of.joined(of.row_sum(again, magnitude), of.row_sum(stored, dout))
    att_scaled = att * single(scale)
    carried = (carried + further + of_row) * att_scaled
    further += spread
    further += 2.0 * rounded  # the stored datt comes in once: allowed twice over, as above
    further *= att_scaled
    magnitude = abs(dpreatt).astype(single)
    rounded = of.rounded(magnitude)
    dpreatt_bound[...] = further + rounded + of.bias(1, dpreatt)
    carried = of.carried(carried, rounded)
    if again is not None:
        difference *= again
        difference *= single(scale)
        carried = of.joined(carried, difference)
    dqkv_bound[0] = of.gemm(magnitude, k, carried) + of.bias(2, dqkv[0])
    # An error of sum(dout out) is the same for all of its row, so in dq its signs are not independent.
    dqkv_bound[0] += of_row * abs(xp.matmul(att_scaled, signed_k))
    dqkv_bound[1] = of.gemm(magnitude.transpose(turned), q, carried.transpose(turned)) + of.bias(2, dqkv[1])
    dqkv_bound[2] = of.gemm(att.transpose(turned), dout, None if again is None else again.transpose(turned))
    dqkv_bound[2] += of.bias(1, dqkv[2])
    dqkv_bound += of.rounded(abs(dqkv).astype(single))


# ------------------------------------------------------------------------------------------------ plans


Softmax = Callable[[Problem, int], Launch]


def _pipeline(softmax: Softmax) -> Callable[[Problem, int, Props], tuple[Step, ...]]:
    """The steps that versions 1 to 8 share, around a version's own kernel for dpreatt."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
        HS = C // NH
        heads = T * HS  # from one head to the next in q, k, v and their gradients

        def part(tensor: str, index: int = 0, transpose: bool = False) -> Matrix:
            return Matrix(tensor, T, HS, offset=index * B * NH * heads, stride=heads, transpose=transpose)

        def square(tensor: str, transpose: bool = False) -> Matrix:
            return Matrix(tensor, T, T, stride=T * T, transpose=transpose)

        def gemm(a: Matrix, b: Matrix, out: Matrix) -> Gemm:
            return Gemm(a, b, out, problem.dtype, batch=B * NH)

        # dv comes before datt, so that nothing passes through the caches between datt and the kernel that reads it.
        return (
            _layout("split_heads", problem, C, ("dvaccum", "dout", T, NH, HS)),
            gemm(square("att", transpose=True), part("dvaccum"), part("dqkvr", 2)),
            gemm(part("dvaccum"), part("qkvr", 2, transpose=True), square("datt")),
            softmax(problem, block),
            gemm(square("dpreatt"), part("qkvr", 1), part("dqkvr", 0)),
            gemm(square("dpreatt", transpose=True), part("qkvr", 0), part("dqkvr", 1)),
            _layout("merge_heads", problem, 3 * C, ("dinp", "dqkvr", B, T, NH, HS)),
        )

    return plan


def _layout(kernel: str, problem: Problem, per_token: int, args: tuple[str | int, ...]) -> Launch:
    """Move `per_token` elements of each token: 16 bytes per access where a head's elements fill such packets."""
    packet = PACKET[problem.storage]
    if problem["C"] // problem["NH"] % packet:
        packet = 1
    block = min(LAYOUT_BLOCK, WARP * ceil_div(per_token // packet, WARP))
    return Launch(f"{kernel}<{problem.c_type}, {packet}>", (problem["B"] * problem["T"],), (block,), args)


def _softmax(problem: Problem, kernel: str, blocks: int, block: int, *sizes: int) -> Launch:
    scale = 1.0 / math.sqrt(problem["C"] // problem["NH"])
    return Launch(kernel, (blocks,), (block,), ("dpreatt", "datt", "att", *sizes, problem["T"], scale))


def _softmax1(problem: Problem, block: int) -> Launch:
    heads = problem["B"] * problem["NH"]
    return _softmax(problem, f"softmax_backward1<{problem.c_type}>", ceil_div(problem["T"], block), block, heads)


def _softmax_by_columns(kernel: str, threads: int, columns: int) -> Softmax:
    """`threads` threads have `columns` columns of one head; a block stays within a head."""

    def launch(problem: Problem, block: int) -> Launch:
        blocks_per_head = ceil_div(problem["T"], block // threads * columns)
        blocks = problem["B"] * problem["NH"] * blocks_per_head
        return _softmax(problem, f"{kernel}<{problem.c_type}>", blocks, block)

    return launch


def _softmax_by_row(kernel: str) -> Softmax:
    def launch(problem: Problem, block: int) -> Launch:
        blocks = problem["B"] * problem["NH"] * problem["T"]
        return _softmax(problem, f"{kernel}<{problem.c_type}, {block}>", blocks, block)

    return launch


def _softmax8(problem: Problem, block: int) -> Launch:
    return _softmax(problem, _by_four_rows("softmax_backward8", problem, block), _groups_of_rows(problem), block)


def _by_four_rows(kernel: str, problem: Problem, block: int) -> str:
    aligned = "true" if problem["T"] % PACKET[problem.storage] == 0 else "false"
    return f"{kernel}<{problem.c_type}, {block}, {aligned}>"


def _groups_of_rows(problem: Problem) -> int:
    return problem["B"] * problem["NH"] * ceil_div(problem["T"], ROWS_PER_BLOCK)


def _plan9(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
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

    def square(tensor: str, i: int, transpose: bool = False) -> Matrix:
        offset, stride = (i * NH, 1) if by_sequence else (i, NH)
        return Matrix(tensor, T, T, offset=offset * T * T, stride=stride * T * T, transpose=transpose)

    def gemm(a: Matrix, b: Matrix, out: Matrix) -> Gemm:
        return Gemm(a, b, out, problem.dtype, batch=batch)

    def dv(i: int) -> Gemm:
        return gemm(square("att", i, transpose=True), packed("dout", 1, 0, i), packed("dinp", 3, 2, i))

    def datt(i: int) -> Gemm:
        return gemm(packed("dout", 1, 0, i), packed("inp", 3, 2, i, transpose=True), square("dpreatt", i))

    def dq(i: int) -> Gemm:
        return gemm(square("dpreatt", i), packed("inp", 3, 1, i), packed("dinp", 3, 0, i))

    def dk(i: int) -> Gemm:
        return gemm(square("dpreatt", i, transpose=True), packed("inp", 3, 0, i), packed("dinp", 3, 1, i))

    softmax = Launch(
        _by_four_rows("softmax_backward9", problem, block),
        (_groups_of_rows(problem),),
        (block,),
        ("dpreatt", "att", T, 1.0 / math.sqrt(HS)),
    )
    batches = range(count)
    return (*map(dv, batches), *map(datt, batches), softmax, *map(dq, batches), *map(dk, batches))


LARGEST_HEAD = 128  # that cuDNN's backward pass takes on every GPU; on some it takes 256


def _plan10(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    B, T, C, NH = (problem[name] for name in ("B", "T", "C", "NH"))
    HS = C // NH

    def packed(tensor: str, parts: int = 1, index: int = 0) -> Heads:
        return Heads(tensor, T * parts * C, HS, parts * C, index * C)

    q, k, v = (packed("inp", 3, index) for index in range(3))
    dq, dk, dv = (packed("dinp", 3, index) for index in range(3))
    scale = 1.0 / math.sqrt(HS)
    return (SdpaBackward(q, k, v, packed("out"), packed("dout"), dq, dk, dv, (B, NH, T, HS), scale, stats="lse"),)


def _head_size(problem: Problem) -> int:
    return problem["C"] // problem["NH"]


IDEAS: tuple[tuple[str, Softmax], ...] = (
    ("one thread per column, over all batches and heads", _softmax1),
    ("one thread per column of each head", _softmax_by_columns("softmax_backward2", 1, 1)),
    ("one warp per column: coalesced loads, warp reduction", _softmax_by_columns("softmax_backward3", WARP, 1)),
    (
        "one warp per eight columns: each loaded row serves eight sums",
        _softmax_by_columns("softmax_backward4", WARP, COLUMNS_PER_WARP),
    ),
    (
        "as 4, without branches: the indicator only where it can be 1",
        _softmax_by_columns("softmax_backward5", WARP, COLUMNS_PER_WARP),
    ),
    ("one block per row: products staged in shared memory", _softmax_by_row("softmax_backward6")),
    ("simplified formula: a block-wide sum, then one pass over the row", _softmax_by_row("softmax_backward7")),
    ("as 7, four rows per block, longest first, 16-byte streaming loads", _softmax8),
)


VERSIONS = (
    *(
        Version(number, idea, _pipeline(softmax), DTYPES, needs=("qkvr", "att"))
        for number, (idea, softmax) in enumerate(IDEAS, start=1)
    ),
    Version(
        9, "as 8, no splitting and merging: GEMMs read inp and write dinp in place, dpreatt in place of datt", _plan9,
        DTYPES, needs=("att",),
    ),
    Version(
        # No kernel of ours: the block size is only a number in the table.
        10, "cuDNN's fused backward pass: no (T, T) matrix", _plan10, SIXTEEN_BITS, fixed=128, needs=("lse",),
        gpu_only="it is cuDNN's attention",
        rules=(
            Rule("head size divisible by 8", lambda problem: _head_size(problem) % 8 == 0),
            Rule(f"head size of at most {LARGEST_HEAD}", lambda problem: _head_size(problem) <= LARGEST_HEAD),
            Rule("T of at least 2", lambda problem: problem["T"] >= 2),
        ),
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- family


def _traffic(problem: Problem) -> float:
    """inp and dout are read and dinp is written: all else that versions read can be computed from these."""
    return float(sum(tensor.nbytes for tensor in _tensors(problem) if tensor.name in ("inp", "dout", "dinp")))


def _shape(
    B: int, T: int, C: int, NH: int, why: str, versions: tuple[int, ...] | None = None, block: int = 0
) -> CheckShape:
    return CheckShape({"B": B, "T": T, "C": C, "NH": NH}, why, versions, (block,) if block else None)


CHECK_SHAPES = (
    _shape(1, 1, 1, 1, "one of everything"),
    _shape(5, 1, 6, 2, "one token: dq and dk are zero, dv is dout"),
    _shape(3, 2, 10, 2, "two tokens, odd head size"),
    _shape(1, 3, 1030, 2, "more channels than a block of the layout kernels has threads, head size 515"),
    _shape(1, 7, 5, 1, "prime length, less than a group of eight columns"),
    _shape(2, 33, 12, 4, "one past a warp, head size 3"),
    _shape(1, 65, 8, 2, "odd length with head size 4: rows of 65 elements are not aligned, heads are"),
    _shape(1, 96, 24, 3, "a multiple of 32 that is no power of two"),
    _shape(3, 97, 2, 1, "prime length, one head, batches"),
    _shape(1, 129, 1, 1, "one past 128, head size 1"),
    _shape(1, 132, 8, 1, "rows of 132: aligned in fp32, one packet of four past 128, but not in 16 bits"),
    _shape(1, 136, 16, 1, "aligned rows in 16 bits, too, one packet of eight past 128"),
    _shape(1, 257, 3, 1, "a long odd row", (1, 2, 3, 4, 5), 128),
    _shape(1, 1024, 4, 1, "a long row: several tiles per thread", (6, 7, 8), 64),
    _shape(3, 37, 16, 2, "more sequences than heads, prime length, head size 8", (9, 10), 128),
    _shape(2, 97, 192, 3, "prime length, head size 64, within and across tiles of 64", (9, 10), 128),
    _shape(1, 130, 128, 1, "one head of the largest size, two past 128", (9, 10), 128),
)

FAMILY = Family(
    name="attention_backward",
    summary="backward pass of causal attention, from its attention matrix or its log-sum-exp",
    sizes={"B": "batch size", "T": "sequence length", "C": "channels", "NH": "number of heads"},
    dtypes=DTYPES,
    presets={"default": {"B": 4, "T": 1024, "C": 768, "NH": 12}, "small": {"B": 2, "T": 64, "C": 64, "NH": 4}},
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    rules=(Rule("C divisible by NH", lambda problem: problem["C"] % problem["NH"] == 0),),
    # Four products of T x T x HS per head, of which the causal half is useful.
    flops=lambda problem: 4.0 * problem["B"] * problem["T"] ** 2 * problem["C"],
    traffic=_traffic,
)
