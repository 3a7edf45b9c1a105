# SPDX-License-Identifier: Apache-2.0
"""`kda_promote` in torch: the definition."""

from torch import Tensor


def kda_promote_reference(
    ssm: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, intermediate: Tensor, slots: Tensor, counts: Tensor
) -> None:
    """Same arguments and mutations as the op."""
    drafts = intermediate.shape[2]
    window = cs_q.shape[-1] - drafts
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        P = min(count, drafts)
        if slot < 0 or P <= 0:
            continue
        ssm[:, slot] = intermediate[:, slot, P - 1]
        for cache in (cs_q, cs_k, cs_v):
            cache[:, slot, :, :window] = cache[:, slot, :, P : P + window].clone()
