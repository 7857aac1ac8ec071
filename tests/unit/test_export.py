"""`kbench export`: every version of every family, what its data promise, and what the command refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kbench.catalog import load_catalog
from kbench.check.case import make_case
from kbench.cli.app import run_command
from kbench.device.dtypes import numpy_dtype
from kbench.errors import Exit, UsageError
from kbench.export.inputs import RepeatingGenerator, hexadecimal, pack, unpack
from kbench.export.outputs import SAMPLE, answers, right_range
from kbench.export.plan import plan_code, pointer_names
from kbench.export.problem import PLAIN_INPUTS, data_of, subject_of
from kbench.export.program import MARK, program
from kbench.family import Copy, Expected, Family, Fill, Gemm, Launch, Matrix, Problem, Ref, Tensor, normal
from kbench.jobs import Job

CATALOG = load_catalog()
LIBRARIES = {("attention_forward", 10): "cuDNN", ("attention_backward", 10): "cuDNN", ("nccl_all_reduce", 1): "NCCL"}


def smallest_job(family: Family, number: int) -> Job:
    """The version at the smallest check shape and the block size nearest to the middle that it takes."""
    version = family.by_number[number]
    shapes = sorted(family.check_shapes, key=lambda s: sum(t.count for t in family.tensors(Problem(s.sizes, "fp32"))))
    for shape in shapes:
        problem = Problem(shape.sizes, version.dtypes[number % len(version.dtypes)])
        blocks = [block for block in version.blocks if not family.refusal(version, problem, block)]
        if blocks and (shape.versions is None or number in shape.versions):
            return Job(family.name, number, "", dict(shape.sizes), problem.dtype, blocks[len(blocks) // 2])
    raise AssertionError(f"{family.name}:{number} takes no check shape")


@pytest.mark.parametrize("name", CATALOG.names)
def test_every_version_is_exported_or_refused_with_the_reason(name: str) -> None:
    family = CATALOG[name]
    for number in family.by_number:
        job = smallest_job(family, number)
        if library := LIBRARIES.get((name, number)):
            with pytest.raises(UsageError, match=f"{name} version {number} cannot be exported: .*{library}"):
                subject_of(CATALOG, job, None)
            continue
        subject = subject_of(CATALOG, job, None)
        text = program(subject, data_of(subject, seed=1), "a", "kbench export")
        assert text.startswith(MARK)
        assert not re.search(r'#\s*include\s*"|#\s*pragma once', text), "a header of kbench is left"
        assert max(map(len, text.splitlines())) <= 125 or "{" in max(text.splitlines(), key=len)
        for step in subject.plan:
            if isinstance(step, Launch):
                assert f"EXPORTED_LAUNCH(({step.kernel})," in re.sub(r",\n\s+", ", ", text)
        others = {kernel for kernel in re.findall(r"\b[a-z_]+forward\d+\b", text) if kernel.startswith(name)}
        assert len(others) <= 2, f"kernels of other versions are left: {others}"


# ------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_the_range_of_right_numbers_is_the_bound_exactly(dtype: str) -> None:
    rng = np.random.default_rng(5)
    value = np.concatenate([rng.normal(0, 3, 4000), rng.normal(0, 1e-6, 500), [0.0, 1.0, -1.0, 60000.0, -60000.0]])
    value = value.astype(numpy_dtype(dtype)).astype(np.float64) + rng.normal(0, 1e-9, value.size)
    bound = np.abs(value) * rng.uniform(0.01, 0.2, value.size) + 1e-7
    tensor = Tensor("y", value.shape, dtype, "out")
    least, greatest = right_range(tensor, value, bound)
    for number, outwards in ((least, -np.inf), (greatest, np.inf)):
        inside = number.astype(np.float64)
        assert np.all(np.abs(inside - value) <= bound * (1 + 1e-12))
        beyond = neighbour(number, outwards < 0)
        assert np.all((np.abs(beyond - value) >= bound * (1 - 1e-12)) | ~np.isfinite(beyond))


def neighbour(numbers: np.ndarray, below: bool) -> np.ndarray:
    """The next smaller, or the next larger, numbers of a type, found by trying all 16-bit ones or by numpy."""
    if numbers.dtype.itemsize > 2:
        return np.nextafter(numbers, numbers.dtype.type(-np.inf if below else np.inf)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(numbers.dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    at = np.searchsorted(every, numbers.astype(np.float64)) + (-1 if below else 1)
    return np.where((at < 0) | (at >= every.size), np.inf, every[np.clip(at, 0, every.size - 1)])


def test_exact_outputs_keep_the_sign_of_zero() -> None:
    tensor = Tensor("y", (2,), "fp32", "out", exact=True)
    least, greatest = right_range(tensor, np.array([0.0, -0.0]), 0.0)
    assert hexadecimal(least.view(np.uint32)) == hexadecimal(greatest.view(np.uint32)) == "0000000080000000"


def test_unspecified_elements_may_hold_anything_and_are_never_sampled() -> None:
    def expected_of(count: int) -> tuple[Tensor, Expected]:
        odd = Tensor("y", (count,), "bf16", "out", unspecified=lambda xp: xp.arange(count) % 2 == 1)
        return odd, Expected(np.ones(count), 0.1)

    tensor, expected = expected_of(4)
    whole = answers({"y": tensor}, {"y": expected}, 1, 1000)["y"]
    assert whole.bounds[8:16] == whole.bounds[24:32] == "ffff0000" and whole.bounds[:8] != "ffff0000"
    assert whole.compared == 2 and not whole.whole and not whole.places
    tensor, expected = expected_of(100_000)
    sample = answers({"y": tensor}, {"y": expected}, 1, 1000)["y"]
    places = np.frombuffer(bytes.fromhex(sample.places), ">u4").astype(int)
    assert len(places) == sample.compared == SAMPLE and len(set(places)) == SAMPLE
    assert np.all(places % 2 == 0) and places[0] == 0 and places[-1] == 99_998 and np.all(np.diff(places) > 0)
    assert np.histogram(places, 10)[0].min() > 50, "some parts of the output are hardly compared"


@pytest.mark.parametrize("shape", [(5,), (3, 7, 11), (70_001,), (300, 300), (40, 5000), (4000, 3, 16), (9, 9, 9, 9, 9)])
def test_large_arrays_of_few_rows_take_little_text_and_come_back_bit_for_bit(shape: tuple[int, ...]) -> None:
    values = np.asarray(RepeatingGenerator(3).normal(0.5, 2.0, shape), np.float32)
    assert values.shape == shape and values.std() > 0.5
    packed = pack(values)
    assert np.array_equal(unpack(packed, values.size, np.uint32), values.view(np.uint32).reshape(-1))
    if values.size > 60_000:
        assert packed.size < 0.6 * 2 * values.nbytes


def test_values_without_repetition_are_stored_as_they_are() -> None:
    values = np.random.default_rng(1).normal(0, 1, (300, 300)).astype(np.float32)
    packed = pack(values)
    assert packed.row == 0 and packed.size == 2 * values.nbytes
    assert np.array_equal(unpack(packed, values.size, np.uint32), values.view(np.uint32).reshape(-1))


def test_rows_differ_between_tensors_and_numbers_stay_in_their_range() -> None:
    generator, tensor = RepeatingGenerator(1), Tensor("x", (1000, 64), "int32", "in", draw=normal(0, 1))
    generator.begin(tensor)
    ids = generator.integers(3, 9, (1000, 64))
    again = generator.integers(3, 9, (1000, 64))
    generator.begin(tensor)
    other = generator.integers(3, 9, (1000, 64))
    assert ids.dtype.kind == "i" and ids.min() == 3 and ids.max() == 8
    order, order2, order3 = (
        np.unique(each, axis=0, return_inverse=True)[1].reshape(-1) for each in (ids, again, other)
    )
    assert len(set(zip(order, order2, strict=True))) == len(set(order)), "arrays of one tensor change rows together"
    assert len(set(zip(order, order3, strict=True))) > 2 * len(set(order))
    low = generator.uniform(-2.0, 3.0, (1000, 64))
    assert -2.0 <= low.min() < -1.9 and 2.9 < low.max() <= 3.0


def test_a_large_problem_keeps_what_its_family_promises() -> None:
    """LayerNorm's backward pass: statistics belong to their rows, and what the program holds are those inputs."""
    family = CATALOG["layernorm_backward"]
    sizes = {"B": 4, "T": 256, "C": 256, "accumulate": 1}
    subject = subject_of(CATALOG, Job("layernorm_backward", 5, "", sizes, "fp32", 256), None)
    data = data_of(subject, seed=7)
    assert data.repeating and sum(each.size for each in data.inputs.values()) < PLAIN_INPUTS
    held = {
        tensor.name: unpack(data.inputs[tensor.name], tensor.count, np.uint32).view(np.float32).reshape(tensor.shape)
        for tensor in subject.tensors
        if tensor.name in data.inputs
    }
    case = make_case(family, subject.problem, 7, generator=RepeatingGenerator(7))
    for name, values in held.items():
        assert np.array_equal(values, case.inputs[name]), name
    assert np.allclose(held["rstd"], 1 / np.sqrt(held["inp"].astype(np.float64).var(axis=2) + 1e-5), rtol=0.1)
    assert len(np.unique(held["inp"].reshape(-1, 256), axis=0)) > 20


def test_small_inputs_are_those_of_the_other_commands() -> None:
    job = Job("gelu_forward", 1, "", {"N": 1000}, "fp32", 256)
    subject = subject_of(CATALOG, job, None)
    case = make_case(subject.family, subject.problem, 9)
    assert data_of(subject, 9).inputs["inp"] == pack(case.inputs["inp"])
    assert not data_of(subject, 9).repeating


# ------------------------------------------------------------------------------------------------- plan


TENSORS = (
    Tensor("x", (8, 16), "bf16", "in", draw=normal(0, 1)),
    Tensor("w-1", (16, 16), "bf16", "in", draw=normal(0, 1)),
    Tensor("w_1", (16,), "bf16", "in", draw=normal(0, 1)),
    Tensor("sums", (4,), "fp32", "scratch"),
    Tensor("ids", (4,), "int32", "out"),
    Tensor("y", (8, 16), "bf16", "out"),
)


def test_steps_become_cuda_with_their_numbers() -> None:
    code = plan_code(
        (
            Launch(
                "k<float, 2>", (3, 2), (32,), (Ref("x", 8), "sums", 5, 2**40, 0.1, float("-inf"), np.int64(7)), 60000
            ),
            Launch("k<float, 2>", (1,), (32,), (), 100),
            Fill(Ref("sums", 1), 0.0),
            Fill(Ref("sums"), 1.0, 2),
            Fill(Ref("ids"), -1),
            Copy(Ref("y"), Ref("x", 16), 100),
        ),
        TENSORS,
    )
    assert code.run == [
        "EXPORTED_LAUNCH((k<float, 2>), dim3(3, 2), dim3(32), 60000, stream, d_x + 8, d_sums, 5, 1099511627776LL, 0.1, "
        "-std::numeric_limits<double>::infinity(), 7);",
        "EXPORTED_LAUNCH((k<float, 2>), dim3(1), dim3(32), 100, stream);",
        "EXPORTED_CALL(cudaMemsetAsync(d_sums + 1, 0x00, 12, stream));",
        "exported::fill_words<unsigned int>(d_sums, 2, 0x3f800000, stream);",
        "EXPORTED_CALL(cudaMemsetAsync(d_ids, 0xff, 16, stream));",
        "EXPORTED_CALL(cudaMemcpyAsync(d_y, d_x + 16, 200, cudaMemcpyDeviceToDevice, stream));",
    ]
    assert code.prepare == ["EXPORTED_ALLOW_SHARED((k<float, 2>), 60000);"]
    assert code.fills and not code.gemms


def test_a_gemm_becomes_a_call_of_cublaslt() -> None:
    gemm = Gemm(
        Matrix("x", 8, 16), Matrix("w-1", 16, 16, transpose=True), Matrix("y", 8, 16), "bf16", alpha=0.1, bias="w_1",
        gelu=True,
    )  # fmt: skip
    code = plan_code((gemm, gemm), TENSORS)
    assert code.run == ["gemm0.run(stream);", "gemm1.run(stream);"] and code.gemms == 2
    assert " ".join(code.prepare[0].split()) == (
        'gemm0.create("GEMM 8 x 16 x 16", CUBLAS_COMPUTE_32F, {d_w_1, CUDA_R_16BF, 16, 16, 16, 0, 256, true}, '
        "{d_x, CUDA_R_16BF, 16, 8, 16, 0, 256, false}, {d_y, CUDA_R_16BF, 16, 8, 16, 0, 256, false}, "
        "0.10000000149011612f, 0.0f, 1, CUBLASLT_EPILOGUE_GELU_BIAS, d_w_1_, nullptr, 0);"
    )


def test_names_of_tensors_become_different_variables() -> None:
    assert list(pointer_names(TENSORS).values()) == ["d_x", "d_w_1", "d_w_1_", "d_sums", "d_ids", "d_y"]


# ---------------------------------------------------------------------------------------------- command


def test_the_command_writes_a_program_and_says_how_to_build_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["export", "matmul_forward:3", "--size", "T=4", "--seed", "3"]) == Exit.OK
    said = capsys.readouterr().out
    text = (tmp_path / "matmul_forward_v3.cu").read_text()
    assert "nvcc -O3 -std=c++17 -arch=sm_90 matmul_forward_v3.cu" in said
    assert max(len(line) for line in said.splitlines() if not line.startswith("  build")) <= 80
    assert "-lcublasLt" in text.split("#include")[0] and "#include <cublasLt.h>" in text
    assert "--size T=4 " in text.split("#include")[0] and "--seed 3 " in text.split("#include")[0]
    # An exported program is replaced; the same seed gives the same text.
    assert run_command(["export", "matmul_forward:3", "--size", "T=4", "--seed", "3", "--json"]) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "export" and document["seed"] == 3 and document["path"] == "matmul_forward_v3.cu"
    assert [output["compared"] for output in document["outputs"]] == [
        output["elements"] for output in document["outputs"]
    ]
    assert (tmp_path / "matmul_forward_v3.cu").read_text() == text
    assert run_command(["export", "matmul_forward:3", "--size", "T=4", "--seed", "3", "-o", "-"]) == Exit.OK
    assert capsys.readouterr().out == text
    assert [path.name for path in tmp_path.iterdir()] == ["matmul_forward_v3.cu"]


def test_a_program_is_of_the_parameters_that_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    for values, chosen in ((["--param", "PACKETS=4"], 4), ([], 2)):
        words = ["export", "residual_forward:2", "--size", "N=64", "--dtype", "bf16", "--seed", "1", "-o", "-", *values]
        assert run_command(words) == Exit.OK
        text = capsys.readouterr().out
        head = text.split("#include")[0]
        assert f"PACKETS={chosen}\n" in head and f"--param PACKETS={chosen} " in head, "how it is exported again"
        assert f"residual_forward2<__nv_bfloat16, {chosen}>" in text


@pytest.mark.parametrize(
    "words, status, message",
    [
        (
            ["gelu_forward"],
            Exit.USAGE,
            "2 versions are meant; name one, such as `kbench export gelu_forward --version 2`",
        ),
        (["gelu_forward:1", "--size", "N=32,64"], Exit.USAGE, "2 problems are meant; give each --size one value"),
        (["gelu_forward:1", "--dtype", "all"], Exit.USAGE, "export takes one dtype, not 'all'"),
        (["residual_forward:2", "--param", "PACKETS=1,2"], Exit.USAGE, "2 sets of parameters are meant; give each --"),
        (["residual_forward:2", "--param", "PACKETS=3"], Exit.USAGE, "refuses this: PACKETS=3 is not supported"),
        (["residual_forward:2", "--param", "ROWS=3"], Exit.USAGE, "none of the chosen versions has a parameter 'ROWS'"),
        (["gelu_forward:9"], Exit.USAGE, "gelu_forward has no version 9"),
        (["gelu_forward:1", "-o", "x.txt"], Exit.USAGE, "it has to end in .cu"),
        (["gelu_forward:1", "-o", "folder.cu"], Exit.USAGE, "is a folder"),
        (["gelu_forward:1", "-o", "mine.cu"], Exit.USAGE, "mine.cu exists and is no exported program; "),
        (["gelu_forward:1", "-o", "mine.cu/x.cu"], Exit.CANNOT, "cannot write"),
        (["gelu_forward:1", "-o", "-", "--json"], Exit.USAGE, "both write to standard output"),
        (["gelu_forward:1", "--arch", "sm_12"], Exit.USAGE, "unknown architecture 'sm_12'"),
        (["gelu_forward:1", "--size", "N=99999999999999"], Exit.CANNOT, "of main memory"),
        (["permute:1", "--block-size", "96"], Exit.USAGE, "permute version 1 refuses this: block size 96"),
        (["attention_forward:10"], Exit.USAGE, "cannot be exported: it is attention by cuDNN"),
        (["nccl_all_reduce:1"], Exit.USAGE, "cannot be exported: it is a sum over GPUs by NCCL"),
        (
            ["attention_backward:8", "--size", "B=1", "--size", "T=512", "--size", "NH=1"],
            Exit.USAGE,
            "MiB of text, most of it att, and an exported program holds up to 2; take smaller sizes",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_and_leaves_nothing_behind(
    words: list[str], status: Exit, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.cu").write_text("my work\n")
    (tmp_path / "folder.cu").mkdir()
    assert run_command(["export", *words]) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"mine.cu", "folder.cu"}
    assert (tmp_path / "mine.cu").read_text() == "my work\n"


def test_force_replaces_any_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text("my work\n")
    assert run_command(["export", "gelu_forward:1", "--size", "N=8", "-o", str(path), "--force"]) == Exit.OK
    assert path.read_text().startswith(MARK)
