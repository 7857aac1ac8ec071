"""The steps of a plan: what is launched, or asked of a library, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from kbench.family.checked import are_sizes, is_count, require


@dataclass(frozen=True)
class Ref:
    """A tensor as a kernel argument, from element `offset` on. A plain string means offset 0."""

    tensor: str
    offset: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.tensor, str) and isinstance(self.offset, Integral), "a Ref is a name and an int", self)


@dataclass(frozen=True)
class Launch:
    """Launch `kernel` (a C++ name expression such as "softmax_backward7<float, 256>").

    grid, block: up to three dimensions. args: tensor names, Refs, ints and floats, never pointers.
    shared: dynamic shared memory in bytes.
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[str | Ref | int | float, ...]
    shared: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.kernel, str) and self.kernel.strip(), "a Launch needs a kernel's name", self.kernel)
        for name in ("grid", "block"):
            require(are_sizes(getattr(self, name), 1, 3), f"{name} must be a tuple of 1 to 3 ints", getattr(self, name))
        require(is_count(self.shared), "shared must be a number of bytes", self.shared)
        known = isinstance(self.args, tuple | list) and all(isinstance(arg, str | Ref | Real) for arg in self.args)
        require(known, "args must be a tuple of tensor names, Refs, ints and floats", self.args)


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix inside a tensor: `rows` x `cols` as stored, `ld` elements from row to row,
    `stride` elements from one batch member to the next, first element at `offset`. `transpose` applies
    when it is read as an operand."""

    tensor: str
    rows: int
    cols: int
    ld: int = 0  # 0 means cols
    offset: int = 0
    stride: int = 0
    transpose: bool = False

    @property
    def leading(self) -> int:
        return self.ld or self.cols

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns after the transpose."""
        return (self.cols, self.rows) if self.transpose else (self.rows, self.cols)


@dataclass(frozen=True)
class Gemm:
    """out = gelu(alpha * op(a) @ op(b) + beta * out + bias), for `batch` members. `compute` is a dtype of DTYPES:
    "fp32" multiplies in full fp32, "tf32" rounds the operands to 10 mantissa bits.

    bias: a tensor of out's dtype with one element per column of out, added to every row; "" adds nothing.
    gelu: whether GELU in its tanh form is applied last.
    aux: a tensor of out's dtype, `rows` x `cols` of out without gaps. With gelu it receives what GELU is applied to;
        without, the result is multiplied by the derivative of GELU at aux (the step back through GELU).
    All three are the epilogue; a library may still round to the type of out before it.
    """

    a: Matrix
    b: Matrix
    out: Matrix
    compute: str
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    bias: str | Ref = ""
    gelu: bool = False
    aux: str | Ref = ""

    def __post_init__(self) -> None:
        (m, k), (k2, n) = self.a.shape, self.b.shape
        if k != k2 or self.out.shape != (m, n) or self.out.transpose:
            raise ValueError(f"GEMM shapes do not fit: {self.a.shape} @ {self.b.shape} -> {self.out.shape}")

    @property
    def mnk(self) -> tuple[int, int, int]:
        return (*self.out.shape, self.a.shape[1])


@dataclass(frozen=True)
class Fill:
    """Set `count` elements of a tensor (None: all of it) to `value`."""

    target: Ref
    value: float = 0.0
    count: int | None = None


@dataclass(frozen=True)
class Copy:
    """Copy `count` elements from `source` to `target`, of the same dtype, not overlapping."""

    target: Ref
    source: Ref
    count: int


@dataclass(frozen=True)
class Heads:
    """Queries, keys, values or outputs of attention inside a tensor: element [b, h, t, d] is at
    offset + b * batch_stride + h * head_stride + t * row_stride + d."""

    tensor: str
    batch_stride: int
    head_stride: int
    row_stride: int
    offset: int = 0


@dataclass(frozen=True)
class Sdpa:
    """Scaled dot-product attention by a library: out = softmax(scale * q k^T) v for each batch and head, over the
    keys t2 <= t of each query t. shape: (B, NH, T, HS) of q, k, v and out. stats: "" or an fp32 tensor (B, NH, T)
    that gets the log of the sum of exp(scale * q k) of each row."""

    q: Heads
    k: Heads
    v: Heads
    out: Heads
    shape: tuple[int, int, int, int]
    scale: float
    stats: str = ""


@dataclass(frozen=True)
class SdpaBackward:
    """The backward pass of Sdpa by a library: gradients of q, k and v from `dout`, the gradient of `out`. stats: the
    fp32 tensor (B, NH, T) that the forward pass left. All as described at Sdpa."""

    q: Heads
    k: Heads
    v: Heads
    out: Heads
    dout: Heads
    dq: Heads
    dk: Heads
    dv: Heads
    shape: tuple[int, int, int, int]
    scale: float
    stats: str


@dataclass(frozen=True)
class AllReduce:
    """The sum over `ranks` GPUs, each with a process of its own. Tensors hold one row of `count` elements per rank:
    rank r contributes row r of `source` and receives the sum into row r of `target`."""

    target: str
    source: str
    count: int
    ranks: int


Step = Launch | Gemm | Fill | Copy | Sdpa | SdpaBackward | AllReduce


def checked_plan(plan: object) -> tuple[Step, ...]:
    """What a version's plan function returned, if it is a sequence of steps. Raises TypeError if not."""
    require(isinstance(plan, tuple | list), "a plan is a tuple of steps", plan)
    assert isinstance(plan, tuple | list)
    for step in plan:
        require(isinstance(step, Step), "a step is a Launch, Gemm, Fill, Copy, Sdpa, SdpaBackward or AllReduce", step)
    return tuple(plan)


def ceil_div(count: int, size: int) -> int:
    """How many parts of `size` hold `count`: blocks of a grid, mostly."""
    return -(-count // size)


def tensors_of(plan: Sequence[Step]) -> tuple[str, ...]:
    """Names of the tensors that a plan touches, in order of first use."""
    return tuple(dict.fromkeys(name for step in plan for name in _touched(step)))


def _touched(step: Step) -> list[str]:
    match step:
        case Launch():
            return [tensor_name(argument) for argument in step.args if isinstance(argument, Ref | str)]
        case Gemm():
            epilogue = [tensor_name(reference) for reference in (step.bias, step.aux) if reference]
            return [step.a.tensor, step.b.tensor, *epilogue, step.out.tensor]
        case Copy():
            return [step.source.tensor, step.target.tensor]
        case Sdpa():
            stats = [step.stats] if step.stats else []
            return [step.q.tensor, step.k.tensor, step.v.tensor, step.out.tensor, *stats]
        case SdpaBackward():
            parts = (step.q, step.k, step.v, step.out, step.dout, step.dq, step.dk, step.dv)
            return [*(part.tensor for part in parts), step.stats]
        case AllReduce():
            return [step.source, step.target]
    return [step.target.tensor]


def tensor_name(reference: str | Ref) -> str:
    """The tensor that an argument refers to."""
    return reference.tensor if isinstance(reference, Ref) else reference


def kernels_of(plan: Sequence[Step]) -> tuple[str, ...]:
    """The name expressions that a plan launches, each once, in order."""
    return tuple(dict.fromkeys(step.kernel for step in plan if isinstance(step, Launch)))
