# SPDX-License-Identifier: Apache-2.0
"""How many drafts a round is worth: none where they would cost more than they bring.

A round of R rows costs (1 - c) + c R, in units of a round of one row; c is `round_cost_per_token`. A request
that adds k drafts to a round of B requests adds k rows and, on average, E_k = a_0 + a_0 a_1 + ... (k terms)
accepted tokens, where a_j is the chance that draft j is right after the j before it were. The guard takes the
k that makes tokens per cost, (B + E_k) / ((1 - c) + c (B + k)), largest.

a_j comes from this request's own history: how often the text went on as the drafter's match did, by the
length of the match (m tokens matched before the first draft, m + j before draft j). Every proposal is
scored against the tokens that came, drafted or not, so that a guard that has stopped drafting still learns,
for free. Old outcomes fade. Nothing is timed: the same text gives the same drafts.
"""

from bisect import bisect_right
from collections.abc import Sequence

MATCH_LENGTH_BOUNDS = (2, 3, 5, 9, 17)
"""Match lengths are told apart as 1, 2, 3-4, 5-8, 9-16 and 17 or more."""

PRIOR_CONTINUATION = (0.35, 0.5, 0.65, 0.8, 0.9, 0.96)
"""Chance that the text goes on as the match did, per class of match length, before any outcome was seen."""

PRIOR_WEIGHT = 6.0
"""Outcomes that a prior counts for."""

OUTCOME_DECAY = 0.96
"""What an outcome still counts for after the next one of its class: about the last 25 matter."""

ROUND_COST_PER_TOKEN = {"cpu": 0.35, "cuda": 0.02}
"""c by device type."""


class DraftGuard:
    """Chooses draft lengths for one request."""

    def __init__(self, round_cost_per_token: float) -> None:
        self._cost = round_cost_per_token
        self._hits = [PRIOR_WEIGHT * prior for prior in PRIOR_CONTINUATION]
        self._tries = [PRIOR_WEIGHT] * len(PRIOR_CONTINUATION)

    def continuation_chance(self, match_len: int) -> float:
        """Estimated chance that the token after a match of this many tokens is the match's next one."""
        kind = bisect_right(MATCH_LENGTH_BOUNDS, match_len)
        return self._hits[kind] / self._tries[kind]

    def observe(self, match_len: int, proposed: Sequence[int], came: Sequence[int]) -> None:
        """Score a proposal against the tokens that came after it, up to the first difference."""
        for offset, (draft, token) in enumerate(zip(proposed, came, strict=False)):
            kind = bisect_right(MATCH_LENGTH_BOUNDS, match_len + offset)
            prior = PRIOR_CONTINUATION[kind]
            self._hits[kind] = _faded(self._hits[kind], PRIOR_WEIGHT * prior) + (draft == token)
            self._tries[kind] = _faded(self._tries[kind], PRIOR_WEIGHT) + 1.0
            if draft != token:
                break

    def choose(self, match_len: int, max_drafts: int, num_generating: int) -> int:
        """Drafts to send of a proposal of `max_drafts`: 0, 1, 3, 7, ... or all of it.

        Few lengths, because a step runs requests of equal length together.
        """
        if self._cost <= 0:
            return max_drafts
        best, best_rate = 0, num_generating / (1 - self._cost + self._cost * num_generating)
        expected, chance, allowed = float(num_generating), 1.0, 1
        for drafts in range(1, max_drafts + 1):
            chance *= self.continuation_chance(match_len + drafts - 1)
            expected += chance
            if drafts != allowed and drafts != max_drafts:
                continue
            allowed = 2 * allowed + 1
            rate = expected / (1 - self._cost + self._cost * (num_generating + drafts))
            if rate > best_rate:
                best, best_rate = drafts, rate
        return best


def _faded(total: float, prior: float) -> float:
    """A decayed sum of outcomes around a prior that does not fade."""
    return prior + (total - prior) * OUTCOME_DECAY
