"""Sdpa steps through cuDNN, by way of its Python package: one graph of one operation, built when the plan is prepared.

cuDNN takes tensors as dimensions (B, NH, T, HS) with strides, so queries, keys and values are read where they are,
packed or not, and the output is written where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbench.device.cuda.steps import Address, Runner, raise_if_lost, tensors_by_name
from kbench.errors import CannotRunError, LaunchRefused, LibraryMissing
from kbench.family import ITEM_SIZES, Heads, Sdpa, Tensor
from kbench.install import install_command

# The types in which cuDNN's attention reads and writes; it computes in fp32. By cuDNN's names.
_TYPES = {"bf16": "BFLOAT16", "fp16": "HALF"}

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


class PreparedSdpa:
    """An attention with its graph built: cuDNN's first choice of an engine, which is compiled here where it has to be.

    workspace: bytes that it needs. Raises LaunchRefused if types or ranges do not fit, or cuDNN has no engine.
    """

    def __init__(self, library: Cudnn, step: Sdpa, tensors: Sequence[Tensor]):
        self._library, self._step = library, step
        known = tensors_by_name(tensors)
        dtype = _checked_type(step, known)
        # Roles in the order of cuDNN's arguments; a tensor may have several.
        roles = {"q": step.q, "k": step.k, "v": step.v, "o": step.out}
        for role, heads in roles.items():
            _check_heads(role, heads, step.shape, known[heads.tensor])
        _check_output(step)
        if step.stats:
            _check_stats(step, known)
        self._offsets = {role: (heads.tensor, heads.offset * ITEM_SIZES[dtype]) for role, heads in roles.items()}
        if step.stats:
            self._offsets["stats"] = (step.stats, 0)
        try:
            self._graph, self._tensors = self._built(dtype)
            self.workspace = int(self._graph.get_workspace_size())
        except library.errors as error:
            raise LaunchRefused(f"cuDNN has no {self}: {_line(error)}") from error

    def bind(self, address: Address, workspace: int) -> Runner:
        """Queue-able work; `workspace` is the address of at least `self.workspace` bytes."""
        pointers = {}
        for role, (tensor, offset) in self._offsets.items():
            pointer = address(tensor) + offset
            if pointer % _ALIGNMENT:
                raise LaunchRefused(f"{role} of {self} begins at {pointer:#x}, not at a multiple of {_ALIGNMENT} bytes")
            pointers[self._tensors[role]] = pointer
        return _BoundSdpa(self._library, self._graph, pointers, workspace, str(self))

    def __str__(self) -> str:
        B, NH, T, HS = self._step.shape
        return f"causal attention B={B} NH={NH} T={T} HS={HS}"

    def _built(self, dtype: str) -> tuple[Any, dict[str, Any]]:
        """The graph, and its tensor of each role."""
        api, step = self._library.api, self._step
        stored, fp32 = getattr(api.data_type, _TYPES[dtype]), api.data_type.FLOAT
        graph = api.pygraph(
            name="attention",
            io_data_type=stored,
            intermediate_data_type=fp32,
            compute_data_type=fp32,
            handle=self._library.handle,
        )
        shape = list(step.shape)
        tensors = {
            role: graph.tensor(name=role, dim=shape, stride=_strides(heads), data_type=stored)
            for role, heads in (("q", step.q), ("k", step.k), ("v", step.v))
        }
        out, stats = graph.sdpa(
            name="sdpa",
            **tensors,
            attn_scale=step.scale,
            generate_stats=bool(step.stats),
            diagonal_band_right_bound=0,  # no keys to the right of the diagonal that begins top left: causal
        )
        out.set_output(True).set_dim(shape).set_stride(_strides(step.out)).set_data_type(stored)
        tensors["o"] = out
        if step.stats:
            B, NH, T, _ = step.shape
            stats.set_output(True).set_dim([B, NH, T, 1]).set_stride([NH * T, T, 1, 1]).set_data_type(fp32)
            tensors["stats"] = stats
        graph.build([api.heur_mode.A, api.heur_mode.FALLBACK])
        return graph, tensors


class _BoundSdpa:
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


def _checked_type(step: Sdpa, tensors: Any) -> str:
    names = (step.q.tensor, step.k.tensor, step.v.tensor, step.out.tensor, *([step.stats] if step.stats else []))
    for name in names:
        if name not in tensors:
            raise LaunchRefused(f"an Sdpa names the tensor {name!r}; the family has {', '.join(tensors)}")
    dtypes = {name: tensors[name].dtype for name in names[:4]}
    dtype: str = dtypes[step.q.tensor]
    if dtype not in _TYPES or len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} is {of}" for name, of in dtypes.items())
        raise LaunchRefused(f"cuDNN's attention takes tensors of one type, {' or '.join(_TYPES)}; {found}")
    return dtype


def _check_heads(role: str, heads: Heads, shape: Sequence[int], tensor: Tensor) -> None:
    if min(shape) < 1 or min(heads.batch_stride, heads.head_stride, heads.row_stride, heads.offset) < 0:
        raise LaunchRefused(f"an Sdpa describes {role} as {heads} of shape {tuple(shape)}, which is no such thing")
    last = sum((size - 1) * stride for size, stride in zip(shape, _strides(heads), strict=True))
    if heads.offset + last >= tensor.count:
        raise LaunchRefused(
            f"{role} of an Sdpa reaches element {heads.offset + last} of tensor {tensor.name}, which has {tensor.count}"
        )


def _check_output(step: Sdpa) -> None:
    """Elements of the output must not share memory: from the smallest stride to the largest, each has to pass over all
    that the smaller ones span."""
    span = 1
    for stride, size in sorted(zip(_strides(step.out), step.shape, strict=True)):
        if size > 1 and stride < span:
            raise LaunchRefused(f"the output of an Sdpa overlaps itself: {step.out} of shape {step.shape}")
        span += (size - 1) * stride


def _check_stats(step: Sdpa, tensors: Any) -> None:
    B, NH, T, _ = step.shape
    stats = tensors[step.stats]
    if stats.dtype != "fp32" or stats.count < B * NH * T:
        raise LaunchRefused(
            f"the statistics of an Sdpa are {B * NH * T} elements of fp32, tensor {stats.name} holds "
            f"{stats.count} of {stats.dtype}"
        )
