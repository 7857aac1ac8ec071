"""What one card does at most, as a record, and how near a time comes to it.

`kbench.measure.ceilings` measures it; results, summaries and pages read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Ceilings:
    """The most that one card does. copy_gbs: bytes read and written in 1e9 a second; None where it was not measured.
    copy_by: what copied them. gemm_tflops: by compute dtype, those that were measured. gemm_size: rows and columns of
    the matrices, the smallest where memory was too short for all dtypes to have the same. notes: what is missing or
    not to be trusted, and why: a sentence each.
    """

    copy_gbs: float | None = None
    copy_by: str = ""
    copy_bytes: int = 0
    gemm_tflops: Mapping[str, float] = field(default_factory=dict)
    gemm_size: int = 0
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gemm_tflops": dict(self.gemm_tflops), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ceilings:
        """The reverse of `to_dict`; unknown keys of a newer record are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{**{key: value for key, value in data.items() if key in known}, "notes": tuple(data["notes"])})


def share_of_ceiling(
    nbytes: float | None, flops: float | None, dtype: str, milliseconds: float, ceilings: Ceilings
) -> tuple[float, str] | None:
    """How near a time is to the least that this card could need, 1 being as fast, and which ceiling sets that least:
    "copy" or "gemm". None where neither is known."""
    least = []
    if nbytes and ceilings.copy_gbs:
        least.append((nbytes / ceilings.copy_gbs / 1e6, "copy"))
    if flops and ceilings.gemm_tflops.get(dtype):
        least.append((flops / ceilings.gemm_tflops[dtype] / 1e9, "gemm"))
    if not least or not milliseconds > 0:
        return None
    time, which = max(least)
    return time / milliseconds, which
