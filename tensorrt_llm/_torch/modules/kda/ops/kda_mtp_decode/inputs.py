# SPDX-License-Identifier: Apache-2.0
"""Random arguments of `kda_mtp_decode`, for tests and benchmarks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.inputs import (
    HEAD_DIM,
    RoundInputs,
    VerifyShape,
    make_pending,
    move,
    shared_fields,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInputs(RoundInputs):
    """Arguments of `kda_mtp_decode`."""

    DRAFTS: ClassVar[tuple[str, ...]] = ("qkg_cache", "v_cache", "beta_cache", "pending")

    qkg_cache: Tensor
    v_cache: Tensor
    beta_cache: Tensor
    pending: Tensor


def draft_inputs(*lead: int, heads: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Caches of drafts [*lead, 3, D], [*lead, D] and [*lead, H], the last with rows padded to 16 bytes: q and
    k of length 1, log decays as the gate gives them, v and beta."""
    sizes = (*lead, heads, HEAD_DIM)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    log_decay = -5.0 * torch.sigmoid(normal(*sizes) - 2.0)
    planes = (
        normalize(normal(*sizes), dim=-1) * HEAD_DIM**-0.5,
        normalize(normal(*sizes), dim=-1),
        log_decay,
    )
    beta = torch.sigmoid(normal(*lead, -(-heads // 4) * 4))[..., :heads]
    return torch.stack([x.flatten(-2) for x in planes], dim=-2), normal(*lead, heads * HEAD_DIM), beta


def make_inputs(
    shape: VerifyShape, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    conv_dtype: torch.dtype = torch.float32,
) -> ReplayInputs:  # fmt: skip
    """Arguments with every pool filled and pending counts in [0, M]."""
    gen = torch.Generator().manual_seed(seed)
    qkg, v, beta = draft_inputs(shape.pool_slots, shape.num_spec, heads=shape.heads, generator=gen)
    shared = shared_fields(shape, gen, dtype, conv_dtype)
    inputs = ReplayInputs(
        **shared, qkg_cache=qkg, v_cache=v, beta_cache=beta, pending=make_pending(shape, gen)
    )
    return move(inputs, device)
