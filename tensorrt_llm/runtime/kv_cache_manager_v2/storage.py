# SPDX-License-Identifier: Apache-2.0
"""The levels of memory and who holds which slot of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ._types import GPU_LEVEL, CacheLevel, LifeCycleId, PoolGroupIndex, Priority, SlotId
from .config import KVCacheManagerConfig
from .errors import LogicError, OutOfPagesError
from .layout import StorageLayout
from .page import Page
from .pools import CpuCopier, CpuPool, Pool, copy_slots, total_host_bytes
from .quota import Sizing, TierSplit, make_sizing, split_tier
from .slots import SlotAllocator
from .streams import CpuStreamOps, Event, StreamHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStatistics:
    """Slots of one pool group at one level. `slot_sizes`: bytes per pool; the rest counts slots."""

    slot_sizes: tuple[int, ...]
    total: int
    free: int
    evictable: int

    @property
    def available(self) -> int:
        return self.free + self.evictable

    @property
    def unavailable(self) -> int:
        return self.total - self.available


class GroupStore:
    """One pool group at one level: its pools and the owners of its slots."""

    __slots__ = ("allocator", "pools")

    def __init__(self, pools: Sequence[Pool], num_slots: int) -> None:
        self.pools = tuple(pools)
        self.allocator = SlotAllocator(num_slots)

    def statistics(self) -> StorageStatistics:
        return StorageStatistics(
            slot_sizes=tuple(pool.slot_size for pool in self.pools),
            total=self.allocator.num_slots,
            free=self.allocator.num_free,
            evictable=0,
        )


def _cpu_pools(slot_sizes: Sequence[int], num_slots: int, grain: int) -> list[Pool]:
    reserved_slots = total_host_bytes() // sum(slot_sizes)
    return [CpuPool(size, num_slots, grain, reserved_slots) for size in slot_sizes]


class Storage:
    """All levels. Level 0 is the GPU tier (CPU memory in a CPU-only run)."""

    def __init__(self, config: KVCacheManagerConfig, layout: StorageLayout) -> None:
        self.layout = layout
        self.sizing: Sizing = make_sizing(config)
        self.copier = CpuCopier()
        self.streams = CpuStreamOps()
        tier = config.cache_tiers[0]
        self.quotas = [tier.quota]
        split = split_tier(tier.tier, tier.quota, self.sizing)
        self.levels: list[list[GroupStore]] = [self._make_level(split)]

    def _make_level(self, split: TierSplit) -> list[GroupStore]:
        return [
            GroupStore(_cpu_pools(sizes, num_slots, split.grain), num_slots)
            for sizes, num_slots in zip(split.slot_sizes, split.num_slots, strict=True)
        ]

    def group(self, life_cycle: LifeCycleId, level: CacheLevel = GPU_LEVEL) -> GroupStore:
        return self.levels[level][self.layout.group_of[life_cycle]]

    def statistics(self, level: CacheLevel) -> list[StorageStatistics]:
        return [group.statistics() for group in self.levels[level]]

    def new_pages(self, counts: Sequence[int], priority: Priority, stream: StreamHandle) -> list[list[Page]]:
        """Return `counts[life_cycle]` fresh GPU pages per life cycle, unowned by anyone but the caller.

        All or nothing: raises OutOfPagesError with nothing changed. `stream` waits for the slots' last uses.
        """
        needed = [0] * len(self.layout.pool_groups)
        for life_cycle, count in enumerate(counts):
            needed[self.layout.group_of[life_cycle]] += count
        self.require_room(needed)
        return [self._take(LifeCycleId(index), count, priority, stream) for index, count in enumerate(counts)]

    def require_room(self, needed: Sequence[int]) -> None:
        """Raise OutOfPagesError unless every pool group can give `needed[group]` GPU slots."""
        for index, count in enumerate(needed):
            statistics = self.levels[GPU_LEVEL][PoolGroupIndex(index)].statistics()
            if count > statistics.available:
                raise OutOfPagesError(
                    f"pool group {index} has {statistics.available} of {statistics.total} slots available, "
                    f"{count} are needed"
                )

    def _take(
        self, life_cycle: LifeCycleId, count: int, priority: Priority, stream: StreamHandle
    ) -> list[Page]:
        allocator = self.group(life_cycle).allocator
        slots = allocator.allocate(count)
        for slot in slots:
            self.streams.wait(stream, allocator.event_of(slot))
        return [Page(life_cycle, GPU_LEVEL, slot, priority) for slot in slots]

    def free(self, page: Page, event: Event | None) -> None:
        """Give a page's slot back; `event` is the last use."""
        if page.num_holders or page.num_locks:
            raise LogicError(
                f"slot {page.slot} is freed with {page.num_holders} holders, {page.num_locks} locks"
            )
        self.group(page.life_cycle, page.level).allocator.free(page.slot, event)

    def copy_page(self, dst: Page, src: Page, stream: StreamHandle) -> None:
        """Copy the content of `src` into the slot of `dst` on `stream`."""
        to, source = self.group(dst.life_cycle, dst.level), self.group(src.life_cycle, src.level)
        copy_slots(self.copier, to.pools, dst.slot, source.pools, src.slot, stream)

    def lock(self, page: Page) -> None:
        page.num_holders += 1
        page.num_locks += 1

    def release(self, page: Page, is_locked: bool, event: Event | None) -> None:
        """Take back one holder; the slot is freed when nobody else needs it."""
        page.num_locks -= is_locked
        page.num_holders -= 1
        if not page.num_holders:
            self.free(page, event)

    def slot_view(self, slot: SlotId, life_cycle: LifeCycleId) -> list[bytes]:
        """Return copies of the bytes of one GPU slot per pool. For tests."""
        return [
            bytes(pool.bytes_view()[slot * pool.slot_size : (slot + 1) * pool.slot_size].cpu().numpy())
            for pool in self.group(life_cycle).pools
        ]

    def close(self) -> None:
        """Give all memory back."""
        for level in self.levels:
            for group in level:
                for pool in group.pools:
                    pool.close()
