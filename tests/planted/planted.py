"""The contract of the planted bugs: see planted.cu for what each version does wrong."""

from kbench.family import (
    CheckShape,
    Expected,
    Family,
    Fill,
    Launch,
    Ref,
    Rule,
    Tensor,
    Version,
    integers,
    normal,
    uniform,
)


def tensors(problem):
    rows, columns = problem["N"], problem["C"]
    return (
        Tensor("inp", (rows, columns), "fp32", "in", ("n", "c"), normal(0.3, 1.0)),
        Tensor("scale", (rows,), "fp32", "in", ("n",), uniform(0.5, 2.0)),
        Tensor("tags", (rows,), "int32", "in", ("n",), integers(0, 50257)),
        Tensor("out", (rows, columns), "fp32", "out", ("n", "c")),
        Tensor("total", (rows,), "fp32", "out", ("n",)),
        Tensor("ids", (rows,), "int32", "out", ("n",), exact=True),
    )


def reference(problem, inputs, error, xp):
    inp, scale = inputs["inp"], inputs["scale"]
    product = inp * scale[:, None]
    magnitude = xp.abs(product)
    terms = magnitude.sum(axis=1)
    return {
        "out": Expected(product + 1.0, error.accumulation(2) * (magnitude + 1.0)),
        "total": Expected(product.sum(axis=1), (error.accumulation(problem["C"]) + error.fp32) * terms),
        "ids": Expected(inputs["tags"]),
    }


def affine(problem, block, kernel="affine<kRight>", out="out", grid=None):
    grid = grid or -(-problem["N"] * problem["C"] // block)
    return (Launch(kernel, (grid,), (block,), (out, "inp", "scale", problem["N"], problem["C"])),)


def totals(problem, block, kernel="totals<kRight>", scratch=()):
    return (Launch(kernel, (problem["N"],), (block,), ("total", *scratch, "inp", "scale", problem["C"])),)


def copy_ids(problem, block, kernel="copy_ids<kRight>"):
    return (Launch(kernel, (-(-problem["N"] // block),), (block,), ("ids", "tags", problem["N"])),)


def plan_with(**wrong):
    """The right plan with some of its three parts replaced, each by a function of (problem, block)."""
    parts = {"affine": affine, "totals": totals, "copy_ids": copy_ids} | wrong
    return lambda problem, block, props: tuple(step for part in parts.values() for step in part(problem, block))


def affine_bug(bug):
    return plan_with(affine=lambda problem, block: affine(problem, block, f"affine<{bug}>"))


def totals_bug(bug):
    return plan_with(totals=lambda problem, block: totals(problem, block, f"totals<{bug}>"))


def followed_by(*steps):
    """The right plan and then one more launch."""
    return plan_with(last=lambda problem, block: tuple(Launch(kernel, (1,), (block,), args) for kernel, args in steps))


def whole_blocks_only(problem, block):
    return affine(problem, block, grid=problem["N"] * problem["C"] // block)


def skips_done_work(problem, block):
    return (*affine(problem, block, "affine<kStale>"), Launch("mark_done", (1,), (block,), ()))


def atomic_totals(problem, block):
    grid = (-(-problem["C"] // block), problem["N"])
    return (
        Fill(Ref("total"), 0.0),
        Launch("totals_atomic", grid, (block,), ("total", "inp", "scale", problem["C"])),
    )


def expires(problem, block):
    return (Launch("count_launch", (1,), (block,), ()), *affine(problem, block, "affine<kExpires>"))


def replays(problem, block):
    return (*affine(problem, block, "affine_replay"), Launch("mark_replay", (1,), (block,), ()))


def in_place(problem, block, props):
    return (*totals(problem, block), *copy_ids(problem, block), *affine(problem, block))


def greedy(problem, block):
    return (Launch("trapping", (1,), (block,), ("scale",), shared=1 << 20),)


def float_for_int(problem, block):
    return (Launch("copy_ids<kRight>", (1,), (block,), ("ids", "tags", float(problem["N"]))),)


def row_sums(problem, block, props):
    return (Tensor("sums", (problem["N"],), "fp32", "scratch", ("n",)),)


def scratch_totals(kernel):
    return plan_with(totals=lambda problem, block: totals(problem, block, kernel, ("sums",)))


def version(number, idea, plan, **more):
    return Version(number, idea, plan, ("fp32",), **more)


family = Family(
    name="planted",
    summary="a right kernel and many wrong ones",
    sizes={"N": "rows", "C": "columns"},
    dtypes=("fp32",),
    presets={"default": {"N": 256, "C": 4099}, "small": {"N": 7, "C": 301}},
    check_shapes=(CheckShape({"N": 7, "C": 301}, "odd, no multiple of any block"),),
    tensors=tensors,
    reference=reference,
    # With fewer elements version 11 would launch no block of 1024 threads at all.
    rules=(Rule("N * C of at least 1024", lambda problem: problem["N"] * problem["C"] >= 1024),),
    versions=(
        version(1, "right", plan_with()),
        version(2, "writes nothing", affine_bug("kNothing")),
        version(3, "writes zeros", affine_bug("kZeros")),
        version(4, "one NaN, the last element", affine_bug("kLastNan")),
        version(5, "skips the last elements", affine_bug("kTail")),
        version(6, "lacks a barrier", totals_bug("kNoBarrier")),
        version(7, "right only with 8 warps", totals_bug("kEightWarps")),
        version(8, "spoils an input", affine_bug("kSpoil")),
        version(9, "writes one element past the end", affine_bug("kPast")),
        version(10, "writes one element before the start", affine_bug("kBefore")),
        version(11, "right only at multiples of a block", plan_with(affine=whole_blocks_only)),
        version(12, "skips work that it did before", plan_with(affine=skips_done_work)),
        version(13, "adds up in no fixed order", plan_with(totals=atomic_totals)),
        version(14, "a failing assert", followed_by(("failing_assert", ("scale",)))),
        version(15, "traps", followed_by(("trapping", ("scale",)))),
        version(16, "a barrier in a divergent branch", followed_by(("divergent_barrier", ("out",)))),
        version(17, "never ends", followed_by(("endless", ("scale",)))),
        version(18, "waits for threads that never come", followed_by(("waits_forever", ("out",)))),
        version(19, "writes to a wild address", followed_by(("wild", ("out",)))),
        version(20, "asks for 1 MiB of shared memory", plan_with(last=greedy)),
        version(21, "adds to scratch that nobody cleared", scratch_totals("totals_add_scratch"), scratch=row_sums),
        version(22, "a maximum with uncleared scratch", scratch_totals("totals_max_scratch"), scratch=row_sums),
        version(23, "right for six launches, then wrong", plan_with(affine=expires)),
        version(24, "replays its first result", plan_with(affine=replays)),
        version(25, "in place, right", in_place, aliases=(("inp", "out"),)),
        version(26, "in place, reads what it has overwritten", plan_with(), aliases=(("inp", "out"),)),
        version(27, "never touches an output", lambda problem, block, props: affine(problem, block)),
        version(28, "passes a float for an int", plan_with(copy_ids=float_for_int)),
        version(29, "one element too large, the next too small", affine_bug("kCancel")),
        version(30, "everything 0.4% too large", affine_bug("kScaled")),
        version(31, "one element off", affine_bug("kShifted")),
        version(32, "one wrong id", plan_with(copy_ids=lambda p, b: copy_ids(p, b, "copy_ids<kWrongId>"))),
        version(33, "spoils one element in a hundred thousand", affine_bug("kOneInMany")),
    ),
)
