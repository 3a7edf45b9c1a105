# SPDX-License-Identifier: Apache-2.0
"""At which token counts a prompt leaves a reusable snapshot of its recurrent state. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from tensorrt_llm._torch.pyexecutor.kv_cache.config import KvCacheConfigLike


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """Snapshot points of a prompt: every multiple of `interval_tokens` (0: none), and fixed offsets from its
    start and end.

    An offset from the end counts backwards from the last token that a later prompt could reuse.
    """

    interval_tokens: int = 0
    from_start_tokens: tuple[int, ...] = ()
    from_end_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: KvCacheConfigLike) -> "SnapshotRules":
        """The rules in force: none without block reuse; a policy per conversation has no periodic ones."""
        if not config.enable_block_reuse:
            return cls()
        state = config.mamba_state_config
        periodic = config.block_reuse_config.policy != "per_conversation"
        return cls(
            interval_tokens=state.periodic_snapshot_interval if periodic else 0,
            from_start_tokens=tuple(state.additional_snapshot_offsets_from_start),
            from_end_tokens=tuple(state.additional_snapshot_offsets_from_end),
        )

    @property
    def exists(self) -> bool:
        return bool(self.interval_tokens or self.from_start_tokens or self.from_end_tokens)

    def num_fixed(self, max_seq_len: int) -> int:
        """Snapshots per request that do not grow with its length, without those no prompt of max_seq_len
        tokens reaches.
        """
        return len(set(self._reachable(self.from_start_tokens, max_seq_len))) + len(
            set(self._reachable(self.from_end_tokens, max_seq_len))
        )

    def points(self, prompt_len: int) -> list[int]:
        """Token counts in (0, prompt_len] at which this prompt is to be snapshotted, ascending."""
        points = set(self._reachable(self.from_start_tokens, prompt_len))
        points.update(prompt_len - offset for offset in self._reachable(self.from_end_tokens, prompt_len - 1))
        if self.from_end_tokens and 0 in self.from_end_tokens:
            points.add(prompt_len)
        if self.interval_tokens:
            points.update(range(self.interval_tokens, prompt_len + 1, self.interval_tokens))
        return sorted(points)

    @staticmethod
    def _reachable(offsets: Iterable[int], limit: int) -> list[int]:
        return [offset for offset in offsets if 0 < offset <= limit]


def next_chunk_end(position: int, chunk_end: int, points: Iterable[int]) -> int:
    """Where a prefill chunk from `position` must stop so that the next snapshot point is hit exactly."""
    return min((point for point in points if position < point < chunk_end), default=chunk_end)
