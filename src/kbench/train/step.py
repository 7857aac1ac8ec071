"""The training step of GPT-2 as calls of kernel versions: forward, backward and update, buffer by buffer.

Names: `ln1.3` is layer 3's tensor. Shapes are (B, T, C) unless said; `fch` is (B, T, 4C), `qkv` (B, T, 3C).

Memory that several calls share:

- `logits` holds those of a part of the batch, (B / parts, T, Vp), and becomes its own gradient. While nobody needs it,
  transient tensors of other calls lie in it.
- `dc` holds in turn each layer output before it joins the residual stream, and on the way back the gradient of each
  sub-block's input; `d4c` the gradients that are 3 or 4 C wide.
- `dresidual` carries the gradient of the residual stream through the whole backward pass: each sub-block reads it as
  the gradient of its output, and its LayerNorm adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kbench.family import Copy, Fill, Ref, Tensor
from kbench.train.layout import GROUP, Layout
from kbench.train.program import Action, Call, Plain, Program, Use, View
from kbench.train.slots import OUTLIER_WINDOW, Need, Shape

LOGITS, SCRATCH = "logits", "scratch"
# Between the logits and their backward pass.
_WITH_LOGITS = ("softmax", "crossentropy", "crossentropy_backward")


@dataclass(frozen=True)
class Pick:
    """The version, block size and parameters that the chooser gave a need."""

    need: Need
    version: int
    block: int
    params: tuple[tuple[str, int], ...] = ()

    def use(self, accumulate: int | None = None) -> Use:
        sizes = dict(self.need.sizes)
        if accumulate is not None:
            sizes["accumulate"] = accumulate
        return Use(self.need.family, self.version, self.block, tuple(sizes.items()), self.need.dtype, self.params)


# Names of the tensors that a use touches, in or out.
Touches = Callable[[Use], tuple[str, ...]]


def build(shape: Shape, picks: Mapping[str, Pick], touches: Touches) -> Program:
    """The program of a step, without the sizes of its arenas. picks: by role, one for each need of the ways chosen."""
    return StepBuilder(shape, picks, touches).program()


class StepBuilder:
    def __init__(self, shape: Shape, picks: Mapping[str, Pick], touches: Touches):
        self.shape, self.picks, self.touches = shape, picks, touches
        self.layout = Layout(shape.model)
        self.layers = range(shape.model.layers)
        # What the backward pass of attention reads of the forward pass has to be kept, layer by layer.
        self.kept = set(touches(picks["attention_backward"].use()))

    def program(self) -> Program:
        parts = range(self.shape.parts)
        return Program(
            tensors=self._tensors(),
            forward=tuple(self._forward()),
            logits=(self._logits(0),),
            losses=tuple(action for part in parts for action in (self._logits(part), *self._loss(part))),
            first=tuple(self._backward(first=True)),
            later=tuple(self._backward(first=False)) if self.shape.micro_steps > 1 else (),
            update=tuple(self._update()),
        )

    # ------------------------------------------------------------------------------------------ forward

    def _forward(self) -> Iterator[Action]:
        yield self._call(
            "encoder", inp=View("inputs"), wte=self._weight("wte"), wpe=self._weight("wpe"), out=View("encoded")
        )
        yield self._norm("layernorm", "ln1", 0, View("encoded"))
        for layer in self.layers:
            yield self._linear("qkv", layer, self._normed("ln1", layer), self._qkv(layer))
            yield self._attention_forward(layer)
            yield self._linear("attproj", layer, View(f"atty.{layer}"), View("dc"))
            yield from self._add_and_norm(self._stream(layer), f"residual2.{layer}", "ln2", layer)
            yield from self._fc(layer)
            yield self._linear("fcproj", layer, self._gelu_out(layer), View("dc"))
            following = ("ln1", layer + 1) if layer + 1 < len(self.layers) else ("lnf", 0)
            yield from self._add_and_norm(View(f"residual2.{layer}"), f"residual3.{layer}", *following)

    def _logits(self, part: int) -> Call:
        return self._call("logits", inp=self._of_part("lnf", part), weight=self._weight("wte"), out=View(LOGITS))

    def _attention_forward(self, layer: int) -> Call:
        saved = {name: View(f"{name}.{layer}") for name in ("qkvr", "att", "lse") if name in self.kept}
        return self._call("attention_forward", inp=self._qkv(layer), out=View(f"atty.{layer}"), **saved)

    def _add_and_norm(self, stream: View, residual: str, norm: str, layer: int) -> Iterator[Action]:
        """residual = stream + branch, then a LayerNorm of it."""
        if "fused_residual" in self.picks:
            yield self._call(
                "fused_residual", inp1=stream, inp2=View("dc"), residual=View(residual), **self._norm_views(norm, layer)
            )
        else:
            yield self._call("residual", inp1=stream, inp2=View("dc"), out=View(residual))
            yield self._norm("residual_layernorm", norm, layer, View(residual))

    def _fc(self, layer: int) -> Iterator[Action]:
        if "fc_gelu" in self.picks:
            yield self._linear(
                "fc_gelu", layer, self._normed("ln2", layer), self._gelu_out(layer), pre=View(f"fch.{layer}")
            )
        else:
            yield self._linear("fc", layer, self._normed("ln2", layer), View(f"fch.{layer}"))
            yield self._call("gelu", inp=View(f"fch.{layer}"), out=self._gelu_out(layer))

    def _loss(self, part: int) -> Iterator[Action]:
        """From logits to losses; the gradient of the logits takes their place."""
        targets, losses = self._of_part("targets", part), self._of_part("losses", part)
        rows = {"targets": targets, "dlosses": self._of_part("dlosses", part), "dlogits": View(LOGITS)}
        if "classifier" in self.picks:
            yield self._call("classifier", logits=View(LOGITS), losses=losses, **rows)
        else:
            yield self._call("softmax", inp=View(LOGITS), out=View("probs"))
            yield self._call("crossentropy", probs=View("probs"), targets=targets, losses=losses)
            yield self._call("crossentropy_backward", probs=View("probs"), **rows)

    def _of_part(self, name: str, part: int) -> View:
        """A part of the batch of a tensor (B, T) or (B, T, C)."""
        rows = part * (self.shape.batch // self.shape.parts) * self.shape.seq
        return View(name, rows * (self.shape.model.channels if name in ("lnf", "dc") else 1))

    # ------------------------------------------------------------------------------------------ backward

    def _loss_sum(self, first: bool) -> Iterator[Action]:
        """Losses of all micro-steps are added up, token by token."""
        if self.shape.micro_steps == 1:
            return
        if first:
            yield Plain("loss_sum", (Copy(Ref("loss_sum"), Ref("losses"), self.shape.batch * self.shape.seq),))
        else:
            total = View("loss_sum")
            yield self._call("loss_sum", inp1=total, inp2=View("losses"), out=total)

    def _backward(self, first: bool) -> Iterator[Action]:
        last = len(self.layers) - 1
        for part in range(self.shape.parts):
            yield self._logits(part)
            yield from self._loss(part)
            inp, dinp = self._of_part("lnf", part), self._of_part("dc", part)
            yield self._linear_backward("logits_backward", 0, View(LOGITS), inp, dinp, first and part == 0)
        yield from self._loss_sum(first)
        yield Plain("dresidual", (Fill(Ref("dresidual")),))
        yield self._norm_backward("lnf", 0, View(f"residual3.{last}"), first)
        for layer in reversed(self.layers):
            yield from self._mlp_backward(layer, first)
            yield from self._attention_block_backward(layer, first)
        if first:  # rows of positions past T get no gradient, but are part of it
            count = self.shape.model.context * self.shape.model.channels
            yield Plain("dwpe", (Fill(Ref("grads", self.layout.offset("wpe")), 0.0, count),))
        yield self._call(
            "encoder_backward",
            dout=View("dresidual"),
            inp=View("inputs"),
            dwte=self._gradient("wte"),
            dwpe=self._gradient("wpe"),
        )

    def _mlp_backward(self, layer: int, first: bool) -> Iterator[Action]:
        fch, gelu = View(f"fch.{layer}"), self._gelu_out(layer)
        if self.shape.recompute:
            yield self._call("gelu_again", inp=fch, out=gelu)
        if "fcproj_gelu_backward" in self.picks:
            yield self._linear_backward(
                "fcproj_gelu_backward", layer, View("dresidual"), gelu, View("d4c"), first, pre=fch
            )
        else:
            yield self._linear_backward("fcproj_backward", layer, View("dresidual"), gelu, View("d4c"), first)
            yield self._call("gelu_backward", inp=fch, dout=View("d4c"), dinp=View("d4c"))
        yield from self._norm_again("ln2", layer, View(f"residual2.{layer}"))
        yield self._linear_backward("fc_backward", layer, View("d4c"), self._normed("ln2", layer), View("dc"), first)
        yield self._norm_backward("ln2", layer, View(f"residual2.{layer}"), first)

    def _attention_block_backward(self, layer: int, first: bool) -> Iterator[Action]:
        yield self._linear_backward(
            "attproj_backward", layer, View("dresidual"), View(f"atty.{layer}"), View("dc"), first
        )
        saved = {name: View(f"{name}.{layer}") for name in ("qkvr", "att", "lse")}
        yield self._call(
            "attention_backward",
            dout=View("dc"),
            inp=self._qkv(layer),
            out=View(f"atty.{layer}"),
            dinp=View("d4c"),
            **saved,
        )
        yield from self._norm_again("ln1", layer, self._stream(layer))
        yield self._linear_backward("qkv_backward", layer, View("d4c"), self._normed("ln1", layer), View("dc"), first)
        yield self._norm_backward("ln1", layer, self._stream(layer), first)

    def _norm_again(self, norm: str, layer: int, inp: View) -> Iterator[Action]:
        if self.shape.recompute == 2:
            yield self._norm("layernorm", norm, layer, inp)

    # ------------------------------------------------------------------------------------------ update

    def _update(self) -> Iterator[Action]:
        losses = View("loss_sum" if self.shape.micro_steps > 1 else "losses")
        yield self._call("global_norm", data=View("grads"), out=View("squares"))
        control = ("squares", "schedule", "settings", "step", "window", "filled", "scalars", "seed", "report")
        yield self._call("step_control", losses=losses, **{name: View(name) for name in control})
        update = ("params", "grads", "m", "v", "master", "scalars", "decays", "seed")
        yield self._call("adamw", **{name: View(name) for name in update})

    # ------------------------------------------------------------------------------------------ calls

    def _call(self, role: str, accumulate: int | None = None, /, **views: View) -> Call:
        """Transient memory lies in the logits, unless the call is one of those between which they hold something."""
        holds = role in _WITH_LOGITS or any(view.tensor == LOGITS for view in views.values())
        return Call(role, self.picks[role].use(accumulate), views, SCRATCH if holds else LOGITS)

    def _linear(self, role: str, layer: int, inp: View, out: View, **more: View) -> Call:
        name = role.removesuffix("_gelu")
        weights = {"weight": self._weight(f"{name}w", layer), "bias": self._weight(f"{name}b", layer)}
        return self._call(role, inp=inp, out=out, **weights, **more)

    def _linear_backward(
        self, role: str, layer: int, dout: View, inp: View, dinp: View, first: bool, **more: View
    ) -> Call:
        name = role.removesuffix("_backward").removesuffix("_gelu")
        if name == "logits":
            weights = {"weight": self._weight("wte"), "dweight": self._gradient("wte")}
        else:
            weights = {
                "weight": self._weight(f"{name}w", layer),
                "dweight": self._gradient(f"{name}w", layer),
                "dbias": self._gradient(f"{name}b", layer),
            }
        return self._call(role, int(not first), dout=dout, inp=inp, dinp=dinp, **weights, **more)

    def _norm(self, role: str, norm: str, layer: int, inp: View) -> Call:
        views = self._norm_views(norm, layer)
        return self._call(role, inp=inp, out=views.pop("normed"), **views)

    def _norm_views(self, norm: str, layer: int) -> dict[str, View]:
        return {
            "weight": self._weight(f"{norm}w", layer),
            "bias": self._weight(f"{norm}b", layer),
            "normed": self._normed(norm, layer),
            "mean": View(_named(f"{norm}_mean", norm, layer)),
            "rstd": View(_named(f"{norm}_rstd", norm, layer)),
        }

    def _norm_backward(self, norm: str, layer: int, inp: View, first: bool) -> Call:
        return self._call(
            "layernorm_backward",
            int(not first),
            dout=View("dc"),
            inp=inp,
            weight=self._weight(f"{norm}w", layer),
            mean=View(_named(f"{norm}_mean", norm, layer)),
            rstd=View(_named(f"{norm}_rstd", norm, layer)),
            dinp=View("dresidual"),
            dweight=self._gradient(f"{norm}w", layer),
            dbias=self._gradient(f"{norm}b", layer),
        )

    # ------------------------------------------------------------------------------------------ places

    def _weight(self, name: str, layer: int = 0) -> View:
        return View("params", self.layout.offset(name, layer))

    def _gradient(self, name: str, layer: int = 0) -> View:
        return View("grads", self.layout.offset(name, layer))

    def _stream(self, layer: int) -> View:
        """The residual stream where it enters a layer."""
        return View(f"residual3.{layer - 1}" if layer else "encoded")

    def _normed(self, norm: str, layer: int) -> View:
        if norm == "lnf":
            return View("lnf")
        return View("normed" if self.shape.recompute == 2 else f"{norm}.{layer}")

    def _qkv(self, layer: int) -> View:
        return View(f"qkv.{layer}" if "inp" in self.kept else "qkv")

    def _gelu_out(self, layer: int) -> View:
        return View("fch_gelu" if self.shape.recompute else f"fch_gelu.{layer}")

    # ------------------------------------------------------------------------------------------ tensors

    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self._state(), *self._activations(), *self._gradients(), *self._control())

    def _state(self) -> Iterator[Tensor]:
        N, storage = self.layout.count, self.shape.storage
        yield _tensor("params", (N,), storage)
        yield _tensor("grads", (N,), storage)
        yield _tensor("m", (N,), "fp32")
        yield _tensor("v", (N,), "fp32")
        if storage != "fp32":
            yield _tensor("master", (N,), "fp32")
        yield _tensor("decays", (N // GROUP,), "fp32")

    def _activations(self) -> Iterator[Tensor]:
        shape, model = self.shape, self.shape.model
        rows, C, storage = (shape.batch, shape.seq), model.channels, shape.storage
        square = (shape.batch, model.heads, shape.seq, shape.seq)
        heads = (3, shape.batch, model.heads, shape.seq, model.head_size)
        yield _tensor("inputs", rows, "int32")
        yield _tensor("targets", rows, "int32")
        yield _tensor("encoded", (*rows, C), storage)
        shared = [("normed", C)] if shape.recompute == 2 else []
        shared += [("fch_gelu", 4 * C)] if shape.recompute else []
        shared += [("qkv", 3 * C)] if "inp" not in self.kept else []
        for name, width in shared:
            yield _tensor(name, (*rows, width), storage)
        for layer in self.layers:
            if shape.recompute < 2:
                yield _tensor(f"ln1.{layer}", (*rows, C), storage)
                yield _tensor(f"ln2.{layer}", (*rows, C), storage)
            for name in ("ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd"):
                yield _tensor(f"{name}.{layer}", rows, "fp32")
            if "inp" in self.kept:
                yield _tensor(f"qkv.{layer}", (*rows, 3 * C), storage)
            for name, dimensions, dtype in (
                ("qkvr", heads, storage),
                ("att", square, storage),
                ("lse", square[:3], "fp32"),
            ):
                if name in self.kept:
                    yield _tensor(f"{name}.{layer}", dimensions, dtype)
            for name in ("atty", "residual2", "residual3"):
                yield _tensor(f"{name}.{layer}", (*rows, C), storage)
            yield _tensor(f"fch.{layer}", (*rows, 4 * C), storage)
            if not shape.recompute:
                yield _tensor(f"fch_gelu.{layer}", (*rows, 4 * C), storage)
        yield _tensor("lnf", (*rows, C), storage)
        yield _tensor("lnf_mean", rows, "fp32")
        yield _tensor("lnf_rstd", rows, "fp32")
        part = (shape.batch // shape.parts, shape.seq, model.padded_vocab)
        yield _tensor(LOGITS, part, storage)
        if "softmax" in self.picks:
            yield _tensor("probs", part, storage)
        yield _tensor("losses", rows, "fp32")
        yield _tensor("dlosses", rows, "fp32")
        if shape.micro_steps > 1:
            yield _tensor("loss_sum", rows, "fp32")

    def _gradients(self) -> Iterator[Tensor]:
        rows, C = (self.shape.batch, self.shape.seq), self.shape.model.channels
        yield _tensor("dc", (*rows, C), self.shape.storage)
        yield _tensor("d4c", (*rows, 4 * C), self.shape.storage)
        yield _tensor("dresidual", (*rows, C), self.shape.storage)

    def _control(self) -> Iterator[Tensor]:
        yield _tensor("squares", (1,), "fp32")
        yield _tensor("schedule", (self.shape.schedule_rows, 3), "fp32")
        yield _tensor("settings", (8,), "fp32")
        yield _tensor("step", (2,), "uint32")
        yield _tensor("window", (2, OUTLIER_WINDOW), "fp32")
        yield _tensor("filled", (1,), "uint32")
        yield _tensor("scalars", (8,), "fp32")
        yield _tensor("seed", (1,), "uint32")
        yield _tensor("report", (8,), "fp32")


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(name, shape, dtype, "scratch")


def _named(name: str, norm: str, layer: int) -> str:
    """lnf belongs to no layer."""
    return name if norm == "lnf" else f"{name}.{layer}"
