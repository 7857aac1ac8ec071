"""One row of results, as it is written to disk and shown in tables.

History of the schema (the first line of a run file holds its number):
1  first version: header with device, options and command; rows as `Row`.
2  rows have `traffic` and `flops`, and their `device` is the GPU's model (it was "cuda", and is still "emulator"
   there); `verdict["judge"]` may be "cupy"; the device of a sweep on a GPU has `ceilings` (`kbench.ceilings`).
3  rows have `source`, the fingerprint of the version's files.
4  `cache_mode` may be "graph"; measurements have `count`, `runs`, `conditions` and `second`; the device of a sweep or
   run on a GPU has `timer` (`kbench.measure.timer.Timer.facts`);
   the device's `ceilings` may have read, write and L2 bandwidth, FMA rate, launch times, their evidence and the time;
   rows of versions that declare parameters have their values in `params`, which was always empty before;
   rows have `steps` and `touched`, their kernels `spill_bytes` and `max_threads`; `source` stands in refused and lost
   rows too; the header has `selection` (what was swept, so that it can go on), its options `strategy` and `max_rows` of
   a search, its device `props`; a run that went on has rows after a footer.
5  rows have `round`, `code` and `metrics`; a header's options have `rounds`, its device (of a GPU) `limits` and its
   timer `version`; a run file may be compressed by gzip;
   `cache_mode` may be "static" (compiled for an architecture, which is the row's device, and not run; the header's
   device has `archs` and `cards`) or "counts" (run once on the emulator for what it asks of memory): "pass" is no
   proof there, see `Row.outcome`; a header's options have `archs`;
   a merged file has the headers of its runs in `sources`, and rows say in `run` which of them they are of;
   the header may have `revisions`, the commits that the kernels are of: [{"folder" ("kbench" for its own kernels, else
   that of a --family-dir), "commit", "dirty"}], of the folders that git knows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from kbench.errors import Exit
from kbench.params import place_text
from kbench.typed import fits, misfit

SCHEMA_VERSION = 5

# Cache modes of rows that nothing proves or times: versions compiled for an architecture, or counted on the emulator.
STATIC = "static"
COUNTS = "counts"
UNPROVEN = {STATIC: "compiled", COUNTS: "counted"}

# What became of a row, and the exit status that it stands for.
STATUSES = {
    "pass": Exit.OK,
    "refused": Exit.OK,  # a rule, dtype or block size of the version says no
    "skipped": Exit.OK,  # this device cannot run it (the emulator, tensor-core instructions)
    "fail": Exit.WRONG,
    "invalid": Exit.USAGE,  # it does not compile, or its plan is at fault
    "unable": Exit.CANNOT,  # too little memory, wrong card
    "unlaunchable": Exit.CRASHED,  # more threads, registers or shared memory than the device has
    "crashed": Exit.CRASHED,
    "hung": Exit.CRASHED,
    "internal": Exit.INTERNAL,  # a fault of kbench, or of a family file in a way that kbench did not foresee
}

# What every measurement has; the rest came with time.
_TIMES = ("median_ms", "low_ms", "high_ms")


# What a kernel says in whole numbers, where it says it; its name is text, grid and block are lists of such numbers.
_KERNEL = ("shared", "registers", "static_shared", "local_bytes", "spill_bytes", "max_threads")


def _is_time(value: Any) -> bool:
    return fits(value, float) and 0 < value <= sys.float_info.max  # a whole number may be beyond it, and under infinity


def _is_count(value: Any) -> bool:
    return fits(value, int) and 0 <= value <= sys.float_info.max


def _are_counts(values: Any) -> bool:
    return values is None or isinstance(values, list | tuple) and all(map(_is_count, values))


@dataclass
class Row:
    """One (family, version, problem, block size) on one device.

    reason: one line, for every status but pass; a passed row may have a note.
    details: further lines (a located failure, a compiler's log).
    reproduce: the command that repeats it. smaller: the same on the smallest failing check shape, if there is one.
    verdict: {"outputs": [{"name", "compared", "wrong", "used" (largest error over bound, or null)}],
        "deterministic": true/false/null, "judge": "numpy", or "cupy" where
        the reference of a very large problem ran on the GPU, "launches": n} or None where nothing was checked.
        A failed row also has "findings" [{"kind", "text"}] and, per output, "kind", "notes", "first", "worst".
    measurement: {"median_ms", "low_ms", "high_ms" (95% interval of the median), "q1_ms", "q3_ms",
        "samples_ms": [...], "warmups": n, "overhead_ms", "note", "conditions", "second", ...}
        (`kbench.measure.measurement.Measurement`) or None: always None on the emulator.
    kernels: [{"name", "grid", "block", "shared", "registers", "static_shared", "local_bytes", "spill_bytes",
        "max_threads"}] of the plan.
    steps: how many steps of each kind the plan has, such as {"Launch": 2, "Gemm": 1}; empty in older records.
    touched: bytes of the tensors that the plan's steps name (`kbench.work.touched_bytes`).
    overridden: --rtol/--atol replaced the bound: such a row can never win or be a baseline.
    traffic: bytes that any version has to read and write. flops: what the family counts, None where it counts none.
    params: values of the parameters that the version declares, by name; empty where it declares none.
    source: `kbench.source.fingerprint` of the version's files, "" where an older kbench wrote the row.
    seconds: wall time that the row took, of all its parts.
    round: which of several measurements of the same experiment in one run this is, from 0: rounds lie apart in time.
    code: a hash of the machine code and of how it is launched (`kbench.device.cuda.same_code.code_hash`); "" where that
        is not known, and for plans with steps of libraries.
    metrics: by a kernel's name, by the metric's name, counts that are exact for their compiler: of a row that was
        compiled `kbench.compiled.static_metrics`, of one that was counted `kbench.counted.count_metrics`.
    run: in a file that was merged of several runs, the id of the row's own; "" elsewhere.
    """

    family: str
    version: int
    idea: str
    sizes: dict[str, int]
    dtype: str
    block: int
    device: str
    status: str
    seed: int
    reason: str = ""
    details: list[str] = field(default_factory=list)
    reproduce: str = ""
    smaller: str = ""
    verdict: dict[str, Any] | None = None
    measurement: dict[str, Any] | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, int] = field(default_factory=dict)
    cache_mode: str = "cold"
    overridden: bool = False
    traffic: float | None = None
    flops: float | None = None
    steps: dict[str, int] = field(default_factory=dict)
    touched: float | None = None
    source: str = ""
    seconds: float = 0.0
    round: int = 0
    code: str = ""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    run: str = ""

    @property
    def exit_status(self) -> Exit:
        return STATUSES[self.status]

    @property
    def problem(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, self.params)

    @property
    def outcome(self) -> str:
        """The status, as people read it: what was only compiled or counted did not pass any check."""
        return UNPROVEN.get(self.cache_mode, self.status) if self.status == "pass" else self.status

    @property
    def may_win(self) -> bool:
        """Proven, timed, and by the family's own bound."""
        proven = self.status == "pass" and self.cache_mode not in UNPROVEN
        return proven and self.measurement is not None and not self.overridden

    @property
    def time_fault(self) -> str:
        """What is wrong with the times of a row that was timed; "" if nothing is."""
        taken = self.measurement
        if taken is None:
            return ""
        if not all(_is_time(taken.get(name)) for name in _TIMES):
            return f"a measurement has {', '.join(_TIMES)}, all above 0"
        samples = taken.get("samples_ms") or ()
        return (
            ""
            if isinstance(samples, list | tuple) and all(map(_is_time, samples))
            else "samples_ms are not all times above 0"
        )

    @property
    def kernel_fault(self) -> str:
        """What is wrong with what its kernels use; "" if nothing is."""
        for kernel in self.kernels:
            right = {"name": isinstance(kernel.get("name", ""), str)}
            right |= {name: _are_counts(kernel.get(name)) for name in ("grid", "block")}
            right |= {name: kernel.get(name) is None or _is_count(kernel[name]) for name in _KERNEL}
            if wrong := [name for name, fine in right.items() if not fine]:
                return f"{wrong[0]} of a kernel is {kernel[wrong[0]]!r}"[:60]
        return ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """Read a row written by this or an older schema; unknown keys of a newer one are ignored. Raises TypeError for
        what is no row."""
        if missing := _NEEDED - data.keys():
            raise TypeError(f"it lacks {', '.join(sorted(missing))}")
        row = cls(**(data if data.keys() <= _NAMES else {key: data[key] for key in data.keys() & _NAMES}))
        if wrong := misfit(cls, data):
            raise TypeError(wrong)
        return row


# Asked once: reports read rows by the hundred thousand.
_NAMES = frozenset(f.name for f in fields(Row))
_NEEDED = frozenset(f.name for f in fields(Row) if f.default is MISSING and f.default_factory is MISSING)


def upgraded(row: Row, header: Mapping[str, Any]) -> Row:
    """A row as today's schema has it. header: of its file, whose number says what the row's fields mean."""
    device = header.get("device")
    if header.get("schema") == 1 and row.device == "cuda" and isinstance(device, Mapping) and device.get("name"):
        row.device = str(device["name"])
    return row
