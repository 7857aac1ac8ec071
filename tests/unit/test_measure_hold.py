"""The kernel that holds the stream compiles, and is told what it expects, without a GPU."""

from pathlib import Path

import pytest

import kbench.measure.hold as hold
from kbench.source import load_source

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed: pip install -e '.[cuda13]'")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_hold_compiles_and_takes_its_words_and_its_limit(arch):
    from kbench.device.cuda.compile import compile_cubin, nvrtc_version
    from kbench.errors import CannotRunError

    try:
        nvrtc_version()
    except CannotRunError as error:
        pytest.skip(str(error))
    source = load_source(Path(hold.__file__).with_name("hold.cu"))
    cubin = compile_cubin(source, ["hold"], arch)
    assert [str(parameter) for parameter in cubin.signatures["hold"]] == ["uint32*", "uint64"]
