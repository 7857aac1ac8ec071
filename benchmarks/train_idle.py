"""How long the GPU has nothing to do during a training step of kbench, and which kernels it is busy with.

    python3 benchmarks/train_idle.py --batch 4 --batch 64 --results R [--data FILE] [--json FILE]

Kernels and copies are traced by CUPTI, through torch.profiler, while steps run as CUDA graphs, as they do in training.
Idle is what is left of a step when the time of all kernels and copies is taken out, overlaps counted once. Tracing
makes steps longer, mostly between kernels: the idle share of steps as they are without it, from the same kernel times
and the untraced step's, is given too.

Ways to get there, each in a process of its own; the next one is taken where one gives nothing:
  graphs  the profiler starts when the graphs are there already
  early   it starts before they are captured
  eager   the same kernels one by one, traced; their sum against a step of graphs, untraced
  events  events around each call, no profiler: their sum, which is too large by what lies between a call's kernels
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from kbench.train.model import PRESETS
from kbench.train.options import TrainOptions

WAYS = ("graphs", "early", "eager", "events")
WARM_STEPS = 5  # the first captures graphs, and the GPU's clock rises over some
UNTRACED_STEPS = 30
KERNELS, GAPS = 15, 8  # lines that are printed
# Of a step's report, which the host reads: the one copy of its kind in a step, and its end.
STEP_ENDS = "Memcpy DtoH"
TRACED = ("kernel", "gpu_memcpy", "gpu_memset")
# Upper ends of the groups that gaps are counted in, microseconds.
GROUPS = (1.0, 2.0, 5.0, 20.0)


@dataclass(frozen=True)
class Event:
    """A kernel, copy or fill on the GPU; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Gap:
    """Time without any event, and the events on both sides."""

    us: float
    before: str
    after: str


@dataclass
class Usage:
    """What a trace of some steps says. Milliseconds per step.

    span: from the end of one step to the end of the next. busy: union of the events. kernels: name -> (ms, count), the
    largest first. gaps: the largest first. groups: gaps by length: (upper end in us, count, ms).
    """

    steps: int
    span: float
    busy: float
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    groups: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """The share of the span in which nothing ran."""
        return 1.0 - self.busy / self.span


# ---------------------------------------------------------------------------------------------- from a trace


def read_trace(text: str) -> list[Event]:
    """Events on the GPU in a trace of torch.profiler, in the order of their starts."""
    found = [
        Event(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in json.loads(text)["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in TRACED
    ]
    return sorted(found, key=lambda event: event.start)


def usage(events: Sequence[Event], steps: int) -> Usage:
    """Of the last `steps` steps in the trace. Raises ValueError where the trace does not show them."""
    ends = [event for event in events if event.name.startswith(STEP_ENDS)]
    if len(ends) < steps + 1:
        raise ValueError(f"the trace shows {len(ends)} copies of a step's report, {steps + 1} are needed")
    before, start, end = ends[-steps - 1].name, ends[-steps - 1].end, ends[-1].end
    inside = [event for event in events if event.end > start and event.start < end]
    busy, gaps = _union(inside, start, end, before)
    groups = []
    for low, high in pairwise((0.0, *GROUPS, float("inf"))):
        group = [gap.us for gap in gaps if low < gap.us <= high]
        groups.append((high, len(group) / steps, 1e-3 * sum(group) / steps))
    return Usage(
        steps, 1e-3 * (end - start) / steps, 1e-3 * busy / steps, _by_name(inside, steps),
        sorted(gaps, key=lambda gap: -gap.us)[: GAPS * steps], groups,
    )  # fmt: skip


def _union(events: Iterable[Event], start: float, end: float, before: str) -> tuple[float, list[Gap]]:
    """How long at least one event ran between start and end, and the gaps. Events come in the order of starts; before
    is the name of the one that ended at the start."""
    busy, gaps, reached, last = 0.0, [], start, before
    for event in events:
        first, until = max(event.start, reached), min(event.end, end)
        if first > reached:
            gaps.append(Gap(first - reached, last, event.name))
        busy += max(until - first, 0.0)
        if until >= reached:
            reached, last = until, event.name
    return busy, gaps


def _by_name(events: Iterable[Event], steps: int) -> dict[str, tuple[float, float]]:
    totals: dict[str, list[float]] = defaultdict(list)
    for event in events:
        totals[event.name].append(event.end - event.start)
    found = {name: (1e-3 * sum(times) / steps, len(times) / steps) for name, times in totals.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def typical_gaps(gaps: Iterable[Gap]) -> list[tuple[float, int, Gap]]:
    """Gaps between the same two kernels as one: their sum in microseconds, how many, and the largest of them."""
    groups: dict[tuple[str, str], list[Gap]] = defaultdict(list)
    for gap in gaps:
        groups[gap.before, gap.after].append(gap)
    found = [(sum(gap.us for gap in group), len(group), max(group, key=lambda g: g.us)) for group in groups.values()]
    return sorted(found, key=lambda group: -group[0])


# ---------------------------------------------------------------------------------------------- tracing


def traced(run: Callable[[], None]) -> list[Event]:
    """What runs on this process's GPU meanwhile, whichever library launched it.

    Once in a process only: a second session of the profiler has been seen to come back empty.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path.read_text())


def work(way: str, options: TrainOptions, device: str, results: str, steps: int) -> dict[str, Any]:
    """One way, in this process: what it found. Raises RuntimeError where it found nothing."""
    import torch  # noqa: F401  first, as in other benchmarks: its libraries are then those that CuPy finds
    from train_inside import training, workshop

    with workshop(device, Path(results), _note) as shop, training(shop, options, _note) as run:
        batches = cycle(run.batches(4))
        found = _Found(run.trainer, batches, steps, WARM_STEPS if shop.device.kind == "cuda" else 1)
        use = getattr(found, way)()
        untraced = found.untraced_ms(UNTRACED_STEPS if shop.device.kind == "cuda" else 3)
        if way in ("eager", "events"):
            use.span = untraced
        return {"way": way, "untraced": untraced, "usage": asdict(use), "calls": len(found.actions)}


class _Found:
    """The ways, on one trainer."""

    def __init__(self, trainer: Any, batches: Any, steps: int, warm: int) -> None:
        self.trainer, self.batches, self.steps, self.warm = trainer, batches, steps, warm
        program = trainer.engine.program
        self.actions = (*program.forward, *program.first, *program.update)

    def graphs(self) -> Usage:
        self._run(self.warm)
        return self._usage(traced(lambda: self._run(self.steps + 2)))

    def early(self) -> Usage:
        return self._usage(traced(lambda: self._run(self.warm + self.steps + 2)))

    def eager(self) -> Usage:
        """Kernel times only: between kernels that are launched one by one there are gaps of the launches' making."""
        self._run(self.warm)

        def run() -> None:
            for _ in range(self.steps + 2):
                self.trainer.feed.put(*next(self.batches))
                self.trainer.engine.run(self.actions)
                self.trainer.feed.ask()
                self.trainer.feed.answer()

        use = self._usage(traced(run))
        use.gaps, use.groups = [], []
        return use

    def events(self) -> Usage:
        from kbench.train.explain import measure_roles

        if self.trainer.engine.device.kind != "cuda":
            raise RuntimeError("the emulator has no clock of its own")
        self._run(self.warm)
        measure_roles(self.trainer.engine, self.actions)
        times = measure_roles(self.trainer.engine, self.actions)
        counts: dict[str, int] = defaultdict(int)
        for action in self.actions:
            counts[action.role] += 1
        kernels = {role: (ms, float(counts[role])) for role, ms in sorted(times.items(), key=lambda item: -item[1])}
        return Usage(1, 0.0, sum(times.values()), kernels)

    def untraced_ms(self, steps: int) -> float:
        """Median milliseconds of a step, by the arrival of reports."""
        from train_inside import run_steps

        _, times = run_steps(self.trainer, islice(self.batches, steps + self.warm))
        return statistics.median(times[self.warm :])

    def _run(self, steps: int) -> None:
        from train_inside import run_steps

        run_steps(self.trainer, islice(self.batches, steps))

    def _usage(self, events: Sequence[Event]) -> Usage:
        """Raises RuntimeError where the trace has fewer events than the step has calls."""
        try:
            use = usage(events, self.steps)
        except ValueError as error:
            raise RuntimeError(f"{error}; {len(events)} events in all") from None
        count = sum(number for _, number in use.kernels.values())
        if count < len(self.actions):
            raise RuntimeError(f"the trace shows {count:.1f} events a step, which has {len(self.actions)} calls")
        return use


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- what is shown


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """What one way found, for people."""
    use = Usage(**found["usage"])
    use.gaps = [Gap(**gap) if isinstance(gap, Mapping) else gap for gap in use.gaps]
    untraced = found["untraced"]
    about = {
        "graphs": "CUPTI, graphs", "early": "CUPTI from before the capture, graphs",
        "eager": "kernel times of an eager run by CUPTI, step of graphs", "events": "events around calls",
    }[found["way"]]  # fmt: skip
    lines = [f"by {about}; {found['calls']} calls a step"]
    if found["way"] in ("graphs", "early"):
        lines.append(f"traced step {use.span:.3f} ms, busy {use.busy:.3f} ms: idle {use.idle:.2%} of {use.steps} steps")
    share = max(1.0 - use.busy / untraced, 0.0)
    lines.append(f"step without tracing {untraced:.3f} ms, busy {use.busy:.3f} ms: idle {share:.2%}")
    lines.append(f"{'ms':>8s} {'share':>6s} {'count':>6s} {'us each':>8s}  kernel")
    for name, (ms, count) in list(use.kernels.items())[:KERNELS]:
        lines.append(f"{ms:8.3f} {ms / use.busy:6.1%} {count:6.1f} {1e3 * ms / count:8.1f}  {short(name)}")
    rest = list(use.kernels.values())[KERNELS:]
    if rest:
        ms = sum(each for each, _ in rest)
        count = sum(number for _, number in rest)
        lines.append(f"{ms:8.3f} {ms / use.busy:6.1%} {count:6.1f} {1e3 * ms / count:8.1f}  {len(rest)} others")
    if use.groups:
        lines.append("gaps a step: " + "; ".join(_group(*group) for group in use.groups if group[1]))
    for us, count, largest in typical_gaps(use.gaps)[:GAPS]:
        lines.append(f"  {largest.us:8.1f} us at most, {us / use.steps:.1f} us a step ({count}x in {use.steps} steps)")
        lines.append(f"      after  {short(largest.before)}")
        lines.append(f"      before {short(largest.after)}")
    return lines


def _group(high: float, count: float, ms: float) -> str:
    name = f"to {high:g} us" if high < float("inf") else f"over {GROUPS[-1]:g} us"
    return f"{name} {count:.1f} ({1e3 * ms:.1f} us)"


def short(name: str, width: int = 60) -> str:
    """A kernel's name on a line: its start and its end, which tell apart what libraries call alike."""
    name = name.removeprefix("void ").split("(", 1)[0] if not name.startswith("Mem") else name
    return name if len(name) <= width else f"{name[: width - 28]}...{name[-25:]}"


# ---------------------------------------------------------------------------------------------- the command


def try_ways(
    ways: Sequence[str], attempt: Callable[[str], dict[str, Any]], note: Callable[[str], None]
) -> dict[str, Any] | None:
    """The first way that finds something."""
    for way in ways:
        try:
            return attempt(way)
        except Exception as error:  # whatever a profiler does: there are other ways
            note(f"{way}: {str(error).strip() or type(error).__name__}")
    return None


def in_process(arguments: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """One way in a process of its own. Raises RuntimeError with one line where it fails."""
    command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {limit:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    answers = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not answers:
        raise RuntimeError(f"exit status {process.returncode}: see the lines above")
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="d12", choices=PRESETS)
    parser.add_argument("--batch", type=int, nargs="+", action="extend", help="4 and 64")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--steps", type=int, default=10, help="steps to trace")
    parser.add_argument("--way", nargs="+", default=list(WAYS), choices=WAYS, help="in this order")
    parser.add_argument("--data", help="a token file; kbench's own story if left out")
    parser.add_argument("--results", default="results", help="where times of versions are")
    parser.add_argument("--use", default="best", help="kbench's versions, as `kbench train --use`")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for one way at one batch")
    parser.add_argument("--device", default="cuda", choices=("cuda", "emulator"), help="emulator: to try this out")
    parser.add_argument("--json", type=Path, help="also write the figures here, all kernels among them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        return _worker(json.loads(chosen.worker))
    document = []
    for batch in chosen.batch or (4, 64):
        options = TrainOptions(
            model=chosen.model, batch=batch, seq=min(chosen.seq, PRESETS[chosen.model].context), dtype=chosen.dtype,
            steps=1000, use=chosen.use, data=chosen.data, val_every=0, recompute=0,
        )  # fmt: skip
        common = {"device": chosen.device, "results": chosen.results, "steps": chosen.steps}
        common |= {"options": options.to_dict()}
        print(f"{chosen.model}, {chosen.dtype}, batch {batch} of {options.seq} tokens", flush=True)

        def attempt(way: str, common: dict[str, Any] = common) -> dict[str, Any]:
            return in_process(common | {"way": way}, chosen.limit)

        found = try_ways(chosen.way, attempt, _note)
        print("\n".join(lines_of(found)) if found else "no way to trace it worked", flush=True)
        document.append({"batch": batch, "model": chosen.model, "dtype": chosen.dtype, "found": found})
        if chosen.json:
            chosen.json.write_text(json.dumps(document, indent=1))
    return 0 if all(entry["found"] for entry in document) else 1


def _worker(given: Mapping[str, Any]) -> int:
    options = TrainOptions.from_dict(given["options"])
    try:
        found = work(given["way"], options, given["device"], given["results"], given["steps"])
    except Exception as error:  # one line, not a traceback: the next way is tried
        _note(f"{type(error).__name__}: {error}")
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
