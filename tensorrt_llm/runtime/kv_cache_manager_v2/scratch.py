# SPDX-License-Identifier: Apache-2.0
"""Sharing of slots between blocks that a step makes stale before it ends (`swa_scratch_reuse`). Pure.

A step computes the tokens from history to capacity, layer by layer. In a windowed group, blocks that no
query after the step can see are needed by a layer only while that layer runs. So they get no slot each: one
after the other, the layers use the whole of a few scratch slots, every layer for its own buffers::

    slot of a group of 3 layers     | layer 0 | layer 1 | layer 2 |
    as scratch, while layer 1 runs  | block 5 | block 6 | block 7 |   (of layer 1)

n such blocks take ceil(n * f) slots, f being the largest share that one layer has of a slot in any pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ._math import HalfOpenRange, cdiv
from ._types import LayerId, LifeCycleId, SlotId
from .config import SwaScratchReuseConfig
from .life_cycle import AttnLifeCycle, LifeCycle

NOTHING = HalfOpenRange(0, 0)


@dataclass(frozen=True, slots=True)
class ScratchDesc:
    """Blocks of one request that share slots: `ordinals` ascending, `slots` in the order they fill."""

    ordinals: tuple[int, ...]
    slots: tuple[SlotId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """What one layer has of a slot in one pool: at most `num_own` of its `num_buffers` buffers."""

    num_own: int
    num_buffers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchPlan:
    """Which blocks share slots, and how many slots they take.

    max_rewind_len: tokens at the end of a step that may be taken back after it, such as rejected drafts.
    shares: per life cycle, the largest share of a layer in each pool.
    """

    max_rewind_len: int
    shares: tuple[tuple[LayerShare, ...], ...]

    def blocks(
        self,
        life_cycle: LifeCycleId,
        value: LifeCycle,
        capacity: int,
        history_length: int,
        tokens_per_block: int,
    ) -> HalfOpenRange:
        """Return the blocks that share slots in the step from `history_length` to `capacity`.

        None of them holds a token from before the step, and no query behind the step sees one, however
        much of `max_rewind_len` is taken back. A group of one layer has nothing to share.
        """
        is_windowed = isinstance(value, AttnLifeCycle) and value.window_size is not None
        if not is_windowed or any(share.num_own >= share.num_buffers for share in self.shares[life_cycle]):
            return NOTHING
        assert isinstance(value, AttnLifeCycle)
        kept_length = max(history_length, capacity - self.max_rewind_len)
        stale_after = value.stale_range(kept_length, tokens_per_block)
        stale_before = value.stale_range(history_length, tokens_per_block)
        start = max(stale_before.stop, cdiv(history_length, tokens_per_block))
        return HalfOpenRange(start, max(start, min(stale_after.stop, cdiv(capacity, tokens_per_block))))

    def num_slots(self, life_cycle: LifeCycleId, num_blocks: int) -> int:
        """Return ceil(num_blocks * f)."""
        return max(cdiv(num_blocks * share.num_own, share.num_buffers) for share in self.shares[life_cycle])


def make_scratch_plan(
    reuse: SwaScratchReuseConfig | None, shares: tuple[tuple[LayerShare, ...], ...]
) -> ScratchPlan | None:
    """Return the plan of a configuration, None where nothing is to be shared."""
    return None if reuse is None else ScratchPlan(max_rewind_len=reuse.max_rewind_len, shares=shares)


def largest_shares(pools: Sequence[Sequence[LayerId]]) -> tuple[LayerShare, ...]:
    """Return the share of the largest layer per pool; `pools[pool]` names the layer of each buffer."""
    return tuple(
        LayerShare(num_own=max(members.count(layer) for layer in set(members)), num_buffers=len(members))
        for members in pools
    )
