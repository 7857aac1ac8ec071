"""The ELF reader: what it refuses, and what it says of a cubin that NVRTC made."""

import struct

import pytest

from kbench.device.cuda.cubin import CubinError, CubinFile, threads_that_fit


def elf(sections: list[tuple[str, int, bytes]]) -> bytes:
    """A minimal 64-bit ELF file of (name, type, content); section 0 is the empty one that ELF asks for."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    parts, table, offset = [], [struct.pack("<IIQQQQIIQQ", *(0,) * 10)], 64
    for name, kind, content in [*sections, (".shstrtab", 3, names)]:
        stored = b"" if kind == 8 else content
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        table.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, offset, len(content), 0, 0, 1, 0))
        parts.append(stored)
        offset += len(stored)
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, offset)
    struct.pack_into("<HHH", head, 0x3A, 64, len(table), len(table) - 1)
    return bytes(head) + b"".join(parts) + b"".join(table)


def symbol(name_at: int, section: int, value: int, size: int) -> bytes:
    return struct.pack("<IBBHQQ", name_at, 0, 0, section, value, size)


SYMBOLS = b"\0k\0initialised\0zero\0"
SAMPLE = [
    (".strtab", 3, SYMBOLS),
    (".symtab", 2, symbol(0, 0, 0, 0) + symbol(1, 6, 0, 16) + symbol(3, 4, 2, 3) + symbol(15, 5, 0, 2)),
    (".nv.info", 0x70000000, struct.pack("<BBHII", 4, 0x2F, 8, 1, 72) + struct.pack("<BBHII", 4, 0x11, 8, 1, 40)),
    (".nv.global.init", 1, b"__abc__"),
    (".nv.global", 8, bytes(8)),
    (".text.k", 1, bytes(16)),
    (".nv.info.k", 0x70000000, struct.pack("<BBH", 3, 0x4C, 1) + struct.pack("<BBHIII", 4, 0x05, 12, 64, 4, 1)),
    (".nv.shared.k", 8, bytes(1536)),
]


def test_resources_of_a_kernel() -> None:
    info = CubinFile(elf(SAMPLE)).info("k", "k<float>", spill_bytes=8)
    assert (info.name, info.registers, info.local_bytes, info.spill_bytes) == ("k<float>", 72, 40, 8)
    assert info.max_threads == 256  # its launch bounds, 64 x 4
    assert info.static_shared == 1536


def test_the_reserved_kilobyte_is_not_the_kernels() -> None:
    assert CubinFile(elf([*SAMPLE, (".nv.shared.reserved.0", 8, b"")])).info("k").static_shared == 512


def test_variables_with_and_without_stored_bytes() -> None:
    file = CubinFile(elf(SAMPLE))
    assert file.variable("initialised") == b"abc"
    assert file.variable("zero") == b"\0\0"
    with pytest.raises(KeyError):
        file.variable("absent")
    with pytest.raises(KeyError):
        file.info("absent")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(200), b"\x93CUPYNE\0" + bytes(100)])
def test_what_is_no_elf_file_is_refused(data: bytes) -> None:
    with pytest.raises(CubinError):
        CubinFile(data)


def test_every_truncation_is_noticed() -> None:
    whole = elf(SAMPLE)
    for length in range(0, len(whole) - 1, 7):
        with pytest.raises(CubinError):
            CubinFile(whole[:length]).info("k")


@pytest.mark.parametrize(
    ("registers", "threads"),
    # From cudaOccupancy's rules: a warp takes registers in units of 256, warps come in fours.
    [(0, 1024), (32, 1024), (64, 1024), (65, 896), (72, 896), (80, 768), (128, 512), (168, 384), (255, 256)],
)
def test_threads_that_a_register_count_allows(registers: int, threads: int) -> None:
    assert threads_that_fit(registers) == threads
