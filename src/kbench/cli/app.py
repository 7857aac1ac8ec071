"""The command `kbench`: its commands put together, and what every error of theirs ends in."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from kbench import __version__
from kbench.cli import check, doctor, run, sweep
from kbench.cli import list as listing
from kbench.cli.screen import one_line, report_error, silence, write
from kbench.errors import Exit, KbenchError

_EXIT_STATUSES = """\b
Exit statuses:
   0  fine (refusals alone are fine)
   1  a regression
   2  wrong usage, or input that cannot be read
   3  a wrong result
   4  nothing was checked or compared
   5  cannot run here: no GPU, no compiler, too little memory, read-only disk
   6  rows crashed, hung or could not launch, and none was wrong
  70  an internal error
 130  interrupted
Where several apply: 3, 6, 2, 5, 1, 4.

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
    for stream in (sys.stdout, sys.stderr):
        # A family's idea may hold characters that this terminal's encoding lacks: a "?" beats a crash.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        status = _guarded(arguments)
        write(sys.stdout, "")  # a reader that went away shows now, not as a traceback of the interpreter
    except KeyboardInterrupt:
        status = Exit.INTERRUPTED
    return int(status)


def _guarded(arguments: Sequence[str]) -> int:
    debug = "--debug" in arguments
    try:
        return int(_app(args=[*arguments], prog_name="kbench", standalone_mode=False) or 0)
    except KbenchError as error:
        _trace(debug)
        report_error(error, debug)
        return error.exit_status
    except SystemExit as stop:
        # The option parser ends the process itself after installing a completion, or on a broken pipe.
        return _system_exit(stop)
    except typer.Abort:
        return Exit.INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):  # the option parser's own errors, whose class is not public
            return _usage(error)
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            silence(sys.stdout)
            return Exit.OK
        _trace(debug)
        advice = "" if debug else "; run with --debug for the traceback"
        what = one_line(f"{type(error).__name__}: {error}")
        write(sys.stderr, f"kbench: internal error: {what}{advice}\n")
        return Exit.INTERNAL


def _system_exit(stop: SystemExit) -> int:
    if isinstance(stop.__context__, OSError) and stop.__context__.errno == errno.EPIPE:
        silence(sys.stdout)
        return Exit.OK
    return stop.code if isinstance(stop.code, int) else Exit.OK if stop.code is None else Exit.INTERNAL


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "kbench"
    message = one_line(error.format_message()).rstrip(".")
    write(sys.stderr, f"kbench: error: {message[:1].lower()}{message[1:]} (see `{command} --help`)\n")
    return Exit.USAGE


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
    a version right against a CPU reference before it times it, on a GPU or, for verdicts alone, on the emulator.
    """
    if context.invoked_subcommand is None:
        write(sys.stderr, context.get_help() + "\n")
        raise typer.Exit(int(Exit.USAGE))
    return int(Exit.OK)


def _add(
    application: typer.Typer, name: str, command: Callable[..., int], examples: Sequence[str], short_help: str
) -> None:
    # \b keeps the option parser from joining the lines into a paragraph.
    epilog = "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
    application.command(name, epilog=epilog, short_help=short_help)(command)


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
    _add(application, "doctor", doctor.doctor, doctor.EXAMPLES, "Show what this machine has, and what is missing.")
    return application


_app = _build()
