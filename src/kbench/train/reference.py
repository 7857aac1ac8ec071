"""GPT-2's loss and its 16 gradients in numpy: what the training step is judged against, on small models.

Each block's forward and backward stand side by side. Every operation is done in the type asked for: float64 is the
reference, float32 says how far from it float32 alone takes one. Letters of shapes: B sequences of T tokens, C channels,
NH heads of HS channels, V tokens in the vocabulary, Vp with its padding, L layers.

The attention of a layer holds B NH T T numbers, and all layers are kept: this is for models that fit a test.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kbench.errors import UsageError
from kbench.train.model import Model

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]

# Constants are Python floats throughout: a numpy float64 among them would turn a float32 computation into float64.
NORM_EPSILON = 1e-5  # GPT-2's LayerNorm
# GELU by tanh (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2).
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


# ---------------------------------------------------------------------------------------------- the whole


def loss_and_gradients(
    model: Model, weights: Weights, inputs: Array, targets: Array, dtype: npt.DTypeLike = np.float64
) -> tuple[float, Array, dict[str, Array]]:
    """The mean loss of a batch, the loss of each token (B, T), and the gradient of the mean for each parameter.

    weights: arrays of the parameters' full shapes, of any float type. inputs, targets: token ids (B, T), T at most
    the model's context. Gradients have the parameters' shapes; those of wte's padding and of positions from T on
    are 0. Raises UsageError where tokens or weights do not fit the model.
    """
    _require_tokens(model, inputs, targets)
    weights = _converted(model, weights, dtype)
    hidden, saved = _hidden(model, weights, inputs)
    losses, probs = cross_entropy(classify(hidden, weights["wte"][: model.vocab]), targets)
    dlogits = cross_entropy_backward(probs, targets)
    dhidden, dclassifier = classify_backward(dlogits, hidden, weights["wte"][: model.vocab])
    gradients = _hidden_backward(model, weights, inputs, dhidden, saved)
    gradients["wte"][: model.vocab] += dclassifier  # the classifier shares its weights with the embedding
    ordered = {parameter.name: gradients[parameter.name] for parameter in model.parameters}
    return float(losses.mean()), losses, ordered


def logits(model: Model, weights: Weights, inputs: Array, dtype: npt.DTypeLike = np.float64) -> Array:
    """The logits (B, T, V) of the valid columns for token ids (B, T). Raises UsageError as loss_and_gradients."""
    _require_tokens(model, inputs)
    weights = _converted(model, weights, dtype)
    return classify(_hidden(model, weights, inputs)[0], weights["wte"][: model.vocab])


class _Saved(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    layers: list[dict[str, Any]]
    final_norm: tuple[Array, Array]


def _hidden(model: Model, weights: Weights, inputs: Array) -> tuple[Array, _Saved]:
    """All but the classifier: the last LayerNorm's output (B, T, C)."""
    x = encode(inputs, weights["wte"], weights["wpe"])
    layers = []
    for index in range(model.layers):
        x, saved = layer(x, _of_layer(model, weights, index), model.heads)
        layers.append(saved)
    hidden, final_norm = layernorm(x, weights["lnfw"], weights["lnfb"])
    return hidden, _Saved(layers, final_norm)


def _hidden_backward(model: Model, weights: Weights, inputs: Array, dhidden: Array, saved: _Saved) -> dict[str, Array]:
    gradients = {name: np.zeros_like(array) for name, array in weights.items()}
    dx, gradients["lnfw"], gradients["lnfb"] = layernorm_backward(dhidden, weights["lnfw"], saved.final_norm)
    for index in reversed(range(model.layers)):
        dx, parts = layer_backward(dx, _of_layer(model, weights, index), model.heads, saved.layers[index])
        for name, part in parts.items():
            gradients[name][index] = part
    encode_backward(dx, inputs, gradients["wte"], gradients["wpe"])
    return gradients


def _of_layer(model: Model, weights: Weights, index: int) -> dict[str, Array]:
    return {parameter.name: weights[parameter.name][index] for parameter in model.parameters if parameter.layered}


# ---------------------------------------------------------------------------------------------- a layer


def layer(x: Array, w: Weights, heads: int) -> tuple[Array, dict[str, Any]]:
    """x (B, T, C) -> x + projected attention, then + the two-layer perceptron, each behind a LayerNorm.

    w: the layer's own parts of the parameters. Also returns what layer_backward needs.
    """
    ln1, norm1 = layernorm(x, w["ln1w"], w["ln1b"])
    mixed, attended = attention(linear(ln1, w["qkvw"], w["qkvb"]), heads)
    x = x + linear(mixed, w["attprojw"], w["attprojb"])
    ln2, norm2 = layernorm(x, w["ln2w"], w["ln2b"])
    fc = linear(ln2, w["fcw"], w["fcb"])
    activated = gelu(fc)
    x = x + linear(activated, w["fcprojw"], w["fcprojb"])
    saved = {"ln1": ln1, "norm1": norm1, "mixed": mixed, "attended": attended}
    return x, saved | {"ln2": ln2, "norm2": norm2, "fc": fc, "activated": activated}


def layer_backward(dx: Array, w: Weights, heads: int, saved: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
    """Gradients of the layer's input (B, T, C) and of its parameters, from that of its output."""
    g: dict[str, Array] = {}
    dactivated, g["fcprojw"], g["fcprojb"] = linear_backward(dx, saved["activated"], w["fcprojw"])
    dfc = gelu_backward(dactivated, saved["fc"])
    dln2, g["fcw"], g["fcb"] = linear_backward(dfc, saved["ln2"], w["fcw"])
    branch, g["ln2w"], g["ln2b"] = layernorm_backward(dln2, w["ln2w"], saved["norm2"])
    dx = dx + branch
    dmixed, g["attprojw"], g["attprojb"] = linear_backward(dx, saved["mixed"], w["attprojw"])
    dqkv = attention_backward(dmixed, heads, saved["attended"])
    dln1, g["qkvw"], g["qkvb"] = linear_backward(dqkv, saved["ln1"], w["qkvw"])
    branch, g["ln1w"], g["ln1b"] = layernorm_backward(dln1, w["ln1w"], saved["norm1"])
    return dx + branch, g


# ---------------------------------------------------------------------------------------------- blocks


def encode(inputs: Array, wte: Array, wpe: Array) -> Array:
    """Token ids (B, T) -> the sum of token and position embeddings (B, T, C)."""
    return wte[inputs] + wpe[: inputs.shape[1]]


def encode_backward(dout: Array, inputs: Array, dwte: Array, dwpe: Array) -> None:
    """Adds to dwte (Vp, C) and dwpe (context, C)."""
    np.add.at(dwte, inputs, dout)  # a token that occurs twice adds twice
    dwpe[: inputs.shape[1]] += dout.sum(axis=0)


def layernorm(x: Array, weight: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
    """Rows of x with mean 0 and variance 1, times weight, plus bias. Also the normed rows and 1 / deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + NORM_EPSILON)
    normed = centred * rstd
    return normed * weight + bias, (normed, rstd)


def layernorm_backward(dout: Array, weight: Array, saved: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and bias. That of x has no part along the two directions that the norm takes out."""
    normed, rstd = saved
    dnormed = dout * weight
    along_ones = dnormed.mean(axis=-1, keepdims=True)
    along_normed = (dnormed * normed).mean(axis=-1, keepdims=True)
    dx = rstd * (dnormed - along_ones - normed * along_normed)
    return dx, (dout * normed).sum(axis=(0, 1)), dout.sum(axis=(0, 1))


def linear(x: Array, weight: Array, bias: Array) -> Array:
    """x (B, T, in), weight (out, in), bias (out) -> (B, T, out)."""
    return x @ weight.T + bias


def linear_backward(dout: Array, x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Gradients of x, weight and bias."""
    rows = dout.reshape(-1, dout.shape[-1])
    return dout @ weight, rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(axis=0)


def attention(qkv: Array, heads: int) -> tuple[Array, tuple[Array, Array]]:
    """Causal attention: qkv (B, T, 3C) -> (B, T, C); scores are scaled by 1 / sqrt(HS).

    Also returns q, k and v as one array (3, B, NH, T, HS), and the attention matrix (B, NH, T, T), 0 above the
    diagonal.
    """
    batch, seq, width = qkv.shape
    head_size = width // (3 * heads)
    split = qkv.reshape(batch, seq, 3, heads, head_size).transpose(2, 0, 3, 1, 4)
    q, k, v = split
    scores = (q @ k.swapaxes(-1, -2)) * (1.0 / math.sqrt(head_size))
    scores[..., np.triu(np.ones((seq, seq), dtype=bool), k=1)] = -np.inf
    att = softmax(scores)
    return _joined(att @ v), (split, att)


def attention_backward(dout: Array, heads: int, saved: tuple[Array, Array]) -> Array:
    """The gradient of qkv (B, T, 3C)."""
    (q, k, v), att = saved
    batch, seq, channels = dout.shape
    dheads = dout.reshape(batch, seq, heads, channels // heads).transpose(0, 2, 1, 3)
    dv = att.swapaxes(-1, -2) @ dheads
    datt = dheads @ v.swapaxes(-1, -2)
    dscores = softmax_backward(datt, att) * (1.0 / math.sqrt(channels // heads))
    dq, dk = dscores @ k, dscores.swapaxes(-1, -2) @ q
    return np.concatenate([_joined(part) for part in (dq, dk, dv)], axis=-1)


def _joined(heads: Array) -> Array:
    """(B, NH, T, HS) -> (B, T, C)."""
    batch, count, seq, size = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(batch, seq, count * size)


def softmax(x: Array) -> Array:
    """Along the last axis; the largest element is taken away first, so that no exponential overflows."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def softmax_backward(dprobs: Array, probs: Array) -> Array:
    """The gradient of softmax's input."""
    return probs * (dprobs - (dprobs * probs).sum(axis=-1, keepdims=True))


def gelu(x: Array) -> Array:
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + np.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x)))


def gelu_backward(dout: Array, x: Array) -> Array:
    """The gradient of gelu's input."""
    tanh = np.tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x))
    slope = GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x)
    return dout * (0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)


def classify(hidden: Array, wte: Array) -> Array:
    """hidden (B, T, C), wte's rows of real tokens (V, C) -> logits (B, T, V). Padding has no part in the softmax."""
    return hidden @ wte.T


def classify_backward(dlogits: Array, hidden: Array, wte: Array) -> tuple[Array, Array]:
    """Gradients of hidden and of wte's rows of real tokens."""
    rows = dlogits.reshape(-1, dlogits.shape[-1])
    return dlogits @ wte, rows.T @ hidden.reshape(-1, hidden.shape[-1])


def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Logits (B, T, V), target ids (B, T) -> -log of the target's probability (B, T), and all probabilities."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    sums = powers.sum(axis=-1, keepdims=True)
    hit = np.take_along_axis(shifted, targets[..., None], axis=-1)
    # The logarithm of the sum, not of the probability: a tiny probability would be rounded to 0 first.
    return (np.log(sums) - hit)[..., 0], powers / sums


def cross_entropy_backward(probs: Array, targets: Array) -> Array:
    """The gradient of the logits, from the mean of all losses."""
    dlogits = probs.copy()
    batch, seq = targets.shape
    dlogits[np.arange(batch)[:, None], np.arange(seq)[None, :], targets] -= 1.0
    return dlogits * (1.0 / targets.size)


# ---------------------------------------------------------------------------------------------- what comes in


def _converted(model: Model, weights: Weights, dtype: npt.DTypeLike) -> dict[str, Array]:
    for parameter in model.parameters:
        if parameter.name not in weights:
            raise UsageError(f"the weights have no {parameter.name}")
        shape = weights[parameter.name].shape
        if shape != parameter.shape:
            raise UsageError(f"{parameter.name} has the shape {shape}, and the model needs {parameter.shape}")
    return {parameter.name: weights[parameter.name].astype(dtype) for parameter in model.parameters}


def _require_tokens(model: Model, *batches: Array) -> None:
    for ids in batches:
        if ids.ndim != 2 or ids.size == 0 or ids.shape != batches[0].shape:
            raise UsageError(f"tokens of shape {ids.shape}: inputs and targets are of one shape (B, T), not empty")
        if ids.shape[1] > model.context:
            raise UsageError(f"sequences of {ids.shape[1]} tokens: the model's context is {model.context}")
        # A negative id would index numpy arrays from their end, and the padding's rows belong to no token.
        if ids.min() < 0 or ids.max() >= model.vocab:
            raise UsageError(f"token ids from {ids.min()} to {ids.max()}: the model has 0 to {model.vocab - 1}")
