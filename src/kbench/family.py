"""The nouns that `dev_kernels/*.py` are written in: Family, Version, Problem, Tensor, and the steps of a plan.

Everything here is data or a pure function of data. A family file imports this module and nothing else of
kbench; arrays reach it through the arguments of `draw` and `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral, Real
from typing import Any

from kbench.params import Param as Param
from kbench.params import checked_params, params_refusal, params_text, require_takes

Array = Any  # a numpy or cupy array: family code works on either

MAX_BLOCK = 1024  # threads: the same for every GPU since compute capability 2.0
POWERS_OF_TWO = (32, 64, 128, 256, 512, 1024)  # every power of two from one warp to the largest block

WARP = 32  # threads
PACKET_BYTES = 16  # the most that one thread loads or stores at once: `Packet` in common.cuh

# dtype = how elements are stored, and what a GEMM step computes in. tf32 stores fp32.
DTYPES = ("fp32", "tf32", "bf16", "fp16")
STORAGE = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16"}
C_TYPES = {"fp32": "float", "bf16": "__nv_bfloat16", "fp16": "__half", "int32": "int", "uint32": "unsigned int"}
ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "int32": 4, "uint32": 4, "fp64": 8, "uint8": 1}
# Unit roundoff: half the distance between 1 and the next number of the type.
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp64": 2.0**-53}


@dataclass(frozen=True)
class Props:
    """What a plan may know of the device it runs on. Sizes are bytes."""

    name: str
    arch: str  # "sm_90"
    multiprocessors: int
    threads_per_multiprocessor: int
    threads_per_block: int
    shared_per_block: int  # without opt-in
    shared_per_block_optin: int
    shared_per_multiprocessor: int
    registers_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Problem:
    """Sizes and a dtype. `problem["T"]` is a size."""

    sizes: Mapping[str, int]
    dtype: str

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def storage(self) -> str:
        """The type in which tensors are stored: fp32 for tf32."""
        return STORAGE[self.dtype]

    @property
    def c_type(self) -> str:
        """The C++ name of the storage type, to instantiate kernel templates."""
        return C_TYPES[self.storage]

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())


# ---------------------------------------------------------------------------------------------- tensors

Draw = Callable[[Any, tuple[int, ...], Mapping[str, Array]], Array]
"""`draw(rng, shape, drawn)`: values for one tensor as a numpy array. `rng` is a numpy Generator, `drawn` holds
the tensors drawn before it (already rounded to their dtype, as float64), so that one may follow from another."""


@dataclass(frozen=True)
class Tensor:
    """One array of a problem.

    role: "in" (read only), "out" (written, `=`), "inout" (has a defined start value), "scratch".
    draw: how values are drawn; needed for "in" and "inout".
    axes: names of the axes, for reports ("b", "h", "t", "t2").
    intermediate: an output that only the versions which materialise it have; it is checked where a plan
        touches it. Every other "out" must be written by every version.
    unspecified: `unspecified(xp)` gives a boolean array, true where an output may hold anything.
    exact: copies and integers: the check is bit for bit.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    axes: tuple[str, ...] = ()
    draw: Draw | None = None
    intermediate: bool = False
    unspecified: Callable[[Any], Array] | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("in", "out", "inout", "scratch"):
            raise ValueError(f"tensor {self.name}: role {self.role!r} is none of in, out, inout, scratch")
        if self.role in ("in", "inout") and self.draw is None:
            raise ValueError(f"tensor {self.name}: role {self.role} needs a `draw`")
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} is none of {', '.join(ITEM_SIZES)}")

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_SIZES[self.dtype]


def checked_tensors(tensors: object) -> tuple[Tensor, ...]:
    """What a family's `tensors`, or a version's `scratch`, returned. Raises TypeError or ValueError if it is no use."""
    _require(isinstance(tensors, tuple | list), "tensors are a tuple of Tensor", tensors)
    assert isinstance(tensors, tuple | list)
    for tensor in tensors:
        _require(isinstance(tensor, Tensor), "tensors are a tuple of Tensor", tensor)
        _require(_are_sizes(tensor.shape, 0, 32), f"the shape of {tensor.name} is a tuple of ints", tensor.shape)
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise ValueError(f"tensors {', '.join(names)} do not all have names of their own")
    return tuple(tensors)


def normal(mean: float, spread: float) -> Draw:
    """Normal values with this mean and standard deviation: activations, weights, gradients."""
    return lambda rng, shape, drawn: rng.normal(mean, spread, shape)


def uniform(low: float, high: float) -> Draw:
    """Uniform values in [low, high)."""
    return lambda rng, shape, drawn: rng.uniform(low, high, shape)


def integers(low: int, high: int) -> Draw:
    """Uniform integers in [low, high): token ids, targets."""
    return lambda rng, shape, drawn: rng.integers(low, high, shape)


def derived(function: Callable[[Mapping[str, Array]], Array]) -> Draw:
    """A tensor that follows from those drawn before it, such as probabilities from logits."""
    return lambda rng, shape, drawn: function(drawn).reshape(shape)


# ---------------------------------------------------------------------------------------------- steps


def _require(condition: object, text: str, found: object) -> None:
    if not condition:
        raise TypeError(f"{text}, not {found!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


def _are_sizes(values: object, least: int, most: int) -> bool:
    return isinstance(values, tuple | list) and least <= len(values) <= most and all(map(_is_count, values))


@dataclass(frozen=True)
class Ref:
    """A tensor as a kernel argument, from element `offset` on. A plain string means offset 0."""

    tensor: str
    offset: int = 0

    def __post_init__(self) -> None:
        _require(isinstance(self.tensor, str) and isinstance(self.offset, Integral), "a Ref is a name and an int", self)


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
        _require(isinstance(self.kernel, str) and self.kernel.strip(), "a Launch needs a kernel's name", self.kernel)
        for name in ("grid", "block"):
            _require(
                _are_sizes(getattr(self, name), 1, 3), f"{name} must be a tuple of 1 to 3 ints", getattr(self, name)
            )
        _require(_is_count(self.shared), "shared must be a number of bytes", self.shared)
        known = isinstance(self.args, tuple | list) and all(isinstance(arg, str | Ref | Real) for arg in self.args)
        _require(known, "args must be a tuple of tensor names, Refs, ints and floats", self.args)


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
    _require(isinstance(plan, tuple | list), "a plan is a tuple of steps", plan)
    assert isinstance(plan, tuple | list)
    for step in plan:
        _require(isinstance(step, Step), "a step is a Launch, Gemm, Fill, Copy, Sdpa, SdpaBackward or AllReduce", step)
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


# ---------------------------------------------------------------------------------------------- errors


@dataclass(frozen=True)
class ErrorModel:
    """Unit roundoffs, for a reference that computes its own error bound.

    storage: of the type that tensors are stored in; gemm: of the type to which a GEMM step rounds its
    operands (0 where it does not round what is stored already); fp32: of the accumulation.
    structured: the inputs are constant or patterned, so rounding errors may all have one sign.
    """

    dtype: str
    structured: bool = False

    @property
    def storage(self) -> float:
        return UNIT_ROUNDOFF[STORAGE[self.dtype]]

    @property
    def gemm(self) -> float:
        return UNIT_ROUNDOFF["tf32"] if self.dtype == "tf32" else 0.0

    @property
    def fp32(self) -> float:
        return UNIT_ROUNDOFF["fp32"]

    def accumulation(self, terms: int) -> float:
        """Relative error, per unit of sum|term|, of adding `terms` products in fp32 in any order.

        The worst case grows with n; errors of random sign grow with sqrt(n), and 4 sqrt(n) is passed
        by one sum in about 16,000 (Higham and Mary, "A New Approach to Probabilistic Rounding Error
        Analysis", 2019, theorem 2.4, lambda = 4).
        """
        terms = max(terms, 1)
        return self.fp32 * (terms if self.structured else min(terms, 4.0 * math.sqrt(terms)))


@dataclass
class Expected:
    """What an output must be: `value` in float64, and `bound`, the largest absolute error that a right
    version may have per element (an array of the same shape, or a scalar). Rounding the result to the
    output's own type is added by the check and is not part of `bound`."""

    value: Array
    bound: Array | float = 0.0


def rounded(values: Array, storage: str, xp: Any) -> Array:
    """float64 numbers rounded to fp32, bf16 or fp16, to the nearest, ties to even, as float64 again: for a reference
    whose operation rounds on the way. By way of fp32: for a sum of two numbers of the type that changes nothing
    (Figueroa, "When is double rounding innocuous?", 1995)."""
    single = values.astype(xp.float32)
    if storage == "fp16":
        single = single.astype(xp.float16)
    if storage == "bf16":
        # bf16 is the upper half of fp32: add half of its last place, or a little less where a tie goes down, and cut.
        bits = single.view(xp.uint32)
        bits += ((bits >> xp.uint32(16)) & xp.uint32(1)) + xp.uint32(0x7FFF)
        bits &= xp.uint32(0xFFFF0000)
    return single.astype(xp.float64)


# ---------------------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class Rule:
    """A condition on a problem. `text` is shown when it refuses: "C divisible by NH"."""

    text: str
    holds: Callable[[Problem], bool]


@dataclass(frozen=True)
class LaunchRule:
    """A condition of a version on its block size and parameters as well: `holds(problem, block, **params)`."""

    text: str
    holds: Callable[..., bool]


@dataclass(frozen=True)
class CheckShape:
    """Sizes that `kbench check` tries, and why. `versions` and `block_sizes` limit it (None: all)."""

    sizes: Mapping[str, int]
    why: str
    versions: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None


PlanFunction = Callable[..., tuple[Step, ...]]
"""`plan(problem, block, props)`; with the version's parameters, if it has any, as keyword arguments besides."""


@dataclass(frozen=True)
class Version:
    """One way of computing the operation.

    plan: `plan(problem, block, props)`, pure. block_sizes: threads per block as launched, never rounded;
    `fixed` replaces them where a version has exactly one. claims_deterministic: the check proves it.
    params: by name, whole numbers that plan and scratch take as keyword arguments: `plan(problem, block, props, ROWS)`.
    Whoever calls them without gets the defaults.
    needs, saves: names of intermediates that it reads from, or leaves for, another family.
    aliases: pairs (input, output) that may be the same memory; checked both ways.
    scratch: `scratch(problem, block, props)`, tensors of its own. gpu_only: why the emulator cannot run it.
    arch: "sm_90a" where it needs one exactly.
    """

    number: int
    idea: str
    plan: PlanFunction
    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...] = POWERS_OF_TWO
    fixed: int | None = None
    rules: tuple[Rule | LaunchRule, ...] = ()
    needs: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    claims_deterministic: bool = True
    scratch: Callable[..., tuple[Tensor, ...]] | None = None
    gpu_only: str = ""
    arch: str = ""
    params: Mapping[str, Param] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _require(_is_count(self.number), "a Version's number is an int, 0 or more", self.number)
        _require(isinstance(self.idea, str), "a Version's idea is a line of text", self.idea)
        _require(callable(self.plan), "a Version's plan is a function", self.plan)
        _require(isinstance(self.dtypes, tuple | list), "a Version's dtypes are a tuple", self.dtypes)
        usable = _are_sizes(self.blocks, 1, MAX_BLOCK) and all(1 <= block <= MAX_BLOCK for block in self.blocks)
        _require(usable, f"block sizes are a tuple of ints from 1 to {MAX_BLOCK}", self.blocks)
        checked_params(self.params)
        for rule in self.rules:
            if isinstance(rule, LaunchRule):
                require_takes(rule.holds, "LaunchRule", ("problem", "block"), self.params)
        for name in ("plan", "scratch") if self.params else ():
            if function := getattr(self, name):
                require_takes(function, name, ("problem", "block", "props"), self.params)
                object.__setattr__(self, name, partial(function, **self.defaults))  # frozen: this is still its making

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self.fixed,) if self.fixed is not None else self.block_sizes

    @property
    def defaults(self) -> dict[str, int]:
        """The parameters where nobody asks for others."""
        return {name: param.default for name, param in self.params.items()}

    def chosen(self, params: Mapping[str, int]) -> dict[str, int]:
        """These parameters, with the defaults of those that are left open."""
        return {**self.defaults, **params}


@dataclass(frozen=True)
class Family:
    """One operation: its sizes, tensors, reference and versions.

    sizes: name to meaning, in the order in which they are shown. dtypes: the first is the default.
    presets: "default" (the sizes for a GPU) and "small" (seconds on the emulator).
    tensors: `tensors(problem)`, in the order in which they are drawn.
    reference: `reference(problem, inputs, error, xp)`: name of each output to Expected; `inputs` holds the
        "in" and "inout" tensors as float64 arrays of the values that the kernel sees, after rounding.
    """

    name: str
    summary: str
    sizes: Mapping[str, str]
    dtypes: tuple[str, ...]
    presets: Mapping[str, Mapping[str, int]]
    check_shapes: tuple[CheckShape, ...]
    tensors: Callable[[Problem], tuple[Tensor, ...]]
    reference: Callable[[Problem, Mapping[str, Array], ErrorModel, Any], dict[str, Expected]]
    versions: tuple[Version, ...]
    rules: tuple[Rule, ...] = ()
    flops: Callable[[Problem], float] | None = None
    # Bytes that any version has to read and write. None: inputs once, outputs once, without intermediates.
    traffic: Callable[[Problem], float] | None = None
    # Sizes that say yes or no: 0 or 1, where all other sizes start at 1.
    flags: tuple[str, ...] = ()
    # Set by the loader, not by family files: where each version's device code stands.
    sources: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = isinstance(self.versions, tuple | list) and all(isinstance(v, Version) for v in self.versions)
        _require(listed, "a Family's versions are a tuple of Version", self.versions)
        for name in ("sizes", "presets"):
            _require(isinstance(getattr(self, name), Mapping), f"a Family's {name} are a dict", getattr(self, name))
        _require(isinstance(self.dtypes, tuple | list), "a Family's dtypes are a tuple", self.dtypes)
        plain = all(isinstance(rule, Rule) for rule in self.rules)
        _require(plain, "a Family's rules are a tuple of Rule: only versions have block sizes", self.rules)
        known = isinstance(self.flags, tuple | list) and all(name in self.sizes for name in self.flags)
        _require(known, "a Family's flags are a tuple of names of its sizes", self.flags)
        for sizes in (*self.presets.values(), *(shape.sizes for shape in self.check_shapes)):
            _require(isinstance(sizes, Mapping), "the sizes of a preset or check shape are a dict", sizes)
            for name, size in sizes.items():
                _require(not self.size_fault(name, size), "sizes are ints above 0, flags 0 or 1", sizes)

    def size_fault(self, name: str, size: object) -> str:
        """Why a size cannot have this value; "" if it can."""
        if name in self.flags:
            return "" if _is_count(size) and size in (0, 1) else f"{name} is 0 or 1, not {size}"
        return "" if _is_count(size) and size else f"size {name}={size} must be at least 1"

    def least_traffic(self, problem: Problem) -> float:
        """Bytes of global memory that any version has to move: `traffic`, or what the tensors' roles say."""
        if self.traffic is not None:
            return self.traffic(problem)
        passes = {"in": 1, "out": 1, "inout": 2, "scratch": 0}
        return float(sum(passes[t.role] * t.nbytes for t in self.tensors(problem) if not t.intermediate))

    @cached_property
    def by_number(self) -> dict[int, Version]:
        return {version.number: version for version in self.versions}

    def refusal(self, version: Version, problem: Problem, block: int, params: Mapping[str, int] | None = None) -> str:
        """Why this version does not take this problem, block size and parameters; "" if it does. params: the defaults
        where they are left open."""
        if problem.dtype not in version.dtypes:
            return f"dtype {problem.dtype} is not supported; it has {', '.join(version.dtypes)}"
        for rule in (*self.rules, *version.rules):
            if isinstance(rule, Rule) and not rule.holds(problem):
                return f"needs {rule.text} (here {problem})"
        if block not in version.blocks:
            kind = "fixed block size" if version.fixed is not None else "block sizes"
            return f"block size {block} is not supported; {kind} {', '.join(map(str, version.blocks))}"
        chosen = version.chosen(params or {})
        if refusal := params_refusal(version.params, chosen):
            return refusal
        for rule in version.rules:
            if isinstance(rule, LaunchRule) and not rule.holds(problem, block, **chosen):
                return f"needs {rule.text} (here {problem}, block size {block}{_with(chosen)})"
        return ""

    def taken_blocks(self, version: Version, problem: Problem) -> tuple[int, ...]:
        """The block sizes at which a version takes a problem, with its default parameters."""
        return tuple(block for block in version.blocks if not self.refusal(version, problem, block))


def _with(params: Mapping[str, int]) -> str:
    return f", {params_text(params)}" if params else ""
