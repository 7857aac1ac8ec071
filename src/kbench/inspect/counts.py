"""What the kernels of a version ask of memory, line by line: counted on the emulator.

Counts are exact for the code that the emulator's C++ compiler made, which merges and hoists accesses much as CUDA's
compilers do, but not always the same. Caches are not modelled: a sector counts each time that a warp touches it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kbench.catalog import Catalog, describe_fault, kernel_folder, load_catalog
from kbench.check.buffers import touched_tensors
from kbench.check.draw import draw_inputs
from kbench.device.base import Buffer
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator.counter import COUNTED_BLOCKS, CountingDevice, Frame, LaunchCounts, PlaceCounts
from kbench.device.host_memory import available_memory
from kbench.device.worker import Channel, Message, Worker, WorkerError, WorkerLost
from kbench.errors import CannotRunError, KernelFault, UsageError
from kbench.family import Problem, Step, Tensor, checked_plan, kernels_of
from kbench.params import place_text
from kbench.source import Source, load_source

SECTOR_BYTES = 32
# Inputs are the same each time, so that two runs count the same even where data decide what is accessed.
SEED = 1
# Beside its launches: drawing inputs, products of matrices in numpy, reading debug information.
_HOST_SECONDS = 600.0


@dataclass(frozen=True)
class Tally:
    """Sums over accesses. accesses: of a warp; of a block for barriers. lanes, bytes: of all its lanes. used: different
    bytes, access by access. sectors: of 32 bytes. wavefronts, ideal: of shared memory, and without bank conflicts."""

    accesses: int = 0
    lanes: int = 0
    bytes: int = 0
    used: int = 0
    sectors: int = 0
    wavefronts: int = 0
    ideal: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Tally)))

    def scaled(self, numerator: int, denominator: int) -> Tally:
        """For the blocks that were not counted. Whole numbers throughout, so that it is the same on every machine."""
        return Tally(*((getattr(self, e.name) * numerator + denominator // 2) // denominator for e in fields(Tally)))

    @property
    def efficiency(self) -> float | None:
        """Bytes used, of all in the sectors touched; None without any."""
        return self.used / (SECTOR_BYTES * self.sectors) if self.sectors else None

    @property
    def conflicts(self) -> float | None:
        """Wavefronts of shared memory, by those that it would take without conflicts; None without any."""
        return self.wavefronts / self.ideal if self.ideal else None


@dataclass(frozen=True)
class Place:
    """One line's accesses to one memory. kind: load, store, atomic or barrier. tensor: "" for shared memory and
    barriers. file, line: where it stands in the family's source; "" and 0 if unknown. helper: the place in a header,
    "common.cuh:71", if the line calls that. size: bytes of one lane's access."""

    file: str
    line: int
    helper: str
    kind: str
    tensor: str
    size: int


@dataclass(frozen=True)
class KernelCounts:
    """One kernel in all launches of a plan. blocks, counted: of all its grids; where they differ, counts are scaled."""

    kernel: str
    launches: int
    blocks: int
    counted: int
    places: Mapping[Place, Tally] = field(default_factory=dict)

    def sum(self, keep: Callable[[Place], bool]) -> Tally:
        """All that the places for which `keep` holds asked for."""
        return sum((tally for place, tally in self.places.items() if keep(place)), Tally())

    @property
    def totals(self) -> dict[str, Any]:
        """The whole kernel, as plain data. `global_*` are loads and stores; atomics on global memory stand apart."""
        moved = self.sum(lambda place: bool(place.tensor) and place.kind in ("load", "store"))
        shared = self.sum(lambda place: not place.tensor and place.kind != "barrier")
        atomics = self.sum(lambda place: place.kind == "atomic")
        return {
            "launches": self.launches,
            "blocks": self.blocks,
            "counted_blocks": self.counted,
            "scaled": self.counted != self.blocks,
            "global_accesses": moved.accesses,
            "global_bytes": moved.bytes,
            "global_used": moved.used,
            "global_sectors": moved.sectors,
            "efficiency": moved.efficiency,
            "shared_accesses": shared.accesses,
            "shared_bytes": shared.bytes,
            "shared_wavefronts": shared.wavefronts,
            "shared_ideal": shared.ideal,
            "barriers": self.sum(lambda place: place.kind == "barrier").accesses,
            "atomics": atomics.lanes,
            "atomic_sectors": atomics.sectors,
        }


@dataclass(frozen=True)
class Counts:
    """All kernels of one version at one problem and block size, in the order of the plan. compiler: whose code it is.
    lines_known: whether anything here can tell which line a place in the code belongs to."""

    family: str
    version: int
    problem: Problem
    block: int
    compiler: str
    kernels: tuple[KernelCounts, ...]
    others: Mapping[str, int]
    lines_known: bool
    texts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    params: Mapping[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Block size and parameters, for people."""
        return place_text(self.block, self.params)

    def text(self, place: Place) -> str:
        """The line of source of a place, without its indentation."""
        return self.texts.get(place.file, {}).get(place.line, "")

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "family": self.family,
            "version": self.version,
            "sizes": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "block": self.block,
            "params": dict(self.params),
            "compiler": self.compiler,
            "lines_known": self.lines_known,
            "other_steps": dict(self.others),
            "kernels": [
                {
                    "kernel": kernel.kernel,
                    **kernel.totals,
                    "places": [
                        {**asdict(place), "source": self.text(place), **asdict(tally), "efficiency": tally.efficiency}
                        for place, tally in kernel.places.items()
                    ],
                }
                for kernel in self.kernels
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Counts:
        """The reverse of `to_dict`."""
        kernels, texts = [], dict[str, dict[int, str]]()
        for kernel in data["kernels"]:
            places = {}
            for each in kernel["places"]:
                place = Place(*(each[f.name] for f in fields(Place)))
                places[place] = Tally(*(each[f.name] for f in fields(Tally)))
                texts.setdefault(place.file, {})[place.line] = each["source"]
            numbers = (kernel["launches"], kernel["blocks"], kernel["counted_blocks"])
            kernels.append(KernelCounts(kernel["kernel"], *numbers, places))
        problem = Problem(data["sizes"], data["dtype"])
        return cls(
            data["family"], data["version"], problem, data["block"], data["compiler"], tuple(kernels),
            data["other_steps"], data["lines_known"], texts, data["params"],
        )  # fmt: skip


def kernel_counts(
    catalog: Catalog, name: str, number: int, problem: Problem, block: int, time_limit: float = 30.0
) -> dict[str, Any]:
    """What each kernel of a version asks of memory, as plain data: {"compiler": ..., "kernels": {kernel: totals}}.

    Totals are those of `KernelCounts.totals`. Compare only counts of one compiler: another merges other accesses.
    Raises as `count` does.
    """
    found = count(catalog, name, number, problem, block, time_limit)
    return {"compiler": found.compiler, "kernels": {kernel.kernel: kernel.totals for kernel in found.kernels}}


def count(
    catalog: Catalog,
    name: str,
    number: int,
    problem: Problem,
    block: int,
    time_limit: float = 30.0,
    blocks: int = COUNTED_BLOCKS,
    params: Mapping[str, int] | None = None,
) -> Counts:
    """Run a version on the emulator, in this process, and count what its kernels do.

    time_limit: seconds a launch. blocks: of each launch that are counted at most; the others run uncounted. params: its
    defaults if left out.
    Raises UsageError where the version refuses problem or block size, CannotRunError where the emulator cannot run it,
    or not within its memory and the time limit, KernelFault where a kernel is stopped, CompileError.
    """
    family, version = catalog[name], catalog.version(name, number)
    what = f"{name} version {number}"
    if version.gpu_only:
        raise CannotRunError(f"{what} cannot be counted: the emulator cannot run it: {version.gpu_only}")
    device = CountingDevice(time_limit, blocks)
    chosen = version.chosen(params or {})
    try:
        refusal = family.refusal(version, problem, block, chosen)
        plan = () if refusal else checked_plan(version.plan(problem, block, device.props, **chosen))
    except Exception as error:  # whatever a family's file raises
        path = Path(family.sources[number]).with_suffix(".py")
        raise UsageError(f"the plan of {what} fails: {describe_fault(error, path)}") from error
    if refusal:
        raise UsageError(f"{what} refuses this: {refusal}", f"`kbench list {name}` shows what it takes")
    source = load_source(Path(family.sources[number]), (kernel_folder(),))
    tensors = touched_tensors(family, version, problem, block, plan, device, chosen)
    _require_memory(what, problem, [*tensors, *family.tensors(problem)])
    inputs, _ = draw_inputs(name, family.tensors(problem), SEED, False)
    try:
        _run(device, source, plan, tensors, inputs)
    except KernelFault as fault:
        if fault.kind != "timeout":
            raise
        hint = "choose smaller sizes, such as --preset small, or raise --time-limit"
        raise CannotRunError(f"{what} at {problem}: a launch takes longer than {time_limit:g} s here", hint) from fault
    finally:
        device.close()
    kernels = _by_kernel(device.launches, source)
    others = Counter(type(step).__name__ for step in plan if type(step).__name__ != "Launch")
    lines_known = any(place.line for kernel in kernels for place in kernel.places)
    texts = {path.name: dict(enumerate(map(str.strip, text.splitlines()), 1)) for path, text in _files(source)}
    compiler = str(device.describe()["compiler"])
    return Counts(name, number, problem, block, compiler, kernels, dict(others), lines_known, texts, chosen)


def _require_memory(what: str, problem: Problem, tensors: Iterable[Tensor]) -> None:
    """Linux hands out memory that is not there, and ends the process that then uses it."""
    # A buffer, the drawn values as stored, and in 8 bytes while they are drawn.
    needed = sum(t.count * (2 * numpy_dtype(t.dtype).itemsize + 8) for t in {t.name: t for t in tensors}.values())
    free = available_memory()
    if needed > free:
        raise CannotRunError(
            f"{what} at {problem} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free",
            "choose smaller sizes",
        )


def _run(
    device: CountingDevice, source: Source, plan: Sequence[Step], tensors: Sequence[Tensor], inputs: Mapping[str, Any]
) -> None:
    kernels = kernels_of(plan)
    module = device.build(source, kernels) if kernels else None
    prepared = device.prepare(plan, module, tensors)
    buffers: dict[str, Buffer] = {}
    for tensor in tensors:
        buffers[tensor.name] = device.alloc(tensor)
        if tensor.role in ("in", "inout"):
            device.upload(buffers[tensor.name], inputs[tensor.name])
        else:
            device.poison(buffers[tensor.name], 0xFF)
    device.enqueue(device.bind(prepared, buffers))


def _by_kernel(launches: Iterable[LaunchCounts], source: Source) -> tuple[KernelCounts, ...]:
    found: dict[str, KernelCounts] = {}
    for launch in launches:
        known = found.get(launch.kernel, KernelCounts(launch.kernel, 0, 0, 0))
        places = dict(known.places)
        for each in launch.places:
            place = _place(each, source)
            tally = Tally(*(getattr(each, f.name) for f in fields(Tally)))
            places[place] = places.get(place, Tally()) + tally.scaled(launch.blocks, launch.counted)
        found[launch.kernel] = replace(
            known,
            launches=known.launches + 1,
            blocks=known.blocks + launch.blocks,
            counted=known.counted + launch.counted,
            places=places,
        )
    order = {kernel: dict(sorted(counts.places.items(), key=_order)) for kernel, counts in found.items()}
    return tuple(replace(counts, places=order[kernel]) for kernel, counts in found.items())


def _order(item: tuple[Place, Tally]) -> tuple[Any, ...]:
    place = item[0]
    return (place.file, place.line, place.kind, place.tensor, place.helper, place.size)


def _place(counts: PlaceCounts, source: Source) -> Place:
    """The innermost line of the family's own file; what stands in its headers is a helper that this line calls."""
    known = {str(path): path.name for path, _ in _files(source)}
    frames: list[Frame] = [(path, line) for path, line in counts.frames if path in known]
    own = next((frame for frame in frames if frame[0] == str(source.path)), None)
    chosen = own or (frames[0] if frames else ("", 0))
    helper = f"{known[frames[0][0]]}:{frames[0][1]}" if frames and frames[0] != chosen else ""
    return Place(known.get(chosen[0], ""), chosen[1], helper, counts.kind, counts.tensor, counts.size)


def _files(source: Source) -> list[tuple[Path, str]]:
    return [(source.path, source.text), *((path, text) for _, path, text in source.includes)]


# --------------------------------------------------------------------------------------------- in a process of its own


def count_apart(request: Message, family_dirs: Sequence[Path], note: Callable[[str], None]) -> Counts:
    """As `count`, in a process of its own: a kernel that is wrong may take it down.

    request: name, number, sizes, dtype, block, params, time_limit. Raises as `count` does, and KernelFault where the
    process dies.
    """
    worker = Worker("kbench.inspect.counts:serve", {"family_dirs": [str(folder) for folder in family_dirs]}, note)
    try:
        return Counts.from_dict(worker.call(request))
    except WorkerLost as lost:
        raise lost.fault from None
    except WorkerError as error:
        raise RuntimeError(error.trace) from error
    finally:
        if worker.alive:
            worker.kill()


class _Handler:
    """Answers one request of `count_apart`."""

    def __init__(self, channel: Channel, family_dirs: Sequence[str]):
        self.channel = channel
        self.catalog = load_catalog([Path(folder) for folder in family_dirs])

    def handle(self, request: Message) -> Any:
        name, number, limit = request["name"], request["number"], request["time_limit"]
        with self.channel.limit(_HOST_SECONDS, f"counting {name} version {number}"):
            try:
                problem = Problem(request["sizes"], request["dtype"])
                found = count(self.catalog, name, number, problem, request["block"], limit, params=request["params"])
                return found.to_dict()
            except MemoryError as error:
                raise CannotRunError("not enough main memory for the inputs", "choose smaller sizes") from error


def serve(channel: Channel, **options: Any) -> _Handler:
    """The process's entry: see `kbench.device.worker`."""
    return _Handler(channel, **options)
