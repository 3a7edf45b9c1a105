# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_commit_pending`, for tests and benchmarks."""

from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIM = 128
CONV_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitShape:
    """L layers, N requests of a pool with one slot more, H heads, M drafts."""

    layers: int
    requests: int
    heads: int = 6
    num_spec: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInputs:
    """Arguments of the op in its order."""

    ssm: Tensor
    conv_pool: Tensor
    cs_q: Tensor
    cs_k: Tensor
    cs_v: Tensor
    state_tok: Tensor
    slots: Tensor
    counts: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return (
            self.ssm, self.conv_pool, self.cs_q, self.cs_k, self.cs_v, self.state_tok, self.slots, self.counts
        )  # fmt: skip

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes."""
        return {"ssm": self.ssm, "conv_pool": self.conv_pool}


def make_inputs(shape: CommitShape, *, seed: int = 0, device: str = "cpu") -> CommitInputs:
    """Arguments with filled pools; SSM states interleave the layers of a slot, as in the storage."""
    gen = torch.Generator().manual_seed(seed)
    L, H, M, slots = shape.layers, shape.heads, shape.num_spec, shape.requests + 1
    D = H * HEAD_DIM

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen).to(device)

    records = normal(L, slots, 3, M, H, HEAD_DIM)
    records[:, :, 2] = records[:, :, 2].abs().clamp(max=1)
    caches = [normal(L, slots, CONV_WIDTH - 1 + M, D).bfloat16().float().transpose(2, 3) for _ in range(3)]
    return CommitInputs(
        ssm=normal(slots, L, H, HEAD_DIM, HEAD_DIM).transpose(0, 1),
        conv_pool=normal(slots, L, 3 * D, CONV_WIDTH - 1).bfloat16().transpose(0, 1),
        cs_q=caches[0],
        cs_k=caches[1],
        cs_v=caches[2],
        state_tok=records,
        slots=torch.randperm(slots, generator=gen)[: shape.requests].to(torch.int32).to(device),
        counts=torch.randint(0, M + 1, (shape.requests,), generator=gen, dtype=torch.int32).to(device),
    )
