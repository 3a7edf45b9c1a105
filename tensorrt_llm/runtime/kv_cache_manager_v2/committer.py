# SPDX-License-Identifier: Apache-2.0
"""How one request's computed tokens enter the reuse tree.

Full blocks form the request's path; it keeps holding the pages the tree offers there, so nothing above its
own tail can vanish. The tokens behind the last full block become a partial block when something must be
offered there: a recurrent state snapshot, or the end of a sequence. The request goes on writing behind a
partial block's tokens into the same page, and extends the block when it commits more.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from ._math import cdiv
from ._types import (
    GPU_LEVEL,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    BlockOrdinal,
    LifeCycleId,
    Priority,
)
from .errors import MisuseError, OutOfMemoryError
from .life_cycle import AttnLifeCycle, LifeCycle, LifeCycleRegistry
from .matching import PrefixMatch
from .page import Page, PageTable, SnapshotPage
from .reuse_tree import Block, ReuseTree
from .storage import Storage
from .streams import StreamHandle
from .tokens import TokenIds

PriorityCallback = Callable[[BlockOrdinal, LifeCycle], Priority]


class Committer:
    """Committed tokens of one cache. `tables` are the cache's page tables, one per life cycle."""

    __slots__ = (
        "_allows_partial",
        "_keeps_minimum",
        "_life_cycles",
        "_own_partial",
        "_priorities",
        "_priority_callback",
        "_scope",
        "_storage",
        "_tables",
        "_tail",
        "_tail_ids",
        "_tree",
        "anchors",
        "num_skipped_snapshots",
        "num_tokens",
        "pages",
    )

    def __init__(
        self,
        tree: ReuseTree,
        storage: Storage,
        life_cycles: LifeCycleRegistry,
        scope: Hashable,
        tables: Sequence[PageTable],
        *,
        allows_partial: bool,
        keeps_minimum: bool,
        priority_callback: PriorityCallback | None,
    ) -> None:
        self._tree = tree
        self._storage = storage
        self._life_cycles = life_cycles
        self._scope = scope
        self._tables = tables
        self._allows_partial = allows_partial
        self._keeps_minimum = keeps_minimum
        self._priority_callback = priority_callback
        self._priorities: dict[tuple[LifeCycleId, int], Priority] = {}
        self._tail: Block | None = None
        self._tail_ids: TokenIds = tree.packer.parse(())
        self._own_partial: Block | None = None
        self.num_tokens = 0
        self.num_skipped_snapshots = 0
        self.pages: list[Page] = []
        """Pages this request has offered."""
        self.anchors: list[Page] = []
        """Held pages of the path, at lower levels, of which the request has private copies."""

    def start_from(self, match: PrefixMatch, ids: TokenIds) -> None:
        """Take the matched prefix of a prompt as committed."""
        if match.blocks:
            self._tail = match.blocks[-1]
            self._tree.pin(self._tail)
        self.num_tokens = match.num_tokens
        self._tail_ids = ids[len(match.blocks) * self._tree.tokens_per_block : match.num_tokens].copy()

    def commit(self, ids: TokenIds, stream: StreamHandle) -> None:
        """Append tokens. Without room for a snapshot none is offered there; that is no failure.

        If a copy fails the error passes through with nothing changed.
        """
        self._rank(len(ids))
        num_pages = len(self.pages)
        if self._tail is None:
            self._tail = self._tree.pin_root(self._scope)
        num_tokens = self.num_tokens + len(ids)
        size = self._tree.tokens_per_block
        pending = np.concatenate([self._tail_ids, ids])
        keys, rest = self._tree.packer.block_keys(pending, size), pending[len(pending) // size * size :]
        snapshot = self._take_snapshot(self._tail, keys, rest, num_tokens, stream)
        ordinal = self.num_tokens // size
        for index, key in enumerate(keys):
            self._commit_full(key, BlockOrdinal(ordinal + index), num_tokens, stream)
        # A copy, so that a long prompt's memory can go.
        self._tail_ids = rest.copy()
        self.num_tokens = num_tokens
        if snapshot is not None:
            self._offer_snapshot(snapshot)
        event = self._storage.streams.record(stream)
        for page in self.pages[num_pages:]:
            self._storage.mark_used(page, event)

    def finish(self) -> None:
        """Offer the tokens behind the last full block, where attention alone can serve them."""
        has_rest = self._allows_partial and len(self._tail_ids) > 0
        if not has_rest or self._tail is None or self._life_cycles.ssm_id is not None:
            return
        key, packer = self._tail_key(), self._tree.packer
        num_covered = self._tree.num_common(self._tail.nearest_child(key, packer), key)
        ordinal = self.num_tokens // self._tree.tokens_per_block
        has_pages = all(self._page_at(index, ordinal) for index, _ in self._life_cycles.attention)
        if has_pages and num_covered < len(self._tail_ids):
            self._partial_block()

    def _tail_key(self) -> bytes:
        return self._tree.packer.key(self._tail_ids)

    def close(self) -> None:
        """Let go of the path. The cache releases its own pages."""
        for page in self.anchors:
            self._storage.release(page)
        self.anchors.clear()
        if self._tail is not None:
            self._tree.unpin(self._tail)
            self._tail = None

    def _page_at(self, life_cycle: LifeCycleId, ordinal: int) -> Page | None:
        pages = self._tables[life_cycle].pages
        return pages[ordinal] if ordinal < len(pages) else None

    # Full blocks

    def _commit_full(self, key: bytes, ordinal: BlockOrdinal, num_tokens: int, stream: StreamHandle) -> None:
        """Make the block behind the tail, at `ordinal`, the new tail."""
        parent = self._tail
        assert parent is not None
        own = self._attached_partial()
        block = parent.child(key)
        if block is None and own is not None:
            self._tree.extend(own, key)
            block = own
        elif block is None:
            block = self._tree.add(parent, key)
        self._tree.pin(block)
        for life_cycle, value in self._life_cycles.attention:
            if not self._offer_page(block, life_cycle, value, ordinal, num_tokens):
                self._share_page(block, life_cycle, ordinal, stream)
        self._tail = block
        self._own_partial = None
        self._tree.unpin(parent)

    def _offer_page(
        self,
        block: Block,
        life_cycle: LifeCycleId,
        value: AttnLifeCycle,
        ordinal: BlockOrdinal,
        num_tokens: int,
    ) -> bool:
        """Offer the request's page in `block`; False if another page is offered there already."""
        mine, offered = self._page_at(life_cycle, ordinal), block.page_of(life_cycle)
        if offered is not None:
            return mine is offered
        stale = value.stale_range(num_tokens, self._tree.tokens_per_block)
        is_needed = not (self._keeps_minimum and stale.start <= ordinal < stale.stop)
        if mine is not None and mine.block is None and is_needed:
            self._link(mine, block, ordinal)
        return True

    def _share_page(
        self, block: Block, life_cycle: LifeCycleId, ordinal: BlockOrdinal, stream: StreamHandle
    ) -> None:
        """Go over to the equal page that `block` offers if it is on the GPU, hold it as an anchor else."""
        mine, shared = self._page_at(life_cycle, ordinal), block.page_of(life_cycle)
        if mine is None or shared is None:
            return
        self._storage.hold(shared)
        if shared.level != GPU_LEVEL:
            self.anchors.append(shared)
            return
        self._storage.lock(shared)
        self._storage.wait_for_pages([shared], stream)
        self._tables[life_cycle].put(ordinal, shared)
        self._storage.mark_used(mine, self._storage.streams.record(stream))
        self._storage.unlock(mine)
        self._storage.release(mine)

    def _rank(self, num_new_tokens: int) -> None:
        """Ask the priority callback about every block that gets pages, before anything is changed."""
        if self._priority_callback is None:
            return
        size = self._tree.tokens_per_block
        stop = cdiv(self.num_tokens + num_new_tokens, size)
        for life_cycle, value in self._life_cycles.items():
            for ordinal in range(self.num_tokens // size, stop):
                priority = self._priority_callback(BlockOrdinal(ordinal), value)
                if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
                    raise MisuseError(
                        f"custom_priority_callback gave {priority} for block {ordinal}; return "
                        f"{PRIORITY_MIN} to {PRIORITY_MAX}"
                    )
                self._priorities[life_cycle, ordinal] = priority

    def _link(self, page: Page, block: Block, ordinal: int) -> None:
        page.priority = self._priorities.get((page.life_cycle, ordinal), PRIORITY_DEFAULT)
        self._tree.link(page, block)
        self.pages.append(page)

    # Partial blocks

    def _attached_partial(self) -> Block | None:
        own = self._own_partial
        return own if own is not None and self._tree.is_attached(own) else None

    def _partial_block(self) -> Block:
        """Return the block of the tokens behind the tail, created or extended if need be."""
        tail, key = self._tail, self._tail_key()
        assert tail is not None
        block = tail.child(key)
        if block is not None:
            return block
        own = self._attached_partial()
        if own is not None:
            self._tree.extend(own, key)
            return own
        block = self._tree.add(tail, key)
        self._own_partial = block
        ordinal = BlockOrdinal(self.num_tokens // self._tree.tokens_per_block)
        for life_cycle, _ in self._life_cycles.attention:
            page = self._page_at(life_cycle, ordinal)
            if page is not None and page.block is None:
                self._link(page, block, ordinal)
        return block

    # Snapshots

    def _take_snapshot(
        self, tail: Block, keys: Sequence[bytes], rest: TokenIds, num_tokens: int, stream: StreamHandle
    ) -> SnapshotPage | None:
        """Copy the live state, which stands at `num_tokens`, unless such a snapshot is offered already."""
        ssm_id = self._life_cycles.ssm_id
        if ssm_id is None or not num_tokens:
            return None
        if len(rest) and not self._allows_partial:
            return None
        known = self._find_snapshot(tail, keys, rest, num_tokens, ssm_id)
        if known is not None:
            self._storage.touch(known)
            return None
        live = self._tables[ssm_id].pages[0]
        assert live is not None
        needed = [0] * len(self._storage.layout.pool_groups)
        needed[self._storage.layout.group_of[ssm_id]] = 1
        try:
            slots = self._storage.reserve(GPU_LEVEL, needed, stream)
        except OutOfMemoryError:
            self.num_skipped_snapshots += 1
            return None
        slot = slots[self._storage.layout.group_of[ssm_id]][0]
        snapshot = self._storage.adopt(SnapshotPage(ssm_id, GPU_LEVEL, slot, num_tokens))
        is_copied = False
        try:
            self._storage.copy(snapshot, live, stream)
            is_copied = True
        finally:
            if not is_copied:
                self._storage.free(snapshot)
        return snapshot

    def _find_snapshot(
        self, tail: Block, keys: Sequence[bytes], rest: TokenIds, num_tokens: int, ssm_id: LifeCycleId
    ) -> Page | None:
        path = self._tree.walk(tail, keys)
        if len(path) < len(keys):
            return None
        block: Block | None = path[-1] if path else tail
        if len(rest) and block is not None:
            block = block.snapshot_child(self._tree.packer.key(rest))
        page = None if block is None else block.page_of(ssm_id)
        return page if isinstance(page, SnapshotPage) and page.num_tokens == num_tokens else None

    def _offer_snapshot(self, snapshot: SnapshotPage) -> None:
        """Link the snapshot at the end of the committed tokens; the latest of a block wins."""
        block = self._partial_block() if len(self._tail_ids) else self._tail
        assert block is not None
        self._tree.pin(block)
        earlier = block.page_of(snapshot.life_cycle)
        if earlier is not None:
            self._storage.withdraw(earlier)
        self._link(snapshot, block, (self.num_tokens - 1) // self._tree.tokens_per_block)
        self._storage.offer(snapshot)
        self._tree.unpin(block)
