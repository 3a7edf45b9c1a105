# SPDX-License-Identifier: Apache-2.0
"""From a model's layers and the user's limits to bytes and to the storage's configuration.

Pure: no torch memory, no state.

`AttentionSizing` answers for a model of attention layers; the hybrid manager's sizing extends it by recurrent
states.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    AttentionShape,
    CacheType,
    KvCacheConfigLike,
    SpecConfigLike,
    check_dtype,
)
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv
from tensorrt_llm.runtime.kv_cache_manager_v2._types import LayerId
from tensorrt_llm.runtime.kv_cache_manager_v2.config import CacheTierConfig, LayerConfig

UNLIMITED_TOKENS = 1 << 62
"""What a quota holds when no layer's cache grows with the tokens."""


class Role:
    """Names of an attention layer's buffers in the storage."""

    KEY = "key"
    VALUE = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Limits of the engine, in tokens and requests.

    `headroom_tokens`: what one generation step can add to a request.
    """

    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    tokens_per_block: int
    headroom_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_batch_size", "max_num_tokens", "tokens_per_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def max_capacity_tokens(self) -> int:
        """Tokens of the longest request's pages: its sequence, and the drafts of its last round."""
        return self.max_seq_len + self.headroom_tokens


def cache_limits(
    max_seq_len: int,
    max_batch_size: int,
    max_num_tokens: int,
    tokens_per_block: int,
    max_beam_width: int,
    spec_config: SpecConfigLike | None,
) -> CacheLimits:
    """The engine's limits as one value. ValueError for a beam, or a limit below 1."""
    if max_beam_width != 1:
        raise ValueError(f"max_beam_width is {max_beam_width}; the V2 cache has one beam: set it to 1")
    return CacheLimits(
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        tokens_per_block=tokens_per_block,
        headroom_tokens=1 if spec_config is None else spec_config.tokens_per_gen_step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayers:
    """This rank's layers in order: global indices, attention shapes (0 heads = no attention cache), windows
    (None = all).

    `recurrent` are the local ids of the layers that keep a recurrent state.
    """

    pp_layers: tuple[int, ...]
    shapes: tuple[AttentionShape, ...]
    windows: tuple[int | None, ...]
    recurrent: tuple[int, ...] = ()

    @property
    def layer_offsets(self) -> dict[int, int]:
        """Global layer index -> local layer id."""
        return {layer: local for local, layer in enumerate(self.pp_layers)}


def _per_layer(name: str, value: int | Sequence[int | None], num_layers: int) -> list[int]:
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
        return [value] * num_layers
    if len(value) != num_layers:
        raise ValueError(
            f"{name} has {len(value)} entries for {num_layers} layers; give one per layer, or one number"
        )
    entries = [entry or 0 for entry in value]
    if min(entries, default=0) < 0:
        raise ValueError(f"{name} has a negative entry: {entries}")
    return entries


def local_layers(
    *,
    num_layers: int,
    num_kv_heads: int | Sequence[int | None],
    head_dim: int | Sequence[int],
    dtype: torch.dtype,
    mapping: Mapping,
    layer_mask: Sequence[bool] | None = None,
    recurrent_mask: Sequence[bool] | None = None,
    num_recurrent_layers: int = 0,
    max_attention_window: Sequence[int] | None = None,
    max_seq_len: int,
) -> LocalLayers:
    """The layers of this pipeline rank that keep something: attention layers by `layer_mask`, others by
    `recurrent_mask`.

    Masks are per global layer; without `layer_mask` all `num_layers` layers (less the recurrent ones) are
    attention. Heads are split over the tensor ranks, unless attention is data parallel.
    `max_attention_window` repeats over the layers; a window of max_seq_len or more is no window. Raises
    ValueError where lengths disagree.
    """
    check_dtype("dtype", dtype)
    total = len(layer_mask) if layer_mask is not None else len(recurrent_mask or ()) or num_layers
    recurrent = list(recurrent_mask) if recurrent_mask is not None else [False] * total
    attention = list(layer_mask) if layer_mask is not None else [not r for r in recurrent]
    if len(recurrent) != total:
        raise ValueError(
            f"layer_mask has {total} entries and mamba_layer_mask {len(recurrent)}; they must be equally long"
        )
    if sum(recurrent) != num_recurrent_layers:
        raise ValueError(
            f"mamba_num_layers is {num_recurrent_layers}, but mamba_layer_mask names {sum(recurrent)} layers"
        )
    if sum(attention) != num_layers and total != num_layers:
        raise ValueError(
            f"num_layers is {num_layers}, but layer_mask names {sum(attention)} attention layers of {total}"
        )
    # A model without attention layers has no head width to give.
    heads = _per_layer("num_kv_heads", num_kv_heads, total) if any(attention) else [0] * total
    dims = _per_layer("head_dim", head_dim, total) if any(attention) else [0] * total
    split = 1 if mapping.enable_attention_dp else mapping.tp_size
    local = [layer for layer in mapping.pp_layers(total) if attention[layer] or recurrent[layer]]
    windows = max_attention_window or (max_seq_len,)
    return LocalLayers(
        pp_layers=tuple(local),
        shapes=tuple(
            AttentionShape(
                num_kv_heads=cdiv(heads[layer], split) if attention[layer] else 0,
                head_dim=dims[layer],
                dtype=dtype,
            )
            for layer in local
        ),
        windows=tuple(
            window if window < max_seq_len else None
            for window in (windows[layer % len(windows)] for layer in local)
        ),
        recurrent=tuple(i for i, layer in enumerate(local) if recurrent[layer]),
    )


class CacheCost(NamedTuple):
    """Bytes of quota for t cached tokens: intercept_bytes + slope_bytes * t."""

    slope_bytes: float
    intercept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizing:
    """Bytes and storage configuration of a rank's attention layers."""

    layers: LocalLayers
    kv_type: CacheType
    limits: CacheLimits
    max_util_for_resume: float

    def __post_init__(self) -> None:
        if not isinstance(self.kv_type, CacheType):
            raise ValueError(f"kv_cache_type is {self.kv_type!r}; it must be a CacheType")
        if not 0 < self.max_util_for_resume <= 1:
            raise ValueError(
                f"kv_cache_config.max_util_for_resume is {self.max_util_for_resume}; it must be in (0, 1]"
            )

    def layer_bytes_per_token(self, local_layer: int) -> int:
        """Bytes per token of one local layer's attention cache; 0 for a recurrent layer."""
        return self.layers.shapes[local_layer].bytes_per_token(self.kv_type.kv_factor)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of all local attention layers."""
        return sum(map(self.layer_bytes_per_token, range(len(self.layers.shapes))))

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.limits.tokens_per_block

    def quota_from_max_tokens(self, max_tokens: int) -> int:
        """Bytes for `max_tokens` cached tokens.

        A windowed layer pays for one step's context and every request's window.
        """
        context = min(max_tokens, self.limits.max_num_tokens)
        return sum(
            self.layer_bytes_per_token(local)
            * (max_tokens if window is None else context + self.limits.max_batch_size * window)
            for local, window in enumerate(self.layers.windows)
        )

    def max_tokens_from_quota(self, quota_bytes: int) -> int:
        """The most tokens whose quota is at most `quota_bytes`; 0 if none fit, UNLIMITED_TOKENS if nothing
        grows.
        """
        return largest_fitting(self.quota_from_max_tokens, quota_bytes)

    def cost(self) -> CacheCost:
        """The line through the attention layers' quota from no token to a full batch of max_seq_len."""
        far = self.limits.max_batch_size * self.limits.max_seq_len
        intercept = AttentionSizing.quota_from_max_tokens(self, 0)
        slope = (AttentionSizing.quota_from_max_tokens(self, far) - intercept) / far
        return CacheCost(slope_bytes=slope, intercept_bytes=intercept)

    def minimum_quota(self) -> int:
        """The smallest quota with which a request can run at all: one page."""
        return self.bytes_per_page

    @property
    def free_side_bytes_per_slot(self) -> int:
        """Bytes beside the pools that the quota does not pay for, per state slot."""
        return 0

    def num_state_slots(self, built: KVCacheManagerConfig) -> int:
        """State slots of a storage built with this configuration, as `plan_config` gives it."""
        return 0

    @property
    def has_states(self) -> bool:
        """Whether a local layer keeps a recurrent state."""
        return False

    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """One storage layer per local attention layer, numbered by local id."""
        tokens = self.limits.tokens_per_block
        roles = (Role.KEY,) if self.kv_type.kv_factor == 1 else (Role.KEY, Role.VALUE)
        return tuple(
            AttentionLayerConfig(
                layer_id=LayerId(local),
                buffers=[
                    BufferConfig(role=role, size=shape.bytes_per_token_and_role * tokens) for role in roles
                ],
                sliding_window_size=window,
            )
            for local, (shape, window) in enumerate(zip(self.layers.shapes, self.layers.windows, strict=True))
            if shape.num_kv_heads
        )

    def base_config(
        self, kv_cache_config: KvCacheConfigLike, cache_tiers: Sequence[CacheTierConfig], enable_stats: bool
    ) -> KVCacheManagerConfig:
        """The storage's configuration for the attention layers alone."""
        avg = kv_cache_config.avg_seq_len
        explicit = kv_cache_config.pool_ratio is None and avg is not None
        return KVCacheManagerConfig(
            tokens_per_block=self.limits.tokens_per_block,
            cache_tiers=cache_tiers,
            layers=self.layer_configs(),
            max_util_for_resume=self.max_util_for_resume,
            enable_partial_reuse=kv_cache_config.enable_partial_reuse,
            constraints=self._constraints() if explicit else (),
            typical_step=self._typical_step(avg) if explicit and avg is not None else None,
            initial_pool_ratio=kv_cache_config.pool_ratio,
            # A recurrent state exists at one token count only, so a commit keeps one snapshot of it.
            commit_min_snapshot=self.has_states
            or (
                kv_cache_config.enable_block_reuse
                and kv_cache_config.block_reuse_config.policy != "all_reusable"
            ),
            enable_stats=enable_stats,
            text_only=True,
        )

    def plan_config(
        self, config: KVCacheManagerConfig, kv_cache_config: KvCacheConfigLike
    ) -> KVCacheManagerConfig:
        """The configuration the storage is built with: `config` itself where there is attention alone."""
        return config

    def build_config(
        self, config: KVCacheManagerConfig, kv_cache_config: KvCacheConfigLike
    ) -> KVCacheManagerConfig:
        """`plan_config`, with what is worth a log line."""
        return self.plan_config(config, kv_cache_config)

    def _typical_step(self, avg_seq_len: int) -> BatchDesc:
        limits = self.limits
        context = limits.max_num_tokens + limits.headroom_tokens
        capacity = avg_seq_len + limits.headroom_tokens
        generations = [KVCacheDesc(capacity=capacity, history_length=avg_seq_len)] * (
            limits.max_batch_size - 1
        )
        return BatchDesc([KVCacheDesc(capacity=context, history_length=0), *generations])

    def _constraints(self) -> tuple[BatchDesc, ...]:
        limits = self.limits
        longest = KVCacheDesc(capacity=limits.max_capacity_tokens, history_length=limits.max_seq_len)
        minimal = [KVCacheDesc(capacity=limits.headroom_tokens, history_length=0)] * (
            limits.max_batch_size - 1
        )
        context = KVCacheDesc(capacity=limits.max_num_tokens, history_length=0)
        return (BatchDesc([longest, *minimal]), BatchDesc([context]))


def largest_fitting(cost_of: Callable[[int], int], budget: int) -> int:
    """The largest number whose non-decreasing cost is within the budget; 0 if none, UNLIMITED_TOKENS if all
    are.
    """
    if cost_of(0) > budget:
        return 0
    high = 1
    while cost_of(high) <= budget:
        if high >= UNLIMITED_TOKENS:
            return UNLIMITED_TOKENS
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost_of(middle) <= budget else (low, middle)
    return low


def gpu_quota_bytes(kv_cache_config: KvCacheConfigLike, sizing: AttentionSizing) -> int:
    """The GPU quota: the lower of max_gpu_total_bytes and what max_tokens need.

    ValueError where neither is set.

    Tokens are divided by max_util_for_resume (in double, as given), so that they can be resident and still be
    resumed.
    """
    quota = kv_cache_config.max_gpu_total_bytes if kv_cache_config.max_gpu_total_bytes > 0 else None
    if kv_cache_config.max_tokens is not None:
        tokens = kv_cache_config.max_tokens
        if tokens < 1:
            raise ValueError(
                f"kv_cache_config.max_tokens is {tokens}; give a positive number of tokens, or leave it out"
            )
        wanted = math.ceil(sizing.quota_from_max_tokens(tokens) / kv_cache_config.max_util_for_resume)
        quota = wanted if quota is None else min(quota, wanted)
    if quota is None:
        raise ValueError(
            "kv_cache_config sets neither max_tokens nor max_gpu_total_bytes: set one of them, or let "
            "KvCacheCreator derive max_gpu_total_bytes from free_gpu_memory_fraction"
        )
    return quota
