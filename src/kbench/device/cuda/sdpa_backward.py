"""SdpaBackward steps through cuDNN: the gradients of q, k and v by one graph of one operation.

cuDNN computes probabilities again, from q, k and the log-sum-exp that the forward pass left, so no (T, T) matrix is
read. Gradients are written where they belong, packed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kbench.device.cuda.sdpa import CAUSAL, Cudnn, PreparedAttention
from kbench.errors import LaunchRefused
from kbench.family import SdpaBackward, Tensor


class PreparedSdpaBackward(PreparedAttention):
    """An SdpaBackward step, by an algorithm that adds up in one order.

    On an H100 or H200 that algorithm has a workspace of 2 B NH T T bytes for the gradient of the scores (T rounded up
    to 64), where the other one adds into an fp32 dq of B NH T HS elements by atomics.
    """

    def __init__(self, library: Cudnn, step: SdpaBackward, tensors: Sequence[Tensor]):
        if not step.stats:
            raise LaunchRefused("an SdpaBackward needs the statistics of the forward pass")
        reads = {"q": step.q, "k": step.k, "v": step.v, "o": step.out, "dO": step.dout}
        writes = {"dq": step.dq, "dk": step.dk, "dv": step.dv}
        super().__init__(library, step, tensors, reads, writes)

    def __str__(self) -> str:
        return f"backward pass of {super().__str__()}"

    def _describe(self, graph: Any) -> dict[str, Any]:
        tensors = {role: self._input(graph, role) for role in ("q", "k", "v", "o", "dO")}
        dim, stride = self._stats_layout()
        fp32 = self._library.api.data_type.FLOAT
        tensors["stats"] = graph.tensor(name="stats", dim=dim, stride=stride, data_type=fp32)
        gradients = graph.sdpa_backward(
            name="sdpa_backward",
            **tensors,
            attn_scale=self._scale,
            diagonal_band_right_bound=CAUSAL,
            use_deterministic_algorithm=True,
        )
        for role, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            tensors[role] = self._output(gradient, role)
        return tensors
