"""Sources: includes found and hashed, kernels listed, missing kernels named."""

import pytest

from kbench.errors import UsageError
from kbench.source import fingerprint, load_source

CU = """
#include "shared.cuh"
// __global__ void in_a_comment(float*) {}
template <typename T, int B>
__global__ void __launch_bounds__(B) softmax(T* out, int n) {}
__global__ void plain(float* out) {}
static __global__ __launch_bounds__(256, 2) void bounded(float* out) {}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "x.cu").write_text(CU)
    (tmp_path / "shared.cuh").write_text('#include "deeper.cuh"\n__global__ void from_header(int) {}\n')
    (tmp_path / "deeper.cuh").write_text("constexpr int kWarp = 32;\n")
    return tmp_path


def test_kernels_of_the_file_and_its_headers(folder):
    assert set(load_source(folder / "x.cu").kernels) == {"softmax", "plain", "bounded", "from_header"}


def test_the_digest_changes_with_any_included_file(folder):
    before = load_source(folder / "x.cu").digest
    (folder / "deeper.cuh").write_text("constexpr int kWarp = 64;\n")
    assert load_source(folder / "x.cu").digest != before


def test_includes_are_also_found_in_other_folders(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("kérnels 測試 x")
    (other / "y.cu").write_text('#include "shared.cuh"\n')
    assert "from_header" in load_source(other / "y.cu", (folder,)).kernels


def test_a_missing_kernel_is_named_with_the_nearest(folder):
    source = load_source(folder / "x.cu")
    assert source.lacks(["softmax<float, 64>", "plain"]) == ""
    assert "no kernel `softmx`" in source.lacks(["softmx<float, 64>"])
    assert "did you mean softmax?" in source.lacks(["softmx<float, 64>"])


def test_a_device_function_is_no_kernel(tmp_path):
    (tmp_path / "d.cu").write_text(
        "__device__ inline float f(float x) { return x; }\n#define KERN __global__ void\nKERN k() { f(1); }\n"
    )
    source = load_source(tmp_path / "d.cu")
    assert source.no_kernel(["k"]) == ""
    assert "`f`, which the plan names, is a __device__ function" in source.no_kernel(["k", "f"])


def test_unreadable_files_are_one_line(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        load_source(tmp_path / "none.cu")
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_source(tmp_path / "binary.cu")


def test_a_fingerprint_is_of_what_versions_do(tmp_path):
    cu, py, included = tmp_path / "a.cu", tmp_path / "a.py", tmp_path / "b.cuh"
    included.write_text("#define N 1\n")
    cu.write_text('#include "b.cuh"\n__global__ void k(float* x) { *x = N; }\n')
    py.write_text("BLOCKS = (32, 64)\n")
    before = fingerprint(cu)
    cu.write_text('// a comment\n#include "b.cuh"\n__global__ void k(float* x) {\n    *x = N;  /* one */\n}\n')
    py.write_text("# why\nBLOCKS = (\n    32,\n    64,\n)\n")
    assert fingerprint(cu) == before
    for path, text in (
        (cu, cu.read_text().replace("= N", "= N + 1")),
        (py, "BLOCKS = (32,)\n"),
        (included, "#define N 2\n"),
    ):
        kept = path.read_text()
        path.write_text(text)
        assert fingerprint(cu) != before, path.name
        path.write_text(kept)
    assert fingerprint(cu) == before


def test_a_contract_that_is_no_python_has_no_fingerprint(tmp_path):
    (tmp_path / "a.cu").write_text("")
    (tmp_path / "a.py").write_text("x = (\n")
    with pytest.raises(UsageError, match=r"a\.py, line 1"):
        fingerprint(tmp_path / "a.cu")
