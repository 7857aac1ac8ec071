"""GEMM steps through cuBLASLt, which can be captured into a CUDA graph (CuPy's own cuBLAS calls cannot).

cuBLASLt thinks in column-major matrices. A row-major rows x cols matrix *is* the column-major cols x rows matrix of
the same leading dimension, its transpose. So out = op(a) op(b) in rows is out' = op(b)' op(a)' in columns: the
operands change places, and each keeps its own transpose flag.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from kbench.device.cuda.steps import Address, Runner, raise_if_lost
from kbench.device.gemm_operands import BASE_ALIGNMENT, aux_operand, bias_operand, operands
from kbench.device.gemm_operands import Operand as Operand
from kbench.errors import CannotRunError, LaunchRefused
from kbench.family import Gemm, Tensor
from kbench.install import install_command

# The name of cuBLAS's compute type for what a GEMM computes in. All add up in fp32.
COMPUTE = {"fp32": "COMPUTE_32F", "tf32": "COMPUTE_32F_FAST_TF32", "bf16": "COMPUTE_32F", "fp16": "COMPUTE_32F"}
TYPES = {"fp32": "CUDA_R_32F", "bf16": "CUDA_R_16BF", "fp16": "CUDA_R_16F"}

# Names of the library's epilogues, by (whether there is a bias, whether GELU follows, whether there is a matrix of what
# it is, or was, applied to).
EPILOGUES = {
    (False, False, False): "DEFAULT",
    (True, False, False): "BIAS",
    (False, True, False): "GELU",
    (True, True, False): "GELU_BIAS",
    (False, True, True): "GELU_AUX",
    (True, True, True): "GELU_AUX_BIAS",
    (False, False, True): "DGELU",
}


class Addresses(NamedTuple):
    """Where the operands of one binding begin; 0 for what a GEMM does not have."""

    left: int
    right: int
    out: int
    bias: int = 0
    aux: int = 0


class CublasLt:
    """The library and a handle. Raises CannotRunError where it is missing."""

    def __init__(self) -> None:
        try:
            from nvmath import CudaDataType
            from nvmath.bindings import cublas, cublasLt
        except ImportError as error:
            raise _missing("the Python package nvmath-python") from error
        self.api, self._blas, self._types = cublasLt, cublas, CudaDataType
        try:
            self.handle: int = cublasLt.create()
        except cublasLt.cuBLASLtError as error:
            raise CannotRunError(f"cuBLASLt cannot start: {error}") from error
        except RuntimeError as error:  # the library itself is not found
            raise _missing("the library cuBLASLt (package nvidia-cublas)") from error
        self.version: int = cublasLt.get_version()

    def compute_type(self, name: str) -> int:
        return int(self._blas.ComputeType[COMPUTE[name]])

    def data_type(self, dtype: str) -> int:
        return int(self._types[TYPES[dtype]])

    def operation(self, transpose: bool) -> int:
        return int(self._blas.Operation.T if transpose else self._blas.Operation.N)

    def epilogue(self, name: str) -> int:
        return int(self.api.Epilogue[name])

    def set_attribute(self, kind: str, target: int, name: str, value: int) -> None:
        """Set an attribute of a `matmul_desc`, `matrix_layout` or `matmul_preference`, by the library's name."""
        enum = {"matmul_desc": "MatmulDesc", "matrix_layout": "MatrixLayout", "matmul_preference": "MatmulPreference"}
        attribute = getattr(self.api, f"{enum[kind]}Attribute")[name]
        dtype = getattr(self.api, f"get_{kind}_attribute_dtype")(attribute)
        buffer = np.array([value], dtype=dtype)
        getattr(self.api, f"{kind}_set_attribute")(target, attribute, buffer.ctypes.data, buffer.itemsize)

    def close(self) -> None:
        self.api.destroy(self.handle)


def _missing(what: str) -> CannotRunError:
    return CannotRunError(
        f"the plan has a GEMM, and {what} is missing",
        f"{install_command('cuda13')} (or cuda12 for a driver before 580)",
    )


class PreparedGemm:
    """A GEMM with its descriptors. `algo` and `workspace` are chosen by `tune.py` before it is bound.

    Raises LaunchRefused if types or ranges do not fit.
    """

    def __init__(self, lt: CublasLt, step: Gemm, tensors: Sequence[Tensor]):
        self.lt, self.step = lt, step
        self.left, self.right, self.out = operands(step, tensors)
        self.bias, self.aux = bias_operand(step, tensors), aux_operand(step, tensors)
        self.algo = np.zeros(1, dtype=lt.api.matmul_algo_dtype)
        self.workspace = 0
        self._objects = _Objects(lt, self)
        # Addresses that nothing is read from: they tell the heuristic how well bias and aux will be aligned.
        self._desc = self._matmul_desc(self._objects, *(o.alignment if o else 0 for o in (self.bias, self.aux)))
        self._layouts = tuple(self._layout(operand) for operand in (self.left, self.right, self.out))
        self._alpha, self._beta = ctypes.c_float(step.alpha), ctypes.c_float(step.beta)

    @property
    def operands(self) -> dict[str, Operand]:
        """All that it has, by the names of `Addresses`."""
        found = {"left": self.left, "right": self.right, "out": self.out, "bias": self.bias, "aux": self.aux}
        return {name: operand for name, operand in found.items() if operand is not None}

    @property
    def notes(self) -> list[str]:
        override = os.environ.get("NVIDIA_TF32_OVERRIDE")
        return [f"NVIDIA_TF32_OVERRIDE={override} is set and changes what GEMMs compute in"] if override else []

    @property
    def key(self) -> dict[str, Any]:
        """All that the choice of an algorithm depends on, but for the GPU and the library."""
        parts = {"left": self.left, "right": self.right, "out": self.out}
        # Which tensor it is does not matter, nor where in it but for the alignment.
        place = ("tensor", "offset")
        shapes = {name: {k: v for k, v in asdict(part).items() if k not in place} for name, part in parts.items()}
        return {
            **shapes,
            "compute": self.step.compute,
            "batch": self.step.batch,
            "beta": self.step.beta != 0,
            "epilogue": self._epilogue,
            "bias alignment": self.bias.alignment if self.bias else 0,
            "aux alignment": self.aux.alignment if self.aux else 0,
            "reductions": self._reductions,
        }

    def candidates(self, count: int, workspace: int) -> list[tuple[Any, int]]:
        """Up to `count` algorithms with the workspace that each needs, the likeliest first.

        Raises LaunchRefused if there is none.
        """
        api = self.lt.api
        found = np.zeros(count, dtype=api.matmul_heuristic_result_dtype)
        returned = np.zeros(1, dtype=np.int32)
        preference = api.matmul_preference_create()
        try:
            self._prefer(preference, workspace)
            api.matmul_algo_get_heuristic(
                self.lt.handle, self._desc, *self._layouts, self._layouts[-1], preference, count,
                found.ctypes.data, returned.ctypes.data,
            )  # fmt: skip
        except api.cuBLASLtError as error:
            raise LaunchRefused(f"cuBLASLt has no algorithm for {self}: {error}") from error
        finally:
            api.matmul_preference_destroy(preference)
        usable = [i for i in range(int(returned[0])) if found["state"][i] == 0]
        if not usable:
            raise LaunchRefused(f"cuBLASLt has no algorithm for {self}")
        return [(found["algo"][i : i + 1].copy(), int(found["workspace_size"][i])) for i in usable]

    def accepts(self, algo: Any, workspace: int) -> bool:
        """Whether an algorithm that was chosen in another process fits here."""
        result = np.zeros(1, dtype=self.lt.api.matmul_heuristic_result_dtype)
        try:
            self.lt.api.matmul_algo_check(
                self.lt.handle, self._desc, *self._layouts, self._layouts[-1], algo.ctypes.data, result.ctypes.data
            )
        except self.lt.api.cuBLASLtError:
            return False
        return bool(result[0]["state"] == 0 and int(result[0]["workspace_size"]) <= workspace)

    def bind(self, address: Address, workspace: int) -> Runner:
        """Queue-able work; `workspace` is the address of at least `self.workspace` bytes."""
        places = {name: self._address(operand, address) for name, operand in self.operands.items()}
        return self.runner(Addresses(**places), self.algo, workspace, self.workspace)

    def runner(self, at: Addresses, algo: Any, workspace: int, workspace_bytes: int) -> Runner:
        """Queue-able work on addresses."""
        left_layout, right_layout, out_layout = self._layouts
        # All arguments but the descriptor, which comes second.
        arguments = (
            ctypes.addressof(self._alpha), at.left, left_layout, at.right, right_layout,
            ctypes.addressof(self._beta), at.out, out_layout, at.out, out_layout,
            algo.ctypes.data, workspace, workspace_bytes,
        )  # fmt: skip
        return _BoundGemm(self, at, algo, arguments)

    def __str__(self) -> str:
        m, n, k = self.step.mnk
        epilogue = "" if self._epilogue == "DEFAULT" else f" epilogue {self._epilogue}"
        return f"the {self.step.compute} GEMM m={m} n={n} k={k} batch={self.step.batch}{epilogue}"

    @property
    def _epilogue(self) -> str:
        return EPILOGUES[self.bias is not None, self.step.gelu, self.aux is not None]

    @property
    def _reductions(self) -> str:
        """How partial sums of a split k may be added up, by the library's name. All of its ways but this one add in
        the output's type: in 16 bits that rounds once for every part."""
        return "MASK" if self.out.dtype == "fp32" else "COMPUTE_TYPE"

    def _address(self, operand: Operand, address: Address) -> int:
        base = address(operand.tensor)
        if base % BASE_ALIGNMENT:
            raise LaunchRefused(f"tensor {operand.tensor} is not aligned to {BASE_ALIGNMENT} bytes, as {self} needs")
        return base + operand.offset

    def _matmul_desc(self, objects: _Objects, bias: int, aux: int) -> int:
        """A descriptor that belongs to `objects`: the addresses of bias and aux are part of it."""
        lt = self.lt
        desc = objects.make("matmul_desc", lt.compute_type(self.step.compute), lt.data_type("fp32"))
        lt.set_attribute("matmul_desc", desc, "TRANSA", lt.operation(self.left.transpose))
        lt.set_attribute("matmul_desc", desc, "TRANSB", lt.operation(self.right.transpose))
        lt.set_attribute("matmul_desc", desc, "EPILOGUE", lt.epilogue(self._epilogue))
        if self.bias:
            # The same vector for all members of a batch: BIAS_BATCH_STRIDE stays 0.
            lt.set_attribute("matmul_desc", desc, "BIAS_DATA_TYPE", lt.data_type(self.bias.dtype))
            lt.set_attribute("matmul_desc", desc, "BIAS_POINTER", bias)
        if self.aux:
            # EPILOGUE_AUX_DATA_TYPE stays unset, as the library asks: it then is the output's type.
            lt.set_attribute("matmul_desc", desc, "EPILOGUE_AUX_LD", self.aux.ld)
            lt.set_attribute("matmul_desc", desc, "EPILOGUE_AUX_POINTER", aux)
        return desc

    def bound_desc(self, owner: object, at: Addresses) -> int:
        """The descriptor for one binding, which lives as long as `owner` where it is not shared by all."""
        own = self.bias is not None or self.aux is not None
        return self._matmul_desc(_Objects(self.lt, owner), at.bias, at.aux) if own else self._desc

    def _layout(self, operand: Operand) -> int:
        kind, sizes = self.lt.data_type(operand.dtype), (operand.rows, operand.cols, operand.ld)
        layout = self._objects.make("matrix_layout", kind, *sizes)
        if self.step.batch > 1:
            self.lt.set_attribute("matrix_layout", layout, "BATCH_COUNT", self.step.batch)
            self.lt.set_attribute("matrix_layout", layout, "STRIDED_BATCH_OFFSET", operand.stride)
        return layout

    def _prefer(self, preference: int, workspace: int) -> None:
        alignments = {"A": self.left, "B": self.right, "C": self.out, "D": self.out}
        self.lt.set_attribute("matmul_preference", preference, "MAX_WORKSPACE_BYTES", workspace)
        for name, operand in alignments.items():
            self.lt.set_attribute("matmul_preference", preference, f"MIN_ALIGNMENT_{name}_BYTES", operand.alignment)
        mask = int(self.lt.api.ReductionScheme[self._reductions])
        self.lt.set_attribute("matmul_preference", preference, "REDUCTION_SCHEME_MASK", mask)


class _Objects:
    """Descriptors of the library that go when `owner` goes."""

    def __init__(self, lt: CublasLt, owner: object):
        self._api = lt.api
        self._closers: list[Callable[[], None]] = []
        # At the end of the process the library may be gone before us, and everything of it with it.
        weakref.finalize(owner, _run_all, self._closers).atexit = False

    def make(self, kind: str, *arguments: int) -> int:
        made: int = getattr(self._api, f"{kind}_create")(*arguments)
        destroy = getattr(self._api, f"{kind}_destroy")
        self._closers.append(lambda: destroy(made))
        return made


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _BoundGemm:
    """cublasLtMatmul with every argument but the stream; keeps descriptors, scalars and algorithm alive."""

    def __init__(self, gemm: PreparedGemm, at: Addresses, algo: Any, arguments: tuple[int, ...]):
        self._gemm, self._algo = gemm, algo
        self._before = (gemm.lt.handle, gemm.bound_desc(self, at), *arguments)
        self._matmul = gemm.lt.api.matmul

    def __call__(self, stream: int) -> None:
        try:
            self._matmul(*self._before, stream)
        except self._gemm.lt.api.cuBLASLtError as error:
            # It may also be the messenger of a kernel that failed before.
            raise_if_lost(stream, f"launch of {self._gemm}")
            raise LaunchRefused(f"cuBLASLt refuses {self._gemm}: {error}") from error
