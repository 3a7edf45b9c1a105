# SPDX-License-Identifier: Apache-2.0
"""How a tier's quota in bytes becomes slots per pool group. Pure arithmetic; nothing here touches memory.

Memory is handed out in grains. A pool of n slots takes ceil(n * slot bytes / grain) grains. The steps:

1. `min_slots`: slots that must exist (one sequence, plus every constraint batch divided by
   max_util_for_resume).
2. `initial_ratio`: the share of bytes per pool group, kept in float32.
3. `distribute`: grains by ratio; a group that would get its floor or less is pinned to it, the rest shares
   the rest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ._math import HalfOpenRange, cdiv, float32, round_up
from ._types import CacheTier, LifeCycleId
from .config import BatchDesc, KVCacheDesc, KVCacheManagerConfig
from .errors import MisuseError, OutOfPagesError
from .layout import StorageLayout, build_layout
from .life_cycle import AttnLifeCycle, LifeCycle, LifeCycleRegistry
from .scratch import ScratchPlan, make_scratch_plan

GIB = 1 << 30
GPU_GRAIN_BYTES = 2 << 20
HOST_GRAIN_BYTES = 4 << 10
DISK_GRAIN_BYTES = 2 << 20
_MAX_GPU_GRAIN_SHIFT = 4
_DEFAULT_STEP = BatchDesc([KVCacheDesc(capacity=2049, history_length=2048)])


def grain_bytes(tier: CacheTier, quota_bytes: int) -> int:
    """Return the allocation unit of a tier.

    GPU: 2 MiB below 2 GiB of quota, then doubling with it up to 32 MiB from 16 GiB on. Host 4 KiB, disk 2
    MiB.
    """
    if tier is CacheTier.HOST_MEM:
        return HOST_GRAIN_BYTES
    if tier is CacheTier.DISK:
        return DISK_GRAIN_BYTES
    floor_log2_gib = (quota_bytes // GIB).bit_length() - 1
    return GPU_GRAIN_BYTES << min(max(floor_log2_gib, 0), _MAX_GPU_GRAIN_SHIFT)


def slots_to_keep(num_slots: int, max_util_for_resume: float) -> int:
    """Return ceil(num_slots / float32(max_util_for_resume)), divided in double.

    Rounding the ratio to float32 first matters: 19 slots at 0.95 are 21 to keep, while the double 0.95
    gives 20.
    """
    return math.ceil(num_slots / float32(max_util_for_resume))


def _attention_slots(
    life_cycle: AttnLifeCycle,
    batch: BatchDesc,
    tokens_per_block: int,
    saved_pages: Callable[[KVCacheDesc, HalfOpenRange], int],
) -> int:
    """Return pages of `batch`: those of the common system prompt once, then each request's own.

    `saved_pages`: how many pages fewer a request takes behind the system prompt because blocks share slots.
    """
    system = HalfOpenRange(0, batch.system_prompt_length // tokens_per_block)
    stale_ranges = [life_cycle.stale_range(desc.history_length, tokens_per_block) for desc in batch.kv_caches]
    own_pages = 0
    for desc, stale in zip(batch.kv_caches, stale_ranges, strict=True):
        blocks = HalfOpenRange(0, cdiv(desc.capacity, tokens_per_block))
        kept = blocks.length - blocks.intersect(stale).length
        kept_of_system = system.length - system.intersect(stale).length
        own_pages += max(0, kept - kept_of_system - saved_pages(desc, system))
    if not stale_ranges:
        return 0
    common_stale = stale_ranges[0]
    for stale in stale_ranges[1:]:
        common_stale = common_stale.intersect(stale)
    return own_pages + system.length - system.intersect(common_stale).length


def batch_slots(
    batch: BatchDesc,
    life_cycles: Sequence[LifeCycle],
    tokens_per_block: int,
    scratch: ScratchPlan | None = None,
) -> list[int]:
    """Return the slots that `batch` needs per life cycle; a recurrent state takes one at any capacity.

    `scratch`: how blocks that a step makes stale before it ends share slots; None if they do not.
    """

    def pages_of(index: LifeCycleId, value: AttnLifeCycle) -> int:
        def saved_pages(desc: KVCacheDesc, system: HalfOpenRange) -> int:
            if scratch is None:
                return 0
            sharing = scratch.blocks(index, value, desc.capacity, desc.history_length, tokens_per_block)
            num_sharing = HalfOpenRange(max(sharing.start, system.stop), sharing.stop).length
            return num_sharing - scratch.num_slots(index, num_sharing)

        return _attention_slots(value, batch, tokens_per_block, saved_pages)

    return [
        pages_of(LifeCycleId(index), value) if isinstance(value, AttnLifeCycle) else len(batch.kv_caches)
        for index, value in enumerate(life_cycles)
    ]


def _default_floor(life_cycles: Sequence[LifeCycle], tokens_per_block: int) -> list[int]:
    """Return the slots one decoding sequence needs: 1, or all blocks a window can touch plus its sinks."""
    window_floors = {
        index: life_cycle.num_sink_blocks
        + (life_cycle.window_size + tokens_per_block - 2) // tokens_per_block
        + 1
        for index, life_cycle in enumerate(life_cycles)
        if isinstance(life_cycle, AttnLifeCycle) and life_cycle.window_size is not None
    }
    full_attention_floor = max(window_floors.values(), default=1)
    return [
        window_floors.get(index, full_attention_floor if isinstance(life_cycle, AttnLifeCycle) else 1)
        for index, life_cycle in enumerate(life_cycles)
    ]


def _sum_per_group(per_life_cycle: Sequence[int], layout: StorageLayout) -> list[int]:
    return [sum(per_life_cycle[owner] for owner in group.life_cycles) for group in layout.pool_groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A model's demands on a tier: slot sizes, floors and ratio per pool group, whatever the quota.

    `floors` in slots, `typical_slots` in slots; `weights` are given shares of bytes (float32) that win over
    `typical_slots`, or None.
    """

    slot_sizes: tuple[tuple[int, ...], ...]
    floors: tuple[int, ...]
    typical_slots: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def ratio(self, grain: int) -> tuple[float, ...]:
        """Return the share of bytes per pool group in float32: given weights, or typical slots in grains."""
        if self.weights is not None:
            return self.weights
        sizes = [
            grains_of(slots, pools, grain)
            for slots, pools in zip(self.typical_slots, self.slot_sizes, strict=True)
        ]
        total = sum(sizes)
        return tuple(float32(size / total) for size in sizes)


def min_slots(
    config: KVCacheManagerConfig, life_cycles: Sequence[LifeCycle], scratch: ScratchPlan | None = None
) -> list[int]:
    """Return the floor per life cycle: one sequence, and every constraint batch divided by the ratio."""
    tokens_per_block = config.tokens_per_block
    floors = _default_floor(life_cycles, tokens_per_block)
    for batch in config.constraints:
        needed = batch_slots(batch, life_cycles, tokens_per_block, scratch)
        scaled = [slots_to_keep(slots, config.max_util_for_resume) for slots in needed]
        floors = [max(pair) for pair in zip(floors, scaled, strict=True)]
    return floors


def make_sizing(config: KVCacheManagerConfig) -> Sizing:
    """Return the demands of `config`. MisuseError when initial_pool_ratio has the wrong number of weights."""
    registry = LifeCycleRegistry(config.layers, config.tokens_per_block)
    layout = build_layout(config.layers, registry, config.tokens_per_block)
    life_cycles = tuple(registry)
    scratch = make_scratch_plan(config.swa_scratch_reuse, layout.layer_shares)
    floors = min_slots(config, life_cycles, scratch)
    if config.typical_step is not None:
        typical = batch_slots(config.typical_step, life_cycles, config.tokens_per_block, scratch)
    elif config.constraints:
        typical = floors
    else:
        typical = batch_slots(_DEFAULT_STEP, life_cycles, config.tokens_per_block, scratch)
    return Sizing(
        slot_sizes=tuple(group.slot_sizes for group in layout.pool_groups),
        floors=tuple(_sum_per_group(floors, layout)),
        typical_slots=tuple(_sum_per_group(typical, layout)),
        weights=_group_weights(config.initial_pool_ratio, layout),
    )


def _group_weights(ratio: Sequence[float] | None, layout: StorageLayout) -> tuple[float, ...] | None:
    if ratio is None:
        return None
    num_groups, num_life_cycles = len(layout.pool_groups), len(layout.group_of)
    if len(ratio) == num_life_cycles:
        sums = [math.fsum(ratio[owner] for owner in group.life_cycles) for group in layout.pool_groups]
        return tuple(float32(weight) for weight in sums)
    if len(ratio) == num_groups:
        return tuple(float32(weight) for weight in ratio)
    raise MisuseError(
        f"initial_pool_ratio has {len(ratio)} weights; give one per layer group ({num_life_cycles}) or per "
        f"pool group ({num_groups})"
    )


def grains_of(num_slots: int, slot_sizes: Sequence[int], grain: int) -> int:
    """Return the grains that `num_slots` slots take over all pools of a group."""
    return sum(cdiv(num_slots * size, grain) for size in slot_sizes)


def slots_in(num_grains: int, slot_sizes: Sequence[int], grain: int) -> int:
    """Return the largest slot count of a group whose pools together fit into `num_grains` grains."""
    low, high = 0, max(0, num_grains) * grain // sum(slot_sizes) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if grains_of(middle, slot_sizes, grain) <= num_grains:
            low = middle
        else:
            high = middle
    return low


def usable_quota_bytes(quota_bytes: int, grain: int, sizing: Sizing) -> int:
    """Return the bytes really used: the quota rounded UP to grains, or what the floors need if more."""
    floor_grains = sum(
        grains_of(floor, pools, grain) for floor, pools in zip(sizing.floors, sizing.slot_sizes, strict=True)
    )
    return max(floor_grains * grain, round_up(quota_bytes, grain))


def distribute(
    num_grains: int,
    ratio: Sequence[float],
    floors: Sequence[int],
    slot_sizes: Sequence[Sequence[int]],
    grain: int,
) -> list[int]:
    """Return slots per pool group for `num_grains` grains.

    Groups are served by ascending ratio with round-half-even shares of what is left. A group whose share
    holds its floor or less is pinned to the floor's grains (which may hold more slots than the floor), and
    the others start over with the rest. Raises OutOfPagesError when the floors need more than `num_grains`.
    """
    slots = [0] * len(floors)
    active = sorted(range(len(floors)), key=lambda group: ratio[group])
    budget = num_grains
    while active:
        shares = _share_by_ratio(budget, ratio, active, slot_sizes, grain)
        slots = [shares.get(group, slots[group]) for group in range(len(slots))]
        pinned = [group for group in active if shares[group] <= floors[group]]
        if not pinned:
            break
        for group in pinned:
            floor_grains = grains_of(floors[group], slot_sizes[group], grain)
            slots[group] = slots_in(floor_grains, slot_sizes[group], grain)
            budget -= floor_grains
        if budget < 0:
            raise OutOfPagesError(
                f"{num_grains} grains of {grain} bytes cannot hold the floors {list(floors)}"
            )
        active = [group for group in active if group not in pinned]
    return [_fill_grains(count, pools, grain) for count, pools in zip(slots, slot_sizes, strict=True)]


def _share_by_ratio(
    budget: int,
    ratio: Sequence[float],
    active: Sequence[int],
    slot_sizes: Sequence[Sequence[int]],
    grain: int,
) -> dict[int, int]:
    """Return slots per active group (given in ascending ratio) for `budget` grains."""
    left, ratio_left = budget, math.fsum(ratio[group] for group in active)
    shares: dict[int, int] = {}
    for position, group in enumerate(active):
        is_last = position == len(active) - 1
        grains = left if is_last else round(left * ratio[group] / ratio_left)
        shares[group] = slots_in(grains, slot_sizes[group], grain)
        left -= grains_of(shares[group], slot_sizes[group], grain)
        ratio_left -= ratio[group]
    return shares


def _fill_grains(num_slots: int, slot_sizes: Sequence[int], grain: int) -> int:
    """Return the most slots that take the same grains as `num_slots` do."""
    return slots_in(grains_of(num_slots, slot_sizes, grain), slot_sizes, grain)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSplit:
    """How one tier is divided: slots per pool group, in grains of `grain` bytes."""

    grain: int
    num_slots: tuple[int, ...]
    slot_sizes: tuple[tuple[int, ...], ...]

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools, in whole grains."""
        pairs = zip(self.num_slots, self.slot_sizes, strict=True)
        return sum(grains_of(slots, pools, self.grain) for slots, pools in pairs) * self.grain


def split_tier(
    tier: CacheTier,
    quota_bytes: int,
    sizing: Sizing,
    *,
    ratio: Sequence[float] | None = None,
    grain: int | None = None,
) -> TierSplit:
    """Divide `quota_bytes` of a tier. Only the GPU tier has floors; a cold group may get no slots at all.

    `ratio`: shares per pool group that replace those of `sizing` (after a rebalance). `grain`: that of
    pools which exist already; by default the quota sets it.
    """
    grain = grain_bytes(tier, quota_bytes) if grain is None else grain
    floors = sizing.floors if tier is CacheTier.GPU_MEM else (0,) * len(sizing.floors)
    wanted = usable_quota_bytes(quota_bytes, grain, sizing) if tier is CacheTier.GPU_MEM else quota_bytes
    shares = sizing.ratio(grain) if ratio is None else ratio
    num_slots = distribute(round_up(wanted, grain) // grain, shares, floors, sizing.slot_sizes, grain)
    return TierSplit(grain=grain, num_slots=tuple(num_slots), slot_sizes=sizing.slot_sizes)


def split_gpu_quota(config: KVCacheManagerConfig, quota_bytes: int | None = None) -> TierSplit:
    """Return the GPU split of `config`, or of the same model with another quota."""
    quota = config.cache_tiers[0].quota if quota_bytes is None else quota_bytes
    return split_tier(CacheTier.GPU_MEM, quota, make_sizing(config))
