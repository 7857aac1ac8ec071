"""A CUDA graph of plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kbench.device.base import Bound


@dataclass(frozen=True, repr=False)
class CapturedPlan:
    """A CUDA graph of bound plans; keeps alive the memory whose addresses are in it."""

    graph: Any
    bounds: tuple[Bound, ...]

    def launch(self, stream: Any) -> None:
        """Queue all of it on a CuPy stream."""
        self.graph.launch(stream=stream)
