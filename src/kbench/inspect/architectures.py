"""What one multiprocessor of each architecture holds, and the card that stands for it where there is no GPU.

Limits: the tables of technical specifications per compute capability in CUDA's programming guide. Units in which
registers and shared memory are handed out, which that table leaves out: cuda_occupancy.h of CUDA 13.0's runtime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kbench.errors import UsageError
from kbench.family import Props

# The same for all of them.
REGISTERS = 65536  # of 32 bits, per multiprocessor
REGISTER_UNIT = 256  # registers are given to a warp in lots of this many
PARTITIONS = 4  # of a multiprocessor: each has a quarter of the registers, for warps of its own
REGISTERS_PER_THREAD = 255  # the most that an instruction can name
SHARED_UNIT = 128  # bytes: a block's shared memory is rounded up to these
SHARED_RESERVED = 1024  # bytes of each block's shared memory that the system keeps
SHARED_WITHOUT_OPT_IN = 48 << 10  # bytes per block


@dataclass(frozen=True)
class Architecture:
    """Limits of one multiprocessor, and a card to make plans for.

    name: "sm_90", without the letter of a variant. warps, blocks: that can be resident. shared: bytes, with what the
    system reserves. card, multiprocessors, l2_bytes, memory_bytes: a product of this architecture; others differ.
    """

    name: str
    warps: int
    blocks: int
    shared: int
    card: str
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int

    @property
    def shared_per_block(self) -> int:
        """The most shared memory of one block, in bytes, static and dynamic together."""
        return self.shared - SHARED_RESERVED

    def props(self) -> Props:
        """What plans may know of the card."""
        return Props(
            name=self.card,
            arch=self.name,
            multiprocessors=self.multiprocessors,
            threads_per_multiprocessor=32 * self.warps,
            threads_per_block=1024,
            shared_per_block=SHARED_WITHOUT_OPT_IN,
            shared_per_block_optin=self.shared_per_block,
            shared_per_multiprocessor=self.shared,
            registers_per_multiprocessor=REGISTERS,
            l2_bytes=self.l2_bytes,
            memory_bytes=self.memory_bytes,
        )


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("sm_80", 64, 32, 164 << 10, "A100", 108, 40 << 20, 40 << 30),
        Architecture("sm_86", 48, 16, 100 << 10, "RTX 3090", 82, 6 << 20, 24 << 30),
        Architecture("sm_89", 48, 24, 100 << 10, "RTX 4090", 128, 72 << 20, 24 << 30),
        Architecture("sm_90", 64, 32, 228 << 10, "H100 SXM", 132, 50 << 20, 80 << 30),
        Architecture("sm_100", 64, 32, 228 << 10, "B200", 148, 126 << 20, 180 << 30),
        Architecture("sm_120", 48, 24, 100 << 10, "RTX 5090", 170, 96 << 20, 32 << 30),
    )
}


def architecture_of(text: str) -> Architecture:
    """The architecture of "sm_90", "sm_90a" or "sm_100f". Raises UsageError for one that is not known here."""
    match = re.fullmatch(r"(sm_\d+)[af]?", text)
    if match is None or match[1] not in ARCHITECTURES:
        raise UsageError(f"unknown architecture {text!r}", f"known here: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[match[1]]
