# SPDX-License-Identifier: Apache-2.0
"""Which drafts of a verify round are kept."""

from collections import deque
from collections.abc import Sequence
from math import floor


def count_accepted(drafts: Sequence[int], targets: Sequence[int]) -> int:
    """Length of the longest prefix of the drafts that equals the target's own tokens.

    `targets[j]` follows the golden token and drafts 0..j-1. For the target's greedy token this is greedy
    decoding; for a sampled one every emitted token is still a sample of the target.
    """
    accepted = 0
    for draft, target in zip(drafts, targets, strict=False):
        if draft != target:
            break
        accepted += 1
    return accepted


class ForcedAcceptance:
    """Acceptance whatever the model says, for measurements: `mean` drafts a round, as far as there are
    drafts.

    A mean of 2.6 is always 2 and a third in 60 rounds of 100, spread evenly (the n-th round of a request gets
    floor((n+1) mean) - floor(n mean)), so that every rank and every run forces the same.
    """

    def __init__(self, mean: float) -> None:
        self._mean = mean

    def count(self, round_index: int, num_drafts: int) -> int:
        """Drafts to keep in a request's round."""
        wanted = floor((round_index + 1) * self._mean) - floor(round_index * self._mean)
        return min(wanted, num_drafts)


class AcceptanceGate:
    """Ends speculation for good when too few drafts are accepted.

    Over the last `window_size` rounds with drafts, once there are that many, accepted / drafted below
    `threshold` closes the gate. Window 0 or threshold 0: it stays open.
    """

    def __init__(self, window_size: int, threshold: float) -> None:
        self._threshold = threshold if window_size > 0 else 0.0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=max(window_size, 1))
        self.is_open = True

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Note one request's round."""
        if self._threshold <= 0 or num_drafts == 0 or not self.is_open:
            return
        self._rounds.append((num_drafts, num_accepted))
        if len(self._rounds) == self._rounds.maxlen:
            drafted = sum(drafts for drafts, _ in self._rounds)
            accepted = sum(kept for _, kept in self._rounds)
            self.is_open = accepted >= self._threshold * drafted
