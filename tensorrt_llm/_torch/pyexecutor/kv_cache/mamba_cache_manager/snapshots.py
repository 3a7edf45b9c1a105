# SPDX-License-Identifier: Apache-2.0
"""At which token counts a prompt leaves a reusable snapshot of its recurrent state. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """Snapshot points of a prompt: every multiple of `interval_tokens` (0: none), and offsets from its ends.

    Points are rounded down to multiples of `alignment_tokens`, where a prefill chunk can end and start.
    """

    interval_tokens: int = 0
    from_start_tokens: tuple[int, ...] = ()
    from_end_tokens: tuple[int, ...] = ()
    alignment_tokens: int = 1

    @classmethod
    def of(cls, config: KvCacheConfigLike, alignment_tokens: int) -> "SnapshotRules":
        """The rules in force: none without block reuse; a policy per conversation has no periodic ones.

        Raises ValueError for branch snapshots, and for an interval that no chunk can end at.
        """
        state = config.mamba_state_config
        if state.enable_branch_snapshot:
            raise ValueError("mamba_state_config.enable_branch_snapshot is not supported: set it to False")
        if not config.enable_block_reuse:
            return cls()
        interval = state.periodic_snapshot_interval
        if interval % alignment_tokens:
            raise ValueError(
                f"mamba_state_config.periodic_snapshot_interval is {interval}; it must be a multiple of "
                f"tokens_per_block, {alignment_tokens}"
            )
        return cls(
            interval_tokens=0 if config.block_reuse_config.policy == "per_conversation" else interval,
            from_start_tokens=tuple(state.additional_snapshot_offsets_from_start),
            from_end_tokens=tuple(state.additional_snapshot_offsets_from_end),
            alignment_tokens=alignment_tokens,
        )

    @property
    def exists(self) -> bool:
        return bool(self.interval_tokens or self.from_start_tokens or self.from_end_tokens)

    def num_fixed(self, max_seq_len: int) -> int:
        """Snapshots per request that do not grow with its length, as far as max_seq_len tokens reach them."""
        starts = {self._aligned(offset) for offset in self.from_start_tokens if offset <= max_seq_len}
        ends = {offset for offset in self.from_end_tokens if offset < max_seq_len}
        return len(starts - {0}) + len(ends)

    def points(self, prompt_len: int) -> list[int]:
        """Token counts in (0, prompt_len] at which this prompt is to be snapshotted, ascending."""
        wanted = [offset for offset in self.from_start_tokens if offset <= prompt_len]
        wanted += [prompt_len - offset for offset in self.from_end_tokens if offset < prompt_len]
        points = {self._aligned(point) for point in wanted}
        if self.interval_tokens:
            points.update(range(self.interval_tokens, prompt_len + 1, self.interval_tokens))
        return sorted(points - {0})

    def _aligned(self, tokens: int) -> int:
        return tokens - tokens % self.alignment_tokens


def next_chunk_end(position: int, chunk_end: int, points: Iterable[int]) -> int:
    """Where a prefill chunk from `position` must stop so that the next snapshot point is hit exactly."""
    return min((point for point in points if position < point < chunk_end), default=chunk_end)
