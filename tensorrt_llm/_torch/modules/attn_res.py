# SPDX-License-Identifier: Apache-2.0
"""Attention residuals: a learned mix over depth in place of the plain residual stream.

Two things flow between layers: the running sum p [rows, hidden] of the layers since the last snapshot, and
the snapshots [rows, hidden] taken every `block_size` layers. Each site mixes snapshots and p per row with a
softmax over depth; its query is a learned vector, not the token.
"""

import torch
from torch import Tensor, nn

from tensorrt_llm._torch.modules.pointwise import exp
from tensorrt_llm._torch.modules.rms_norm import inverse_rms


class AttentionResidual(nn.Module):
    """One mixing site: score_j = sum_h v_j / rms(v_j) * norm * proj, weights = softmax over j, fp32."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.norm = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.proj = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, prefix: Tensor | None, snapshots: list[Tensor]) -> Tensor:
        """The mix [rows, hidden] of the snapshots in order and then the prefix, un-normalised candidates."""
        candidates = snapshots if prefix is None else [*snapshots, prefix]
        if len(candidates) == 1:
            return candidates[0]
        stack = torch.stack(candidates).float()
        query = self.norm.float() * self.proj[0].float()
        scores = (stack * query).sum(-1, keepdim=True) * inverse_rms(stack, self.eps)
        weights = exp(scores - scores.amax(0, keepdim=True))
        return ((weights / weights.sum(0)) * stack).sum(0).to(candidates[0].dtype)
