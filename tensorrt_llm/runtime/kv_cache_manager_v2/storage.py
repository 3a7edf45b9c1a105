# SPDX-License-Identifier: Apache-2.0
"""The levels of memory, who owns which slot, and how room is made.

    level 0 (GPU) --evict--> level 1 (host) --evict--> level 2 (disk) --evict--> dropped

A slot is free or owned by one page. A page is locked (in use), held (a suspended cache needs it) or
droppable (only the reuse tree offers it). Held pages may move to a lower level and never vanish. Every call
that needs slots either gets them all or raises OutOfPagesError before anything has changed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

from ._types import GPU_LEVEL, CacheLevel, LifeCycleId, PoolGroupIndex, PoolIndex, SlotId
from .cold_codec import ColdPageCodec, SlotSizes, conversion
from .config import KVCacheManagerConfig
from .errors import LogicError, OutOfMemoryError, OutOfPagesError
from .eviction import EvictionQueue
from .layout import StorageLayout
from .page import Page
from .pools import MemoryBackend, Pool, close_pools
from .quota import Sizing, make_sizing, split_tier
from .slots import SlotAllocator
from .streams import Event, StreamHandle

AnyPage = TypeVar("AnyPage", bound=Page)


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


class StorageListener(Protocol):
    """Is told about every page that is allocated, moves or vanishes."""

    def on_allocated(self, life_cycle: LifeCycleId, num_pages: int) -> None: ...

    def on_moved(self, page: Page, source: CacheLevel) -> None: ...

    def on_copied(self, destination: Page) -> None: ...

    def on_dropped(self, page: Page) -> None: ...


class GroupStore:
    """One pool group at one level: its pools, the owner of each slot, and what may be evicted."""

    __slots__ = ("allocator", "owners", "peak_live", "pools", "queue")

    def __init__(self, pools: Sequence[Pool], num_slots: int) -> None:
        self.pools = tuple(pools)
        self.allocator = SlotAllocator(num_slots)
        self.owners: list[Page | None] = [None] * num_slots
        self.queue = EvictionQueue()
        self.peak_live = 0

    @property
    def slot_bytes(self) -> int:
        return sum(pool.slot_size for pool in self.pools)

    def statistics(self) -> StorageStatistics:
        return StorageStatistics(
            slot_sizes=tuple(pool.slot_size for pool in self.pools),
            total=self.allocator.num_slots,
            free=self.allocator.num_free,
            evictable=len(self.queue),
        )


class Storage:
    """All levels. Level 0 is the GPU tier (CPU memory in a CPU-only run).

    `unlink`, set by the manager, takes a page out of the reuse tree and returns those nobody needs any more.
    slot_sizes: per level; `codec` turns pages into what has the size of the cold ones. sizings: per level.
    """

    def __init__(
        self,
        config: KVCacheManagerConfig,
        layout: StorageLayout,
        backend: MemoryBackend,
        listener: StorageListener,
        slot_sizes: Sequence[SlotSizes],
        codec: ColdPageCodec | None = None,
    ) -> None:
        self.layout = layout
        self.backend = backend
        self.streams = backend.streams
        sizing = make_sizing(config)
        self.sizings: list[Sizing] = [replace(sizing, slot_sizes=sizes) for sizes in slot_sizes]
        self._codec = codec
        self.tiers = list(config.cache_tiers)
        self.last_level = CacheLevel(len(self.tiers) - 1)
        self.unlink: Callable[[Page], Sequence[Page]] = _no_tree
        self._listener = listener
        self.levels: list[list[GroupStore]] = []
        self.grains: list[int] = []
        try:
            for tier, sizing in zip(self.tiers, self.sizings, strict=True):
                self.levels.append([])
                split = split_tier(tier.tier, tier.quota, sizing)
                self.grains.append(split.grain)
                for sizes, num_slots in zip(split.slot_sizes, split.num_slots, strict=True):
                    pools = backend.make_pools(tier, sizes, num_slots, split.grain)
                    self.levels[-1].append(GroupStore(pools, num_slots))
        except BaseException:
            self.close()
            raise

    def group(self, life_cycle: LifeCycleId, level: CacheLevel = GPU_LEVEL) -> GroupStore:
        return self.levels[level][self.layout.group_of[life_cycle]]

    def store_of(self, page: Page) -> GroupStore:
        """Return the group and level in which the page lies."""
        frame = page.frame
        return self.levels[frame.level][self.layout.group_of[frame.life_cycle]]

    def statistics(self, level: CacheLevel) -> list[StorageStatistics]:
        return [group.statistics() for group in self.levels[level]]

    def close(self) -> None:
        """Give all memory back."""
        for level in self.levels:
            for group in level:
                close_pools(group.pools)
        self.levels = []

    # Slots

    def num_obtainable(self, level: CacheLevel, group: PoolGroupIndex) -> int:
        """Return the slots that `reserve` could give: free, droppable, and held ones that have room below."""
        store = self.levels[level][group]
        num_held = store.queue.num_held
        num_movable = min(num_held, self._room_below(level, group)) if num_held else 0
        return store.allocator.num_free + store.queue.num_droppable + num_movable

    def _room_below(self, level: CacheLevel, group: PoolGroupIndex) -> int:
        """Return how many held pages the levels below can take in, passing some on to each other."""
        room = 0
        for groups in self.levels[level + 1 :]:
            store = groups[group]
            if not store.allocator.num_slots:
                break
            room += store.allocator.num_free + store.queue.num_droppable
        return room

    def reserve(self, level: CacheLevel, needed: Sequence[int], stream: StreamHandle) -> list[list[SlotId]]:
        """Take `needed[group]` slots per pool group, evicting what must go. All or nothing.

        Raises OutOfPagesError with nothing changed. The slots have no page yet; `adopt` or `unreserve` them.
        """
        wanted = [(PoolGroupIndex(group), count) for group, count in enumerate(needed) if count]
        for group, count in wanted:
            store = self.levels[level][group]
            if count > store.allocator.num_free and count > self.num_obtainable(level, group):
                raise OutOfPagesError(
                    f"level {level} pool group {group}: {count} slots needed, "
                    f"{self.num_obtainable(level, group)} of {store.allocator.num_slots} can be had"
                )
        for group, count in wanted:
            self._make_room(level, group, count, stream)
        taken: list[list[SlotId]] = [[] for _ in needed]
        try:
            for group, count in wanted:
                taken[group] = self.levels[level][group].allocator.allocate(count)
        except BaseException:
            self.unreserve(level, taken)
            raise
        for group, _ in wanted:
            self._wait_for(level, group, taken[group], stream)
            store = self.levels[level][group]
            store.peak_live = max(store.peak_live, store.allocator.num_live)
        return taken

    def unreserve(self, level: CacheLevel, slots: Sequence[Sequence[SlotId]]) -> None:
        """Give back slots that no page has adopted."""
        for group, group_slots in enumerate(slots):
            for slot in group_slots:
                self.levels[level][group].allocator.free(slot)

    def _wait_for(
        self, level: CacheLevel, group: PoolGroupIndex, slots: Sequence[SlotId], stream: StreamHandle
    ) -> None:
        if self.streams.is_async:
            allocator = self.levels[level][group].allocator
            for slot in slots:
                self._wait_for_slot(allocator, slot, stream)

    def new_pages(self, counts: Sequence[int], stream: StreamHandle) -> list[list[Page]]:
        """Return `counts[life_cycle]` fresh GPU pages per life cycle.

        All or nothing: raises OutOfPagesError with nothing changed.
        """
        needed = [0] * len(self.layout.pool_groups)
        for life_cycle, count in enumerate(counts):
            needed[self.layout.group_of[life_cycle]] += count
        slots = [iter(group_slots) for group_slots in self.reserve(GPU_LEVEL, needed, stream)]
        pages: list[list[Page]] = []
        for index, count in enumerate(counts):
            life_cycle = LifeCycleId(index)
            taken = islice(slots[self.layout.group_of[life_cycle]], count)
            pages.append([self.adopt(Page(life_cycle, GPU_LEVEL, slot)) for slot in taken])
            self._listener.on_allocated(life_cycle, count)
        return pages

    def adopt(self, page: AnyPage) -> AnyPage:
        """Make `page` the owner of its slot, which must be reserved."""
        owners = self.store_of(page).owners
        if owners[page.slot] is not None:
            raise LogicError(f"slot {page.slot} of level {page.level} has an owner already")
        owners[page.slot] = page
        return page

    def free(self, page: Page) -> None:
        """Give the slot of a page that nobody needs back."""
        if page.num_holders or page.num_locks or page.block is not None or page.is_queued:
            raise LogicError(
                f"slot {page.slot} of level {page.level} is freed with {page.num_holders} holders, "
                f"{page.num_locks} locks"
            )
        self._vacate(page)

    def _vacate(self, page: Page) -> None:
        store = self.store_of(page)
        store.owners[page.slot] = None
        store.allocator.free(page.slot)

    # Holders

    def hold(self, page: Page) -> None:
        """Add a holder: the content stays until `release`."""
        if page.num_locks:
            page.num_holders += 1
            return
        self.store_of(page).queue.discard(page)
        page.num_holders += 1
        self.offer(page)

    def lock(self, page: Page) -> None:
        """Let one holder use the page in its GPU slot."""
        self.store_of(page).queue.discard(page)
        page.num_locks += 1

    def hold_locked(self, page: Page) -> None:
        """`hold` and `lock` at once."""
        self.store_of(page).queue.discard(page)
        page.num_holders += 1
        page.num_locks += 1

    def unlock(self, page: Page) -> None:
        page.num_locks -= 1
        self.offer(page)

    def release(self, page: Page) -> None:
        """Take back one holder that has no lock. A private page is freed, a shared one becomes droppable."""
        self.store_of(page).queue.discard(page)
        page.num_holders -= 1
        if page.num_holders == 0 and page.block is None:
            self.free(page)
        else:
            self.offer(page)

    def offer(self, page: Page) -> None:
        """Queue `page`, which is in no queue, for eviction if it may be evicted."""
        if page.num_locks:
            return
        if page.num_holders == 0 or page.frame.level < self.last_level:
            self.store_of(page).queue.push(page)

    def touch(self, page: Page) -> None:
        """Make a queued page the most recently used."""
        if page.is_queued:
            queue = self.store_of(page).queue
            queue.discard(page)
            queue.push(page)

    def wait_for_pages(self, pages: Iterable[Page], stream: StreamHandle) -> None:
        """Make `stream` wait for the last uses of the pages' slots."""
        for page in pages:
            allocator = self.store_of(page).allocator
            self._wait_for_slot(allocator, page.slot, stream)

    def _wait_for_slot(self, allocator: SlotAllocator, slot: SlotId, stream: StreamHandle) -> None:
        for event in allocator.events_of(slot):
            self.streams.wait(stream, event)

    def mark_used(self, page: Page, event: Event | None) -> None:
        """Note that the last use of the page's slot ends at `event`."""
        self.store_of(page).allocator.add_event(page.slot, event)

    def withdraw(self, page: Page) -> Sequence[Page]:
        """Take a page out of the reuse tree, with those that become useless by it.

        Returns the pages that are freed; held ones become private instead.
        """
        freed = self.unlink(page)
        for one in freed:
            self.group(one.life_cycle, one.level).queue.discard(one)
            self.free(one)
        return freed

    # Movement

    def copy(self, destination: Page, source: Page, stream: StreamHandle) -> None:
        """Copy the content of `source` into the slot of `destination` on `stream`."""
        self._copy_slot(destination.life_cycle, destination.level, destination.slot, source, stream)
        self._listener.on_copied(destination)

    def migrate(
        self, pages: Sequence[Page], level: CacheLevel, slots: Sequence[SlotId], stream: StreamHandle
    ) -> None:
        """Move pages into reserved slots of `level`.

        If a copy fails, the pages that are done stay moved, and the others stay where they are.
        """
        num_done = 0
        try:
            for page, slot in zip(pages, slots, strict=True):
                self._copy_slot(page.life_cycle, level, slot, page, stream)
                self._settle(page, level, slot)
                num_done += 1
        finally:
            for page, slot in list(zip(pages, slots, strict=True))[num_done:]:
                self.group(page.life_cycle, level).allocator.free(slot)

    def _settle(self, page: Page, level: CacheLevel, slot: SlotId) -> None:
        source = page.level
        queue = self.group(page.life_cycle, source).queue
        changes_level = source != level
        if changes_level:
            queue.discard(page)
        self._vacate(page)
        page.move_to(level, slot)
        self.group(page.life_cycle, level).owners[slot] = page
        if changes_level:
            self.offer(page)
        self._listener.on_moved(page, source)

    def _copy_slot(
        self, life_cycle: LifeCycleId, level: CacheLevel, slot: SlotId, source: Page, stream: StreamHandle
    ) -> None:
        to, origin = self.group(life_cycle, level), self.group(source.life_cycle, source.level)
        self._wait_for_slot(origin.allocator, source.slot, stream)
        self._wait_for_slot(to.allocator, slot, stream)
        for pool, (dst, src) in enumerate(zip(to.pools, origin.pools, strict=True)):
            convert = conversion(self._codec, life_cycle, PoolIndex(pool), source.level, level)
            if convert is None:
                self.backend.copy_slot(dst, slot, src, source.slot, stream)
            else:
                self.backend.convert_slot(convert, dst, slot, src, source.slot, stream)
        event = self.streams.record(stream)
        to.allocator.add_event(slot, event)
        origin.allocator.add_event(source.slot, event)

    # Eviction

    def _make_room(
        self, level: CacheLevel, group: PoolGroupIndex, num_slots: int, stream: StreamHandle
    ) -> None:
        """Evict until `num_slots` slots are free; `num_obtainable` must have promised them."""
        store = self.levels[level][group]
        while store.allocator.num_free < num_slots:
            missing = num_slots - store.allocator.num_free
            room_below = 0
            if level < self.last_level:
                room_below = self.num_obtainable(CacheLevel(level + 1), group)
            victims = store.queue.victims(missing, room_below)
            if not victims:
                raise LogicError(
                    f"level {level} pool group {group}: {missing} promised slots cannot be freed"
                )
            self._evict(victims, level, group, min(room_below, len(victims)), stream)

    def _evict(
        self,
        victims: Sequence[Page],
        level: CacheLevel,
        group: PoolGroupIndex,
        num_moved: int,
        stream: StreamHandle,
    ) -> None:
        """Move the last `num_moved` victims (all held ones among them) one level down, drop the others.

        Dropping a block takes what lies below it along, so a victim may be gone before its turn.
        """
        below = CacheLevel(level + 1)
        if num_moved:
            self._make_room(below, group, num_moved, stream)
        droppable = [page for page in victims if not page.num_holders]
        self._drop(droppable[: len(victims) - num_moved], level)
        moving = [page for page in victims if page.is_queued and page.level == level]
        if not moving:
            return
        slots = self.levels[below][group].allocator.allocate(len(moving))
        try:
            self.migrate(moving, below, slots, stream)
        except OutOfMemoryError:
            # A full disk must not keep cached prefixes in the way of requests; only held pages have to move.
            if not self._drop([page for page in moving if not page.num_holders], level):
                raise

    def _drop(self, pages: Sequence[Page], level: CacheLevel) -> int:
        """Drop those of `pages` that are still queued at `level`; returns how many pages went."""
        num_dropped = 0
        for page in pages:
            if page.is_queued and page.level == level:
                for dropped in self.withdraw(page):
                    self._listener.on_dropped(dropped)
                    num_dropped += 1
        return num_dropped

    def make_room(
        self, level: CacheLevel, group: PoolGroupIndex, num_slots: int, stream: StreamHandle
    ) -> None:
        """Evict until `num_slots` slots are free, for a shrink. OutOfPagesError with nothing changed."""
        if num_slots > self.num_obtainable(level, group):
            raise OutOfPagesError(
                f"level {level} pool group {group} can free {self.num_obtainable(level, group)} slots, not "
                f"{num_slots}"
            )
        self._make_room(level, group, num_slots, stream)


def _no_tree(page: Page) -> Sequence[Page]:
    raise LogicError(f"slot {page.slot} of level {page.level} is dropped but there is no reuse tree")
