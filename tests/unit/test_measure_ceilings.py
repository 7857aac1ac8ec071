"""What a card can do at most: shares of it, sizes that fit, the cache, and what is measured, on a made-up device."""

import hashlib
import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from check_fakes import FakeDevice
from kbench.ceilings import Ceilings, Evidence, share_of_ceiling
from kbench.device.cuda import cache
from kbench.device.cuda import card as card_module
from kbench.device.cuda import gemm as gemm_module
from kbench.errors import CannotRunError, KernelFault, LaunchRefused
from kbench.family import Copy, Gemm, Launch, Ref, Tensor
from kbench.measure import ceilings as module
from kbench.measure import probes, random_memory, timer
from kbench.measure.ceilings import kept_or_measured, measured_ceilings
from kbench.measure.random_memory import fitting, repeats
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


FULL = Ceilings(4000.0, gemm_tflops={"fp32": 50.0, "bf16": 800.0}, fma_tflops=60.0, launch_us=1.25)


@pytest.mark.parametrize(
    ("nbytes", "flops", "dtype", "ms", "launches", "expected"),
    [
        (4e6, 60e9, "fp32", 2.0, 1, (0.5, "fma")),  # the faster of the two fp32 rates is what bounds
        (4e6, 800e9, "bf16", 2.0, 1, (0.5, "gemm")),
        (4e6, 60e9, "tf32", 2.0, 1, (0.000625, "launch")),  # FMA bounds no tensor core: nothing is known of tf32
        (4e6, None, "bf16", 0.0025, 1, (0.5, "launch")),  # a microsecond of copying against 1.25
        (4e6, None, "bf16", 0.0125, 8, (0.8, "launch")),
        (8e6, None, "bf16", 0.004, 1, (0.5, "copy")),
        (None, None, "bf16", 0.0025, 1, (0.5, "launch")),
        (None, None, "bf16", 0.0025, 0, None),
    ],
)
def test_fma_and_launches_bound_too(nbytes, flops, dtype, ms, launches, expected):
    found = share_of_ceiling(nbytes, flops, dtype, ms, FULL, launches=launches)
    assert found == (expected and (pytest.approx(expected[0]), expected[1]))


def test_a_slower_fma_is_no_ceiling_beside_a_faster_gemm():
    slow = Ceilings(gemm_tflops={"fp32": 50.0}, fma_tflops=40.0)
    assert share_of_ceiling(None, 50e9, "fp32", 2.0, slow) == (0.5, "gemm")
    assert share_of_ceiling(None, 40e9, "fp32", 2.0, Ceilings(fma_tflops=40.0)) == (0.5, "fma")


def test_without_ceilings_there_is_no_share():
    assert share_of_ceiling(4e9, 1e12, "fp32", 1.0, Ceilings()) is None
    assert share_of_ceiling(4e9, 1e12, "fp32", 0.0, CARD) is None


def test_ceilings_survive_json():
    notes = Ceilings(None, gemm_tflops={"fp32": 50.0}, notes=("copy: too little memory",))
    whole = replace(FULL, read_gbs=4400.0, evidence={"copy": Evidence(3990.0, 4010.0, "4 GiB")}, measured="2026")
    for each in (CARD, notes, Ceilings(), whole):
        assert Ceilings.from_dict(json.loads(json.dumps({**each.to_dict(), "of a newer kbench": 1}))) == each


def test_records_of_an_older_kbench_have_fewer_figures():
    old = {"copy_gbs": 4000.0, "copy_by": "a kernel", "copy_bytes": 2 << 30, "gemm_size": 8192, "notes": [],
           "gemm_tflops": {"fp32": 50.0, "bf16": 800.0}}  # fmt: skip
    assert Ceilings.from_dict(old) == CARD
    assert [(f.name, f.value, f.unit, f.evidence) for f in CARD.figures()] == [
        ("copy", 4000.0, "GB/s", None), ("fp32 GEMM", 50.0, "TFLOP/s", None), ("bf16 GEMM", 800.0, "TFLOP/s", None),
    ]  # fmt: skip
    assert Ceilings.from_dict({}) == Ceilings() and Ceilings().figures() == []


NONSENSE = [
    [], "ceilings", {"copy_gbs": "fast"}, {"copy_gbs": True}, {"copy_gbs": 0}, {"l2_gbs": float("nan")},
    {"fma_tflops": float("inf")}, {"launch_us": -1.0}, {"gemm_tflops": [1.0]}, {"gemm_tflops": {"fp32": None}},
    {"notes": "a note"}, {"notes": [1]}, {"evidence": {"copy": 4.0}}, {"evidence": {"copy": {"low": 1.0}}},
    {"measured": 2026}, {"copy_bytes": 1.5}, {"gemm_size": -1},
]  # fmt: skip


@pytest.mark.parametrize("data", NONSENSE, ids=str)
def test_what_is_no_record_of_ceilings_is_refused(data):
    with pytest.raises(ValueError, match="not a"):
        Ceilings.from_dict(data)


def test_sizes_shrink_by_halves_to_what_fits():
    spare = random_memory.SPARE_BYTES
    assert fitting(1 << 31, 1 << 28, spare + (4 << 30), lambda size: 2 * size) == 1 << 31
    assert fitting(1 << 31, 1 << 28, spare + (4 << 30) - 1, lambda size: 2 * size) == 1 << 30
    with pytest.raises(CannotRunError, match=f"needs {spare + (1 << 29):,} bytes of GPU memory, 5 are free"):
        fitting(1 << 31, 1 << 28, 5, lambda size: 2 * size)


# ---------------------------------------------------------------------------------------------- measuring


class Card(FakeDevice):
    """Does a plan's copies and runs nothing else; `times` gives the milliseconds of a step, `note` the timer's remark
    on it. 132 multiprocessors and an L2 of 50 MB, as an H200."""

    kind, ordinal = "cuda", 0

    def __init__(self, times, free=1 << 40, note=lambda step: ""):
        super().__init__(free=free)
        self.props = replace(self.props, multiprocessors=132, l2_bytes=50 << 20)
        self.times, self.note, self.timed, self.uploaded, self.filled, self.built = times, note, [], {}, {}, 0
        self.modes = {}
        self.xp = SimpleNamespace(get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None))

    def describe(self):
        return {"name": "Test GPU", "driver": "580.1", "compiler": "NVRTC 13.0"}

    def activate(self):
        return nullcontext()

    def build(self, source, kernels, arch=""):
        assert {kernel.partition("<")[0] for kernel in kernels} == set(source.kernels)
        self.built += 1
        return set(kernels)

    def upload(self, buffer, values):
        assert values.shape == buffer.tensor.shape and values.dtype == buffer.array.dtype
        self.uploaded[buffer.tensor.name] = values.size
        super().upload(buffer, values)

    def prepare(self, plan, module, tensors):
        launches = {step.kernel for step in plan if isinstance(step, Launch)}
        assert launches <= module if launches else module is None
        known = {tensor.name: tensor for tensor in tensors}
        for step in plan:
            for arg in step.args if isinstance(step, Launch) else ():
                assert not isinstance(arg, str | Ref) or (arg if isinstance(arg, str) else arg.tensor) in known
        return plan

    def bind(self, prepared, buffers):
        return prepared, buffers

    def enqueue(self, bound, stream=None, schedule=""):
        plan, buffers = bound
        for step in plan:
            if isinstance(step, Copy):
                to, source = (buffers[ref.tensor].array.reshape(-1)[ref.offset :] for ref in (step.target, step.source))
                to[: step.count] = source[: step.count]
                self.filled[step.target.tensor] = buffers[step.target.tensor].array


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small sizes, a timer that asks the card, no cuBLASLt, a card of our choice, and a cache of its own."""
    for name, value in (("COPY_BYTES", 1 << 20), ("LEAST_COPY_BYTES", 1 << 18), ("GEMM_SIZE", 128),
                        ("LEAST_GEMM_SIZE", 32)):  # fmt: skip
        monkeypatch.setattr(probes, name, value)
    monkeypatch.setattr(random_memory, "SPARE_BYTES", 0)
    monkeypatch.setattr(random_memory, "TILE", 5000)

    def time_plan(device, bound, rule, mode, second=False):
        assert not second
        plan, _ = bound
        device.timed += plan[:1]
        device.modes[type(plan[0]), getattr(plan[0], "kernel", "").partition("<")[0]] = mode
        ms = math.fsum(device.times(step) for step in plan)
        return SimpleNamespace(median_ms=ms, low_ms=0.99 * ms, high_ms=1.01 * ms, note=device.note(plan[0]))

    class Timer:
        def __init__(self, device):
            self.device = device

        def sample(self, bound, hold, flush):
            assert not flush
            taken = time_plan(self.device, bound, None, "hot")
            return SimpleNamespace(event_ms=taken.median_ms, fault="" if hold else "not held")

    monkeypatch.setattr(timer, "time_plan", time_plan)
    monkeypatch.setattr(timer, "timer_of", Timer)
    library = SimpleNamespace(version=130000, close=lambda: None)
    monkeypatch.setattr(gemm_module, "CublasLt", lambda: library)
    monkeypatch.setattr(card_module, "identity", lambda ordinal: {"uuid": "first", "power_limit_w": 700.0})
    monkeypatch.setattr(card_module, "busy", lambda ordinal, idle=False: "")
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path))
    return monkeypatch


def usual(step):
    if isinstance(step, Gemm):
        return {"fp32": 8.0, "tf32": 2.0, "bf16": 1.0, "fp16": 1.0}[step.compute]
    if isinstance(step, Copy):
        return 2.0
    # By kernel; with eight loads, stores or steps more or less than the best it takes longer.
    kernel, _, count = step.kernel.partition("<")
    best, ms = {"copy_packets": ("4>", 1.0), "read_packets": ("8>", 0.8), "write_packets": ("2>", 0.9),
                "read_cached": ("8>", 0.5), "turn_pairs": ("32>", 1.0), "empty": ("", 0.0015)}[kernel]  # fmt: skip
    return ms if count == best else 1.5 * ms


def test_the_best_of_all_ways_is_what_stands(small):
    card = Card(usual)
    found = module.measure(card)
    assert found.copy_by == "a kernel" and found.copy_bytes == 1 << 20
    moved = 2 * (1 << 20)
    assert found.copy_gbs == pytest.approx(moved / 1e-3 / 1e9)  # read and written
    assert found.read_gbs == pytest.approx(moved / 0.8e-3 / 1e9)
    assert found.write_gbs == pytest.approx(moved / 0.9e-3 / 1e9)
    assert found.gemm_tflops == pytest.approx({k: 2 * 128**3 / ms / 1e9 for k, ms in zip(
        ("fp32", "tf32", "bf16", "fp16"), (8.0, 2.0, 1.0, 1.0), strict=True)})  # fmt: skip
    assert found.gemm_size == 128 and found.notes == ()
    assert found.launch_us == pytest.approx(1.5) and found.host_launch_us > 0
    assert card.live == 0 and card.built == 2  # the kernels, and the empty one
    slower = module.measure(Card(lambda step: 3.0 if getattr(step, "kernel", "") != "empty" else 0.001))
    assert slower.copy_by == "cudaMemcpyAsync", "of equals the first"


def test_work_is_counted_as_the_kernels_do_it(small):
    card = Card(usual)
    found = module.measure(card)
    launches = {step.kernel: step for step in card.timed if isinstance(step, Launch)}
    for what, least in (("copy", 1 << 20), ("read", 2 << 20), ("write", 2 << 20)):
        for count in probes._MOVES:
            step = launches[f"{what}_packets<{count}>"]
            packets = step.args[-1]
            assert packets * 16 == least and step.grid[0] * step.block[0] * count >= packets
    step = launches["read_cached<8>"]
    out, source, mask, rounds = step.args
    assert (out, source) == ("out", "from")
    assert (mask + 1) * 16 == 8 << 20 <= (50 << 20) // 4 and mask & (mask + 1) == 0
    threads = step.grid[0] * step.block[0]
    assert threads == 132 * 2048
    assert found.l2_gbs == pytest.approx(threads * 8 * rounds * 16 / 0.5e-3 / 1e9)
    step = launches["turn_pairs<32>"]
    operations = step.grid[0] * step.block[0] * step.args[-1] * 32 * 8 * 2 * 2  # steps, pairs, two each, FMA is two
    assert found.fma_tflops == pytest.approx(operations / 1e-3 / 1e12)


def test_what_comes_from_memory_is_cold_and_what_stays_on_the_chip_hot(small):
    card = Card(usual)
    module.measure(card)
    hot = {kernel for (_, kernel), mode in card.modes.items() if mode == "hot"}
    assert hot == {"read_cached", "turn_pairs", "empty"}
    assert {mode for (kind, _), mode in card.modes.items() if kind in (Copy, Gemm)} == {"cold"}


def test_every_figure_says_how_it_was_measured_and_when(small):
    found = module.measure(Card(usual))
    names = [figure.name for figure in found.figures()]
    assert names == [
        "copy", "read", "write", "L2 read", "fp32 FMA", "fp32 GEMM", "tf32 GEMM", "bf16 GEMM", "fp16 GEMM", "launch",
        "host launch",
    ]  # fmt: skip
    for figure in found.figures():
        assert figure.evidence.low <= figure.value <= figure.evidence.high and figure.evidence.how, figure.name
    how = {figure.name: figure.evidence.how for figure in found.figures()}
    assert how["copy"] == "1 MiB read and written, a kernel, 4 loads a thread, cold L2"
    assert how["read"] == "2 MiB, 8 loads a thread, cold L2" and how["write"] == "2 MiB, 2 stores a thread, cold L2"
    assert (
        how["L2 read"].startswith("8 MiB read 512 times") and how["bf16 GEMM"] == "M = N = K = 128, cuBLASLt, cold L2"
    )
    assert found.measured.endswith("Z") and len(found.measured) == 20


def test_operands_are_random(small):
    card = Card(usual)
    module.measure(card)
    assert np.unique(card.filled["memory"]).size == 5000, "the tile"
    assert card.filled["a"].astype(np.float32).std() == pytest.approx(1.0, abs=0.1)
    assert np.unique(card.filled["in"]).size > 4000 and np.unique(card.filled["from"]).size == 5000


def test_the_device_repeats_a_tile_of_which_the_host_has_one(small):
    card = Card(usual)
    module.measure(card)
    assert card.uploaded == {"tile": 5000}
    for name in ("memory", "a", "b"):
        flat = card.filled[name].reshape(-1)
        assert (flat == np.resize(flat[:5000], flat.size)).all(), name


@pytest.mark.parametrize(
    "sample",
    [
        lambda bound, hold, flush: SimpleNamespace(event_ms=1.0, fault=""),
        lambda bound, hold, flush: SimpleNamespace(event_ms=float(len(bound[0])), fault="could not be held"),
    ],
)
def test_chains_that_cannot_be_told_apart_give_no_launch_time(small, sample):
    small.setattr(timer, "timer_of", lambda device: SimpleNamespace(sample=sample))
    found = module.measure(Card(usual))
    assert found.launch_us is None and found.host_launch_us is None and found.copy_gbs
    assert found.notes == ("launches not measured: 512 launches cannot be told from 64 by their times",)


def test_a_gpu_without_an_l2_to_speak_of(small):
    card = Card(usual)
    card.props = replace(card.props, l2_bytes=0)
    found = module.measure(card)
    assert found.l2_gbs is None and found.notes == ("L2 read not measured: the GPU does not say how large its L2 is",)


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
    assert poor.copy_gbs is poor.read_gbs is None and not poor.gemm_tflops and len(poor.notes) == 5
    short = "copy, read and write not measured: needs 524,288 bytes of GPU memory, 1,000 are free"
    assert poor.notes[0].startswith(short)
    assert poor.l2_gbs and poor.fma_tflops and poor.launch_us, "these take little"


def test_short_memory_makes_it_smaller_which_is_said(small):
    found = module.measure(Card(usual, free=1 << 20))
    assert found.copy_bytes == 1 << 19 and found.gemm_size == 128
    assert found.notes == ("copy, read and write measured with 524,288 bytes, not 1,048,576: GPU memory is short",)


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
        return (
            "maybe not cold"
            if "packets" in getattr(step, "kernel", "")
            else "thrown away"
            if isinstance(step, Gemm)
            else ""
        )

    found = module.measure(Card(usual, note=note))
    assert found.notes[0] == "copy: maybe not cold" and found.notes[-1] == "fp16 GEMM: thrown away"
    slower = Card(lambda step: 3.0 if isinstance(step, Launch) else 1.0, note=note)
    assert not module.measure(slower).notes[0].startswith("copy"), "of the copy that lost the race nothing is said"


def test_a_fault_that_costs_the_context_is_no_note_and_another_is(small):
    def broken(lost, kernel):
        def time(step):
            if getattr(step, "kernel", "").startswith(kernel):
                raise KernelFault("launch-failed", "no valid samples", context_lost=lost)
            return usual(step)

        return Card(time)

    with pytest.raises(KernelFault):
        module.measure(broken(True, "read_cached"))
    found = module.measure(broken(False, "read_cached"))
    assert found.notes == ("L2 read not measured: no valid samples",) and found.l2_gbs is None and found.fma_tflops
    card = broken(False, "write")
    found = module.measure(card)
    assert found.notes == ("write not measured: no valid samples",) and found.copy_gbs and found.read_gbs
    assert card.live == 0


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
    for changed in ({"driver": "590.1"}, {"compiler": "NVRTC 13.1"}):
        facts = {"name": "Test GPU", "driver": "580.1", "compiler": "NVRTC 13.0"} | changed
        small.setattr(Card, "describe", lambda self, facts=facts: facts)
        assert measured_again(Card(usual), notes)
    small.setattr(gemm_module, "CublasLt", lambda: SimpleNamespace(version=130100, close=lambda: None))
    assert measured_again(Card(usual), notes)
    assert len(notes) == 6


@pytest.mark.parametrize(
    ("busy", "why"),
    [
        (
            {"free": 1000},
            "copy, read and write not measured: needs 524,288 bytes of GPU memory, 1,000 are free (and 4 more)",
        ),
        ({"free": 1 << 20}, "copy, read and write measured with 524,288 bytes, not 1,048,576: GPU memory is short"),
        (
            {"free": 1 << 18},
            "copy, read and write not measured: needs 524,288 bytes of GPU memory, 262,144 are free (and 4 more)",
        ),
        ({"note": lambda step: "throttled" if isinstance(step, Gemm) else ""}, "fp32 GEMM: throttled (and 3 more)"),
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


def test_again_measures_what_is_kept_and_keeps_the_old_if_the_new_is_no_good(small):
    notes: list[str] = []
    old, cached = kept_or_measured(Card(usual), notes.append)
    assert not cached and kept_or_measured(Card(usual), notes.append) == (old, True)
    slower = Card(lambda step: 2 * usual(step), note=lambda step: "throttled" if isinstance(step, Gemm) else "")
    new, cached = kept_or_measured(slower, notes.append, again=True)
    assert not cached and new.copy_gbs == pytest.approx(old.copy_gbs / 2)
    assert notes[-1] == f"not kept; what was measured at {old.measured} is: fp32 GEMM: throttled (and 3 more)"
    assert kept_or_measured(Card(usual), notes.append) == (old, True)
    new, _ = kept_or_measured(Card(lambda step: 2 * usual(step)), notes.append, again=True)
    assert kept_or_measured(Card(usual), notes.append) == (new, True)


def test_what_is_measured_beside_others_is_said_and_not_kept(small):
    notes: list[str] = []
    small.setattr(card_module, "busy", lambda ordinal, idle=False: "1 other process uses this GPU (pid 7)")
    found = measured_ceilings(Card(usual), notes.append)
    assert found.notes == ("measured beside others: 1 other process uses this GPU (pid 7)",)
    assert notes[1] == f"the next sweep measures it again: {found.notes[0]}"
    answers = iter(["", "1 other process uses this GPU (pid 8)"])  # one that came meanwhile
    small.setattr(card_module, "busy", lambda ordinal, idle=False: next(answers))
    assert "pid 8" in measured_ceilings(Card(usual), notes.append).notes[0]
    small.setattr(card_module, "busy", lambda ordinal, idle=False: "")
    found, _ = kept_or_measured(Card(usual), notes.append, beside="others keep this GPU 90% busy")
    assert found.notes == ("measured beside others: others keep this GPU 90% busy",)
    assert measured_again(Card(usual), notes) and not measured_again(Card(usual), notes)


def entry_of(folder):
    (path,) = (folder / "ceilings").iterdir()
    return path


def foreign(fields):
    """Replaces the one entry by a whole one with other fields."""

    def change(path):
        head = json.loads(path.read_bytes().splitlines()[2])
        path.write_bytes(cache._encode(head["key"], fields, b""))

    return change


def whole(body):
    """Replaces it by bytes with the right checksum."""
    return lambda path: path.write_bytes(cache._MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def folder_in_its_place(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        *(foreign(data) for data in NONSENSE if isinstance(data, dict)),
        foreign({}),
        foreign({"gpu": "of something else"}),
        *(whole(body) for body in (b"", b"[]", b"{}", b'"x"', b"\xff\xfe", b'{"key": {}, "fields": 3}', b"null\n")),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(b"\0" * 300),
        folder_in_its_place,
    ],
)
def test_an_entry_that_is_damaged_or_foreign_is_measured_again(small, tmp_path, damage):
    notes: list[str] = []
    assert measured_again(Card(usual), notes)
    damage(entry_of(tmp_path))
    assert measured_again(Card(usual), notes)
    if damage is not folder_in_its_place:
        assert not measured_again(Card(usual), notes), "what was measured anew took its place"


# ---------------------------------------------------------------------------------------------- the kernels


def require_nvrtc():
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed: pip install -e '.[cuda13]'")
    from kbench.device.cuda.compile import nvrtc_version

    try:
        nvrtc_version()
    except CannotRunError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_compile_without_spills(arch):
    require_nvrtc()
    from kbench.device.cuda.compile import compile_cubin

    cubin = compile_cubin(load_source(probes.SOURCE), probes.KERNELS, arch)
    pointers = {name: [parameter.is_pointer for parameter in found] for name, found in cubin.signatures.items()}
    assert pointers["copy_packets<4>"] == [True, True, False] == pointers["read_packets<4>"]
    assert pointers["write_packets<4>"] == [True, False]
    for name, info in cubin.infos.items():
        assert not info.spill_bytes and info.registers <= 64, name
    # As many threads as a multiprocessor holds, all at once: in a second wave most of the card would idle.
    for name in ("read_cached<8>", "turn_pairs<16>", "turn_pairs<32>"):
        assert cubin.infos[name].registers <= 32, name


def test_the_compiler_leaves_all_loads_stores_and_multiplications():
    require_nvrtc()
    from kbench.device.cuda.compile import compile_ptx

    ptx = compile_ptx(load_source(probes.SOURCE), probes.KERNELS, "sm_90")
    bodies = {name: ptx.text.partition(f".entry {lowered}(")[2].partition(".entry ")[0]
              for name, lowered in ptx.lowered.items()}  # fmt: skip
    for count in probes._MOVES:
        assert bodies[f"copy_packets<{count}>"].count("ld.global.cs.v4") == count
        assert bodies[f"copy_packets<{count}>"].count("st.global.cs.v4") == count
        assert bodies[f"read_packets<{count}>"].count("ld.global.cs.v4") == count
        assert bodies[f"write_packets<{count}>"].count("st.global.cs.v4") == count
    for loads in probes._L2_LOADS:  # past L1, inside of the loop
        body = bodies[f"read_cached<{loads}>"]
        assert body.count("ld.global.cg.v4") == loads and " bra " in body
    for steps in probes._FMA_STEPS:
        body = bodies[f"turn_pairs<{steps}>"]
        assert body.count("fma.rn.f32") == steps * probes._FMA_CHAINS and " bra " in body
