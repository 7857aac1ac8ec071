"""Sdpa steps through cuDNN, by way of its Python package: one graph of one operation, built when the plan is prepared.

cuDNN takes tensors as dimensions (B, NH, T, HS) with strides, so queries, keys and values are read where they are,
packed or not, and the output is written where it belongs. A graph knows no addresses: it is built once, and bound to as
many buffers as there are layers. What the forward and the backward pass share is here; `sdpa_backward.py` has the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from kbench.device.cuda.steps import Address, Runner, raise_if_lost, tensors_by_name
from kbench.errors import CannotRunError, LaunchRefused, LibraryMissing
from kbench.family import ITEM_SIZES, Heads, Sdpa, SdpaBackward, Tensor
from kbench.install import install_command

# The types in which cuDNN's attention reads and writes; it computes in fp32. By cuDNN's names.
_TYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}

# Of the band of keys that a query sees: none to the right of the diagonal, which begins top left.
CAUSAL = 0

# Bytes. cuDNN's kernels move 16 at once, and a graph promises that its tensors begin at such addresses.
_ALIGNMENT = 16


class Cudnn:
    """The package and a handle. Raises LibraryMissing where the package or the library is not installed."""

    def __init__(self) -> None:
        try:
            import cudnn
        except ImportError as error:
            raise _missing("the Python package nvidia-cudnn-frontend") from error
        except OSError as error:  # it loads the library, which needs others
            raise CannotRunError(f"cuDNN cannot be loaded: {error}") from error
        self.api: Any = cudnn
        try:
            self.version = str(cudnn.backend_version_string())
        except RuntimeError as error:  # the package looks its functions up in the library at their first call
            raise _missing("the library cuDNN (package nvidia-cudnn-cu13 or nvidia-cudnn-cu12)") from error
        try:
            self.handle: Any = cudnn.create_handle()
        except RuntimeError as error:
            raise CannotRunError(f"cuDNN cannot start: {error}") from error
        # What the package raises: its own for a graph that no engine takes, the others for all else that is wrong.
        self.errors = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)

    def close(self) -> None:
        self.api.destroy_handle(self.handle)


def _missing(what: str) -> LibraryMissing:
    return LibraryMissing(
        f"the plan has cuDNN's attention, and {what} is missing",
        f"{install_command('cudnn13')} (or cudnn12 for a driver before 580)",
    )


class PreparedAttention(ABC):
    """A step of attention with its graph built: cuDNN's first choice of an engine, which is compiled here where it has
    to be.

    reads, writes: the roles in which tensors take part, by names of our own; a tensor may have several. stats: "" or
    the tensor of the log of the sums of exponentials. workspace: bytes that it needs, known before anything runs.
    Raises LaunchRefused if types or ranges do not fit, or cuDNN has no engine.
    """

    def __init__(
        self,
        library: Cudnn,
        step: Sdpa | SdpaBackward,
        tensors: Sequence[Tensor],
        reads: Mapping[str, Heads],
        writes: Mapping[str, Heads],
    ):
        self._library, self._shape, self._scale, self._stats = library, step.shape, step.scale, step.stats
        self._heads = {**reads, **writes}
        known, kind = tensors_by_name(tensors), type(step).__name__
        dtype = _checked_type(kind, [*(heads.tensor for heads in self._heads.values())], step.stats, known)
        for role, heads in self._heads.items():
            _check_heads(kind, role, heads, step.shape, known[heads.tensor])
        for role, heads in writes.items():
            _check_output(kind, role, heads, step.shape)
        if step.stats:
            _check_stats(kind, step.stats, step.shape, known)
        self._stored = getattr(library.api.data_type, _TYPES[dtype])
        self._offsets = {role: (heads.tensor, heads.offset * ITEM_SIZES[dtype]) for role, heads in self._heads.items()}
        if step.stats:
            self._offsets["stats"] = (step.stats, 0)
        try:
            self._graph = self._new_graph()
            self._tensors = self._describe(self._graph)
            self._graph.build([library.api.heur_mode.A, library.api.heur_mode.FALLBACK])
            self.workspace = int(self._graph.get_workspace_size())
        except library.errors as error:
            raise LaunchRefused(f"cuDNN has no {self}: {_line(error)}") from error

    def bind(self, address: Address, workspace: int) -> Runner:
        """Queue-able work; `workspace` is the address of at least `self.workspace` bytes. May be called any number of
        times, each for addresses of its own: the graph stays as it is."""
        pointers = {}
        for role, (tensor, offset) in self._offsets.items():
            pointer = address(tensor) + offset
            if pointer % _ALIGNMENT:
                raise LaunchRefused(f"{role} of {self} begins at {pointer:#x}, not at a multiple of {_ALIGNMENT} bytes")
            pointers[self._tensors[role]] = pointer
        return _BoundAttention(self._library, self._graph, pointers, workspace, str(self))

    def __str__(self) -> str:
        B, NH, T, HS = self._shape
        return f"causal attention B={B} NH={NH} T={T} HS={HS}"

    @abstractmethod
    def _describe(self, graph: Any) -> dict[str, Any]:
        """Put the operation into the graph, and return its tensor of each role."""

    def _new_graph(self) -> Any:
        fp32 = self._library.api.data_type.FLOAT
        return self._library.api.pygraph(
            name="attention",
            io_data_type=self._stored,
            intermediate_data_type=fp32,
            compute_data_type=fp32,
            handle=self._library.handle,
        )

    def _input(self, graph: Any, role: str) -> Any:
        stride = _strides(self._heads[role])
        return graph.tensor(name=role, dim=list(self._shape), stride=stride, data_type=self._stored)

    def _output(self, tensor: Any, role: str) -> Any:
        """What an operation returned, as an output that lies where the step says."""
        tensor.set_output(True).set_dim(list(self._shape)).set_stride(_strides(self._heads[role]))
        return tensor.set_data_type(self._stored)

    def _stats_layout(self) -> tuple[list[int], list[int]]:
        """Dimensions and strides of the statistics, one number per row."""
        B, NH, T, _ = self._shape
        return [B, NH, T, 1], [NH * T, T, 1, 1]


class PreparedSdpa(PreparedAttention):
    """An Sdpa step."""

    def __init__(self, library: Cudnn, step: Sdpa, tensors: Sequence[Tensor]):
        super().__init__(library, step, tensors, {"q": step.q, "k": step.k, "v": step.v}, {"o": step.out})

    def _describe(self, graph: Any) -> dict[str, Any]:
        tensors = {role: self._input(graph, role) for role in ("q", "k", "v")}
        out, stats = graph.sdpa(
            name="sdpa",
            **tensors,
            attn_scale=self._scale,
            generate_stats=bool(self._stats),
            diagonal_band_right_bound=CAUSAL,
        )
        tensors["o"] = self._output(out, "o")
        if self._stats:
            dim, stride = self._stats_layout()
            stats.set_output(True).set_dim(dim).set_stride(stride).set_data_type(self._library.api.data_type.FLOAT)
            tensors["stats"] = stats
        return tensors


class _BoundAttention:
    """An execution with every argument but the stream; keeps the graph alive."""

    def __init__(self, library: Cudnn, graph: Any, pointers: dict[Any, int], workspace: int, what: str):
        self._library, self._graph, self._what = library, graph, what
        self._pointers, self._workspace = pointers, workspace

    def __call__(self, stream: int) -> None:
        library = self._library
        try:
            library.api.set_stream(library.handle, stream)
            self._graph.execute(self._pointers, self._workspace, library.handle)
        except library.errors as error:
            # It may also be the messenger of a kernel that failed before.
            raise_if_lost(stream, f"launch of {self._what}")
            raise LaunchRefused(f"cuDNN refuses {self._what}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Its message, which may have several lines, in one."""
    return " ".join(str(error).split())


# ---------------------------------------------------------------------------------------------- limits


def _strides(heads: Heads) -> list[int]:
    """Of (B, NH, T, HS), in elements."""
    return [heads.batch_stride, heads.head_stride, heads.row_stride, 1]


def _checked_type(kind: str, names: Sequence[str], stats: str, tensors: Mapping[str, Tensor]) -> str:
    """The one type of all tensors but the statistics. kind: the step's name, for messages."""
    for name in (*names, *([stats] if stats else [])):
        if name not in tensors:
            raise LaunchRefused(f"an {kind} names the tensor {name!r}; the family has {', '.join(tensors)}")
    dtypes = {name: tensors[name].dtype for name in names}
    dtype = dtypes[names[0]]
    if dtype not in _TYPES or len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {of}" for name, of in dtypes.items())
        raise LaunchRefused(f"cuDNN's attention takes tensors of one type, {' or '.join(_TYPES)}; {found}")
    return dtype


def _check_heads(kind: str, role: str, heads: Heads, shape: Sequence[int], tensor: Tensor) -> None:
    if min(shape) < 1 or min(heads.batch_stride, heads.head_stride, heads.row_stride, heads.offset) < 0:
        raise LaunchRefused(f"an {kind} describes {role} as {heads} of shape {tuple(shape)}, which is no such thing")
    last = sum((size - 1) * stride for size, stride in zip(shape, _strides(heads), strict=True))
    if heads.offset + last >= tensor.count:
        raise LaunchRefused(
            f"{role} of an {kind} reaches element {heads.offset + last} of tensor {tensor.name}, "
            f"which has {tensor.count}"
        )


def _check_output(kind: str, role: str, heads: Heads, shape: Sequence[int]) -> None:
    """Elements of an output must not share memory: from the smallest stride to the largest, each has to pass over all
    that the smaller ones span."""
    span = 1
    for stride, size in sorted(zip(_strides(heads), shape, strict=True)):
        if size > 1 and stride < span:
            raise LaunchRefused(f"output {role} of an {kind} overlaps itself: {heads} of shape {tuple(shape)}")
        span += (size - 1) * stride


def _check_stats(kind: str, name: str, shape: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
    B, NH, T, _ = shape
    stats = tensors[name]
    if stats.dtype != "fp32" or stats.count < B * NH * T:
        raise LaunchRefused(
            f"the statistics of an {kind} are {B * NH * T} elements of fp32, tensor {stats.name} holds "
            f"{stats.count} of {stats.dtype}"
        )
