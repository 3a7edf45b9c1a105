# SPDX-License-Identifier: Apache-2.0
"""`KVCacheManagerV2`: gives requests their attention pages, on the V2 storage."""

from collections.abc import Sequence

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.cache_storage import CacheStorage
from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    CacheType,
    KvCacheConfigLike,
    SpecConfigLike,
    refuse_conversation_turns,
    refuse_unsupported,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.requests import CacheBatch, CacheRequest, DummyRequest
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import (
    AttentionSizing,
    CacheCost,
    cache_limits,
    local_layers,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import ModelTraits, latent_layers
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import OutOfPagesError, _KVCache

HALF = torch.float16


class KVCacheManagerV2(CacheStorage):
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
            {
                "kv_connector_manager": kv_connector_manager,
                "cold_page_codec_provider": cold_page_codec_provider,
                "joint_kv_cache_reuse": joint_kv_cache_reuse,
                "kv_events_config": kv_events_config,
            }
        )
        refuse_conversation_turns(kv_cache_config)
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

    def _open(
        self,
        kv_cache_config: KvCacheConfigLike,
        sizing: AttentionSizing,
        num_reserved_index_slots: int,
        enable_stats: bool,
    ) -> None:
        super()._open(kv_cache_config, sizing, num_reserved_index_slots, enable_stats)
        self._num_reused: dict[int, int] = {}

    @staticmethod
    def get_cache_size_per_token(
        model_config: ModelTraits,
        mapping: Mapping,
        *,
        kv_cache_config: KvCacheConfigLike,
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int = 8192,
        spec_config: SpecConfigLike | None = None,
        dtype: torch.dtype | None = None,
    ) -> CacheCost:
        """Bytes of quota per cached token on this rank, and before the first one, of the attention layers.

        `dtype` None is the model's. Raises ValueError as the constructor does.
        """
        window = kv_cache_config.max_attention_window
        layers = latent_layers(model_config, mapping, dtype or model_config.dtype, window, max_seq_len)
        return AttentionSizing(
            layers=layers,
            kv_type=CacheType.SELFKONLY,
            limits=cache_limits(
                max_seq_len, max_batch_size, max_num_tokens, tokens_per_block, 1, spec_config
            ),
            max_util_for_resume=kv_cache_config.max_util_for_resume,
        ).cost()

    def get_max_resource_count(self) -> int:
        """1: whether a request fits is asked by allocating."""
        return 1

    def get_needed_resource_to_completion(self, request: CacheRequest) -> int:
        """0: see `get_max_resource_count`."""
        return 0

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
            # It will be looked up again: counted once, when it gets in.
            cache.discard_pending_stats()
            cache.close()
            return False
        cache.commit_pending_stats()
        self.kv_cache_map[req.py_request_id] = cache
        if cache.num_committed_tokens:
            self._num_reused[req.py_request_id] = cache.num_committed_tokens
        return True

    def _create_cache(self, req: CacheRequest) -> _KVCache:
        if not self._may_reuse(req):
            cache = self.impl.create_kv_cache(id=req.py_request_id)
            cache.stop_committing()
            return cache
        prompt = req.get_tokens()[: req.prompt_len]
        return self.impl.create_kv_cache(
            input_tokens=prompt, id=req.py_request_id, expected_prompt_length=len(prompt)
        )

    def _may_reuse(self, req: CacheRequest) -> bool:
        return self.enable_block_reuse and not req.is_dummy and not self.is_estimating_kv_cache

    def num_reused_tokens(self, request_id: int) -> int:
        """Prompt tokens that `prepare_context` found in the cache: the first chunk starts behind them."""
        return self._num_reused.get(request_id, 0)

    def clip_context_chunk(self, req: CacheRequest, num_tokens: int) -> int:
        """The part of the next `num_tokens` prompt tokens to run in one chunk: all of them for attention."""
        return num_tokens

    def _resume(self, cache: _KVCache) -> bool:
        return cache.resume(None if self._stream is None else self._stream.cuda_stream)

    def resize_context(self, req: CacheRequest, num_tokens: int) -> bool:
        """Make room for the next `num_tokens` tokens of the prompt.

        False = no capacity now, and nothing changed.
        """
        cache = self.kv_cache_map[req.py_request_id]
        return cache.resize(max(cache.capacity, req.context_current_position + num_tokens))

    def try_allocate_generation(self, req: CacheRequest) -> bool:
        """Resume the request if needed and make room for its golden token and drafts.

        False = nothing changed.
        """
        cache = self.kv_cache_map[req.py_request_id]
        was_active = cache.is_active
        if not was_active and not self._resume(cache):
            return False
        if cache.resize(cache.history_length + 1 + len(req.py_draft_tokens)):
            return True
        if not was_active:
            cache.suspend()
        return False

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
        if self.is_draft:
            self._follow_target(batch)
        self._await_cache_stream()

    def _follow_target(self, batch: CacheBatch) -> None:
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
        """After a step: the chunks of its context requests are in the cache and may be reused."""
        for req in batch.context_requests:
            cache = self.kv_cache_map.get(req.py_request_id)
            if cache is not None and cache.is_active:
                computed = req.context_current_position + req.context_chunk_size
                cache.resize(max(cache.capacity, computed), max(cache.history_length, computed))
                if self._may_reuse(req):
                    self._commit_prompt(req, cache, computed)

    def _commit_prompt(self, req: CacheRequest, cache: _KVCache, num_computed: int) -> None:
        """Offer the first `num_computed` tokens of the prompt for reuse."""
        self._commit_tokens(req, cache, num_computed)

    def _commit_tokens(self, req: CacheRequest, cache: _KVCache, num_tokens: int) -> None:
        with self._on_cache_stream():
            cache.commit(req.get_tokens()[cache.num_committed_tokens : num_tokens])

    def update_resources(
        self,
        batch: CacheBatch,
        attn_metadata: object | None = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        """After a step: golden tokens and accepted drafts of its generation requests stay, rejected drafts'
        room goes.

        A dummy, which runs the same round again, stays as it was made.
        """
        for req in batch.generation_requests:
            cache = self.kv_cache_map.get(req.py_request_id)
            if cache is not None and cache.is_active and not req.is_dummy:
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
        """Give back all that the request holds; an unknown request holds nothing.

        What it computed stays reusable while there is room, its output included.
        """
        self._num_reused.pop(req.py_request_id, None)
        cache = self.kv_cache_map.pop(req.py_request_id, None)
        if cache is None:
            return
        if cache.is_active and self._may_reuse(req):
            self._commit_output(req, cache)
        cache.close()

    def _commit_output(self, req: CacheRequest, cache: _KVCache) -> None:
        """Offer what a finished request computed for reuse, as far as its tokens are known."""
        self._commit_tokens(req, cache, min(cache.history_length, len(req.get_tokens())))

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
