"""Reading what `ncu --csv --page raw` prints: one line a kernel launch, one column a metric, a line of units above.

Nothing here fails over a metric that is missing, unreadable or in a unit that is not known: it is left out. Versions
of ncu and GPUs differ in what they count, and the rest is still worth having.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kbench.errors import CannotRunError
from kbench.source import base_name

KERNEL = "Kernel Name"
_GRID, _BLOCK = "Grid Size", "Block Size"
_TRY_NCU = "another ncu may do: --ncu PATH"
# Units of ncu in base units: nanoseconds, bytes, and whatever a ratio or a count has. Its multiples are of 1000.
_SCALES = {
    "nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9,
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
# Metrics that mean nothing without a known unit. All others are counts, shares and ratios.
_MEASURED = re.compile(r"time_duration|bytes|shared_mem_per_block")


@dataclass(frozen=True)
class Profiled:
    """One launch of a kernel. name: as ncu writes it, with result and parameters. grid, block: () where ncu did not
    say. values: metric to its value: times in ns, sizes in bytes, shares in percent."""

    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)


def read_raw(text: str) -> list[Profiled]:
    """The launches in the order in which they ran.

    Raises CannotRunError if this is no such table: ncu's own messages around it are passed over.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if KERNEL in _cells(line)), None)
    if start is None:
        said = lines[-1].strip()[:200] if lines else "nothing"
        raise CannotRunError(f"cannot read what ncu printed: no column {KERNEL!r}; it ended with: {said}", _TRY_NCU)
    header, *table = csv.reader(io.StringIO("\n".join(lines[start:])))
    if "Metric Name" in header:
        raise CannotRunError("cannot read what ncu printed: not one column a metric", _TRY_NCU)
    units: Sequence[str] = ()
    if table and _is_units(header, table[0]):
        units, table = table[0], table[1:]
    return [_profiled(header, units, row) for row in table if len(row) == len(header)]


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _is_units(header: Sequence[str], row: Sequence[str]) -> bool:
    """The line of units has no kernel."""
    return len(row) == len(header) and not row[header.index(KERNEL)].strip()


def _profiled(header: Sequence[str], units: Sequence[str], row: Sequence[str]) -> Profiled:
    cells = dict(zip(header, row, strict=True))
    unit_of = dict(zip(header, units, strict=True)) if units else {}
    values = {}
    for name, cell in cells.items():
        if "__" in name and (value := number(cell)) is not None:
            scale = scale_of(name, unit_of.get(name))
            if scale is not None:
                values[name] = value * scale
    return Profiled(cells[KERNEL], _sizes(cells.get(_GRID, "")), _sizes(cells.get(_BLOCK, "")), values)


def number(cell: str) -> float | None:
    """`1,234.5` as a number; None for `n/a`, words, and what is not finite. What ncu adds in parentheses is the same
    metric by instance."""
    plain = cell.split("(")[0].strip().replace(",", "")
    try:
        value = float(plain)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def scale_of(metric: str, unit: str | None) -> float | None:
    """What to multiply a value with to have it in base units; None where its unit says nothing.

    unit: None where the table has no line of units: then ncu was asked for base units and is believed.
    """
    if unit is None or not _MEASURED.search(metric) or metric.endswith((".pct", "_rate", ".ratio")):
        return 1.0
    return _SCALES.get(unit.split("/")[0].strip())


def _sizes(cell: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", cell))


# ---------------------------------------------------------------------------------------------- names


def short_name(text: str) -> str:
    """`softmax<float, 256>` of `void softmax<float, (int)256>(float *, int)`."""
    plain = text.strip().removeprefix("void ").replace("(anonymous namespace)::", "").replace("(int)", "")
    depth = 0
    for position, letter in enumerate(plain):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return plain[:position].strip()
    return plain


def split_at(marker: str, kernels: Sequence[Profiled]) -> list[list[Profiled]]:
    """The kernels behind each launch of the kernel `marker`; what comes before the first belongs to none."""
    parts: list[list[Profiled]] = []
    for kernel in kernels:
        if plain_name(kernel.name) == marker:
            parts.append([])
        elif parts:
            parts[-1].append(kernel)
    return parts


def plain_name(text: str) -> str:
    """`softmax` of all of these: what tells one kernel of a plan from another whatever its template arguments."""
    return base_name(short_name(text))
