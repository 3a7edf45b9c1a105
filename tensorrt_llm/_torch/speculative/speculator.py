# SPDX-License-Identifier: Apache-2.0
"""The loop's view of speculation: drafts before a round, acceptance after it."""

from collections.abc import Sequence
from typing import Protocol

from tensorrt_llm._torch.speculative.acceptance import AcceptanceGate, ForcedAcceptance, count_accepted
from tensorrt_llm._torch.speculative.interface import Drafter, SpeculationSpec


class SpeculativeRequest(Protocol):
    """What speculation reads and writes of a request."""

    py_request_id: int
    py_draft_tokens: list[int]
    decode_iterations: int

    def get_tokens(self, beam: int = 0) -> list[int]: ...
    @property
    def num_remaining(self) -> int: ...


class Speculator:
    """Drafts and accepts for one executor. Without a spec it drafts nothing, and a round is one token.

    `forced_mean` accepts that many drafts a round whatever the model says (measurements only: the text is
    then the drafter's).
    """

    def __init__(
        self,
        vocab_size: int,
        spec: SpeculationSpec | None = None,
        drafter: Drafter | None = None,
        forced_mean: float | None = None,
    ) -> None:
        assert (spec is None) == (drafter is None), "a spec and its drafter come together"
        self._vocab_size = vocab_size
        self._spec = spec
        self._drafter = drafter
        self._forced = None if forced_mean is None else ForcedAcceptance(forced_mean)
        window, threshold = (
            (0, 0.0) if spec is None else (spec.acceptance_rate_window_size, spec.acceptance_rate_threshold)
        )
        self._gate = AcceptanceGate(window, threshold)

    @property
    def max_draft_len(self) -> int:
        """K, 0 without speculation."""
        return 0 if self._spec is None else self._spec.max_draft_len

    def draft(self, request: SpeculativeRequest, num_generating: int) -> None:
        """Set the drafts of the request's next round, no more than it may still emit before its last token.

        Raises ValueError for a draft that is not a token of the vocabulary, and what a user's drafter raises.
        """
        request.py_draft_tokens = []
        if self._spec is None or self._drafter is None or not self._gate.is_open:
            return
        limit = min(self._spec.draft_len_at(num_generating), request.num_remaining - 1)
        drafts = self._drafter.propose(request, limit, num_generating)
        if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
            raise ValueError(f"the drafter proposed {drafts}; tokens are 0 to {self._vocab_size - 1}")
        request.py_draft_tokens = drafts[: max(limit, 0)]

    def accept(self, request: SpeculativeRequest, targets: Sequence[int]) -> Sequence[int]:
        """The tokens that a round emits: the accepted drafts, then the target's token after them."""
        drafts = request.py_draft_tokens
        if self._forced is not None and drafts:
            accepted = self._forced.count(request.decode_iterations, len(drafts))
            return [*drafts[:accepted], targets[accepted]]
        return targets[: count_accepted(drafts, targets) + 1]

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Note what became of a request's drafts."""
        self._gate.observe(num_drafts, num_accepted)

    def finish(self, request_id: int) -> None:
        """Forget a request; unknown ids are allowed."""
        if self._drafter is not None:
            self._drafter.finish(request_id)
