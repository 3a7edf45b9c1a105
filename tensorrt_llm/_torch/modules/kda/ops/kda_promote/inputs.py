# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_promote`, for tests and benchmarks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.inputs import (
    HEAD_DIM,
    CommitShape,
    LayerInputs,
    layer_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteInputs(LayerInputs):
    """Arguments of the op."""

    intermediate: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        """In the op's order."""
        return (self.ssm, self.cs_q, self.cs_k, self.cs_v, self.intermediate, self.slots, self.counts)

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes."""
        return {name: getattr(self, name) for name in ("ssm", "cs_q", "cs_k", "cs_v")}


def make_inputs(shape: CommitShape, *, seed: int = 0, device: str = "cpu") -> PromoteInputs:
    """Arguments with filled pools; SSM states interleave the layers of a slot, as in the storage."""
    gen = torch.Generator().manual_seed(seed)
    size = (shape.layers, shape.requests + 1, shape.num_spec, shape.heads, HEAD_DIM, HEAD_DIM)
    states = torch.randn(size, generator=gen)
    shared, _ = layer_fields(shape, gen)
    return PromoteInputs(**shared, intermediate=states).copy(device)
