# SPDX-License-Identifier: Apache-2.0
"""`kda_promote` in Triton: every layer and part of a request's state in one launch, any head width."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _shift_window(cache, column_stride, channels, count, mask, COLUMNS: tl.constexpr):
    """Columns `count` .. to columns 0 ..; a column is read before it is written, by the same thread."""
    for column in tl.static_range(COLUMNS):
        values = tl.load(cache + (count + column) * column_stride + channels, mask=mask)
        tl.store(cache + column * column_stride + channels, values, mask=mask)


@triton.jit
def _promote_kernel(
    ssm, cs_q, cs_k, cs_v, intermediate, slots, counts,
    ssm_layer, ssm_slot, cache_layer, cache_slot, cache_column, kept_layer, kept_slot, kept_draft,
    slots_stride, counts_stride, drafts, state_elements, channels,
    ELEMENTS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, layer, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(slots + n * slots_stride).to(tl.int64)
    p = tl.minimum(tl.load(counts + n * counts_stride), drafts)
    if slot >= 0 and p > 0:
        at = part * ELEMENTS + tl.arange(0, ELEMENTS)
        inside = at < state_elements
        kept = intermediate + layer * kept_layer + slot * kept_slot + (p - 1).to(tl.int64) * kept_draft
        values = tl.load(kept + at, mask=inside)
        tl.store(ssm + layer * ssm_layer + slot * ssm_slot + at, values, mask=inside)
        ch = part * CHANNELS + tl.arange(0, CHANNELS)
        base = layer * cache_layer + slot * cache_slot
        _shift_window(cs_q + base, cache_column, ch, p, ch < channels, COLUMNS)
        _shift_window(cs_k + base, cache_column, ch, p, ch < channels, COLUMNS)
        _shift_window(cs_v + base, cache_column, ch, p, ch < channels, COLUMNS)


def kda_promote_triton(
    ssm: Tensor, cs_q: Tensor, cs_k: Tensor, cs_v: Tensor, intermediate: Tensor, slots: Tensor, counts: Tensor
) -> None:
    """Same arguments and mutations as the op; the three conv caches share their strides."""
    elements, channels, drafts = ssm[0, 0].numel(), cs_q.shape[2], intermediate.shape[2]
    parts = triton.cdiv(elements, BLOCK)
    _promote_kernel[(slots.shape[0], ssm.shape[0], parts)](
        ssm, cs_q, cs_k, cs_v, intermediate, slots, counts,
        ssm.stride(0), ssm.stride(1), cs_q.stride(0), cs_q.stride(1), cs_q.stride(3),
        *intermediate.stride()[:3], slots.stride(0), counts.stride(0), drafts, elements, channels,
        ELEMENTS=BLOCK, CHANNELS=triton.next_power_of_2(triton.cdiv(channels, parts)),
        COLUMNS=cs_q.shape[-1] - drafts, num_warps=4,
    )  # fmt: skip
