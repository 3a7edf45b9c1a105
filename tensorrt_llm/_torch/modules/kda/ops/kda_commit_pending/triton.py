# SPDX-License-Identifier: Apache-2.0
"""`kda_commit_pending` in Triton: every layer, head and block of state rows of a request in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from tensorrt_llm._torch.modules.kda.ops.k3_kda_verify.triton import replay

BLOCK_ROWS = 32


@triton.jit
def _copy_window(pool, column_stride, cache, cache_column, first, channels, COLUMNS: tl.constexpr):
    for column in tl.static_range(COLUMNS):
        values = tl.load(cache + (first + column) * cache_column + channels)
        tl.store(pool + column * column_stride, values.to(pool.dtype.element_ty))


@triton.jit
def copy_windows(
    pool, channel_stride, column_stride, cs_q, cs_k, cs_v, cache_column, first, channels,
    D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns `first` .. of a head's conv caches to its window in the pool, q | k | v sections of D channels;
    `pool` and the caches point at the head's first channel."""
    at = pool + channels * channel_stride
    _copy_window(at, column_stride, cs_q, cache_column, first, channels, COLUMNS)
    _copy_window(at + D * channel_stride, column_stride, cs_k, cache_column, first, channels, COLUMNS)
    _copy_window(at + 2 * D * channel_stride, column_stride, cs_v, cache_column, first, channels, COLUMNS)


@triton.jit
def _commit_kernel(
    ssm, conv_pool, cs_q, cs_k, cs_v, state_tok, slots, counts,
    ssm_layer, ssm_slot, conv_layer, conv_slot, conv_channel, conv_column, cache_layer, cache_slot,
    cache_column,
    tok_layer, tok_slot, plane_stride, draft_stride, slots_stride, counts_stride, drafts,
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
            records = state_tok + layer * tok_layer + slot * tok_slot + h * K
            tl.store(state, replay(tl.load(state), records, plane_stride, draft_stride, ch, values, p))
        if block == 0:
            pool = conv_pool + layer * conv_layer + slot * conv_slot + h * K * conv_channel
            at = layer * cache_layer + slot * cache_slot + h * K
            copy_windows(
                pool, conv_channel, conv_column, cs_q + at, cs_k + at, cs_v + at, cache_column, p, ch,
                HEADS * K, COLUMNS,
            )  # fmt: skip


def kda_commit_pending_triton(
    ssm: Tensor, conv_pool: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, state_tok: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Same arguments and mutations as the op; the three conv caches share their strides."""
    L, _, H, V, K = ssm.shape
    _commit_kernel[(slots.shape[0], L * H, V // BLOCK_ROWS)](
        ssm, conv_pool, cs_q, cs_k, cs_v, state_tok, slots, counts,
        ssm.stride(0), ssm.stride(1), *conv_pool.stride(), cs_q.stride(0), cs_q.stride(1), cs_q.stride(3),
        *state_tok.stride()[:4], slots.stride(0), counts.stride(0), state_tok.shape[3],
        HEADS=H, K=K, ROWS=BLOCK_ROWS, COLUMNS=conv_pool.shape[-1], num_warps=4,
    )  # fmt: skip
