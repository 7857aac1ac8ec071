"""Compilations that run ahead of the rows that need them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kbench.device.base import Device
from kbench.errors import CompileError
from kbench.source import Source


@dataclass
class _Module:
    """A compilation of several kernels of one source, running ahead of its use."""

    kernels: frozenset[str]
    future: Future[Any]


@dataclass
class Builds:
    """Compilations by source and architecture: those announced run ahead in threads, one per version."""

    device: Device
    pool: ThreadPoolExecutor
    modules: dict[tuple[str, str], list[_Module]] = field(default_factory=lambda: defaultdict(list))

    def ahead(self, source: Source, kernels: Iterable[str], arch: str) -> None:
        names = frozenset(kernels)
        modules = self.modules[source.digest, arch]
        if names and not any(names <= module.kernels for module in modules):
            modules.append(_Module(names, self.pool.submit(self.device.build, source, sorted(names), arch)))

    def module(self, source: Source, kernels: Sequence[str], arch: str) -> Any:
        """The compiled kernels. Where a joint compilation fails, these kernels are tried alone, so that one
        broken instantiation costs its own rows only. None for a plan of libraries' steps alone."""
        if not kernels:
            return None
        for module in self.modules[source.digest, arch]:
            if module.kernels.issuperset(kernels):
                try:
                    return module.future.result()
                except CompileError:
                    if module.kernels == frozenset(kernels):
                        raise
        built: Future[Any] = Future()
        try:
            built.set_result(self.device.build(source, sorted(set(kernels)), arch))
        except CompileError as error:
            built.set_exception(error)
        self.modules[source.digest, arch].append(_Module(frozenset(kernels), built))
        return built.result()
