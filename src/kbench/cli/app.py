"""The command `kbench`: its commands put together, and what every error of theirs ends in."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import typer

from kbench import __version__
from kbench.cli import (
    bisect,
    ceilings,
    check,
    compare,
    data,
    doctor,
    export,
    history,
    inspect,
    plot,
    profile,
    report,
    results,
    run,
    sweep,
    train,
)
from kbench.cli import list as listing
from kbench.cli.output import is_unwritable, one_line, report_error, report_unwritable, silence, start, state, write
from kbench.cli.screen import document_error
from kbench.errors import Exit, KbenchError, worst

_EXIT_STATUSES = """\b
Exit statuses:
   0  fine (refused rows beside others are fine)
   1  a regression: slower, said report, or compare --fail-if-slower
   2  wrong usage, or input that cannot be read
   3  a wrong result
   4  nothing was checked or compared
   5  cannot run here: no GPU, no compiler, too little memory, read-only disk
   6  rows crashed, hung or could not launch, and none was wrong
  70  an internal error
 130  interrupted
Where several apply: 3, 6, 70, 2, 5, 1, 4.

\b
Examples:
  kbench list
  kbench run attention_backward --version 5
  kbench COMMAND --help
"""


def main() -> None:
    """The entry point: run the command line and exit with its status."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status. No exception comes out, and no traceback unless --debug is on."""
    start()
    try:
        status = _guarded(arguments)
        write(sys.stdout, "")  # what is wrong with stdout shows now, not as a traceback of the interpreter
    except KeyboardInterrupt:
        status = _interrupted("--json" in arguments)
    if state.unwritable and status not in (Exit.INTERNAL, Exit.INTERRUPTED):
        status = worst([Exit(status), Exit.CANNOT])
    return int(status)


def _guarded(arguments: Sequence[str]) -> int:
    debug, json = "--debug" in arguments, "--json" in arguments
    try:
        return int(_app(args=[*arguments], prog_name="kbench", standalone_mode=False) or 0)
    except KbenchError as error:
        _trace(debug)
        report_error(error, debug)
        return _ended(str(error), error.exit_status, json)
    except SystemExit as stop:
        # The option parser ends the process itself after installing a completion, or on a broken pipe.
        return _system_exit(stop)
    except typer.Abort:
        return _interrupted(json)
    except Exception as error:
        if hasattr(error, "format_message"):  # the option parser's own errors, whose class is not public
            return _usage(error, json)
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            silence(sys.stdout)
            return Exit.OK
        if isinstance(error, OSError) and is_unwritable(error):  # the option parser's help, on a full disk
            silence(sys.stdout)
            report_unwritable(error)
            return Exit.CANNOT
        _trace(debug)
        advice = "" if debug else "; run with --debug for the traceback"
        what = one_line(f"{type(error).__name__}: {error}")
        write(sys.stderr, f"kbench: internal error: {what}{advice}\n")
        return _ended(f"internal error: {what}", Exit.INTERNAL, json)


def _ended(message: str, status: int, json: bool) -> int:
    """The status of a command that an error ended. Programs that asked for JSON read why there, too."""
    if json:
        document_error(message, status)
    return int(status)


def _interrupted(json: bool) -> int:
    write(sys.stderr, "kbench: interrupted\n")
    return _ended("interrupted", Exit.INTERRUPTED, json)


def _system_exit(stop: SystemExit) -> int:
    if isinstance(stop.__context__, OSError) and stop.__context__.errno == errno.EPIPE:
        silence(sys.stdout)
        return Exit.OK
    return stop.code if isinstance(stop.code, int) else Exit.OK if stop.code is None else Exit.INTERNAL


def _usage(error: Any, json: bool) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kbench"
    message = one_line(error.format_message()).rstrip(".")
    message = f"{message[:1].lower()}{message[1:]} (see `{command} --help`)"
    write(sys.stderr, f"kbench: error: {message}\n")
    return _ended(message, Exit.USAGE, json)


def _trace(debug: bool) -> None:
    if debug:
        write(sys.stderr, traceback.format_exc())


def _show_version(wanted: bool) -> None:
    if wanted:
        write(sys.stdout, f"kbench {__version__}\n")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version of kbench.", callback=_show_version, is_eager=True)
    ] = False,
) -> int:
    """Prove, time and compare CUDA kernels.

    A family of kernels is one .cu file with numbered versions, from the naive one to the fastest. kbench proves
    a version right against a float64 reference before it times it, on a GPU or, for verdicts alone, on the emulator.
    """
    if context.invoked_subcommand is None:
        write(sys.stderr, context.get_help() + "\n")
        raise typer.Exit(int(Exit.USAGE))
    return int(Exit.OK)


def _add(
    application: typer.Typer, name: str, command: Callable[..., int], examples: Sequence[str], short_help: str
) -> None:
    application.command(name, epilog=_examples(examples), short_help=short_help)(_abortable(command))


def _examples(lines: Sequence[str]) -> str:
    # \b keeps the option parser from joining the lines into a paragraph.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def _add_data(application: typer.Typer) -> None:
    group = typer.Typer()
    _add(group, "shakespeare", data.shakespeare, data.SHAKESPEARE_EXAMPLES, "Fetch and prepare Shakespeare's works.")
    _add(group, "tokens", data.tokens, data.TOKENS_EXAMPLES, "Make text into a token file.")
    _add(group, "inspect", data.inspect, data.INSPECT_EXAMPLES, "Show what a token file holds.")
    application.add_typer(
        group, name="data", help=data.HELP, short_help="Prepare text to train on.", epilog=_examples(data.EXAMPLES)
    )


def _add_results(application: typer.Typer) -> None:
    group = typer.Typer()
    _add(group, "list", results.list_, results.LIST_EXAMPLES, "List the runs, newest first.")
    _add(group, "show", results.show, results.SHOW_EXAMPLES, "Show a run as its sweep did.")
    _add(group, "export", results.export, results.EXPORT_EXAMPLES, "Write a run for other programs.")
    _add(group, "merge", results.merge, results.MERGE_EXAMPLES, "Put several runs into one file.")
    _add(group, "prune", results.prune, results.PRUNE_EXAMPLES, "Remove old runs.")
    application.add_typer(
        group,
        name="results",
        help=results.HELP,
        short_help="List, show, export, merge and remove runs.",
        epilog=_examples(results.EXAMPLES),
    )


def _abortable(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose Ctrl-C we hear of: the option parser would turn it into a mere status."""

    @wraps(command)
    def run_it(*args: Any, **options: Any) -> int:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            raise typer.Abort from None

    return run_it


def _build() -> typer.Typer:
    # Plain help: the parser's rich help costs a third of the start-up and frames every option in a box.
    application = typer.Typer(
        name="kbench",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
        epilog=_EXIT_STATUSES,
    )
    application.callback(invoke_without_command=True, epilog=_EXIT_STATUSES)(_root)
    _add(application, "list", listing.list_, listing.EXAMPLES, "Show the families, or one family's versions.")
    _add(application, "run", run.run, run.EXAMPLES, "Check one version, then time it; or a whole ladder.")
    _add(application, "check", check.check, check.EXAMPLES, "Check versions over shapes and block sizes.")
    _add(application, "sweep", sweep.sweep, sweep.EXAMPLES, "Check, then time, every version and block size.")
    _add(application, "compare", compare.compare, compare.EXAMPLES, "Time two versions alternately: which is faster?")
    _add(application, "report", report.report, report.EXAMPLES, "What became slower, or wrong, since a baseline.")
    _add(application, "plot", plot.plot, plot.EXAMPLES, "Draw a run: one HTML page of pictures.")
    _add_results(application)
    _add(application, "history", history.history, history.EXAMPLES, "Show a family over all runs: what changed, when.")
    _add(application, "bisect", bisect.bisect, bisect.EXAMPLES, "Find the commit that made a version slower.")
    _add(application, "inspect", inspect.inspect, inspect.EXAMPLES, "Show what kernels use and how many fit; no GPU.")
    _add(application, "ceilings", ceilings.ceilings, ceilings.EXAMPLES, "Measure what the GPU does at most.")
    _add(application, "profile", profile.profile, profile.EXAMPLES, "Count what a version does, with Nsight Compute.")
    _add(application, "export", export.export, export.EXAMPLES, "Write one version as a CUDA program of one file.")
    _add(application, "train", train.train, train.EXAMPLES, "Train GPT-2 with the fastest proven versions.")
    _add_data(application)
    _add(application, "doctor", doctor.doctor, doctor.EXAMPLES, "Show what this machine has, and what is missing.")
    return application


_app = _build()
