"""GPT-2 in PyTorch: what kbench's training step is compared with, for its losses, its gradients and its speed.

Weights and gradients cross as dict[str, np.ndarray] with kbench's names and shapes (kbench.train.model). The model is
written as PyTorch's users write it: nn modules, scaled_dot_product_attention, no dropout, fused AdamW.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kbench.train.model import Model

# As in kbench.train.reference_update; written out, because a comparison should not inherit a mistake.
BETAS = (0.9, 0.95)
EPSILON = 1e-8
MAX_NORM = 1.0

PRECISIONS = ("fp32", "tf32", "bf16")
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Settings:
    """How PyTorch runs.

    device: "cuda", "cpu". precision: fp32, tf32 (GEMMs only), bf16 (autocast; weights stay fp32). sdpa: a key of SDPA,
    None for PyTorch's own choice. compile: a mode of torch.compile ("default", "reduce-overhead" for CUDA graphs, ...),
    None for eager. pad_vocab: the padding takes part in the softmax, which makes PyTorch faster and the loss another:
    for speed only.
    """

    device: str = "cuda"
    precision: str = "bf16"
    sdpa: str | None = None
    compile: str | None = None
    pad_vocab: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or not (self.sdpa is None or self.sdpa in SDPA):
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, sdpa of {', '.join(SDPA)} or None: {self}")


@dataclass
class Run:
    """Loss, gradient norm (before clipping) and milliseconds of each step; the weights after the last; peak bytes."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    weights: Arrays = field(default_factory=dict)
    peak_bytes: int | None = None


class Layer(nn.Module):
    """One layer; the names are kbench's, less the final w or b."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        C = model.channels
        self.heads = model.heads
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, channels = x.shape
        split = self.qkv(self.ln1(x)).view(batch, seq, 3, self.heads, channels // self.heads)
        q, k, v = (part.transpose(1, 2) for part in split.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(batch, seq, channels))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Token ids and targets (B, T) to the losses (B, T)."""

    def __init__(self, model: Model, pad_vocab: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(model.padded_vocab if pad_vocab else model.vocab, model.channels)
        self.wpe = nn.Embedding(model.context, model.channels)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.lnf = nn.LayerNorm(model.channels)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(inputs) + self.wpe.weight[: inputs.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


# ---------------------------------------------------------------------------------------------- weights


def build(model: Model, weights: Mapping[str, np.ndarray[Any, Any]], settings: Settings) -> GPT2:
    """The network with kbench's weights, fp32, on the device."""
    net = GPT2(model, settings.pad_vocab)
    places = _places(net)
    with torch.no_grad():
        for parameter in model.parameters:
            array = np.asarray(weights[parameter.name], dtype=np.float32)
            for place, part in zip(places[parameter.name], array if parameter.layered else array[None], strict=True):
                place.copy_(torch.from_numpy(np.array(part[: place.shape[0]])))
    return net.to(settings.device)


def _places(net: GPT2) -> dict[str, list[nn.Parameter]]:
    """kbench's name -> PyTorch's parameters, one for each layer. PyTorch's Linear has (out, in), as kbench has."""
    places = {"wte": [net.wte.weight], "wpe": [net.wpe.weight], "lnfw": [net.lnf.weight], "lnfb": [net.lnf.bias]}
    for part in ("ln1", "qkv", "attproj", "ln2", "fc", "fcproj"):
        for letter, kind in (("w", "weight"), ("b", "bias")):
            places[part + letter] = [getattr(getattr(layer, part), kind) for layer in net.layers]
    return places


def _arrays(model: Model, net: GPT2, *, gradients: bool) -> Arrays:
    """Weights or gradients under kbench's names, in its shapes; rows of wte that PyTorch does not have are 0."""
    places, arrays = _places(net), {}
    for parameter in model.parameters:
        tensors = [place.grad if gradients else place for place in places[parameter.name]]
        parts = [tensor.detach().float().cpu().numpy() for tensor in tensors if tensor is not None]
        array = np.zeros(parameter.shape, np.float32)
        if parameter.layered:
            array[:] = parts
        else:
            array[: len(parts[0])] = parts[0]
        arrays[parameter.name] = array
    return arrays


# ---------------------------------------------------------------------------------------------- running


def loss_and_gradients(
    model: Model, weights: Mapping[str, np.ndarray[Any, Any]], batch: Batch, settings: Settings
) -> tuple[float, np.ndarray[Any, Any], Arrays]:
    """The mean loss, the loss of each token (B, T), and the gradient of the mean under kbench's names."""
    net = build(model, weights, settings)
    with _chosen(settings):
        losses = _forward(net, settings)(*_on_device(batch, settings))
        mean = losses.mean()
        mean.backward()
    return float(mean.detach()), losses.detach().float().cpu().numpy(), _arrays(model, net, gradients=True)


def train(
    model: Model,
    weights: Mapping[str, np.ndarray[Any, Any]],
    batches: Sequence[Batch],
    rates: Sequence[float],
    settings: Settings,
    *,
    decay: float = 0.0,
    keep_weights: bool = True,
) -> Run:
    """One step for each batch at its learning rate: forward, backward, clipping, fused AdamW.

    Batches lie on the device before the first step, and nothing waits for a step's loss before the last: the times are
    those of a loop that feeds the GPU well.
    """
    net = build(model, weights, settings)
    optimizer = _optimizer(net, decay)
    batches_there = [_on_device(batch, settings) for batch in batches]
    losses, norms, clock = [], [], _clock(settings.device)
    with _chosen(settings):
        forward = _forward(net, settings)
        clock.mark()
        for (inputs, targets), rate in zip(batches_there, rates, strict=True):
            if settings.compile is not None and settings.device != "cpu":
                torch.compiler.cudagraph_mark_step_begin()
            for group in optimizer.param_groups:
                group["lr"] = float(rate)
            loss = forward(inputs, targets).mean()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM).detach().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach().clone())  # a CUDA graph writes the next step's loss into the same memory
            clock.mark()
    run = Run([float(loss) for loss in losses], [float(norm) for norm in norms], clock.spans())
    if keep_weights:
        run.weights = _arrays(model, net, gradients=False)
    if torch.device(settings.device).type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated()
    return run


def _optimizer(net: GPT2, decay: float) -> torch.optim.AdamW:
    parameters = list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)


def _forward(net: GPT2, settings: Settings) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    call = net if settings.compile is None else torch.compile(net, mode=settings.compile)
    kind = torch.device(settings.device).type

    def forward(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Entered anew for each forward pass: until it is left, autocast keeps the bf16 copies of weights that it made,
        # and an update would go unseen.
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=settings.precision == "bf16"):
            losses: torch.Tensor = call(inputs, targets)
        return losses

    return forward


def _on_device(batch: Batch, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = (torch.from_numpy(np.array(ids, dtype=np.int64)).to(settings.device) for ids in batch)
    return inputs, targets


@contextlib.contextmanager
def _chosen(settings: Settings) -> Iterator[None]:
    """TF32 and attention as the settings say; PyTorch's own afterwards, whatever happens."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = settings.precision == "tf32"
    try:
        with sdpa_kernel(SDPA[settings.sdpa]) if settings.sdpa is not None else contextlib.nullcontext():
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


class _Clock:
    """Milliseconds between marks, by the host's clock."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        self.marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        return [1e3 * (end - start) for start, end in zip(self.marks, self.marks[1:], strict=False)]


class _CudaClock(_Clock):
    """The same by CUDA events, which stand in the stream between the steps and hold nothing up."""

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def spans(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(self.marks, self.marks[1:], strict=False)]


def _clock(device: str) -> _Clock:
    return _CudaClock() if torch.device(device).type == "cuda" else _Clock()
