# SPDX-License-Identifier: Apache-2.0
"""From a speculation's settings to its drafter."""

from collections.abc import Sequence

from tensorrt_llm._torch.speculative.guard import ROUND_COST_PER_TOKEN
from tensorrt_llm._torch.speculative.interface import Drafter, DraftTarget, SpeculationSpec, UserDrafter
from tensorrt_llm._torch.speculative.ngram import NGramDrafter


class UserProvidedDrafter:
    """A user's drafter behind the loop's interface; what it proposes beyond the round's limit is cut."""

    def __init__(self, drafter: UserDrafter) -> None:
        self._drafter = drafter

    def propose(self, request: DraftTarget, max_draft_len: int, num_generating: int) -> list[int]:
        if max_draft_len == 0:
            return []
        proposals: Sequence[Sequence[int]] = self._drafter.prepare_draft_tokens([request])
        if len(proposals) != 1:
            raise ValueError(
                f"{type(self._drafter).__name__}.prepare_draft_tokens returned {len(proposals)} lists for "
                "one request; it must return one list of drafts per request"
            )
        return list(proposals[0][:max_draft_len])

    def finish(self, request_id: int) -> None:
        """A user's drafter keeps no state that the loop knows of."""


def create_drafter(spec: SpeculationSpec, device_type: str) -> Drafter:
    """The drafter of a speculation whose rounds run on a "cpu" or "cuda" device."""
    if spec.decoding_type == "NGram":
        cost = spec.round_cost_per_token
        return NGramDrafter(spec, ROUND_COST_PER_TOKEN[device_type] if cost is None else cost)
    assert spec.drafter is not None, "SpeculationSpec demands a drafter for User_Provided"
    return spec.drafter if isinstance(spec.drafter, Drafter) else UserProvidedDrafter(spec.drafter)
