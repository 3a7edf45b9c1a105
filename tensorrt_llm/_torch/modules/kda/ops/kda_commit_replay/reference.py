# SPDX-License-Identifier: Apache-2.0
"""`kda_commit_replay` in torch: the definition."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.kda_mtp_decode.reference import InputMemory


def kda_commit_replay_reference(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, qkg_cache: Tensor,
    v_cache: Tensor, beta_cache: Tensor, slots: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Same arguments and mutations as the op."""
    drafts, window = v_cache.shape[2], conv_pool.shape[-1]
    memories = [InputMemory(*parts) for parts in zip(qkg_cache, v_cache, beta_cache, strict=True)]
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        if slot < 0:
            continue
        P = min(max(count, 0), drafts)
        for layer, memory in enumerate(memories):
            ssm[layer, slot] = memory.replay(slot, ssm[layer, slot], P)
        columns = [cache[:, slot, :, P : P + window] for cache in (cs_q, cs_k, cs_v)]
        conv_pool[:, slot] = torch.cat(columns, dim=1).to(conv_pool.dtype)
