# SPDX-License-Identifier: Apache-2.0
"""How many bytes the caches of a model, and of its drafter, may take: `KvCacheCreator`."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike, KvCacheSettings
from tensorrt_llm._torch.pyexecutor.kv_cache.create import create_manager, device_or_default
from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.kv_cache.mamba_cache_manager.plan import CachePlan
from tensorrt_llm._torch.pyexecutor.kv_cache.select import get_kv_cache_manager_cls
from tensorrt_llm._torch.pyexecutor.kv_cache.sizing import CacheCost
from tensorrt_llm.logger import logger
from tensorrt_llm.runtime.kv_cache_manager_v2 import GpuCacheTierConfig, OutOfMemoryError

_GIB = 1 << 30
_SEARCH_STEP_BYTES = 1 << 20
"""Below the storage's smallest grain, so that a finer search would change nothing."""


class DeviceMemory(Protocol):
    """What is known of the memory that the caches live in, in bytes."""

    def total_bytes(self) -> int: ...
    def free_bytes(self) -> int: ...
    def start_measuring(self) -> None:
        """Forget the peak so far."""
        ...

    def peak_bytes(self) -> int:
        """The most that was in use since `start_measuring`, by anybody, pools of the cache included."""
        ...


class CpuMemory:
    """The host's memory. A step's activations are small beside it and not measured."""

    def total_bytes(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def start_measuring(self) -> None:
        """Nothing is measured."""

    def peak_bytes(self) -> int:
        return self.total_bytes() - self.free_bytes()


class CudaMemory:
    """One GPU's memory: torch's peak, and what others hold of it now."""

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def start_measuring(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        torch.cuda.synchronize()
        beside_torch = self.total_bytes() - self.free_bytes() - torch.cuda.memory_reserved()
        return torch.cuda.max_memory_allocated() + beside_torch


class Managers(NamedTuple):
    """The target's manager, and the drafter's where it has a cache of its own."""

    target: KVCacheManagerV2
    draft: KVCacheManagerV2 | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSplit:
    """Bytes of quota for the target's cache and for the drafter's, which hold equally many tokens."""

    target_bytes: int
    draft_bytes: int


def split_budget(budget_bytes: int, target: CacheCost, draft: CacheCost) -> BudgetSplit:
    """Divide one budget so that both caches hold the same number of tokens.

    Raises ValueError where the fixed costs alone exceed it.
    """
    fixed = target.intercept_bytes + draft.intercept_bytes
    if fixed > budget_bytes:
        raise ValueError(
            f"the caches of target and drafter need {fixed} bytes before the first token, but their budget "
            f"is {budget_bytes}: raise max_gpu_total_bytes or free_gpu_memory_fraction, or lower "
            "max_batch_size"
        )
    slope = target.slope_bytes + draft.slope_bytes
    tokens = (budget_bytes - fixed) / slope if slope else 0.0
    draft_bytes = math.floor(draft.intercept_bytes + draft.slope_bytes * tokens)
    return BudgetSplit(target_bytes=budget_bytes - draft_bytes, draft_bytes=draft_bytes)


class KvCacheCreator:
    """Chooses, sizes and builds the managers of a model and of its drafter.

    The quota is the lowest of what `max_tokens` need, `max_gpu_total_bytes`, and `free_gpu_memory_fraction`
    of what a measured step leaves free. Side buffers count once: those that the quota pays for in the quota,
    others in the measured peak.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        draft_plan: CachePlan | None = None,
        kv_connector_manager: object | None = None,
        execution_stream: torch.cuda.Stream | None = None,
        is_disagg: bool = False,
        enable_stats: bool = False,
        device: str | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._plan = plan
        self._draft_plan = draft_plan
        self._kv_connector_manager = kv_connector_manager
        self._execution_stream = execution_stream
        self._is_disagg = is_disagg
        self._enable_stats = enable_stats
        self._device = device_or_default(device)
        self._memory = memory or (CudaMemory() if self._device == "cuda" else CpuMemory())
        self._budget_bytes: int | None = None
        self._num_measured_slots: tuple[int, ...] = ()

    @property
    def _config(self) -> KvCacheConfigLike:
        return self._plan.kv_cache_config

    @property
    def max_gpu_total_bytes(self) -> int:
        """The quota for all caches together before `max_tokens` is looked at; 0 where nothing bounds it, or
        where the memory has nothing left, which `build_managers` refuses.
        """
        bounds = [self._config.max_gpu_total_bytes or None, self._budget_bytes]
        return min((bound for bound in bounds if bound is not None), default=0)

    def try_prepare_estimation(self) -> bool:
        """Whether a step should be measured: where a share of the free memory is asked for, on a GPU.

        On a CPU, and where nothing is asked for, the budget is set here.
        """
        fraction = self._config.free_gpu_memory_fraction
        if fraction is None:
            return False
        if self._device == "cuda":
            return True
        self._budget_bytes = int(fraction * self._memory.free_bytes())
        return False

    def configure_kv_cache_capacity(self, run_step: Callable[[Managers], None]) -> None:
        """Measure `run_step` (a full step of dummy requests) on throw-away caches, and set the budget by its
        peak.
        """
        managers = self._build(self._estimation_config(), self._estimation_config(), is_estimating=True)
        self._memory.start_measuring()
        try:
            run_step(managers)
            peak = self._memory.peak_bytes()
            built = [manager for manager in managers if manager is not None]
            in_quota = sum(manager.allocated_bytes + manager.side_bytes_in_quota for manager in built)
            beside = sum(manager.side_bytes - manager.side_bytes_in_quota for manager in built)
            self._num_measured_slots = tuple(manager.num_state_slots for manager in built)
        finally:
            for manager in managers:
                if manager is not None:
                    manager.shutdown()
        fraction = self._config.free_gpu_memory_fraction or 1.0
        available = self._memory.total_bytes() - peak + in_quota
        self._budget_bytes = max(0, int(fraction * available))
        logger.info(
            f"KV cache budget {self._budget_bytes / _GIB:.2f} GiB: {fraction} of {available / _GIB:.2f} "
            f"GiB left by a step with a peak of {(peak - in_quota) / _GIB:.2f} GiB, {beside / _GIB:.2f} GiB "
            "of it side buffers"
        )

    def build_managers(self) -> Managers:
        """Build the managers within the budget. Raises ValueError where it is too small."""
        self._check_budget()
        total = self._less_unmeasured_side_buffers(self.max_gpu_total_bytes)
        target, *draft = (with_quota(self._config, share) for share in self._shares(total))
        return self._build(target, draft[0] if draft else target)

    @property
    def _plans(self) -> list[CachePlan]:
        return [self._plan] if self._draft_plan is None else [self._plan, self._draft_plan]

    def _shares(self, quota_bytes: int) -> list[int]:
        """What the target's cache, and the drafter's where there is one, get of a quota; 0 is no bound.

        Raises ValueError where it is too small for both.
        """
        if self._draft_plan is None or not quota_bytes:
            return [quota_bytes] * len(self._plans)
        split = split_budget(quota_bytes, self._plan.sizing().cost(), self._draft_plan.sizing().cost())
        return [split.target_bytes, split.draft_bytes]

    def _check_budget(self) -> None:
        # 0 bytes of quota would read as "no bound" from here on.
        if self._budget_bytes == 0:
            raise ValueError(
                f"kv_cache_config.free_gpu_memory_fraction is {self._config.free_gpu_memory_fraction}, which "
                "is 0 bytes of what the model and one full step leave free: raise it, lower max_num_tokens "
                "or max_batch_size, or split the model over more ranks"
            )

    def _less_unmeasured_side_buffers(self, quota_bytes: int) -> int:
        """`quota_bytes`, less the side buffers of the state slots that the measured managers did not have.

        Raises ValueError where these leave less than the live states need.
        """
        if self._budget_bytes is None or not quota_bytes:
            return quota_bytes
        budget, minimum = self._budget_bytes, sum(plan.sizing().minimum_quota() for plan in self._plans)
        excess = self._total_bytes(quota_bytes) - budget
        if excess <= 0:
            return quota_bytes
        # A smaller quota has no more slots, so the whole excess off is enough; the best quota lies between.
        low, high = max(minimum, quota_bytes - excess), quota_bytes
        if self._total_bytes(low) > budget:
            low = minimum
        total = self._total_bytes(low)
        if total > budget:
            raise ValueError(
                f"the KV cache budget is {budget} bytes, but the smallest quota, {low} bytes, and the "
                f"buffers beside its state slots need {total}: raise max_gpu_total_bytes or "
                "free_gpu_memory_fraction, lower max_batch_size, or choose another kda_verify_scheme"
            )
        while high - low > _SEARCH_STEP_BYTES:
            middle = (low + high) // 2
            low, high = (middle, high) if self._total_bytes(middle) <= budget else (low, middle)
        return low

    def _total_bytes(self, quota_bytes: int) -> int:
        """A quota with the side buffers beside its caches that were not measured."""
        try:
            slots = [
                _num_slots(plan.with_config(with_quota(self._config, share)))
                for plan, share in zip(self._plans, self._shares(quota_bytes), strict=True)
            ]
        except (ValueError, OutOfMemoryError):
            # No cache, no slots: where it is too small, a larger one is looked for, else the build says why.
            return quota_bytes
        unmeasured = [
            max(0, found - measured)
            for found, measured in zip(slots, self._num_measured_slots or (0,) * len(slots), strict=True)
        ]
        return quota_bytes + sum(
            count * plan.sizing().free_side_bytes_per_slot
            for count, plan in zip(unmeasured, self._plans, strict=True)
        )

    def _build(
        self, target: KvCacheConfigLike, draft: KvCacheConfigLike, is_estimating: bool = False
    ) -> Managers:
        built = self._manager(self._plan.with_config(target), is_estimating)
        if self._draft_plan is None:
            return Managers(built, None)
        try:
            return Managers(built, self._manager(self._draft_plan.with_config(draft), is_estimating))
        except Exception:
            built.shutdown()
            raise

    def _manager(self, plan: CachePlan, is_estimating: bool) -> KVCacheManagerV2:
        return create_manager(
            plan,
            get_kv_cache_manager_cls(plan.traits, plan.kv_cache_config, self._is_disagg),
            kv_connector_manager=self._kv_connector_manager,
            is_estimating_kv_cache=is_estimating,
            execution_stream=self._execution_stream,
            is_disagg=self._is_disagg,
            enable_stats=self._enable_stats,
            device=self._device,
        )

    def _estimation_config(self) -> KvCacheSettings:
        """Just enough tokens for one full step: its prompts, and a page per request for what their ends leave
        over.
        """
        plan = self._plan
        tokens = plan.max_num_tokens + plan.max_batch_size * plan.tokens_per_block
        return with_quota(self._config, 0, max_tokens=tokens, keeps_ratio=False)


def _num_slots(plan: CachePlan) -> int:
    """State slots of the plan's cache within its max_gpu_total_bytes. Raises what building it would."""
    config, sizing = plan.kv_cache_config, plan.sizing()
    tiers = (GpuCacheTierConfig(quota=config.max_gpu_total_bytes),)
    return sizing.num_state_slots(
        sizing.plan_config(sizing.base_config(config, tiers, enable_stats=False), config)
    )


def with_quota(
    config: KvCacheConfigLike,
    max_gpu_total_bytes: int,
    *,
    max_tokens: int | None = None,
    keeps_ratio: bool = True,
) -> KvCacheSettings:
    """The configuration with this quota, as a plain value; `max_tokens` replaces the user's where given."""
    fields = {name: getattr(config, name) for name in KvCacheSettings.__dataclass_fields__}
    fields["max_gpu_total_bytes"] = max_gpu_total_bytes
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if not keeps_ratio:
        fields["pool_ratio"] = fields["avg_seq_len"] = None
    return KvCacheSettings(**fields)
