"""What a plan is made for: a problem, its types, and the device it is to run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Array = Any  # a numpy or cupy array: family code works on either

MAX_BLOCK = 1024  # threads: the same for every GPU since compute capability 2.0
POWERS_OF_TWO = (32, 64, 128, 256, 512, 1024)  # every power of two from one warp to the largest block

WARP = 32  # threads
PACKET_BYTES = 16  # the most that one thread loads or stores at once: `Packet` in common.cuh

# dtype = how elements are stored, and what a GEMM step computes in. tf32 stores fp32.
DTYPES = ("fp32", "tf32", "bf16", "fp16")
STORAGE = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16"}
C_TYPES = {"fp32": "float", "bf16": "__nv_bfloat16", "fp16": "__half", "int32": "int", "uint32": "unsigned int"}
ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4, "uint32": 4, "fp64": 8, "uint8": 1}
# Unit roundoff: half the distance between 1 and the next number of the type.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp64": 2.0**-53}


@dataclass(frozen=True)
class Props:
    """What a plan may know of the device it runs on. Sizes are bytes."""

    name: str
    arch: str  # "sm_90"
    multiprocessors: int
    threads_per_multiprocessor: int
    threads_per_block: int
    shared_per_block: int  # without opt-in
    shared_per_block_optin: int
    shared_per_multiprocessor: int
    registers_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Problem:
    """Sizes and a dtype. `problem["T"]` is a size."""

    sizes: Mapping[str, int]
    dtype: str

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def storage(self) -> str:
        """The type in which tensors are stored: fp32 for tf32."""
        return STORAGE[self.dtype]

    @property
    def c_type(self) -> str:
        """The C++ name of the storage type, to instantiate kernel templates."""
        return C_TYPES[self.storage]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())
