# SPDX-License-Identifier: Apache-2.0
"""One request's cache: a state machine over page tables.

    create -> SUSPENDED -- resume --> ACTIVE -- suspend --> SUSPENDED ...; close from either.

A call that lacks capacity returns False and changes nothing.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from ._math import cdiv
from ._types import (
    BAD_PAGE_INDEX,
    DEFAULT_BEAM_INDEX,
    GPU_LEVEL,
    PRIORITY_DEFAULT,
    BeamIndex,
    BlockOrdinal,
    CacheStatus,
    LayerGroupId,
    LifeCycleId,
    Priority,
)
from .errors import MisuseError, OutOfPagesError
from .life_cycle import LifeCycle, SsmLifeCycle
from .page import Page, PageTable
from .streams import StreamHandle

if TYPE_CHECKING:
    from .manager import KVCacheManager

PriorityCallback = Callable[[BlockOrdinal, LifeCycle], Priority]


class _KVCache:
    """The pages, recurrent state slot and committed tokens of one request.

    Create it with `KVCacheManager.create_kv_cache`. All lengths are in tokens.
    """

    Status = CacheStatus

    def __init__(
        self,
        manager: "KVCacheManager",
        cache_id: Hashable,
        priority_callback: PriorityCallback | None,
    ) -> None:
        self._manager = manager
        self._storage = manager.storage
        self._id = cache_id
        self._priority_callback = priority_callback
        self._status = CacheStatus.SUSPENDED
        self._tables = [PageTable() for _ in manager.life_cycles]
        self._stream: StreamHandle | None = None
        self._capacity = 0
        self._history_length = 0
        self._num_committed_tokens = 0
        self._may_commit = True

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
        return self._num_committed_tokens

    @property
    def num_blocks(self) -> int:
        return cdiv(self._capacity, self._manager.tokens_per_block)

    @property
    def cuda_stream(self) -> StreamHandle:
        """The stream given to `resume`. MisuseError unless active."""
        if self._stream is None:
            raise MisuseError(
                f"cache {self._id!r} is {self._status.value} and has no stream; call resume(stream)"
            )
        return self._stream

    def resume(self, stream: StreamHandle | None = None) -> bool:
        """Make the cache usable on `stream`: all pages on the GPU, locked in their slots.

        The first resume takes a recurrent state slot, whose content is undefined unless a prefix was
        reused. Returns False, with nothing changed, when others use more than max_util_for_resume of a pool
        group that grows with tokens, or there are no slots.
        """
        self._require(CacheStatus.SUSPENDED, "resume")
        stream_handle = stream or 0
        if self._manager.is_too_full_to_resume(self._held_pages_per_group()):
            return False
        is_first = self._stream is None and all(not self._tables[group] for group in self._ssm_ids())
        counts = [0] * len(self._tables)
        if is_first:
            for life_cycle in self._ssm_ids():
                counts[life_cycle] = 1
        try:
            fresh = self._storage.new_pages(counts, PRIORITY_DEFAULT, stream_handle)
        except OutOfPagesError:
            return False
        for page in self._pages():
            page.num_locks += 1
        for table, pages in zip(self._tables, fresh, strict=True):
            for page in pages:
                self._storage.lock(page)
                table.append(page)
        for table in self._tables:
            table.refresh()
        self._stream = stream_handle
        self._status = CacheStatus.ACTIVE
        return True

    def suspend(self) -> None:
        """Let the pages move: page index buffers are detached, contents stay valid, slot ids may change."""
        self._require(CacheStatus.ACTIVE, "suspend")
        for table in self._tables:
            table.invalidate()
        for page in self._pages():
            page.num_locks -= 1
        self._status = CacheStatus.SUSPENDED
        self._stream = None

    def close(self) -> None:
        """Give everything back. MisuseError when already closed."""
        if self._status is CacheStatus.CLOSED:
            raise MisuseError(f"cache {self._id!r} is closed already; close it once")
        is_active = self.is_active
        event = self._storage.streams.record(self.cuda_stream) if is_active else None
        for table in self._tables:
            table.invalidate()
            while table.pages:
                page = table.pop()
                if page is not None:
                    self._storage.release(page, is_active, event)
        self._capacity = 0
        self._status = CacheStatus.CLOSED
        self._stream = None
        self._manager.forget(self)

    def resize(self, capacity: int | None = None, history_length: int | None = None) -> bool:
        """Set capacity and history together. None keeps a value.

        History never decreases; a lower capacity frees tail blocks. Recurrent states are not touched.
        Returns False, with nothing changed, when pages are lacking. MisuseError for lengths that contradict
        each other.
        """
        self._require(CacheStatus.ACTIVE, "resize")
        new_capacity = self._capacity if capacity is None else capacity
        new_history = self._history_length if history_length is None else history_length
        if new_history < self._history_length or new_capacity < new_history:
            raise MisuseError(
                f"resize(capacity={capacity}, history_length={history_length}) of {self._id!r}, now at "
                f"capacity {self._capacity} and history {self._history_length}: history must neither decrease "
                "nor exceed the capacity"
            )
        num_blocks = cdiv(new_capacity, self._manager.tokens_per_block)
        if num_blocks > self.num_blocks and not self._grow(num_blocks):
            return False
        if num_blocks < self.num_blocks:
            self._drop_tail(num_blocks)
        self._capacity = new_capacity
        self._history_length = new_history
        return True

    def commit(self, tokens: Sequence[int], is_end: bool = False) -> None:
        """Declare that `tokens` follow the committed ones and are computed; raises history to cover them.

        `is_end`: nothing will be committed after this.
        """
        self._require(CacheStatus.ACTIVE, "commit")
        if not self._may_commit:
            raise MisuseError(
                f"cache {self._id!r} promised to commit no more; do not commit after stop_committing"
            )
        num_tokens = self._num_committed_tokens + len(tokens)
        if num_tokens > self._capacity:
            raise MisuseError(f"committing {num_tokens} tokens into capacity {self._capacity}; resize first")
        self._num_committed_tokens = num_tokens
        self._history_length = max(self._history_length, num_tokens)
        if is_end:
            self.stop_committing()

    def stop_committing(self) -> None:
        """Promise that no tokens will be committed any more."""
        self._may_commit = False

    def set_base_page_index_buf(
        self, beam: BeamIndex, group: LayerGroupId, buffer: memoryview | None
    ) -> None:
        """Keep `buffer` (int32) equal to `get_base_page_indices(group)` until suspend, padded with -1."""
        if beam != DEFAULT_BEAM_INDEX:
            raise MisuseError(f"beam is {beam}; this runtime has one beam, use 0")
        if buffer is not None:
            self._require(CacheStatus.ACTIVE, "set_base_page_index_buf")
        self._tables[group].attach(buffer)

    def get_base_page_indices(
        self, group: LayerGroupId, beam: BeamIndex = DEFAULT_BEAM_INDEX
    ) -> Sequence[int]:
        """Return the slot id of each block, BAD_PAGE_INDEX where there is none. Read-only; valid until the
        next call.
        """
        self._require(CacheStatus.ACTIVE, "get_base_page_indices")
        return self._tables[group].indices

    def get_aggregated_page_indices(self, group: LayerGroupId, valid_only: bool = False) -> Iterator[int]:
        """Yield the slot ids of the group's pages in block order; `valid_only` skips missing ones."""
        self._require(CacheStatus.ACTIVE, "get_aggregated_page_indices")
        return (index for index in self._tables[group].indices if not valid_only or index != BAD_PAGE_INDEX)

    def get_ssm_block_base_index(self, group: LayerGroupId) -> int:
        """Return the slot id of the recurrent state, BAD_PAGE_INDEX while the cache is not active."""
        if not isinstance(self._manager.life_cycles[group], SsmLifeCycle):
            raise MisuseError(f"layer group {group} holds attention pages; ask for the SSM group")
        table = self._tables[group]
        return table.indices[0] if self.is_active and table.pages else BAD_PAGE_INDEX

    def get_held_pages(self) -> Iterator[Page]:
        """Yield every page this cache holds. For integrity checks."""
        return self._pages()

    def _require(self, status: CacheStatus, call: str) -> None:
        if self._status is not status:
            raise MisuseError(
                f"{call}() needs cache {self._id!r} {status.value}, but it is {self._status.value}"
            )

    def _ssm_ids(self) -> list[LifeCycleId]:
        ssm_id = self._manager.life_cycles.ssm_id
        return [] if ssm_id is None else [ssm_id]

    def _pages(self) -> Iterator[Page]:
        return (page for table in self._tables for page in table.pages if page is not None)

    def _held_pages_per_group(self) -> list[int]:
        counts = [0] * len(self._storage.layout.pool_groups)
        for page in self._pages():
            if page.level == GPU_LEVEL:
                counts[self._storage.layout.group_of[page.life_cycle]] += 1
        return counts

    def _grow(self, num_blocks: int) -> bool:
        counts = [0] * len(self._tables)
        for life_cycle, _ in self._manager.life_cycles.attention_items():
            self._tables[life_cycle].check_room(num_blocks)
            counts[life_cycle] = num_blocks - len(self._tables[life_cycle])
        try:
            fresh = self._storage.new_pages(counts, PRIORITY_DEFAULT, self.cuda_stream)
        except OutOfPagesError:
            return False
        for table, pages in zip(self._tables, fresh, strict=True):
            for page in pages:
                self._storage.lock(page)
                table.append(page)
        return True

    def _drop_tail(self, num_blocks: int) -> None:
        event = self._storage.streams.record(self.cuda_stream)
        for life_cycle, _ in self._manager.life_cycles.attention_items():
            table = self._tables[life_cycle]
            while len(table) > num_blocks:
                page = table.pop()
                if page is not None:
                    self._storage.release(page, True, event)
