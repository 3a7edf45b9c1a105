# SPDX-License-Identifier: Apache-2.0
"""Giving the pool groups of one level other numbers of slots, with their contents and base addresses kept."""

from collections.abc import Sequence

from ._types import CacheLevel, PoolGroupIndex, SlotId
from .errors import OutOfMemoryError, OutOfPagesError, ResourceBusyError
from .storage import GroupStore, Storage
from .streams import StreamHandle


def set_num_slots(
    storage: Storage, level: CacheLevel, num_slots: Sequence[int], stream: StreamHandle
) -> None:
    """Shrink, then grow the groups of `level` to `num_slots[group]`.

    Pages in slots that go away move to lower slots of the same level; what does not fit is evicted. Raises
    ResourceBusyError if a slot that goes away is locked and OutOfMemoryError if held pages do not fit or
    memory is refused; then all sizes and contents are as before (some pages may have moved or been
    evicted).
    """
    stores = storage.levels[level]
    old = [store.allocator.num_slots for store in stores]
    for group, store in enumerate(stores):
        _check_can_shrink(storage, level, PoolGroupIndex(group), store, num_slots[group])
    for group, store in enumerate(stores):
        num_gone = old[group] - num_slots[group]
        if num_gone > 0:
            storage.make_room(level, PoolGroupIndex(group), num_gone, stream)
            _move_below(storage, level, store, num_slots[group], stream)
    for store, count in zip(stores, num_slots, strict=True):
        if count < store.allocator.num_slots:
            _set_group(store, count)
    try:
        for store, count in zip(stores, num_slots, strict=True):
            if count > store.allocator.num_slots:
                _set_group(store, count)
    except OutOfMemoryError:
        for store, count in zip(stores, old, strict=True):
            if store.allocator.num_slots > count:
                _set_group(store, count)
        for store, count in zip(stores, old, strict=True):
            if store.allocator.num_slots < count:
                _set_group(store, count)
        raise


def _check_can_shrink(
    storage: Storage, level: CacheLevel, group: PoolGroupIndex, store: GroupStore, num_slots: int
) -> None:
    num_gone = store.allocator.num_slots - num_slots
    if num_gone <= 0:
        return
    locked = [page.slot for page in store.owners[num_slots:] if page is not None and page.num_locks]
    if locked:
        raise ResourceBusyError(
            f"level {level} pool group {group} cannot shrink to {num_slots} slots: {locked[:8]} are in use; "
            "suspend the caches first"
        )
    if storage.num_obtainable(level, group) < num_gone:
        raise OutOfPagesError(
            f"level {level} pool group {group} cannot shrink to {num_slots} slots: more of its "
            f"{store.allocator.num_slots} are needed by open caches"
        )


def _move_below(
    storage: Storage, level: CacheLevel, store: GroupStore, bound: int, stream: StreamHandle
) -> None:
    for page in store.owners[bound:]:
        if page is not None:
            storage.migrate([page], level, [store.allocator.take_below(bound)], stream)


def _set_group(store: GroupStore, num_slots: int) -> None:
    """Resize all pools of a group, or none."""
    old = store.allocator.num_slots
    done = 0
    if num_slots < old:
        store.allocator.synchronize(SlotId(num_slots))
    try:
        for pool in store.pools:
            pool.resize(num_slots)
            done += 1
    except OutOfMemoryError:
        for pool in store.pools[:done]:
            pool.resize(old)
        raise
    store.allocator.shrink_or_grow(num_slots)
    store.owners[num_slots:] = []
    store.owners += [None] * (num_slots - len(store.owners))
