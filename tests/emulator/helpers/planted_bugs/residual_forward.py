"""Bugs in an elementwise kernel: a missing tail, and elements past the end."""

from __future__ import annotations

from planted_bugs.bug import Bug

BUGS = {
    "one thread past the end adds, too": Bug("if (i < count)", "if (i <= count)", 1, 32, {"N": 13}),
    "the last tile is taken for a whole one": Bug(
        "if (count - start < tile) {", "if (count < tile) {", 2, 32, {"N": 1025}
    ),
    "elements past whole packets are left out": Bug(
        "i < count - start;", "i < (count - start) / kPacket * kPacket;", 2, 64, {"N": 33003}
    ),
    "a sum is cut instead of rounded": Bug(
        "return from_float<T>(to_float(a) + to_float(b));",
        "return from_float<T>(__int_as_float(__float_as_int(to_float(a) + to_float(b)) & 0xffff0000));",
        1, 64, {"N": 509},
    ),
}  # fmt: skip
