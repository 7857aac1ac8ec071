"""Kernel arguments: from the names and numbers of a plan to typed values, checked against the compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from kbench.errors import LaunchRefused
from kbench.family import Ref, Tensor

_FLOATS = {"f": ctypes.c_float, "d": ctypes.c_double}
_INTEGERS: dict[str, Any] = {
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "l": ctypes.c_int64,
    "q": ctypes.c_uint64,
    "s": ctypes.c_int16,
    "t": ctypes.c_uint16,
    "c": ctypes.c_int8,
    "y": ctypes.c_uint8,
    "o": ctypes.c_bool,
}
_NAMES = {
    "f": "float", "d": "double", "h": "half", "b": "bfloat16", "i": "int32", "u": "uint32", "l": "int64",
    "q": "uint64", "s": "int16", "t": "uint16", "c": "int8", "y": "uint8", "o": "bool", "x": "a struct",
}  # fmt: skip
# What a tensor of this dtype may be passed as; vector types such as float4 read as "x" and are left to the kernel.
_POINTEES = {
    "fp32": "fx", "fp64": "dx", "fp16": "hxt", "bf16": "bxt", "int32": "ix", "uint32": "ux", "uint8": "yxc",
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter of a compiled kernel. `form`: " " value, "*" pointer, "&" pointer to const."""

    form: str
    letter: str

    @property
    def is_pointer(self) -> bool:
        return self.form != " "

    def __str__(self) -> str:
        const = "const " if self.form == "&" else ""
        return const + _NAMES[self.letter] + ("*" if self.is_pointer else "")


def parse_signature(text: str) -> tuple[Parameter, ...]:
    """Read the text that `signature.h` made, two characters per parameter."""
    return tuple(Parameter(text[i], text[i + 1]) for i in range(0, len(text), 2))


def typed_arguments(
    kernel: str,
    parameters: Sequence[Parameter],
    args: Sequence[str | Ref | int | float],
    tensors: Sequence[Tensor],
    address: Callable[[Ref], int],
) -> list[Any]:
    """One ctypes value per parameter; pointers are c_void_p of `address(ref)`.

    Raises LaunchRefused, naming the kernel and the parameter, when the count, the kind, the range or the
    element type does not fit.
    """
    if len(args) != len(parameters):
        raise LaunchRefused(
            f"kernel {kernel} takes {len(parameters)} arguments ({', '.join(map(str, parameters))}),"
            f" the plan passes {len(args)}"
        )
    dtypes = {tensor.name: tensor for tensor in tensors}
    return [
        _typed(f"argument {i + 1} of kernel {kernel}", parameter, arg, dtypes, address)
        for i, (parameter, arg) in enumerate(zip(parameters, args, strict=True))
    ]


def _typed(
    where: str,
    parameter: Parameter,
    arg: Any,
    tensors: dict[str, Tensor],
    address: Callable[[Ref], int],
) -> Any:
    if isinstance(arg, str | Ref):
        ref = Ref(arg) if isinstance(arg, str) else arg
        return ctypes.c_void_p(address(_checked_ref(where, parameter, ref, tensors)))
    if parameter.is_pointer:
        raise LaunchRefused(f"{where} is {parameter}, the plan passes the number {arg!r}")
    if parameter.letter in _FLOATS:
        return _FLOATS[parameter.letter](float(arg))
    if parameter.letter not in _INTEGERS:
        raise LaunchRefused(f"{where} is passed by value as {parameter}, which a plan cannot fill")
    if not isinstance(arg, Integral):
        raise LaunchRefused(f"{where} is {parameter}, the plan passes the {type(arg).__name__} {arg}")
    value = _INTEGERS[parameter.letter](int(arg))
    if int(value.value) != int(arg):
        raise LaunchRefused(f"{where}: {arg} does not fit {parameter}")
    return value


def _checked_ref(where: str, parameter: Parameter, ref: Ref, tensors: dict[str, Tensor]) -> Ref:
    if ref.tensor not in tensors:
        raise LaunchRefused(f"{where}: the family has no tensor {ref.tensor!r}; it has {', '.join(tensors)}")
    tensor = tensors[ref.tensor]
    if not parameter.is_pointer:
        raise LaunchRefused(f"{where} is {parameter}, the plan passes the tensor {ref.tensor}")
    if parameter.letter not in _POINTEES[tensor.dtype]:
        raise LaunchRefused(f"{where} is {parameter}, tensor {ref.tensor} holds {tensor.dtype}")
    if not 0 <= ref.offset < max(tensor.count, 1):
        raise LaunchRefused(f"{where}: offset {ref.offset} is outside tensor {ref.tensor} of {tensor.count} elements")
    return ref
