# SPDX-License-Identifier: Apache-2.0
"""Counters of what the cache did. They only grow; an iteration's figures are differences of two readings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from ._math import cdiv
from ._types import CacheLevel, LifeCycleId
from .life_cycle import LifeCycleRegistry
from .matching import PrefixMatch
from .page import Page


@dataclass(slots=True, kw_only=True)
class LifeCycleStats:
    """Counters of one life cycle. Blocks are pages; bytes cover all pools of a slot."""

    alloc_blocks: int = 0
    full_reused_blocks: int = 0
    partial_reused_blocks: int = 0
    missed_blocks: int = 0
    onboard_bytes: int = 0
    offload_bytes: int = 0
    intra_device_copy_bytes: int = 0
    dropped_blocks: int = 0
    host_dropped_blocks: int = 0

    @property
    def reused_blocks(self) -> int:
        return self.full_reused_blocks + self.partial_reused_blocks

    def minus(self, earlier: "LifeCycleStats") -> "LifeCycleStats":
        names = [one.name for one in fields(self)]
        return LifeCycleStats(**{name: getattr(self, name) - getattr(earlier, name) for name in names})

    def plus(self, other: "LifeCycleStats") -> "LifeCycleStats":
        names = [one.name for one in fields(self)]
        return LifeCycleStats(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheIterationStats:
    """What happened since the last reading.

    by_life_cycle: one entry per life cycle. cached_tokens_by_level: reused tokens by the level they lay at.
    snapshot_lookups / snapshot_hits: prompts that could have reused a recurrent state, and those that did.
    peak_blocks: most GPU slots in use at once, per pool group. num_suspended / num_resumed: calls that
        succeeded.
    """

    by_life_cycle: tuple[LifeCycleStats, ...]
    cached_tokens_by_level: tuple[int, ...]
    snapshot_lookups: int
    snapshot_hits: int
    peak_blocks: tuple[int, ...]
    num_suspended: int
    num_resumed: int


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Blocks of one request over all attention life cycles: pages taken, and what the reuse look-up gave."""

    alloc_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0

    def add_lookup(self, lookup: "LookupStats") -> None:
        for counts in lookup.by_life_cycle.values():
            self.reused_blocks += counts.reused_blocks
            self.missed_blocks += counts.missed_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the looked-up blocks that were reused; 0 if none was looked up."""
        looked_up = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / looked_up if looked_up else 0.0


@dataclass(slots=True, kw_only=True)
class LookupStats:
    """Result of one reuse look-up, kept by the cache until its admission is certain."""

    by_life_cycle: dict[LifeCycleId, LifeCycleStats] = field(default_factory=dict)
    cached_tokens_by_level: dict[CacheLevel, int] = field(default_factory=dict)
    snapshot_lookups: int = 0
    snapshot_hits: int = 0


def describe_lookup(
    match: PrefixMatch, num_prompt_tokens: int, life_cycles: LifeCycleRegistry, tokens_per_block: int
) -> LookupStats:
    """Return what `match` gives a prompt of `num_prompt_tokens` tokens."""
    lookup = LookupStats()
    num_blocks, num_partial = cdiv(num_prompt_tokens, tokens_per_block), int(match.partial is not None)
    for life_cycle, value in life_cycles.attention:
        stale = value.stale_range(match.num_tokens, tokens_per_block)
        lookup.by_life_cycle[life_cycle] = LifeCycleStats(
            full_reused_blocks=len(match.blocks) - min(stale.length, len(match.blocks)),
            partial_reused_blocks=num_partial,
            missed_blocks=num_blocks - len(match.blocks) - num_partial,
        )
    if life_cycles.attention:
        first = life_cycles.attention[0][0]
        levels = Counter(page.level for block in match.blocks if (page := block.page_of(first)))
        lookup.cached_tokens_by_level = {level: n * tokens_per_block for level, n in levels.items()}
    if life_cycles.ssm_id is not None:
        lookup.snapshot_lookups = 1
        lookup.snapshot_hits = int(match.snapshot is not None)
    return lookup


class StatsCollector:
    """Counts for one manager; the storage's listener. `slot_bytes[level][life_cycle]`."""

    def __init__(self, slot_bytes: Sequence[Sequence[int]]) -> None:
        num_levels, num_life_cycles = len(slot_bytes), len(slot_bytes[0])
        self._counts = [LifeCycleStats() for _ in range(num_life_cycles)]
        self._read = [LifeCycleStats() for _ in range(num_life_cycles)]
        self._slot_bytes = slot_bytes
        self._cached_tokens = [0] * num_levels
        self._snapshot_lookups = 0
        self._snapshot_hits = 0
        self.num_suspended = 0
        self.num_resumed = 0

    def on_allocated(self, life_cycle: LifeCycleId, num_pages: int) -> None:
        self._counts[life_cycle].alloc_blocks += num_pages

    def on_moved(self, page: Page, source: CacheLevel) -> None:
        counts = self._counts[page.life_cycle]
        # What goes between levels has the form of the colder one.
        num_bytes = self._slot_bytes[max(page.level, source)][page.life_cycle]
        if page.level < source:
            counts.onboard_bytes += num_bytes
        elif page.level > source:
            counts.offload_bytes += num_bytes
        else:
            counts.intra_device_copy_bytes += num_bytes

    def on_copied(self, destination: Page) -> None:
        num_bytes = self._slot_bytes[destination.level][destination.life_cycle]
        self._counts[destination.life_cycle].intra_device_copy_bytes += num_bytes

    def on_dropped(self, page: Page) -> None:
        counts = self._counts[page.life_cycle]
        counts.dropped_blocks += 1
        counts.host_dropped_blocks += page.level > 0

    def add_lookup(self, lookup: LookupStats) -> None:
        for life_cycle, counts in lookup.by_life_cycle.items():
            self._counts[life_cycle] = self._counts[life_cycle].plus(counts)
        for level, num_tokens in lookup.cached_tokens_by_level.items():
            self._cached_tokens[level] += num_tokens
        self._snapshot_lookups += lookup.snapshot_lookups
        self._snapshot_hits += lookup.snapshot_hits

    def totals(self) -> tuple[LifeCycleStats, ...]:
        """Return the counts since the start, per life cycle."""
        return tuple(replace(counts) for counts in self._counts)

    def drain(self, peak_blocks: tuple[int, ...]) -> KVCacheIterationStats:
        """Return what happened since the last call."""
        deltas = tuple(now.minus(then) for now, then in zip(self._counts, self._read, strict=True))
        self._read = list(self.totals())
        result = KVCacheIterationStats(
            by_life_cycle=deltas,
            cached_tokens_by_level=tuple(self._cached_tokens),
            snapshot_lookups=self._snapshot_lookups,
            snapshot_hits=self._snapshot_hits,
            peak_blocks=peak_blocks,
            num_suspended=self.num_suspended,
            num_resumed=self.num_resumed,
        )
        self._cached_tokens = [0] * len(self._cached_tokens)
        self._snapshot_lookups = self._snapshot_hits = 0
        self.num_suspended = self.num_resumed = 0
        return result
