# SPDX-License-Identifier: Apache-2.0
"""What speculation is asked for, and what a drafter is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

DecodingType = Literal["NGram", "User_Provided"]


class DraftTarget(Protocol):
    """What a drafter reads of a request in its generation phase."""

    @property
    def py_request_id(self) -> int: ...

    def get_tokens(self, beam: int = 0) -> list[int]:
        """Prompt and output tokens; not to be changed."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes the tokens that may follow each request; the target verifies them, so a proposal costs time
    only.

    Called on the loop's thread alone. A proposal may depend on the request's tokens and on what the same
    drafter proposed before, never on time, so that runs can be repeated.
    """

    def propose(self, request: DraftTarget, max_draft_len: int, num_generating: int) -> list[int]:
        """At most `max_draft_len` >= 0 drafts for a request whose last round is complete.

        `num_generating` requests share the round. Called once per request and round, with 0 too.
        """
        ...

    def finish(self, request_id: int) -> None:
        """Forget a request that has ended or was cancelled; unknown ids are allowed."""
        ...


class UserDrafter(Protocol):
    """A drafter written by a user of the API (`UserProvidedDecodingConfig.drafter`), in TensorRT-LLM's
    form.
    """

    def prepare_draft_tokens(self, scheduled_requests: Sequence[DraftTarget]) -> Sequence[Sequence[int]]:
        """Drafts for each request, in order; more than the round's limit are cut."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSpec:
    """Speculation with drafts made on the host, as resolved from the user's `speculative_config`.

    A round verifies at most `max_draft_len` (K) drafts. No drafts are made while more than
    `max_concurrency` requests generate; `draft_len_schedule` instead maps a number of generating requests
    to K (the smallest key that is not below it counts; beyond the largest key there are none).
    `round_cost_per_token` is what one more token in a verify round costs, as a share of the round's fixed
    cost; None takes the device's figure (`speculative.guard`), 0 switches the guard off.

    Raises ValueError for a value outside its range.
    """

    decoding_type: DecodingType
    max_draft_len: int
    max_concurrency: int | None = None
    draft_len_schedule: dict[int, int] | None = None
    acceptance_rate_window_size: int = 0
    acceptance_rate_threshold: float = 0.0
    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True
    round_cost_per_token: float | None = None
    drafter: UserDrafter | Drafter | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.max_draft_len < 1:
            raise ValueError(
                f"max_draft_len is {self.max_draft_len}; it must be >= 1 (no speculative_config: no drafts)"
            )
        if self.max_matching_ngram_size < 1:
            raise ValueError(f"max_matching_ngram_size is {self.max_matching_ngram_size}; it must be >= 1")
        if (self.decoding_type == "User_Provided") != (self.drafter is not None):
            raise ValueError("drafter belongs to decoding_type 'User_Provided', which needs one")
        if self.max_concurrency is not None and self.draft_len_schedule is not None:
            raise ValueError("max_concurrency and draft_len_schedule are both set; give one of them")
        if self.draft_len_schedule is not None:
            _check_schedule(self.draft_len_schedule, self.max_draft_len)

    @property
    def max_total_draft_tokens(self) -> int:
        """Drafts of a round; a chain has no others."""
        return self.max_draft_len

    @property
    def tokens_per_gen_step(self) -> int:
        """Tokens of a full verify round: the golden token and K drafts."""
        return self.max_draft_len + 1

    def draft_len_at(self, num_generating: int) -> int:
        """K for a round of this many requests."""
        if self.max_concurrency is not None:
            return self.max_draft_len if num_generating <= self.max_concurrency else 0
        if self.draft_len_schedule is None:
            return self.max_draft_len
        reached = [size for size in self.draft_len_schedule if size >= num_generating]
        return self.draft_len_schedule[min(reached)] if reached else 0


def _check_schedule(schedule: Mapping[int, int], max_draft_len: int) -> None:
    if not schedule or min(schedule) < 1 or min(schedule.values()) < 0:
        raise ValueError(
            f"draft_len_schedule is {dict(schedule)}; it maps batch sizes >= 1 to draft lengths >= 0"
        )
    if schedule[min(schedule)] != max_draft_len or max(schedule.values()) > max_draft_len:
        raise ValueError(
            f"draft_len_schedule is {dict(schedule)}; its smallest batch size must map to max_draft_len="
            f"{max_draft_len} and no length may exceed it"
        )
