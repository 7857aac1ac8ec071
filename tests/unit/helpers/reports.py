"""Reports for tests of the surfaces: every verdict, none, a thousand rows, another machine, and names made to break."""

from __future__ import annotations

import random
from dataclasses import replace

from kbench.report.model import VERDICTS, Change, Metric, Report, Side, Subject

TIME = Metric("time", "ms")
REGISTERS = Metric("registers", "", exact=True)
SPILLS = Metric("spill_bytes", "bytes", exact=True)
BANDWIDTH = Metric("bandwidth", "GB/s", worse=-1)

FACTS = {
    "device": "NVIDIA H200", "driver": "570.86.15", "compiler": "nvrtc 12.8.93", "kbench": "0.6.0",
    "revision": "3f1c2ab", "started": "2025-03-01T10:00:00+00:00",
}  # fmt: skip
BEFORE = Side("baseline", ("results/baselines/baseline.jsonl.gz",), ("20250301T100000-h200-3f1c",), FACTS, 63)
AFTER = Side(
    "latest", ("results/runs/20250308T093000-h200-9e0d.jsonl",), ("20250308T093000-h200-9e0d",),
    FACTS | {"revision": "9e0d771", "started": "2025-03-08T09:30:00+00:00"}, 64,
)  # fmt: skip
LIMITS = {"time": "3%", "registers": "0", "floor": "0.5 us", "confidence": "99.9% for all rows together"}


def subject(family: str = "layernorm_forward", version: int = 6, block: int = 256, **others: object) -> Subject:
    """A row that stands at line 100 plus its version of its family's file."""
    known: dict[str, object] = {"problem": "B=8 T=1024 C=768", "dtype": "bf16", "device": "NVIDIA H200"}
    known |= {"file": f"dev_kernels/{family}.cu", "line": 100 + version} | others
    return Subject(family, version, block=block, **known)  # type: ignore[arg-type]  # tests name the fields they set


def samples(median: float, seed: int, rounds: int = 5, each: int = 12, noise: float = 0.004) -> list[list[float]]:
    """Raw samples by round, with noise within and between rounds."""
    draw = random.Random(seed)
    shifts = [draw.gauss(1, noise / 2) for _ in range(rounds)]
    return [[median * shift * draw.gauss(1, noise) for _ in range(each)] for shift in shifts]


def timed(verdict: str, before: float, after: float, reason: str = "", seed: int = 1, **others: object) -> Change:
    """A time that has samples, and an interval of one percent about its ratio."""
    ratio = after / before
    known = Change(
        subject(), TIME, verdict, before, after, ratio, ratio * 0.99, ratio * 1.01, 0.999, 0.03, reason,
        rounds_before=samples(before, seed), rounds_after=samples(after, seed + 1),
    )  # fmt: skip
    return replace(known, **others)  # type: ignore[arg-type]  # as above


WRONG = Change(
    subject(version=5), TIME, "wrong", 0.4312, None,
    reason="out is wrong: 3 of 6291456 elements, first out[0, 17, 5]: 0.25 where 0.75 was expected",
    reproduce="kbench check layernorm_forward:5 --dtype bf16 --size B=1,T=18,C=768 --block-sizes 256 --seed 71",
)  # fmt: skip
SLOWER = timed(
    "slower", 0.4970, 0.5179, "+4.2% (+3.1% to +5.4%), limit 3%",
    reproduce="kbench compare git:3f1c2ab:layernorm_forward:6 layernorm_forward:6 --dtype bf16",
)  # fmt: skip
MORE_REGISTERS = Change(
    subject("attention_backward", 9, 128, kernel="attention_backward9<__nv_bfloat16, 64>"), REGISTERS, "slower",
    40, 44, 1.1, reason="40 to 44", reproduce="kbench inspect attention_backward:9 --arch sm_90",
)  # fmt: skip
OVER = Change(
    subject("matmul_forward", 3), SPILLS, "over budget", None, 16, reason="16 bytes, but kbench.toml:4 allows 0"
)
UNCLEAR = timed(
    "unclear", 0.0123, 0.0127, "+3.3% (-2.0% to +9.0%), limit 3%; 4 more rounds a side would settle it", seed=3,
    subject=subject("gelu_forward", 2, 512),
)  # fmt: skip
INCOMPARABLE = Change(
    subject("permute", 1), TIME, "incomparable", 0.2, 0.3, reason="driver 560.1 before, 570.86.15 after"
)
GONE = Change(subject("softmax_forward", 4, 1024), TIME, "gone", 0.31, None, reason="no such row after")
NEW = Change(subject("softmax_forward", 8, 1024), TIME, "new", None, 0.19, reason="no such row before")
FASTER = timed(
    "faster", 1.9, 1.6, "-15.8% (-16.7% to -14.9%), limit 3%", seed=5, subject=subject("crossentropy", 3, 64)
)
MORE_BANDWIDTH = replace(FASTER, metric=BANDWIDTH, before=2450.0, after=2910.0, ratio=1.188, low=1.17, high=1.2,
                         rounds_before=(), rounds_after=())  # fmt: skip
SAME = timed("same", 0.7, 0.701, seed=7, subject=subject("residual_forward", 2, 512))


def report(*changes: Change, **others: object) -> Report:
    """A report of these changes in the order that reports have."""
    ordered = sorted(changes, key=lambda change: VERDICTS.index(change.verdict))
    known = Report(BEFORE, AFTER, tuple(ordered), limits=LIMITS)
    return replace(known, **others)  # type: ignore[arg-type]  # as above


def everything() -> Report:
    """Each verdict at least once, exact metrics among them."""
    same = [
        replace(SAME, subject=subject("residual_forward", version, block))
        for version in (1, 2)
        for block in (128, 256, 512)
    ]
    return report(
        WRONG, SLOWER, MORE_REGISTERS, OVER, UNCLEAR, INCOMPARABLE, GONE, NEW, FASTER, MORE_BANDWIDTH, *same,
        exit_status=3,
    )  # fmt: skip


def fine() -> Report:
    return report(*(replace(SAME, subject=subject(version=version)) for version in range(1, 58)))


def empty() -> Report:
    return Report(Side("baseline"), Side("latest"), (), exit_status=4)


def many(number: int = 1000, verdict: str = "slower") -> Report:
    """So many rows of one verdict, and as many unchanged: what does not fit a comment."""
    changes = [replace(SLOWER, subject=subject(version=index), verdict=verdict) for index in range(1, number + 1)]
    same = [replace(SAME, subject=subject("residual_forward", index)) for index in range(1, number + 1)]
    return report(*changes, *same, exit_status=1)


def machine_differs() -> Report:
    """Every row slower by as much: none is a regression, and the report says why."""
    changes = [
        replace(INCOMPARABLE, subject=subject(version=version), before=0.5, after=0.55, ratio=1.1,
                reason="machine differs: +10.0% where all rows moved by +10.1%")
        for version in range(1, 7)
    ]  # fmt: skip
    other = replace(AFTER, facts=AFTER.facts | {"device": "NVIDIA H100 80GB HBM3", "host": "runner-2"})
    finding = "machine differs: all 6 rows moved by +10.1% (+9.8% to +10.4%); compare on one machine"
    return report(*changes, after=other, findings=(finding,), exit_status=4)


# What each format is broken by: its own delimiters, markup, links, mentions, control characters, escapes of a
# terminal, a null, half a pair of surrogates, a code point that XML lacks, a letter that turns the line around.
NASTY = (
    " a|b `c` ``` <script>alert(1)</script> <!-- --> ]]> &amp; &#60; \"q\" 'q' \\| \\ \n\r\n## h | x\r::error::y"
    " %0A %\t,:\x1b[31m \x00 \x0b \x85 \u2028 \ud800 \ufffe \u202e @256 #12 [l](https://evil.example) www.evil.example"
    " **b** _i_ ~~s~~ $x$ {0} <b onclick=x> </td></table></details> é 測試 🔥 `"
)


def nasty(verdict: str = "") -> Report:
    """`NASTY` in every field of every verdict, or of one."""
    bad = Subject(NASTY, 3, NASTY, NASTY, 64, NASTY, NASTY, NASTY, NASTY, NASTY, 7)
    known = Change(
        bad, Metric(NASTY, NASTY), "same", 0.5, 0.6, 1.2, 1.1, 1.3, 0.999, 0.03, NASTY, NASTY,
        samples(0.5, 1, 3, 4), samples(0.6, 2, 3, 4),
    )  # fmt: skip
    odd = replace(known, before=float("nan"), after=float("inf"), ratio=float("inf"), low=None, high=float("nan"),
                  rounds_before=[[float("nan"), -1.0, 0.0]], rounds_after=[[]])  # fmt: skip
    changes = [replace(one, verdict=name) for name in VERDICTS if verdict in ("", name) for one in (known, odd)]
    changes += [replace(known, metric=Metric(NASTY, NASTY, exact=True), verdict=verdict or "slower")]
    side = Side(NASTY, (NASTY,), (NASTY,), {NASTY: NASTY, "device": NASTY, "started": NASTY, "host": NASTY}, 1)
    return report(
        *changes, before=side, after=side, findings=(NASTY,), limits={NASTY: NASTY}, fail_on=("regression", NASTY)
    )
