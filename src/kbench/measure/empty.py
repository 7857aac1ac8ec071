"""A kernel that does nothing: what is timed of it is what launching costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kbench.family import Launch
from kbench.source import load_source

if TYPE_CHECKING:
    from kbench.device.base import Bound
    from kbench.device.cuda.device import CudaDevice


def empty_launches(device: CudaDevice, *counts: int) -> list[Bound]:
    """For each count so many launches of the smallest grid, ready to be queued."""
    module = device.build(load_source(Path(__file__).with_name("empty.cu")), ["empty"])
    plans = [(Launch("empty", (1,), (1,), ()),) * count for count in counts]
    return [device.bind(device.prepare(plan, module, ()), {}) for plan in plans]
