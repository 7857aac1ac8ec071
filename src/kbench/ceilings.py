"""What one card does at most, as a record, and how near a time comes to it.

`kbench.measure.ceilings` measures it; results, summaries and pages read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

# The fields that hold one number each: what it is called, and its unit.
_FIGURES = {
    "copy_gbs": ("copy", "GB/s"),
    "read_gbs": ("read", "GB/s"),
    "write_gbs": ("write", "GB/s"),
    "l2_gbs": ("L2 read", "GB/s"),
    "fma_tflops": ("fp32 FMA", "TFLOP/s"),
    "launch_us": ("launch", "us"),
    "host_launch_us": ("host launch", "us"),
}


@dataclass(frozen=True)
class Evidence:
    """How one ceiling was measured. low, high: the 95% interval of its median, in the unit of the ceiling. how: on
    what, in words."""

    low: float
    high: float
    how: str


@dataclass(frozen=True)
class Figure:
    """One ceiling by itself. evidence: None where it was not kept, as in records of an older kbench."""

    name: str
    value: float
    unit: str
    evidence: Evidence | None


@dataclass(frozen=True)
class Ceilings:
    """The most that one card does; None, or not there, what was not measured.

    copy_gbs: bytes read and written in 1e9 a second. copy_by: what copied them; copy_bytes: how many it read.
    read_gbs, write_gbs: of memory, where nothing is written or read beside it. l2_gbs: read from a buffer in L2.
    gemm_tflops: by compute dtype. gemm_size: rows and columns of the matrices, the smallest where memory was too short
    for all dtypes to have the same. fma_tflops: fp32 multiply-adds outside of tensor cores, two operations each.
    launch_us: microseconds that each launch adds to a chain of launches of a kernel that does nothing.
    host_launch_us: those that the host takes to queue one.
    evidence: by the name that `figures` gives a ceiling. measured: when, as 2026-11-29T12:00:05Z.
    notes: what is missing or not to be trusted, and why: a sentence each.
    """

    copy_gbs: float | None = None
    copy_by: str = ""
    copy_bytes: int = 0
    gemm_tflops: Mapping[str, float] = field(default_factory=dict)
    gemm_size: int = 0
    notes: tuple[str, ...] = ()
    read_gbs: float | None = None
    write_gbs: float | None = None
    l2_gbs: float | None = None
    fma_tflops: float | None = None
    launch_us: float | None = None
    host_launch_us: float | None = None
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    measured: str = ""

    def figures(self) -> list[Figure]:
        """Those that are known, bandwidths first."""
        known = {label: (getattr(self, name), unit) for name, (label, unit) in _FIGURES.items()}
        launches = {label: known.pop(label) for label in ("launch", "host launch")}
        known |= {gemm_name(dtype): (rate, "TFLOP/s") for dtype, rate in self.gemm_tflops.items()} | launches
        found = known.items()
        return [Figure(name, value, unit, self.evidence.get(name)) for name, (value, unit) in found if value]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gemm_tflops": dict(self.gemm_tflops), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ceilings:
        """The reverse of `to_dict`. Fields that an older kbench did not have are not known, and keys of a newer one
        ignored. Raises ValueError for what is no record of ceilings."""
        data = _mapping(data)
        evidence = {
            name: Evidence(_number(entry.get("low")), _number(entry.get("high")), _text(entry.get("how")))
            for name, entry in ((name, _mapping(entry)) for name, entry in _mapping(data.get("evidence")).items())
        }
        return cls(
            **{name: None if data.get(name) is None else _number(data[name]) for name in _FIGURES},
            copy_by=_text(data.get("copy_by", "")),
            copy_bytes=_size(data.get("copy_bytes", 0)),
            gemm_tflops={dtype: _number(rate) for dtype, rate in _mapping(data.get("gemm_tflops")).items()},
            gemm_size=_size(data.get("gemm_size", 0)),
            notes=tuple(_text(note) for note in _list(data.get("notes"))),
            evidence=evidence,
            measured=_text(data.get("measured", "")),
        )


def gemm_name(dtype: str) -> str:
    """What the ceiling of a dtype's matrix products is called."""
    return f"{dtype} GEMM"


def share_of_ceiling(
    nbytes: float | None, flops: float | None, dtype: str, milliseconds: float, ceilings: Ceilings, *, launches: int = 0
) -> tuple[float, str] | None:
    """How near a time is to the least that this card could need, 1 being as fast, and which ceiling sets that least.
    None where no ceiling says anything.

    "copy": `nbytes` at the rate of a copy, whatever share of them is read. "gemm": `flops` at the rate of the dtype's
    GEMMs, also where they are no GEMM's, because nothing that the card does in this dtype is faster; "fma": in fp32
    the faster of the GEMMs and the multiply-adds is the latter. "launch": so many launches after each other.
    """
    least = []
    if nbytes and ceilings.copy_gbs:
        least.append((nbytes / ceilings.copy_gbs / 1e6, "copy"))
    if flops and (rate := arithmetic_rate(dtype, ceilings)):
        least.append((flops / rate[0] / 1e9, rate[1]))
    if launches and ceilings.launch_us:
        least.append((launches * ceilings.launch_us / 1e3, "launch"))
    if not least or not milliseconds > 0:
        return None
    time, which = max(least)
    return time / milliseconds, which


def arithmetic_rate(dtype: str, ceilings: Ceilings) -> tuple[float, str] | None:
    """The highest rate known of a dtype, in 1e12 operations a second, and whose it is, "gemm" or "fma"."""
    rates = [(ceilings.gemm_tflops.get(dtype), "gemm")]
    if dtype == "fp32":  # the other dtypes' operations may run on tensor cores, for which FMA is no ceiling
        rates.append((ceilings.fma_tflops, "fma"))
    return max(((rate, whose) for rate, whose in rates if rate), default=None)


# ---------------------------------------------------------------------------------------------- reading


def _mapping(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"not a mapping: {value!r}")
    return value


def _list(value: object) -> list[Any] | tuple[Any, ...]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ValueError(f"not a list: {value!r}")
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"not a rate: {value!r}")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"not a size: {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r}")
    return value
