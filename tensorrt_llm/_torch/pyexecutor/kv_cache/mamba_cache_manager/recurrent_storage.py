# SPDX-License-Identifier: Apache-2.0
"""An opened storage with recurrent states: its views, its slots and what lies beside them."""

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from tensorrt_llm._torch.modules.kda.verify_scheme import VerifyScheme
from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import (
    HOST_DRAFTERS,
    BaseMambaCacheManager,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.index_buffers import StateIndexBuffers
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.live_floor import gpu_grain_bytes
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_buffers import SideBuffer, SlotBuffers
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.slot_map import SlotMap
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import MambaRole
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.views import State
from tensorrt_llm.runtime.kv_cache_manager_v2 import LayerId


class RecurrentStorage(KVCacheManagerV2, BaseMambaCacheManager):
    """The part of the hybrid manager that is asked, not told: views [N, ...] per layer, slots, bytes.

    Attributes named as TensorRT-LLM's are side buffers [L, N, ...], None where the verify scheme has none of
    it.
    """

    kda_state_tok = SideBuffer("kda_state_tok")
    kda_conv_q = SideBuffer("kda_conv_q")
    kda_conv_k = SideBuffer("kda_conv_k")
    kda_conv_v = SideBuffer("kda_conv_v")
    kda_qkg_cache = SideBuffer("kda_qkg_cache")
    kda_v_cache = SideBuffer("kda_v_cache")
    kda_beta_cache = SideBuffer("kda_beta_cache")
    intermediate_ssm_states = SideBuffer("intermediate_ssm")
    intermediate_conv_states = None

    def _open_hybrid(
        self, kv_cache_config: KvCacheConfigLike, sizing: HybridSizing, enable_stats: bool
    ) -> None:
        self._hybrid = sizing
        self._open(kv_cache_config, sizing, sizing.num_dummy_slots, enable_stats)
        self._rows = StateIndexBuffers(sizing.limits.max_batch_size + sizing.num_dummy_slots, self.device)
        local = sizing.layers.recurrent
        self.local_num_mamba_layers = len(local)
        self.mamba_layer_offsets = {sizing.layers.pp_layers[layer]: i for i, layer in enumerate(local)}
        self._ssm_group = self.impl.get_layer_group_id(LayerId(local[0])) if local else None
        self._temporal = [self._state_view(layer, MambaRole.SSM_STATE) for layer in local]
        self._conv = [self._state_view(layer, MambaRole.CONV_STATE) for layer in local]
        self._check_slot_count()
        if self.device.type == "cuda":
            # Device memory is not zero when it is mapped, and a dummy's slot is read without a prefill.
            for pool in (*self._temporal, *self._conv):
                pool.zero_()
        try:
            self._map = SlotMap(slot_of=self._slot_of, buffers=self._allocate_side_buffers())
        except BaseException:
            # Side buffers may find no memory; the pools must not stay behind then.
            self.impl.shutdown()
            raise
        self._layer_views = self._make_layer_views()

    def _allocate_side_buffers(self) -> SlotBuffers | None:
        verify = self._hybrid.verify
        if not self._temporal or verify is None:
            return None
        return SlotBuffers(
            scheme=verify.scheme, geometry=verify.geometry, conv=self._conv, temporal=self._temporal
        )

    def _make_layer_views(self) -> list[State]:
        if self._map.buffers is None:
            return [State(conv=c, temporal=t) for c, t in zip(self._conv, self._temporal, strict=True)]
        return [self._map.buffers.at_layer(layer) for layer in range(len(self._temporal))]

    def _state_view(self, local_layer: int, role: str) -> Tensor:
        spec = self._hybrid.spec
        if role == MambaRole.SSM_STATE:
            return self.impl.get_buffer_view(LayerId(local_layer), role, spec.ssm_dtype, spec.ssm_state_shape)
        return self.impl.get_buffer_view(LayerId(local_layer), role, spec.conv_dtype, spec.conv_state_shape)

    def _check_slot_count(self) -> None:
        """The storage holds a slot for every live sequence, and as many as side buffers were paid for."""
        if not self._temporal:
            return
        floor = self._hybrid.states.floor_slots
        if self.num_state_slots < floor:
            self.impl.shutdown()
            raise ValueError(
                f"the storage holds {self.num_state_slots} recurrent state slots; {floor} live sequences "
                "need one each: raise max_gpu_total_bytes or lower max_batch_size"
            )
        if self._hybrid.is_at_live_floor:
            tier = self.kv_cache_manager_py_config.cache_tiers[0].quota
            reserved = self._hybrid.states.held_slots(gpu_grain_bytes(tier))
            assert self.num_state_slots == reserved, (
                f"{self.num_state_slots} slots, side buffers paid for {reserved}"
            )

    @property
    def num_state_slots(self) -> int:
        """N: rows of the state views; 0 on a rank without recurrent layers."""
        return self._temporal[0].shape[0] if self._temporal else 0

    @property
    def prev_num_accepted_tokens(self) -> Tensor | None:
        """int32 [N]: drafts pending in each slot."""
        return None if self._map.buffers is None else self._map.buffers.num_accepted

    def side_buffer(self, name: str) -> Tensor | None:
        """A buffer [L, N, ...] of the verify scheme by name; None where the scheme has none of it."""
        return None if self._map.buffers is None else self._map.buffers.tensors.get(name)

    @property
    def verify_scheme(self) -> VerifyScheme | None:
        """How rejected drafts are undone; None without verify rounds."""
        return None if self._hybrid.verify is None else self._hybrid.verify.scheme

    @property
    def use_kda_replay_update(self) -> bool:
        return self._hybrid.verify is not None

    @property
    def keeps_kda_token_states(self) -> bool:
        return self.kda_state_tok is not None

    @property
    def cuda_state_indices(self) -> Tensor:
        """int32 [max_batch_size + dummies] on the device, at an address that never changes: the slots of the
        step's rows.
        """
        return self._rows.slots

    @property
    def intermediate_state_indices(self) -> Tensor:
        """int32 arange over the rows."""
        return self._rows.intermediate

    @property
    def _accepts_on_host(self) -> bool:
        return self.spec_config is not None and self.spec_config.decoding_type in HOST_DRAFTERS

    def is_speculative(self) -> bool:
        return self.spec_config is not None

    def get_mamba_ssm_cache_dtype(self) -> torch.dtype:
        return self._hybrid.spec.ssm_dtype

    def get_ssm_states(self, layer_idx: int) -> Tensor:
        return self._temporal[self.mamba_layer_offsets[layer_idx]]

    def get_conv_states(self, layer_idx: int) -> Tensor:
        return self._conv[self.mamba_layer_offsets[layer_idx]]

    def mamba_layer_cache(self, layer_idx: int) -> State:
        return self._layer_views[self.mamba_layer_offsets[layer_idx]]

    def get_max_resource_count(self) -> int:
        """Requests that can have a state slot at once."""
        return self.max_batch_size

    @overload
    def get_state_indices(self, request_ids: None = None, is_padding: None = None) -> Tensor: ...
    @overload
    def get_state_indices(
        self, request_ids: Sequence[int], is_padding: Sequence[bool] | None = None
    ) -> list[int]: ...
    def get_state_indices(
        self, request_ids: Sequence[int] | None = None, is_padding: Sequence[bool] | None = None
    ) -> Tensor | list[int]:
        """The slots of these requests in their order; the device buffer of the step's slots where none are
        named.

        Refreshes the dummy mask of the step's rows: a row is a dummy if its request is one or `is_padding`
        says so. Zeros on a rank without recurrent layers.
        """
        if request_ids is None:
            return self.cuda_state_indices
        if not self._temporal:
            return [0] * len(request_ids)
        padding = is_padding or [False] * len(request_ids)
        self._rows.store_dummy_mask(
            [self._map.is_dummy[r] or p for r, p in zip(request_ids, padding, strict=True)]
        )
        return [self._map.state_index[request_id] for request_id in request_ids]

    def _slot_of(self, request_id: int) -> int:
        cache = self.kv_cache_map.get(request_id)
        slot = -1
        if cache is not None and self._ssm_group is not None:
            slot = cache.get_ssm_block_base_index(self._ssm_group)
        if slot < 0:
            raise RuntimeError(
                f"request {request_id} has no recurrent state slot: allocate it with prepare_context, or "
                "resume it, before the step"
            )
        return slot

    def _kda_draft_records_shape(self) -> tuple[int, int, int, int] | None:
        """(3, M, H, K) of one slot's records in one layer; None without verify rounds."""
        verify = self._hybrid.verify
        if verify is None:
            return None
        geometry = verify.geometry
        return (3, geometry.num_spec, geometry.num_heads, geometry.head_dim)

    def _mamba_state_bytes_per_slot(self) -> int:
        """Bytes per slot that the quota pays for: the pools' and, where records are kept, theirs."""
        states = self._hybrid.states
        return states.pool_bytes_per_slot + states.reserved_bytes_per_slot

    @property
    def side_bytes(self) -> int:
        """Bytes beside the storage's pools: the scheme's buffers and the counts."""
        return 0 if self._map.buffers is None else self._map.buffers.nbytes

    @property
    def side_bytes_in_quota(self) -> int:
        return self.num_state_slots * self._hybrid.states.reserved_bytes_per_slot
