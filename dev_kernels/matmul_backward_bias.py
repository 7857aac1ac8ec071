"""Bias gradient of a linear layer: dbias (OC) is the sum of dout (B, T, OC) over all rows, added to what is there or
in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kbench.family import (
    ITEM_SIZES,
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
    Rule,
    Step,
    Tensor,
    Version,
    ceil_div,
    normal,
)

DTYPES = ("bf16", "fp32", "fp16")
BLOCK_SIZES = (32, 64, 128, 256, 512, 768, 1024)

PACKET = {"fp32": 4, "bf16": 8, "fp16": 8}  # elements in 16 bytes
DEPTH = 4  # rows that a warp of versions 8 and 9 has at a time: of each, a line of 128 bytes
DEEPER = 8  # of version 10: half of a line
# A thread of versions 7 to 10: what __launch_bounds__ leaves it, and eight packets under way need most of that.
REGISTERS = 64
MOST_WARPS = 32  # in a block
MOST_DOWN = 65535  # blocks in the second dimension of a grid

# Elements that the reference works on at once: 128 MB in float64.
SLICE = 1 << 24


# -------------------------------------------------------------------------------- tensors and reference


def _tensors(problem: Problem) -> tuple[Tensor, ...]:
    B, T, OC = (problem[name] for name in ("B", "T", "OC"))
    scale = _gradient_scale(B * T)
    draw = normal(0.02 * scale, 0.1 * scale)
    dout = Tensor("dout", (B, T, OC), problem.storage, "in", ("b", "t", "o"), draw=draw)
    if problem["accumulate"]:
        return dout, Tensor("dbias", (OC,), problem.storage, "inout", ("o",), draw=normal(-0.3, 0.8))
    return dout, Tensor("dbias", (OC,), problem.storage, "out", ("o",))


def _gradient_scale(rows: int) -> float:
    """Gradients of a mean over many rows are small, so their sums over all rows are numbers of fp16, which ends at
    65504: also of patterned inputs, the largest of which are 0.62 before they are scaled."""
    return min(1.0, 65536.0 / rows)


def _rows(problem: Problem) -> int:
    return problem["B"] * problem["T"]


def _reference(problem: Problem, inputs: Mapping[str, Array], error: ErrorModel, xp: Any) -> dict[str, Expected]:
    """Sums of `rows` numbers and, where it accumulates, of what was there: nothing else is rounded on the way."""
    rows, OC, accumulate = _rows(problem), problem["OC"], problem["accumulate"]
    dout = inputs["dout"].reshape(rows, OC)
    value, magnitude = xp.zeros(OC), xp.zeros(OC)
    step = max(1, SLICE // OC)
    for start in range(0, rows, step):
        value += dout[start : start + step].sum(axis=0)
        magnitude += xp.abs(dout[start : start + step]).sum(axis=0)
    if accumulate:
        value += inputs["dbias"]
        magnitude += xp.abs(inputs["dbias"])
    return {"dbias": Expected(value, error.accumulation(rows + accumulate) * magnitude)}


# ------------------------------------------------------------------------------------------------ plans


def _by_channels(kernel: str, channels: Callable[[int], int], types: int = 1) -> PlanFunction:
    """One kernel whose blocks have all rows of `channels(block)` channels. types: template arguments of the kernel."""

    def plan(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
        name = f"{kernel}<{', '.join([problem.c_type] * types)}>"
        return (_into_dbias(problem, name, "dout", (ceil_div(problem["OC"], channels(block)),), block),)

    return plan


def _into_dbias(problem: Problem, kernel: str, source: str, grid: tuple[int, ...], block: int, rows: int = 0) -> Launch:
    """A kernel that writes dbias, from all rows of dout or from some rows of scratch."""
    args = ("dbias", source, rows or _rows(problem), problem["OC"], problem["accumulate"])
    return Launch(kernel, grid, (block,), args)


def _join(problem: Problem, sums: str, rows: int = 1) -> Launch:
    """Add `rows` rows of fp32 sums to dbias: a warp per row, since the kernel does nothing but wait for its loads."""
    kernel = f"matmul_backward_bias4<{problem.c_type}, float>"
    grid, block = (ceil_div(problem["OC"], WARP),), WARP * min(rows, MOST_WARPS)
    return _into_dbias(problem, kernel, sums, grid, block, rows)


def _grid(problem: Problem, block: int, channels: int, rows: int, threads: int) -> tuple[int, int]:
    """Blocks across, of `channels` channels each, and down: as many as keep `threads` threads busy, and as have
    something to do when a block takes `rows` rows at a time."""
    across = ceil_div(problem["OC"], channels)
    return across, max(1, min(threads // (block * across), ceil_div(_rows(problem), rows), MOST_DOWN))


def _packets_grid(problem: Problem, block: int, props: Props, depth: int) -> tuple[int, int]:
    """The grid of versions 7 to 9: all blocks are resident at once, so that none is left over for a second round."""
    return _grid(problem, block, _channels(problem, depth), block // WARP * depth, _resident(props))


def _channels(problem: Problem, depth: int) -> int:
    """Channels that a warp loads at once, when it loads `depth` rows."""
    return WARP // depth * PACKET[problem.storage]


def _resident(props: Props) -> int:
    """Threads of versions 7 to 10 that the GPU holds at once."""
    return props.multiprocessors * min(
        props.threads_per_multiprocessor, props.registers_per_multiprocessor // REGISTERS
    )


def _packets_kernel(problem: Problem, number: int, *arguments: int) -> str:
    aligned = "true" if problem["OC"] % PACKET[problem.storage] == 0 else "false"
    return f"matmul_backward_bias{number}<{', '.join(map(str, (problem.c_type, aligned, *arguments)))}>"


def _sums(problem: Problem, block: int, props: Props) -> tuple[Tensor, ...]:
    return (Tensor("sums", (problem["OC"],), "fp32", "scratch", ("o",)),)


def _add_atomically(problem: Problem, kernel: str, grid: tuple[int, int], block: int) -> tuple[Step, ...]:
    args = ("sums", "dout", _rows(problem), problem["OC"])
    return Fill(Ref("sums")), Launch(kernel, grid, (block,), args), _join(problem, "sums")


def _plan5(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    threads = props.multiprocessors * props.threads_per_multiprocessor
    grid = _grid(problem, block, block, 1, threads)
    return _add_atomically(problem, f"matmul_backward_bias5<{problem.c_type}>", grid, block)


def _plan7(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    grid = _packets_grid(problem, block, props, 1)
    return _add_atomically(problem, _packets_kernel(problem, 7), grid, block)


def _plan8(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    grid = _packets_grid(problem, block, props, DEPTH)
    if grid[1] == 1:
        return (_all_rows(problem, DEPTH, block),)
    return _add_atomically(problem, _packets_kernel(problem, 8), grid, block)


# Of a row, by the lanes of a warp. Eight are a line of 128 bytes; four are half of one, and sixteen two.
ACROSS = Param(default=WARP // DEPTH, values=(4, 8, 16), meaning="packets of a row that a warp loads at once")


def _plan9(problem: Problem, block: int, props: Props, ACROSS: int) -> tuple[Step, ...]:
    depth = WARP // ACROSS
    grid = _packets_grid(problem, block, props, depth)
    if grid[1] == 1:
        return (_all_rows(problem, depth, block),)
    args = ("partials", "dout", _rows(problem), problem["OC"])
    own = Launch(_packets_kernel(problem, 9, ACROSS), grid, (block,), args)
    return own, _join(problem, "partials", grid[1])


def _plan10(problem: Problem, block: int, props: Props) -> tuple[Step, ...]:
    """One kernel where that is faster. Reading half lines costs about a fifth of the bandwidth, and a second kernel a
    few microseconds, in which a GPU reads about a fifth of its L2. So dout is not to be larger than L2, a rule of
    thumb. And blocks that have all rows must bring enough bytes under way: with eight packets in each thread, a quarter
    of the threads that the GPU could hold will do."""
    small = ITEM_SIZES[problem.storage] * _rows(problem) * problem["OC"] <= props.l2_bytes
    threads = ceil_div(problem["OC"], _channels(problem, DEEPER)) * block
    if small and threads >= _resident(props) // 4:
        return (_all_rows(problem, DEEPER, block),)
    return _plan9(problem, block, props, ACROSS.default)


def _all_rows(problem: Problem, depth: int, block: int) -> Launch:
    """Blocks that have all rows of their channels, `depth` rows to a warp at once."""
    grid = (ceil_div(problem["OC"], _channels(problem, depth)),)
    return _into_dbias(problem, _packets_kernel(problem, 10, WARP // depth), "dout", grid, block)


def _partials(problem: Problem, block: int, props: Props, ACROSS: int = ACROSS.default) -> tuple[Tensor, ...]:
    _, down = _packets_grid(problem, block, props, WARP // ACROSS)
    return (Tensor("partials", (down, problem["OC"]), "fp32", "scratch", ("block", "o")),)


# ----------------------------------------------------------------------------------------------- family


def _version(number: int, idea: str, plan: PlanFunction, **options: Any) -> Version:
    return Version(number, idea, plan, DTYPES, BLOCK_SIZES, **options)


VERSIONS = (
    _version(
        1, "one block per channel: threads stride over the rows, then a tree in shared memory",
        _by_channels("matmul_backward_bias1", lambda block: 1),
    ),
    _version(
        2, "one warp per channel: shuffles, no shared memory, no barrier",
        _by_channels("matmul_backward_bias2", lambda block: block // WARP),
    ),
    _version(
        3, "one block per channel: shuffles within warps, then over the warps' sums",
        _by_channels("matmul_backward_bias3", lambda block: 1),
    ),
    _version(
        4, "one block per 32 neighbouring channels: loads coalesce",
        _by_channels("matmul_backward_bias4", lambda block: WARP, types=2),
    ),
    _version(
        5, "one thread per channel, rows shared among many blocks: fp32 atomics join their sums",
        _plan5, scratch=_sums, claims_deterministic=False,
    ),
    _version(
        7, "as 5, 16-byte loads, eight rows under way; a block's sums meet in shared memory",
        _plan7, scratch=_sums, claims_deterministic=False,
    ),
    _version(
        8, "as 7, warps 8 packets wide, 4 rows deep: shuffles in place of shared-memory atomics",
        _plan8, scratch=_sums, claims_deterministic=False,
    ),
    _version(
        9, "as 8, no atomics at all: a row of sums per block, added up by version 4's kernel",
        _plan9, scratch=_partials, params={"ACROSS": ACROSS},
    ),
    _version(
        10, "as 9, one kernel where dout is small: blocks of half lines that have all rows", _plan10, scratch=_partials
    ),
)  # fmt: skip


def _shape(
    B: int, T: int, OC: int, accumulate: int, why: str, versions: tuple[int, ...] | None = None,
    blocks: tuple[int, ...] | None = None,
) -> CheckShape:  # fmt: skip
    return CheckShape({"B": B, "T": T, "OC": OC, "accumulate": accumulate}, why, versions, blocks)


CHECK_SHAPES = (
    _shape(1, 1, 1, 0, "one of everything"),
    _shape(1, 1, 2, 1, "one row, added to what is there"),
    _shape(1, 7, 5, 1, "prime sizes, less than a warp, rows not aligned"),
    _shape(2, 65, 3, 0, "more rows than most blocks have threads, rows not aligned"),
    _shape(1, 33, 8, 0, "one row past a warp, aligned rows"),
    _shape(5, 13, 33, 1, "one channel past a warp"),
    _shape(3, 43, 65, 0, "one channel past 64, one row past 128", (4, 5, 7, 8, 9, 10)),
    _shape(1, 97, 136, 1, "aligned rows, several blocks across, the last one partly empty", (4, 5, 7, 8, 9, 10)),
    _shape(1, 41, 257, 1, "one channel past a warp's packets", (7, 8, 9, 10)),
    _shape(1, 10, 12, 1, "rows of whole halves of a 16-bit packet", (7, 8, 9, 10), (32, 256)),
    _shape(1, 10, 6, 0, "rows of whole halves of an fp32 packet", (7, 8, 9, 10), (32, 256)),
    _shape(31, 103, 8, 1, "many rows, aligned: several batches per thread", None, (32, 256, 1024)),
    _shape(31, 103, 3, 0, "many rows, not aligned: several batches per thread", None, (64, 768)),
)

FAMILY = Family(
    name="matmul_backward_bias",
    summary="bias gradient of a linear layer: the column sums of dout",
    sizes={
        "B": "batch size",
        "T": "sequence length",
        "OC": "output channels",
        "accumulate": "1: add to dbias, 0: replace it",
    },
    dtypes=DTYPES,
    presets={
        "default": {"B": 8, "T": 1024, "OC": 3072, "accumulate": 1},
        "small": {"B": 2, "T": 64, "OC": 192, "accumulate": 1},
        "large": {"B": 64, "T": 1024, "OC": 8192, "accumulate": 1},
    },
    check_shapes=CHECK_SHAPES,
    tensors=_tensors,
    reference=_reference,
    versions=VERSIONS,
    rules=(Rule("B * T below 2^31", lambda problem: _rows(problem) < 2**31),),
    flags=("accumulate",),
)
