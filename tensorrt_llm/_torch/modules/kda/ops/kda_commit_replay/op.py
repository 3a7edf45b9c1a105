# SPDX-License-Identifier: Apache-2.0
"""`trtllm::kda_commit_replay`: accepted drafts of the replay scheme into the states of all layers."""

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.contract import DraftCache, check_layers
from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.launch import HEAD_DIM
from tensorrt_llm._torch.modules.kda.ops.kda_commit_replay.entry import ENTRY
from tensorrt_llm._torch.modules.kda.ops.selection import select
from tensorrt_llm.logger import logger


def kda_commit_replay(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, qkg_cache: Tensor,
    v_cache: Tensor, beta_cache: Tensor, slots: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Run the first P drafts of each slot through its states, and copy its conv window to the pool.

    L layers, n requests. One layer's tensors serve with `x.unsqueeze(0)`.

    Args:
        ssm: [L, pool, H, V, K] fp32, any layer and slot stride; conv_pool: [L, pool, 3 D, W - 1], q | k | v.
        cs_q, cs_k, cs_v: [L, pool, D, W - 1 + M], equal strides, channels contiguous.
        qkg_cache: [L, pool, M, 3, D]; v_cache: [L, pool, M, D]; beta_cache: [L, pool, M, H]; fp32.
        slots: [n] int32, distinct, -1 skips. counts: [n] int32, P per REQUEST, clamped to [0, M].

    Mutates ssm and conv_pool of the slots named: the drafts' tokens one by one, as `kda_mtp_decode` replays
    them up to the rounding of sums; conv columns P .. P + W - 2. The caller zeroes the pending counts. No
    kernel makes the host wait.

    Raises ValueError for shapes or dtypes outside the above.
    """
    H, K = ssm.shape[-3], ssm.shape[-1]
    M = cs_q.shape[-1] - conv_pool.shape[-1]
    drafts = (
        DraftCache("qkg_cache", qkg_cache, (M, 3, H * K), 2),
        DraftCache("v_cache", v_cache, (M, H * K), 1),
        DraftCache("beta_cache", beta_cache, (M, H), 1),
    )
    check_layers("kda_commit_replay", ssm, conv_pool, (cs_q, cs_k, cs_v), drafts, slots, counts)
    if slots.numel() == 0:
        return
    selection = select(ENTRY, ssm.device)
    run = selection.run
    if selection.choice.name != "torch" and K != HEAD_DIM:
        logger.info_once(f"kda_commit_replay runs its torch reference: head width {K} is not {HEAD_DIM}")
        run = ENTRY.reference
    run(ssm, conv_pool, cs_q, cs_k, cs_v, qkg_cache, v_cache, beta_cache, slots, counts)


torch.library.custom_op("trtllm::kda_commit_replay", kda_commit_replay, mutates_args=("ssm", "conv_pool"))
