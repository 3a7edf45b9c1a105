# SPDX-License-Identifier: Apache-2.0
"""Dropping what a request has offered for reuse, later: for policies such as "keep the last N turns"."""

from collections.abc import Sequence

from .page import Page
from .storage import Storage


class CommittedBlockDropPlan:
    """The pages one request has offered. Valid after the request is closed."""

    __slots__ = ("_pages", "_storage")

    def __init__(self, storage: Storage, pages: Sequence[Page]) -> None:
        self._storage = storage
        self._pages = tuple(pages)

    @property
    def num_droppable(self) -> int:
        """Pages that are still offered and that no cache needs."""
        return sum(self._is_droppable(page) for page in self._pages)

    def drop(self) -> int:
        """Drop them, deepest first, with whatever becomes useless. Returns how many of them went."""
        num_before = self.num_droppable
        for page in reversed(self._pages):
            if self._is_droppable(page):
                self._storage.withdraw(page)
        return num_before - self.num_droppable

    @staticmethod
    def _is_droppable(page: Page) -> bool:
        return page.block is not None and page.num_holders == 0
