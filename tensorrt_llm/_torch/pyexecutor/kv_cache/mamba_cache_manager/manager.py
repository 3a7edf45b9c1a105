# SPDX-License-Identifier: Apache-2.0
"""`MambaHybridCacheManagerV2`: attention pages and recurrent state slots of one request, together, on the V2
storage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tensorrt_llm._torch.pyexecutor.kv_cache.config import (
    CacheType,
    KvCacheConfigLike,
    SpecConfigLike,
    refuse_conversation_turns,
    refuse_unsupported,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.device_copy import to_device
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import (
    HALF,
    KVCacheManagerV2,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    AcceptanceMetadata,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.recurrent_storage import RecurrentStorage
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_map import SlotMap
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.snapshots import next_chunk_end
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import (
    RecurrentShape,
    StateDtypes,
    linear_state_spec,
    mamba_effective_tp_size,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.transfer import (
    TensorRank,
    check_sent,
    copy_ranges,
    section_copies,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import (
    COUNT_DTYPE,
    check_replay_arguments,
    explain_keyword,
    plan_verify,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.requests import CacheBatch, CacheRequest, DummyRequest
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import CacheCost, cache_limits, local_layers
from tensorrt_llm._torch.pyexecutor.kv_cache.traits import ModelTraits
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import _KVCache


class MambaHybridCacheManagerV2(RecurrentStorage):
    """Pages for attention layers, a state slot for recurrent ones, and beside a slot what the verify scheme
    keeps of drafts.

    `mamba_*` describe the recurrent layers before the split over tensor ranks; masks are per global layer,
    `layer_mask` names the attention layers. With `kda_replay_num_spec` (M drafts a round) verify rounds run
    on the slots: `kda_token_states` keeps the drafts' records instead of the replay caches,
    `kda_verify_scheme` names a scheme outright. `kda_conv_dtype` torch.bfloat16 halves the extended windows
    of a model whose projections are bfloat16, and loses nothing. The other keywords are
    `KVCacheManagerV2`'s. Raises TypeError for an unknown keyword and ValueError, before anything is
    allocated, for, in this order: the layout, the replay arguments, a pool rebalance, records off the live
    floor, a quota too small for live states.
    """

    _supports_reuse_match_backoff = False

    @explain_keyword(
        "model_type", "name the sections of the convolution's state with conv_state_layout instead"
    )
    def __init__(
        self, mamba_d_state: int, mamba_d_conv: int, mamba_num_heads: int, mamba_n_groups: int,
        mamba_head_dim: int, mamba_num_layers: int, mamba_layer_mask: Sequence[bool],
        mamba_cache_dtype: torch.dtype, mamba_ssm_cache_dtype: torch.dtype,
        kv_cache_config: KvCacheConfigLike, kv_cache_type: CacheType, *, num_layers: int,
        num_kv_heads: int | Sequence[int | None], head_dim: int | Sequence[int], tokens_per_block: int,
        max_seq_len: int, max_batch_size: int, mapping: Mapping, dtype: torch.dtype = HALF,
        spec_config: SpecConfigLike | None = None, layer_mask: Sequence[bool] | None = None,
        is_estimating_kv_cache: bool = False, is_draft: bool = False, use_replay_state_update: bool = False,
        mamba_ssm_stochastic_rounding: bool = False, conv_state_layout: str = "x_b_c",
        kda_replay_num_spec: int | None = None, qwen4_exp_ple_cache_params: object | None = None,
        kda_token_states: bool = False, vocab_size: int | None = None, max_num_tokens: int = 8192,
        model_config: object | None = None, max_beam_width: int = 1,
        kv_connector_manager: object | None = None, execution_stream: torch.cuda.Stream | None = None,
        is_disagg: bool = False, enable_stats: bool = False, kv_events_config: object | None = None,
        cold_page_codec_provider: object | None = None, joint_kv_cache_reuse: bool = False,
        kda_verify_scheme: str | None = None, kda_conv_dtype: torch.dtype = torch.float32,
        device: str = "cuda",
    ) -> None:  # fmt: skip
        shape = RecurrentShape(mamba_d_state, mamba_d_conv, mamba_num_heads, mamba_n_groups, mamba_head_dim)
        dtypes = StateDtypes(conv=mamba_cache_dtype, ssm=mamba_ssm_cache_dtype)
        spec = linear_state_spec(shape, mamba_effective_tp_size(mapping), conv_state_layout, dtypes)
        check_replay_arguments(
            spec, kda_replay_num_spec, use_replay_state_update, spec_config, conv_state_layout
        )
        verify = plan_verify(
            spec, kda_replay_num_spec, kda_token_states, kda_verify_scheme, is_draft, kda_conv_dtype
        )
        refuse_unsupported(
            {
                "kv_connector_manager": kv_connector_manager,
                "cold_page_codec_provider": cold_page_codec_provider,
                "joint_kv_cache_reuse": joint_kv_cache_reuse,
                "kv_events_config": kv_events_config,
                "qwen4_exp_ple_cache_params": qwen4_exp_ple_cache_params,
                "mamba_ssm_stochastic_rounding": mamba_ssm_stochastic_rounding,
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
            recurrent_mask=mamba_layer_mask,
            num_recurrent_layers=mamba_num_layers,
            max_attention_window=kv_cache_config.max_attention_window,
            max_seq_len=max_seq_len,
        )
        sizing = HybridSizing.plan(
            kv_cache_config, kv_cache_type, limits, layers, spec, verify, mapping, spec_config
        )
        self._open_hybrid(kv_cache_config, sizing, enable_stats)

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
        is_draft: bool = False,
        kda_token_states: bool = False,
    ) -> CacheCost:
        """As for attention, with the states: those of all live sequences before the first token, and where
        records are kept the records of every slot that is kept; snapshots as their rules have them.
        """
        plan = CachePlan(
            traits=model_config,
            mapping=mapping,
            kv_cache_config=kv_cache_config,
            tokens_per_block=tokens_per_block,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            spec_config=spec_config,
            max_num_tokens=max_num_tokens,
            dtype=dtype,
            is_draft=is_draft,
            kda_token_states=kda_token_states,
        )
        return plan.sizing().cost()

    def prepare_resources(self, batch: CacheBatch) -> None:
        """Before a step: find its requests' slots, bring their drafts there, start prompts with nothing
        pending.

        Raises RuntimeError for a request that has no slot, and for a prefill chunk between a verify round's
        launch and its acceptance.
        """
        super().prepare_resources(batch)
        if not self._temporal:
            return
        contexts, generations = batch.context_requests, batch.generation_requests
        self._setup_state_indices([*contexts, *generations], len(contexts))
        self._map.start_prompts([req.py_request_id for req in contexts])
        self._map.launch_rounds(req.py_request_id for req in generations if not req.is_dummy)

    def _setup_state_indices(self, requests: Sequence[CacheRequest], num_contexts: int = 0) -> None:
        """Map these requests, context first, to their slots as of now, and fill the step's index buffers."""
        ids = [req.py_request_id for req in requests]
        is_dummy = [req.is_dummy for req in requests]
        slots = self._map.place(ids, num_contexts)
        self._map.is_dummy.update(zip(ids, is_dummy, strict=True))
        self._rows.store_slots(slots)
        self._rows.store_dummy_mask(is_dummy)

    def update_mamba_states(
        self,
        attn_metadata: AcceptanceMetadata,
        num_accepted_tokens: Tensor,
        state_indices: Sequence[int] | Tensor | None = None,
        accepted_leaf_positions: Tensor | None = None,
    ) -> None:
        """After a verify round: store what was accepted.

        `num_accepted_tokens` int [rows] counts the golden token.

        Rows of context requests are skipped, as are those of requests that were suspended or freed since, and
        dummies keep their counts. `state_indices` are the slots of all rows, if other than the step's. Does
        not wait for the device.
        """
        if accepted_leaf_positions is not None:
            raise ValueError(
                "accepted_leaf_positions is for draft trees; this cache takes chains: leave it out"
            )
        if self._map.buffers is None:
            return
        first = attn_metadata.num_contexts
        ids = list(attn_metadata.request_ids or ())
        known = self._map.state_index
        rows = [
            row for row in range(first, len(ids)) if ids[row] in known and not self._map.is_dummy[ids[row]]
        ]
        real_ids = [ids[row] for row in rows]
        slots: Sequence[int] | Tensor
        if state_indices is None:
            slots = [known[request_id] for request_id in real_ids]
        elif isinstance(state_indices, Tensor):
            slots = state_indices[to_device(rows, state_indices.device)]
        else:
            slots = [state_indices[row] for row in rows]
        num_drafts = num_accepted_tokens[to_device(rows, num_accepted_tokens.device)] - 1
        self._map.store_acceptance(real_ids, slots, num_drafts)

    def update_resources(
        self,
        batch: CacheBatch,
        attn_metadata: object | None = None,
        kv_cache_dtype_byte_size: float | None = None,
    ) -> None:
        """After a step: as for attention; with a drafter on the host, acceptance is read from the requests
        here.
        """
        if self._accepts_on_host:
            known = self._map.state_index
            live = [
                req for req in batch.generation_requests if req.py_request_id in known and not req.is_dummy
            ]
            ids = [req.py_request_id for req in live]
            counts = [req.py_num_accepted_draft_tokens for req in live]
            num_drafts = to_device(counts, self.device, COUNT_DTYPE)
            self._map.store_acceptance(ids, [known[request_id] for request_id in ids], num_drafts)
        super().update_resources(batch, attn_metadata, kv_cache_dtype_byte_size)

    def suspend_request(self, req: CacheRequest) -> None:
        """Let the request's pages and state move. Its pending drafts are applied to the state first.

        Raises RuntimeError between a verify round's launch and its acceptance.
        """
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is not None and cache.is_active:
            with self._on_cache_stream():
                self._map.suspend(req.py_request_id)
            super().suspend_request(req)

    def expect_snapshot_points(self, req: CacheRequest) -> list[int]:
        """Token counts of the prompt at which a snapshot of its state is kept for reuse, ascending."""
        if not self._may_reuse(req):
            return []
        return self._hybrid.snapshots.points(req.prompt_len)

    def clip_context_chunk(self, req: CacheRequest, num_tokens: int) -> int:
        """How many of the next `num_tokens` prompt tokens run in one chunk: up to a snapshot point."""
        start = req.context_current_position
        return next_chunk_end(start, start + num_tokens, self.expect_snapshot_points(req)) - start

    def _commit_prompt(self, req: CacheRequest, cache: _KVCache, num_computed: int) -> None:
        """Offer the prompt for reuse where a chunk ends at a snapshot point: the state stands there."""
        if num_computed in self.expect_snapshot_points(req):
            self._commit_tokens(req, cache, num_computed)
        if num_computed >= req.prompt_len:
            cache.stop_committing()

    def _commit_output(self, req: CacheRequest, cache: _KVCache) -> None:
        """Nothing: an output leaves no snapshot, without which its attention pages cannot be reused."""

    def revert_allocate_generation(self, req: CacheRequest) -> None:
        self._map.acceptance_pending.discard(req.py_request_id)
        super().revert_allocate_generation(req)

    def free_resources(self, req: CacheRequest) -> None:
        self._map.forget(req.py_request_id)
        super().free_resources(req)

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
        draft_kv_cache_manager: KVCacheManagerV2 | None = None,
    ) -> list[DummyRequest] | None:
        """As for attention; dummies that generate, which are read without a prefill, start at zero."""
        dummies = super().add_dummy_requests(
            request_ids,
            token_nums,
            is_gen,
            prepare_resource,
            max_num_draft_tokens,
            use_mrope,
            max_beam_width,
            num_extra_decoding_steps,
            draft_kv_cache_manager,
        )
        if dummies and prepare_resource and self._temporal:
            self._setup_state_indices(dummies, 0 if is_gen else len(dummies))
            if is_gen:
                self._zero_slots([self._map.state_index[request_id] for request_id in request_ids])
        return dummies

    def _zero_slots(self, slots: Sequence[int]) -> None:
        index = to_device(slots, self.device)
        for pool in (*self._temporal, *self._conv):
            pool.index_fill_(0, index, 0)
        if self._map.buffers is not None:
            self._map.buffers.seed(slots)

    def load_transferred_state(
        self, request_id: int, layer_idx: int, conv: Tensor, ssm: Tensor, sender: TensorRank
    ) -> None:
        """Put a sender rank's part of a layer's state into the request's slot.

        conv [channels, W-1] and ssm [H, V, K] as the sender has them. Call it for every sender that has a
        part, then `seed_kda_replay_caches_for_disagg_gen` once. Raises RuntimeError where the request has no
        slot, and between a verify round's launch and its acceptance; ValueError for a shape that is not the
        sender's.
        """
        self._map.check_acceptance_stored([request_id], "load a transferred state into")
        slot, spec = self._slot_of(request_id), self._hybrid.spec
        tp_size = mamba_effective_tp_size(self.mapping)
        receiver = TensorRank(rank=self.mapping.tp_rank % tp_size, size=tp_size)
        channels = section_copies(spec.conv_section_dims, sender, receiver)
        heads = section_copies([spec.num_heads], sender, receiver)
        check_sent("conv", conv, spec.conv_state_shape, sender, receiver)
        check_sent("ssm", ssm, spec.ssm_state_shape, sender, receiver)
        copy_ranges(self.get_conv_states(layer_idx)[slot], conv, channels)
        copy_ranges(self.get_ssm_states(layer_idx)[slot], ssm, heads)

    def seed_kda_replay_caches_for_disagg_gen(self, request_ids: Sequence[int]) -> None:
        """After a transfer has filled these requests' states, and before they first generate here.

        Nothing is pending then, and the extended windows hold what the pool does, by the time the first
        step is prepared. Requests without a slot are skipped. Raises RuntimeError between a verify round's
        launch and its acceptance.
        """
        self._map.seed(request_ids)

    def check_integrity(self) -> None:
        """As for attention; and every mapped request is open, and no two of them share a state slot."""
        super().check_integrity()
        self._map.check_integrity()
        strangers = self._map.state_index.keys() - self.kv_cache_map.keys()
        assert not strangers, f"requests {sorted(strangers)} own state slots but no cache"

    def shutdown(self) -> None:
        """Let go of all views and side buffers, then as for attention."""
        self._map = SlotMap(slot_of=self._slot_of)
        self._layer_views.clear()
        self._temporal.clear()
        self._conv.clear()
        super().shutdown()
