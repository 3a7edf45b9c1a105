# SPDX-License-Identifier: Apache-2.0
"""One request's cache: a state machine over page tables.

    create -> SUSPENDED -- resume --> ACTIVE -- suspend --> SUSPENDED ...; close from either.

A call that lacks capacity returns False and changes nothing.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
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
)
from .block_tables import BlockTables
from .committer import Committer, PriorityCallback
from .drop_plan import CommittedBlockDropPlan
from .errors import MisuseError, OutOfMemoryError
from .holdings import Holdings
from .matching import PrefixMatch
from .page import Page, PageTable
from .scratch import ScratchDesc
from .stats import LookupStats, RequestStats
from .streams import StreamHandle
from .tokens import TokenIds

if TYPE_CHECKING:
    from .manager import KVCacheManager


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """What `create_kv_cache` was asked for; the meaning of each field stands there."""

    id: Hashable
    reuse_scope: Hashable
    priority_callback: PriorityCallback | None
    text_only: bool
    keeps_stats: bool


class _KVCache:
    """The pages, recurrent state slot and committed tokens of one request.

    Create it with `KVCacheManager.create_kv_cache`. All lengths are in tokens.
    """

    Status = CacheStatus

    def __init__(self, manager: "KVCacheManager", options: CacheOptions) -> None:
        config = manager.init_config
        self._manager = manager
        self._storage = manager.storage
        self._id = options.id
        self._text_only = options.text_only
        self._status = CacheStatus.SUSPENDED
        self._holdings = Holdings(manager.storage, manager.life_cycles)
        tables = self._holdings.tables
        self._committer = Committer(
            manager.tree,
            manager.storage,
            manager.life_cycles,
            options.reuse_scope,
            tables,
            allows_partial=config.enable_partial_reuse,
            keeps_minimum=config.commit_min_snapshot,
            priority_callback=options.priority_callback,
        )
        self._blocks = BlockTables(
            manager.storage, manager.life_cycles, tables, manager.tokens_per_block, manager.scratch_plan
        )
        self._stream: StreamHandle | None = None
        self._capacity = 0
        self._history_length = 0
        self._may_commit = True
        self._match = PrefixMatch()
        self._pending_lookup: LookupStats | None = None
        self._request_stats = RequestStats() if options.keeps_stats else None

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

    def adopt_match(self, match: PrefixMatch, ids: TokenIds, lookup: LookupStats) -> None:
        """Start from a reused prefix of the prompt: hold its pages. Called once, by the manager."""
        self._match = match
        self._pending_lookup = lookup
        if self._request_stats is not None:
            self._request_stats.add_lookup(lookup)
        self._committer.start_from(match, ids)
        self._capacity = self._history_length = match.num_tokens
        self._blocks.load(match)
        self._holdings.hold_match(match)

    # Suspend and resume

    def resume(self, stream: StreamHandle | None = None) -> bool:
        """Make the cache usable on `stream`: all pages on the GPU, locked in their slots.

        The first resume takes a recurrent state slot, whose content is undefined unless a prefix was
        reused, and a private copy of a block that is reused in part. Returns False, with nothing changed,
        when others use more than max_util_for_resume of a pool group that grows with tokens, or room is
        lacking.
        """
        self._require(CacheStatus.SUSPENDED, "resume")
        if self._manager.is_too_full_to_resume(self._holdings.num_unavailable_slots()):
            return False
        try:
            self._holdings.lock_all_on_gpu(stream or 0)
        except OutOfMemoryError:
            return False
        self._stream = stream or 0
        self._status = CacheStatus.ACTIVE
        self._manager.on_resumed()
        return True

    def suspend(self) -> None:
        """Let the pages move: page index buffers are detached, contents stay valid, slot ids may change."""
        self._require(CacheStatus.ACTIVE, "suspend")
        self._holdings.mark_used(self.cuda_stream)
        self._holdings.unlock_all()
        self._status = CacheStatus.SUSPENDED
        self._stream = None
        self._manager.on_suspended()

    def prefetch(self, level: CacheLevel, stream: StreamHandle | None = None) -> bool:
        """Move held pages that lie below `level` up to it, ahead of `resume`. False when room is lacking."""
        self._require(CacheStatus.SUSPENDED, "prefetch")
        if not GPU_LEVEL <= level <= self._storage.last_level:
            raise MisuseError(f"level is {level}; this manager has levels 0 to {self._storage.last_level}")
        try:
            self._holdings.bring_up(level, stream or 0)
        except OutOfMemoryError:
            return False
        return True

    def close(self) -> None:
        """Give everything back; what was committed stays reusable. MisuseError when already closed."""
        if self._status is CacheStatus.CLOSED:
            raise MisuseError(f"cache {self._id!r} is closed already; close it once")
        self.commit_pending_stats()
        self._manager.forget(self)
        if self._stream is not None:
            self._holdings.mark_used(self._stream)
        self._holdings.release_all(is_locked=self.is_active)
        self._committer.close()
        self._capacity = 0
        self._status = CacheStatus.CLOSED
        self._stream = None

    # Growth

    def resize(self, capacity: int | None = None, history_length: int | None = None) -> bool:
        """Set capacity and history together. None keeps a value.

        History never decreases; a lower capacity frees tail blocks; blocks that a window has left behind
        are let go. Recurrent states are not touched. With `swa_scratch_reuse` the tokens from history to
        capacity are one step, to be computed and then all, but the last max_rewind_len, kept. Returns
        False, with nothing changed, when pages are lacking. MisuseError for lengths that contradict each
        other.
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
        self._blocks.check_step(self._capacity, self._history_length, new_capacity, new_history)
        num_blocks, old_num_blocks = cdiv(new_capacity, self._manager.tokens_per_block), self.num_blocks
        if num_blocks > old_num_blocks:
            num_added = self._blocks.grow(old_num_blocks, new_capacity, new_history, self.cuda_stream)
            if num_added is None:
                return False
            if self._request_stats is not None:
                self._request_stats.alloc_blocks += num_added
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
        ids = self._manager.tree.packer.parse(tokens, text_only=self._text_only)
        num_tokens = self._committer.num_tokens + len(ids)
        if num_tokens > self._capacity:
            raise MisuseError(
                f"commit of {len(tokens)} tokens makes {num_tokens}, beyond the capacity {self._capacity} of "
                f"{self._id!r}; resize first"
            )
        history_length = max(self._history_length, num_tokens)
        self._blocks.check_step(self._capacity, self._history_length, self._capacity, history_length)
        self._committer.commit(ids, self.cuda_stream)
        self._advance(history_length)
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

    def get_scratch_desc(self, group: LayerGroupId) -> ScratchDesc | None:
        """Return the blocks that share slots in this step, None where there are none.

        Their base page index is BAD_PAGE_INDEX; the page index converter of each layer places them.
        """
        self._require(CacheStatus.ACTIVE, "get_scratch_desc")
        return self._table(group).scratch_desc()

    def get_aggregated_page_indices(self, group: LayerGroupId, valid_only: bool = False) -> Iterator[int]:
        """Yield the slot ids of the group's pages in block order; `valid_only` skips missing ones."""
        self._require(CacheStatus.ACTIVE, "get_aggregated_page_indices")
        return (index for index in self._table(group).indices if not valid_only or index != BAD_PAGE_INDEX)

    def get_ssm_block_base_index(self, group: LayerGroupId) -> int:
        """Return the slot id of the recurrent state, BAD_PAGE_INDEX while the cache is not active."""
        if group != self._manager.life_cycles.ssm_id:
            raise MisuseError(f"layer group {group} holds no recurrent states; ask for the SSM group")
        table = self._table(group)
        return table.indices[0] if self.is_active and table.pages else BAD_PAGE_INDEX

    # Statistics

    @property
    def request_stats(self) -> RequestStats:
        """This request's counts, live. MisuseError unless created with `enable_request_stats`."""
        if self._request_stats is None:
            raise MisuseError(
                f"cache {self._id!r} keeps no statistics; create it with enable_request_stats=True"
            )
        return self._request_stats

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
        yield from self._holdings.pages()
        yield from self._holdings.sources()
        yield from self._committer.anchors

    def iter_locks(self) -> Iterator[Page]:
        """Yield every page this cache locks. For integrity checks."""
        return self._holdings.pages() if self.is_active else iter(())

    def _table(self, group: LayerGroupId) -> PageTable:
        tables = self._holdings.tables
        if not 0 <= group < len(tables):
            raise MisuseError(f"layer group is {group}; this manager has {len(tables)} groups")
        return tables[group]

    def _require(self, status: CacheStatus, call: str) -> None:
        if self._status is not status:
            raise MisuseError(
                f"{call}() needs cache {self._id!r} {status.value}, but it is {self._status.value}"
            )

    def _require_open(self, call: str) -> None:
        if self._status is CacheStatus.CLOSED:
            raise MisuseError(f"{call}() needs cache {self._id!r} open, but it is closed")
