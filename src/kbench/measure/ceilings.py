"""What a card can do at most, measured on that very card: how fast it copies, reads, writes, multiplies and launches.

A kernel that moves bytes cannot be faster than a copy of as many bytes, nor one that multiplies matrices than the
library's best case. So a time that is near one of the two has nothing left to gain. Measured with kbench's own timer,
once for each card, power and clock limit, driver, compiler and library, and then kept in the cache; but what was
measured on a busy card (smaller sizes, beside other processes, or with anything to remark on) is measured again the
next time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kbench.ceilings import Ceilings, Evidence, gemm_name
from kbench.device.cuda import cache, card
from kbench.errors import CannotRunError, KernelFault, LaunchRefused
from kbench.measure import probes
from kbench.measure.probes import Found, Probes
from kbench.source import load_source

if TYPE_CHECKING:
    from kbench.device.cuda.device import CudaDevice

logger = logging.getLogger(__name__)

_CACHE = "ceilings"
_FORMAT = 3  # 1 kept what had been measured with small sizes too, 2 knew nothing but copies and GEMMs


def measured_ceilings(device: CudaDevice, note: Callable[[str], None]) -> Ceilings:
    """The ceilings of a device: from the cache, or measured now, after a note that says so."""
    return kept_or_measured(device, note)[0]


def kept_or_measured(
    device: CudaDevice, note: Callable[[str], None], *, again: bool = False, beside: str = ""
) -> tuple[Ceilings, bool]:
    """The ceilings of a device, and whether they come from the cache; `again`: never. beside: see `measure`."""
    kept = _kept(device)
    if kept is not None and not again:
        return kept, True
    note(f"measuring what {device.describe()['name']} can do at most")
    found = measure(device, beside)
    later = f"not kept; what was measured at {kept.measured} is" if kept else "the next sweep measures it again"
    if found.notes:  # what memory was too short for today may fit tomorrow
        more = f" (and {len(found.notes) - 1} more)" if len(found.notes) > 1 else ""
        note(f"{later}: {found.notes[0]}{more}")
    elif not cache.store(_CACHE, _key(device), found.to_dict()):
        note(f"{later}: the cache cannot be written; `kbench doctor` says why")
    return found, False


def _kept(device: CudaDevice) -> Ceilings | None:
    """What was measured before on this card as it is now; None where nothing was, or where it cannot be read."""
    entry = cache.load(_CACHE, _key(device))
    if entry is None:
        return None
    try:
        found = Ceilings.from_dict(entry[0])
    except ValueError as error:
        logger.warning("the ceilings in the cache are damaged (%s): measured again", error)
        return None
    return found if found.figures() else None


def _key(device: CudaDevice) -> dict[str, Any]:
    facts = device.describe()
    return {
        "format": _FORMAT, "gpu": facts["name"], **card.identity(device.ordinal), "driver": facts["driver"],
        "compiler": facts["compiler"], "cublaslt": _cublaslt_version(), "copy": probes.COPY_BYTES,
        "gemm": probes.GEMM_SIZE, "source": load_source(probes.SOURCE).digest,
    }  # fmt: skip


def _cublaslt_version() -> int | None:
    from kbench.device.cuda.gemm import CublasLt

    try:
        library = CublasLt()
    except CannotRunError:
        return None
    library.close()
    return library.version


def measure(device: CudaDevice, beside: str = "") -> Ceilings:
    """Measure now. What this machine lacks memory or a library for is a note, and so is what was measured with less
    than the wanted size, beside other processes, or drew a remark of the timer. A KernelFault that costs the context
    is raised. beside: who else uses the GPU, where the caller knows already."""
    run = _Run(device)
    before = beside or card.busy(device.ordinal)
    run.memory()
    run.one("L2 read", run.probes.l2)
    run.one("fp32 FMA", run.probes.fma)
    for dtype in probes.GEMM_DTYPES:
        run.gemm(dtype)
    run.launches()
    if used := before or card.busy(device.ordinal):
        run.notes.insert(0, f"measured beside others: {used}")
    return run.ceilings()


class _Run:
    """What has been found so far, by name, and what there is to say of it."""

    def __init__(self, device: CudaDevice):
        self.probes = Probes(device)
        self.found: dict[str, Found] = {}
        self.notes: list[str] = []
        self._copy_by, self._copy_bytes = "", 0
        self._gemm_sizes: list[int] = []

    def memory(self) -> None:
        missing = ["copy", "read", "write"]
        with self._noting(lambda: _listed(missing)):
            for name, found, size, by in self.probes.memory():
                missing.remove(name)
                self._keep(name, found)
                if name == "copy":
                    self._copy_by, self._copy_bytes = by, size
        self._small(_listed([n for n in ("copy", "read", "write") if n in self.found]), self._copy_bytes, "bytes")

    def gemm(self, dtype: str) -> None:
        with self._noting(lambda: gemm_name(dtype)):
            found, size = self.probes.gemm(dtype)
            self._keep(gemm_name(dtype), found)
            self._gemm_sizes.append(size)
            self._small(gemm_name(dtype), size, "rows and columns")

    def launches(self) -> None:
        with self._noting(lambda: "launches"):
            for name, found in self.probes.launches().items():
                self._keep(name, found)

    def one(self, name: str, probe: Callable[[], Found]) -> None:
        with self._noting(lambda: name):
            self._keep(name, probe())

    def ceilings(self) -> Ceilings:
        value = {name: found.value for name, found in self.found.items()}
        return Ceilings(
            copy_gbs=value.get("copy"),
            copy_by=self._copy_by,
            copy_bytes=self._copy_bytes,
            gemm_tflops={d: value[gemm_name(d)] for d in probes.GEMM_DTYPES if gemm_name(d) in value},
            gemm_size=min(self._gemm_sizes, default=0),
            notes=tuple(self.notes),
            read_gbs=value.get("read"),
            write_gbs=value.get("write"),
            l2_gbs=value.get("L2 read"),
            fma_tflops=value.get("fp32 FMA"),
            launch_us=value.get("launch"),
            host_launch_us=value.get("host launch"),
            evidence={name: Evidence(found.low, found.high, found.how) for name, found in self.found.items()},
            measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )

    def _keep(self, name: str, found: Found) -> None:
        self.found[name] = found
        if found.remark:
            self.notes.append(f"{name}: {found.remark}")

    def _small(self, what: str, size: int, unit: str) -> None:
        wanted = probes.COPY_BYTES if unit == "bytes" else probes.GEMM_SIZE
        if 0 < size < wanted:
            self.notes.append(f"{what} measured with {size:,} {unit}, not {wanted:,}: GPU memory is short")

    @contextmanager
    def _noting(self, what: Callable[[], str]) -> Iterator[None]:
        """Note what cannot be measured, and why, in place of raising it."""
        try:
            yield
        except (CannotRunError, LaunchRefused) as error:
            self.notes.append(f"{what()} not measured: {error}")
        except KernelFault as error:
            if error.context_lost:
                raise
            self.notes.append(f"{what()} not measured: {error}")


def _listed(names: list[str]) -> str:
    """ "copy, read and write"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
