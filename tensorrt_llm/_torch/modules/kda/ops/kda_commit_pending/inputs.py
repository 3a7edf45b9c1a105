# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_commit_pending` and of the other ops over all layers, for tests and benchmarks."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

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


Inputs = TypeVar("Inputs", bound="LayerInputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What the ops over all layers take alike."""

    ssm: Tensor
    cs_q: Tensor
    cs_k: Tensor
    cs_v: Tensor
    slots: Tensor
    counts: Tensor

    def copy(self: Inputs, device: str | torch.device | None = None) -> Inputs:
        """A copy, on another device if one is given: nothing is shared, strides are kept."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        target = device or self.ssm.device
        copies = {
            name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=target).copy_(x)
            for name, x in values.items()
        }
        return type(self)(**copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInputs(LayerInputs):
    """Arguments of `kda_commit_pending`."""

    conv_pool: Tensor
    state_tok: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        """In the op's order."""
        return (
            self.ssm, self.conv_pool, self.cs_q, self.cs_k, self.cs_v, self.state_tok, self.slots, self.counts
        )  # fmt: skip

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes."""
        return {"ssm": self.ssm, "conv_pool": self.conv_pool}


def layer_fields(shape: CommitShape, generator: torch.Generator) -> tuple[dict[str, Any], Tensor]:
    """The fields of `LayerInputs` and the conv pool, on the CPU; layers interleave in a slot's memory."""
    gen = generator
    L, H, M, slots = shape.layers, shape.heads, shape.num_spec, shape.requests + 1
    D = H * HEAD_DIM

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen)

    caches = [normal(L, slots, CONV_WIDTH - 1 + M, D).bfloat16().float().transpose(2, 3) for _ in range(3)]
    shared = {
        "ssm": normal(slots, L, H, HEAD_DIM, HEAD_DIM).transpose(0, 1),
        "cs_q": caches[0],
        "cs_k": caches[1],
        "cs_v": caches[2],
        "slots": torch.randperm(slots, generator=gen)[: shape.requests].to(torch.int32),
        "counts": torch.randint(0, M + 1, (shape.requests,), generator=gen, dtype=torch.int32),
    }
    return shared, normal(slots, L, 3 * D, CONV_WIDTH - 1).bfloat16().transpose(0, 1)


def make_inputs(shape: CommitShape, *, seed: int = 0, device: str = "cpu") -> CommitInputs:
    """Arguments of `kda_commit_pending` with filled pools."""
    gen = torch.Generator().manual_seed(seed)
    size = (shape.layers, shape.requests + 1, 3, shape.num_spec, shape.heads, HEAD_DIM)
    records = torch.randn(size, generator=gen)
    records[:, :, 2] = records[:, :, 2].abs().clamp(max=1)
    shared, conv_pool = layer_fields(shape, gen)
    return CommitInputs(**shared, conv_pool=conv_pool, state_tok=records).copy(device)
