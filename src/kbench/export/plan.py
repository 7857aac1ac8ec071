"""The steps of a plan as C++: launches with their numbers, fills, copies, and matrix products by cuBLASLt."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from kbench.device.cuda.gemm import COMPUTE, EPILOGUES, TYPES
from kbench.device.dtypes import numpy_dtype
from kbench.device.emulator.steps import check_step, fill_count
from kbench.device.gemm_operands import Operand, aux_operand, bias_operand, operands
from kbench.errors import UsageError
from kbench.family import (
    C_TYPES,
    AllReduce,
    Copy,
    Fill,
    Gemm,
    Launch,
    Ref,
    Sdpa,
    SdpaBackward,
    Step,
    Tensor,
)

# Of every type that a tensor may have.
ELEMENT_TYPES = {**C_TYPES, "fp64": "double", "uint8": "unsigned char"}
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_INT_MAX = 2**31 - 1
_LIBRARIES = {Sdpa: "attention by cuDNN", SdpaBackward: "attention by cuDNN", AllReduce: "a sum over GPUs by NCCL"}


def require_exportable(what: str, plan: Sequence[Step]) -> None:
    """Raises UsageError for a plan with a step that one file of CUDA cannot hold."""
    for step in plan:
        for kind, library in _LIBRARIES.items():
            if isinstance(step, kind):
                raise UsageError(f"{what} cannot be exported: it is {library}", "export another version")


@dataclass
class PlanCode:
    """C++ of a plan. globals: what stands outside of functions; prepare, run: bodies of the functions that come before
    and in each run."""

    pointers: Mapping[str, str]
    globals: list[str] = field(default_factory=list)
    prepare: list[str] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    fills: bool = False
    gemms: int = 0


def pointer_names(tensors: Sequence[Tensor]) -> dict[str, str]:
    """A C++ variable for each tensor: d_inp."""
    names: dict[str, str] = {}
    for tensor in tensors:
        name = "d_" + re.sub(r"\W", "_", tensor.name, flags=re.ASCII)
        while name in names.values():
            name += "_"
        names[tensor.name] = name
    return names


def plan_code(plan: Sequence[Step], tensors: Sequence[Tensor]) -> PlanCode:
    """The plan in C++. Raises LaunchRefused for a step that no device would take."""
    by_name = {tensor.name: tensor for tensor in tensors}
    code = PlanCode(pointer_names(tensors))
    allowed: dict[str, int] = {}
    for step in plan:
        match step:
            case Launch():
                code.run.append(_launch(step, code))
                allowed[step.kernel] = max(allowed.get(step.kernel, 0), step.shared)
            case Fill():
                check_step(step, by_name)
                _fill(step, by_name, code)
            case Copy():
                check_step(step, by_name)
                _copy(step, by_name, code)
            case Gemm():
                _gemm(step, tensors, code)
            case _:
                raise TypeError(f"{type(step).__name__} has been refused before")
    code.prepare[:0] = [f"EXPORTED_ALLOW_SHARED(({kernel}), {shared});" for kernel, shared in allowed.items() if shared]
    return code


def _launch(step: Launch, code: PlanCode) -> str:
    arguments = "".join(f", {_argument(arg, code)}" for arg in step.args)
    grid, block = _dim3(step.grid), _dim3(step.block)
    return f"EXPORTED_LAUNCH(({step.kernel}), {grid}, {block}, {step.shared}, stream{arguments});"


def _dim3(sizes: Sequence[int]) -> str:
    return f"dim3({', '.join(map(str, sizes))})"


def _argument(arg: str | Ref | int | float, code: PlanCode) -> str:
    if isinstance(arg, str | Ref):
        return _element(arg, code)
    number: Any = arg  # of numpy, too
    return _integer(int(number)) if isinstance(number, Integral) else _number(float(number))


def _number(number: float) -> str:
    if math.isfinite(number):
        return repr(number)
    limits = "std::numeric_limits<double>"
    if math.isnan(number):
        return f"{limits}::quiet_NaN()"
    return f"{'-' if number < 0 else ''}{limits}::infinity()"


def _integer(value: int) -> str:
    if -_INT_MAX <= value <= _INT_MAX:
        return str(value)
    return f"{value}LL" if value < 2**63 else f"{value}ULL"


def _element(arg: str | Ref, code: PlanCode) -> str:
    ref = Ref(arg) if isinstance(arg, str) else arg
    pointer = code.pointers[ref.tensor]
    return f"{pointer} + {_integer(ref.offset)}" if ref.offset else pointer


def _fill(step: Fill, tensors: Mapping[str, Tensor], code: PlanCode) -> None:
    tensor, count = tensors[step.target.tensor], fill_count(step, tensors)
    word = np.asarray(step.value).astype(numpy_dtype(tensor.dtype)).tobytes()
    first = _element(step.target, code)
    if len(set(word)) == 1:
        call = f"cudaMemsetAsync({first}, 0x{word[0]:02x}, {count * len(word)}, stream)"
        code.run.append(f"EXPORTED_CALL({call});")
        return
    code.fills = True
    digits = f"0x{int.from_bytes(word, 'little'):0{2 * len(word)}x}"
    code.run.append(f"exported::fill_words<{_WORDS[len(word)]}>({first}, {count}, {digits}, stream);")


def _copy(step: Copy, tensors: Mapping[str, Tensor], code: PlanCode) -> None:
    nbytes = step.count * numpy_dtype(tensors[step.target.tensor].dtype).itemsize
    target, source = _element(step.target, code), _element(step.source, code)
    code.run.append(f"EXPORTED_CALL(cudaMemcpyAsync({target}, {source}, {nbytes}, cudaMemcpyDeviceToDevice, stream));")


def _gemm(step: Gemm, tensors: Sequence[Tensor], code: PlanCode) -> None:
    left, right, out = operands(step, tensors)
    bias, aux = bias_operand(step, tensors), aux_operand(step, tensors)
    variable, (m, n, k) = f"gemm{code.gemms}", step.mnk
    code.gemms += 1
    epilogue = EPILOGUES[bias is not None, step.gelu, aux is not None]
    matrices = (_matrix(operand, code) for operand in (left, right, out))
    aux_code = (_address(aux, code), str(aux.ld)) if aux else ("nullptr", "0")
    name = f"GEMM {m} x {n} x {k}" + (f", {step.batch} times" if step.batch > 1 else "")
    code.globals.append(f"static exported::Gemm {variable};  // out (m x n) = a (m x k) * b (k x n) in rows: {name}")
    arguments = (
        f'"{name}", CUBLAS_{COMPUTE[step.compute]}',
        *matrices,
        f"{_single(step.alpha)}, {_single(step.beta)}, {step.batch}, CUBLASLT_EPILOGUE_{epilogue}, "
        f"{_address(bias, code) if bias else 'nullptr'}, {aux_code[0]}, {aux_code[1]}",
    )
    joined = ",\n                 ".join(arguments)
    code.prepare.append(f"{variable}.create({joined});")
    code.run.append(f"{variable}.run(stream);")


def _single(value: float) -> str:
    return f"{float(np.float32(value))!r}f"


def _matrix(operand: Operand, code: PlanCode) -> str:
    transpose = "true" if operand.transpose else "false"
    return (
        f"{{{_address(operand, code)}, {TYPES[operand.dtype]}, {operand.rows}, {operand.cols}, {operand.ld}, "
        f"{operand.stride}, {operand.alignment}, {transpose}}}"
    )


def _address(operand: Operand, code: PlanCode) -> str:
    item = numpy_dtype(operand.dtype).itemsize
    return _element(Ref(operand.tensor, operand.offset // item), code)
