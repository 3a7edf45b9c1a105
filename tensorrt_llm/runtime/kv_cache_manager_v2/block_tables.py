# SPDX-License-Identifier: Apache-2.0
"""The attention pages of one active cache: growing, shrinking, letting go of what windows leave behind."""

from collections.abc import Sequence

from ._math import HalfOpenRange
from ._types import LifeCycleId
from .errors import OutOfMemoryError
from .life_cycle import AttnLifeCycle, LifeCycleRegistry
from .page import Page, PageTable
from .storage import Storage
from .streams import Event, StreamHandle


class BlockTables:
    """Views the tables of a cache by attention life cycle; the tables themselves belong to the cache."""

    __slots__ = ("_attention", "_stale_stop", "_storage", "_tables", "_tokens_per_block", "_windowed")

    def __init__(
        self,
        storage: Storage,
        life_cycles: LifeCycleRegistry,
        tables: Sequence[PageTable],
        tokens_per_block: int,
    ) -> None:
        self._storage = storage
        self._tables = tables
        self._tokens_per_block = tokens_per_block
        self._attention = life_cycles.attention
        self._windowed = life_cycles.windowed
        self._stale_stop = [0] * len(life_cycles)

    def load(self, life_cycle: LifeCycleId, pages: list[Page | None], history_length: int) -> None:
        """Start a table from a reused prefix."""
        self._tables[life_cycle].load(pages)
        for index, value in self._windowed:
            if index == life_cycle:
                self._stale_stop[index] = self._stale(value, history_length).stop

    def grow(
        self, old_num_blocks: int, num_blocks: int, history_length: int, stream: StreamHandle
    ) -> int | None:
        """Append blocks and lock their pages. Returns the number of pages; None, unchanged, without room.

        Blocks that `history_length` makes stale at once get no page.
        """
        wanted = [0] * len(self._tables)
        for life_cycle, value in self._attention:
            self._tables[life_cycle].check_room(num_blocks)
            wanted[life_cycle] = num_blocks - old_num_blocks
            if value.window_size is not None:
                stale = self._stale(value, history_length)
                wanted[life_cycle] -= stale.intersect(HalfOpenRange(old_num_blocks, num_blocks)).length
        pages = self._take_pages(wanted, history_length, stream)
        if pages is None:
            return None
        for life_cycle, value in self._attention:
            table, fresh = self._tables[life_cycle], iter(pages[life_cycle])
            stale = self._stale(value, history_length)
            for ordinal in range(old_num_blocks, num_blocks):
                table.append(None if stale.start <= ordinal < stale.stop else next(fresh))
        return sum(wanted)

    def _take_pages(
        self, wanted: Sequence[int], history_length: int, stream: StreamHandle
    ) -> list[list[Page]] | None:
        """Return held and locked pages, None without room.

        Pages that become stale serve again: private ones first, then, only when room is lacking, those
        that the reuse tree offers.
        """
        private: dict[LifeCycleId, list[int]] = {}
        shared: dict[LifeCycleId, list[int]] = {}
        for life_cycle, _ in self._windowed:
            private[life_cycle] = self._own_stale(life_cycle, history_length, is_private=True)
            shared[life_cycle] = self._own_stale(life_cycle, history_length, is_private=False)
        candidates = [private]
        if any(shared.values()):
            candidates.append({index: private[index] + shared[index] for index in private})
        for spare in candidates:
            counts = [max(0, count - len(spare.get(LifeCycleId(i), ()))) for i, count in enumerate(wanted)]
            try:
                fresh = self._storage.new_pages(counts, stream)
            except OutOfMemoryError:
                continue
            for page in (page for pages in fresh for page in pages):
                self._storage.hold(page)
                self._storage.lock(page)
            for life_cycle, ordinals in spare.items():
                missing = wanted[life_cycle] - counts[life_cycle]
                fresh[life_cycle] += [self._reclaim(life_cycle, ordinal) for ordinal in ordinals[:missing]]
            return fresh
        return None

    def _own_stale(self, life_cycle: LifeCycleId, history_length: int, *, is_private: bool) -> list[int]:
        """Return the newly stale blocks whose page only this cache holds."""
        pages = self._tables[life_cycle].pages
        own: list[int] = []
        for ordinal in range(*self._newly_stale(life_cycle, history_length)):
            page = pages[ordinal]
            if page is not None and page.num_holders == 1 and (page.block is None) == is_private:
                own.append(ordinal)
        return own

    def _reclaim(self, life_cycle: LifeCycleId, ordinal: int) -> Page:
        """Take a held and locked page out of its stale block."""
        page = self._tables[life_cycle].pages[ordinal]
        assert page is not None
        self._tables[life_cycle].put(ordinal, None)
        if page.block is not None:
            self._storage.withdraw(page)
        return page

    def drop_tail(self, num_blocks: int, stream: StreamHandle) -> None:
        """Let go of the blocks from `num_blocks` on."""
        event = self._storage.streams.record(stream)
        for life_cycle, _ in self._attention:
            table = self._tables[life_cycle]
            while len(table) > num_blocks:
                self._let_go(table.pop(), event)

    def advance(self, history_length: int, stream: StreamHandle) -> None:
        """Let go of the blocks that no later query can see."""
        for life_cycle, value in self._windowed:
            table = self._tables[life_cycle]
            newly_stale = self._newly_stale(life_cycle, history_length)
            event = self._storage.streams.record(stream) if newly_stale.length else None
            for ordinal in range(*newly_stale):
                page = table.pages[ordinal]
                table.put(ordinal, None)
                self._let_go(page, event)
            self._stale_stop[life_cycle] = self._stale(value, history_length).stop

    def _let_go(self, page: Page | None, event: Event | None) -> None:
        if page is not None:
            self._storage.mark_used(page, event)
            self._storage.unlock(page)
            self._storage.release(page)

    def _stale(self, value: AttnLifeCycle, history_length: int) -> HalfOpenRange:
        return value.stale_range(history_length, self._tokens_per_block)

    def _newly_stale(self, life_cycle: LifeCycleId, history_length: int) -> HalfOpenRange:
        value = dict(self._windowed)[life_cycle]
        not_seen_yet = HalfOpenRange(self._stale_stop[life_cycle], len(self._tables[life_cycle]))
        return self._stale(value, history_length).intersect(not_seen_yet)
