# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt can be reused: the longest prefix that EVERY life cycle can serve. Changes nothing.

Full attention needs every block from the start, a window needs its sinks and the blocks it sees, a
recurrent state needs a snapshot at exactly the length that is reused.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from ._math import cdiv
from ._types import LifeCycleId
from .life_cycle import AttnLifeCycle, LifeCycleRegistry
from .page import SnapshotPage
from .reuse_tree import Block, ReuseTree
from .tokens import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What can be reused. `blocks` are full; `partial` offers the tokens behind them, if there are any.

    num_path_tokens: tokens found in the tree before any pruning. num_attention_tokens: before pruning to a
        snapshot.
    """

    num_tokens: int = 0
    blocks: Sequence[Block] = ()
    partial: Block | None = None
    snapshot: SnapshotPage | None = None
    num_path_tokens: int = 0
    num_attention_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Path:
    """Full blocks that match the prompt, the block that matches best behind them, and by how many tokens."""

    root: Block
    blocks: list[Block]
    partial: Block | None = None
    num_partial_tokens: int = 0
    tokens_per_block: int = field(kw_only=True)

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * self.tokens_per_block + self.num_partial_tokens

    def block_at(self, ordinal: int) -> Block | None:
        return self.blocks[ordinal] if ordinal < len(self.blocks) else self.partial


class PrefixMatcher:
    """Looks prefixes up in a tree. `backoff_tokens` are given up at the end of every match."""

    __slots__ = ("_allows_partial", "_backoff_tokens", "_ssm_id", "_tree", "_windowed")

    def __init__(
        self, tree: ReuseTree, life_cycles: LifeCycleRegistry, *, allows_partial: bool, backoff_tokens: int
    ) -> None:
        self._tree = tree
        self._allows_partial = allows_partial
        self._backoff_tokens = backoff_tokens
        self._ssm_id = life_cycles.ssm_id
        self._windowed = life_cycles.windowed

    def match(self, scope: Hashable, ids: TokenIds, max_tokens: int) -> PrefixMatch:
        """Return the longest reusable prefix of at most `max_tokens` tokens of a prompt."""
        root = self._tree.find_root(scope)
        if root is None or max_tokens <= 0:
            return PrefixMatch()
        ids = ids[:max_tokens]
        path = self._find_path(root, ids)
        num_tokens = max(0, path.num_tokens - self._backoff_tokens)
        if not self._allows_partial:
            num_tokens -= num_tokens % self._tree.tokens_per_block
        if self._ssm_id is not None:
            return self._match_snapshot(path, ids, num_tokens, self._ssm_id)
        num_tokens = self._largest_servable(path, num_tokens)
        return self._result(path, num_tokens, path.partial, None, num_tokens)

    def _find_path(self, root: Block, ids: TokenIds) -> _Path:
        size = self._tree.tokens_per_block
        blocks = self._tree.walk(root, self._tree.packer.block_keys(ids, size))
        if not self._allows_partial:
            return _Path(root, blocks, tokens_per_block=size)
        rest = self._tree.packer.key(ids[len(blocks) * size :][:size])
        partial = (blocks[-1] if blocks else root).nearest_child(rest, self._tree.packer)
        num_partial = self._tree.num_common(partial, rest)
        if not num_partial:
            return _Path(root, blocks, tokens_per_block=size)
        return _Path(root, blocks, partial, num_partial, tokens_per_block=size)

    def _match_snapshot(
        self, path: _Path, ids: TokenIds, max_tokens: int, ssm_id: LifeCycleId
    ) -> PrefixMatch:
        """Return the deepest snapshot up to `max_tokens` that the attention life cycles can serve as well."""
        num_attention_tokens = self._largest_servable(path, max_tokens)
        for block, snapshot in self._snapshots(path, ids[:max_tokens], ssm_id):
            count = snapshot.num_tokens
            is_inside = count % self._tree.tokens_per_block != 0
            here = _Path(
                path.root, path.blocks, block if is_inside else None, tokens_per_block=path.tokens_per_block
            )
            if self._missing_window_bound(here, count) is None:
                return self._result(path, count, here.partial, snapshot, num_attention_tokens)
        return self._result(path, 0, None, None, num_attention_tokens)

    def _snapshots(
        self, path: _Path, ids: TokenIds, ssm_id: LifeCycleId
    ) -> Iterator[tuple[Block, SnapshotPage]]:
        """Yield the snapshots on the path with at most the tokens of `ids`, deepest first."""
        size, packer = self._tree.tokens_per_block, self._tree.packer
        num_tokens = len(ids)
        for ordinal in range(min(len(path.blocks), num_tokens // size), -1, -1):
            parent = path.blocks[ordinal - 1] if ordinal else path.root
            may_be_inside = self._allows_partial and parent.has_inner_snapshots()
            rest = packer.key(ids[ordinal * size :][: size - 1]) if may_be_inside else b""
            for offset in range(packer.num_tokens(rest), 0, -1):
                inside = parent.snapshot_child(packer.head(rest, offset))
                page = None if inside is None else inside.page_of(ssm_id)
                if inside is not None and isinstance(page, SnapshotPage):
                    yield inside, page
            page = parent.page_of(ssm_id)
            if isinstance(page, SnapshotPage) and page.num_tokens == ordinal * size:
                yield parent, page

    def _largest_servable(self, path: _Path, num_tokens: int) -> int:
        """Return the most tokens, `num_tokens` or fewer, that every windowed life cycle can serve.

        Full attention needs no look: a block is in the tree only while it offers those pages.
        """
        while num_tokens > 0:
            bound = self._missing_window_bound(path, num_tokens)
            if bound is None:
                return num_tokens
            num_tokens = bound
        return 0

    def _missing_window_bound(self, path: _Path, num_tokens: int) -> int | None:
        """Return None if windows serve `num_tokens`, else a lower bound that every servable length keeps."""
        for life_cycle, value in self._windowed:
            missing = self._last_missing_block(path, num_tokens, life_cycle, value)
            if missing is not None:
                return missing * self._tree.tokens_per_block
        return None

    def _last_missing_block(
        self, path: _Path, num_tokens: int, life_cycle: LifeCycleId, value: AttnLifeCycle
    ) -> int | None:
        size = self._tree.tokens_per_block
        stale = value.stale_range(num_tokens, size)
        num_blocks = cdiv(num_tokens, size)
        sinks, window = range(min(stale.start, num_blocks)), range(stale.stop, num_blocks)
        for ordinal in [*reversed(window), *reversed(sinks)]:
            block = path.block_at(ordinal)
            if block is None or block.page_of(life_cycle) is None:
                return ordinal
        return None

    def _result(
        self,
        path: _Path,
        num_tokens: int,
        partial: Block | None,
        snapshot: SnapshotPage | None,
        num_attention_tokens: int,
    ) -> PrefixMatch:
        num_blocks, rest = divmod(num_tokens, self._tree.tokens_per_block)
        source = path.blocks[num_blocks] if rest and num_blocks < len(path.blocks) else partial
        return PrefixMatch(
            num_tokens=num_tokens,
            blocks=path.blocks[:num_blocks],
            partial=source if rest else None,
            snapshot=snapshot,
            num_path_tokens=path.num_tokens,
            num_attention_tokens=num_attention_tokens,
        )
