# SPDX-License-Identifier: Apache-2.0
"""An opened storage with its sizes and views: what can be asked of a cache without changing it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike, SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import (
    AttentionSizing,
    CacheLimits,
    LocalLayers,
    Role,
    gpu_quota_bytes,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.stats import KvCacheStats
from tensorrt_llm._torch.pyexecutor.kv_cache.storage_builder import (
    agreed_quota_bytes,
    build_storage,
    cache_tiers,
    min_over_ranks,
)
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    LayerGroupId,
    LayerId,
    StorageStatistics,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv, round_up
from tensorrt_llm.runtime.kv_cache_manager_v2.stats import LifeCycleStats

_PAGE_TABLE_MULTIPLE = 4
"""Page tables are padded to a multiple of this many pages, as TensorRT-LLM's kernels read them."""


class CacheStorage:
    """The pools of one rank and the open caches in them. Managers add what changes them.

    Questions (`get_`, `num_`, properties) change nothing.
    """

    def _note_engine(
        self,
        mapping: Mapping,
        spec_config: SpecConfigLike | None,
        stream: torch.cuda.Stream | None,
        device: str,
    ) -> None:
        self.mapping = mapping
        self.spec_config = spec_config
        self.device = torch.device(device)
        self._stream = (stream or torch.cuda.current_stream()) if self.device.type == "cuda" else None

    def _note_role(self, is_draft: bool, is_disagg: bool, is_estimating_kv_cache: bool) -> None:
        self.is_draft = is_draft
        self.is_disagg = is_disagg
        self.is_estimating_kv_cache = is_estimating_kv_cache

    def _open(
        self,
        kv_cache_config: KvCacheConfigLike,
        sizing: AttentionSizing,
        num_reserved_index_slots: int,
        enable_stats: bool,
    ) -> None:
        """Build the storage for `sizing` and note what its callers read."""
        self.kv_cache_config = kv_cache_config
        self.kv_cache_type = sizing.kv_type
        self.enable_block_reuse = kv_cache_config.enable_block_reuse
        self._sizing = sizing
        limits, layers = sizing.limits, sizing.layers
        self.tokens_per_block = limits.tokens_per_block
        self.max_batch_size = limits.max_batch_size
        self.max_num_tokens = limits.max_num_tokens
        self.pp_layers = list(layers.pp_layers)
        self.num_local_layers = len(layers.pp_layers)
        self.layer_offsets = layers.layer_offsets
        quota = agreed_quota_bytes(sizing, gpu_quota_bytes(kv_cache_config, sizing))
        tiers = cache_tiers(kv_cache_config, quota, self.mapping, self.device.type)
        config = sizing.build_config(
            sizing.base_config(kv_cache_config, tiers, enable_stats), kv_cache_config
        )
        self.impl, self.kv_cache_manager_py_config = build_storage(config, self.device.type)
        self.kv_cache_map: dict[int, _KVCache] = {}
        self._attention_group = self._first_attention_group()
        self.max_seq_len = self._fitting_seq_len(limits)
        self.max_blocks_per_seq = round_up(
            cdiv(self.max_seq_len + limits.headroom_tokens, self.tokens_per_block), _PAGE_TABLE_MULTIPLE
        )
        residents = limits.max_batch_size * self.mapping.pp_size * (2 if self.is_disagg else 1)
        self.max_num_sequences = residents + num_reserved_index_slots
        self._buffers: dict[int, Tensor] = {}

    def _first_attention_group(self) -> LayerGroupId | None:
        shapes = self._sizing.layers.shapes
        local = next((i for i, shape in enumerate(shapes) if shape.num_kv_heads), None)
        return None if local is None else self.impl.get_layer_group_id(LayerId(local))

    def _fitting_seq_len(self, limits: CacheLimits) -> int:
        """max_seq_len, reduced to what all attention pages together hold."""
        if self._attention_group is None:
            return limits.max_seq_len
        held = self.num_attention_pages * self.tokens_per_block
        fitting = min(limits.max_seq_len, min_over_ranks(held))
        if fitting < limits.max_seq_len:
            logger.warning(
                f"max_seq_len is reduced from {limits.max_seq_len} to {fitting}, which is all the KV cache "
                "holds"
            )
        return fitting

    @property
    def layers(self) -> LocalLayers:
        """This rank's layers."""
        return self._sizing.layers

    @property
    def num_attention_pages(self) -> int:
        """Pages of the attention pool on the GPU; 0 on a rank without attention layers."""
        return 0 if self._attention_group is None else self._attention_statistics().total

    @property
    def blocks_in_primary_pool(self) -> int:
        return self.num_attention_pages

    def get_num_free_blocks(self) -> int:
        """Attention pages that a request can have now, evicting what may be dropped or offloaded."""
        return 0 if self._attention_group is None else self._attention_statistics().available

    def get_num_available_tokens(self, max_num_draft_tokens: int = 0) -> int:
        """Tokens that one request could still cache, less the drafts of its last step."""
        return max(0, self.get_num_free_blocks() * self.tokens_per_block - max_num_draft_tokens)

    def get_max_resource_count(self) -> int:
        """1: whether a request fits is asked by allocating."""
        return 1

    def get_layer_bytes_per_token(self, local_layer_idx: int) -> int:
        """Bytes per token of one local layer's attention cache."""
        return self._sizing.layer_bytes_per_token(local_layer_idx)

    def get_buffers(self, layer_idx: int, kv_layout: str = "NHD") -> Tensor:
        """Pages of global layer `layer_idx`: [pages, kv_factor, tokens_per_block, heads, head_dim] over the
        pool's memory.

        Pages are indexed by what `get_batch_cache_indices` returns. "HND" swaps the token and head axes of
        the view.
        """
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = self._page_view(layer_idx)
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout is {kv_layout!r}; it must be 'NHD' or 'HND'")
        view = self._buffers[layer_idx]
        return view if kv_layout == "NHD" else view.transpose(2, 3)

    def _page_view(self, layer_idx: int) -> Tensor:
        local = self.layer_offsets[layer_idx]
        shape = self.layers.shapes[local]
        if not shape.num_kv_heads:
            raise ValueError(f"layer {layer_idx} is not an attention layer and has no pages")
        page = (self.kv_cache_type.kv_factor, self.tokens_per_block, shape.num_kv_heads, shape.head_dim)
        return self.impl.get_buffer_view(LayerId(local), Role.KEY, shape.dtype, page)

    def get_batch_cache_indices(
        self, request_ids: Sequence[int], layer_idx: int | None = None
    ) -> list[list[int]]:
        """Page ids of each request in token order, for `layer_idx`, or for all where all attend in full."""
        group = self._group_of(layer_idx)
        return [
            list(self.kv_cache_map[request_id].get_base_page_indices(group)) for request_id in request_ids
        ]

    def _group_of(self, layer_idx: int | None) -> LayerGroupId:
        if layer_idx is not None:
            return self.impl.get_layer_group_id(LayerId(self.layer_offsets[layer_idx]))
        if self._attention_group is None:
            raise ValueError("this rank has no attention layer and so no pages")
        return self._attention_group

    def _await_cache_stream(self) -> None:
        """Let the current stream's work come after the copies that resumes have put on the caches' stream."""
        if self._stream is not None and torch.cuda.current_stream() != self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def _on_cache_stream(self) -> Iterator[None]:
        """Run work on the caches' stream, after what the current stream was given and before what it will be.

        The storage orders the copies and moves of pages against that stream.
        """
        if self._stream is None or torch.cuda.current_stream() == self._stream:
            yield
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def get_kv_cache_stats(self) -> KvCacheStats:
        """Counts of attention pages."""
        total, free = self.num_attention_pages, self.get_num_free_blocks()
        counts = LifeCycleStats()
        if self._attention_group is not None:
            counts = self.impl.get_total_stats()[self._attention_group]
        return KvCacheStats(
            max_num_blocks=total,
            free_num_blocks=free,
            used_num_blocks=total - free,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=counts.alloc_blocks,
            reused_blocks=counts.reused_blocks,
            missed_blocks=counts.missed_blocks,
        )

    def _attention_statistics(self) -> StorageStatistics:
        assert self._attention_group is not None
        return self._group_statistics(self._attention_group)

    def _group_statistics(self, group: LayerGroupId) -> StorageStatistics:
        index = next(
            desc.pool_group_index for desc in self.impl.pool_group_descs if group in desc.life_cycles
        )
        return self.impl.get_storage_statistics()[index]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the GPU tier's pools, in whole grains."""
        return sum(
            size * statistics.total
            for statistics in self.impl.get_storage_statistics()
            for size in statistics.slot_sizes
        )

    @property
    def num_state_slots(self) -> int:
        """Recurrent state slots on the GPU: none for attention alone."""
        return 0

    @property
    def side_bytes(self) -> int:
        """Bytes beside the storage's pools: none for attention."""
        return 0

    @property
    def side_bytes_in_quota(self) -> int:
        """The part of `side_bytes` that the quota pays for."""
        return 0

    @property
    def keeps_kda_token_states(self) -> bool:
        """Whether drafts' records are kept: never for attention alone."""
        return False
