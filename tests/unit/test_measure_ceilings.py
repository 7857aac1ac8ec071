"""What a card can do at most: shares of it, sizes that fit, the cache, and what is measured, on a made-up device."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from check_fakes import FakeDevice
from kbench.ceilings import Ceilings, share_of_ceiling
from kbench.device.cuda import card as card_module
from kbench.device.cuda import gemm as gemm_module
from kbench.errors import CannotRunError, KernelFault, LaunchRefused
from kbench.family import Copy, Gemm, Launch, Tensor
from kbench.measure import ceilings as module
from kbench.measure import timer
from kbench.measure.ceilings import fitting, measured_ceilings, repeats
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
        assert Ceilings.from_dict(json.loads(json.dumps({**each.to_dict(), "of a newer kbench": 1}))) == each


def test_sizes_shrink_by_halves_to_what_fits():
    spare = module._SPARE_BYTES
    assert fitting(1 << 31, 1 << 28, spare + (4 << 30), lambda size: 2 * size) == 1 << 31
    assert fitting(1 << 31, 1 << 28, spare + (4 << 30) - 1, lambda size: 2 * size) == 1 << 30
    with pytest.raises(CannotRunError, match=f"needs {spare + (1 << 29):,} bytes of GPU memory, 5 are free"):
        fitting(1 << 31, 1 << 28, 5, lambda size: 2 * size)


# ---------------------------------------------------------------------------------------------- measuring


class Card(FakeDevice):
    """Does a plan's copies and runs nothing else; `times` gives the milliseconds of a step, `note` the timer's remark
    on it."""

    kind, ordinal = "cuda", 0

    def __init__(self, times, free=1 << 40, note=lambda step: ""):
        super().__init__(free=free)
        self.times, self.note, self.timed, self.uploaded, self.filled = times, note, [], {}, {}
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
        self.uploaded[buffer.tensor.name] = values.size
        super().upload(buffer, values)

    def prepare(self, plan, module, tensors):
        assert (module is None) == (not isinstance(plan[0], Launch))
        return plan

    def bind(self, prepared, buffers):
        return prepared, buffers

    def enqueue(self, bound, stream=None, schedule=""):
        plan, buffers = bound
        for step in plan:
            to, source = (buffers[ref.tensor].array.reshape(-1)[ref.offset :] for ref in (step.target, step.source))
            to[: step.count] = source[: step.count]
        self.filled[plan[-1].target.tensor] = buffers[plan[-1].target.tensor].array.copy()


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small sizes, a timer that asks the card, no cuBLASLt, a card of our choice, and a cache of its own."""
    for name, value in (("COPY_BYTES", 1 << 20), ("LEAST_COPY_BYTES", 1 << 18), ("_SPARE_BYTES", 0), ("_TILE", 5000)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "GEMM_SIZE", 128)
    monkeypatch.setattr(module, "LEAST_GEMM_SIZE", 32)

    def time_plan(device, bound, rule, second):
        assert not second
        step = bound[0][0]
        device.timed.append(step)
        return SimpleNamespace(median_ms=device.times(step), note=device.note(step))

    monkeypatch.setattr(timer, "time_plan", time_plan)
    library = SimpleNamespace(version=130000, close=lambda: None)
    monkeypatch.setattr(gemm_module, "CublasLt", lambda: library)
    monkeypatch.setattr(card_module, "identity", lambda ordinal: {"uuid": "first", "power_limit_w": 700.0})
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
    assert found.gemm_tflops == pytest.approx({k: 2 * 128**3 / ms / 1e9 for k, ms in zip(
        ("fp32", "tf32", "bf16", "fp16"), (8.0, 2.0, 1.0, 1.0), strict=True)})  # fmt: skip
    assert found.gemm_size == 128 and found.notes == ()
    assert card.live == 0
    slower = module.measure(Card(lambda step: 3.0 if isinstance(step, Launch) else 1.0))
    assert slower.copy_by == "cudaMemcpyAsync"


def test_operands_are_random_and_the_kernels_grid_covers_the_copy(small):
    card = Card(usual)
    module.measure(card)
    assert np.unique(card.filled["from"]).size == 5000, "the tile"
    assert card.filled["a"].astype(np.float32).std() == pytest.approx(1.0, abs=0.1)
    (launch,) = (step for step in card.timed if isinstance(step, Launch))
    to, source, packets = launch.args
    assert (to, source, packets * 16) == ("to", "from", 1 << 20)
    assert launch.grid[0] * launch.block[0] * module._COPY_LOADS >= packets


def test_the_device_repeats_a_tile_of_which_the_host_has_one(small):
    card = Card(usual)
    module.measure(card)
    assert card.uploaded == {"tile": 5000}
    for name in ("from", "a", "b"):
        flat = card.filled[name].reshape(-1)
        assert (flat == np.resize(flat[:5000], flat.size)).all(), name


@pytest.mark.parametrize(("count", "tile"), [(1, 1), (7, 3), (8, 1), (12, 12), (5, 9)])
def test_repeated_tiles_fill_a_tensor_without_overlapping(count, tile):
    values = {"tile": np.arange(tile) + 1, "x": np.zeros(count, int)}
    for step in repeats(Tensor("x", (count,), "int32", "scratch"), Tensor("tile", (tile,), "int32", "scratch")):
        to, source = ((ref.offset, ref.offset + step.count) for ref in (step.target, step.source))
        assert step.source.tensor != "x" or source[1] <= to[0]
        values["x"][slice(*to)] = values[step.source.tensor][slice(*source)]
    assert (values["x"] == np.resize(values["tile"], count)).all()


def test_what_cannot_be_measured_is_a_note_and_the_rest_is_there(small):
    def no_bf16(step):
        if isinstance(step, Gemm) and step.compute == "bf16":
            raise LaunchRefused("cuBLASLt has no algorithm")
        return usual(step)

    found = module.measure(Card(no_bf16))
    assert set(found.gemm_tflops) == {"fp32", "tf32", "fp16"} and found.copy_gbs
    assert found.notes == ("bf16 GEMM not measured: cuBLASLt has no algorithm",)
    poor = module.measure(Card(usual, free=1000))
    assert poor.copy_gbs is None and not poor.gemm_tflops and len(poor.notes) == 5
    assert poor.notes[0].startswith("copy not measured: needs 524,288 bytes of GPU memory, 1,000 are free")


def test_short_memory_makes_it_smaller_which_is_said(small):
    found = module.measure(Card(usual, free=1 << 20))
    assert found.copy_bytes == 1 << 19 and found.gemm_size == 128
    assert found.notes == ("copy measured with 524,288 bytes, not 1,048,576: GPU memory is short",)


def test_the_smallest_matrices_are_the_size_that_is_told(small):
    def busy(step):
        card.free_bytes = 1 << 18 if isinstance(step, Gemm) and step.compute == "tf32" else 1 << 40
        return usual(step)

    card = Card(busy)
    found = module.measure(card)
    assert found.gemm_size == 64 and set(found.gemm_tflops) == {"fp32", "tf32", "bf16", "fp16"}
    assert found.notes == ("bf16 GEMM measured with 64 rows and columns, not 128: GPU memory is short",)


def test_what_the_timer_remarks_is_said(small):
    def note(step):
        return "maybe not cold" if isinstance(step, Launch) else "thrown away" if isinstance(step, Gemm) else ""

    found = module.measure(Card(usual, note=note))
    assert found.notes[0] == "copy: maybe not cold" and found.notes[-1] == "fp16 GEMM: thrown away"
    slower = Card(lambda step: 3.0 if isinstance(step, Launch) else 1.0, note=note)
    assert not module.measure(slower).notes[0].startswith("copy"), "of the copy that lost the race nothing is said"


def test_a_fault_is_no_note(small):
    def broken(step):
        raise KernelFault("illegal-access", "gone", context_lost=True)

    with pytest.raises(KernelFault):
        module.measure(Card(broken))


def measured_again(card, notes):
    """Whether the ceilings of a card were measured, not taken from the cache."""
    measured_ceilings(card, notes.append)
    return bool(card.timed)


def test_ceilings_are_measured_once_for_each_card_limit_driver_and_library(small):
    notes: list[str] = []
    first = measured_ceilings(Card(usual), notes.append)
    again = measured_ceilings(Card(lambda step: pytest.fail("measured again")), notes.append)
    assert again == first
    assert notes == ["measuring what Test GPU can do at most"]
    for identity in ({"uuid": "second", "power_limit_w": 700.0}, {"uuid": "second", "power_limit_w": 350.0}):
        small.setattr(card_module, "identity", lambda ordinal, identity=identity: identity)
        assert measured_again(Card(usual), notes) and not measured_again(Card(usual), notes)
    small.setattr(Card, "describe", lambda self: {"name": "Test GPU", "driver": "590.1"})
    assert measured_again(Card(usual), notes)
    small.setattr(gemm_module, "CublasLt", lambda: SimpleNamespace(version=130100, close=lambda: None))
    assert measured_again(Card(usual), notes)
    assert len(notes) == 5


@pytest.mark.parametrize(
    ("busy", "why"),
    [
        ({"free": 1000}, "copy not measured: needs 524,288 bytes of GPU memory, 1,000 are free (and 4 more)"),
        ({"free": 1 << 20}, "copy measured with 524,288 bytes, not 1,048,576: GPU memory is short"),
        ({"free": 1 << 18}, "copy not measured: needs 524,288 bytes of GPU memory, 262,144 are free (and 4 more)"),
        ({"note": lambda step: "throttled" if isinstance(step, Launch) else ""}, "copy: throttled"),
    ],
)
def test_what_a_busy_card_did_is_not_kept_and_the_user_is_told(small, busy, why):
    notes: list[str] = []
    measured_ceilings(Card(usual, **busy), notes.append)
    assert notes == ["measuring what Test GPU can do at most", f"the next sweep measures it again: {why}"]
    assert measured_again(Card(usual), notes)
    assert not measured_again(Card(usual), notes), "full sizes and nothing to remark on: kept"


def test_without_a_library_the_rest_is_measured_every_time_and_that_is_told(small):
    def no_library():
        raise CannotRunError("nvmath is missing")

    def no_gemm(step):
        return no_library() if isinstance(step, Gemm) else usual(step)

    small.setattr(gemm_module, "CublasLt", no_library)
    for _ in range(2):
        notes: list[str] = []
        assert measured_again(Card(no_gemm), notes)
        assert notes[1:] == ["the next sweep measures it again: fp32 GEMM not measured: nvmath is missing (and 3 more)"]


def test_a_cache_that_cannot_be_written_is_told(small, tmp_path):
    (tmp_path / "file").write_text("")
    small.setenv("KBENCH_CACHE", str(tmp_path / "file" / "below"))
    notes: list[str] = []
    assert measured_again(Card(usual), notes) and "the cache cannot be written" in notes[1]


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
