"""What a card can do at most: shares of it, sizes that fit, the cache, and what is measured, on a made-up device."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from check_fakes import FakeDevice
from kbench.device.cuda import gemm as gemm_module
from kbench.errors import CannotRunError, KernelFault, LaunchRefused
from kbench.family import Copy, Gemm, Launch
from kbench.measure import ceilings as module
from kbench.measure import timer
from kbench.measure.ceilings import Ceilings, fitting, measured_ceilings, share_of_ceiling
from kbench.source import load_source

CARD = Ceilings(4000.0, "a kernel", 2 << 30, {"fp32": 50.0, "bf16": 800.0}, 8192)


# ---------------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("nbytes", "flops", "dtype", "ms", "expected"),
    [
        (4e9, None, "fp32", 2.0, (0.5, "copy")),  # 1 ms of copying
        (4e9, 0.0, "fp32", 1.0, (1.0, "copy")),
        (4e6, 50e9, "fp32", 2.0, (0.5, "gemm")),  # 1 ms of multiplying
        (4e9, 80e9, "bf16", 4.0, (0.25, "copy")),  # 1 ms against 0.1 ms
        (4e9, 8e12, "bf16", 20.0, (0.5, "gemm")),  # 1 ms against 10 ms
        (None, 800e9, "bf16", 1.0, (1.0, "gemm")),
        (4e9, 1e12, "tf32", 2.0, (0.5, "copy")),  # there is no rate for tf32
        (None, 1e12, "tf32", 2.0, None),
        (None, None, "fp32", 2.0, None),
        (4e9, None, "fp32", float("inf"), (0.0, "copy")),
    ],
)
def test_the_ceiling_that_is_met_first_is_the_one_that_counts(nbytes, flops, dtype, ms, expected):
    assert share_of_ceiling(nbytes, flops, dtype, ms, CARD) == expected


def test_without_ceilings_there_is_no_share():
    assert share_of_ceiling(4e9, 1e12, "fp32", 1.0, Ceilings()) is None
    assert share_of_ceiling(4e9, 1e12, "fp32", 0.0, CARD) is None


def test_ceilings_survive_json():
    notes = Ceilings(None, gemm_tflops={"fp32": 50.0}, notes=("copy: too little memory",))
    for each in (CARD, notes, Ceilings()):
        assert Ceilings.from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_sizes_shrink_by_halves_to_what_fits():
    spare = module._SPARE_BYTES
    assert fitting(1 << 31, 1 << 28, spare + (4 << 30), lambda size: 2 * size) == 1 << 31
    assert fitting(1 << 31, 1 << 28, spare + (4 << 30) - 1, lambda size: 2 * size) == 1 << 30
    with pytest.raises(CannotRunError, match=f"needs {spare + (1 << 29):,} bytes of GPU memory, 5 are free"):
        fitting(1 << 31, 1 << 28, 5, lambda size: 2 * size)


# ---------------------------------------------------------------------------------------------- measuring


class Card(FakeDevice):
    """Takes plans and runs none; `times` gives the milliseconds of a step."""

    kind = "cuda"

    def __init__(self, times, free=1 << 40):
        super().__init__(free=free)
        self.times, self.plans, self.uploaded = times, [], {}
        self.xp = SimpleNamespace(get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None))

    def describe(self):
        return {"name": "Test GPU", "driver": "580.1"}

    def activate(self):
        return nullcontext()

    def build(self, source, kernels, arch=""):
        assert set(kernels) <= set(source.kernels)
        return "module"

    def upload(self, buffer, values):
        assert values.shape == buffer.tensor.shape and values.dtype == buffer.array.dtype
        self.uploaded[buffer.tensor.name] = values

    def prepare(self, plan, module, tensors):
        self.plans.append(plan)
        assert (module is None) == (not isinstance(plan[0], Launch))
        return plan

    def bind(self, prepared, buffers):
        return prepared


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small sizes, a timer that asks the card, no cuBLASLt, and a cache of its own."""
    for name, value in (("COPY_BYTES", 1 << 20), ("LEAST_COPY_BYTES", 1 << 18), ("_SPARE_BYTES", 0)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "GEMM_SIZE", 64)
    monkeypatch.setattr(module, "LEAST_GEMM_SIZE", 16)
    monkeypatch.setattr(
        timer, "time_plan", lambda device, bound, rule: SimpleNamespace(median_ms=device.times(bound[0]))
    )
    library = SimpleNamespace(version=130000, close=lambda: None)
    monkeypatch.setattr(gemm_module, "CublasLt", lambda: library)
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path))
    return monkeypatch


def usual(step):
    if isinstance(step, Gemm):
        return {"fp32": 8.0, "tf32": 2.0, "bf16": 1.0, "fp16": 1.0}[step.compute]
    return 2.0 if isinstance(step, Copy) else 1.0


def test_the_faster_copy_and_every_dtype_are_measured(small):
    card = Card(usual)
    found = module.measure(card)
    assert found.copy_by == "a kernel" and found.copy_bytes == 1 << 20
    assert found.copy_gbs == pytest.approx(2 * (1 << 20) / 1e-3 / 1e9)  # read and written
    assert found.gemm_tflops == pytest.approx({k: 2 * 64**3 / ms / 1e9 for k, ms in zip(
        ("fp32", "tf32", "bf16", "fp16"), (8.0, 2.0, 1.0, 1.0), strict=True)})  # fmt: skip
    assert found.gemm_size == 64 and found.notes == ()
    assert card.live == 0
    slower = module.measure(Card(lambda step: 3.0 if isinstance(step, Launch) else 1.0))
    assert slower.copy_by == "cudaMemcpyAsync"


def test_operands_are_random_and_the_kernels_grid_covers_the_copy(small):
    card = Card(usual)
    module.measure(card)
    assert np.unique(card.uploaded["from"]).size > 1000
    assert card.uploaded["a"].astype(np.float32).std() == pytest.approx(1.0, abs=0.1)
    (launch,) = (plan[0] for plan in card.plans if isinstance(plan[0], Launch))
    to, source, packets = launch.args
    assert (to, source, packets * 16) == ("to", "from", 1 << 20)
    assert launch.grid[0] * launch.block[0] * module._COPY_LOADS >= packets


def test_what_cannot_be_measured_is_a_note_and_the_rest_is_there(small):
    def no_bf16(step):
        if isinstance(step, Gemm) and step.compute == "bf16":
            raise LaunchRefused("cuBLASLt has no algorithm")
        return usual(step)

    found = module.measure(Card(no_bf16))
    assert set(found.gemm_tflops) == {"fp32", "tf32", "fp16"} and found.copy_gbs
    assert found.notes == ("bf16 GEMM: cuBLASLt has no algorithm",)
    poor = module.measure(Card(usual, free=1000))
    assert poor.copy_gbs is None and not poor.gemm_tflops and len(poor.notes) == 5
    assert poor.notes[0].startswith("copy: needs 524,288 bytes of GPU memory, 1,000 are free")


def test_short_memory_makes_it_smaller(small):
    found = module.measure(Card(usual, free=1 << 20))
    assert found.copy_bytes == 1 << 19 and found.gemm_size == 64


def test_a_fault_is_no_note(small):
    def broken(step):
        raise KernelFault("illegal-access", "gone", context_lost=True)

    with pytest.raises(KernelFault):
        module.measure(Card(broken))


def test_ceilings_are_measured_once_for_each_card_driver_and_library(small):
    notes: list[str] = []
    first = measured_ceilings(Card(usual), notes.append)
    again = measured_ceilings(Card(lambda step: pytest.fail("measured again")), notes.append)
    assert again == first
    assert notes == ["measuring what Test GPU can do at most (once; the cache keeps it)"]
    small.setattr(Card, "describe", lambda self: {"name": "Test GPU", "driver": "590.1"})
    measured_ceilings(Card(usual), notes.append)
    small.setattr(gemm_module, "CublasLt", lambda: SimpleNamespace(version=130100, close=lambda: None))
    measured_ceilings(Card(usual), notes.append)
    assert len(notes) == 3


def test_half_a_measurement_is_not_kept(small):
    def no_library():
        raise CannotRunError("nvmath is missing")

    small.setattr(gemm_module, "CublasLt", no_library)
    notes: list[str] = []
    measured_ceilings(Card(usual, free=1000), notes.append)
    measured_ceilings(Card(usual), notes.append)
    measured_ceilings(Card(usual), notes.append)
    assert len(notes) == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_copy_kernel_compiles_without_spills(arch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed: pip install -e '.[cuda13]'")
    from kbench.device.cuda.compile import compile_cubin, nvrtc_version

    try:
        nvrtc_version()
    except CannotRunError as error:
        pytest.skip(str(error))
    cubin = compile_cubin(load_source(Path(module.__file__).with_suffix(".cu")), ["copy_packets"], arch)
    assert [parameter.is_pointer for parameter in cubin.signatures["copy_packets"]] == [True, True, False]
    info = cubin.infos["copy_packets"]
    assert not info.spill_bytes and info.registers <= 64
