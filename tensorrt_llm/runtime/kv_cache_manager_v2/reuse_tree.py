# SPDX-License-Identifier: Apache-2.0
"""The prefixes that can be reused: a tree of token blocks, each offering pages.

A block is the `tokens_per_block` tokens that follow its parent's, kept as a key of `tokens`; a leaf may
hold fewer. The tokens themselves are compared, so a hit rests on no hash. A block offers at most one page
per life cycle; for SSM that is a snapshot at an exact token count inside the block. A block without its
page of full attention would make everything below unreachable, so such a subtree leaves as one.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from typing import Optional, Protocol

from ._types import LifeCycleId
from .errors import LogicError
from .life_cycle import AttnLifeCycle, LifeCycleRegistry
from .page import Page, SnapshotPage
from .tokens import TokenPacker


class _Children:
    """Several children, or one with a snapshot inside its block.

    sorted_keys: the keys in byte order, where the longest common prefix is found at a neighbour of the
    place a key would be inserted at. snapshots: the leading tokens of a child up to a snapshot inside it.
    """

    __slots__ = ("by_key", "snapshots", "sorted_keys")

    def __init__(self, block: Optional["Block"]) -> None:
        self.by_key: dict[bytes, Block] = {}
        self.sorted_keys: list[bytes] = []
        self.snapshots: dict[bytes, Block] = {}
        if block is not None:
            self.add(block)

    def add(self, block: "Block") -> None:
        self.by_key[block.tokens] = block
        insort(self.sorted_keys, block.tokens)

    def remove(self, block: "Block") -> None:
        del self.by_key[block.tokens]
        del self.sorted_keys[bisect_left(self.sorted_keys, block.tokens)]


class Block:
    """A node. `children` is the only child itself in the common case, to keep a block small."""

    __slots__ = ("children", "first_page", "parent", "tokens")

    def __init__(self, parent: Optional["Block"], tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: Block | _Children | None = None
        self.first_page: Page | None = None

    def pages(self) -> Iterator[Page]:
        page = self.first_page
        while page is not None:
            following = page.next_of_block
            yield page
            page = following

    def page_of(self, life_cycle: LifeCycleId) -> Page | None:
        page = self.first_page
        while page is not None and page.life_cycle != life_cycle:
            page = page.next_of_block
        return page

    def child(self, tokens: bytes) -> Optional["Block"]:
        children = self.children
        if isinstance(children, Block):
            return children if children.tokens == tokens else None
        return None if children is None else children.by_key.get(tokens)

    def iter_children(self) -> Iterator["Block"]:
        children = self.children
        if isinstance(children, Block):
            yield children
        elif children is not None:
            yield from children.by_key.values()

    def nearest_child(self, tokens: bytes, packer: TokenPacker) -> Optional["Block"]:
        """Return a child with the longest common prefix with `tokens`."""
        children = self.children
        if children is None or isinstance(children, Block):
            return children
        at = bisect_left(children.sorted_keys, tokens)
        neighbours = children.sorted_keys[max(0, at - 1) : at + 1]
        best = max(neighbours, key=lambda key: packer.num_common(key, tokens), default=None)
        return None if best is None else children.by_key[best]

    def snapshot_child(self, tokens: bytes) -> Optional["Block"]:
        """Return the child with a snapshot after exactly these leading tokens, fewer than a block."""
        children = self.children
        return children.snapshots.get(tokens) if isinstance(children, _Children) else None

    def has_inner_snapshots(self) -> bool:
        """Return whether a child has a snapshot before its end."""
        return isinstance(self.children, _Children) and bool(self.children.snapshots)

    def _table(self) -> _Children:
        if not isinstance(self.children, _Children):
            self.children = _Children(self.children)
        return self.children

    def _add_child(self, block: "Block") -> None:
        if self.children is None:
            self.children = block
        else:
            self._table().add(block)

    def _remove_child(self, block: "Block") -> None:
        if self.children is block:
            self.children = None
        elif isinstance(self.children, _Children):
            self.children.remove(block)
            if not self.children.by_key:
                self.children = None


class RootBlock(Block):
    """The empty prefix of one reuse scope."""

    __slots__ = ("scope",)

    def __init__(self, scope: Hashable) -> None:
        super().__init__(None, b"")
        self.scope = scope


class TreeListener(Protocol):
    """Is told what can be reused and what no longer can."""

    def on_stored(self, page: Page, block: Block) -> None: ...

    def on_removed(self, page: Page, block: Block) -> None: ...

    def on_renaming(self, block: Block) -> None:
        """The block's tokens are about to grow; its pages are stored again afterwards."""


class SilentTreeListener:
    """Nobody asks."""

    def on_stored(self, page: Page, block: Block) -> None:
        return None

    def on_removed(self, page: Page, block: Block) -> None:
        return None

    def on_renaming(self, block: Block) -> None:
        return None


class ReuseTree:
    """All reusable blocks of a manager, one root per reuse scope."""

    def __init__(
        self,
        tokens_per_block: int,
        life_cycles: LifeCycleRegistry,
        packer: TokenPacker,
        listener: TreeListener,
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.packer = packer
        self._listener = listener
        self._roots: dict[Hashable, RootBlock] = {}
        self._pins: dict[Block, int] = {}
        self._unlimited = frozenset(
            index
            for index, value in life_cycles.items()
            if isinstance(value, AttnLifeCycle) and value.window_size is None
        )

    def find_root(self, scope: Hashable) -> RootBlock | None:
        return self._roots.get(scope)

    def pin_root(self, scope: Hashable) -> RootBlock:
        """Return the root of `scope`, created if need be, pinned."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = RootBlock(scope)
        self.pin(root)
        return root

    def pin(self, block: Block) -> None:
        """Keep `block` (and so its ancestors) in the tree even without pages and children."""
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: Block) -> None:
        count = self._pins[block] - 1
        if count:
            self._pins[block] = count
        else:
            del self._pins[block]
            self._prune(block)

    def is_attached(self, block: Block) -> bool:
        return block.parent is not None or isinstance(block, RootBlock)

    def walk(self, root: Block, keys: Sequence[bytes]) -> list[Block]:
        """Return the chain of full blocks below `root` that match the leading `keys`."""
        path: list[Block] = []
        block = root
        for key in keys:
            child = block.child(key)
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def num_common(self, block: Block | None, key: bytes) -> int:
        """Return how many leading tokens of `key` are those of `block`; 0 for no block."""
        return 0 if block is None else self.packer.num_common(block.tokens, key)

    def add(self, parent: Block, tokens: bytes) -> Block:
        """Add a child of `parent`, which must be attached and have no child of these tokens."""
        if not self.is_attached(parent) or parent.child(tokens) is not None:
            raise LogicError("a block is added to a detached parent or beside an equal child")
        block = Block(parent, tokens)
        parent._add_child(block)
        return block

    def extend(self, block: Block, tokens: bytes) -> None:
        """Append tokens to a leaf whose page now covers them; `tokens` are all of the block's."""
        parent = block.parent
        num_tokens = self.packer.num_tokens(block.tokens)
        is_longer = self.num_common(block, tokens) == num_tokens < self.packer.num_tokens(tokens)
        if parent is None or block.children is not None or not is_longer:
            raise LogicError("only an attached leaf can be extended, by tokens behind its own")
        self._listener.on_renaming(block)
        snapshots = parent.children.snapshots if isinstance(parent.children, _Children) else {}
        parent._remove_child(block)
        block.tokens = tokens
        parent._add_child(block)
        if snapshots:
            parent._table().snapshots = snapshots
        for page in block.pages():
            self._listener.on_stored(page, block)

    def link(self, page: Page, block: Block) -> None:
        """Offer `page` for reuse in `block`."""
        if page.block is not None or block.page_of(page.life_cycle) is not None:
            raise LogicError(f"slot {page.slot} of life cycle {page.life_cycle} is offered twice")
        page.block = block
        page.next_of_block = block.first_page
        block.first_page = page
        prefix = self._snapshot_prefix(page, block)
        if prefix is not None and block.parent is not None:
            block.parent._table().snapshots[prefix] = block
        self._listener.on_stored(page, block)

    def unlink(self, page: Page) -> list[Page]:
        """Take `page` out of the tree, and with a page of full attention everything below its block.

        Returns the pages that nobody needs any more, `page` among them if no cache holds it.
        """
        block = page.block
        if block is None:
            raise LogicError(f"slot {page.slot} of life cycle {page.life_cycle} is in no block")
        removed = [page]
        self._remove_page(page, block)
        if page.life_cycle in self._unlimited:
            removed += self._detach_subtree(block)
        else:
            self._prune(block)
        return [one for one in removed if not one.num_holders]

    def blocks(self) -> Iterator[Block]:
        """Yield every block, roots included, parents first."""
        stack: list[Block] = list(self._roots.values())
        while stack:
            block = stack.pop()
            yield block
            stack.extend(block.iter_children())

    def _snapshot_prefix(self, page: Page, block: Block) -> bytes | None:
        """Return the block's leading tokens up to a snapshot inside it, None for any other page."""
        if not isinstance(page, SnapshotPage):
            return None
        offset = page.num_tokens % self.tokens_per_block
        return self.packer.head(block.tokens, offset) if offset else None

    def _remove_page(self, page: Page, block: Block) -> None:
        if block.first_page is page:
            block.first_page = page.next_of_block
        else:
            before = next(one for one in block.pages() if one.next_of_block is page)
            before.next_of_block = page.next_of_block
        page.block = None
        page.next_of_block = None
        prefix = self._snapshot_prefix(page, block)
        if prefix is not None and block.parent is not None:
            snapshots = block.parent._table().snapshots
            if snapshots.get(prefix) is block:
                del snapshots[prefix]
        self._listener.on_removed(page, block)

    def _detach_subtree(self, top: Block) -> list[Page]:
        removed: list[Page] = []
        stack = [top]
        parent = top.parent
        while stack:
            block = stack.pop()
            for page in list(block.pages()):
                self._remove_page(page, block)
                removed.append(page)
            stack.extend(block.iter_children())
        stack = [top]
        while stack:
            block = stack.pop()
            stack.extend(block.iter_children())
            block.children = None
            if block.parent is not None and block is not top:
                block.parent = None
        if parent is not None:
            parent._remove_child(top)
            top.parent = None
            self._prune(parent)
        return removed

    def _prune(self, block: Block) -> None:
        """Remove `block` and its ancestors as long as they are empty and not pinned."""
        while block.first_page is None and block.children is None and block not in self._pins:
            if isinstance(block, RootBlock):
                self._roots.pop(block.scope, None)
                return
            parent = block.parent
            if parent is None:
                return
            parent._remove_child(block)
            block.parent = None
            block = parent

    def check_integrity(self) -> None:
        """Raise LogicError unless links, pages and pins agree."""
        for block in self.blocks():
            for child in block.iter_children():
                if child.parent is not block:
                    raise LogicError("a child does not know its parent")
            for page in block.pages():
                if page.block is not block:
                    raise LogicError(f"slot {page.slot} does not know its block")
            is_empty = block.first_page is None and block.children is None
            if is_empty and block not in self._pins:
                raise LogicError("an empty block that nobody pins is in the tree")
            missing = [index for index in self._unlimited if block.page_of(index) is None]
            if missing and not isinstance(block, RootBlock):
                raise LogicError(f"a block offers no page of full attention life cycles {missing}")
            if isinstance(block.children, _Children):
                self._check_children(block.children)
        for block in self._pins:
            if not self.is_attached(block):
                raise LogicError("a pinned block is not in the tree")

    def _check_children(self, children: _Children) -> None:
        if sorted(children.by_key) != children.sorted_keys:
            raise LogicError("sorted keys differ from the children")
        for prefix, owner in children.snapshots.items():
            counts = [page.num_tokens for page in owner.pages() if isinstance(page, SnapshotPage)]
            inside = [self.packer.head(owner.tokens, count % self.tokens_per_block) for count in counts]
            if children.by_key.get(owner.tokens) is not owner or prefix not in inside:
                raise LogicError("a snapshot index entry has no snapshot")
