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

PRECISIONS = ("fp32", "tf32", "bf16", "fp64")
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

    device: "cuda", "cpu". precision: fp32, tf32 (GEMMs only), bf16 (autocast; weights stay fp32), fp64 (everything, as
    a reference). sdpa: a key of SDPA, None for PyTorch's own choice. compile: a mode of torch.compile ("default",
    "reduce-overhead" for CUDA graphs of the passes, ...), None for eager. graph: the whole step, update included, as
    one CUDA graph, on a GPU. pad_vocab: the padding takes part in the softmax, which makes PyTorch faster and the loss
    another: for speed only.
    """

    device: str = "cuda"
    precision: str = "bf16"
    sdpa: str | None = None
    compile: str | None = None
    graph: bool = False
    pad_vocab: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or not (self.sdpa is None or self.sdpa in SDPA):
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, sdpa of {', '.join(SDPA)} or None: {self}")

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def weights(self) -> torch.dtype:
        """What weights and gradients are kept in."""
        return torch.float64 if self.precision == "fp64" else torch.float32


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
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)


# ---------------------------------------------------------------------------------------------- weights


def build(model: Model, weights: Mapping[str, np.ndarray[Any, Any]], settings: Settings) -> GPT2:
    """The network with kbench's weights on the device."""
    net = GPT2(model, settings.pad_vocab)
    places = _places(net)
    with torch.no_grad():
        for parameter in model.parameters:
            array = np.asarray(weights[parameter.name], dtype=np.float32)
            for place, part in zip(places[parameter.name], array if parameter.layered else array[None], strict=True):
                place.copy_(torch.from_numpy(np.array(part[: place.shape[0]])))
    return net.to(settings.device, settings.weights)


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
        parts = [tensor.detach().cpu().numpy() for tensor in tensors if tensor is not None]
        array = np.zeros(parameter.shape, parts[0].dtype)
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
    return float(mean.detach()), losses.detach().cpu().numpy(), _arrays(model, net, gradients=True)


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
    batches_there = [_on_device(batch, settings) for batch in batches]
    losses, norms, clock = [], [], _clock(settings)
    with _chosen(settings):
        step: _Step = _Step(net, settings, decay)
        if settings.graph and settings.on_gpu:
            step = _GraphedStep(net, settings, decay, batches_there[0])
        clock.mark()
        for (inputs, targets), rate in zip(batches_there, rates, strict=True):
            loss, norm = step(inputs, targets, float(rate))
            # A CUDA graph writes the next step's into the same memory.
            losses.append(loss.detach().clone())
            norms.append(norm.detach().clone())
            clock.mark()
    run = Run([float(loss) for loss in losses], [float(norm) for norm in norms], clock.spans())
    if keep_weights:
        run.weights = _arrays(model, net, gradients=False)
    if settings.on_gpu:
        run.peak_bytes = torch.cuda.max_memory_allocated()
    return run


class _Step:
    """A step of training: forward, backward, clipping, update. Returns loss and norm, on the device."""

    def __init__(self, net: GPT2, settings: Settings, decay: float, **of_optimizer: Any) -> None:
        self.net, self.settings = net, settings
        self.forward = _forward(net, settings)
        parameters = list(net.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        options = {"lr": 0.0, "betas": BETAS, "eps": EPSILON, "fused": True} | of_optimizer
        self.optimizer = torch.optim.AdamW(groups, **options)

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        if self.settings.compile is not None and self.settings.on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return self._run(inputs, targets)

    def _run(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.forward(inputs, targets).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm


class _GraphedStep(_Step):
    """The same as one CUDA graph: the learning rate lies on the device, and batches are copied to where it reads them.

    Before it is captured, a step has to have run on another stream, so that libraries have their workspaces and the
    optimizer its state. At the rate 0 that moves no weight, and the moments are cleared afterwards.
    """

    def __init__(self, net: GPT2, settings: Settings, decay: float, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._rate = torch.zeros((), device=settings.device)
        super().__init__(net, settings, decay, lr=self._rate, capturable=True)
        self._batch = tuple(part.clone() for part in batch)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._run(*self._batch)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = self._run(*self._batch)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        for place, part in zip(self._batch, (inputs, targets), strict=True):
            place.copy_(part)
        for group in self.optimizer.param_groups:
            group["lr"].fill_(rate)
        self._graph.replay()
        return self._results


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


def _clock(settings: Settings) -> _Clock:
    return _CudaClock() if settings.on_gpu else _Clock()
