# SPDX-License-Identifier: Apache-2.0
"""Which page goes first: by priority, lowest first, then least recently used."""

from collections.abc import Iterator
from itertools import islice

from ._types import Priority
from .errors import LogicError
from .page import Link, Page


class EvictionQueue:
    """Pages of one pool group at one level that may be evicted.

    Droppable pages (in the reuse tree, needed by no cache) may vanish; held pages (needed by suspended
    caches) may only move to a lower level. A page must leave the queue before its holders or priority
    change.
    """

    __slots__ = ("_lists", "num_droppable", "num_held")

    def __init__(self) -> None:
        self._lists: dict[Priority, Link] = {}
        self.num_droppable = 0
        self.num_held = 0

    def __len__(self) -> int:
        return self.num_droppable + self.num_held

    def push(self, page: Page) -> None:
        """Append `page` as the most recently used of its priority."""
        sentinel = self._lists.get(page.priority)
        if sentinel is None:
            sentinel = self._lists[page.priority] = Link()
            sentinel.prev = sentinel.next = sentinel
        last = sentinel.prev
        page.prev, page.next = last, sentinel
        sentinel.prev = page
        if last is not None:
            last.next = page
        if page.num_holders:
            self.num_held += 1
        else:
            self.num_droppable += 1

    def discard(self, page: Page) -> None:
        """Remove `page` if it is queued."""
        before, after = page.prev, page.next
        if before is None or after is None:
            return
        before.next, after.prev = after, before
        page.prev = page.next = None
        if page.num_holders:
            self.num_held -= 1
        else:
            self.num_droppable -= 1

    def __iter__(self) -> Iterator[Page]:
        """Yield pages in eviction order. The queue must not change meanwhile."""
        for priority in sorted(self._lists):
            sentinel = self._lists[priority]
            link = sentinel.next
            while isinstance(link, Page):
                yield link
                link = link.next

    def victims(self, count: int, max_held: int) -> list[Page]:
        """Return the first `count` pages in eviction order, at most `max_held` of them held."""
        if not self.num_held:
            return list(islice(self, count))
        chosen: list[Page] = []
        num_held = 0
        for page in self:
            if len(chosen) == count:
                break
            if page.num_holders:
                if num_held == max_held:
                    continue
                num_held += 1
            chosen.append(page)
        return chosen

    def check_integrity(self) -> None:
        """Raise LogicError unless the counts are those of the lists."""
        pages = list(self)
        num_held = sum(page.num_holders > 0 for page in pages)
        if (len(pages) - num_held, num_held) != (self.num_droppable, self.num_held):
            raise LogicError(
                f"queue of {len(pages)} pages, {num_held} held, counts {self.num_droppable} droppable and "
                f"{self.num_held} held"
            )
