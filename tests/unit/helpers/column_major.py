"""cuBLASLt's matmul as its documentation defines it, in numpy, on host memory: column-major, strided batches."""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import numpy as np

# Numbers of our own: the code under test must take them from the library's enums.
DESC = enum.IntEnum(
    "MatmulDescAttribute",
    [
        "TRANSB",
        "TRANSA",
        "BIAS_DATA_TYPE",
        "BIAS_POINTER",
        "EPILOGUE",
        "EPILOGUE_AUX_LD",
        "EPILOGUE_AUX_POINTER",
    ],
)
LAYOUT = enum.IntEnum("MatrixLayoutAttribute", ["STRIDED_BATCH_OFFSET", "BATCH_COUNT"])
PREFERENCE = enum.IntEnum(
    "MatmulPreferenceAttribute",
    [
        "REDUCTION_SCHEME_MASK",
        "MAX_WORKSPACE_BYTES",
        "MIN_ALIGNMENT_D_BYTES",
        "MIN_ALIGNMENT_C_BYTES",
        "MIN_ALIGNMENT_B_BYTES",
        "MIN_ALIGNMENT_A_BYTES",
    ],
)
EPILOGUE = enum.IntEnum(
    "Epilogue",
    {"GELU_BIAS": 70, "GELU": 71, "BIAS": 72, "DEFAULT": 73, "DGELU": 74, "GELU_AUX": 75, "GELU_AUX_BIAS": 76},
)
REDUCTION = enum.IntEnum("ReductionScheme", {"COMPUTE_TYPE": 80, "MASK": 81})
OPERATION = enum.IntEnum("Operation", {"N": 40, "T": 41})
COMPUTE = enum.IntEnum("ComputeType", {"COMPUTE_32F": 50, "COMPUTE_32F_FAST_TF32": 51})
TYPE = enum.IntEnum("CudaDataType", {"CUDA_R_32F": 60, "CUDA_R_16BF": 61, "CUDA_R_16F": 62})


class Refused(Exception):
    """What the library raises."""


def _inside_tanh(x: Any) -> Any:
    return np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)


def _slope_inside_tanh(x: Any) -> Any:
    return np.sqrt(2.0 / np.pi) * (1.0 + 3.0 * 0.044715 * x**2)


class FakeApi:
    """As much of `nvmath.bindings.cublasLt` as GEMM steps use; `offers` is what the heuristic answers."""

    cuBLASLtError = Refused
    MatmulDescAttribute, MatrixLayoutAttribute, MatmulPreferenceAttribute = DESC, LAYOUT, PREFERENCE
    Epilogue, ReductionScheme = EPILOGUE, REDUCTION
    matmul_algo_dtype = np.dtype([("data_", "<u8", (8,))])
    matmul_heuristic_result_dtype = np.dtype(
        [
            ("algo", matmul_algo_dtype),
            ("workspace_size", "<u8"),
            ("state", "<i4"),
            ("waves_count", "<f4"),
            ("reserved", "<i4", (4,)),
        ]
    )

    def __init__(self) -> None:
        self.objects: dict[int, dict[str, Any]] = {}
        self.offers: list[tuple[int, int, int]] = [(1, 0, 0)]  # number of the algorithm, workspace, state
        self.preferred: dict[str, int] = {}
        self._next = 1000

    def _make(self, **fields: Any) -> int:
        self._next += 1
        self.objects[self._next] = fields
        return self._next

    def _destroy(self, handle: int) -> None:
        del self.objects[handle]

    def matmul_desc_create(self, compute: int, scale: int) -> int:
        defaults = {"TRANSA": OPERATION.N, "TRANSB": OPERATION.N, "EPILOGUE": EPILOGUE.DEFAULT, "BIAS_POINTER": 0}
        return self._make(compute=COMPUTE(compute), scale=TYPE(scale), **defaults)

    def matrix_layout_create(self, kind: int, rows: int, cols: int, ld: int) -> int:
        assert ld >= rows, "the leading dimension of a column-major matrix spans its rows"
        return self._make(type=TYPE(kind), rows=rows, cols=cols, ld=ld, BATCH_COUNT=1, STRIDED_BATCH_OFFSET=0)

    def matmul_preference_create(self) -> int:
        return self._make()

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = _destroy

    def _set(self, enum_type: Any, handle: int, attribute: int, buffer: int, size: int) -> None:
        value = int.from_bytes(ctypes.string_at(buffer, size), "little")
        self.objects[handle][enum_type(attribute).name] = value
        if enum_type is PREFERENCE:
            self.preferred[enum_type(attribute).name] = value

    def matmul_desc_set_attribute(self, *args: int) -> None:
        self._set(DESC, *args)

    def matrix_layout_set_attribute(self, *args: int) -> None:
        self._set(LAYOUT, *args)

    def matmul_preference_set_attribute(self, *args: int) -> None:
        self._set(PREFERENCE, *args)

    def get_matmul_desc_attribute_dtype(self, attribute: int) -> Any:
        wide = (DESC.BIAS_POINTER, DESC.EPILOGUE_AUX_POINTER, DESC.EPILOGUE_AUX_LD)
        return np.int64 if attribute in wide else np.uint32 if attribute == DESC.EPILOGUE else np.int32

    def get_matrix_layout_attribute_dtype(self, attribute: int) -> Any:
        return np.int64 if attribute == LAYOUT.STRIDED_BATCH_OFFSET else np.int32

    def get_matmul_preference_attribute_dtype(self, attribute: int) -> Any:
        return np.uint64 if attribute == PREFERENCE.MAX_WORKSPACE_BYTES else np.uint32

    def matmul_algo_get_heuristic(self, *args: int) -> None:
        *_, count, results, returned = args
        offers = self.offers[:count]
        rows = np.zeros(count, self.matmul_heuristic_result_dtype)
        for i, (number, workspace, state) in enumerate(offers):
            rows["algo"]["data_"][i, 0], rows["workspace_size"][i], rows["state"][i] = number, workspace, state
        ctypes.memmove(results, rows.ctypes.data, rows.nbytes)
        ctypes.memmove(returned, np.array([len(offers)], np.int32).ctypes.data, 4)

    def matmul_algo_check(self, *args: int) -> None:
        *_, algo, result = args
        number = ctypes.c_uint64.from_address(algo).value
        offer = next((offer for offer in self.offers if offer[0] == number), None)
        if offer is None:
            raise Refused("no such algorithm")
        row = np.zeros(1, self.matmul_heuristic_result_dtype)
        row["workspace_size"], row["state"] = offer[1], offer[2]
        ctypes.memmove(result, row.ctypes.data, row.nbytes)

    def matmul(self, *args: int) -> None:
        (_, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, _, _, _, _) = args
        assert (c, c_layout) == (d, d_layout)
        a_, b_, d_ = (self._batch(p, layout) for p, layout in ((a, a_layout), (b, b_layout), (d, d_layout)))
        flags = self.objects[desc]
        scale = [ctypes.c_float.from_address(p).value for p in (alpha, beta)]
        for left, right, out in zip(a_, b_, d_, strict=True):
            left = left.T if flags["TRANSA"] == OPERATION.T else left
            right = right.T if flags["TRANSB"] == OPERATION.T else right
            before = scale[1] * out if scale[1] else 0.0  # beta 0: what is there is not read
            out[...] = self._epilogue(flags, scale[0] * (left @ right) + before)

    def _epilogue(self, flags: dict[str, Any], values: Any) -> Any:
        """With a bias per row of a column-major result, the same for all members of a batch. The auxiliary matrix has
        the result's shape and type, and a leading dimension that is divisible by 8."""
        kind = EPILOGUE(flags["EPILOGUE"]).name
        if "BIAS" in kind:
            assert flags["BIAS_DATA_TYPE"] == TYPE.CUDA_R_32F
            rows = values.shape[0]
            bias = (ctypes.c_float * rows).from_address(flags["BIAS_POINTER"])
            values = values + np.ctypeslib.as_array(bias)[:, None]
        aux = self._aux(flags, values.shape) if "AUX" in kind or kind == "DGELU" else None
        if kind == "DGELU":
            u, slope_of_u = (f(aux.astype(np.float64)) for f in (_inside_tanh, _slope_inside_tanh))
            return values * (0.5 * (1.0 + np.tanh(u)) + 0.5 * aux * slope_of_u / np.cosh(u) ** 2)
        if aux is not None:
            aux[...] = values
        if "GELU" in kind:
            values = 0.5 * values * (1.0 + np.tanh(_inside_tanh(values)))
        return values

    def _aux(self, flags: dict[str, Any], shape: tuple[int, int]) -> Any:
        ld, address = flags["EPILOGUE_AUX_LD"], flags["EPILOGUE_AUX_POINTER"]
        assert ld % 8 == 0 and ld >= shape[0]
        size = 4 * (ld * (shape[1] - 1) + shape[0])
        return np.ndarray(shape, np.float32, (ctypes.c_char * size).from_address(address), strides=(4, 4 * ld))

    def _batch(self, address: int, layout: int) -> list[Any]:
        fields = self.objects[layout]
        assert fields["type"] == TYPE.CUDA_R_32F
        strides = (4, 4 * fields["ld"])
        step = 4 * fields["STRIDED_BATCH_OFFSET"]
        size = strides[1] * (fields["cols"] - 1) + 4 * fields["rows"]
        shape = (fields["rows"], fields["cols"])
        members = (address + i * step for i in range(fields["BATCH_COUNT"]))
        return [
            np.ndarray(shape, np.float32, (ctypes.c_char * size).from_address(member), strides=strides)
            for member in members
        ]


def fake_library() -> Any:
    """A CublasLt of `kbench.device.cuda.gemm` over the fake API."""
    from kbench.device.cuda.gemm import CublasLt

    library = CublasLt.__new__(CublasLt)
    library.api, library.handle, library.version = FakeApi(), 1, 130002
    library._blas, library._types = SimpleNamespace(ComputeType=COMPUTE, Operation=OPERATION), TYPE
    return library
