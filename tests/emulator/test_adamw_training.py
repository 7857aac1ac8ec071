"""adamw 3 as a training step calls it: what the check cannot ask, since its inputs are finite and its scale is not 0;
and whether stochastic rounding is random, unbiased, and the same for the same seed. On the emulator, and on a GPU if
there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kbench.catalog import kernel_folder, load_catalog
from kbench.check.buffers import Buffers
from kbench.check.case import make_case
from kbench.device.base import Device
from kbench.device.dtypes import store
from kbench.family import Array, Problem, kernels_of
from kbench.source import load_source

FAMILY = load_catalog()["adamw"]
VERSION = FAMILY.by_number[3]
RATE, SCALE = 0, 6  # places among the scalars
# A right rounding passes this many standard deviations once in two million statistics.
SIGMAS = 5.0


def emulator() -> Device:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    from kbench.device.emulator.device import EmulatorDevice

    return EmulatorDevice()


def gpu() -> Device:
    from kbench.device.cuda.probe import probe_gpu

    if reason := probe_gpu():
        pytest.skip(f"no GPU can be used: {reason}")
    from kbench.device.cuda.device import CudaDevice

    return CudaDevice()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(emulator, marks=pytest.mark.emulator, id="emulator"),
        pytest.param(gpu, marks=pytest.mark.gpu, id="gpu"),
    ],
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = request.param()
    yield opened
    opened.close()


class Update:
    """Launches of version 3 on tensors of one's own, a case's where none are given."""

    def __init__(self, device: Device, count: int, dtype: str, block: int = 64):
        self.device = device
        self.case = make_case(FAMILY, Problem({"N": count, "training": 1}, dtype), seed=1)
        self._plan = VERSION.plan(self.case.problem, block, device.props)
        source = load_source(kernel_folder() / "adamw.cu")
        module = device.build(source, kernels_of(self._plan))
        self._prepared = device.prepare(self._plan, module, tuple(self.case.tensors.values()))
        self._block = block

    def scalars(self, **places: float) -> Array:
        scalars = self.case.inputs["scalars"].copy()
        for name, value in places.items():
            scalars[{"rate": RATE, "scale": SCALE}[name]] = value
        return scalars

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        """What all tensors hold afterwards."""
        device, tensors = self.device, self.case.tensors
        buffers = Buffers(device, FAMILY, VERSION, self.case.problem, self._block, self._plan)
        with device.activate(), buffers:
            buffers.reset(self.case, 0xFF)
            for name, values in inputs.items():
                device.upload(buffers.by_name[name], store(tensors[name], values))
            device.enqueue(device.bind(self._prepared, buffers.by_name))
            device.synchronize()
            return {name: np.array(device.download(buffer)) for name, buffer in buffers.by_name.items()}


def bits(values: Array) -> Array:
    return values.view(f"u{values.dtype.itemsize}")


# ------------------------------------------------------------------------------------------------ skipped steps


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_of_0_changes_nothing_whatever_the_gradients_hold(device: Device, dtype: str, bad: float) -> None:
    update = Update(device, 301, dtype)
    grads = update.case.inputs["grads"].copy()
    grads[::3] = bad
    params = store(update.case.tensors["params"], np.linspace(-1.0, 1.0, 301))
    before = {**update.case.inputs, "params": params}
    after = update(grads=grads, params=params, scalars=update.scalars(scale=0.0))
    for name in ("params", "m", "v", *(("master",) if dtype == "bf16" else ())):
        assert np.array_equal(bits(after[name]), bits(before[name])), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_other_scale_does_change_all(device: Device, dtype: str) -> None:
    update = Update(device, 301, dtype)
    after = update(grads=np.full(301, 0.5), scalars=update.scalars(scale=1e-3))
    for name in ("m", "v", "master" if dtype == "bf16" else "params"):
        assert (bits(after[name]) != bits(update.case.inputs[name])).mean() > 0.9, name


# ------------------------------------------------------------------------------------------- stochastic rounding


def rounded(update: Update, master: Array, seed: int) -> Array:
    """The parameters that become of a master which the step leaves as it is: its rate is 0."""
    after = update(master=master, seed=np.array([seed], np.uint32), scalars=update.scalars(rate=0.0))
    assert np.array_equal(bits(after["master"]), bits(master))
    return after["params"].astype(np.float32)


def fraction(master: Array) -> Array:
    """How far each number is from its neighbour towards 0, as a share of the distance to the other."""
    return (bits(master) & np.uint32(0xFFFF)) / 65536.0


def went_away(master: Array, params: Array) -> Array:
    """Whether each was rounded away from 0; fails if one was not rounded to a neighbour."""
    towards = (bits(master) & np.uint32(0xFFFF0000)).view(np.float32)
    away = (bits(towards) + np.uint32(0x10000)).view(np.float32)
    went = params != towards
    assert np.array_equal(params, np.where(went, away, towards))
    return went


def weights(count: int) -> Array:
    """Of both signs and several powers of two, with all fractions."""
    return np.random.default_rng(3).normal(0.0, 0.05, count).astype(np.float32)


def assert_unbiased(went: Array, probability: Array) -> None:
    """Went is True with this probability in each trial, to SIGMAS standard deviations of their sum."""
    spread = np.sqrt((probability * (1.0 - probability)).sum())
    assert abs((went - probability).sum()) <= SIGMAS * spread


def test_the_mean_rounding_error_is_0_at_every_fraction(device: Device) -> None:
    """Rounding to the nearest has a mean of 0 over all fractions together, so they are told apart."""
    update, master = Update(device, 6001, "bf16", 128), weights(6001)
    share = fraction(master)
    went = np.mean([went_away(master, rounded(update, master, seed)) for seed in range(8)], axis=0)
    for low in np.arange(0.0, 1.0, 0.0625):
        bin = (share >= low) & (share < low + 0.0625)
        assert bin.sum() > 200
        spread = np.sqrt((share[bin] * (1.0 - share[bin])).sum() / 8)
        assert abs((went[bin] - share[bin]).sum()) <= SIGMAS * spread
    assert_unbiased(went_away(master, rounded(update, master, 1 << 31)), share)


def test_neighbouring_elements_and_seeds_are_rounded_independently(device: Device) -> None:
    """Of elements with the fraction 1/2, any two agree half of the time."""
    update = Update(device, 6001, "bf16", 128)
    master = ((bits(weights(6001)) & np.uint32(0xFFFF0000)) | np.uint32(0x8000)).view(np.float32)
    seeds = (0, 1, 2, 3, 0x80000000, 0xFFFFFFFF)
    went = {seed: went_away(master, rounded(update, master, seed)) for seed in seeds}
    half = np.full(6001, 0.5)
    for first in seeds:
        assert_unbiased(went[first], half)
        for distance in (1, 2, 3, 4, 128, 512):
            same = went[first][distance:] == went[first][:-distance]
            assert_unbiased(same, half[distance:])
        for second in seeds:
            if second != first:
                assert_unbiased(went[first] == went[second], half)


def test_the_same_seed_rounds_alike_whatever_the_block_size_and_the_number_of_parameters(device: Device) -> None:
    master = weights(1030)
    once = rounded(Update(device, 1030, "bf16", 64), master, 5)
    assert np.array_equal(once, rounded(Update(device, 1030, "bf16", 256), master, 5))
    assert np.array_equal(once[:301], rounded(Update(device, 301, "bf16", 32), master[:301], 5))
    assert not np.array_equal(once, rounded(Update(device, 1030, "bf16", 64), master, 6))


def test_what_bf16_holds_stays_and_a_nan_stays_one(device: Device) -> None:
    update = Update(device, 301, "bf16")
    held = (bits(weights(301)) & np.uint32(0xFFFF0000)).view(np.float32)
    held[:4] = 0.0, -0.0, 1.0, 2.0**-126
    for seed in range(4):
        assert np.array_equal(bits(rounded(update, held, seed)), bits(held))
    odd = held.copy()
    odd[::2] = np.nan
    odd.view(np.uint32)[1::4] = 0x7FFFFFFF  # the NaN of a GPU's arithmetic, one below -0
    assert np.array_equal(np.isnan(np.float32(update(master=odd)["params"])), np.isnan(odd))


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> list[Any]:
    """Philox4x32 with 7 rounds, on Python integers or arrays of uint64."""
    a, b, c, d = counter
    first, second = key
    for _ in range(7):
        of_a, of_c = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (of_c >> 32) ^ b ^ first, of_c & 0xFFFFFFFF
        c, d = (of_a >> 32) ^ d ^ second, of_a & 0xFFFFFFFF
        first, second = (first + 0x9E3779B9) & 0xFFFFFFFF, (second + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


def test_the_random_words_are_those_of_philox(device: Device) -> None:
    """First the copy here, by a known answer of the generator's authors; then the kernel, by the copy."""
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(counter, (0xA4093822, 0x299F31D0)) == [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]
    master, groups, zero = weights(6001), np.arange(1501, dtype=np.uint64), np.zeros(1501, np.uint64)
    words = np.stack(philox((groups, zero, zero, zero), (77, 0)), axis=1).reshape(-1)[:6001]
    expected = ((bits(master) + (words >> 16).astype(np.uint32)) & np.uint32(0xFFFF0000)).view(np.float32)
    assert np.array_equal(rounded(Update(device, 6001, "bf16"), master, 77), expected)
