"""The slots of a training step: what has to be computed, by which families at which sizes, and how often.

A slot is covered in one of several ways: by one fused family, or by several plain ones. Which way, which versions and
which block sizes is the chooser's decision (`kbench.train.chooser`); how the buffers are connected is the step's
(`kbench.train.step`), which asks for each need by its role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kbench.device.gemm_operands import BASE_ALIGNMENT
from kbench.family import ITEM_SIZES
from kbench.train.model import Model

RECOMPUTE_LEVELS = (0, 1, 2)
# Steps whose losses and norms the outlier test compares with: enough for a steady deviation, and few enough for the
# mean to follow a loss that falls.
OUTLIER_WINDOW = 128
# Tokens whose logits are in memory at once. Logits are by far the largest tensor, so they are made, turned into their
# gradients and used up in several parts; each part is still large enough for GEMMs to run at full speed.
_LOGIT_TOKENS = 16384
# Bytes that the proof of a kernel takes on the device for each element of the logits, at most: values and bounds of two
# cases in float64, and temporaries.
_PROOF_BYTES = 60
# The schedule on the device has at least so many rows, and then a power of two: runs of other lengths are then the same
# problem to the kernels, and need no proof of their own.
_LEAST_SCHEDULE = 1024


@dataclass(frozen=True)
class Shape:
    """What a step is built for. batch B, seq T: of one micro-step. dtype: of weights and activations, or tf32.
    micro_steps: how many gradients are added up before an update. steps: of the whole run. memory: bytes of the device.

    recompute: 0 keeps all activations, 1 computes GELU again on the way back, 2 also the LayerNorms' outputs.
    """

    model: Model
    batch: int
    seq: int
    dtype: str
    micro_steps: int = 1
    recompute: int = 1
    steps: int = 1
    memory: int = 1 << 60

    @property
    def storage(self) -> str:
        return "fp32" if self.dtype == "tf32" else self.dtype

    @property
    def parts(self) -> int:
        """In how many parts, of whole sequences each, the logits are worked on."""
        tokens = min(_LOGIT_TOKENS, self.memory // (_PROOF_BYTES * self.model.padded_vocab))
        most = min(self.batch, max(1, tokens // self.seq))
        sizes = [size for size in range(1, min(self.batch, 2 * most) + 1) if self._can_be_cut(size)]
        fitting = [size for size in sizes if size <= most]
        # Small parts run badly, and each rounds the gradient of wte once: rather one that is up to twice as large.
        size = max(fitting) if fitting and 2 * max(fitting) > most else max(sizes, default=self.batch)
        return self.batch // size

    def _can_be_cut(self, size: int) -> bool:
        """Whether parts of so many sequences are of one size, and begin where cuBLASLt takes a matrix."""
        row = self.model.channels * ITEM_SIZES[self.storage]
        return self.batch % size == 0 and size * self.seq * row % BASE_ALIGNMENT == 0

    @property
    def schedule_rows(self) -> int:
        """Rows of the schedule on the device; those past the last step are not used."""
        return max(_LEAST_SCHEDULE, 1 << (self.steps - 1).bit_length())


@dataclass(frozen=True)
class Need:
    """One family at one problem. role: what the step asks for it by. times: launches of it per micro-step.

    saves: intermediates that the version has to leave behind. alias: (input, output) that share memory here.
    """

    role: str
    family: str
    sizes: Mapping[str, int]
    dtype: str
    times: int = 1
    saves: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None

    @property
    def problem(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.sizes.items())


@dataclass(frozen=True)
class Way:
    """One way of covering a slot. pair: its two needs are a forward and a backward version that must fit: what the
    second reads of the first's intermediates, the first must save."""

    name: str
    needs: tuple[Need, ...]
    pair: bool = False

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(need.family for need in self.needs)


@dataclass(frozen=True)
class Slot:
    """A part of the step. The first of its ways is the plainest."""

    name: str
    ways: tuple[Way, ...]


def slots(shape: Shape, total: int) -> tuple[Slot, ...]:
    """All slots of a step, in its order. total: elements of the flat array of parameters (`Layout.count`)."""
    return (*_forward(shape), *_backward(shape), *_update(shape, total))


def _forward(shape: Shape) -> tuple[Slot, ...]:
    model, L, C = shape.model, shape.model.layers, shape.model.channels
    sizes = {"B": shape.batch, "T": shape.seq, "C": C}
    tokens = shape.batch * shape.seq
    norms = 1 + (2 * L if shape.recompute == 2 else 0)
    return (
        _slot("encoder", Need("encoder", "encoder_forward", {**sizes, "V": model.padded_vocab}, shape.storage)),
        _slot("layernorm", Need("layernorm", "layernorm_forward", sizes, shape.storage, norms)),
        _slot("qkv", _linear("qkv", shape, C, 3 * C, L)),
        Slot(
            "attention", (Way("attention", (_attention("forward", shape), _attention("backward", shape)), pair=True),)
        ),
        _slot("attproj", _linear("attproj", shape, C, C, L)),
        Slot(
            "residual+layernorm",
            (
                Way(
                    "apart",
                    (
                        Need("residual", "residual_forward", {"N": tokens * C}, shape.storage, 2 * L),
                        Need("residual_layernorm", "layernorm_forward", sizes, shape.storage, 2 * L),
                    ),
                ),
                Way("fused", (Need("fused_residual", "fused_residual_forward", sizes, shape.storage, 2 * L),)),
            ),
        ),
        Slot(
            "fc+gelu",
            (
                Way("apart", (_linear("fc", shape, C, 4 * C, L), _gelu("gelu", shape, L))),
                Way("epilogue", (_linear("fc_gelu", shape, C, 4 * C, L, gelu=1, saves=("pre",)),)),
            ),
        ),
        _slot("fcproj", _linear("fcproj", shape, 4 * C, C, L)),
        _slot("logits", _linear("logits", _part(shape), C, model.padded_vocab, shape.parts, bias=0)),
        Slot("classifier", _classifiers(_part(shape), shape.parts)),
    )


def _backward(shape: Shape) -> tuple[Slot, ...]:
    model, L, C = shape.model, shape.model.layers, shape.model.channels
    sizes = {"B": shape.batch, "T": shape.seq, "C": C}
    embedding = {**sizes, "V": model.padded_vocab, "accumulate": 1}
    found = [
        _slot(
            "logits backward",
            _linear_backward("logits_backward", _part(shape), C, model.padded_vocab, shape.parts, bias=0),
        ),
        _slot(
            "layernorm backward",
            Need("layernorm_backward", "layernorm_backward", {**sizes, "accumulate": 0}, shape.storage, 2 * L + 1),
        ),
        Slot(
            "fcproj+gelu backward",
            (
                Way(
                    "apart",
                    (
                        _linear_backward("fcproj_backward", shape, 4 * C, C, L),
                        Need(
                            "gelu_backward", "gelu_backward", {"N": shape.batch * shape.seq * 4 * C}, shape.storage, L,
                            alias=("dout", "dinp"),
                        ),
                    ),
                ),
                Way("epilogue", (_linear_backward("fcproj_gelu_backward", shape, 4 * C, C, L, gelu=1),)),
            ),
        ),
        _slot("fc backward", _linear_backward("fc_backward", shape, C, 4 * C, L)),
        _slot("attproj backward", _linear_backward("attproj_backward", shape, C, C, L)),
        _slot("qkv backward", _linear_backward("qkv_backward", shape, C, 3 * C, L)),
        # Always adds: the classifier's backward pass has written dwte before, and dwpe begins as 0.
        _slot("encoder backward", Need("encoder_backward", "encoder_backward", embedding, shape.storage)),
    ]  # fmt: skip
    if shape.recompute:
        found.append(_slot("gelu again", _gelu("gelu_again", shape, L)))
    if shape.micro_steps > 1:
        tokens = {"N": shape.batch * shape.seq}
        found.append(_slot("loss sum", Need("loss_sum", "residual_forward", tokens, "fp32", alias=("inp1", "out"))))
    return tuple(found)


def _update(shape: Shape, total: int) -> tuple[Slot, ...]:
    control = {"N": shape.batch * shape.seq, "S": shape.schedule_rows, "W": OUTLIER_WINDOW}
    return (
        _slot("global norm", Need("global_norm", "global_norm", {"N": total}, shape.storage)),
        _slot("step control", Need("step_control", "step_control", control, "fp32")),
        _slot("adamw", Need("adamw", "adamw", {"N": total, "training": 1}, shape.storage)),
    )


def _slot(name: str, need: Need) -> Slot:
    return Slot(name, (Way("only", (need,)),))


def _linear(
    role: str, shape: Shape, C: int, OC: int, times: int, gelu: int = 0, bias: int = 1, saves: tuple[str, ...] = ()
) -> Need:
    sizes = {"B": shape.batch, "T": shape.seq, "C": C, "OC": OC, "gelu": gelu, "bias": bias}
    return Need(role, "matmul_forward", sizes, shape.dtype, times, saves)


def _linear_backward(role: str, shape: Shape, C: int, OC: int, times: int, gelu: int = 0, bias: int = 1) -> Need:
    sizes = {"B": shape.batch, "T": shape.seq, "C": C, "OC": OC, "accumulate": 0, "gelu": gelu, "bias": bias}
    return Need(role, "matmul_backward", sizes, shape.dtype, times)


def _attention(direction: str, shape: Shape) -> Need:
    model = shape.model
    sizes = {"B": shape.batch, "T": shape.seq, "C": model.channels, "NH": model.heads}
    return Need(f"attention_{direction}", f"attention_{direction}", sizes, shape.dtype, model.layers)


def _gelu(role: str, shape: Shape, times: int) -> Need:
    sizes = {"N": shape.batch * shape.seq * 4 * shape.model.channels}
    return Need(role, "gelu_forward", sizes, shape.storage, times)


def _part(shape: Shape) -> Shape:
    """What the logits are worked on at once."""
    return replace(shape, batch=shape.batch // shape.parts)


def _classifiers(shape: Shape, times: int) -> tuple[Way, ...]:
    """The fused classifier; its parts too where rows have no padding, which they know nothing of."""
    model = shape.model
    sizes = {"B": shape.batch, "T": shape.seq, "V": model.vocab}
    padded = {**sizes, "P": model.padded_vocab}
    in_place = ("logits", "dlogits")
    ways = [Way("fused", (Need("classifier", "classifier_fused", padded, shape.storage, times, alias=in_place),))]
    if model.vocab == model.padded_vocab:
        rows = {"N": shape.batch * shape.seq, "C": model.vocab}
        parts = (
            Need("softmax", "softmax_forward", rows, shape.storage, times),
            Need("crossentropy", "crossentropy_forward", sizes, shape.storage, times),
            Need("crossentropy_backward", "crossentropy_softmax_backward", sizes, shape.storage, times),
        )
        ways.insert(0, Way("apart", parts))
    return tuple(ways)
