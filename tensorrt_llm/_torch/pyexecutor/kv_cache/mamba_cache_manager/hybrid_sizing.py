# SPDX-License-Identifier: Apache-2.0
"""Bytes and storage configuration of a rank with recurrent layers: live states, snapshots, and the live
floor. Pure.
"""

import math
from dataclasses import dataclass, replace

from tensorrt_llm._torch.pyexecutor.kv_cache.config import CacheType, KvCacheConfigLike, SpecConfigLike
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.common import num_reserved_dummy_slots
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.live_floor import (
    MAX_CAPACITY_TOKENS,
    LiveStates,
    live_floor_slots,
)
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.snapshots import SnapshotRules
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.state_spec import MambaRole, MambaStateSpec
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.verify_options import COUNT_DTYPE, VerifyPlan
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import (
    AttentionSizing,
    CacheCost,
    CacheLimits,
    LocalLayers,
)
from tensorrt_llm.logger import logger
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.runtime.kv_cache_manager_v2 import (
    BatchDesc,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheDesc,
    KVCacheManagerConfig,
    LayerConfig,
    LayerId,
    SsmLayerConfig,
)
from tensorrt_llm.runtime.kv_cache_manager_v2._math import round_up
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import split_gpu_quota

_EMPTY = KVCacheDesc(capacity=0, history_length=0)
"""A sequence without a page: the storage counts one state slot for it."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSizing(AttentionSizing):
    """Attention layers and recurrent ones on one rank.

    `verify` is how rejected drafts are undone; None where slots carry no drafts between steps. `num_resident`
    requests can be live at once, beside `num_dummy_slots` dummies.
    """

    spec: MambaStateSpec
    verify: VerifyPlan | None
    states: LiveStates
    snapshots: SnapshotRules
    num_resident: int
    num_dummy_slots: int
    enable_block_reuse: bool
    has_pool_ratio: bool
    max_gpu_total_bytes: int

    @classmethod
    def plan(
        cls,
        config: KvCacheConfigLike,
        kv_type: CacheType,
        limits: CacheLimits,
        layers: LocalLayers,
        spec: MambaStateSpec,
        verify: VerifyPlan | None,
        mapping: Mapping,
        spec_config: SpecConfigLike | None,
    ) -> "HybridSizing":
        """The sizing that the user's limits, the model's layers and the verify scheme lead to."""
        num_layers = len(layers.recurrent)
        num_resident = limits.max_batch_size * mapping.pp_size
        num_dummy_slots = num_reserved_dummy_slots(spec_config, limits.max_batch_size, mapping)
        side_bytes = 0 if verify is None else verify.quota_bytes_per_slot_layer
        states = LiveStates(
            floor_slots=live_floor_slots(limits.max_batch_size, mapping.pp_size, num_dummy_slots),
            max_util_for_resume=config.max_util_for_resume,
            pool_slot_bytes=spec.pool_slot_bytes(num_layers),
            reserved_bytes_per_slot=num_layers * side_bytes,
        )
        return cls(
            layers=layers,
            kv_type=kv_type,
            limits=limits,
            max_util_for_resume=config.max_util_for_resume,
            spec=spec,
            verify=verify,
            states=states,
            snapshots=SnapshotRules.of(config, limits.tokens_per_block),
            num_resident=num_resident,
            num_dummy_slots=num_dummy_slots,
            enable_block_reuse=config.enable_block_reuse,
            has_pool_ratio=config.pool_ratio is not None,
            max_gpu_total_bytes=config.max_gpu_total_bytes,
        )

    @property
    def reserves_side_bytes(self) -> bool:
        """Whether something beside the pools is paid for by the quota on this rank."""
        return self.states.reserved_bytes_per_slot > 0

    @property
    def off_floor_cause(self) -> str | None:
        """Why the state pool is sized by a ratio and not by its floor, with the remedy; None where the floor
        decides.
        """
        if self.enable_block_reuse:
            return (
                "block reuse keeps snapshots in the state pool: set kv_cache_config.enable_block_reuse=False"
            )
        if self.has_pool_ratio:
            return "kv_cache_config.pool_ratio sizes the state pool: leave pool_ratio out"
        if self.bytes_per_token == 0:
            return "this rank has no attention layer to take the rest of the quota: choose another pp_size"
        return None

    @property
    def is_at_live_floor(self) -> bool:
        return self.reserves_side_bytes and self.off_floor_cause is None

    def state_quota(self, max_tokens: int = 0) -> int:
        """Bytes of quota for states when `max_tokens` are cached: the live ones, and snapshots."""
        return self.states.quota_bytes + self._num_snapshots(max_tokens) * self.states.pool_bytes_per_slot

    def quota_from_max_tokens(self, max_tokens: int) -> int:
        """Bytes for `max_tokens` cached tokens: attention, states, and a partial page per request where
        snapshots end in one.

        At the floor, where its grains hold more slots than are kept, what these cost beside the pools comes
        on top.
        """
        attention = AttentionSizing.quota_from_max_tokens(self, max_tokens)
        pages = self.num_resident * self.bytes_per_page if self.snapshots.exists else 0
        base = attention + self.state_quota(max_tokens) + pages
        if not self.is_at_live_floor:
            return base
        return base + self.states.reserved_beyond_kept_bytes(base, self.max_util_for_resume)

    def cost(self) -> CacheCost:
        """Attention's line, with the live states' quota and fixed snapshots before the first token, and each
        token's share of the periodic ones.
        """
        attention = AttentionSizing.cost(self)
        pages = self.num_resident * self.bytes_per_page if self.snapshots.exists else 0
        interval = self.snapshots.interval_tokens
        share = self.states.pool_bytes_per_slot / interval if interval else 0.0
        return CacheCost(
            slope_bytes=attention.slope_bytes + share,
            intercept_bytes=attention.intercept_bytes + self.state_quota() + pages,
        )

    def minimum_quota(self) -> int:
        """The smallest GPU quota that holds all live states and one attention page."""
        return max(self.quota_from_max_tokens(0), self.state_quota() + self.bytes_per_page)

    @property
    def free_side_bytes_per_slot(self) -> int:
        """Bytes beside the pools that the quota does not pay for, per slot over all layers, its count
        included.
        """
        if self.verify is None or not self.has_states:
            return 0
        per_layer = self.verify.bytes_per_slot_layer - self.verify.quota_bytes_per_slot_layer
        return len(self.layers.recurrent) * per_layer + COUNT_DTYPE.itemsize

    def num_state_slots(self, built: KVCacheManagerConfig) -> int:
        if not self.has_states:
            return 0
        split = split_gpu_quota(built)
        return split.num_slots[split.slot_sizes.index(self.states.pool_slot_bytes)]

    @property
    def has_states(self) -> bool:
        return bool(self.layers.recurrent)

    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """One storage layer per local layer, numbered by local id."""
        states: list[LayerConfig] = [
            SsmLayerConfig(
                layer_id=LayerId(local),
                buffers=[
                    BufferConfig(role=MambaRole.SSM_STATE, size=self.spec.ssm_bytes),
                    BufferConfig(role=MambaRole.CONV_STATE, size=self.spec.conv_bytes),
                ],
            )
            for local in self.layers.recurrent
        ]
        layers = (*AttentionSizing.layer_configs(self), *states)
        return tuple(sorted(layers, key=lambda layer: layer.layer_id))

    def plan_config(
        self, config: KVCacheManagerConfig, kv_cache_config: KvCacheConfigLike
    ) -> KVCacheManagerConfig:
        """`config` with floors and a typical step, and the GPU tier as the live floor leaves it.

        The caller's config, its tiers included, is left as it is. Raises ValueError, in this order, for a
        pool rebalance, for side bytes off the live floor, for a quota that cannot hold the live states.
        """
        if not self.has_states:
            return config
        self._check_rebalance(kv_cache_config)
        self._check_floor()
        quota = config.cache_tiers[0].quota
        self._check_quota(quota)
        floor = BatchDesc([_EMPTY] * self.states.floor_slots)
        dummies = (_EMPTY,) * self.num_dummy_slots
        constraints = [replace(batch, kv_caches=(*batch.kv_caches, *dummies)) for batch in config.constraints]
        built = replace(
            config,
            constraints=(*constraints, floor),
            typical_step=None
            if self.has_pool_ratio
            else self._typical_batch(quota, kv_cache_config.avg_seq_len),
        )
        return self._at_floor(built, quota) if self.is_at_live_floor else built

    def build_config(
        self, config: KVCacheManagerConfig, kv_cache_config: KvCacheConfigLike
    ) -> KVCacheManagerConfig:
        """`plan_config`; at the live floor one log line gives the split."""
        built = self.plan_config(config, kv_cache_config)
        if self.is_at_live_floor:
            quota, tier = config.cache_tiers[0].quota, built.cache_tiers[0].quota
            logger.info(
                f"GPU cache quota {quota / _MIB:.1f} MiB: {(quota - tier) / _MIB:.1f} MiB for the draft "
                f"records of {self.num_state_slots(built)} slots, {tier / _MIB:.1f} MiB for states and "
                "attention pages"
            )
        return built

    def _check_rebalance(self, kv_cache_config: KvCacheConfigLike) -> None:
        if self.verify is not None and kv_cache_config.enable_kv_pool_rebalance:
            raise ValueError(
                "kv_cache_config.enable_kv_pool_rebalance is True, but a rebalance moves state slots "
                "under their pending drafts: set enable_kv_pool_rebalance=False"
            )

    def _check_floor(self) -> None:
        cause = self.off_floor_cause
        if self.reserves_side_bytes and cause is not None:
            raise ValueError(
                "kda_token_states=True needs a number of state slots that is known beforehand, but "
                f"{cause}, or set kda_token_states=False"
            )

    def _check_quota(self, quota: int) -> None:
        minimum = self.minimum_quota()
        if quota < minimum:
            raise ValueError(
                f"a GPU cache quota of {quota} bytes is too small for live recurrent states: "
                f"{self.states.floor_slots} of them ({self.num_resident} requests, {self.num_dummy_slots} "
                f"dummies) and one attention page need {minimum} bytes. Raise max_gpu_total_bytes, "
                "max_tokens or free_gpu_memory_fraction, or lower max_batch_size."
            )

    def _typical_batch(self, quota: int, avg_seq_len: int | None) -> BatchDesc:
        length = avg_seq_len or max(1, self.limits.max_seq_len // 2)
        capacity = length + self.limits.headroom_tokens
        if self.is_at_live_floor:
            # Attention alone would fill the quota, so the ratio leaves the states less than their floor: the
            # floor decides.
            filling = math.ceil(quota / (self.num_resident * self.bytes_per_token))
            capacity = max(capacity, min(filling, MAX_CAPACITY_TOKENS))
        elif avg_seq_len is None:
            logger.warning_once(
                "kv_cache_config.avg_seq_len is not set: state and attention pools are sized for "
                f"sequences of {length} tokens, half of max_seq_len"
            )
        typical = KVCacheDesc(capacity=capacity, history_length=capacity - self.limits.headroom_tokens)
        return BatchDesc([*[typical] * self.num_resident, *[_EMPTY] * self.num_dummy_slots])

    def _at_floor(self, config: KVCacheManagerConfig, quota: int) -> KVCacheManagerConfig:
        reserved = self.states.reserve(quota)
        tiers = (GpuCacheTierConfig(quota=reserved.tier_bytes), *config.cache_tiers[1:])
        config = replace(config, cache_tiers=tiers)
        split, num_slots = split_gpu_quota(config), self.num_state_slots(config)
        if num_slots != reserved.slots:
            raise ValueError(
                f"kda_token_states=True needs {reserved.slots} state slots, but the storage would hold "
                f"{num_slots}: attention pages of {self.bytes_per_page} bytes share a pool with the states "
                "or are too few to take the rest. Choose another tokens_per_block or a smaller quota."
            )
        needed = split.pool_bytes + reserved.reserved_bytes
        exceeds = split.pool_bytes > round_up(reserved.tier_bytes, split.grain)
        if exceeds and 0 < self.max_gpu_total_bytes < needed:
            raise ValueError(
                f"a GPU cache quota of {quota} bytes is too small for live recurrent states in grains of "
                f"{split.grain} bytes: they and one attention page need {needed} bytes. Raise "
                "max_gpu_total_bytes or lower max_batch_size."
            )
        return config

    def _num_snapshots(self, max_tokens: int) -> int:
        rules = self.snapshots
        periodic = max_tokens // rules.interval_tokens if rules.interval_tokens else 0
        return self.num_resident * rules.num_fixed(self.limits.max_seq_len) + periodic
