"""A repository of a small family, made in one go: for tests of what goes through commits."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

FAMILY = """
from kbench.family import *
family = Family(
    name="pad", summary="s", sizes={"N": "elements"}, dtypes=("fp32",),
    presets={"default": {"N": 256}, "small": {"N": 64}}, check_shapes=(),
    tensors=lambda p: (Tensor("out", (p["N"],), "fp32", "out", ("n",)),),
    reference=lambda p, i, e, xp: {},
    versions=(Version(1, "pads", plan=lambda p, b, d: (Launch("pad", (1,), (b,), ("out",)),), dtypes=("fp32",)),),
)
"""
KERNEL = """
__global__ void pad(float* out) {{
    __shared__ float room[{room}];
    room[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = room[(threadIdx.x + {shift}) % {room}];
}}
"""
BROKEN = "__global__ void pad(float* out) { this is no C++ }\n"


def kernel(room: int, shift: int = 1) -> str:
    """Device code that takes 4 * room bytes of static shared memory."""
    return KERNEL.format(room=room, shift=shift)


def git(folder: Path, *words: str, data: bytes | None = None) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=Nobody", "-c", "user.email=nobody@example.org", *words]
    return subprocess.run(command, input=data, check=True, capture_output=True).stdout.decode().strip()


def make_repository(top: Path, texts: Sequence[str], name: str = "pad", family: str = FAMILY) -> list[str]:
    """One commit for each text of kernels/NAME.cu, "" for one that changes another file only; returns their hashes.

    family: the text of NAME.py, the same throughout.
    """
    top.mkdir(parents=True, exist_ok=True)
    git(top, "init", "--quiet", "--initial-branch=main")
    stream = []
    for number, text in enumerate(texts):
        stream.append(f"commit refs/heads/main\nmark :{number + 1}\n")
        stream.append(f"committer Nobody <nobody@example.org> {1_800_000_000 + 86_400 * number} +0000\n")
        stream.append(_data(f"change {number}"))
        if number:
            stream.append(f"from :{number}\n")
        stream.append(f"M 644 inline notes.txt\n{_data(f'note {number}')}")
        if text:
            stream.append(f"M 644 inline kernels/{name}.cu\n{_data(text)}")
        if not number:
            stream.append(f"M 644 inline kernels/{name}.py\n{_data(family)}")
    git(top, "fast-import", "--quiet", data="".join(stream).encode())
    git(top, "reset", "--quiet", "--hard", "main")
    return git(top, "rev-list", "--reverse", "main").splitlines()


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"
