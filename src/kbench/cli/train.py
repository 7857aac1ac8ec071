"""`kbench train gpt2`: a GPT-2 trained by the versions that were chosen and proven."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbench.cli import options as o
from kbench.cli import train_shown as shown
from kbench.cli.screen import Screen
from kbench.errors import Exit, UsageError, WrongResult

if TYPE_CHECKING:
    from kbench.train.loop import Outcome
    from kbench.train.run import Run
    from kbench.train.setup import Chosen, Workshop

EXAMPLES = (
    "kbench train gpt2",
    "kbench train gpt2 --model d12 --batch 64 --steps 50 --out runs/first",
    "kbench train gpt2 --use naive,layernorm_forward=5 --explain",
    "kbench train gpt2 --resume runs/first --steps 100",
)

# What may be changed where a run goes on: nothing that the steps already done were computed with, but for the number of
# steps, by which a falling schedule would have had other rates.
_MAY_CHANGE = ("steps", "use", "val_every", "val_batches", "sample_every", "sample_length", "temperature", "hellaswag",
               "checkpoint_every", "keep", "major", "data", "val_data")  # fmt: skip
_NOT_OF_THE_RUN = ("name", "resume", "out", "explain", "check", "export", "device", "family_dir", "time_limit",
                   "workers", "results", "json", "debug")  # fmt: skip


def train(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="MODEL", help="What to train: gpt2.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="nano, d6, d12, d24, d36 or d48. d12 if left out, nano on the emulator."
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", help="Number of layers, in place of the model's.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option("--heads", metavar="N", help="Number of heads, in place of the model's.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option("--channels", metavar="N", help="Number of channels, in place of the model's.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", metavar="N", help="Vocabulary size, in place of the model's.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Longest sequence, in place of the model's.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", help="Sequences in a batch.")] = 4,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq",
            metavar="T",
            help="Tokens in a sequence. 1024 if left out, or the model's context if that is shorter.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="NAME", help="fp32, tf32 or bf16. bf16 if left out, fp32 on the emulator."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="Updates in all. 50 if left out, 10 on the emulator.")
    ] = None,
    micro_steps: Annotated[
        int, typer.Option("--micro-steps", metavar="N", help="Batches whose gradients add up to one update.")
    ] = 1,
    recompute: Annotated[
        int | None,
        typer.Option(
            "--recompute",
            metavar="0|1|2",
            help="1: computes GELU again to save memory, 2: LayerNorm too. The first that fits if left out.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            "--weights", metavar="FILE", help="Where to start: scratch, llm.c's model file or a .safetensors file."
        ),
    ] = "scratch",
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Token file, 'shards_*.bin', text file or shakespeare. A story of kbench's if left out.",
        ),
    ] = None,
    val_data: Annotated[
        str | None,
        typer.Option("--val-data", metavar="FILE", help="What to validate on. A held-out part of --data if left out."),
    ] = None,
    use: Annotated[
        str,
        typer.Option("--use", metavar="CHOICE", help="Versions: best, naive, FAMILY=N,... or either with such a list."),
    ] = "best",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use only versions that give the same bits at every launch.")
    ] = False,
    lr: Annotated[float, typer.Option("--lr", metavar="X", help="Learning rate.")] = 3e-4,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help="How the rate goes on: constant, cosine, linear or wsd.")
    ] = "constant",
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Steps in which the rate rises to --lr.")] = 0,
    final_fraction: Annotated[
        float, typer.Option("--final-fraction", metavar="X", help="What the rate falls to, as a fraction of --lr.")
    ] = 0.0,
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", metavar="X", help="Weight decay of matrices and embeddings.")
    ] = 0.0,
    clip: Annotated[
        float, typer.Option("--clip", metavar="X", help="Largest norm of the gradients; 0: no limit.")
    ] = 1.0,
    skip_loss_z: Annotated[
        float,
        typer.Option(
            "--skip-loss-z",
            metavar="Z",
            help="Skip updates whose loss is over Z deviations above the last ones; 0: none.",
        ),
    ] = 0.0,
    skip_norm_z: Annotated[
        float, typer.Option("--skip-norm-z", metavar="Z", help="The same for the norm of the gradients; 0: none.")
    ] = 0.0,
    val_every: Annotated[
        int, typer.Option("--val-every", metavar="N", help="Steps from one validation to the next; 0: no validation.")
    ] = 20,
    val_batches: Annotated[
        int, typer.Option("--val-batches", metavar="N", help="Batches of a validation; 0: all that are held out.")
    ] = 20,
    sample_every: Annotated[
        int,
        typer.Option(
            "--sample-every", metavar="N", help="Steps from one text that the model writes to the next; 0: no texts."
        ),
    ] = 0,
    sample_length: Annotated[int, typer.Option("--sample-length", metavar="N", help="Tokens of such a text.")] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", metavar="X", help="Randomness of such a text; 0 always takes the likeliest token."
        ),
    ] = 1.0,
    hellaswag: Annotated[
        str | None,
        typer.Option(
            "--hellaswag", metavar="FILE", help="llm.c's file of HellaSwag questions, answered at each validation."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder for log, loss curve and checkpoints. None are kept if left out."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            "--checkpoint-every", metavar="N", help="Steps from one checkpoint to the next; 0: only at the end."
        ),
    ] = 0,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", help="How many of the newest checkpoints stay; 0: all.")
    ] = 0,
    major: Annotated[
        int,
        typer.Option("--major", metavar="N", help="Despite --keep, those of every N-th step stay; 0: none."),
    ] = 0,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            help="Go on from the newest checkpoint in a folder, with the options that it holds.",
        ),
    ] = None,
    overfit: Annotated[bool, typer.Option("--overfit", help="Train on the first batch alone, over and over.")] = False,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of new weights, the order of the data and rounding.")
    ] = 42,
    explain: Annotated[
        bool, typer.Option("--explain", help="Do not train: show where the step's time goes and what each choice buys.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Do not train: compare loss and all 16 gradients of the first step with float64."),
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write the weights at the end: .bin for llm.c, or .safetensors."),
    ] = None,
    device: o.DeviceOption = "auto",
    family_dir: o.FamilyDirOption = None,
    time_limit: o.TimeLimitOption = 30.0,
    workers: o.WorkersOption = None,
    results: o.ResultsOption = Path("results"),
    json: o.JsonOption = False,
    debug: o.DebugOption = False,
) -> int:
    """Train GPT-2 by the fastest proven versions of the kernel families.

    On a GPU, versions are swept at the model's own sizes first, where that has not been done: the fastest that fit
    together are proven, captured into CUDA graphs, and run. Without a GPU a tiny model trains on the emulator.
    """
    from kbench.train.options import TrainOptions

    if name != "gpt2":
        raise UsageError(f"there is no model {name!r} to train", "kbench train gpt2")
    if explain and check:
        raise UsageError("--explain and --check are two commands", "give one of them")
    screen = Screen(json)
    given = {**locals(), "context": context_length}
    options = TrainOptions(**{f.name: given[f.name] for f in fields(TrainOptions)})
    machine = _Machine(device, family_dir or [], time_limit, workers, results, debug, screen)
    if resume is not None:
        changes = _changes(context, options)
        out = resume if out is None else out
    if explain or check:  # they leave nothing behind, and nothing has to be writable
        out = export = None
    if resume is not None:
        return _Command(machine, screen, out, export).resume(resume, changes, explain, check)
    return _Command(machine, screen, out, export).start(options, explain, check)


def _changes(context: typer.Context, options: Any) -> dict[str, Any]:
    """Options given beside --resume. Raises UsageError for one that the checkpoint decides."""
    changes = {}
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is None or source.name in ("DEFAULT", "DEFAULT_MAP") or name in _NOT_OF_THE_RUN:
            continue
        if name not in _MAY_CHANGE:
            option = {"context_length": "context"}.get(name, name).replace("_", "-")
            allowed = ", ".join(f"--{other.replace('_', '-')}" for other in (*_MAY_CHANGE, "out", "export"))
            raise UsageError(
                f"--{option} cannot be given with --resume: the checkpoint decides it", f"allowed: {allowed}"
            )
        changes[name] = getattr(options, name)
    return changes


@dataclass
class _Machine:
    """What the command was told about where to run."""

    device: str
    family_dirs: list[Path]
    time_limit: float
    workers: int | None
    results: Path
    debug: bool
    screen: Screen

    def require_use(self, text: str) -> None:
        """Raises UsageError for a choice that cannot be understood, before anything is opened."""
        from kbench.catalog import load_catalog
        from kbench.train.chooser import parse_use

        parse_use(text, load_catalog(self.family_dirs))

    def kind(self) -> str:
        from kbench.device.open import choose_kind

        kind, reason = choose_kind(self.device)
        if reason:
            self.screen.note(f"no GPU ({reason}): training on the CPU emulator, slowly")
        return kind

    @contextmanager
    def workshop(self, kind: str, deterministic: bool) -> Iterator[Workshop]:
        from kbench.catalog import load_catalog
        from kbench.device.open import open_device
        from kbench.results.journal import Journal
        from kbench.results.store import require_writable
        from kbench.sweep import Bench, Options
        from kbench.train.setup import Workshop

        bench = Options(
            device=kind, family_dirs=tuple(self.family_dirs), time_limit=self.time_limit, workers=self.workers,
            debug=self.debug,
        )  # fmt: skip
        if kind == "cuda":
            require_writable(self.results)
        device = open_device(kind, self.time_limit, self.workers)
        try:
            with Journal(self.results, device.describe(), self.family_dirs) as journal:
                yield Workshop(
                    device, load_catalog(self.family_dirs), self.results, lambda: Bench(bench, self.screen.note),
                    journal.keep, self.screen.note, self.screen.progress, deterministic,
                )  # fmt: skip
        finally:
            device.close()


class _Command:
    """One `kbench train`."""

    def __init__(self, machine: _Machine, screen: Screen, out: Path | None, export: Path | None):
        self.machine, self.screen, self.out, self.export = machine, screen, out, export
        self._begun = time.perf_counter()

    def start(self, options: Any, explain: bool, check: bool) -> int:
        from kbench.train.options import require_valid
        from kbench.train.run import open_inputs

        require_valid(options)
        self.machine.require_use(options.use)
        kind = self.machine.kind()
        self._prepare()
        return self._with(kind, open_inputs(options, kind, self.screen.note), explain, check)

    def resume(self, folder: Path, changes: dict[str, Any], explain: bool, check: bool) -> int:
        from kbench.train.run import open_checkpoint

        kind = self.machine.kind()
        inputs = open_checkpoint(folder, changes, self.screen.note)
        self._prepare(resuming=self.out is not None and self.out.resolve() == folder.resolve())
        return self._with(kind, inputs, explain, check)

    def _with(self, kind: str, inputs: Any, explain: bool, check: bool) -> int:
        from kbench.train.run import Run

        if self.export is not None:
            from kbench.train.weights import require_exportable

            require_exportable(self.export, inputs.model)
        with self.machine.workshop(kind, inputs.options.deterministic) as workshop:
            run = Run(workshop, inputs, self.out, self.screen.say, self.screen.note, self._show_memory)
            shown.show_run(self.screen, run)
            if check:
                return shown.show_check(self.screen, run)
            chosen = run.choose()
            if explain:
                return shown.show_explanation(self.screen, run, chosen, run.trainer(chosen) if kind == "cuda" else None)
            trainer = run.trainer(chosen)
            if inputs.state.step >= inputs.options.steps > 0:
                self.screen.note(f"all of its {inputs.options.steps} steps are done; --steps N goes on")
            self.screen.say(f"ready after {time.perf_counter() - self._begun:.1f} s")
            try:
                outcome = run.go(trainer, chosen)
            except WrongResult:
                self._draw(run)
                raise
            self._finish(run, trainer, chosen, outcome)
        return int(Exit.INTERRUPTED if outcome.stopped else Exit.OK)

    def _prepare(self, resuming: bool = False) -> None:
        """Raises before anything else is done where what the run is to leave cannot be written."""
        from kbench.train.checkpoint import prepare_folder

        if self.out is not None:
            prepare_folder(self.out, resuming=resuming)

    def _show_memory(self, chosen: Chosen, needed: int) -> None:
        shown.show_memory(self.screen, chosen, needed)

    def _draw(self, run: Run) -> None:
        """The loss curve, where there is a log."""
        if self.out is None:
            return
        from kbench.train.curve import write_curve
        from kbench.train.log import read_log

        write_curve(self.out / "loss.svg", read_log(self.out), f"{run.inputs.model}, {run.inputs.options.dtype}")
        self.screen.say(f"log and loss curve: {self.out}")

    def _finish(self, run: Run, trainer: Any, chosen: Chosen, outcome: Outcome) -> None:
        self._draw(run)
        if self.export is not None and not outcome.stopped:
            self._export(run, trainer)
        if outcome.stopped:
            again = (
                f"go on with --resume {self.out}" if self.out is not None else "nothing was kept: no --out was given"
            )
            self.screen.note(f"stopped by {outcome.stopped} after step {outcome.step}; {again}")
        self.screen.document("train", shown.document(run, chosen, outcome))

    # ------------------------------------------------------------------------------------------ export

    def _export(self, run: Run, trainer: Any) -> None:
        from kbench.train.weights import export_llmc, export_safetensors

        assert self.export is not None
        state = trainer.state()
        write = export_llmc if self.export.suffix == ".bin" else export_safetensors
        dtype = "bf16" if run.inputs.options.dtype == "bf16" else "fp32"
        write(self.export, run.inputs.model, state.params, dtype)
        self.screen.say(f"weights: {self.export}")
