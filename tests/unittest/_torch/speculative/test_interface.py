# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import pytest

from tensorrt_llm._torch.speculative.create import create_drafter
from tensorrt_llm._torch.speculative.interface import Drafter, DraftTarget, SpeculationSpec
from tensorrt_llm._torch.speculative.speculator import Speculator


class Request:
    def __init__(self, tokens: list[int], num_remaining: int = 100) -> None:
        self.py_request_id = 0
        self.py_draft_tokens: list[int] = []
        self.decode_iterations = 0
        self.num_remaining = num_remaining
        self._tokens = tokens

    def get_tokens(self, beam: int = 0) -> list[int]:
        return self._tokens


class Counting:
    """A user's drafter that goes on counting."""

    def prepare_draft_tokens(self, scheduled_requests: Sequence[DraftTarget]) -> list[list[int]]:
        return [[request.get_tokens()[-1] + i for i in range(1, 20)] for request in scheduled_requests]


def user_spec(drafter: object, **changes: object) -> SpeculationSpec:
    return SpeculationSpec(
        **{"decoding_type": "User_Provided", "max_draft_len": 4, "drafter": drafter, **changes}  # type: ignore[arg-type]
    )


def drafts_of(
    spec: SpeculationSpec, request: Request, num_generating: int = 1, vocab_size: int = 100
) -> list[int]:
    speculator = Speculator(vocab_size, spec, create_drafter(spec, "cpu"))
    speculator.draft(request, num_generating)
    return request.py_draft_tokens


def test_a_users_drafter_is_cut_to_the_limit() -> None:
    assert drafts_of(user_spec(Counting()), Request([7])) == [8, 9, 10, 11]


@pytest.mark.parametrize(("num_remaining", "num_drafts"), [(100, 4), (4, 3), (2, 1), (1, 0)])
def test_no_more_drafts_than_tokens_that_may_follow(num_remaining: int, num_drafts: int) -> None:
    assert len(drafts_of(user_spec(Counting()), Request([7], num_remaining))) == num_drafts


def test_a_drafter_in_the_loops_form_is_used_as_it_is() -> None:
    class Own:
        def propose(self, request: DraftTarget, max_draft_len: int, num_generating: int) -> list[int]:
            return [num_generating] * max_draft_len

        def finish(self, request_id: int) -> None: ...

    own = Own()
    assert isinstance(own, Drafter)
    assert create_drafter(user_spec(own), "cpu") is own
    assert drafts_of(user_spec(own), Request([7]), num_generating=3) == [3, 3, 3, 3]


def test_drafts_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens are 0 to 9"):
        drafts_of(user_spec(Counting()), Request([7]), vocab_size=10)


def test_a_drafter_that_returns_nonsense_is_named() -> None:
    class Empty:
        def prepare_draft_tokens(self, scheduled_requests: Sequence[DraftTarget]) -> list[list[int]]:
            return []

    with pytest.raises(ValueError, match=r"Empty.prepare_draft_tokens returned 0 lists"):
        drafts_of(user_spec(Empty()), Request([7]))


def test_concurrency_and_schedule_limit_the_drafts() -> None:
    limited = user_spec(Counting(), max_concurrency=2)
    assert [len(drafts_of(limited, Request([7]), n)) for n in (1, 2, 3)] == [4, 4, 0]
    scheduled = user_spec(Counting(), draft_len_schedule={2: 4, 5: 1})
    assert [scheduled.draft_len_at(n) for n in (1, 2, 3, 5, 6)] == [4, 4, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_draft_len": 0}, "max_draft_len is 0"),
        ({"decoding_type": "NGram", "drafter": Counting()}, "drafter belongs to decoding_type"),
        ({"drafter": None}, "drafter belongs to decoding_type"),
        ({"max_matching_ngram_size": 0}, "max_matching_ngram_size is 0"),
        ({"max_concurrency": 2, "draft_len_schedule": {1: 4}}, "both set"),
        ({"draft_len_schedule": {1: 3}}, "must map to max_draft_len=4"),
        ({"draft_len_schedule": {1: 4, 2: 5}}, "no length may exceed it"),
        ({"draft_len_schedule": {0: 4}}, "batch sizes >= 1"),
        ({"draft_len_schedule": {}}, "batch sizes >= 1"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        user_spec(**{"drafter": Counting(), **changes})


def test_tokens_per_gen_step() -> None:
    spec = user_spec(Counting())
    assert (spec.tokens_per_gen_step, spec.max_total_draft_tokens) == (5, 4)
    assert Speculator(10).max_draft_len == 0
