"""Small checkpoints for tests: a run's tensors, and what has to be found of them again."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from kbench.train.checkpoint import TrainState
from kbench.train.model import Model
from kbench.train.state_file import OptimizerState

MODEL = Model(2, 2, 8, vocab=30, context=6)
FILES = ["DONE_{}", "model_{}.bin", "state_{}_00000.bin", "train_{}.json"]


def state_of(seed: int, dtype: str = "bf16", master: bool = True) -> TrainState:
    """A run's tensors, all different from element to element and from seed to seed."""
    source = np.random.default_rng(seed)

    def tensors() -> dict[str, np.ndarray]:
        return {p.name: source.normal(0, 1, p.shape).astype(np.float32) for p in MODEL.parameters}

    params = tensors()
    if dtype == "bf16":
        params = {name: array.astype(ml_dtypes.bfloat16) for name, array in params.items()}
    return TrainState(MODEL, params, OptimizerState(tensors(), tensors(), tensors() if master else None))


def same(found: TrainState, expected: TrainState) -> None:
    assert found.model == expected.model and found.dtype == expected.dtype
    pairs = [(found.params, expected.params)]
    pairs += [(getattr(found.optimizer, kind), getattr(expected.optimizer, kind)) for kind in ("m", "v", "master")]
    for ours, theirs in pairs:
        if theirs is None:
            assert ours is None
            continue
        assert list(ours) == [p.name for p in MODEL.parameters]
        for name, array in theirs.items():
            assert ours[name].dtype == array.dtype
            assert ours[name].tobytes() == array.tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def complete(*steps: int) -> list[str]:
    return sorted(name.format(f"{step:08d}") for step in steps for name in FILES)
