# SPDX-License-Identifier: Apache-2.0
"""One request's cache: a state machine over page tables.

    create -> SUSPENDED -- resume --> ACTIVE -- suspend --> SUSPENDED ...; close from either.

A call that lacks capacity returns False and changes nothing.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from ._math import cdiv
from ._types import (
    BAD_PAGE_INDEX,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    BeamIndex,
    CacheLevel,
    CacheStatus,
    LayerGroupId,
    LifeCycleId,
)
from .block_tables import BlockTables
from .committer import Committer, PriorityCallback
from .drop_plan import CommittedBlockDropPlan
from .errors import MisuseError, OutOfMemoryError
from .life_cycle import SsmLifeCycle
from .matching import PrefixMatch
from .page import Page, PageTable, SnapshotPage
from .reuse_tree import pack_tokens
from .stats import LookupStats, RequestStats
from .streams import StreamHandle

if TYPE_CHECKING:
    from .manager import KVCacheManager


class _KVCache:
    """The pages, recurrent state slot and committed tokens of one request.

    Create it with `KVCacheManager.create_kv_cache`. All lengths are in tokens.
    """

    Status = CacheStatus

    def __init__(
        self,
        manager: "KVCacheManager",
        cache_id: Hashable,
        reuse_scope: Hashable,
        priority_callback: PriorityCallback | None,
    ) -> None:
        config = manager.init_config
        self._manager = manager
        self._storage = manager.storage
        self._id = cache_id
        self._status = CacheStatus.SUSPENDED
        self._tables = [PageTable() for _ in manager.life_cycles]
        self._committer = Committer(
            manager.tree,
            manager.storage,
            manager.life_cycles,
            reuse_scope,
            self._tables,
            allows_partial=config.enable_partial_reuse,
            keeps_minimum=config.commit_min_snapshot,
            priority_callback=priority_callback,
        )
        self._blocks = BlockTables(
            manager.storage, manager.life_cycles, self._tables, manager.tokens_per_block
        )
        self._partial_sources: dict[LifeCycleId, Page] = {}
        self._snapshot: SnapshotPage | None = None
        self._stream: StreamHandle | None = None
        self._capacity = 0
        self._history_length = 0
        self._may_commit = True
        self._match = PrefixMatch()
        self._pending_lookup: LookupStats | None = None
        self.request_stats = RequestStats()

    @property
    def id(self) -> Hashable:
        return self._id

    @property
    def status(self) -> CacheStatus:
        return self._status

    @property
    def is_active(self) -> bool:
        return self._status is CacheStatus.ACTIVE

    @property
    def capacity(self) -> int:
        """Tokens that have room."""
        return self._capacity

    @property
    def history_length(self) -> int:
        """Tokens already computed: no later query stands before this position."""
        return self._history_length

    @property
    def num_committed_tokens(self) -> int:
        """Tokens declared by `commit` or taken over from a reused prefix."""
        return self._committer.num_tokens

    @property
    def num_blocks(self) -> int:
        return cdiv(self._capacity, self._manager.tokens_per_block)

    @property
    def num_matched_tokens_before_pruning(self) -> int:
        """Tokens of the prompt that the reuse tree knew at creation."""
        return self._match.num_path_tokens

    @property
    def num_matched_tokens_before_ssm_pruning(self) -> int:
        """Those of them that attention alone could have served."""
        return self._match.num_attention_tokens

    @property
    def num_skipped_snapshots(self) -> int:
        """Commits that offered no snapshot because there was no slot for it."""
        return self._committer.num_skipped_snapshots

    @property
    def cuda_stream(self) -> StreamHandle:
        """The stream given to `resume`. MisuseError unless active."""
        if self._stream is None:
            raise MisuseError(
                f"cache {self._id!r} is {self._status.value} and has no stream; call resume(stream)"
            )
        return self._stream

    # Creation

    def adopt_match(self, match: PrefixMatch, packed: bytes, lookup: LookupStats) -> None:
        """Start from a reused prefix of the packed prompt: hold its pages. Called once, by the manager."""
        self._match = match
        self._pending_lookup = lookup
        self._committer.start_from(match, packed)
        self._capacity = self._history_length = match.num_tokens
        for life_cycle, value in self._manager.life_cycles.attention:
            stale = value.stale_range(match.num_tokens, self._manager.tokens_per_block)
            pages: list[Page | None] = [
                None if stale.start <= ordinal < stale.stop else block.page_of(life_cycle)
                for ordinal, block in enumerate(match.blocks)
            ]
            for page in pages:
                if page is not None:
                    self._storage.hold(page)
            if match.partial is not None:
                pages.append(None)
                self._hold_partial_source(life_cycle, match.partial.page_of(life_cycle))
            self._blocks.load(life_cycle, pages, match.num_tokens)
        if match.snapshot is not None:
            self._storage.hold(match.snapshot)
            self._snapshot = match.snapshot

    def _hold_partial_source(self, life_cycle: LifeCycleId, page: Page | None) -> None:
        if page is not None:
            self._storage.hold(page)
            self._partial_sources[life_cycle] = page

    # Suspend and resume

    def resume(self, stream: StreamHandle | None = None) -> bool:
        """Make the cache usable on `stream`: all pages on the GPU, locked in their slots.

        The first resume takes a recurrent state slot, whose content is undefined unless a prefix was
        reused, and a private copy of a block that is reused in part. Returns False, with nothing changed,
        when others use more than max_util_for_resume of a pool group that grows with tokens, or room is
        lacking.
        """
        self._require(CacheStatus.SUSPENDED, "resume")
        if self._manager.is_too_full_to_resume(self._num_unavailable_slots()):
            return False
        handle = stream or 0
        resident = [page for page in self._pages() if page.level == GPU_LEVEL]
        for page in resident:
            self._storage.lock(page)
        fresh: list[Page] = []
        is_done = False
        try:
            fresh = self._bring_to(GPU_LEVEL, self._missing_life_cycles(), handle)
            self._fill(fresh, handle)
            is_done = True
        except OutOfMemoryError:
            return False
        finally:
            if not is_done:
                for page in fresh:
                    self._storage.free(page)
                for page in resident:
                    self._storage.unlock(page)
        self._activate(resident, fresh, handle)
        return True

    def _missing_life_cycles(self) -> list[LifeCycleId]:
        """Return the life cycles that need a private page at the first resume."""
        ssm_id = self._manager.life_cycles.ssm_id
        needs_state = ssm_id is not None and not self._tables[ssm_id].pages
        return [*([ssm_id] if ssm_id is not None and needs_state else []), *self._partial_sources]

    def _bring_to(
        self, level: CacheLevel, fresh_life_cycles: Sequence[LifeCycleId], stream: StreamHandle
    ) -> list[Page]:
        """Move held pages that lie below `level` up to it and return one fresh page per given life cycle."""
        group_of = self._storage.layout.group_of
        moving = [page for page in self._pages() if page.level > level]
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
            is_state = isinstance(self._manager.life_cycles[page.life_cycle], SsmLifeCycle)
            source = self._snapshot if is_state else self._partial_sources[page.life_cycle]
            if source is not None:
                self._storage.copy(page, source, stream)

    def _activate(self, resident: Sequence[Page], fresh: Sequence[Page], stream: StreamHandle) -> None:
        """Lock what `resident` does not name, take the fresh pages in, let go of their sources."""
        locked = set(map(id, resident))
        for page in self._pages():
            if id(page) not in locked:
                self._storage.lock(page)
        for page in fresh:
            self._storage.hold(page)
            self._storage.lock(page)
            table = self._tables[page.life_cycle]
            if page.life_cycle in self._partial_sources:
                table.put(len(table) - 1, page)
            else:
                table.append(page)
        for source in self._sources():
            self._storage.release(source)
        self._snapshot = None
        self._partial_sources.clear()
        for table in self._tables:
            table.refresh()
        if self._storage.streams.is_async:
            self._storage.wait_for_pages(self._pages(), stream)
        self._stream = stream
        self._status = CacheStatus.ACTIVE
        self._manager.on_resumed()

    def suspend(self) -> None:
        """Let the pages move: page index buffers are detached, contents stay valid, slot ids may change."""
        self._require(CacheStatus.ACTIVE, "suspend")
        self._mark_used()
        for table in self._tables:
            table.invalidate()
        for page in self._pages_tail_first():
            self._storage.unlock(page)
        self._status = CacheStatus.SUSPENDED
        self._stream = None
        self._manager.on_suspended()

    def prefetch(self, level: CacheLevel, stream: StreamHandle | None = None) -> bool:
        """Move held pages that lie below `level` up to it, ahead of `resume`. False when room is lacking."""
        self._require(CacheStatus.SUSPENDED, "prefetch")
        if not GPU_LEVEL <= level <= self._storage.last_level:
            raise MisuseError(f"level is {level}; this manager has levels 0 to {self._storage.last_level}")
        staying = [page for page in self._pages() if page.level <= level]
        for page in staying:
            self._storage.lock(page)
        try:
            self._bring_to(level, [], stream or 0)
        except OutOfMemoryError:
            return False
        finally:
            for page in staying:
                self._storage.unlock(page)
        return True

    def close(self) -> None:
        """Give everything back; what was committed stays reusable. MisuseError when already closed."""
        if self._status is CacheStatus.CLOSED:
            raise MisuseError(f"cache {self._id!r} is closed already; close it once")
        self.commit_pending_stats()
        self._manager.forget(self)
        is_active = self.is_active
        self._mark_used()
        for page in self._pages_tail_first():
            if is_active:
                self._storage.unlock(page)
            self._storage.release(page)
        for source in self._sources():
            self._storage.release(source)
        self._committer.close()
        self._tables = [PageTable() for _ in self._tables]
        self._snapshot = None
        self._partial_sources = {}
        self._capacity = 0
        self._status = CacheStatus.CLOSED
        self._stream = None

    def _mark_used(self) -> None:
        """Note the end of this cache's use of its slots, for whoever touches them next."""
        if self._stream is not None and self._storage.streams.is_async:
            event = self._storage.streams.record(self._stream)
            for page in self._pages():
                self._storage.mark_used(page, event)

    # Growth

    def resize(self, capacity: int | None = None, history_length: int | None = None) -> bool:
        """Set capacity and history together. None keeps a value.

        History never decreases; a lower capacity frees tail blocks; blocks that a window has left behind
        are let go. Recurrent states are not touched. Returns False, with nothing changed, when pages are
        lacking. MisuseError for lengths that contradict each other.
        """
        self._require(CacheStatus.ACTIVE, "resize")
        new_capacity = self._capacity if capacity is None else capacity
        new_history = self._history_length if history_length is None else history_length
        is_whole = isinstance(new_capacity, int) and isinstance(new_history, int)
        if not is_whole or new_history < self._history_length or new_capacity < new_history:
            raise MisuseError(
                f"resize(capacity={capacity}, history_length={history_length}) of {self._id!r}, now at "
                f"capacity {self._capacity} and history {self._history_length}: lengths are whole tokens, "
                "and history must neither decrease nor exceed the capacity"
            )
        num_blocks, old_num_blocks = cdiv(new_capacity, self._manager.tokens_per_block), self.num_blocks
        if num_blocks > old_num_blocks:
            num_added = self._blocks.grow(old_num_blocks, num_blocks, new_history, self.cuda_stream)
            if num_added is None:
                return False
            self.request_stats.alloc_blocks += num_added
        elif num_blocks < old_num_blocks:
            self._blocks.drop_tail(num_blocks, self.cuda_stream)
        self._capacity = new_capacity
        self._advance(new_history)
        return True

    def _advance(self, history_length: int) -> None:
        if history_length > self._history_length:
            self._history_length = history_length
            self._blocks.advance(history_length, self.cuda_stream)

    # Commit

    def commit(self, tokens: Sequence[int], is_end: bool = False) -> None:
        """Declare that `tokens` follow the committed ones and are computed; raises history to cover them.

        Full blocks can be reused by others from now on. With SSM layers the live state must stand exactly
        behind `tokens`: a snapshot of it is offered there, if there is a slot for it. The slot ids of full
        blocks can change, when an equal block is shared. `is_end`: nothing will be committed after this.
        """
        self._require(CacheStatus.ACTIVE, "commit")
        if not self._may_commit:
            raise MisuseError(
                f"cache {self._id!r} promised to commit no more; do not commit after stop_committing"
            )
        packed = pack_tokens(tokens)
        num_tokens = self._committer.num_tokens + len(tokens)
        if num_tokens > self._capacity:
            raise MisuseError(
                f"commit of {len(tokens)} tokens makes {num_tokens}, beyond the capacity {self._capacity} of "
                f"{self._id!r}; resize first"
            )
        self._committer.commit(packed, self.cuda_stream)
        self._advance(max(self._history_length, num_tokens))
        if is_end:
            self.stop_committing()

    def stop_committing(self) -> None:
        """Promise that no tokens will be committed any more; offers the last, partial block if it can."""
        self._require_open("stop_committing")
        if self._may_commit:
            self._may_commit = False
            self._committer.finish()

    def plan_committed_block_drop(self) -> CommittedBlockDropPlan:
        """Return a plan that can drop, later, what this cache has offered for reuse so far."""
        return CommittedBlockDropPlan(self._storage, self._committer.pages)

    # Indices

    def set_base_page_index_buf(
        self, beam: BeamIndex, group: LayerGroupId, buffer: memoryview | None
    ) -> None:
        """Keep `buffer` (int32) equal to `get_base_page_indices(group)` until suspend, padded with -1."""
        if beam != DEFAULT_BEAM_INDEX:
            raise MisuseError(f"beam is {beam}; this runtime has one beam, use 0")
        if buffer is not None:
            self._require(CacheStatus.ACTIVE, "set_base_page_index_buf")
        self._table(group).attach(buffer)

    def get_base_page_indices(
        self, group: LayerGroupId, beam: BeamIndex = DEFAULT_BEAM_INDEX
    ) -> Sequence[int]:
        """Return the slot id of each block, BAD_PAGE_INDEX where there is none.

        Read-only, and valid until the next call that changes the cache.
        """
        self._require(CacheStatus.ACTIVE, "get_base_page_indices")
        return self._table(group).indices

    def get_aggregated_page_indices(self, group: LayerGroupId, valid_only: bool = False) -> Iterator[int]:
        """Yield the slot ids of the group's pages in block order; `valid_only` skips missing ones."""
        self._require(CacheStatus.ACTIVE, "get_aggregated_page_indices")
        return (index for index in self._table(group).indices if not valid_only or index != BAD_PAGE_INDEX)

    def get_ssm_block_base_index(self, group: LayerGroupId) -> int:
        """Return the slot id of the recurrent state, BAD_PAGE_INDEX while the cache is not active."""
        if group != self._manager.life_cycles.ssm_id:
            raise MisuseError(f"layer group {group} holds no recurrent states; ask for the SSM group")
        table = self._tables[group]
        return table.indices[0] if self.is_active and table.pages else BAD_PAGE_INDEX

    # Statistics

    def commit_pending_stats(self) -> None:
        """Count the reuse look-up of this cache's creation; done at close if not before."""
        if self._pending_lookup is not None:
            self._manager.count_lookup(self._pending_lookup)
            self._pending_lookup = None

    def discard_pending_stats(self) -> None:
        """Do not count that look-up, because the request will look up again."""
        self._pending_lookup = None

    # Inside

    def iter_holds(self) -> Iterator[Page]:
        """Yield every page once per holder count this cache has on it. For integrity checks."""
        yield from self._pages()
        yield from self._sources()
        yield from self._committer.anchors

    def iter_locks(self) -> Iterator[Page]:
        """Yield every page this cache locks. For integrity checks."""
        return self._pages() if self.is_active else iter(())

    def _sources(self) -> list[Page]:
        snapshot = [] if self._snapshot is None else [self._snapshot]
        return [*snapshot, *self._partial_sources.values()]

    def _pages(self) -> Iterator[Page]:
        return (page for table in self._tables for page in table.pages if page is not None)

    def _pages_tail_first(self) -> Iterator[Page]:
        """Yield deep blocks first, so that they are the first to be evicted."""
        for ordinal in reversed(range(max(map(len, self._tables)))):
            for table in self._tables:
                page = table.pages[ordinal] if ordinal < len(table) else None
                if page is not None:
                    yield page

    def _num_unavailable_slots(self) -> list[int]:
        """Return the GPU slots per pool group that only this cache's holds keep from eviction."""
        counts = [0] * len(self._storage.layout.pool_groups)
        for page in self._pages():
            if page.level == GPU_LEVEL and not page.is_queued:
                counts[self._storage.layout.group_of[page.life_cycle]] += 1
        return counts

    def _table(self, group: LayerGroupId) -> PageTable:
        if not 0 <= group < len(self._tables):
            raise MisuseError(f"layer group is {group}; this manager has {len(self._tables)} groups")
        return self._tables[group]

    def _require(self, status: CacheStatus, call: str) -> None:
        if self._status is not status:
            raise MisuseError(
                f"{call}() needs cache {self._id!r} {status.value}, but it is {self._status.value}"
            )

    def _require_open(self, call: str) -> None:
        if self._status is CacheStatus.CLOSED:
            raise MisuseError(f"{call}() needs cache {self._id!r} open, but it is closed")
