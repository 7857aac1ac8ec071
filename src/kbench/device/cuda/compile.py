"""From a `.cu` and name expressions to a cubin, through NVRTC: needs no GPU, no driver and no CuPy.

Each kernel is instantiated by its name expression, so a version that does not compile does not take its
siblings along, and the compiler itself writes the parameter list of each kernel into a variable beside it
(`device/signature.h`), which is read back out of the cubin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kbench.device.arguments import Parameter, parse_signature
from kbench.device.base import KernelInfo
from kbench.device.cuda import cache as disk
from kbench.device.cuda.cubin import CubinFile
from kbench.device.cuda.headers import cuda_headers, headers_version
from kbench.device.cuda.messages import SIGNATURE_HEADER, TAIL_NAME, blames_tail, explain
from kbench.errors import CannotRunError, CompileError
from kbench.install import install_command
from kbench.source import Source, base_name

# The same for every kernel, and in every record. No fast math, no flush to zero, contraction to FMA as by default.
# Line info costs nothing at run time and lets reports name lines. The macro keeps cooperative_groups.h from
# including CCCL: 2.1 s become 0.08 s and no CCCL is needed; a `.cu` may undefine it before the include.
OPTIONS = ("-std=c++17", "-lineinfo", "-D_CG_LIMIT_INCLUDED_DEPENDENCIES")
# Only asks for a report: registers and spills of each kernel.
_REPORT = ("-Xptxas", "-v")

# signature.h names both types; an include of theirs would cost 0.2 s for sources that use neither.
_TAIL_HEAD = f'struct __half;\nstruct __nv_bfloat16;\n#include "{SIGNATURE_HEADER}"\n'

# What NVRTC says of a name that is not there.
_UNKNOWN_NAME = re.compile(r'(?:identifier|has no member) "(?:\w+::)*(\w+)"')

_SPILLS = re.compile(
    r"Function properties for (\S+)\n\s*(?:ptxas\s*\.?)?\s*\d+ bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads"
)


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture.

    lowered: name expression to the name in `data`. signatures, infos: by name expression. log: what the
    compiler said. from_cache: nothing was compiled.
    """

    arch: str
    data: bytes
    lowered: Mapping[str, str]
    signatures: Mapping[str, tuple[Parameter, ...]]
    infos: Mapping[str, KernelInfo]
    log: str
    from_cache: bool = False


def compile_cubin(source: Source, kernels: Sequence[str], arch: str) -> Cubin:
    """Compile `kernels` (name expressions) of `source` for `arch` ("sm_90"), or take them from the cache.

    Raises CompileError, with the user's file and line, if the source is at fault, and CannotRunError without NVRTC
    or if this NVRTC cannot compile for `arch`.
    """
    nvrtc = _nvrtc()
    _check_arch(nvrtc, arch)
    kernels = tuple(dict.fromkeys(kernels))
    folders = cuda_headers(nvrtc_version())
    key = _cache_key(source, kernels, arch, folders)
    if (entry := disk.load("cubin", key)) is not None:
        return _from_entry(arch, *entry)
    cubin = _compile(nvrtc, source, kernels, arch, folders)
    disk.store("cubin", key, _fields(cubin), cubin.data)
    return cubin


@dataclass(frozen=True)
class Ptx:
    """The front end's output for one architecture. lowered: name expression to the name in `text`."""

    text: str
    lowered: Mapping[str, str]


def compile_ptx(source: Source, kernels: Sequence[str], arch: str) -> Ptx:
    """The PTX of `kernels`, with the options of `compile_cubin`, or taken from the cache. Raises as that does."""
    nvrtc = _nvrtc()
    _check_arch(nvrtc, arch)
    kernels = tuple(dict.fromkeys(kernels))
    folders = cuda_headers(nvrtc_version())
    key = _cache_key(source, kernels, arch, folders)
    if (entry := disk.load("ptx", key)) is not None:
        return Ptx(entry[1].decode(), entry[0]["lowered"])
    # For a virtual architecture the assembler, which takes most of the time, is not run.
    options = (f"--gpu-architecture={arch.replace('sm', 'compute')}", *OPTIONS, *(f"-I{folder}" for folder in folders))
    program = _Program(nvrtc, source, "")
    try:
        if program.compile(options, kernels) is None:
            _compile(nvrtc, source, kernels, arch, folders)  # fails as well, and says which kernel or line it is
            raise CompileError(f"{source.path.name} compiles to machine code but not to PTX", program.log())
        ptx = Ptx(program.ptx(), dict(zip(kernels, map(program.lowered_name, kernels), strict=True)))
    finally:
        program.close()
    disk.store("ptx", key, {"lowered": dict(ptx.lowered)}, ptx.text.encode())
    return ptx


@cache
def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of NVRTC. Raises CannotRunError without it."""
    nvrtc = _nvrtc()
    major, minor = _checked(nvrtc, nvrtc.nvrtcVersion())
    return int(major), int(minor)


@cache
def nvrtc_build() -> str:
    """The version of NVRTC to the build, "13.0.88": numbers that are compared are comparable for one build only.

    Raises CannotRunError without NVRTC.
    """
    major, minor = nvrtc_version()
    program = _Program(_nvrtc(), Source(Path("empty.cu"), "", ()), "")
    try:
        # No call says it. The text of PTX begins with the program that wrote it.
        ptx = program.ptx() if program.compile((), ()) is not None else ""
    finally:
        program.close()
    match = re.search(rf"\bV({major}\.{minor}\.\d+)", ptx)
    return match[1] if match else f"{major}.{minor}"


def require_arch(arch: str) -> None:
    """Raises CannotRunError without NVRTC, and for an architecture that this NVRTC cannot compile for."""
    _check_arch(_nvrtc(), arch)


def _nvrtc() -> Any:
    hint = f"{install_command('cuda13')} (driver 580 or later, or no GPU), or the extra cuda12"
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CannotRunError("cannot compile for CUDA: the Python package cuda-bindings is missing", hint) from error
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError
        raise CannotRunError("cannot compile for CUDA: the library NVRTC is not found", hint) from error
    return nvrtc


def _check_arch(nvrtc: Any, arch: str) -> None:
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise CannotRunError(f"{arch!r} is not a GPU architecture such as sm_90")
    known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    if int(re.sub(r"\D", "", arch)) not in known:
        version = ".".join(map(str, nvrtc_version()))
        raise CannotRunError(
            f"NVRTC {version} cannot compile for {arch}: it knows sm_{min(known)} to sm_{max(known)}",
            "install the NVRTC of another CUDA version (extras cuda12 and cuda13)",
        )


# ---------------------------------------------------------------------------------------------- compiling


def _compile(nvrtc: Any, source: Source, kernels: Sequence[str], arch: str, folders: Sequence[Path]) -> Cubin:
    options = (f"--gpu-architecture={arch}", *OPTIONS, *_REPORT, *(f"-I{folder}" for folder in folders))
    variables = [f"&{_variable(i)}" for i in range(len(kernels))]
    program = _Program(nvrtc, source, _tail(kernels))
    try:
        log = program.compile(options, (*kernels, *variables))
        if log is None:
            raise _failure(nvrtc, source, kernels, options, program.log(), folders)
        lowered = dict(zip(kernels, map(program.lowered_name, kernels), strict=True))
        return _describe(arch, program.cubin(), kernels, lowered, log)
    finally:
        program.close()


def _failure(
    nvrtc: Any, source: Source, kernels: Sequence[str], options: Sequence[str], log: str, folders: Sequence[Path]
) -> CompileError:
    if blames_tail(log):
        # Either the user's text ends in the middle of something, which it will show at its place when it is
        # compiled alone, or a name expression does not fit.
        alone = _Program(nvrtc, source, "")
        try:
            if alone.compile(options, ()) is None:
                log = alone.log()
        finally:
            alone.close()
    first_line = 1 + _TAIL_HEAD.count("\n")
    names = {first_line + i: kernel for i, kernel in enumerate(kernels)}
    if blames_tail(log):
        unknown = set(_UNKNOWN_NAME.findall(log))
        if message := source.lacks(kernel for kernel in kernels if base_name(kernel) in unknown):
            return CompileError(message, log)
    return explain(log, source, names, nvrtc_version(), folders)


def _tail(kernels: Sequence[str]) -> str:
    lines = [
        f'extern "C" __device__ const kbench::Signature<decltype(&{kernel})> {_variable(i)}{{}};\n'
        for i, kernel in enumerate(kernels)
    ]
    return f'\n#line 1 "{TAIL_NAME}"\n{_TAIL_HEAD}{"".join(lines)}'


def _variable(index: int) -> str:
    return f"kbench_signature_{index}"


def _describe(arch: str, data: bytes, kernels: Sequence[str], lowered: Mapping[str, str], log: str) -> Cubin:
    file = CubinFile(data)
    spills = {name: int(stores) + int(loads) for name, stores, loads in _SPILLS.findall(log)}
    texts = {kernel: file.variable(_variable(i)).rstrip(b"\0").decode() for i, kernel in enumerate(kernels)}
    infos = {kernel: file.info(lowered[kernel], kernel, spills.get(lowered[kernel])) for kernel in kernels}
    signatures = {kernel: parse_signature(text) for kernel, text in texts.items()}
    return Cubin(arch, data, dict(lowered), signatures, infos, log)


class _Program:
    """An NVRTC program: the user's text, its quoted includes as they were hashed, and `tail` behind it."""

    def __init__(self, nvrtc: Any, source: Source, tail: str):
        headers = {name: text for name, _, text in source.includes}
        headers[SIGNATURE_HEADER] = _signature_header()
        self._nvrtc = nvrtc
        self._handle = _checked(
            nvrtc,
            nvrtc.nvrtcCreateProgram(
                (source.text + tail).encode(),
                str(source.path).encode(errors="surrogateescape"),
                len(headers),
                [text.encode() for text in headers.values()],
                [name.encode() for name in headers],
            ),
        )

    def compile(self, options: Sequence[str], expressions: Sequence[str]) -> str | None:
        """The log, or None if the source has errors."""
        for expression in expressions:
            _checked(self._nvrtc, self._nvrtc.nvrtcAddNameExpression(self._handle, expression.encode()))
        encoded = [option.encode(errors="surrogateescape") for option in options]
        (status,) = self._nvrtc.nvrtcCompileProgram(self._handle, len(encoded), encoded)
        if status == self._nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            return None
        _checked(self._nvrtc, (status,), self.log)
        return self.log()

    def log(self) -> str:
        text = self._bytes(self._nvrtc.nvrtcGetProgramLogSize, self._nvrtc.nvrtcGetProgramLog)
        # The logs of compiler and assembler are joined by a NUL.
        return text.replace(b"\0", b"\n").decode(errors="replace").strip()

    def cubin(self) -> bytes:
        return self._bytes(self._nvrtc.nvrtcGetCUBINSize, self._nvrtc.nvrtcGetCUBIN)

    def ptx(self) -> str:
        return self._bytes(self._nvrtc.nvrtcGetPTXSize, self._nvrtc.nvrtcGetPTX).rstrip(b"\0").decode()

    def lowered_name(self, expression: str) -> str:
        name = _checked(self._nvrtc, self._nvrtc.nvrtcGetLoweredName(self._handle, expression.encode()))
        return bytes(name).decode()

    def close(self) -> None:
        self._nvrtc.nvrtcDestroyProgram(self._handle)

    def _bytes(self, size: Any, get: Any) -> bytes:
        data = bytes(_checked(self._nvrtc, size(self._handle)))  # the binding fills this very object
        _checked(self._nvrtc, get(self._handle, data))
        return data


def _checked(nvrtc: Any, result: tuple[Any, ...], log: Any = None) -> Any:
    """The values behind the status that every call of cuda-bindings returns first."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed: {status.name}", log() if log else "", "see the log with --debug")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def _signature_header() -> str:
    return (Path(__file__).parent.parent / "signature.h").read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------- cache


def _cache_key(source: Source, kernels: Sequence[str], arch: str, folders: tuple[Path, ...]) -> dict[str, Any]:
    return {
        # The path is in the line info and in messages. Headers in `folders` change with their version only.
        "path": str(source.path),
        "source": source.digest,
        "signature": _signature_header(),
        "kernels": list(kernels),
        "options": [*OPTIONS, *_REPORT],
        "nvrtc": list(nvrtc_version()),
        "headers": headers_version(folders),
        "arch": arch,
    }


def _fields(cubin: Cubin) -> dict[str, Any]:
    return {
        "lowered": dict(cubin.lowered),
        "signatures": {k: "".join(p.form + p.letter for p in s) for k, s in cubin.signatures.items()},
        "infos": {k: asdict(info) for k, info in cubin.infos.items()},
        "log": cubin.log,
    }


def _from_entry(arch: str, fields: Mapping[str, Any], data: bytes) -> Cubin:
    signatures = {kernel: parse_signature(text) for kernel, text in fields["signatures"].items()}
    infos = {kernel: KernelInfo(**info) for kernel, info in fields["infos"].items()}
    return Cubin(arch, data, fields["lowered"], signatures, infos, fields["log"], from_cache=True)
