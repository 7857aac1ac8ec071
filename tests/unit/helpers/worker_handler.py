"""Handlers that test_worker.py runs in a child process."""

import os
import signal
import time

from kbench.errors import CannotRunError, CompileError, KernelFault


class Handler:
    def __init__(self, channel, greeting):
        self.channel = channel
        self.greeting = greeting

    def handle(self, request):
        return getattr(self, request["do"])(**request.get("with", {}))

    def greet(self, name):
        self.channel.note(f"about to greet {name}")
        return f"{self.greeting}, {name}"

    def hang(self):
        with self.channel.limit(0.1, "a launch of spin"):
            time.sleep(60)

    def slow_but_alive(self):
        with self.channel.limit(0.2, "five launches") as restart:
            for _ in range(5):
                time.sleep(0.1)
                restart()
        time.sleep(0.5)  # outside the limit: nothing is killed
        return "done"

    def die(self, signal_name):
        os.kill(os.getpid(), getattr(signal, signal_name))

    def leave(self):
        os._exit(9)

    def cannot(self):
        raise CannotRunError("no GPU", "buy one")

    def compile(self):
        raise CompileError("x.cu:3: expected ';'", "line one\nline two")

    def fault(self):
        raise KernelFault("out-of-bounds", "read", kernel="k", block=(1, 0, 0), thread=(2, 0, 0), location="x.cu:7")

    def bug(self):
        return 1 / 0

    def write(self, descriptor, text):
        os.pwrite(descriptor, text.encode(), 0)

    def print(self):
        print("from a kernel")
        return "printed"


def make(channel, **options):
    return Handler(channel, **options)
