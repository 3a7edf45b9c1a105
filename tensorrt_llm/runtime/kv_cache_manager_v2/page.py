# SPDX-License-Identifier: Apache-2.0
"""One owned slot, and a request's table of them."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from ._types import BAD_PAGE_INDEX, PRIORITY_DEFAULT, CacheLevel, LifeCycleId, Priority, SlotId
from .errors import MisuseError
from .scratch import ScratchDesc

if TYPE_CHECKING:
    from .reuse_tree import Block


class Link:
    """An entry of a doubly linked list; both ends are None while it is in no list."""

    __slots__ = ("next", "prev")

    def __init__(self) -> None:
        self.prev: Link | None = None
        self.next: Link | None = None


SLOTS_PER_FRAME: Final = 256
"""Python keeps one object for each of the integers below 257, so an index into a frame costs no memory."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What the pages of up to `SLOTS_PER_FRAME` neighbouring slots share, so that each page is small."""

    life_cycle: LifeCycleId
    level: CacheLevel
    priority: Priority
    first_slot: int


# One frame per combination, however many managers there are; there are few combinations.
_frame = cache(Frame)


class Page(Link):
    """An owned slot: content of one block (attention) or of one sequence (SSM).

    num_holders: caches that need the content. num_locks: those of them that are active, so that the page
    must stay in its GPU slot. block: the block of the reuse tree that offers the page to others, None while
    it is private. next_of_block: the next page of the same block, for another life cycle. frame and index:
    where the content lies, see `slot`.
    """

    __slots__ = ("frame", "index", "block", "next_of_block", "num_holders", "num_locks")

    def __init__(self, life_cycle: LifeCycleId, level: CacheLevel, slot: SlotId) -> None:
        self.prev = self.next = None
        self._place(life_cycle, level, PRIORITY_DEFAULT, slot)
        self.num_holders = 0
        self.num_locks = 0
        self.block: Block | None = None
        self.next_of_block: Page | None = None

    def _place(self, life_cycle: LifeCycleId, level: CacheLevel, priority: Priority, slot: int) -> None:
        index = slot % SLOTS_PER_FRAME
        self.frame: Frame = _frame(life_cycle, level, priority, slot - index)
        self.index = index

    @property
    def life_cycle(self) -> LifeCycleId:
        return self.frame.life_cycle

    @property
    def level(self) -> CacheLevel:
        return self.frame.level

    @property
    def slot(self) -> SlotId:
        return SlotId(self.frame.first_slot + self.index)

    def move_to(self, level: CacheLevel, slot: SlotId) -> None:
        """Note that the content lies in another slot now."""
        self._place(self.frame.life_cycle, level, self.frame.priority, slot)

    @property
    def priority(self) -> Priority:
        """Rank for eviction, lowest first. Must not be set while the page is queued."""
        return self.frame.priority

    @priority.setter
    def priority(self, priority: Priority) -> None:
        self._place(self.frame.life_cycle, self.frame.level, priority, self.slot)

    @property
    def is_queued(self) -> bool:
        """Whether an eviction queue offers this page."""
        return self.next is not None


class SnapshotPage(Page):
    """A copy of a recurrent state after exactly `num_tokens` tokens of its block's path."""

    __slots__ = ("num_tokens",)

    def __init__(self, life_cycle: LifeCycleId, level: CacheLevel, slot: SlotId, num_tokens: int) -> None:
        super().__init__(life_cycle, level, slot)
        self.num_tokens = num_tokens


class PageTable:
    """Pages of one life cycle in block order (one entry for SSM), with slot ids kept ready for kernels.

    `indices` holds a slot id per block, BAD_PAGE_INDEX where there is no page or the page is not on the
    GPU. A user's int32 buffer, once attached, is kept equal to it and padded with BAD_PAGE_INDEX.
    `scratch_ordinals`: blocks without a page of their own that share `scratch_pages` in the current step.
    """

    __slots__ = ("_buffer", "indices", "pages", "scratch_ordinals", "scratch_pages")

    def __init__(self) -> None:
        self.pages: list[Page | None] = []
        self.indices = array("i")
        self.scratch_ordinals: list[int] = []
        self.scratch_pages: list[Page] = []
        self._buffer: memoryview | None = None

    def __len__(self) -> int:
        return len(self.pages)

    def owned(self) -> Iterator[Page]:
        """Yield the pages of all blocks and those that blocks share."""
        yield from self.scratch_pages
        for page in self.pages:
            if page is not None:
                yield page

    def scratch_desc(self) -> ScratchDesc | None:
        """Return the blocks that share slots, None without any."""
        if not self.scratch_ordinals:
            return None
        return ScratchDesc(tuple(self.scratch_ordinals), tuple(page.slot for page in self.scratch_pages))

    def append(self, page: Page | None) -> None:
        self.pages.append(None)
        self.indices.append(BAD_PAGE_INDEX)
        self.put(len(self.pages) - 1, page)

    def load(self, pages: list[Page | None]) -> None:
        """Start from `pages`, not yet located: `refresh` fills the indices in."""
        self.pages = pages
        self.indices = array("i", [BAD_PAGE_INDEX]) * len(pages)

    def put(self, ordinal: int, page: Page | None) -> None:
        self.pages[ordinal] = page
        index = BAD_PAGE_INDEX if page is None else page.slot
        self.indices[ordinal] = index
        if self._buffer is not None:
            self._buffer[ordinal] = index

    def pop(self) -> Page | None:
        if self._buffer is not None:
            self._buffer[len(self.pages) - 1] = BAD_PAGE_INDEX
        self.indices.pop()
        return self.pages.pop()

    def check_room(self, num_blocks: int) -> None:
        """Raise MisuseError if the attached buffer cannot hold `num_blocks` indices."""
        if self._buffer is not None and len(self._buffer) < num_blocks:
            raise MisuseError(
                f"the page index buffer has {len(self._buffer)} entries, {num_blocks} blocks are needed; "
                "attach a longer one with set_base_page_index_buf"
            )

    def attach(self, buffer: memoryview | None) -> None:
        """Keep `buffer` (int32, one entry per block or more) equal to `indices`; None detaches."""
        if buffer is None:
            self._buffer = None
            return
        if buffer.format != "i" or buffer.ndim != 1 or buffer.readonly:
            raise MisuseError(
                f"page index buffer has format {buffer.format!r}, {buffer.ndim} dimensions, readonly "
                f"{buffer.readonly}; give a writable one-dimensional int32 memoryview"
            )
        if len(buffer) < len(self.pages):
            raise MisuseError(f"page index buffer has {len(buffer)} entries for {len(self.pages)} blocks")
        self._buffer = buffer
        self.refresh()

    def refresh(self) -> None:
        """Rewrite all indices from the pages."""
        for ordinal, page in enumerate(self.pages):
            self.put(ordinal, page)
        if self._buffer is not None:
            for ordinal in range(len(self.pages), len(self._buffer)):
                self._buffer[ordinal] = BAD_PAGE_INDEX

    def invalidate(self) -> None:
        """Detach the buffer and forget the indices: the pages may move from now on."""
        self._buffer = None
        self.indices = array("i", [BAD_PAGE_INDEX]) * len(self.pages)
