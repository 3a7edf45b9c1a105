# SPDX-License-Identifier: Apache-2.0
"""When the shares of the pool groups no longer fit what requests use, and which shares would."""

from collections.abc import Callable, Sequence

from .config import KVCacheManagerConfig


class RatioTracker:
    """Moving averages of the bytes that closing requests used per pool group.

    `clock` returns seconds; it only has to grow.
    """

    def __init__(
        self, config: KVCacheManagerConfig, slot_bytes: Sequence[int], clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._slot_bytes = tuple(slot_bytes)
        self._clock = clock
        self._averages = [0.0] * len(slot_bytes)
        self._last_adjustment = clock()
        self._target: tuple[float, ...] | None = None
        self.num_samples = 0

    @property
    def target_ratio(self) -> tuple[float, ...] | None:
        """Shares of bytes per pool group, summing to 1; None before the first update."""
        return self._target

    def add_sample(self, num_slots: Sequence[int]) -> None:
        """Take in the slots per pool group of a request that closes."""
        if not any(num_slots):
            return
        # A plain mean of the first samples, until the configured decay is slower than it.
        decay = min(self._config.rebalance_moving_average_decay, self.num_samples / (self.num_samples + 1))
        self._averages = [
            decay * average + (1 - decay) * slots * size
            for average, slots, size in zip(self._averages, num_slots, self._slot_bytes, strict=True)
        ]
        self.num_samples += 1
        if self.num_samples % self._config.rebalance_target_ratio_update_interval == 0:
            self.update_target()

    def update_target(self) -> None:
        total = sum(self._averages)
        if total > 0:
            self._target = tuple(average / total for average in self._averages)

    def needs_adjustment(self, current: Sequence[float]) -> bool:
        """Return whether a share is off by more than the threshold, after enough samples and time."""
        config = self._config
        if self._target is None or self.num_samples < config.rebalance_min_sampled_kv_caches:
            return False
        if self._clock() - self._last_adjustment < config.rebalance_cooldown_secs:
            return False
        return any(
            max(share, target) > config.rebalance_ratio_threshold * min(share, target)
            for share, target in zip(current, self._target, strict=True)
        )

    def on_adjusted(self) -> None:
        self._last_adjustment = self._clock()
