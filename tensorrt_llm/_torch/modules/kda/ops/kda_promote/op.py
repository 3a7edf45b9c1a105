# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_promote`: bring the slots of all layers to their accepted drafts, from the states kept."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import DraftCache, check_layers
from tensorrt_llm._torch.modules.kda.ops.kda_promote.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.selection import select


def kda_promote(
    ssm: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, intermediate: Tensor, slots: Tensor, counts: Tensor
) -> None:
    """Copy the state after the last of the P accepted drafts into place, with its conv window.

    L layers, n requests, after a round of `kda_intermediate_verify` whose acceptance is known.

    Args:
        ssm: [L, pool, H, V, K] fp32, any layer and slot stride.
        cs_q, cs_k, cs_v: [L, pool, D, W - 1 + M], equal strides, channels contiguous.
        intermediate: [L, pool, M, H, V, K] fp32.
        slots: [n] int32, distinct, -1 skips. counts: [n] int32, P per REQUEST, clamped to [0, M].

    Mutates for the slots named whose P is not 0: ssm, conv columns 0 .. W - 2, which become columns
    P .. P + W - 2. Nothing is pending afterwards. No kernel makes the host wait.

    Raises ValueError for shapes or dtypes outside the above.
    """
    H, V, K = ssm.shape[-3:]
    M = intermediate.shape[2]
    drafts = (DraftCache("intermediate", intermediate, (M, H, V, K), 3),)
    check_layers("kda_promote", ssm, None, (cs_q, cs_k, cs_v), drafts, slots, counts)
    if slots.numel():
        select(ENTRY, ssm.device).run(ssm, cs_q, cs_k, cs_v, intermediate, slots, counts)


torch.library.custom_op("trtllm::kda_promote", kda_promote, mutates_args=("ssm", "cs_q", "cs_k", "cs_v"))
