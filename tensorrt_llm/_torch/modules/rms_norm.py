# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / rms of the last axis, [..., 1] fp32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the variance in fp32, the weight after the cast back."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * inverse_rms(x, self.eps)).to(x.dtype) * self.weight
