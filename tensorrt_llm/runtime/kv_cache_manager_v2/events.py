# SPDX-License-Identifier: Apache-2.0
"""What can be reused, as a stream of events for a router: created, stored, removed, updated.

A block is named by a 64-bit hash over its reuse scope and all tokens up to its end, so that equal prefixes
have equal names on every rank. Hashes exist only where events are asked for.
"""

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from ._types import CacheLevel, LayerGroupId, Priority
from .errors import MisuseError
from .page import Page, SnapshotPage
from .reuse_tree import Block, RootBlock
from .stats import StatsCollector
from .tokens import TokenPacker


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedEvent:
    """The cache exists. `num_slots[level][pool_group]`."""

    num_slots: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """A block can be reused from a layer group. `parent_hash` is None for the first block of a sequence."""

    block_hash: int
    parent_hash: int | None
    tokens: tuple[int, ...]
    level: CacheLevel
    priority: Priority
    snapshot_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedEvent:
    """A block can no longer be reused from a layer group."""

    block_hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedEvent:
    """A block moved to another level."""

    block_hash: int
    old_level: CacheLevel
    new_level: CacheLevel


EventData = CreatedEvent | StoredEvent | RemovedEvent | UpdatedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheEvent:
    """One event. `event_id` counts from 0; `layer_group` and `window_size` are None for CreatedEvent."""

    event_id: int
    data: EventData
    layer_group: LayerGroupId | None = None
    window_size: int | None = None


def block_hash(parent_hash: int | None, scope: Hashable, tokens: Sequence[int]) -> int:
    """Return the name of a block of tokens; `scope` counts for first blocks, which have no parent."""
    root = repr(scope).encode() if parent_hash is None else parent_hash.to_bytes(8, "little")
    packed = array("I", tokens).tobytes()
    return int.from_bytes(blake2b(root + b"|" + packed, digest_size=8).digest(), "little")


class KVCacheEventManager:
    """Keeps the latest `max_events` events until they are read; older ones are given up and counted."""

    def __init__(self, max_events: int) -> None:
        if max_events <= 0:
            raise MisuseError(f"max_events is {max_events}; give a positive buffer size, or no event manager")
        self._events: deque[KVCacheEvent] = deque(maxlen=max_events)
        self._hashes: dict[Block, int] = {}
        self._window_sizes: tuple[int | None, ...] = ()
        self._packer = TokenPacker(text_only=False)
        self._next_id = 0
        self.num_lost = 0

    def bind(self, window_sizes: Sequence[int | None], packer: TokenPacker) -> None:
        """Called once, by the manager that reports here, before it allocates. Windows are per layer group."""
        if self._window_sizes:
            raise MisuseError("this event manager serves another cache manager already; give each its own")
        self._window_sizes = tuple(window_sizes)
        self._packer = packer

    def start(self, num_slots: Sequence[Sequence[int]]) -> None:
        """Report that the manager exists with `num_slots[level][pool_group]`."""
        self._append(CreatedEvent(num_slots=tuple(tuple(level) for level in num_slots)), None)

    def get_latest_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def on_stored(self, page: Page, block: Block) -> None:
        parent = block.parent
        parent_hash = None if parent is None or isinstance(parent, RootBlock) else self._hash_of(parent)
        data = StoredEvent(
            block_hash=self._hash_of(block),
            parent_hash=parent_hash,
            tokens=tuple(self._packer.unpack(block.tokens)),
            level=page.level,
            priority=page.priority,
            snapshot_tokens=page.num_tokens if isinstance(page, SnapshotPage) else None,
        )
        self._append(data, page.life_cycle)

    def on_removed(self, page: Page, block: Block) -> None:
        self._append(RemovedEvent(block_hash=self._hash_of(block)), page.life_cycle)
        if block.first_page is None:
            self._hashes.pop(block, None)

    def on_renaming(self, block: Block) -> None:
        for page in block.pages():
            self._append(RemovedEvent(block_hash=self._hash_of(block)), page.life_cycle)
        self._hashes.pop(block, None)

    def on_moved(self, page: Page, source: CacheLevel) -> None:
        if page.block is not None and page.level != source:
            data = UpdatedEvent(block_hash=self._hash_of(page.block), old_level=source, new_level=page.level)
            self._append(data, page.life_cycle)

    def _hash_of(self, block: Block) -> int:
        chain: list[Block] = []
        parent_hash: int | None = None
        scope: Hashable = None
        link: Block | None = block
        while link is not None:
            if isinstance(link, RootBlock):
                scope = link.scope
                break
            known = self._hashes.get(link)
            if known is not None:
                parent_hash = known
                break
            chain.append(link)
            link = link.parent
        for one in reversed(chain):
            parent_hash = self._hashes[one] = block_hash(parent_hash, scope, self._packer.unpack(one.tokens))
        return self._hashes[block]

    def _append(self, data: EventData, layer_group: LayerGroupId | None) -> None:
        self.num_lost += len(self._events) == self._events.maxlen
        window = None if layer_group is None else self._window_sizes[layer_group]
        event = KVCacheEvent(event_id=self._next_id, data=data, layer_group=layer_group, window_size=window)
        self._events.append(event)
        self._next_id += 1


class StatsAndEvents:
    """Tells both of what happens in the storage."""

    def __init__(self, stats: StatsCollector, events: KVCacheEventManager) -> None:
        self._stats = stats
        self._events = events

    def on_allocated(self, life_cycle: LayerGroupId, num_pages: int) -> None:
        self._stats.on_allocated(life_cycle, num_pages)

    def on_moved(self, page: Page, source: CacheLevel) -> None:
        self._stats.on_moved(page, source)
        self._events.on_moved(page, source)

    def on_copied(self, destination: Page) -> None:
        self._stats.on_copied(destination)

    def on_dropped(self, page: Page) -> None:
        self._stats.on_dropped(page)
