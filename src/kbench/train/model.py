"""GPT-2 as sizes: its 16 parameter tensors, in the order in which memory and files hold them, and presets.

Every layer is x += proj(attention(layernorm(x))), then x += proj(gelu(fc(layernorm(x)))). The classifier shares its
weights with the token embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kbench.errors import UsageError

# Rows of wte are padded to a multiple of this, so that the classifier's GEMMs have aligned rows. Padding rows are 0.
VOCAB_MULTIPLE = 128
# Standard deviation of weights at the start; projections into the residual stream divide it by sqrt(2 L), because 2 L
# of them add up (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3).
WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Parameter:
    """One of the 16 tensors.

    shape: of the whole tensor; where `layered`, the first axis is the layer. decay: whether weight decay applies.
    std: standard deviation at the start, 0 where all elements start at `constant`. hf_name: of Hugging Face's GPT-2,
    "{}" standing for the layer. turned: Hugging Face stores (in, out), where here it is (out, in).
    """

    name: str
    shape: tuple[int, ...]
    layered: bool
    decay: bool
    std: float
    constant: float
    hf_name: str
    turned: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> int:
        """How many parts it has: one per layer, or one."""
        return self.shape[0] if self.layered else 1

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """The shape of one layer's part."""
        return self.shape[1:] if self.layered else self.shape


@dataclass(frozen=True)
class Model:
    """Sizes of a GPT-2. Raises UsageError where they are impossible.

    layers L, heads NH, channels C, vocab V, context: the longest sequence (rows of the position embedding).
    """

    layers: int
    heads: int
    channels: int
    vocab: int = 50257
    context: int = 1024

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "channels", "vocab", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"a model with {name} = {getattr(self, name)}: at least 1 is needed")
        if self.channels % self.heads:
            raise UsageError(f"{self.channels} channels cannot be divided among {self.heads} heads")

    @property
    def padded_vocab(self) -> int:
        """Vp: rows of wte, and elements of a row of logits."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_size(self) -> int:
        return self.channels // self.heads

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        L, C = self.layers, self.channels
        residual = WEIGHT_STD / math.sqrt(2 * L)

        def weight(name: str, rows: int, cols: int, std: float, hf: str) -> Parameter:
            return Parameter(name, (L, rows, cols), True, True, std, 0.0, f"h.{{}}.{hf}.weight", turned=True)

        def vector(name: str, size: int, constant: float, hf: str) -> Parameter:
            return Parameter(name, (L, size), True, False, 0.0, constant, f"h.{{}}.{hf}")

        return (
            Parameter("wte", (self.padded_vocab, C), False, True, WEIGHT_STD, 0.0, "wte.weight"),
            Parameter("wpe", (self.context, C), False, True, WEIGHT_STD, 0.0, "wpe.weight"),
            vector("ln1w", C, 1.0, "ln_1.weight"),
            vector("ln1b", C, 0.0, "ln_1.bias"),
            weight("qkvw", 3 * C, C, WEIGHT_STD, "attn.c_attn"),
            vector("qkvb", 3 * C, 0.0, "attn.c_attn.bias"),
            weight("attprojw", C, C, residual, "attn.c_proj"),
            vector("attprojb", C, 0.0, "attn.c_proj.bias"),
            vector("ln2w", C, 1.0, "ln_2.weight"),
            vector("ln2b", C, 0.0, "ln_2.bias"),
            weight("fcw", 4 * C, C, WEIGHT_STD, "mlp.c_fc"),
            vector("fcb", 4 * C, 0.0, "mlp.c_fc.bias"),
            weight("fcprojw", C, 4 * C, residual, "mlp.c_proj"),
            vector("fcprojb", C, 0.0, "mlp.c_proj.bias"),
            Parameter("lnfw", (C,), False, False, 0.0, 1.0, "ln_f.weight"),
            Parameter("lnfb", (C,), False, False, 0.0, 0.0, "ln_f.bias"),
        )

    @property
    def parameter_count(self) -> int:
        """With the padding of the vocabulary."""
        return sum(parameter.count for parameter in self.parameters)

    def flops_per_token(self, seq: int) -> float:
        """Of a training step, forward and backward: 6 per weight, and 6 L C T for causal attention's two products,
        of which half the terms count (Chowdhery et al., "PaLM", 2022, appendix B, with the mask). The padding of the
        vocabulary and the position embedding, which takes part in no product, are not counted."""
        weights = self.parameter_count - (self.padded_vocab - self.vocab + self.context) * self.channels
        return 6.0 * weights + 6.0 * self.layers * self.channels * seq

    def __str__(self) -> str:
        sizes = f"{self.layers} layers, {self.heads} heads, {self.channels} channels"
        return f"{sizes}, vocabulary {self.vocab}, context {self.context}"


# The GPT-2 sizes by their number of layers; `nano` is for the emulator and tests, with a byte vocabulary.
PRESETS = {
    "nano": Model(2, 4, 64, vocab=256, context=64),
    "d6": Model(6, 6, 384),
    "d12": Model(12, 12, 768),
    "d24": Model(24, 16, 1024),
    "d36": Model(36, 20, 1280),
    "d48": Model(48, 25, 1600),
}
