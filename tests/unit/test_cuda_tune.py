"""Which algorithm a GEMM gets: measured, remembered in this process and on disk, re-measured when in doubt."""

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from column_major import fake_library
from kbench.device.cuda import tune
from kbench.device.cuda.gemm import PreparedGemm
from kbench.errors import LaunchRefused
from kbench.family import Gemm, Matrix, Ref, Tensor

STEP = Gemm(Matrix("a", 4, 8), Matrix("b", 8, 2), Matrix("out", 4, 2), "fp32")
TENSORS = [Tensor(name, (count,), "fp32", "scratch") for name, count in (("a", 32), ("b", 16), ("out", 8), ("bias", 2))]
BIASED = replace(STEP, bias="bias", gelu=True)
PLENTY = 1 << 40


class Bench:
    """A library that offers three algorithms, and how often they were measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.library = fake_library()
        self.library.api.offers = [(1, 100, 0), (2, 0, 0), (3, 300, 0)]
        self.times = [3.0, 1.0, 2.0]
        self.measured = 0
        monkeypatch.setattr(tune, "_chosen", {})
        monkeypatch.setattr(tune, "_measure", self._measure)
        self._monkeypatch = monkeypatch

    def _measure(self, gemm: PreparedGemm, candidates: list[Any], l2_bytes: int, stream: Any) -> list[float]:
        self.measured += 1
        return self.times[: len(candidates)]

    def new_process(self) -> None:
        self._monkeypatch.setattr(tune, "_chosen", {})

    def choose(self, gpu: str = "H200", free: int = PLENTY, step: Gemm = STEP) -> tuple[int, int, str]:
        """Number of the algorithm, its workspace, the note."""
        gemm = PreparedGemm(self.library, step, TENSORS)
        note = tune.choose(gemm, gpu, 1 << 20, lambda: free, None)
        return int(gemm.algo["data_"][0, 0]), gemm.workspace, note


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path))
    return Bench(monkeypatch)


def test_the_fastest_is_measured_once_per_machine(bench: Bench) -> None:
    for _ in range(2):
        assert bench.choose() == (2, 0, "")
    bench.new_process()
    assert bench.choose() == (2, 0, "")
    assert bench.measured == 1


def test_another_gpu_library_or_shape_is_measured_anew(bench: Bench) -> None:
    bench.choose()
    bench.choose(gpu="A100")
    bench.library.version += 1
    bench.choose()
    bench.choose(step=Gemm(Matrix("a", 4, 8), Matrix("b", 8, 1), Matrix("out", 4, 1), "fp32"))
    assert bench.measured == 4


def test_a_stored_algorithm_that_the_library_rejects_is_not_used(bench: Bench) -> None:
    bench.choose()
    bench.new_process()
    bench.library.api.offers = [(1, 100, 0), (7, 0, 0)]
    bench.times = [3.0, 2.0]
    assert bench.choose()[0] == 7
    assert bench.measured == 2


def test_with_little_memory_the_heuristics_first_is_taken_and_not_remembered(bench: Bench) -> None:
    algo, workspace, note = bench.choose(free=1 << 20)
    assert (algo, workspace) == (1, 100)
    assert "took cuBLASLt's first algorithm" in note and "1,048,576 are free" in note
    assert bench.choose()[0] == 2


def test_a_single_candidate_needs_no_measurement(bench: Bench) -> None:
    bench.library.api.offers = [(5, 0, 0)]
    assert bench.choose(free=0) == (5, 0, "")
    assert bench.measured == 0


def test_a_cache_that_cannot_be_written_to_only_costs_time(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "file"))
    assert bench.choose()[0] == 2
    bench.new_process()
    assert bench.choose()[0] == 2
    assert bench.measured == 2


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("times", "index"),
    [([1.0], 0), ([1.0, 0.99, 1.5], 0), ([1.0, 0.97], 1), ([INFINITE, 2.0, 1.0], 2), ([1.0, 0.9, 0.89], 1)],
)
def test_the_earlier_of_equals_is_taken(times: list[float], index: int) -> None:
    assert tune.fastest(times) == index


def test_if_nothing_can_be_launched_it_is_refused() -> None:
    with pytest.raises(LaunchRefused):
        tune.fastest([INFINITE, INFINITE])


# -------------------------------------------------------------------------------------------- epilogues


def test_an_epilogue_is_measured_on_its_own(bench: Bench) -> None:
    for step in (STEP, replace(STEP, bias="bias"), replace(STEP, gelu=True), BIASED):
        bench.choose(step=step)
    assert bench.measured == 4
    bench.choose(step=BIASED)
    assert bench.measured == 4


def test_an_epilogue_with_an_aux_is_measured_on_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TENSORS", gemm_tensors({"a": 32, "b": 64, "out": 32, "aux": 32}))
    plain = Gemm(Matrix("a", 4, 8), Matrix("b", 8, 8), Matrix("out", 4, 8), "fp32")
    back = replace(plain, aux="aux")
    for step in (plain, replace(plain, gelu=True), replace(back, gelu=True), back, back):
        bench.choose(step=step)
    assert bench.measured == 4


class HostCuda:
    """As much of cupy.cuda as measuring needs, on host memory."""

    def __init__(self) -> None:
        self.memories: list[Any] = []
        self.runtime = SimpleNamespace(memcpyAsync=self._copy, memcpyHostToDevice=1)
        self.Event = lambda: SimpleNamespace(record=lambda stream: None)

    def alloc(self, size: int) -> Any:
        memory = (ctypes.c_char * (size + 256))()
        self.memories.append(memory)
        start = -(-ctypes.addressof(memory) // 256) * 256
        return SimpleNamespace(ptr=start, mem=SimpleNamespace(size=size), memset_async=lambda *args: None)

    def get_elapsed_time(self, before: Any, after: Any) -> float:
        return 1.0

    def _copy(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        ctypes.memmove(target, source, size)


def gemm_tensors(sizes: dict[str, int]) -> list[Tensor]:
    return [Tensor(name, (size,), "fp32", "scratch") for name, size in sizes.items()]


@pytest.mark.parametrize("gelu", [True, False])
def test_candidates_are_measured_with_an_aux_of_their_own(monkeypatch: pytest.MonkeyPatch, gelu: bool) -> None:
    cuda = HostCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    library = fake_library()
    step = Gemm(Matrix("a", 4, 8), Matrix("b", 8, 8), Matrix("out", 4, 8), "fp32", gelu=gelu, aux=Ref("aux", 4))
    sizes = {"a": 32, "b": 64, "out": 32, "aux": 36}
    gemm = PreparedGemm(library, step, gemm_tensors(sizes))
    pointers = []
    matmul = library.api.matmul

    def recorded(*args: Any) -> None:
        pointers.append(library.api.objects[args[1]]["EPILOGUE_AUX_POINTER"])
        matmul(*args)

    monkeypatch.setattr(library.api, "matmul", recorded)
    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    assert tune._measure(gemm, [(gemm.algo, 0)], 1024, stream) == [1.0]
    assert len(set(pointers)) == 1 and pointers[0] % 256 == 16, "aligned as the real one"
    assert gemm.aux is not None and gemm.aux.span == 4 * 32
    plain = PreparedGemm(library, replace(step, aux=""), gemm_tensors(sizes))
    extra = tune._scratch_bytes(gemm, [(gemm.algo, 0)], 1024) - tune._scratch_bytes(plain, [(gemm.algo, 0)], 1024)
    assert extra == gemm.aux.span + gemm.aux.alignment


def test_candidates_are_measured_with_a_bias_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = HostCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    library = fake_library()
    gemm = PreparedGemm(library, BIASED, TENSORS)
    pointers = []
    matmul = library.api.matmul

    def recorded(*args: Any) -> None:
        pointers.append(library.api.objects[args[1]]["BIAS_POINTER"])
        matmul(*args)

    monkeypatch.setattr(library.api, "matmul", recorded)
    candidates = [(gemm.algo, 0), (gemm.algo, 0)]
    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    assert tune._measure(gemm, candidates, 1024, stream) == [1.0, 1.0]
    assert len(set(pointers)) == 1 and pointers[0] % 256 == 0
    assert gemm.bias is not None and gemm.bias.span == 8
    without = PreparedGemm(library, STEP, TENSORS)
    extra = tune._scratch_bytes(gemm, candidates, 1024) - tune._scratch_bytes(without, candidates, 1024)
    assert extra == gemm.bias.span + gemm.bias.alignment
