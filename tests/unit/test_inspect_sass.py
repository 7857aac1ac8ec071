"""Machine code: found by nvdisasm, made readable, and its instructions counted."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from kbench.catalog import load_catalog
from kbench.cli.app import run_command
from kbench.errors import CannotRunError, Exit, UsageError
from kbench.inspect import nvdisasm
from kbench.inspect.facts import static_facts
from kbench.inspect.instructions import group_of
from kbench.inspect.nvdisasm import disassemble, find_nvdisasm, instructions, listing, require_nvdisasm
from kbench.inspect.sass import sass_mix

has_nvrtc = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_nvrtc = pytest.mark.skipif(not has_nvrtc, reason="cuda-bindings, and with it NVRTC, is not installed")

# As nvdisasm 13 writes it, shortened.
TEXT = """
\t.target\tsm_90
//--------------------- .text._Z4copyPfPKf --------------------------
\t.section\t.text._Z4copyPfPKf,"ax",@progbits
\t.align\t128
.text._Z4copyPfPKf:
        .weak           _Z4copyPfPKf
_Z4copyPfPKf:
\t//## File "/k/copy.cu", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t//## File "/k/common.cuh", line 2 inlined at "/k/copy.cu", line 4
\t//## File "/k/copy.cu", line 4
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_0:
        /*0020*/               @P1 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_1) ;
        /*0050*/                   NOP ;
        /*0060*/                   NOP ;
//--------------------- .text.second --------------------------
\t.section\t.text.second,"ax",@progbits
second:
        /*0000*/                   EXIT ;
"""
# Prints such text for the kernels of the cubin that it is given, and notes that it ran.
PROGRAM = """#!/bin/sh
echo run >> "$(dirname "$0")/runs"
for file; do :; done
for name in $(grep -a -o '[.]text[.][A-Za-z0-9_]*' "$file" | sort -u); do
  printf '\\t.section\\t%s,"ax",@progbits\\n' "$name"
  printf '        /*0000*/                   STG.E.64 desc[UR4][R2.64], R4 ;\\n'
  printf '        /*0010*/                   EXIT ;\\n'
done
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KBENCH_CACHE", str(tmp_path / "cache"))
    return make(tmp_path / "tools" / "nvdisasm", PROGRAM)


def make(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without NVIDIA's packages and toolkit."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)


CLASSES = [
    ("LDG.E.128 R4, desc[UR4][R2.64]", "global loads, 128 bits"),
    ("LDG.E.U16.CONSTANT R4, desc[UR4][R2.64]", "global loads, 16 bits"),
    ("LDG.E.LTC128B R4, [R2.64]", "global loads, 32 bits"),
    ("STG.E desc[UR4][R2.64], R4", "global stores, 32 bits"),
    ("LDS.64 R4, [R2]", "shared loads, 64 bits"),
    ("STL.128 [R1], R4", "local stores, 128 bits"),
    ("ULDC.64 UR4, c[0x0][0x208]", "constant loads, 64 bits"),
    ("LDSM.16.M88.4 R8, [R2]", "matrix loads and stores"),
    ("LDGSTS.E.BYPASS.128 [R2], [R4.64]", "async copies"),
    ("HMMA.16816.F32.BF16 R4, R8, R10, R4", "tensor core"),
    ("HGMMA.64x64x16.F32 R24, gdesc[UR4]", "tensor core"),
    ("FFMA R1, R2, R3, R4", "fp32 multiply-adds"),
    ("FADD.FTZ R1, R2, R3", "fp32 other"),
    ("HFMA2.BF16_V2 R1, R2, R3, R4", "fp16 and bf16 multiply-adds"),
    ("HFMA2.MMA R8, -RZ, RZ, 0, 0", "moves"),
    ("IMAD.MOV.U32 R7, RZ, RZ, R5", "moves"),
    ("IMAD.U32 R2, RZ, RZ, UR5", "moves"),
    ("IMAD R2, R3, R4, RZ", "integer"),
    ("MUFU.EX2 R1, R2", "special functions"),
    ("F2FP.BF16.F32.PACK_AB R1, R2, R3", "conversions"),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", "block barriers"),
    ("SHFL.BFLY PT, R1, R2, 0x10, 0x1f", "shuffles"),
    ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R4", "global atomics"),
    ("ATOMS.ADD RZ, [R2], R4", "shared atomics"),
    ("ISETP.GE.AND P0, PT, R1, R2, PT", "comparisons and selections"),
    ("BRA `(.L_x_1)", "branches"),
    ("BSSY B0, `(.L_x_0)", "convergence"),
    ("EXIT", "other"),
    ("WHATEVER.NEXT R1", "other"),
]


@pytest.mark.parametrize(("instruction", "name"), CLASSES)
def test_an_instruction_has_its_class(instruction: str, name: str) -> None:
    assert sass_mix([instruction]) == {name: 1}
    assert group_of(name)


def test_instructions_are_those_that_run() -> None:
    found = list(instructions(TEXT.partition("//--------------------- .text.second")[0]))
    assert found == ["LDC R1, c[0x0][0x28]", "LDG.E.128 R4, desc[UR4][R2.64]", "BRA `(.L_x_0)", "EXIT"]
    assert list(instructions("")) == []


def test_a_listing_names_the_lines_of_the_family_and_the_helpers_in_them() -> None:
    sources = {"/k/copy.cu": "a\nb\nkernel {\n  y = load(x);\n", "/k/common.cuh": "c\nload() {\n"}
    first = list(listing(TEXT.partition("//--------------------- .text.second")[0], sources))
    assert first[:5] == [
        "  // copy.cu:3  kernel {",
        "    /*0000*/  LDC R1, c[0x0][0x28]",
        "  // copy.cu:4 (in common.cuh:2)  y = load(x);",
        "    /*0010*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64]",
        ".L_x_0:",
    ]
    assert not any(".weak" in line or ".section" in line for line in first)


def test_the_program_is_run_once_for_a_cubin(program: Path) -> None:
    cubin = b"\x7fELF .text._Z4copy .text.other"
    assert list(disassemble(cubin, program)) == ["_Z4copy", "other"]
    assert list(instructions(disassemble(cubin, program)["other"])) == ["STG.E.64 desc[UR4][R2.64], R4", "EXIT"]
    assert (program.parent / "runs").read_text() == "run\n"
    disassemble(cubin, program, lines=True)
    assert (program.parent / "runs").read_text() == "run\nrun\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#!/bin/sh\necho 'nvdisasm fatal   : Unknown architecture' >&2\nexit 1\n", "failed: nvdisasm fatal .*Unknown"),
        ("#!/bin/sh\nexit 0\n", "failed: it wrote no code"),
        ("#!/nonexistent\n", "cannot be started"),
    ],
)
def test_a_program_that_fails_is_an_error(text: str, message: str, tmp_path: Path, program: Path) -> None:
    with pytest.raises(CannotRunError, match=message):
        disassemble(b"\x7fELF", make(tmp_path / "bad" / "nvdisasm", text))


def test_where_the_program_is_looked_for(tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_nvdisasm() is None
    with pytest.raises(CannotRunError, match=r"needs NVIDIA's nvdisasm.*\[sass\]"):
        require_nvdisasm()
    toolkit = make(tmp_path / "cuda" / "bin" / "nvdisasm", PROGRAM)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert find_nvdisasm() == toolkit
    on_path = make(tmp_path / "path" / "nvdisasm", PROGRAM)
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert require_nvdisasm() == on_path
    in_package = make(tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm", PROGRAM)
    make(tmp_path / "nvidia" / "cu12" / "bin" / "nvdisasm", PROGRAM)

    class Namespace:
        submodule_search_locations = [str(tmp_path / "nvidia")]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Namespace if name == "nvidia" else None)
    assert find_nvdisasm() == in_package
    in_package.chmod(0o644)
    assert find_nvdisasm() != in_package


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def toy(tmp_path: Path) -> Any:
    """A function that inspects a family of two versions, one of which is a library's."""
    (tmp_path / "toy.cu").write_text(
        "template <int kBlock> __global__ void fill(float* y) { y[threadIdx.x] = kBlock; }"
    )
    (tmp_path / "toy.py").write_text("""
from kbench.family import CheckShape, Family, Fill, Launch, Ref, Tensor, Version
toy = Family(
    name="toy", summary="fills", sizes={"N": "how many"}, dtypes=("fp32",),
    presets={"default": {"N": 4096}, "small": {"N": 256}}, check_shapes=(CheckShape({"N": 64}, "tiny"),),
    tensors=lambda problem: (Tensor("y", (problem["N"],), "fp32", "out"),),
    reference=lambda problem, inputs, error, xp: {},
    versions=(
        Version(1, "by hand", lambda problem, block, props: (
            Launch(f"fill<{block}>", (1,), (block,), ("y",), 0), Launch(f"fill<{block}>", (2,), (block,), ("y",), 256)),
            ("fp32",), block_sizes=(64, 128)),
        Version(2, "a library", lambda problem, block, props: (Fill(Ref("y")),), ("fp32",), fixed=32),
    ),
)
""")
    return lambda *words: run_command(["inspect", *words, "--family-dir", str(tmp_path)])


@needs_nvrtc
def test_sass_is_shown_and_counted_beside_the_ptx(
    toy: Any, program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvdisasm, "find_nvdisasm", lambda: program)
    monkeypatch.setattr("kbench.cli.inspect.find_nvdisasm", lambda: program)
    assert toy("toy:1", "--sass", "--block-sizes", "64") == Exit.OK
    out = capsys.readouterr().out
    assert "// toy version 1, N=4096, fp32\n\n// fill<64>, sm_90\n" in out and "STG.E.64 desc" in out
    assert toy("toy:2", "--sass") == Exit.OK and "// no kernel" in capsys.readouterr().out
    assert toy("toy:1") == Exit.OK
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "instructions of fill<128>, in PTX and in machine code" in out
    assert "global stores (64 bits)" in out and "global stores (32 bits)" in out
    assert toy("toy:1", "--sass", "--json") == Exit.OK
    (found,) = json.loads(capsys.readouterr().out)["inspections"]
    assert found["sass_instructions"]["fill<64>"] == {"global stores, 64 bits": 1, "other": 1}
    assert set(found["sass"]) == {"fill<64>", "fill<128>"}


@needs_nvrtc
def test_tables_do_without_a_program_that_fails(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = make(tmp_path / "old" / "nvdisasm", "#!/bin/sh\necho too old >&2; exit 1\n")
    monkeypatch.setattr(nvdisasm, "find_nvdisasm", lambda: old)
    monkeypatch.setattr("kbench.cli.inspect.find_nvdisasm", lambda: old)
    assert toy("toy:1") == Exit.OK and "instructions in the PTX of" in capsys.readouterr().out
    assert toy("toy:1", "--sass") == Exit.CANNOT and "too old" in capsys.readouterr().err


def test_without_the_program_sass_names_the_extra(
    toy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvdisasm, "find_nvdisasm", lambda: None)
    assert toy("toy:1", "--sass") == Exit.CANNOT
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "[sass]" in captured.err


@needs_nvrtc
def test_static_facts_are_plain_data(toy: Any, tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbench.inspect.facts.find_nvdisasm", lambda: program)
    catalog = load_catalog([tmp_path])
    found = static_facts(catalog, "toy", 1, "fp32", 64, "sm_80")
    assert json.loads(json.dumps(found)) == found and found["arch"] == "sm_80" and found["compiler"].startswith("NVRTC")
    ((name, facts),) = found["kernels"].items()
    assert (name, facts["launches"], facts["dynamic_shared"], facts["spill_bytes"]) == ("fill<64>", 2, 256, 0)
    assert 0 < facts["registers"] < 32 and facts["ptx"]["global stores, 32 bits"] == 1
    assert facts["sass"] == {"global stores, 64 bits": 1, "other": 1}
    monkeypatch.setattr("kbench.inspect.facts.find_nvdisasm", lambda: None)
    assert static_facts(catalog, "toy", 1, "fp32", 64)["kernels"][name]["sass"] is None
    assert static_facts(catalog, "toy", 2, "fp32", 32)["kernels"] == {}
    with pytest.raises(UsageError, match="block size 96 is not supported"):
        static_facts(catalog, "toy", 1, "fp32", 96)


def test_finding_the_program_starts_no_heavy_package() -> None:
    before = set(sys.modules)
    find_nvdisasm()
    assert not {"cupy", "pandas", "cuda.bindings"} & (set(sys.modules) - before)
