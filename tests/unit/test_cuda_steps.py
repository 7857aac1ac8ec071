"""Limits and ranges of launches, fills and copies; redzones; what CUDA's statuses mean."""

import ctypes
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kbench.device import redzone
from kbench.device.arguments import parse_signature
from kbench.device.base import Buffer, Damage, KernelInfo
from kbench.device.cuda import memory
from kbench.device.cuda.faults import error_of
from kbench.device.cuda.steps import Kernel, PreparedCopy, PreparedFill, PreparedLaunch
from kbench.errors import CannotRunError, KernelFault, LaunchRefused
from kbench.family import Copy, Fill, Launch, Props, Ref, Tensor

OPTIN = 232_448
PROPS = Props("H200", "sm_90", 132, 2048, 1024, 49_152, OPTIN, 233_472, 65_536, 60 << 20, 1 << 37)
TENSORS = [
    Tensor("x", (20,), "fp32", "scratch"),
    Tensor("y", (20,), "fp32", "scratch"),
    Tensor("h", (7,), "bf16", "scratch"),
    Tensor("i", (6,), "int32", "scratch"),
    Tensor("d", (6,), "fp64", "scratch"),
]


def kernel(static: int = 1024, max_threads: int = 512) -> Kernel:
    info = KernelInfo("k", registers=72, static_shared=static, max_threads=max_threads)
    return Kernel("k", 7, parse_signature("*f f l"), info)


def launch(
    grid: tuple[int, ...] = (1,), block: tuple[int, ...] = (32,), args: tuple[Any, ...] = ("x", 1.0, 3), shared: int = 0
) -> PreparedLaunch:
    return PreparedLaunch(Launch("k", grid, block, args, shared), kernel(), PROPS, TENSORS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block": (513,)}, "513 threads per block; as compiled .72 registers a thread. it can have 512"),
        ({"block": (32, 8, 3)}, "768 threads"),
        ({"block": (1, 1, 65)}, "z = 65, allowed are 1 to 64"),
        ({"block": (0,)}, "x = 0, allowed are 1 to 1024"),
        ({"grid": (0,)}, "the grid of kernel k has x = 0"),
        ({"grid": (1, 65_536)}, "y = 65536, allowed are 1 to 65535"),
        ({"grid": (2**31,)}, "allowed are 1 to 2147483647"),
        ({"shared": OPTIN - 1024 + 1}, f"needs {OPTIN + 1} bytes of shared memory .* can have {OPTIN}"),
        ({"args": ("x", 1.0)}, "takes 3 arguments"),
        ({"args": ("i", 1.0, 3)}, "holds int32"),
    ],
)
def test_a_launch_beyond_a_limit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchRefused, match=words):
        launch(**change)


def test_the_limits_themselves_are_allowed() -> None:
    launch(grid=(2**31 - 1, 65_535, 65_535), block=(8, 1, 64), shared=OPTIN - 1024)


@pytest.mark.parametrize(("dynamic", "asked"), [(0, 0), (48 * 1024 - 1024, 0), (48 * 1024 - 1023, 48 * 1024 - 1023)])
def test_more_than_48_kib_have_to_be_asked_for(dynamic: int, asked: int) -> None:
    assert launch(shared=dynamic).asks_for_shared == asked


def test_every_step_but_those_of_libraries_needs_no_workspace() -> None:
    from kbench.device.cuda.device import _AllReduceStep

    steps = (launch(), PreparedFill(Fill(Ref("x")), TENSORS), PreparedCopy(Copy(Ref("x"), Ref("y"), 1), TENSORS))
    assert [step.workspace for step in (*steps, _AllReduceStep)] == [0] * 4


class RecordingDriver:
    """Takes down the calls of a bound step; every one succeeds."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[int]:
            self.calls.append((name, *args))
            return (0,)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    recording = RecordingDriver()
    monkeypatch.setattr("kbench.device.cuda.steps.driver_api", lambda: recording)
    return recording


def address(name: str) -> int:
    return {"x": 1024, "y": 4096, "h": 8192, "i": 16_384, "d": 32_768}[name]


BITS = struct.unpack("<I", struct.pack("<f", 1.5))[0]


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (Fill(Ref("x", 2)), [("cuMemsetD8Async", 1032, 0, 72, 5)]),
        (Fill(Ref("x", 2), 1.5, 3), [("cuMemsetD32Async", 1032, BITS, 3, 5)]),
        (Fill(Ref("x"), 0.0, 0), []),
        (Fill(Ref("h", 1), 2.0), [("cuMemsetD16Async", 8194, 0x4000, 6, 5)]),
        (Fill(Ref("i"), -1), [("cuMemsetD8Async", 16_384, 255, 24, 5)]),
        (Fill(Ref("i"), 7), [("cuMemsetD32Async", 16_384, 7, 6, 5)]),
        (
            Fill(Ref("d"), 1.5),
            [("cuMemsetD2D32Async", 32_768, 8, 0, 1, 6, 5), ("cuMemsetD2D32Async", 32_772, 8, 0x3FF80000, 1, 6, 5)],
        ),
        (Copy(Ref("y", 1), Ref("x", 2), 5), [("cuMemcpyDtoDAsync", 4100, 1032, 20, 5)]),
    ],
)
def test_fills_and_copies(step: Fill | Copy, calls: list[tuple[Any, ...]], driver: RecordingDriver) -> None:
    prepared = PreparedFill(step, TENSORS) if isinstance(step, Fill) else PreparedCopy(step, TENSORS)
    run = prepared.bind(address, 0)
    assert driver.calls == []
    run(5)
    assert driver.calls == calls


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Fill(Ref("x", 3), 0.0, 18), "elements 3 to 21 are outside tensor x of 20"),
        (Fill(Ref("x", -1)), "outside"),
        (Fill(Ref("z")), "names the tensor 'z'"),
        (Fill(Ref("i"), 1.5), "1.5 does not fit int32"),
        (Fill(Ref("i"), 2.0**31), "does not fit int32"),
        (Copy(Ref("h"), Ref("x"), 2), "types differ"),
        (Copy(Ref("y", 18), Ref("x"), 3), "outside tensor y"),
        (Copy(Ref("x", 4), Ref("x"), 5), "overlap"),
    ],
)
def test_fills_and_copies_that_do_not_fit(step: Fill | Copy, words: str, driver: RecordingDriver) -> None:
    with pytest.raises(LaunchRefused, match=words):
        (PreparedFill(step, TENSORS) if isinstance(step, Fill) else PreparedCopy(step, TENSORS)).bind(address, 0)


def test_a_launch_passes_addresses_and_typed_values(driver: RecordingDriver) -> None:

    run = launch(grid=(3, 2), block=(64,), args=(Ref("x", 3), 1.5, 2**40), shared=16).bind(address, 0)
    driver.calls.clear()
    run(99)
    ((name, _function, *dimensions, shared, stream, parameters, extra),) = driver.calls
    assert (name, dimensions, shared, stream, extra) == ("cuLaunchKernel", [3, 2, 1, 64, 1, 1], 16, 99, 0)
    pointers = (ctypes.c_void_p * 3).from_address(parameters)
    kinds: tuple[Any, ...] = (ctypes.c_void_p, ctypes.c_float, ctypes.c_int64)
    assert [kind.from_address(p).value for kind, p in zip(kinds, pointers, strict=True)] == [1024 + 12, 1.5, 2**40]


@pytest.mark.parametrize("word", redzone.PATTERNS)
def test_a_redzone_is_nans_of_every_type_and_no_other_fill(word: int) -> None:
    zone = redzone.pattern(word, 0, memory.REDZONE)
    assert zone.size == memory.REDZONE and memory.REDZONE % 256 == 0
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        assert np.isnan(zone.view(dtype)).all()
    assert not {0xFF, 0x00} & set(zone.tolist())
    # Behind a tensor of an odd number of bytes the pattern goes on where the allocation's left off.
    assert redzone.pattern(word, 1, 8)[0] == zone[1] and redzone.pattern(word, 3, 8)[1] == zone[0]


def test_redzone_words_take_turns() -> None:
    words = [redzone.next_pattern() for _ in redzone.PATTERNS]
    # 0x7FFF is the NaN that a GPU computes.
    assert sorted(words) == sorted(set(redzone.PATTERNS)) and 0x7FFF not in words


@pytest.mark.parametrize(
    ("status", "kind"),
    [(700, "illegal-access"), (716, "misaligned"), (710, "assert"), (702, "timeout"), (719, "launch-failed")],
)
def test_sticky_errors_lose_the_context(status: int, kind: str) -> None:
    error = error_of(status, "launch of kernel k", "k")
    assert isinstance(error, KernelFault)
    assert (error.kind, error.context_lost, error.kernel) == (kind, True, "k")
    assert f"CUDA error {status}" in str(error)


def test_refused_launches_and_missing_memory_lose_nothing() -> None:
    assert isinstance(error_of(1, "launch of k"), LaunchRefused)
    assert isinstance(error_of(701, "launch of k"), LaunchRefused)
    assert isinstance(error_of(2, "launch of k"), CannotRunError)
    unknown = error_of(12_345, "launch of k")
    assert isinstance(unknown, KernelFault) and not unknown.context_lost


@pytest.mark.parametrize(
    ("at", "count", "offset"),
    [
        (0, 2, -memory.REDZONE),
        (memory.REDZONE - 4, 4, -4),
        (memory.REDZONE + 7, 1, 7),
        (2 * memory.REDZONE + 6, 1, memory.REDZONE + 6),
    ],
)
def test_damage_is_located_and_mended(monkeypatch: pytest.MonkeyPatch, at: int, count: int, offset: int) -> None:
    """On host memory: seven bytes between two redzones."""

    monkeypatch.setattr(memory, "copy_out", lambda address, v, stream: ctypes.memmove(v.ctypes.data, address, v.nbytes))
    monkeypatch.setattr(memory, "copy_in", lambda address, v, stream: ctypes.memmove(address, v.ctypes.data, v.nbytes))
    word = redzone.PATTERNS[3]
    whole = np.full(memory.REDZONE + 4, word, dtype=np.uint16).view(np.uint8)
    allocation = whole.copy()
    buffer = Buffer(Tensor("t", (7,), "uint8", "out"), None, allocation.ctypes.data + memory.REDZONE, redzone=word)
    allocation[memory.REDZONE : memory.REDZONE + 7] = 1  # the tensor itself may be written
    assert memory.check_redzones(buffer, None) is None
    allocation[at : at + count] = 0
    assert memory.check_redzones(buffer, None) == Damage("t", offset, count)
    allocation[memory.REDZONE : memory.REDZONE + 7] = whole[memory.REDZONE : memory.REDZONE + 7]
    np.testing.assert_array_equal(allocation[: 2 * memory.REDZONE + 7], whole[: 2 * memory.REDZONE + 7])
