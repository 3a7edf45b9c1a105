# SPDX-License-Identifier: Apache-2.0
"""The conservation law, stated: every slot is free or has one owner, and every count has its reasons."""

from collections import Counter
from collections.abc import Sequence

from ._types import GPU_LEVEL, CacheLevel, SlotId
from .cache import _KVCache
from .errors import LogicError
from .page import Page
from .reuse_tree import ReuseTree
from .storage import GroupStore, Storage


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LogicError(message)


def _name(page: Page) -> str:
    return f"slot {page.slot} of level {page.level} (life cycle {page.life_cycle})"


def check_storage(storage: Storage, caches: Sequence[_KVCache]) -> None:
    """Raise LogicError unless slots, owners, holders, locks and eviction queues agree."""
    holders: Counter[int] = Counter()
    locks: Counter[int] = Counter()
    pages: dict[int, Page] = {}
    for cache in caches:
        locked = [*cache.iter_locks()]
        for page in cache.iter_holds():
            holders[id(page)] += 1
            pages[id(page)] = page
        locks.update(id(page) for page in locked)
    for index, groups in enumerate(storage.levels):
        for store in groups:
            _check_store(store, CacheLevel(index), storage.last_level)
    for key, page in pages.items():
        store = storage.group(page.life_cycle, page.level)
        _require(store.owners[page.slot] is page, f"{_name(page)} is held but owned by another page")
        _require(
            page.num_holders == holders[key], f"{_name(page)}: {page.num_holders} holders, not {holders[key]}"
        )
        _require(page.num_locks == locks[key], f"{_name(page)}: {page.num_locks} locks, not {locks[key]}")
    for page in _owners(storage):
        _require(id(page) in pages or not page.num_holders, f"{_name(page)} is held by nobody it knows")
        _require(bool(page.num_holders) or page.block is not None, f"{_name(page)} is needed by nobody")


def _owners(storage: Storage) -> list[Page]:
    return [
        page for groups in storage.levels for store in groups for page in store.owners if page is not None
    ]


def _check_store(store: GroupStore, level: CacheLevel, last_level: CacheLevel) -> None:
    store.allocator.check_integrity()
    store.queue.check_integrity()
    queued = {id(page) for page in store.queue}
    num_slots = store.allocator.num_slots
    _require(len(store.owners) == num_slots, f"{len(store.owners)} owner entries for {num_slots} slots")
    _require(all(pool.num_slots == num_slots for pool in store.pools), "pools of one group differ in slots")
    for slot, page in enumerate(store.owners):
        _require(
            store.allocator.is_live(SlotId(slot)) == (page is not None),
            f"slot {slot} is live without an owner",
        )
        if page is None:
            continue
        _require((page.slot, page.level) == (slot, level), f"slot {slot} is owned by {_name(page)}")
        _require(page.num_locks <= page.num_holders, f"{_name(page)} has more locks than holders")
        _require(not page.num_locks or level == GPU_LEVEL, f"{_name(page)} is locked off the GPU")
        is_evictable = page.num_locks == 0 and (page.num_holders == 0 or level < last_level)
        _require(page.is_queued == is_evictable, f"{_name(page)} is queued: {page.is_queued}")
        _require(page.is_queued == (id(page) in queued), f"{_name(page)} is queued elsewhere")
        queued.discard(id(page))
    _require(not queued, f"{len(queued)} queued pages own no slot of level {level}")


def check_tree(storage: Storage, tree: ReuseTree) -> None:
    """Raise LogicError unless the reuse tree offers exactly the pages that say so."""
    tree.check_integrity()
    offered = {id(page) for block in tree.blocks() for page in block.pages()}
    owners = _owners(storage)
    shared = {id(page) for page in owners if page.block is not None}
    _require(offered == shared, f"{len(offered)} pages are offered, {len(shared)} say they are")
