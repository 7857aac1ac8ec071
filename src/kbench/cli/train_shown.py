"""What `kbench train` shows beside its steps: the run, its memory, where time goes, the check, the JSON document."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kbench.cli.screen import Screen
from kbench.cli.table import Column
from kbench.errors import Exit

if TYPE_CHECKING:
    from kbench.train.explain import Line
    from kbench.train.gradcheck import Finding
    from kbench.train.loop import Outcome
    from kbench.train.run import Run
    from kbench.train.setup import Chosen
    from kbench.train.trainer import Trainer

# Smaller parts of the memory are not worth a word.
_SHOWN_BYTES = 10_000
# Steps whose mean is "measured": enough for clocks to be those of a training run.
_STEPS = 5


def show_run(screen: Screen, run: Run) -> None:
    """Model, device, weights and data."""
    inputs, device = run.inputs, run.workshop.device
    options, model = inputs.options, inputs.model
    micro = f" x {options.micro_steps} micro-steps" if options.micro_steps > 1 else ""
    screen.prose(f"GPT-2: {model}, {model.parameter_count:,} parameters", rest="  ")
    screen.prose(f"on {device.row_name}, {options.dtype}, batch {options.batch}{micro} of {options.seq} tokens")
    screen.prose(f"weights: {inputs.weights}", rest="  ")
    screen.prose(f"data: {inputs.dataset.description}", rest="  ")


def show_memory(screen: Screen, chosen: Chosen, needed: int) -> None:
    """Device memory by kind, before it is allocated."""
    kinds: dict[str, int] = defaultdict(int)
    for tensor in chosen.program.tensors:
        kinds[_kind(tensor.name)] += tensor.nbytes
    kinds["scratch"] += needed - sum(kinds.values())
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in kinds.items() if size >= _SHOWN_BYTES)
    screen.prose(f"memory: {_bytes(needed)} (recompute {chosen.shape.recompute}): {parts}", rest="  ")


def show_explanation(screen: Screen, run: Run, chosen: Chosen, trainer: Trainer | None) -> int:
    """Where the time of a step of one micro-step goes, and what each choice buys. trainer: None on the emulator."""
    from kbench.train.chooser import Chooser, parse_use
    from kbench.train.explain import explain

    workshop = run.workshop
    times = workshop.times() if trainer is not None else None
    wanted = parse_use(run.inputs.options.use, workshop.catalog)
    measured, step_ms = _measured(run, trainer) if trainer is not None else (None, None)
    lines = explain(chosen, measured, Chooser(workshop.catalog, wanted, times, workshop.deterministic))
    document = {"explain": [line.__dict__ for line in lines], "step_ms": step_ms, "exit_status": int(Exit.OK)}
    screen.document("train", document)
    timed = measured is not None
    columns = [
        Column("slot"),
        Column("kernel"),
        Column("block", "right", drop=1),
        Column("launches", "right", short="n", drop=2),
    ]
    if timed:
        columns += [Column("alone ms", "right"), Column("in step", "right")]
    screen.say()
    screen.table(columns, [_explained(line, timed) for line in lines])
    if measured is None:
        screen.prose("no times: the emulator is not a GPU")
        return int(Exit.OK)
    alone = sum(line.predicted_ms or 0.0 for line in lines)
    screen.prose(
        f"step of one micro-step: {step_ms:.3f} ms measured as graphs; {sum(measured.values()):.3f} ms summed over its "
        f"kernels in the step, {alone:.3f} ms summed over kernels timed alone with a cold L2"
    )
    screen.say()
    choices = [line for line in lines if line.other_ms is not None]
    columns = [Column("slot"), Column("next best choice", flexible=True), Column("adds ms", "right")]
    screen.table(columns, [[line.slot, line.other, f"{line.other_ms:+.3f}"] for line in choices])
    return int(Exit.OK)


def _measured(run: Run, trainer: Trainer) -> tuple[dict[str, float], float]:
    """Milliseconds of each role, and of a whole step."""
    from kbench.train.explain import measure_roles
    from kbench.train.run import batches_of

    trainer.gradient([next(batches_of(run.inputs))])
    step_ms = sum(trainer.measure(part, _STEPS, time.perf_counter) for part in ("first", "update")) * 1e3
    program = trainer.engine.program
    return measure_roles(trainer.engine, (*program.forward, *program.first, *program.update)), step_ms


def show_check(screen: Screen, run: Run) -> int:
    """Loss and gradients beside the reference; the exit status."""
    from kbench.train.check_step import check_step

    findings = check_step(run, screen.note)
    wrong = [finding for finding in findings if not finding.right]
    status = int(Exit.WRONG if wrong else Exit.OK)
    found = [{**finding.__dict__, "right": finding.right} for finding in findings]
    screen.document("train", {"check": found, "exit_status": status})
    columns = [Column("quantity"), Column("error", "right"), Column("allowed", "right"), Column("check")]
    screen.say()
    screen.table(columns, [_found(finding) for finding in findings])
    if wrong:
        screen.note(f"{len(wrong)} of {len(findings)} are further from float64 than allowed")
    return status


def document(run: Run, chosen: Chosen, outcome: Outcome) -> dict[str, Any]:
    """The JSON of a run."""
    kernels = {
        role: {"family": p.need.family, "version": p.version, "block": p.block, "params": dict(p.params)}
        for role, p in chosen.picks.items()
    }
    return {
        "device": run.workshop.device.describe(),
        "options": run.inputs.options.to_dict(),
        "recompute": chosen.shape.recompute,
        "kernels": kernels,
        **outcome.__dict__,
        "exit_status": int(Exit.INTERRUPTED if outcome.stopped else Exit.OK),
    }


def _kind(name: str) -> str:
    """What a tensor of the step is counted under."""
    base = name.split(".")[0]
    if base in ("params", "grads"):
        return "parameters and gradients"
    if base in ("m", "v", "master"):
        return "optimizer"
    if base in ("logits", "probs"):
        return "logits"
    if base in ("att", "qkvr"):
        return "attention matrices"
    return "activations"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _explained(line: Line, timed: bool) -> list[str]:
    cells = [line.slot, f"{line.family}:{line.version}", line.place, str(line.times)]
    return [*cells, _ms(line.predicted_ms), _ms(line.measured_ms)] if timed else cells


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _found(finding: Finding) -> list[str]:
    return [finding.name, f"{finding.error:.2e}", f"{finding.allowed:.2e}", "pass" if finding.right else "fail"]
