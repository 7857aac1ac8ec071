"""Weights from scratch: PyTorch's numbers, in PyTorch's order. The values were drawn by PyTorch 2.13 on a CPU."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from kbench.errors import UsageError
from kbench.train.initial import NormalStream, initial_weights
from kbench.train.model import PRESETS, Model

# torch.manual_seed(42), torch.randn(20): the last 16 are drawn anew, because 20 is no multiple of 16.
TWENTY = [
    1.92691529, 1.48728406, 0.9007172, -2.10552096, -0.75813115, 1.07831764, 0.80080056, 1.68062055, 0.35585991,
    -0.68662298, -0.49335635, 0.24148779, -0.23162432, 0.04175949, -0.25157529, 0.85985851, -0.30972677, -0.3957105,
    0.80340934, -0.62159538,
]  # fmt: skip
# Seed 42: the first and the last element of what each draw for `nano` fills.
NANO = {
    "wte": [(0.038538303, -0.005868122)],
    "wpe": [(-0.026093172, 0.009639267)],
    "qkvw": [(-0.005864876, -0.005308236), (0.000756815, 0.02723329)],
    "attprojw": [(-0.007837821, -0.003360454), (-0.001858035, 0.009182161)],
    "fcw": [(-0.012860673, 0.003438167), (-0.014957805, -0.003258002)],
    "fcprojw": [(-0.009773993, -0.003839042), (-0.006816769, -0.02098036)],
}
# PyTorch's own logarithm and cosine differ between processors: at std 1, by up to 2.5e-6.
NEAR = 4e-6


def drawn(stream: NormalStream, count: int) -> np.ndarray:
    out = np.empty(count, np.float32)
    stream.fill(out, 1.0)
    return out


def test_sixteen_and_more_come_in_groups_and_the_rest_is_drawn_again() -> None:
    np.testing.assert_allclose(drawn(NormalStream(42), 20), TWENTY, atol=NEAR, rtol=0)


def test_fewer_than_sixteen_come_in_pairs_and_the_second_of_a_pair_is_kept() -> None:
    stream = NormalStream(42)
    np.testing.assert_allclose(
        drawn(stream, 5), [0.33669037, 0.12880941, 0.23446237, 0.23033303, -1.12285638], rtol=1e-6
    )
    np.testing.assert_allclose(drawn(stream, 2), [-0.18632829, 2.20820141], rtol=1e-6)
    np.testing.assert_allclose(drawn(stream, 16)[:2], [1.64231694, -0.15959747], atol=NEAR, rtol=0)
    np.testing.assert_allclose(drawn(stream, 1), [-0.63799703], rtol=1e-6)


def test_chunks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(NormalStream(7), 1000)
    monkeypatch.setattr("kbench.train.initial._CHUNK", 64)
    np.testing.assert_array_equal(drawn(NormalStream(7), 1000), whole)


def test_every_tensor_is_drawn_in_its_turn() -> None:
    weights = initial_weights(PRESETS["nano"])
    for name, ends in NANO.items():
        parts = weights[name].reshape(len(ends), -1)
        for part, (first, last) in zip(parts, ends, strict=True):
            np.testing.assert_allclose((part[0], part[-1]), (first, last), atol=0.02 * NEAR, rtol=0)


def test_constants_shapes_spread_and_padding() -> None:
    model = Model(2, 2, 64, vocab=300, context=64)
    weights = initial_weights(model, 3)
    assert list(weights) == [p.name for p in model.parameters]
    for p in model.parameters:
        array = weights[p.name]
        assert (array.shape, array.dtype) == (p.shape, np.float32)
        if p.std:
            assert abs(array[: model.vocab].std() / p.std - 1) < 0.05
        else:
            assert (array == (1 if p.name in ("ln1w", "ln2w", "lnfw") else 0)).all()
    assert not weights["wte"][300:].any() and weights["wte"][299].any()
    assert weights["attprojw"].std() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert (initial_weights(model, 4)["wte"] != weights["wte"])[:300].any()


def test_the_largest_numbers_of_the_generator_stay_finite() -> None:
    # u = 0 and the largest u: the logarithm of 1 and of 2^-24.
    from kbench.train.initial import _box_muller

    ends = np.array([0.0, 1 - 2**-24] * 8, np.float32)
    assert np.isfinite(_box_muller(ends, 1.0)).all()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_the_generator_cannot_take(seed: int) -> None:
    with pytest.raises(UsageError, match="from 0 to 4294967295"):
        initial_weights(PRESETS["nano"], seed)


def test_124_million_take_seconds() -> None:
    model = PRESETS["d6"]  # 30 million: a quarter of the time
    start = time.perf_counter()
    initial_weights(model)
    assert time.perf_counter() - start < 5


def test_every_number_is_pytorchs() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed", exc_type=ImportError)
    torch.manual_seed(42)
    model = Model(2, 2, 64, vocab=1001, context=33)
    weights = initial_weights(model)

    def same(ours: np.ndarray, std: float) -> None:
        theirs = torch.empty(ours.shape).normal_(0.0, std).numpy()
        np.testing.assert_allclose(ours, theirs, atol=std * NEAR, rtol=0)

    same(weights["wte"][:1001], 0.02)
    same(weights["wpe"], 0.02)
    for layer in range(2):
        for name, std in (("qkvw", 0.02), ("attprojw", 0.01), ("fcw", 0.02), ("fcprojw", 0.01)):
            same(weights[name][layer], std)
