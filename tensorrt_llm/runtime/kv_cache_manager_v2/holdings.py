# SPDX-License-Identifier: Apache-2.0
"""What one cache holds: a table of pages per life cycle, and what its private pages are to be copied from.

Bringing all of it to a level is all or nothing.
"""

from collections.abc import Iterator, Sequence

from ._types import GPU_LEVEL, CacheLevel, LifeCycleId
from .life_cycle import LifeCycleRegistry, SsmLifeCycle
from .matching import PrefixMatch
from .page import Page, PageTable, SnapshotPage
from .storage import Storage
from .streams import StreamHandle


class Holdings:
    """Every page in it has this cache as a holder.

    tables: pages by life cycle and block. snapshot: the recurrent state that the first resume copies into a
    private slot. partial_sources: pages of a block that matches in part, copied likewise.
    """

    __slots__ = ("_life_cycles", "_storage", "partial_sources", "snapshot", "tables")

    def __init__(self, storage: Storage, life_cycles: LifeCycleRegistry) -> None:
        self._storage = storage
        self._life_cycles = life_cycles
        self.tables = [PageTable() for _ in life_cycles]
        self.snapshot: SnapshotPage | None = None
        self.partial_sources: dict[LifeCycleId, Page] = {}

    def hold_match(self, match: PrefixMatch) -> None:
        """Hold the pages of a reused prefix, which the tables already name."""
        for life_cycle, _ in self._life_cycles.attention:
            source = None if match.partial is None else match.partial.page_of(life_cycle)
            if source is not None:
                self.partial_sources[life_cycle] = source
        self.snapshot = match.snapshot
        for page in [*self.pages(), *self.sources()]:
            self._storage.hold(page)

    def pages(self) -> Iterator[Page]:
        for table in self.tables:
            yield from table.owned()

    def pages_tail_first(self) -> Iterator[Page]:
        """Yield deep blocks first, so that they are the first to be evicted."""
        for table in self.tables:
            yield from table.scratch_pages
        for ordinal in reversed(range(max(map(len, self.tables)))):
            for table in self.tables:
                page = table.pages[ordinal] if ordinal < len(table) else None
                if page is not None:
                    yield page

    def sources(self) -> list[Page]:
        snapshot = [] if self.snapshot is None else [self.snapshot]
        return [*snapshot, *self.partial_sources.values()]

    def num_unavailable_slots(self) -> list[int]:
        """Return the GPU slots per pool group that only these holds keep from eviction."""
        group_of = self._storage.layout.group_of
        counts = [0] * len(self._storage.layout.pool_groups)
        for page in self.pages():
            if page.frame.level == GPU_LEVEL and not page.is_queued:
                counts[group_of[page.frame.life_cycle]] += 1
        return counts

    def lock_all_on_gpu(self, stream: StreamHandle) -> None:
        """Bring everything to the GPU, with the private pages of a first resume, and lock it.

        Raises, with nothing changed but where pages lie, if room is lacking or a copy fails.
        """
        resident = [page for page in self.pages() if page.frame.level == GPU_LEVEL]
        for page in resident:
            self._storage.lock(page)
        fresh: list[Page] = []
        is_done = False
        try:
            fresh = self._bring_to(GPU_LEVEL, self._missing_life_cycles(), stream)
            self._fill(fresh, stream)
            is_done = True
        finally:
            if not is_done:
                for page in fresh:
                    self._storage.free(page)
                for page in resident:
                    self._storage.unlock(page)
        self._take_in(resident, fresh)
        if self._storage.streams.is_async:
            self._storage.wait_for_pages(self.pages(), stream)

    def bring_up(self, level: CacheLevel, stream: StreamHandle) -> None:
        """Move pages that lie below `level` up to it. Raises OutOfMemoryError when room is lacking."""
        staying = [page for page in self.pages() if page.level <= level]
        for page in staying:
            self._storage.lock(page)
        try:
            self._bring_to(level, [], stream)
        finally:
            for page in staying:
                self._storage.unlock(page)

    def unlock_all(self) -> None:
        """Let the pages move: the tables' indices are void from now on."""
        for table in self.tables:
            table.invalidate()
        for page in self.pages_tail_first():
            self._storage.unlock(page)

    def mark_used(self, stream: StreamHandle) -> None:
        """Note the end of this cache's use of its slots, for whoever touches them next."""
        if self._storage.streams.is_async:
            event = self._storage.streams.record(stream)
            for page in self.pages():
                self._storage.mark_used(page, event)

    def release_all(self, *, is_locked: bool) -> None:
        """Give up every hold; private pages are freed."""
        for page in self.pages_tail_first():
            if is_locked:
                self._storage.unlock(page)
            self._storage.release(page)
        for source in self.sources():
            self._storage.release(source)
        self.tables = [PageTable() for _ in self.tables]
        self.snapshot = None
        self.partial_sources = {}

    def _missing_life_cycles(self) -> list[LifeCycleId]:
        """Return the life cycles that need a private page at the first resume."""
        ssm_id = self._life_cycles.ssm_id
        needs_state = ssm_id is not None and not self.tables[ssm_id].pages
        return [*([ssm_id] if ssm_id is not None and needs_state else []), *self.partial_sources]

    def _bring_to(
        self, level: CacheLevel, fresh_life_cycles: Sequence[LifeCycleId], stream: StreamHandle
    ) -> list[Page]:
        """Move pages that lie below `level` up to it and return one fresh page per given life cycle."""
        group_of = self._storage.layout.group_of
        moving = [page for page in self.pages() if page.frame.level > level]
        needed = [0] * len(self._storage.layout.pool_groups)
        for life_cycle in [*fresh_life_cycles, *(page.life_cycle for page in moving)]:
            needed[group_of[life_cycle]] += 1
        slots = [iter(group_slots) for group_slots in self._storage.reserve(level, needed, stream)]
        fresh = [
            self._storage.adopt(Page(life_cycle, level, next(slots[group_of[life_cycle]])))
            for life_cycle in fresh_life_cycles
        ]
        targets = [next(slots[group_of[page.life_cycle]]) for page in moving]
        is_done = False
        try:
            self._storage.migrate(moving, level, targets, stream)
            is_done = True
        finally:
            if not is_done:
                for page in fresh:
                    self._storage.free(page)
        return fresh

    def _fill(self, fresh: Sequence[Page], stream: StreamHandle) -> None:
        """Copy the reused snapshot and partial blocks into the fresh private pages."""
        for page in fresh:
            is_state = isinstance(self._life_cycles[page.life_cycle], SsmLifeCycle)
            source = self.snapshot if is_state else self.partial_sources[page.life_cycle]
            if source is not None:
                self._storage.copy(page, source, stream)

    def _take_in(self, resident: Sequence[Page], fresh: Sequence[Page]) -> None:
        """Lock what `resident` does not name, take the fresh pages in, let go of their sources."""
        locked = set(map(id, resident))
        for page in self.pages():
            if id(page) not in locked:
                self._storage.lock(page)
        for page in fresh:
            self._storage.hold_locked(page)
            table = self.tables[page.life_cycle]
            if page.life_cycle in self.partial_sources:
                table.put(len(table) - 1, page)
            else:
                table.append(page)
        for source in self.sources():
            self._storage.release(source)
        self.snapshot = None
        self.partial_sources.clear()
        for table in self.tables:
            table.refresh()
