# SPDX-License-Identifier: Apache-2.0
"""What a KDA layer's slots hold, as a view, and the extended windows of raw conv inputs in it.

Shapes: N slots, n of them named, H heads, K = V head width, D = H*K, W conv width, M drafts.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class KdaLayerCache(Protocol):
    """One layer's view of the slots; upstream's attribute names. Tensors a scheme does not use are None.

    temporal [N, H, V, K] fp32 with any slot stride, conv [N, 3D, W-1] in the model's dtype (q | k | v, oldest
    first), prev_num_accepted_tokens int32 [N] (P, shared by all layers), kda_conv_q/k/v [N, D, W-1+M] fp32 or
    bf16. The view of all layers at once has a layer axis before each of these but the counts.
    """

    @property
    def conv(self) -> Tensor: ...
    @property
    def temporal(self) -> Tensor: ...
    @property
    def prev_num_accepted_tokens(self) -> Any: ...
    @property
    def kda_conv_q(self) -> Any: ...
    @property
    def kda_conv_k(self) -> Any: ...
    @property
    def kda_conv_v(self) -> Any: ...
    @property
    def kda_state_tok(self) -> Any: ...
    @property
    def kda_qkg_cache(self) -> Any: ...
    @property
    def kda_v_cache(self) -> Any: ...
    @property
    def kda_beta_cache(self) -> Any: ...
    @property
    def intermediate_ssm(self) -> Any: ...


def _window_columns(cache: KdaLayerCache) -> tuple[Tensor, ...]:
    """The extended windows of q, k and v as views [.., N * columns, D], one row a column."""
    windows = (cache.kda_conv_q, cache.kda_conv_k, cache.kda_conv_v)
    return tuple(w.mT.view(*w.shape[:-3], -1, w.shape[-2]) for w in windows)


def load_windows(cache: KdaLayerCache, slots: Tensor, pending: Tensor, columns: int) -> Tensor:
    """Raw inputs [.., n, columns, 3D] before the next tokens: columns P..P+columns-1 of the extended windows.

    slots and pending int [n]; `..` is the layer axis of a view of all layers.
    """
    first = slots * cache.kda_conv_q.shape[-1] + pending
    rows = (first[:, None] + torch.arange(columns, device=slots.device, dtype=slots.dtype)).flatten()
    parts = [part.index_select(-2, rows) for part in _window_columns(cache)]
    return torch.cat(parts, dim=-1).unflatten(-2, (len(slots), columns))


def store_windows(cache: KdaLayerCache, slots: Tensor, window: Tensor) -> None:
    """Write raw inputs [.., n, columns, 3D] to columns 0.. of the slots' extended windows; others stay."""
    columns = window.shape[-2]
    first = slots.long() * cache.kda_conv_q.shape[-1]
    rows = (first[:, None] + torch.arange(columns, device=slots.device)).flatten()
    for target, part in zip(_window_columns(cache), window.chunk(3, dim=-1), strict=True):
        target.index_copy_(-2, rows, part.flatten(-3, -2).to(target.dtype))


def sync_window(cache: KdaLayerCache, slot_ids: Sequence[int]) -> None:
    """Copy the committed window of `cache.conv` into columns 0..W-2 of the extended windows (after a prefill
    chunk)."""
    columns = cache.conv.shape[-1]
    for slot in slot_ids:
        parts = cache.conv[slot].chunk(3)
        for target, part in zip((cache.kda_conv_q, cache.kda_conv_k, cache.kda_conv_v), parts, strict=True):
            target[slot, :, :columns] = part
