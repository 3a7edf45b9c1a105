# SPDX-License-Identifier: Apache-2.0
"""`KVCacheManagerV2`: gives requests their attention pages, on the V2 storage."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    CacheType,
    KvCacheConfigLike,
    SpecConfigLike,
    refuse_unsupported,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.requests import CacheBatch, CacheRequest, DummyRequest
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import (
    AttentionSizing,
    CacheLimits,
    LocalLayers,
    Role,
    cache_limits,
    gpu_quota_bytes,
    local_layers,
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
    OutOfPagesError,
    StorageStatistics,
    _KVCache,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import cdiv, round_up

HALF = torch.float16

_PAGE_TABLE_MULTIPLE = 4
"""Page tables are padded to a multiple of this many pages, as TensorRT-LLM's kernels read them."""


class KVCacheManagerV2:
    """Attention pages per request: created at the prompt's first chunk, grown step by step, freed at the end.

    Lengths are tokens. `num_kv_heads` and `head_dim` are one number or one per global layer (None: no
    attention cache); `layer_mask` says which of all layers are attention. `dtype` is the cache's element
    type. `device` "cuda" or "cpu" says where the pools live. Raises ValueError for limits or a configuration
    that cannot work, before anything is allocated.
    """

    _supports_reuse_match_backoff = True

    def __init__(
        self, kv_cache_config: KvCacheConfigLike, kv_cache_type: CacheType, *,
        num_layers: int, num_kv_heads: int | Sequence[int | None], head_dim: int | Sequence[int],
        tokens_per_block: int, max_seq_len: int, max_batch_size: int, mapping: Mapping,
        dtype: torch.dtype = HALF, spec_config: SpecConfigLike | None = None,
        layer_mask: Sequence[bool] | None = None,
        vocab_size: int | None = None, max_num_tokens: int = 8192, model_config: object | None = None,
        max_beam_width: int = 1, is_draft: bool = False, kv_connector_manager: object | None = None,
        execution_stream: torch.cuda.Stream | None = None, is_disagg: bool = False,
        enable_stats: bool = False, num_reserved_index_slots: int = 1, kv_events_config: object | None = None,
        is_estimating_kv_cache: bool = False, cold_page_codec_provider: object | None = None,
        joint_kv_cache_reuse: bool = False, device: str = "cuda",
    ) -> None:  # fmt: skip
        refuse_unsupported(
            kv_connector_manager=kv_connector_manager,
            cold_page_codec_provider=cold_page_codec_provider,
            joint_kv_cache_reuse=joint_kv_cache_reuse,
            kv_events_config=kv_events_config,
        )
        self._note_engine(mapping, spec_config, execution_stream, device)
        self._note_role(is_draft, is_disagg, is_estimating_kv_cache)
        limits = cache_limits(
            max_seq_len, max_batch_size, max_num_tokens, tokens_per_block, max_beam_width, spec_config
        )
        layers = local_layers(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            mapping=mapping,
            layer_mask=layer_mask,
            max_attention_window=kv_cache_config.max_attention_window,
            max_seq_len=max_seq_len,
        )
        sizing = AttentionSizing(
            layers=layers,
            kv_type=kv_cache_type,
            limits=limits,
            max_util_for_resume=kv_cache_config.max_util_for_resume,
        )
        self._open(kv_cache_config, sizing, num_reserved_index_slots, enable_stats)

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
        self._alloc_total_blocks = 0

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

    def get_needed_resource_to_completion(self, request: CacheRequest) -> int:
        """0: see `get_max_resource_count`."""
        return 0

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

    def num_cached_tokens(self, request_id: int) -> int:
        """Tokens of the request whose attention and state are in the cache."""
        return self.kv_cache_map[request_id].history_length

    def prepare_context(self, req: CacheRequest) -> bool:
        """Give the request its cache, or make the one it has usable again.

        False = no capacity now, and nothing changed. May be called before every chunk.
        """
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is not None:
            return cache.is_active or self._resume(cache)
        cache = self._create_cache(req)
        if not self._resume(cache):
            cache.close()
            return False
        self.kv_cache_map[req.py_request_id] = cache
        return True

    def _create_cache(self, req: CacheRequest) -> _KVCache:
        cache = self.impl.create_kv_cache(id=req.py_request_id)
        cache.stop_committing()
        return cache

    def _resume(self, cache: _KVCache) -> bool:
        return cache.resume(None if self._stream is None else self._stream.cuda_stream)

    def resize_context(self, req: CacheRequest, num_tokens: int) -> bool:
        """Make room for the next `num_tokens` tokens of the prompt.

        False = no capacity now, and nothing changed.
        """
        cache = self.kv_cache_map[req.py_request_id]
        return self._grow(cache, max(cache.capacity, req.context_current_position + num_tokens))

    def try_allocate_generation(self, req: CacheRequest) -> bool:
        """Resume the request if needed and make room for its golden token and drafts.

        False = nothing changed.
        """
        cache = self.kv_cache_map[req.py_request_id]
        was_active = cache.is_active
        if not was_active and not self._resume(cache):
            return False
        if self._grow(cache, cache.history_length + 1 + len(req.py_draft_tokens)):
            return True
        if not was_active:
            cache.suspend()
        return False

    def _grow(self, cache: _KVCache, capacity: int) -> bool:
        blocks = cache.num_blocks
        if not cache.resize(capacity):
            return False
        self._alloc_total_blocks += max(0, cache.num_blocks - blocks)
        return True

    def revert_allocate_generation(self, req: CacheRequest) -> None:
        """Give back what `try_allocate_generation` took, for a round that does not run."""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is not None and cache.is_active:
            cache.resize(cache.history_length)

    def prepare_resources(self, batch: CacheBatch) -> None:
        """Before a step.

        For a target the scheduler has allocated already; a draft manager follows the target's requests.

        Raises OutOfPagesError where a draft manager, whose share of the budget holds as many tokens as the
        target's, is full.
        """
        if not self.is_draft:
            return
        for req in batch.context_requests:
            if not (self.prepare_context(req) and self.resize_context(req, req.context_chunk_size)):
                raise OutOfPagesError(
                    f"the draft cache has no pages for the prompt of request {req.py_request_id}"
                )
        for req in batch.generation_requests:
            if not self.try_allocate_generation(req):
                raise OutOfPagesError(
                    f"the draft cache has no pages for the round of request {req.py_request_id}"
                )

    def update_context_resources(self, batch: CacheBatch) -> None:
        """After a step: the chunks of its context requests are in the cache."""
        for req in batch.context_requests:
            cache = self.kv_cache_map.get(req.py_request_id)
            if cache is not None and cache.is_active:
                computed = req.context_current_position + req.context_chunk_size
                cache.resize(max(cache.capacity, computed), max(cache.history_length, computed))

    def update_resources(
        self,
        batch: CacheBatch,
        attn_metadata: object | None = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        """After a step: golden tokens and accepted drafts of its generation requests stay, rejected drafts'
        room goes.
        """
        for req in batch.generation_requests:
            cache = self.kv_cache_map.get(req.py_request_id)
            if cache is not None and cache.is_active:
                length = cache.history_length + 1 + req.py_num_accepted_draft_tokens
                cache.resize(length, length)

    def suspend_request(self, req: CacheRequest) -> None:
        """Let the request's pages move to make room for others.

        Nothing happens where it is suspended already.
        """
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is not None and cache.is_active:
            cache.suspend()

    def resume_request(self, req: CacheRequest) -> bool:
        """Make a suspended request usable again. False = no capacity now."""
        cache = self.kv_cache_map[req.py_request_id]
        return cache.is_active or self._resume(cache)

    def free_resources(self, req: CacheRequest) -> None:
        """Give back all that the request holds; an unknown request holds nothing."""
        cache = self.kv_cache_map.pop(req.py_request_id, None)
        if cache is not None:
            cache.close()

    def add_dummy_requests(
        self,
        request_ids: Sequence[int],
        token_nums: Sequence[int] | None = None,
        is_gen: bool = False,
        prepare_resource: bool = True,
        max_num_draft_tokens: int = 0,
        use_mrope: bool = False,
        max_beam_width: int = 1,
        num_extra_decoding_steps: int = 0,
        draft_kv_cache_manager: "KVCacheManagerV2 | None" = None,
    ) -> list[DummyRequest] | None:
        """Requests of the executor's own with caches of `token_nums` tokens (1 each if left out) and room for
        drafts.

        None, with nothing left allocated here or in the draft manager, where one of them finds no capacity.
        """
        tokens = [1] * len(request_ids) if token_nums is None else list(token_nums)
        dummies = [
            DummyRequest(
                py_request_id=request_id,
                token_num=token_num,
                is_gen=is_gen,
                py_draft_tokens=[1] * max_num_draft_tokens if is_gen else [],
                context_chunk_size=0 if is_gen else token_num,
            )
            for request_id, token_num in zip(request_ids, tokens, strict=True)
        ]
        if not prepare_resource:
            return dummies
        managers = [self] if draft_kv_cache_manager is None else [self, draft_kv_cache_manager]
        if all(
            manager._allocate_dummy(dummy, num_extra_decoding_steps)
            for dummy in dummies
            for manager in managers
        ):
            return dummies
        for manager in managers:
            for dummy in dummies:
                manager.free_resources(dummy)
        return None

    def _allocate_dummy(self, dummy: DummyRequest, num_extra_tokens: int) -> bool:
        if not self.prepare_context(dummy):
            return False
        cached = dummy.token_num - 1 if dummy.is_gen else 0
        capacity = dummy.token_num + len(dummy.py_draft_tokens) + num_extra_tokens
        return self.kv_cache_map[dummy.py_request_id].resize(capacity, cached)

    def get_kv_cache_stats(self) -> KvCacheStats:
        """Counts of attention pages."""
        total, free = self.num_attention_pages, self.get_num_free_blocks()
        return KvCacheStats(
            max_num_blocks=total,
            free_num_blocks=free,
            used_num_blocks=total - free,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=self._alloc_total_blocks,
            reused_blocks=0,
            missed_blocks=0,
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

    def check_integrity(self) -> None:
        """Raise an AssertionError with the numbers unless every page has one owner and every open cache a
        request.
        """
        self.impl.check_integrity()
        assert self.impl.num_open_caches == len(self.kv_cache_map), (
            f"{self.impl.num_open_caches} caches are open for {len(self.kv_cache_map)} requests"
        )

    def shutdown(self) -> None:
        """Close every cache and give all memory back; views of it must not be used any more."""
        self._buffers.clear()
        for cache in self.kv_cache_map.values():
            cache.close()
        self.kv_cache_map.clear()
        self.impl.shutdown()
