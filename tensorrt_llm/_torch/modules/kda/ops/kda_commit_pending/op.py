# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_commit_pending`: apply accepted drafts to the states of all layers, at a suspend or a move."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import DraftCache, check_layers
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger

HEAD_DIM = 128


def kda_commit_pending(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, state_tok: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Replay the first P records of each slot into its states, and copy its conv window to the pool.

    L layers, n requests. One layer's tensors serve with `x.unsqueeze(0)`.

    Args:
        ssm: [L, pool, H, V, K] fp32, any layer and slot stride; conv_pool: [L, pool, 3 D, W - 1], q | k | v.
        cs_q, cs_k, cs_v: [L, pool, D, W - 1 + M], equal strides; state_tok: [L, pool, 3, M, H, K] fp32.
        slots: [n] int32, distinct, -1 skips. counts: [n] int32, P per REQUEST, clamped to [0, M].

    Mutates ssm and conv_pool of the slots named: S = fma(decay, S, vn bk) record by record, bit for bit as
    the next verify round would; conv columns P .. P + W - 2. The caller zeroes the pending counts.

    Raises ValueError for shapes or dtypes outside the above.
    """
    H, K = ssm.shape[-3], ssm.shape[-1]
    M = cs_q.shape[-1] - conv_pool.shape[-1]
    drafts = (DraftCache("state_tok", state_tok, (3, M, H, K), 2),)
    check_layers("kda_commit_pending", ssm, conv_pool, (cs_q, cs_k, cs_v), drafts, slots, counts)
    if slots.numel() == 0:
        return
    selection = select(ENTRY, ssm.device)
    run = selection.run
    if selection.choice.name != "torch" and ssm.shape[-1] != HEAD_DIM:
        logger.info_once(
            f"kda_commit_pending runs its torch reference: head width {ssm.shape[-1]} is not 128"
        )
        run = ENTRY.reference
    run(ssm, conv_pool, cs_q, cs_k, cs_v, state_tok, slots, counts)


torch.library.custom_op("trtllm::kda_commit_pending", kda_commit_pending, mutates_args=("ssm", "conv_pool"))
