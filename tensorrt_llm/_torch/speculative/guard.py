# SPDX-License-Identifier: Apache-2.0
"""How many drafts a round is worth: none where they would cost more than they bring.

A round of B requests of which one adds k drafts costs 1 + c (2 (B - 1) + k + 1/B), in units of a round of
one token; without drafts the last two terms are absent. c is `round_cost_per_token`; a request costs about
two tokens beside its token, and leaving the one-token path about one, which the B requests share. The k
drafts add E_k = a_0 + a_0 a_1 + ... (k terms) accepted tokens on average, where a_j is the chance that
draft j is right after the j before it were. The guard takes the k that makes tokens per cost, (B + E_k) /
cost, largest.

a_j comes from this request's own history: how often the text went on as the drafter's match did, by the
length of the match (m tokens matched before the first draft, m + j before draft j). Every proposal is
scored against the tokens that came, drafted or not, so that a guard that has stopped drafting still learns,
for free. Old outcomes fade. Nothing is timed: the same text gives the same drafts.
"""

from bisect import bisect_right
from collections.abc import Sequence

MATCH_LENGTH_BOUNDS = (2, 3, 5, 9, 17)
"""Match lengths are told apart as 1, 2, 3-4, 5-8, 9-16 and 17 or more."""

PRIOR_CONTINUATION = (0.3, 0.5, 0.6, 0.68, 0.78, 0.9)
"""Chance that the text goes on as the match did, per class of match length, before any outcome was seen.

Measured on 120 files of Python's standard library in a 1,536-token vocabulary, n-gram sizes 2 to 8.
"""

PRIOR_WEIGHT = 6.0
"""Outcomes that a prior counts for at first; it fades as they do."""

OUTCOME_DECAY = 0.96
"""What an outcome still counts for after the next one of its class: about the last 25 matter."""

ROUND_COST_PER_TOKEN = {"cpu": 0.06, "cuda": 0.02}
"""c by device type. CPU: kimi-k3-tiny on an x86 core takes 9.0, 9.8, 10.6 and 12.8 ms for rounds of 1, 2, 4
and 8 tokens of one request, 16.2 and 35.1 ms for rounds of 1 and 8 tokens of eight requests. CUDA: an
estimate, since a round is bound by reading the weights.
"""


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
            self._hits[kind] = self._hits[kind] * OUTCOME_DECAY + (draft == token)
            self._tries[kind] = self._tries[kind] * OUTCOME_DECAY + 1.0
            if draft != token:
                break

    def choose(self, match_len: int, max_drafts: int, num_generating: int) -> int:
        """Drafts to send of a proposal of `max_drafts`: 0, 1, 3, 7, ... or all of it.

        Few lengths, because a step runs requests of equal length together.
        """
        if self._cost <= 0:
            return max_drafts
        undrafted = 1 + self._cost * 2 * (num_generating - 1)
        best, best_rate = 0, num_generating / undrafted
        expected, chance, allowed = float(num_generating), 1.0, 1
        for drafts in range(1, max_drafts + 1):
            chance *= self.continuation_chance(match_len + drafts - 1)
            expected += chance
            if drafts != allowed and drafts != max_drafts:
                continue
            allowed = 2 * allowed + 1
            rate = expected / (undrafted + self._cost * (drafts + 1 / num_generating))
            if rate > best_rate:
                best, best_rate = drafts, rate
        return best
