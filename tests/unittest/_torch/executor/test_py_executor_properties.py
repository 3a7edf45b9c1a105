# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, cancellations, refusals and capacities: everything ends, everything returns."""

from collections.abc import Callable
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorrt_llm._torch.pyexecutor.capacity_policy import CapacitySchedulerPolicy
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, FailureKind, LlmRequest
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tensorrt_llm._torch.speculative.create import create_drafter
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tests.unittest._torch.executor.fakes import Rig, make_request, make_rig

REQUESTS = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(0, 25), st.none() | st.integers(0, 30)),
    min_size=1,
    max_size=12,
)
"""(prompt_len, max_tokens, step of arrival, step of cancellation) of each request."""


def submit_what_can_run(rig: Rig, requests: list[ExecutorRequest]) -> None:
    for request in requests:
        try:
            rig.submit(request)
        except ValueError:
            del rig.answers[request.request_id]


def refusals(pattern: list[bool]) -> Callable[[LlmRequest], bool]:
    """A cache that refuses now and then, by the pattern, over and over."""
    calls = 0

    def refuse(req: LlmRequest) -> bool:
        nonlocal calls
        calls += 1
        return pattern[calls % len(pattern)] if pattern else False

    return refuse


def ngram(max_draft_len: int) -> dict[str, object]:
    """The part of a rig that drafts; none of it for 0 drafts."""
    if max_draft_len == 0:
        return {}
    spec = SpeculationSpec(decoding_type="NGram", max_draft_len=max_draft_len, round_cost_per_token=0.0)
    return {"spec": spec, "drafter": create_drafter(spec, "cpu")}


@settings(deadline=None, max_examples=120)
@given(
    shapes=REQUESTS,
    num_pages=st.integers(1, 40),
    num_slots=st.integers(1, 4),
    max_num_tokens=st.integers(72, 200),
    max_draft_len=st.integers(0, 7),
    pattern=st.lists(st.booleans(), max_size=7),
    chunked=st.booleans(),
    policy=st.sampled_from(CapacitySchedulerPolicy),
    num_host_pages=st.sampled_from([0, 0, 5, 100]),
)
def test_everything_ends_and_everything_returns(
    shapes: list[tuple[int, int, int, int | None]],
    num_pages: int,
    num_slots: int,
    max_num_tokens: int,
    max_draft_len: int,
    pattern: list[bool],
    chunked: bool,
    policy: CapacitySchedulerPolicy,
    num_host_pages: int,
) -> None:
    rig = make_rig(
        num_pages=num_pages,
        num_slots=num_slots,
        max_num_tokens=max_num_tokens,
        enable_chunked_prefill=chunked,
        policy=policy,
        num_host_pages=num_host_pages,
        **ngram(max_draft_len),  # type: ignore[arg-type]
    )
    rig.cache.refuse = refusals(pattern)
    requests = [make_request(i, prompt_len=n, max_tokens=m) for i, (n, m, _, _) in enumerate(shapes)]
    for step in range(31):
        submit_what_can_run(rig, [r for r, shape in zip(requests, shapes, strict=True) if shape[2] == step])
        for i, shape in enumerate(shapes):
            if shape[3] == step:
                rig.executor.cancel(i)
        rig.step()
    texts = rig.run()
    for request in requests:
        if request.request_id in texts:
            check_answer(rig, request, refused=any(pattern))


def text_alone(request: ExecutorRequest) -> tuple[int, ...]:
    """The whole text of a request of `make_request`, which no other request has disturbed."""
    return _text_alone(request.request_id, len(request.prompt_token_ids), request.max_tokens)


@cache
def _text_alone(request_id: int, prompt_len: int, max_tokens: int) -> tuple[int, ...]:
    rig = make_rig()
    answer = rig.submit(make_request(request_id, prompt_len=prompt_len, max_tokens=max_tokens))
    rig.run()
    return tuple(answer.token_ids)


def check_answer(rig: Rig, request: ExecutorRequest, refused: bool) -> None:
    answer = rig.answers[request.request_id]
    expected = text_alone(request)
    assert tuple(answer.token_ids) == expected[: len(answer.token_ids)], "company changed the text"
    if answer.last.error is not None:
        assert answer.last.error.kind is FailureKind.CAPACITY
        assert refused, "every request fits alone, so capacity can only be missing for a while"
    elif answer.last.finish_reason == "length":
        assert len(answer.token_ids) == request.max_tokens
    else:
        assert answer.last.finish_reason == "cancelled"


class ExecutorMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, steps and spells without capacity, in any order.

    After every step the cache is whole, the order of ages holds, and each text is a part of what the request
    gets alone. In the end all have ended and all has come back.
    """

    @initialize(
        policy=st.sampled_from(CapacitySchedulerPolicy),
        num_pages=st.integers(6, 30),
        num_slots=st.integers(1, 5),
        num_host_pages=st.sampled_from([0, 4, 60]),
        max_draft_len=st.sampled_from([0, 2, 5]),
        chunked=st.booleans(),
    )
    def build(
        self,
        policy: CapacitySchedulerPolicy,
        num_pages: int,
        num_slots: int,
        num_host_pages: int,
        max_draft_len: int,
        chunked: bool,
    ) -> None:
        self.rig = make_rig(
            num_pages=num_pages,
            num_slots=num_slots,
            max_num_tokens=90,
            enable_chunked_prefill=chunked,
            policy=policy,
            num_host_pages=num_host_pages,
            **ngram(max_draft_len),  # type: ignore[arg-type]
        )
        self.policy = policy
        scheduler = self.rig.executor._scheduler
        schedule = scheduler.schedule

        def schedule_and_look(iteration: int) -> ScheduledRequests:
            batch = schedule(iteration)
            if not self.is_refusing:
                assert batch.batch_size or not scheduler.has_requests, "a step runs something"
                assert scheduler.running or not scheduler.paused, "never all are paused"
            return batch

        scheduler.schedule = schedule_and_look  # type: ignore[method-assign]
        self.requests: dict[int, ExecutorRequest] = {}
        self.has_refused = self.is_refusing = False

    @rule(prompt_len=st.integers(1, 100), max_tokens=st.integers(1, 60))
    def submit(self, prompt_len: int, max_tokens: int) -> None:
        request = make_request(len(self.requests), prompt_len=prompt_len, max_tokens=max_tokens)
        # Refused requests keep their id, so that no other one gets it.
        self.requests[request.request_id] = request
        submit_what_can_run(self.rig, [request])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.executor.cancel(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(refused_id=st.integers(0, 6))
    def step_while_one_finds_no_capacity(self, refused_id: int) -> None:
        self.has_refused = self.is_refusing = True
        self.rig.cache.refuse = lambda req: req.py_request_id == refused_id
        self.rig.step()
        self.rig.cache.refuse = lambda req: False
        self.is_refusing = False

    @invariant()
    def ages_are_in_order(self) -> None:
        if not hasattr(self, "rig"):
            return
        scheduler = self.rig.executor._scheduler
        ages = [
            req.py_request_id for req in (*scheduler.running, *reversed(scheduler.paused), *scheduler.waiting)
        ]
        assert ages == sorted(ages)
        assert len(scheduler.running) + len(scheduler.paused) <= scheduler.limits.max_batch_size
        if self.policy is CapacitySchedulerPolicy.GUARANTEED_NO_EVICT:
            assert not scheduler.paused

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        texts = self.rig.run()
        for request_id in texts:
            check_answer(self.rig, self.requests[request_id], refused=self.has_refused)


TestExecutorMachine = ExecutorMachine.TestCase
TestExecutorMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
