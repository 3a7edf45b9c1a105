# SPDX-License-Identifier: Apache-2.0
"""`kda_commit_replay` in Triton: every layer, head and block of state rows of a request in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton_round import replay_inputs
from tensorrt_llm._torch.modules.kda.ops.kda_commit_pending.triton import BLOCK_ROWS, copy_windows


@triton.jit
def _commit_kernel(
    ssm, conv_pool, cs_q, cs_k, cs_v, qkg_cache, v_cache, beta_cache, slots, counts,
    ssm_layer, ssm_slot, conv_layer, conv_slot, conv_channel, conv_column, cache_layer, cache_slot,
    cache_column, qkg_layer, qkg_slot, qkg_draft, v_layer, v_slot, v_draft, beta_layer, beta_slot, beta_draft,
    slots_stride, counts_stride, drafts,
    HEADS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, layer = tl.program_id(0), (tl.program_id(1) // HEADS).to(tl.int64)
    h, block = tl.program_id(1) % HEADS, tl.program_id(2)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    if slot >= 0:
        p = tl.minimum(tl.maximum(tl.load(counts + n * counts_stride), 0), drafts)
        ch = tl.arange(0, K)
        values = block * ROWS + tl.arange(0, ROWS)
        if p > 0:
            state = (
                ssm + layer * ssm_layer + slot * ssm_slot + h * (K * K) + values[:, None] * K + ch[None, :]
            )
            qkg = qkg_cache + layer * qkg_layer + slot * qkg_slot + h * K
            v = v_cache + layer * v_layer + slot * v_slot + h * K
            beta = beta_cache + layer * beta_layer + slot * beta_slot + h
            s = replay_inputs(
                tl.load(state), qkg, qkg_draft, HEADS * K, v, v_draft, beta, beta_draft, ch, values, p
            )
            tl.store(state, s)
        if block == 0:
            pool = conv_pool + layer * conv_layer + slot * conv_slot + h * K * conv_channel
            at = layer * cache_layer + slot * cache_slot + h * K
            copy_windows(
                pool, conv_channel, conv_column, cs_q + at, cs_k + at, cs_v + at, cache_column, p, ch,
                HEADS * K, COLUMNS,
            )  # fmt: skip


def kda_commit_replay_triton(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, qkg_cache: Tensor,
    v_cache: Tensor, beta_cache: Tensor, slots: Tensor, counts: Tensor,
) -> None:  # fmt: skip
    """Same arguments and mutations as the op."""
    L, _, H, V, K = ssm.shape
    _commit_kernel[(slots.shape[0], L * H, V // BLOCK_ROWS)](
        ssm, conv_pool, cs_q, cs_k, cs_v, qkg_cache, v_cache, beta_cache, slots, counts,
        ssm.stride(0), ssm.stride(1), *conv_pool.stride(), cs_q.stride(0), cs_q.stride(1), cs_q.stride(3),
        *qkg_cache.stride()[:3], *v_cache.stride()[:3], *beta_cache.stride()[:3],
        slots.stride(0), counts.stride(0), v_cache.shape[2],
        HEADS=H, K=K, ROWS=BLOCK_ROWS, COLUMNS=conv_pool.shape[-1], num_warps=4,
    )  # fmt: skip
