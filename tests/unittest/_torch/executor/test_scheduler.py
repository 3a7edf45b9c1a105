# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm._torch.modules.metadata import PREFILL_ALIGNMENT_TOKENS
from tensorrt_llm._torch.pyexecutor.capacity_policy import GuaranteedNoEvict, MaxUtilization
from tensorrt_llm._torch.pyexecutor.limits import SchedulerLimits
from tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, LlmRequestState
from tensorrt_llm._torch.pyexecutor.scheduler import (
    ScheduledRequests,
    Scheduler,
    plan_chunks,
    plan_step,
    smallest_chunk,
)
from tests.unittest._torch.executor.fakes import FakeCache, make_limits, make_request


def make_limits_for(max_num_tokens: int, chunked: bool = True, width: int = 1) -> SchedulerLimits:
    return SchedulerLimits(
        max_batch_size=16,
        max_num_tokens=max_num_tokens,
        max_seq_len=100_000,
        max_pages=100_000,
        tokens_per_page=8,
        tokens_per_gen_step=width,
        enable_chunked_prefill=chunked,
    )


def prompt(request_id: int, prompt_len: int, position: int = 0) -> LlmRequest:
    request = make_request(request_id, prompt_len=prompt_len)
    req = LlmRequest.admit(request, max_seq_len=100_000, seed=0, arrival=0.0)
    req.context_current_position = position
    req.state = LlmRequestState.CONTEXT_INIT
    return req


def generation(request_id: int, last_scheduled: int = -1) -> LlmRequest:
    req = prompt(request_id, 4, 4)
    req.state = LlmRequestState.GENERATION_IN_PROGRESS
    req.last_scheduled_iter = last_scheduled
    return req


def chunks_of(prompt_lens: list[int], budget: int, chunked: bool = True) -> list[int]:
    contexts = [prompt(i, n) for i, n in enumerate(prompt_lens)]
    return [step.num_tokens for step in plan_chunks(contexts, budget, make_limits_for(300, chunked))]


@pytest.mark.parametrize(
    ("prompt_lens", "budget", "expected"),
    [
        ([10, 20], 100, [10, 20]),
        ([100], 100, [100]),
        ([101], 100, [64]),
        ([200], 130, [128]),
        ([50, 200, 5], 130, [50, 64, 5]),
        ([50, 200], 110, [50]),
        ([10], 0, []),
    ],
)
def test_chunks(prompt_lens: list[int], budget: int, expected: list[int]) -> None:
    assert chunks_of(prompt_lens, budget) == expected


def test_without_chunking_a_prompt_runs_whole_or_not_at_all() -> None:
    assert chunks_of([90, 20], 100, chunked=False) == [90]
    assert chunks_of([101], 100, chunked=False) == []


def test_what_is_read_again_may_be_longer_than_a_step() -> None:
    limits = make_limits_for(100, chunked=False)
    req = generation(0)
    req.max_new_tokens = 200
    for token in range(116):
        req.append_output(token)
    req.py_draft_tokens = [1, 2]
    req.restart()
    assert req.py_draft_tokens == [], "they belong to a round that does not run"
    assert (req.context_len, req.prompt_len, req.num_generated) == (120, 4, 116)
    assert smallest_chunk(req, limits) == 64
    assert [step.num_tokens for step in plan_chunks([req], 100, limits)] == [64]


@given(
    prompt_len=st.integers(1, 3000),
    budgets=st.lists(st.integers(0, 700), min_size=1, max_size=40),
)
def test_a_prompt_is_read_once_in_aligned_chunks(prompt_len: int, budgets: list[int]) -> None:
    req = prompt(0, prompt_len)
    limits = make_limits_for(65)
    for budget in budgets:
        if req.context_current_position == prompt_len:
            break
        assert req.context_current_position % PREFILL_ALIGNMENT_TOKENS == 0
        steps = plan_chunks([req], budget, limits)
        needed = smallest_chunk(req, limits)
        assert bool(steps) == (budget >= needed)
        if steps:
            assert needed <= steps[0].num_tokens <= budget
            req.context_current_position += steps[0].num_tokens
    assert req.context_current_position <= prompt_len


@given(
    max_num_tokens=st.integers(72, 600),
    num_generations=st.integers(0, 60),
    prompt_lens=st.lists(st.integers(1, 900), max_size=4),
    chunked=st.booleans(),
)
def test_a_step_stays_in_its_budget_and_both_phases_advance(
    max_num_tokens: int, num_generations: int, prompt_lens: list[int], chunked: bool
) -> None:
    limits = make_limits_for(max_num_tokens, chunked, width=8)
    lens = [n if chunked else min(n, max_num_tokens) for n in prompt_lens]
    contexts = [prompt(i, n) for i, n in enumerate(lens)]
    generations = [generation(100 + i) for i in range(num_generations)]
    plan = plan_step(contexts, generations, limits)
    used = 8 * len(plan.generations) + sum(step.num_tokens for step in plan.contexts)
    assert used <= max_num_tokens
    assert plan.held_back == num_generations - len(plan.generations)
    assert bool(plan.contexts) == bool(contexts)
    if generations and (chunked or not contexts):
        assert plan.generations


def test_generations_that_had_to_wait_come_first() -> None:
    limits = make_limits_for(72, width=8)
    generations = [generation(i, last_scheduled=5) for i in range(9)] + [generation(9, 4)]
    plan = plan_step([], generations, limits)
    assert [req.py_request_id for req in plan.generations] == [9, *range(8)]
    assert plan.held_back == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_num_tokens": 71, "tokens_per_gen_step": 8}, "max_num_tokens is 71; it must be >= 72"),
    ],
)
def test_limits_that_allow_no_step_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_limits(FakeCache(10, 2), **changes)


def admitted(scheduler: Scheduler) -> list[int]:
    return [req.py_request_id for req in scheduler.running]


def waiting_request(request_id: int, prompt_len: int, max_tokens: int) -> LlmRequest:
    request = make_request(request_id, prompt_len=prompt_len, max_tokens=max_tokens)
    return LlmRequest.admit(request, max_seq_len=400, seed=0, arrival=0.0)


def test_admission_is_bound_by_pages_of_a_whole_life_and_by_slots() -> None:
    cache = FakeCache(num_pages=10, num_slots=4)
    scheduler = Scheduler(make_limits(cache, max_batch_size=3), cache, GuaranteedNoEvict())
    # 33 tokens, of which 32 are computed: 4 pages of 8.
    for i, (prompt_len, max_tokens) in enumerate([(13, 20), (13, 20), (13, 21), (1, 1), (1, 1)]):
        scheduler.enqueue(waiting_request(i, prompt_len, max_tokens))
    assert scheduler.admit() == 2
    assert scheduler.promised_pages == 8
    assert scheduler.admit() == 0, "the third waits for pages, and none overtakes it"
    first = scheduler.find(0)
    assert first is not None
    assert scheduler.remove(first)
    cache.free_resources(first)
    assert scheduler.admit() == 2
    assert admitted(scheduler) == [1, 2, 3]
    assert scheduler.admit() == 0, "the fifth waits for a slot"
    assert [req.py_request_id for req in scheduler.waiting] == [4]


def test_a_manager_without_capacity_keeps_the_queue_in_order() -> None:
    cache = FakeCache(num_pages=10, num_slots=4)
    cache.refuse = lambda req: req.py_request_id == 0
    scheduler = Scheduler(make_limits(cache), cache, GuaranteedNoEvict())
    for i in range(2):
        scheduler.enqueue(waiting_request(i, 5, 5))
    assert scheduler.admit() == 0
    assert scheduler.promised_pages == 0
    assert [req.py_request_id for req in scheduler.waiting] == [0, 1]
    victim = scheduler.find_victim()
    assert victim is not None and victim.py_request_id == 0
    assert not scheduler.remove(victim), "it held nothing"
    assert scheduler.admit() == 1


def test_generations_run_when_the_prompt_they_made_room_for_cannot() -> None:
    cache = FakeCache(num_pages=200, num_slots=4)
    limits = make_limits(cache, max_num_tokens=65, enable_chunked_prefill=False)
    scheduler = Scheduler(limits, cache, GuaranteedNoEvict())
    scheduler.enqueue(waiting_request(0, 5, 50))
    scheduler.admit()
    assert scheduler.schedule(0).batch_size == 1
    running = scheduler.find(0)
    assert running is not None
    running.advance_context()
    scheduler.enqueue(waiting_request(1, 65, 5))
    scheduler.admit()
    cache.refuse = lambda req: req.py_request_id == 1
    batch = scheduler.schedule(1)
    assert [req.py_request_id for req in batch.all_requests()] == [0]
    cache.refuse = lambda req: False
    batch = scheduler.schedule(2)
    assert [req.py_request_id for req in batch.context_requests] == [1]


def generating_scheduler(cache: FakeCache) -> Scheduler:
    """Twenty requests that have read their prompts, of which a step runs nine, under MAX_UTILIZATION."""
    limits = make_limits(cache, max_num_tokens=72, tokens_per_gen_step=8)
    scheduler = Scheduler(limits, cache, MaxUtilization(offloads=True))
    for i in range(20):
        scheduler.enqueue(waiting_request(i, 3, 50))
    assert scheduler.admit() == 20
    batch = scheduler.schedule(0)
    cache.prepare_resources(batch)
    cache.update_context_resources(batch)
    for req in batch.context_requests:
        req.advance_context()
    return scheduler


def generating_ids(batch: ScheduledRequests) -> list[int]:
    return [req.py_request_id for req in batch.generation_requests]


def test_a_step_whose_requests_all_gave_way_is_planned_again() -> None:
    cache = FakeCache(num_pages=200, num_slots=20)
    scheduler = generating_scheduler(cache)
    assert generating_ids(scheduler.schedule(1)) == [*range(9)]
    cache.refuse = lambda req: req.py_request_id >= 9
    assert generating_ids(scheduler.schedule(2)) == [*range(9)]
    assert [req.py_request_id for req in scheduler.paused] == [*reversed(range(9, 20))]


def test_a_request_that_gives_way_after_it_was_placed_returns_its_room() -> None:
    """Its turn came before an older one's. (The cache checks the room.)"""
    cache = FakeCache(num_pages=200, num_slots=20)
    scheduler = generating_scheduler(cache)
    for req in scheduler.running:
        req.py_draft_tokens = [1] * 7
    scheduler.schedule(1)
    scheduler.schedule(2)
    cache.refuse = lambda req: req.py_request_id == 0 and not scheduler.paused
    assert generating_ids(scheduler.schedule(3)) == [18, *range(7)]
    assert [req.py_request_id for req in scheduler.paused] == [19]
