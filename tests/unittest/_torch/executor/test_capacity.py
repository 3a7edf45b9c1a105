# SPDX-License-Identifier: Apache-2.0
"""The loop under MAX_UTILIZATION, on fakes: who gives way, what comes back, what statistics say."""

from typing import Any

import pytest

from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, FailureKind
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Rig, ScriptedDrafter, make_request, make_rig

HOSTS = pytest.mark.parametrize("num_host_pages", [0, 3, 100], ids=["no_host", "small_host", "host"])


def make_full_rig(num_pages: int = 10, **more: object) -> Rig:
    return make_rig(num_pages=num_pages, policy=CapacitySchedulerPolicy.MAX_UTILIZATION, **more)  # type: ignore[arg-type]


def texts_alone(requests: list[ExecutorRequest]) -> dict[int, list[int]]:
    rig = make_rig()
    for request in requests:
        rig.submit(request)
    return rig.run()


def submit_all(rig: Rig, requests: list[ExecutorRequest]) -> None:
    for request in requests:
        rig.submit(request)


def step_until_paused(rig: Rig, count: int = 1) -> list[int]:
    """Ids of the paused requests, the youngest first, once there are so many."""
    for _ in range(500):
        if len(rig.executor._scheduler.paused) >= count:
            return [req.py_request_id for req in rig.executor._scheduler.paused]
        rig.step()
    raise AssertionError(f"never were {count} requests paused")


@HOSTS
def test_more_requests_than_fit_all_finish_with_their_texts(num_host_pages: int) -> None:
    requests = [make_request(i, prompt_len=3 + 7 * i % 40, max_tokens=30 + i) for i in range(20)]
    rig = make_full_rig(num_pages=12, num_slots=6, num_host_pages=num_host_pages)
    submit_all(rig, requests)
    assert rig.run() == texts_alone(requests)
    assert all(answer.last.error is None for answer in rig.answers.values())
    assert (rig.cache.num_offloaded > 0) == (num_host_pages > 0)


@HOSTS
@pytest.mark.parametrize("script", [[(7, 7)], [(7, 0)], [(7, 3), (0, 0), (5, 5), (2, 1)]])
def test_drafts_change_no_text(num_host_pages: int, script: list[tuple[int, int]]) -> None:
    requests = [make_request(i, prompt_len=10 + 3 * i, max_tokens=60) for i in range(8)]
    texts = texts_alone(requests)
    spec = SpeculationSpec(decoding_type="NGram", max_draft_len=7)
    rig = make_full_rig(
        num_pages=14, num_host_pages=num_host_pages, spec=spec, drafter=ScriptedDrafter(texts, script)
    )
    submit_all(rig, requests)
    assert rig.run() == texts
    assert rig.cache.num_suspended > 0


def test_more_run_at_once_than_under_the_guarantee() -> None:
    requests = [make_request(i, prompt_len=4, max_tokens=70) for i in range(6)]
    for policy, num_running in (("GUARANTEED_NO_EVICT", 2), ("MAX_UTILIZATION", 6)):
        rig = make_rig(num_pages=20, num_host_pages=50, policy=CapacitySchedulerPolicy(policy))
        submit_all(rig, requests)
        rig.step()
        assert rig.executor.snapshot().num_requests_running == num_running


def test_the_youngest_gives_way_and_the_oldest_comes_back_first() -> None:
    rig = make_full_rig(num_host_pages=100)
    submit_all(rig, [make_request(i, prompt_len=10, max_tokens=50) for i in range(4)])
    assert step_until_paused(rig, 1) == [3]
    assert step_until_paused(rig, 2) == [3, 2]
    rig.submit(make_request(4, prompt_len=1, max_tokens=1))
    rig.step()
    assert rig.answers[4].responses == [], "it would fit, and is younger than those that are paused"
    came_back: list[int] = []
    while rig.step():
        running = [req.py_request_id for req in rig.executor._scheduler.running]
        came_back += [i for i in running if i not in came_back]
    assert came_back[:4] == [0, 1, 2, 3]


def test_a_resumed_request_is_not_suspended_again_in_the_next_steps() -> None:
    """Each pause is worth a page of growth at least: 60 tokens of 8 a page leave little room for more."""
    rig = make_full_rig(num_pages=12, num_slots=6, num_host_pages=100)
    requests = [make_request(i, prompt_len=5, max_tokens=60) for i in range(6)]
    submit_all(rig, requests)
    rig.run()
    assert 4 <= rig.cache.num_suspended <= 15


@HOSTS
@pytest.mark.parametrize("who", ["paused", "running"])
def test_a_cancelled_request_returns_everything(num_host_pages: int, who: str) -> None:
    rig = make_full_rig(num_host_pages=num_host_pages)
    requests = [make_request(i, prompt_len=10, max_tokens=50) for i in range(4)]
    submit_all(rig, requests)
    ids = step_until_paused(rig)
    if who == "running":
        ids = [req.py_request_id for req in rig.executor._scheduler.running]
    for request_id in ids:
        rig.executor.cancel(request_id)
    texts = rig.run()
    for request_id, text in texts_alone(requests).items():
        assert texts[request_id] == text[: len(texts[request_id])]
        reason = rig.answers[request_id].last.finish_reason
        assert reason == ("cancelled" if request_id in ids else "length")


@HOSTS
def test_a_paused_request_whose_callback_fails_returns_everything(num_host_pages: int) -> None:
    rig = make_full_rig(num_host_pages=num_host_pages)
    submit_all(rig, [make_request(i, prompt_len=10, max_tokens=50) for i in range(4)])
    paused_id = step_until_paused(rig)[0]
    paused = rig.executor._scheduler.find(paused_id)
    assert paused is not None
    rig.executor._release(paused)
    del rig.answers[paused_id]
    rig.run()


def test_shutdown_answers_paused_requests() -> None:
    rig = make_full_rig(num_host_pages=100)
    submit_all(rig, [make_request(i, prompt_len=10, max_tokens=50) for i in range(4)])
    step_until_paused(rig)
    rig.executor.shutdown()
    errors = [answer.last.error for answer in rig.answers.values()]
    assert [error and error.kind for error in errors] == [FailureKind.SHUTDOWN] * 4


def test_what_can_never_fit_is_refused_at_submit() -> None:
    rig = make_full_rig(num_host_pages=100)
    with pytest.raises(ValueError, match="need 11 cache pages of 8 tokens; there are 10"):
        rig.submit(make_request(prompt_len=21, max_tokens=61))
    rig.answers.clear()
    rig.submit(make_request(prompt_len=21, max_tokens=60))
    rig.run()


@HOSTS
def test_output_that_makes_a_prompt_longer_than_a_step_is_read_again(num_host_pages: int) -> None:
    requests = [make_request(i, prompt_len=60, max_tokens=80) for i in range(3)]
    rig = make_full_rig(
        num_pages=40, num_host_pages=num_host_pages, max_num_tokens=72, enable_chunked_prefill=False
    )
    submit_all(rig, requests)
    longest = 0
    while rig.step():
        longest = max(longest, *(req.context_len for req in rig.executor._scheduler.running))
    assert longest > 72 or num_host_pages == 100, "no output was read again"
    assert rig.run() == texts_alone(requests)


def test_statistics_count_paused_requests() -> None:
    rig = make_full_rig(num_host_pages=100)
    submit_all(rig, [make_request(i, prompt_len=10, max_tokens=50) for i in range(4)])
    step_until_paused(rig, 2)
    last: Any = rig.executor.get_stats()[-1]
    snapshot = rig.executor.snapshot()
    assert (last["inflightBatchingStats"]["numPausedRequests"], last["numActiveRequests"]) == (2, 4)
    assert (snapshot.num_requests_running, snapshot.num_requests_paused) == (2, 2)
    rig.run()
    last = rig.executor.get_stats()[-1]
    assert last["inflightBatchingStats"]["numPausedRequests"] == 0
