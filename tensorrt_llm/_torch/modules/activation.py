# SPDX-License-Identifier: Apache-2.0
"""Gated activations of the feed-forward blocks."""

from dataclasses import dataclass

from torch import Tensor

from tensorrt_llm._torch.modules.pointwise import sigmoid, silu, tanh


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivation:
    """act(gate) * up, fp32 inside, in the input's dtype outside.

    `situ_beta` None is SwiGLU; otherwise SiTU: beta tanh(g / beta) sigmoid(g) for the gate and, where
    `situ_linear_beta` is given, lb tanh(u / lb) for the linear half (Kimi K3's configuration: 4 and 25).
    """

    situ_beta: float | None = None
    situ_linear_beta: float | None = None

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up [..., 2I], gate first -> [..., I]."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        if self.situ_beta is None:
            return (silu(gate) * up).to(gate_up.dtype)
        gate = self.situ_beta * tanh(gate / self.situ_beta) * sigmoid(gate)
        if self.situ_linear_beta is not None:
            up = self.situ_linear_beta * tanh(up / self.situ_linear_beta)
        return (gate * up).to(gate_up.dtype)
