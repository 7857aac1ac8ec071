"""The families' operations in PyTorch: what `benchmarks/families.py` times beside kbench.

Each function takes the family's sizes and a torch dtype, makes inputs on the GPU, and returns a function of no
arguments that does the operation once, on inputs and into outputs of the family's shapes and types. It is timed as it
stands and through torch.compile.

Where that is not the family's contract to the letter:
- trimat_forward computes the whole square, of which the family wants the lower triangle, and scales it by a step of its
  own;
- classifier_fused leaves the padding of dlogits as it is, where the family writes zeros;
- the sizes `gelu` and `accumulate` are not looked at: all is done as with gelu=0 and accumulate=1, which is what the
  families' presets say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

Sizes = Mapping[str, int]
Operation = Callable[[], Any]
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _normal(*shape: int, dtype: Any = torch.float32, mean: float = 0.1, spread: float = 0.7) -> Any:
    return torch.empty(shape, device="cuda", dtype=dtype).normal_(mean, spread)


def _ids(count: int, high: int) -> Any:
    return torch.randint(high, (count,), device="cuda")


def adamw(s: Sizes, dtype: Any) -> Operation:
    params, grads = _normal(s["N"], dtype=dtype), _normal(s["N"], dtype=dtype)
    m, v, step = _normal(s["N"]), torch.rand(s["N"], device="cuda"), torch.full((), 10.0, device="cuda")
    if dtype != torch.float32:
        return lambda: _adamw(params, grads, m, v)
    options = dict(lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
    return lambda: torch._fused_adamw_([params], [grads], [m], [v], [], [step], **options)


def _adamw(params: Any, grads: Any, m: Any, v: Any) -> None:
    """With moments in fp32, which PyTorch's fused AdamW has not got for 16-bit parameters."""
    g = grads.float()
    m.lerp_(g, 0.1)
    v.lerp_(g * g, 0.001)
    old = params.float()
    update = (m / (1 - 0.9**10)) / ((v / (1 - 0.999**10)).sqrt() + 1e-8) + 0.1 * old
    params.copy_(old - 1e-3 * update)


def attention_forward(s: Sizes, dtype: Any) -> Operation:
    B, T, C, NH = (s[name] for name in ("B", "T", "C", "NH"))
    qkv = _normal(B, T, 3, NH, C // NH, dtype=dtype)
    q, k, v = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)


def classifier_fused(s: Sizes, dtype: Any) -> Operation:
    rows, V, P = s["B"] * s["T"], s["V"], s["P"]
    logits, targets, dlosses = _normal(rows, P, dtype=dtype), _ids(rows, V), _normal(rows)
    dlogits = torch.zeros(rows, P, device="cuda", dtype=dtype)

    def operation() -> Any:
        logprobs = torch.log_softmax(logits[:, :V].float(), 1)
        losses = -logprobs.gather(1, targets[:, None])[:, 0]
        hit = torch.arange(V, device="cuda")[None, :] == targets[:, None]
        dlogits[:, :V] = ((logprobs.exp() - hit.float()) * dlosses[:, None]).to(dtype)
        return losses

    return operation


def crossentropy_forward(s: Sizes, dtype: Any) -> Operation:
    rows = s["B"] * s["T"]
    probs = torch.rand(rows, s["V"], device="cuda").to(dtype)
    targets = _ids(rows, s["V"])
    return lambda: -probs.gather(1, targets[:, None])[:, 0].float().log()


def crossentropy_softmax_backward(s: Sizes, dtype: Any) -> Operation:
    rows, V = s["B"] * s["T"], s["V"]
    probs, targets, dlosses = torch.rand(rows, V, device="cuda").to(dtype), _ids(rows, V), _normal(rows)

    def operation() -> Any:
        hit = torch.arange(V, device="cuda")[None, :] == targets[:, None]
        return ((probs.float() - hit.float()) * dlosses[:, None]).to(dtype)

    return operation


def encoder_forward(s: Sizes, dtype: Any) -> Operation:
    ids = _ids(s["B"] * s["T"], s["V"]).view(s["B"], s["T"])
    wte, wpe = _normal(s["V"], s["C"], dtype=dtype), _normal(s["T"], s["C"], dtype=dtype)
    return lambda: F.embedding(ids, wte) + wpe


def encoder_backward(s: Sizes, dtype: Any) -> Operation:
    ids = _ids(s["B"] * s["T"], s["V"])
    dout = _normal(s["B"] * s["T"], s["C"], dtype=dtype)
    dwte, dwpe = _normal(s["V"], s["C"], dtype=dtype), _normal(s["T"], s["C"], dtype=dtype)

    def operation() -> Any:
        dwte.index_add_(0, ids, dout)
        return dwpe.add_(dout.view(s["B"], s["T"], s["C"]).sum(0))

    return operation


def fused_residual_forward(s: Sizes, dtype: Any) -> Operation:
    rows, C = s["B"] * s["T"], s["C"]
    a, b = _normal(rows, C, dtype=dtype), _normal(rows, C, dtype=dtype)
    weight, bias = _normal(C, dtype=dtype), _normal(C, dtype=dtype)

    def operation() -> Any:
        residual = a + b
        return residual, *torch.native_layer_norm(residual, [C], weight, bias, 1e-5)

    return operation


def gelu_forward(s: Sizes, dtype: Any) -> Operation:
    x = _normal(s["N"], dtype=dtype)
    return lambda: F.gelu(x, approximate="tanh")


def gelu_backward(s: Sizes, dtype: Any) -> Operation:
    x, dout = _normal(s["N"], dtype=dtype), _normal(s["N"], dtype=dtype)
    return lambda: torch.ops.aten.gelu_backward(dout, x, approximate="tanh")


def global_norm(s: Sizes, dtype: Any) -> Operation:
    x = _normal(s["N"], dtype=dtype, mean=0.0, spread=1e-3)
    return lambda: torch.linalg.vector_norm(x, dtype=torch.float32) ** 2


def layernorm_backward(s: Sizes, dtype: Any) -> Operation:
    rows, C = s["B"] * s["T"], s["C"]
    x, dout, dinp = (_normal(rows, C, dtype=dtype) for _ in range(3))
    weight, bias, dweight, dbias = (_normal(C, dtype=dtype) for _ in range(4))
    _, mean, rstd = torch.native_layer_norm(x, [C], weight, bias, 1e-5)

    def operation() -> Any:
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(dout, x, [C], mean, rstd, weight, bias, [True] * 3)
        return dinp.add_(dx), dweight.add_(dw), dbias.add_(db)

    return operation


def layernorm_forward(s: Sizes, dtype: Any) -> Operation:
    C = s["C"]
    x, weight, bias = _normal(s["B"] * s["T"], C, dtype=dtype), _normal(C, dtype=dtype), _normal(C, dtype=dtype)
    return lambda: torch.native_layer_norm(x, [C], weight, bias, 1e-5)


def matmul_forward(s: Sizes, dtype: Any) -> Operation:
    x = _normal(s["B"] * s["T"], s["C"], dtype=dtype)
    weight, bias = _normal(s["OC"], s["C"], dtype=dtype, mean=0.0, spread=0.02), _normal(s["OC"], dtype=dtype)
    return lambda: F.linear(x, weight, bias)


def matmul_backward(s: Sizes, dtype: Any) -> Operation:
    rows, C, OC = s["B"] * s["T"], s["C"], s["OC"]
    x, dout, weight = _normal(rows, C, dtype=dtype), _normal(rows, OC, dtype=dtype), _normal(OC, C, dtype=dtype)
    dweight, dbias = _normal(OC, C, dtype=dtype), _normal(OC, dtype=dtype)

    def operation() -> Any:
        dinp = dout @ weight
        return dinp, dweight.addmm_(dout.t(), x), dbias.add_(dout.sum(0))

    return operation


def matmul_backward_bias(s: Sizes, dtype: Any) -> Operation:
    dout, dbias = _normal(s["B"] * s["T"], s["OC"], dtype=dtype), _normal(s["OC"], dtype=dtype)
    return lambda: dbias.add_(dout.sum(0))


def permute(s: Sizes, dtype: Any) -> Operation:
    x = _normal(*(s[name] for name in ("D1", "D2", "D3", "D4")), dtype=dtype)
    return lambda: x.permute(3, 2, 0, 1).contiguous()


def residual_forward(s: Sizes, dtype: Any) -> Operation:
    a, b = _normal(math.prod(s.values()), dtype=dtype), _normal(math.prod(s.values()), dtype=dtype)
    return lambda: a + b


def softmax_forward(s: Sizes, dtype: Any) -> Operation:
    x = _normal(s["N"], s["C"], dtype=dtype)
    return lambda: torch.softmax(x, 1)


def trimat_forward(s: Sizes, dtype: Any) -> Operation:
    B, T, C, NH = (s[name] for name in ("B", "T", "C", "NH"))
    qkv = _normal(B, T, 3, NH, C // NH, dtype=dtype)
    q, k = (qkv[:, :, part].transpose(1, 2) for part in range(2))
    scale = 1.0 / math.sqrt(C // NH)
    return lambda: (q @ k.transpose(2, 3)) * scale


# attention_backward has a benchmark of its own; nccl_all_reduce needs several processes.
ANCHORS: dict[str, Callable[[Sizes, Any], Operation]] = {
    function.__name__: function
    for function in (
        adamw, attention_forward, classifier_fused, crossentropy_forward, crossentropy_softmax_backward,
        encoder_forward, encoder_backward, fused_residual_forward, gelu_forward, gelu_backward, global_norm,
        layernorm_backward, layernorm_forward, matmul_forward, matmul_backward, matmul_backward_bias, permute,
        residual_forward, softmax_forward, trimat_forward,
    )
}  # fmt: skip
