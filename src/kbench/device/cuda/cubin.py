"""Reading a cubin (an ELF file) without any tool: what each kernel uses, and the bytes of a variable.

The section names and the numbers of `.nv.info` attributes are those that nvcc 12.9 to 13.5 write for sm_80 to
sm_120; `cuobjdump -elf` shows the same under their names.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from kbench.device.base import KernelInfo

_ELF_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_NOBITS = 8  # a section that holds no bytes: all zero
_SYMBOL = struct.Struct("<IBBHQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")

# EIATTR_* of `.nv.info` (whole cubin, pairs of symbol and value) and `.nv.info.KERNEL`.
_REGCOUNT, _FRAME_SIZE, _MAX_THREADS = 0x2F, 0x11, 0x05
_SIZED = 0x04  # the format in which an attribute carries its own length
# From sm_90 on the system keeps the first KiB of every block's shared memory, and `.nv.shared.KERNEL` counts it.
_RESERVED_SECTION, _RESERVED_SHARED = ".nv.shared.reserved.0", 1024

# The register file of a block, and how registers and warps are handed out, for every GPU since compute
# capability 7.0 ("Technical specifications per compute capability", CUDA C++ Programming Guide).
_REGISTERS_PER_BLOCK, _REGISTER_UNIT, _WARP_UNIT = 65536, 8, 4
_MAX_BLOCK = 1024


class CubinError(ValueError):
    """The bytes are not a cubin, or one that was cut short."""


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class _Symbol:
    name: str
    section: int
    value: int
    size: int


class CubinFile:
    """A cubin in memory. Raises CubinError where `data` is not a whole one."""

    def __init__(self, data: bytes):
        if data[: len(_ELF_MAGIC)] != _ELF_MAGIC:
            raise CubinError("not a 64-bit ELF file")
        self._data = data
        try:
            self._sections = self._read_sections()
        except (struct.error, ValueError, IndexError) as error:
            raise CubinError(f"section table cut short: {error}") from error

    @property
    def kernels(self) -> tuple[str, ...]:
        """Lowered names of the kernels with code in this cubin."""
        return tuple(s.name.removeprefix(".text.") for s in self._sections if s.name.startswith(".text."))

    def variable(self, name: str) -> bytes:
        """The initial bytes of a `__device__` or `__constant__` variable. Raises KeyError without one."""
        symbol = next((s for s in self._symbols if s.name == name and 0 < s.section < len(self._sections)), None)
        if symbol is None:
            raise KeyError(name)
        section = self._sections[symbol.section]
        return self._bytes(section)[symbol.value : symbol.value + symbol.size]

    def code(self, kernel: str) -> tuple[bytes, ...]:
        """Machine code and constants of a kernel, and where the loader fills in addresses: all that decides what it
        does, but for `variables`. The same for kernels of other names. Raises KeyError without one."""
        if kernel not in self.kernels:
            raise KeyError(kernel)
        parts = [f".text.{kernel}", f".rela.text.{kernel}", f".rel.text.{kernel}"]
        parts += sorted(
            name for name in self._by_name if re.fullmatch(rf"\.nv\.constant\d+\.{re.escape(kernel)}", name)
        )
        return tuple(self._bytes(self._by_name[name]) for name in parts if name in self._by_name)

    @property
    def variables(self) -> Mapping[str, bytes]:
        """The initial bytes of all variables of the cubin that have a name and a size, by name."""
        held = [s for s in self._symbols if s.size and 0 < s.section < len(self._sections)]
        data = [s for s in held if self._sections[s.section].name.startswith((".nv.global", ".nv.constant"))]
        return {s.name: self._bytes(self._sections[s.section])[s.value : s.value + s.size] for s in data}

    def info(self, kernel: str, name: str = "", spill_bytes: int | None = None) -> KernelInfo:
        """What `kernel` (a lowered name) uses; `name` is what to call it. Raises KeyError without one."""
        if kernel not in self.kernels:
            raise KeyError(kernel)
        registers = self._of_kernel(_REGCOUNT, kernel)
        return KernelInfo(
            name=name or kernel,
            registers=registers,
            static_shared=self._static_shared(kernel),
            local_bytes=self._of_kernel(_FRAME_SIZE, kernel),
            max_threads=min(self._launch_bound(kernel), threads_that_fit(registers or 0)),
            spill_bytes=spill_bytes,
        )

    # ------------------------------------------------------------------------------------ resources

    def _of_kernel(self, attribute: int, kernel: str) -> int | None:
        for number, payload in self._attributes(".nv.info"):
            if number == attribute and len(payload) == 8:
                symbol, value = struct.unpack("<II", payload)
                if symbol < len(self._symbols) and self._symbols[symbol].name == kernel:
                    return int(value)
        return None

    def _launch_bound(self, kernel: str) -> int:
        for number, payload in self._attributes(f".nv.info.{kernel}"):
            if number == _MAX_THREADS and len(payload) == 12:
                return math.prod(struct.unpack("<III", payload))
        return _MAX_BLOCK

    def _static_shared(self, kernel: str) -> int:
        section = self._by_name.get(f".nv.shared.{kernel}")
        if section is None:
            return 0
        reserved = _RESERVED_SHARED if _RESERVED_SECTION in self._by_name else 0
        return max(section.size - reserved, 0)

    def _attributes(self, section_name: str) -> Iterator[tuple[int, bytes]]:
        section = self._by_name.get(section_name)
        data = self._bytes(section) if section else b""
        at = 0
        while at + 4 <= len(data):
            form, number, size = struct.unpack_from("<BBH", data, at)
            at += 4
            payload = data[at : at + size] if form == _SIZED else b""
            at += len(payload)
            yield number, payload

    # ------------------------------------------------------------------------------------ ELF

    @cached_property
    def _by_name(self) -> Mapping[str, _Section]:
        return {section.name: section for section in self._sections}

    @cached_property
    def _symbols(self) -> tuple[_Symbol, ...]:
        table, names = self._by_name.get(".symtab"), self._by_name.get(".strtab")
        if table is None or names is None:
            raise CubinError("no symbol table")
        strings = self._bytes(names)
        rows = _SYMBOL.iter_unpack(self._bytes(table))
        return tuple(_Symbol(_text(strings, row[0]), row[3], row[4], row[5]) for row in rows)

    def _read_sections(self) -> tuple[_Section, ...]:
        (table,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count, names_index = struct.unpack_from("<HHH", self._data, 0x3A)
        rows = [_SECTION.unpack_from(self._data, table + i * size) for i in range(count)]
        names = rows[names_index]
        strings = self._data[names[4] : names[4] + names[5]]
        return tuple(_Section(_text(strings, row[0]), row[1], row[4], row[5]) for row in rows)

    def _bytes(self, section: _Section) -> bytes:
        if section.kind == _NOBITS:
            return bytes(section.size)
        data = self._data[section.offset : section.offset + section.size]
        if len(data) != section.size:
            raise CubinError(f"section {section.name} cut short")
        return data


def threads_that_fit(registers: int) -> int:
    """The most threads per block for which a kernel of this many registers a thread can be launched."""
    per_warp = math.ceil(max(registers, 1) / _REGISTER_UNIT) * _REGISTER_UNIT * 32
    warps = _REGISTERS_PER_BLOCK // per_warp // _WARP_UNIT * _WARP_UNIT
    return min(warps * 32, _MAX_BLOCK)


def _text(strings: bytes, start: int) -> str:
    return strings[start : strings.index(b"\0", start)].decode()
