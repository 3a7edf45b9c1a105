# SPDX-License-Identifier: Apache-2.0
"""Feed-forward blocks: the dense MLP, and routed experts in a latent width beside a shared expert.

Router: s = sigmoid(x W^T) in fp32; the chosen experts are the top ones of s + bias, their weights s alone, so
the bias steers selection and nothing else. The latent norm comes after the weighted sum over experts.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensorrt_llm._torch.modules.activation import GatedActivation
from tensorrt_llm._torch.modules.host import host_values
from tensorrt_llm._torch.modules.linear import aligned_linear
from tensorrt_llm._torch.modules.pointwise import sigmoid
from tensorrt_llm._torch.modules.rms_norm import RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts. `latent_dim` None runs them in the full hidden width."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    latent_dim: int | None
    latent_norm: bool
    renormalize: bool
    routed_scaling_factor: float


class GatedMLP(nn.Module):
    """down(act(gate x, up x)); gate and up are one weight [2I, hidden], gate first."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: GatedActivation, dtype: torch.dtype
    ):
        super().__init__()
        self.activation = activation
        self.gate_up = nn.Parameter(torch.zeros(2 * intermediate_size, hidden_size, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(hidden_size, intermediate_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.activation(F.linear(x, self.gate_up)), self.down)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the tensor it is loaded into, relative to the block."""
        gate, up = self.gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down}


class LatentMoE(nn.Module):
    """Routed experts plus shared experts; see the module's comment for the router."""

    def __init__(
        self, config: MoeConfig, hidden_size: int, eps: float, activation: GatedActivation, dtype: torch.dtype
    ):
        super().__init__()
        self.config = config
        self.activation = activation
        E, inner, width = config.num_experts, config.intermediate_size, config.latent_dim or hidden_size
        self.router = nn.Parameter(torch.zeros(E, hidden_size, dtype=dtype))
        self.selection_bias = nn.Buffer(torch.zeros(E))
        self.expert_load = nn.Buffer(torch.zeros(E), persistent=False)
        self.gate_up = nn.Parameter(torch.zeros(E, 2 * inner, width, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(E, width, inner, dtype=dtype))
        self.to_latent: nn.Parameter | None = None
        self.from_latent: nn.Parameter | None = None
        if config.latent_dim is not None:
            self.to_latent = nn.Parameter(torch.zeros(width, hidden_size, dtype=dtype))
            self.from_latent = nn.Parameter(torch.zeros(hidden_size, width, dtype=dtype))
        self.latent_norm = RMSNorm(width, eps, dtype) if config.latent_norm else None
        shared = config.shared_intermediate_size
        self.shared = GatedMLP(hidden_size, shared, activation, dtype) if shared else None

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the tensor it is loaded into, relative to the block."""
        names: dict[str, Tensor] = {
            "gate.weight": self.router,
            "gate.e_score_correction_bias": self.selection_bias,
        }
        for e in range(self.config.num_experts):
            w1, w3 = self.gate_up[e].chunk(2)
            names |= {f"experts.{e}.w1.weight": w1, f"experts.{e}.w3.weight": w3}
            names[f"experts.{e}.w2.weight"] = self.down[e]
        if self.to_latent is not None and self.from_latent is not None:
            names["routed_expert_down_proj.weight"] = self.to_latent
            names["routed_expert_up_proj.weight"] = self.from_latent
        if self.latent_norm is not None:
            names["routed_expert_norm.weight"] = self.latent_norm.weight
        if self.shared is not None:
            names |= {f"shared_experts.{n}": t for n, t in self.shared.checkpoint_tensors().items()}
        return names

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, hidden] -> chosen experts int64 [R, k] and their weights fp32 [R, k]."""
        scores = sigmoid(F.linear(x.float(), self.router.float()))
        experts = (scores + self.selection_bias).topk(self.config.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.config.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.config.routed_scaling_factor

    def forward(self, x: Tensor, num_tokens: int) -> Tensor:
        """x [R, hidden] -> [R, hidden].

        Only the first `num_tokens` rows are routed; padding gets no experts.
        """
        experts, weights = self.route(x)
        latent = x if self.to_latent is None else F.linear(x, self.to_latent)
        routed = torch.zeros_like(latent)
        routed[:num_tokens] = self._run_experts(latent, experts[:num_tokens], weights[:num_tokens])
        return self._finish(x, routed)

    def _finish(self, x: Tensor, routed: Tensor) -> Tensor:
        if self.latent_norm is not None:
            routed = self.latent_norm(routed)
        if self.from_latent is not None:
            routed = F.linear(routed, self.from_latent)
        return routed if self.shared is None else routed + self.shared(x)

    def _run_experts(self, latent: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum over each row's experts [n, width]: rows grouped by expert, summed in the row's
        order."""
        n, k = experts.shape
        chosen, order = experts.flatten().sort(stable=True)
        # ends[e]: the row behind expert e's last one.
        all_experts = torch.arange(self.config.num_experts, device=chosen.device)
        ends = torch.searchsorted(chosen, all_experts, right=True, out_int32=True)
        outputs = latent.new_empty(n * k, latent.shape[1])
        outputs[order] = self._run_groups(latent[order // k], ends)
        return (outputs.view(n, k, -1).float() * weights.unsqueeze(-1)).sum(1).to(latent.dtype)

    def _run_groups(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Each expert on its rows [n, width], which lie in the order of experts; ends int32 [E], exclusive.

        In host memory expert by expert, in the linear form whose rows do not depend on each other. On a
        device as one grouped product, for which nobody has to know the group sizes.
        """
        known = host_values(ends)
        if known is None:
            hidden = self.activation(F.grouped_mm(rows, self.gate_up.mT, offs=ends))
            return F.grouped_mm(hidden, self.down.mT, offs=ends)
        outputs = torch.empty_like(rows)
        for expert, (start, end) in enumerate(pairwise((0, *known))):
            if start < end:
                hidden = self.activation(aligned_linear(rows[start:end], self.gate_up[expert]))
                outputs[start:end] = aligned_linear(hidden, self.down[expert])
        return outputs

    def forward_dense(self, x: Tensor) -> Tensor:
        """Every expert on every row, for training: no gathering, fixed shapes. x [R, hidden] -> [R, hidden].

        Adds the rows each expert was chosen for to `expert_load` [E], which whoever balances the router
        zeroes.
        """
        with torch.autocast(x.device.type, enabled=False):
            experts, weights = self.route(x)
        latent = x if self.to_latent is None else F.linear(x, self.to_latent)
        share = weights.new_zeros(x.shape[0], self.config.num_experts).scatter(-1, experts, weights)
        self.expert_load.add_((share.detach() > 0).sum(0))
        hidden = self.activation(torch.matmul(latent, self.gate_up.mT))
        routed = (torch.matmul(hidden, self.down.mT) * share.T.unsqueeze(-1)).sum(0).to(latent.dtype)
        return self._finish(x, routed)
