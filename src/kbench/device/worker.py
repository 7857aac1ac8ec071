"""A child process that does the work which may crash or hang, and its handle in the parent.

Device code can take a process down: an illegal access ends the CUDA context, an emulated wild write ends the
process, a launch may never come back. So everything that loads family files or touches a device runs in a
child; the parent keeps the rows, and starts a new child when one is lost.

The two talk in JSON messages over a socket pair. The child sets itself a deadline before each piece of work
that might hang (`limit`); the parent kills it when the deadline passes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from kbench import errors
from kbench.errors import KbenchError, KernelFault

# A child that does not answer to the closing of its pipe within this time is killed.
_CLOSE_SECONDS = 2.0
# The device reports its own time limits with a location; the parent's kill comes later, as the last resort.
GRACE_SECONDS = 5.0

Message = dict[str, Any]


class Handler(Protocol):
    """What runs in the child: `handle` answers one request with one JSON-able result."""

    def handle(self, request: Message) -> Any: ...


class WorkerLost(Exception):
    """The child died or was killed. `fault` is what to tell the user."""

    def __init__(self, fault: KernelFault):
        super().__init__(str(fault))
        self.fault = fault


class Worker:
    """A child process that serves requests one at a time.

    target: "module:function" that is called in the child as `function(channel, **options)` and returns a
    Handler. note: called with each line that the child wants shown to the user. descriptors: open files that the
    child inherits under the same numbers.
    """

    def __init__(self, target: str, options: Message, note: Callable[[str], None], descriptors: Sequence[int] = ()):
        self._note = note
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kbench.device.worker", target, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what kernels print must not mix with tables or JSON on stdout
                env=child_environment(),
            )
        self._pipe.send_bytes(json.dumps(options).encode())

    def call(self, request: Message) -> Any:
        """Send a request and wait for its result.

        Raises KbenchError as it was raised in the child, or WorkerLost if the child ended or passed its deadline.
        """
        self.post(request)
        return self.answer()

    def post(self, request: Message) -> None:
        """Send a request whose result `answer` fetches later. Raises WorkerLost if the child has ended."""
        self._require_open()
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise WorkerLost(self.epitaph()) from None

    def answer(self) -> Any:
        """Wait for the result of the request that was posted; raises as `call` does."""
        self._require_open()
        try:
            return self._wait()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise WorkerLost(self.epitaph()) from None

    def _require_open(self) -> None:
        if self._pipe.closed:  # the child was killed
            raise WorkerLost(self.epitaph())

    @property
    def connection(self) -> Connection:
        """Readable as soon as there is an answer, or the child has ended: for waiting on several children."""
        return self._pipe

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _wait(self) -> Any:
        deadline, doing = None, ""
        while True:
            if not self._pipe.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                self.kill()
                late = KernelFault("timeout", f"{doing} did not end within its time limit", context_lost=True)
                raise WorkerLost(late)
            message: Message = json.loads(self._pipe.recv_bytes())
            if "note" in message:
                self._note(message["note"])
            elif "limit" in message:
                deadline = None if message["limit"] is None else time.monotonic() + message["limit"]
                doing = message["doing"]
            elif "error" in message:
                raise _decode_error(message["error"])
            else:
                return message["result"]

    def epitaph(self) -> KernelFault:
        """How the child ended; waits until it has."""
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                name = signal.Signals(-code).name
                return KernelFault("died", f"the worker process was ended by {name}", context_lost=True)
        return KernelFault("died", f"the worker process ended with status {code}", context_lost=True)

    def kill(self) -> None:
        """End the child at once."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def close(self) -> None:
        """Let the child end by itself; kill it if it does not."""
        self._pipe.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class Channel:
    """The child's end: notes and deadlines."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def receive(self) -> Message:
        message: Message = json.loads(self._pipe.recv_bytes())
        return message

    def send(self, message: Message) -> None:
        self._pipe.send_bytes(json.dumps(message, allow_nan=False).encode())

    def note(self, text: str) -> None:
        """Show a line to the user."""
        self.send({"note": text})

    @contextlib.contextmanager
    def limit(self, seconds: float, doing: str) -> Iterator[Callable[[], None]]:
        """The parent kills this process if the block takes longer; the value restarts the clock."""

        def restart() -> None:
            self.send({"limit": seconds + GRACE_SECONDS, "doing": doing})

        restart()
        try:
            yield restart
        finally:
            self.send({"limit": None, "doing": ""})


def child_environment() -> dict[str, str]:
    """The child finds kbench where the parent did, also when that was the current folder."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package_root, path)))}


def _encode_error(error: BaseException) -> Message:
    encoded: Message = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    if isinstance(error, KbenchError):
        encoded |= {"message": error.message, "hint": error.hint}
    if isinstance(error, KernelFault):
        encoded |= {
            name: getattr(error, name) for name in ("kind", "kernel", "block", "thread", "location", "context_lost")
        }
    if isinstance(error, errors.CompileError):
        encoded["log"] = error.log
    return encoded


class WorkerError(Exception):
    """An exception in the child that is nobody's input error: a fault of kbench. `trace` is the child's traceback."""

    def __init__(self, trace: str):
        super().__init__(trace.strip().splitlines()[-1])
        self.trace = trace


def _decode_error(encoded: Message) -> Exception:
    kind = getattr(errors, encoded["type"], None)
    if kind is KernelFault:
        keys = ("kernel", "block", "thread", "location", "context_lost")
        return KernelFault(encoded["kind"], encoded["message"], **{key: encoded[key] for key in keys})
    if kind is errors.CompileError:
        return errors.CompileError(encoded["message"], encoded["log"], encoded["hint"])
    if isinstance(kind, type) and issubclass(kind, KbenchError):
        return kind(encoded["message"], encoded["hint"])
    return WorkerError(encoded["traceback"])


def _die_with_parent() -> None:
    """A parent killed with -9 cannot close its child, which may be inside a kernel that never ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve(target: str, descriptor: int) -> None:
    """The child's main loop: ends when the parent closes the pipe."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends us
    channel = Channel(Connection(descriptor))
    module, function = target.split(":")
    handler: Handler | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        options = channel.receive()
        while True:
            request = channel.receive()
            try:
                handler = handler or getattr(importlib.import_module(module), function)(channel, **options)
                channel.send({"result": handler.handle(request)})
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:
                channel.send({"error": _encode_error(error)})
                if isinstance(error, KernelFault) and error.context_lost:
                    break  # nothing can be done here any more, and who waits for this process must see that
    # Threads may be inside a compiler, and a lost CUDA context can hang in destructors: end at once.
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
