# SPDX-License-Identifier: Apache-2.0
"""`kda_commit_pending` in torch: the definition."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.recurrence import KdaRecord, apply_record


def kda_commit_pending_reference(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, state_tok: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Same arguments and mutations as the op."""
    drafts, window = state_tok.shape[3], conv_pool.shape[-1]
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        if slot < 0:
            continue
        P = min(max(count, 0), drafts)
        state = ssm[:, slot]
        for record in state_tok[:, slot, :, :P].unbind(dim=2):
            state = apply_record(state, KdaRecord(*record.unbind(dim=1)))
        ssm[:, slot] = state
        columns = [cache[:, slot, :, P : P + window] for cache in (cs_q, cs_k, cs_v)]
        conv_pool[:, slot] = torch.cat(columns, dim=1).to(conv_pool.dtype)
