# SPDX-License-Identifier: Apache-2.0
"""The cache's own construction, from budget to slots and pages, with sizes in place of memory.

`KvCacheCreator` measures, divides and builds as it does in the engine; what it builds here are managers that
have worked out what they would allocate and have allocated nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tensorrt_llm._torch.pyexecutor.kv_cache.budget import KvCacheCreator, Managers, with_quota
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.hybrid_sizing import HybridSizing
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.select import get_kv_cache_manager_cls
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import gpu_quota_bytes
from tensorrt_llm._torch.pyexecutor.kv_cache.storage_builder import cache_tiers
from tensorrt_llm.planning.request import GpuMemory
from tensorrt_llm.planning.units import human
from tensorrt_llm.runtime.kv_cache_manager_v2 import OutOfMemoryError
from tensorrt_llm.runtime.kv_cache_manager_v2.quota import TierSplit, split_gpu_quota


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedManager:
    """What a cache manager of one rank allocates, under its names: `num_state_slots` rows of states and side
    buffers, and `split`, the pools, within `quota_bytes`.
    """

    plan: CachePlan
    sizing: HybridSizing
    quota_bytes: int
    split: TierSplit
    num_state_slots: int

    @classmethod
    def of(cls, plan: CachePlan) -> "SizedManager":
        """Raises ValueError for what the manager's constructor and its storage refuse."""
        config, sizing = plan.kv_cache_config, plan.sizing()
        assert isinstance(sizing, HybridSizing), "a model without KDA layers is refused before"
        get_kv_cache_manager_cls(plan.traits, config)
        quota = gpu_quota_bytes(config, sizing)
        tiers = cache_tiers(config, quota, plan.mapping, "cpu")
        built = sizing.plan_config(sizing.base_config(config, tiers, enable_stats=False), config)
        try:
            split, num_slots = split_gpu_quota(built), sizing.num_state_slots(built)
        except OutOfMemoryError as error:
            raise ValueError(f"the cache does not fit: {error}") from error
        return cls(plan=plan, sizing=sizing, quota_bytes=quota, split=split, num_state_slots=num_slots)

    @property
    def num_attention_pages(self) -> int:
        """Pages of the attention pool; 0 on a rank without attention layers."""
        page = self.sizing.bytes_per_page
        return self.split.num_slots[self.split.slot_sizes.index((page,))] if page else 0

    @property
    def held_tokens(self) -> int | None:
        """Tokens of all attention pages; None where no layer of the rank attends."""
        if not self.sizing.bytes_per_token:
            return None
        return self.num_attention_pages * self.sizing.limits.tokens_per_block

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots and pages in the pools."""
        return sum(
            count * sum(sizes)
            for count, sizes in zip(self.split.num_slots, self.split.slot_sizes, strict=True)
        )

    @property
    def side_bytes_in_quota(self) -> int:
        return self.num_state_slots * self.sizing.states.reserved_bytes_per_slot

    @property
    def side_bytes_beside_quota(self) -> int:
        return self.num_state_slots * self.sizing.free_side_bytes_per_slot

    @property
    def side_bytes(self) -> int:
        return self.side_bytes_in_quota + self.side_bytes_beside_quota

    def shutdown(self) -> None:
        """There is nothing to give back."""


class _PlannedMemory:
    """A GPU that holds weights, a step's workspace, and the managers that are being measured."""

    def __init__(self, gpu: GpuMemory, weights_bytes: int) -> None:
        self._gpu = gpu
        self._weights_bytes = weights_bytes
        self._cache_bytes = 0

    @property
    def occupied_bytes(self) -> int:
        return self._weights_bytes + self._gpu.workspace_bytes

    def total_bytes(self) -> int:
        return self._gpu.total_bytes

    def free_bytes(self) -> int:
        return self._gpu.total_bytes - self.occupied_bytes

    def start_measuring(self) -> None:
        self._cache_bytes = 0

    def run_step(self, managers: Managers) -> None:
        built = managers.target
        self._cache_bytes = built.allocated_bytes + built.side_bytes

    def peak_bytes(self) -> int:
        return self.occupied_bytes + self._cache_bytes


class _SizingCreator(KvCacheCreator):
    """`KvCacheCreator` whose managers are sizes. The device is the GPU that it is planned for."""

    def _manager(self, plan: CachePlan, is_estimating: bool) -> KVCacheManagerV2:
        # The creator reads a manager's sizes and shuts it down; both are there.
        return cast(KVCacheManagerV2, SizedManager.of(plan))


def size_cache(plan: CachePlan, gpu: GpuMemory | None, weights_bytes: int) -> SizedManager:
    """The cache of one rank: within the quota of `plan`, or within what weights and workspace leave of `gpu`.

    Raises ValueError for what the runtime refuses, and where the GPU has nothing left for a cache.
    """
    if gpu is None:
        creator = _SizingCreator(plan, device="cuda")
        return cast(SizedManager, creator.build_managers().target)
    memory = _PlannedMemory(gpu, weights_bytes)
    creator = _SizingCreator(plan, device="cuda", memory=memory)
    if memory.free_bytes() > 0:
        creator.configure_kv_cache_capacity(memory.run_step)
    if not creator.max_gpu_total_bytes:
        raise ValueError(
            f"{human(weights_bytes)} of weights per rank and {human(gpu.workspace_bytes)} of workspace leave "
            f"nothing of {human(gpu.total_bytes)} for the cache"
        )
    return cast(SizedManager, creator.build_managers().target)


def agree(stages: Sequence[SizedManager]) -> list[SizedManager]:
    """The pipeline's stages with quotas that hold as many tokens as that of the stage with the fewest.

    Ranks settle this by a collective; here all of them are at hand.
    """
    if len(stages) == 1:
        return list(stages)
    tokens = [_usable_tokens(stage) for stage in stages]
    least = min(tokens)
    return [
        stage if own == least else _with_tokens(stage, least)
        for stage, own in zip(stages, tokens, strict=True)
    ]


def _usable_tokens(stage: SizedManager) -> int:
    sizing = stage.sizing
    return sizing.max_tokens_from_quota(int(stage.quota_bytes * sizing.max_util_for_resume))


def _with_tokens(stage: SizedManager, tokens: int) -> SizedManager:
    """The stage with the quota that the runtime derives from a number of tokens, if that is the smaller."""
    # max_tokens counts from 1; with none at all the stage that set it is refused as too small anyway.
    config = with_quota(stage.plan.kv_cache_config, stage.quota_bytes, max_tokens=max(1, tokens))
    return SizedManager.of(stage.plan.with_config(config))
