# SPDX-License-Identifier: Apache-2.0
"""The attention pages of one active cache: growing, shrinking, letting go of what windows leave behind."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ._math import HalfOpenRange, cdiv
from ._types import LifeCycleId
from .errors import MisuseError, OutOfMemoryError
from .life_cycle import AttnLifeCycle, LifeCycleRegistry
from .matching import PrefixMatch
from .page import Page, PageTable
from .scratch import ScratchPlan
from .storage import Storage
from .streams import Event, StreamHandle


@dataclass(slots=True)
class _WindowedNeed:
    """What a windowed life cycle takes to grow, and what it can take it from before it asks for slots.

    `scratch`: new blocks that share slots; `num_scratch` of the `num_pages` are for them and those before.
    spare_scratch: pages shared in the last step, which is over. stale: blocks whose page only this cache
    holds and that are stale at the new history.
    """

    num_pages: int
    stale: list[int]
    scratch: HalfOpenRange = HalfOpenRange(0, 0)
    num_scratch: int = 0
    spare_scratch: list[Page] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        """Slots to ask for."""
        return max(0, self.num_pages - len(self.spare_scratch) - len(self.stale))


class BlockTables:
    """Views the tables of a cache by attention life cycle; the tables themselves belong to the cache.

    `scratch`: which blocks of a step share slots; None gives each block its own.
    """

    __slots__ = (
        "_attention",
        "_scratch",
        "_stale_stop",
        "_storage",
        "_tables",
        "_tokens_per_block",
        "_windowed",
    )

    def __init__(
        self,
        storage: Storage,
        life_cycles: LifeCycleRegistry,
        tables: Sequence[PageTable],
        tokens_per_block: int,
        scratch: ScratchPlan | None,
    ) -> None:
        self._storage = storage
        self._tables = tables
        self._tokens_per_block = tokens_per_block
        self._scratch = scratch
        self._attention = life_cycles.attention
        self._windowed = life_cycles.windowed
        self._stale_stop = [0] * len(life_cycles)

    def load(self, match: PrefixMatch) -> None:
        """Start the tables from a reused prefix, with an empty place for a block that is reused in part."""
        for life_cycle, value in self._attention:
            stale = self._stale(value, match.num_tokens)
            pages: list[Page | None] = [
                None if stale.start <= ordinal < stale.stop else block.page_of(life_cycle)
                for ordinal, block in enumerate(match.blocks)
            ]
            self._tables[life_cycle].load([*pages, None] if match.partial is not None else pages)
            if value.window_size is not None:
                self._stale_stop[life_cycle] = stale.stop

    def check_step(
        self, capacity: int, history_length: int, new_capacity: int, new_history_length: int
    ) -> None:
        """Raise MisuseError if the new lengths need blocks that shared slots in the step so far."""
        plan = self._scratch
        if plan is None:
            return
        for life_cycle, value in self._windowed:
            first = self._stale(value, new_history_length).stop
            stop = cdiv(new_capacity, self._tokens_per_block)
            kept = [one for one in self._tables[life_cycle].scratch_ordinals if first <= one < stop]
            end = max(new_history_length, new_capacity)
            if kept and (new_history_length > history_length or kept[-1] >= self._stale(value, end).stop):
                raise MisuseError(
                    f"capacity {new_capacity} and history {new_history_length} come back to blocks "
                    f"{kept[:8]}, which share slots in the step from {history_length} to {capacity}; finish "
                    f"the step, or raise swa_scratch_reuse.max_rewind_len from {plan.max_rewind_len}"
                )

    def grow(
        self, old_num_blocks: int, capacity: int, history_length: int, stream: StreamHandle
    ) -> int | None:
        """Append blocks up to `capacity` tokens and lock their pages.

        Returns the number of pages; None, with nothing changed, without room. Blocks that `history_length`
        makes stale at once get no page.
        """
        new = HalfOpenRange(old_num_blocks, cdiv(capacity, self._tokens_per_block))
        counts = [0] * len(self._tables)
        for life_cycle, _ in self._attention:
            self._tables[life_cycle].check_room(new.stop)
            counts[life_cycle] = new.length
        needs = {
            life_cycle: self._windowed_need(life_cycle, value, new, capacity, history_length)
            for life_cycle, value in self._windowed
        }
        pages = self._take_pages(counts, needs, history_length, stream)
        if pages is None:
            return None
        for life_cycle, value in self._attention:
            if value.window_size is None:
                for page in pages[life_cycle]:
                    self._tables[life_cycle].append(page)
            else:
                stale = self._stale(value, history_length)
                self._append(self._tables[life_cycle], needs[life_cycle], new, stale, pages[life_cycle])
        return sum(map(len, pages))

    def _append(
        self,
        table: PageTable,
        need: _WindowedNeed,
        new: HalfOpenRange,
        stale: HalfOpenRange,
        pages: Sequence[Page],
    ) -> None:
        table.scratch_pages += pages[: need.num_scratch]
        table.scratch_ordinals += range(*need.scratch)
        own = iter(pages[need.num_scratch :])
        for ordinal in range(*new):
            is_stale = stale.start <= ordinal < stale.stop
            has_page = not is_stale and not need.scratch.start <= ordinal < need.scratch.stop
            table.append(next(own) if has_page else None)

    def _windowed_need(
        self,
        life_cycle: LifeCycleId,
        value: AttnLifeCycle,
        new: HalfOpenRange,
        capacity: int,
        history_length: int,
    ) -> _WindowedNeed:
        num_pages = new.length - self._stale(value, history_length).intersect(new).length
        need = _WindowedNeed(num_pages, self._own_stale(life_cycle, history_length, is_private=True))
        if self._scratch is not None:
            table, size = self._tables[life_cycle], self._tokens_per_block
            is_over = self._is_step_over(life_cycle, value, history_length)
            sharing = self._scratch.blocks(life_cycle, value, capacity, history_length, size)
            need.scratch = sharing.intersect(new)
            num_before = 0 if is_over else len(table.scratch_ordinals)
            num_slots = self._scratch.num_slots(life_cycle, num_before + need.scratch.length)
            need.num_scratch = num_slots - (0 if is_over else len(table.scratch_pages))
            need.spare_scratch = list(table.scratch_pages) if is_over else []
            need.num_pages += need.num_scratch - need.scratch.length
        return need

    def _is_step_over(self, life_cycle: LifeCycleId, value: AttnLifeCycle, history_length: int) -> bool:
        """Return whether the blocks that share slots are stale; all of them are or none, see check_step."""
        ordinals = self._tables[life_cycle].scratch_ordinals
        return bool(ordinals) and ordinals[-1] < self._stale(value, history_length).stop

    def _take_pages(
        self,
        counts: list[int],
        needs: dict[LifeCycleId, _WindowedNeed],
        history_length: int,
        stream: StreamHandle,
    ) -> list[list[Page]] | None:
        """Return held and locked pages: `counts[life_cycle]`, or what windowed life cycles need.

        None without room. Pages that become stale serve again: private ones first, then, only when room is
        lacking, those that the reuse tree offers.
        """
        fresh = self._new_pages(counts, needs, stream)
        if fresh is None:
            offered = {index: self._own_stale(index, history_length, is_private=False) for index in needs}
            if not any(offered.values()):
                return None
            for life_cycle, need in needs.items():
                need.stale += offered[life_cycle]
            fresh = self._new_pages(counts, needs, stream)
        if fresh is None:
            return None
        for pages in fresh:
            for page in pages:
                self._storage.hold_locked(page)
        for life_cycle, need in needs.items():
            self._reuse(life_cycle, need, fresh[life_cycle], stream)
        return fresh

    def _new_pages(
        self, counts: list[int], needs: dict[LifeCycleId, _WindowedNeed], stream: StreamHandle
    ) -> list[list[Page]] | None:
        for life_cycle, need in needs.items():
            counts[life_cycle] = need.num_slots
        try:
            return self._storage.new_pages(counts, stream)
        except OutOfMemoryError:
            return None

    def _reuse(
        self, life_cycle: LifeCycleId, need: _WindowedNeed, pages: list[Page], stream: StreamHandle
    ) -> None:
        """Add to `pages`, up to what is needed, pages of the last step and of stale blocks.

        What is left of the last step's shared pages is let go.
        """
        spare = need.spare_scratch
        if spare:
            table = self._tables[life_cycle]
            table.scratch_pages, table.scratch_ordinals = [], []
        while spare and len(pages) < need.num_pages:
            pages.append(spare.pop())
        pages += [self._reclaim(life_cycle, ordinal) for ordinal in need.stale[: need.num_pages - len(pages)]]
        event = self._storage.streams.record(stream) if spare else None
        for page in spare:
            self._let_go(page, event)

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
            if self._scratch is not None and table.scratch_ordinals:
                table.scratch_ordinals = [one for one in table.scratch_ordinals if one < num_blocks]
                num_kept = self._scratch.num_slots(life_cycle, len(table.scratch_ordinals))
                while len(table.scratch_pages) > num_kept:
                    self._let_go(table.scratch_pages.pop(), event)

    def advance(self, history_length: int, stream: StreamHandle) -> None:
        """Let go of the blocks that no later query can see."""
        for life_cycle, value in self._windowed:
            table = self._tables[life_cycle]
            newly_stale = self._newly_stale(life_cycle, history_length)
            is_over = self._is_step_over(life_cycle, value, history_length)
            event = self._storage.streams.record(stream) if newly_stale.length or is_over else None
            for ordinal in range(*newly_stale):
                page = table.pages[ordinal]
                table.put(ordinal, None)
                self._let_go(page, event)
            if is_over:
                for page in table.scratch_pages:
                    self._let_go(page, event)
                table.scratch_pages, table.scratch_ordinals = [], []
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
