"""What the check must say of each version of the family `planted`, on the emulator and on a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kbench.results.schema import Row


@dataclass(frozen=True)
class Symptom:
    """status: those that a row may have. words: a pattern that its reason or details must hold. block: threads."""

    status: str
    words: str = ""
    block: int = 128

    def missing(self, row: Row) -> str:
        """What the row lacks; "" if it says what it must."""
        said = "\n".join((row.reason, *row.details))
        if row.status not in self.status.split("|"):
            return f"status {row.status} is not {self.status}: {said}"
        return "" if re.search(self.words, said) else f"no {self.words!r} in: {said}"


EMULATOR = {
    1: Symptom("pass"),
    2: Symptom("fail", r"^out: 2107 of 2107 elements wrong \(unwritten\)"),
    3: Symptom("fail", r"^out: 2107 of 2107 elements wrong \(zeros\)"),
    4: Symptom("fail", r"^out: 1 of 2107 elements wrong \(nan\), worst at \[n=6, c=300\]: .*got nan"),
    5: Symptom("fail", r"^out: 7 of 2107 elements wrong \(unwritten\)(.|\n)*only the last 7 elements"),
    6: Symptom("fail", r"^total: 7 of 7 .*\(nan\).*only with threads in forward order: a missing barrier or a race"),
    7: Symptom("fail", r"^total: 7 of 7", block=512),
    8: Symptom("fail", r"^changes its input inp: 1 of 2107 elements, first at \[n=0, c=5\]: was .*, is 0"),
    9: Symptom("fail", r"^writes outside out: 4 bytes changed right past the end|past the end of `?out"),
    10: Symptom("fail", r"^writes outside out: 4 bytes changed 4 bytes before the start"),
    11: Symptom("fail", r"^out: 59 of 2107 .*\(unwritten\)(.|\n)*from 16 times the block size 128 on"),
    12: Symptom("fail", r"^out: .*\(unwritten\).*all but the first: it keeps something between launches"),
    13: Symptom("fail", r"^claims to be deterministic, but \d elements of total differ"),
    14: Symptom("crashed", r"assert(.|\n)*kernel failing_assert, block .*thread .*planted\.cu:\d+"),
    15: Symptom("crashed", r"trap(.|\n)*kernel trapping, block .*thread .*planted\.cu:\d+"),
    16: Symptom("fail", r"__syncthreads(.|\n)*kernel divergent_barrier.*planted\.cu:\d+"),
    17: Symptom("hung", r"time limit(.|\n)*kernel endless.*planted\.cu:\d+"),
    18: Symptom("fail|hung", r"kernel waits_forever.*planted\.cu:\d+"),
    19: Symptom("crashed|fail", r"kernel wild.*planted\.cu:\d+"),
    20: Symptom("unlaunchable", r"kernel trapping: 1048576 bytes of dynamic shared memory, the device allows \d+"),
    21: Symptom("fail", r"^total: .*\(nan\).*memory that was not initialised"),
    22: Symptom("fail", r"^total: .*only where memory held bytes 0x46: it reads what it has not written"),
    24: Symptom("fail", r"^on patterned inputs: out: \d+ of \d+ elements wrong \(stale\)"),
    25: Symptom("pass"),
    26: Symptom("fail", r"^total: .*only where out is the same memory as inp, which the version allows"),
    27: Symptom("invalid", r"the plan never touches the output total"),
    28: Symptom("unlaunchable", r"argument 3 of kernel copy_ids<kRight> is int32, the plan passes the float 7.0"),
    29: Symptom("fail", r"^out: 2 of 2107 elements wrong(.|\n)*elements 0 to 1 in memory"),
    30: Symptom("fail", r"^out: 2107 of 2107 .*\(scaled\)(.|\n)*the reference times 1\.004"),
    31: Symptom("fail", r"^out: 2106 of 2107 .*\(shifted\)(.|\n)*the element 1 element before it"),
    32: Symptom("fail", r"^ids: 1 of 7 elements wrong, worst at \[n=3\]: reference (\d+), got \d+"),
    33: Symptom("fail", r"^out: 1 of 2107 elements wrong, worst at \[n=0, c=77\]"),
}

# At N=256 C=4099. A GPU has one order of threads, and its faults are known by kind and not by place.
GPU = {
    1: Symptom("pass"),
    2: Symptom("fail", r"^out: 1049344 of 1049344 elements wrong \(unwritten\)"),
    3: Symptom("fail", r"^out: 1049344 of 1049344 elements wrong \(zeros\)"),
    4: Symptom("fail", r"^out: 1 of 1049344 elements wrong \(nan\), worst at \[n=255, c=4098\]: .*got nan"),
    5: Symptom("fail", r"^out: 4 of 1049344 elements wrong \(unwritten\)(.|\n)*only the last 4 elements"),
    6: Symptom("fail", r"^total: \d+ of 256 elements wrong"),
    7: Symptom("fail", r"^total: \d+ of 256 elements wrong", block=512),
    8: Symptom("fail", r"^changes its input inp: 1 of 1049344 elements, first at \[n=0, c=5\]: was .*, is 0"),
    9: Symptom("fail", r"^writes outside out: 4 bytes changed right past the end"),
    10: Symptom("fail", r"^writes outside out: 4 bytes changed 4 bytes before the start"),
    11: Symptom("fail", r"^out: 256 of 1049344 .*\(unwritten\)(.|\n)*times the block size 512 on", block=512),
    12: Symptom("fail", r"^out: .*\(unwritten\).*all but the first: it keeps something between launches"),
    13: Symptom("fail", r"^claims to be deterministic, but \d+ elements of total differ"),
    14: Symptom("crashed", r"(?i)assert"),
    15: Symptom("crashed", r"(?i)trap|illegal instruction|launch fail"),
    16: Symptom("fail|hung"),  # the hardware may let both halves meet; then out was overwritten
    17: Symptom("hung", r"time limit"),
    18: Symptom("fail|hung"),
    19: Symptom("crashed", r"(?i)illegal"),
    20: Symptom("unlaunchable", r"kernel trapping.*1048576.*shared memory"),
    21: Symptom("fail", r"^total: .*memory that was not initialised"),
    22: Symptom("fail", r"^total: .*only where memory held bytes 0x46: it reads what it has not written"),
    23: Symptom("fail", r"^after the timed launches: out: 1 of 1049344 elements wrong"),
    25: Symptom("pass"),
    26: Symptom("fail", r"^total: .*only where out is the same memory as inp, which the version allows"),
    27: Symptom("invalid", r"the plan never touches the output total"),
    28: Symptom("unlaunchable", r"argument 3 of kernel copy_ids<kRight> is int32, the plan passes the float 256.0"),
    29: Symptom("fail", r"^out: 2 of 1049344 elements wrong(.|\n)*elements 0 to 1 in memory"),
    30: Symptom("fail", r"^out: 10493\d\d of 1049344 .*\(scaled\)(.|\n)*the reference times 1\.004"),
    31: Symptom("fail", r"^out: 1049343 of 1049344 .*\(shifted\)(.|\n)*the element 1 element before it"),
    32: Symptom("fail", r"^ids: 1 of 256 elements wrong, worst at \[n=128\]: reference (\d+), got \d+"),
    33: Symptom("fail", r"^out: 11 of 1049344 elements wrong"),
}

# These keep state that outlives prove: what catches them is the check after the timed launches. The replaying
# version holds 65,536 elements, too few for the size above.
AFTER_TIMING = {
    23: Symptom("fail", r"out: 1 of \d+ elements wrong, worst at \[n=0, c=0\]"),
    24: Symptom("fail", r"out: \d+ of \d+ elements wrong \(stale\)"),
}
