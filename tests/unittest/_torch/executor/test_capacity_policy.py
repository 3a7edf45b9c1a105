# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.pyexecutor.capacity_policy import (
    CapacitySchedulerPolicy,
    GuaranteedNoEvict,
    MaxUtilization,
    Relief,
    create_capacity_policy,
)
from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest
from tests.unittest._torch.executor.fakes import make_request

LIMITS = SchedulerLimits(
    max_batch_size=8,
    max_num_tokens=512,
    max_seq_len=400,
    max_pages=10,
    tokens_per_page=8,
    tokens_per_gen_step=4,
)
MOVING = MaxUtilization(offloads=True)
STAYING = MaxUtilization(offloads=False)


def admitted(request_id: int, prompt_len: int = 5, max_tokens: int = 20) -> LlmRequest:
    req = waiting(request_id, prompt_len, max_tokens)
    req.start_context(0)
    return req


def waiting(request_id: int, prompt_len: int = 5, max_tokens: int = 20) -> LlmRequest:
    request = make_request(request_id, prompt_len=prompt_len, max_tokens=max_tokens)
    return LlmRequest.admit(request, max_seq_len=400, seed=0, arrival=0.0)


def test_the_names_make_the_policies() -> None:
    guaranteed, most = CapacitySchedulerPolicy
    assert create_capacity_policy(guaranteed, offloads=True) == GuaranteedNoEvict()
    assert create_capacity_policy(most, offloads=True) == MOVING
    assert create_capacity_policy(most, offloads=False) == STAYING


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "pages_now", "pages_for_life"),
    [
        (5, 20, 1, 3),
        (5, 1, 1, 1),
        # 13 tokens and three drafts fill two pages; the 14th token asks for a third.
        (13, 60, 2, 9),
        (14, 60, 3, 10),
        # The last token is never computed, so a round near the end needs less than its width.
        (14, 3, 2, 2),
    ],
)
def test_pages(prompt_len: int, max_tokens: int, pages_now: int, pages_for_life: int) -> None:
    req = waiting(0, prompt_len, max_tokens)
    assert (LIMITS.pages_for_step(req), LIMITS.pages_for_life(req)) == (pages_now, pages_for_life)


def test_a_guarantee_counts_whole_lives() -> None:
    policy = GuaranteedNoEvict()
    req = waiting(0, 13, 20)
    assert policy.promised_pages(req, LIMITS) == 4
    assert policy.may_admit(req, [], 6, LIMITS)
    assert not policy.may_admit(req, [], 7, LIMITS)
    assert policy.relieve(req, [req, admitted(1)], []) is None
    with pytest.raises(AssertionError, match="request 0 is paused"):
        policy.may_resume(req, [], [req], LIMITS)


@pytest.mark.parametrize("policy", [MOVING, STAYING])
def test_utilization_counts_what_is_needed_now(policy: MaxUtilization) -> None:
    running = [admitted(i, 14, 60) for i in range(2)]
    assert policy.promised_pages(running[0], LIMITS) == 0
    assert policy.may_admit(waiting(2, 29), running, 0, LIMITS), "3 + 3 + 4 pages"
    assert not policy.may_admit(waiting(2, 30), running, 0, LIMITS), "3 + 3 + 5 pages"
    assert policy.may_resume(admitted(2, 5), running, [], LIMITS), "3 + 3 + 1, and one more for each"
    assert not policy.may_resume(admitted(2, 6), running, [], LIMITS), "3 + 3 + 2, and one more for each"
    assert policy.may_resume(admitted(2, 50, 30), [], [], LIMITS), "alone it always may"


def test_suspended_pages_that_cannot_move_are_in_the_way() -> None:
    running, req, other = [admitted(0, 14, 60)], admitted(1), admitted(2, 30)
    assert MOVING.may_resume(req, running, [other, req], LIMITS)
    assert not STAYING.may_resume(req, running, [other, req], LIMITS), "3 + 5 + 1, and one more for each"
    other.restart()
    assert STAYING.may_resume(req, running, [other, req], LIMITS), "it holds nothing any more"


def test_the_youngest_is_suspended_but_never_the_last() -> None:
    old, middle, young = (admitted(i) for i in range(3))
    for needy in (old, middle, young):
        assert MOVING.relieve(needy, [old, middle, young], []) == Relief(young, keeps_state=True)
    assert MOVING.relieve(old, [old], []) is None


def test_a_request_alone_gets_the_suspended_caches_the_youngest_first() -> None:
    old, middle, young, youngest = (admitted(i) for i in range(4))
    youngest.restart()
    assert MOVING.relieve(old, [old], [youngest, young, middle]) == Relief(young, keeps_state=False)
    young.restart()
    assert MOVING.relieve(old, [old], [youngest, young, middle]) == Relief(middle, keeps_state=False)
    assert MOVING.relieve(middle, [], [youngest, young, middle]) is None, "it is about to resume"


def test_without_a_lower_tier_caches_are_given_up() -> None:
    old, middle, young, paused = (admitted(i) for i in range(4))
    running = [old, middle, young]
    assert STAYING.relieve(young, running, [paused]) == Relief(young, keeps_state=True), "it waits in place"
    assert STAYING.relieve(old, running, [paused]) == Relief(paused, keeps_state=False)
    paused.restart()
    assert STAYING.relieve(old, running, [paused]) == Relief(young, keeps_state=False)
    assert STAYING.relieve(old, [old], [paused]) is None
