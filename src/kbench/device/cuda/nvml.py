"""One card as NVML, the driver's management library, knows it: what it answers, or that it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Nvml:
    """NVML's handle of the card with CUDA's number `ordinal`, open until `close`. Without NVML there is none."""

    def __init__(self, ordinal: int):
        self._nvml: Any = None
        self._card: Any = None
        try:
            import pynvml
        except ImportError:
            return
        # No driver, no CuPy, a card that NVML does not list.
        with contextlib.suppress(pynvml.NVMLError, RuntimeError, ImportError):
            from cupy.cuda import runtime

            pynvml.nvmlInit()
            self._nvml = pynvml
            # CUDA's ordinals depend on $CUDA_VISIBLE_DEVICES, NVML's do not: the place on the bus is the same.
            self._card = pynvml.nvmlDeviceGetHandleByPciBusId(runtime.deviceGetPCIBusId(ordinal).encode())

    @property
    def available(self) -> bool:
        return self._card is not None

    def ask(self, question: Callable[[Any, Any], T]) -> T | None:
        """What NVML answers to `question(nvml, card)`; None where it does not say."""
        if self._card is None:
            return None
        try:
            return question(self._nvml, self._card)
        # Virtual and divided cards refuse some questions, and bindings may be older than a question.
        except (self._nvml.NVMLError, AttributeError):
            return None

    def close(self) -> None:
        """Give the handle back; nothing is answered afterwards."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._nvml = self._card = None
