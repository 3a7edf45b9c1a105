# SPDX-License-Identifier: Apache-2.0
"""Counts of a cache's pages, for logs and metrics."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheStats:
    """Attention pages on the GPU, and what was asked of them since the start."""

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    reused_blocks: int
    missed_blocks: int

    @property
    def cache_hit_rate(self) -> float:
        """Reused blocks of all looked up: summed, then divided."""
        looked_up = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / looked_up if looked_up else 0.0
