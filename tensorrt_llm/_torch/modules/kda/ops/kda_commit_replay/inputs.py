# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_commit_replay`, for tests and benchmarks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.inputs import (
    CommitShape,
    LayerInputs,
    layer_fields,
)
from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.inputs import draft_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReplayInputs(LayerInputs):
    """Arguments of the op."""

    conv_pool: Tensor
    qkg_cache: Tensor
    v_cache: Tensor
    beta_cache: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        """In the op's order."""
        return (
            self.ssm, self.conv_pool, self.cs_q, self.cs_k, self.cs_v, self.qkg_cache, self.v_cache,
            self.beta_cache, self.slots, self.counts,
        )  # fmt: skip

    def mutable(self) -> dict[str, Tensor]:
        """What the op writes."""
        return {"ssm": self.ssm, "conv_pool": self.conv_pool}


def make_inputs(shape: CommitShape, *, seed: int = 0, device: str = "cpu") -> CommitReplayInputs:
    """Arguments with filled pools; SSM states interleave the layers of a slot, as in the storage."""
    gen = torch.Generator().manual_seed(seed)
    shared, conv_pool = layer_fields(shape, gen)
    qkg, v, beta = draft_inputs(
        shape.layers, shape.requests + 1, shape.num_spec, heads=shape.heads, generator=gen
    )
    inputs = CommitReplayInputs(**shared, conv_pool=conv_pool, qkg_cache=qkg, v_cache=v, beta_cache=beta)
    return inputs.copy(device)
