# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, cancellations, refusals and capacities: everything ends, everything returns."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, FailureKind, LlmRequest
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


@settings(deadline=None, max_examples=80)
@given(
    shapes=REQUESTS,
    num_pages=st.integers(1, 40),
    num_slots=st.integers(1, 4),
    max_num_tokens=st.integers(72, 200),
    max_draft_len=st.integers(0, 7),
    pattern=st.lists(st.booleans(), max_size=7),
    chunked=st.booleans(),
)
def test_everything_ends_and_everything_returns(
    shapes: list[tuple[int, int, int, int | None]],
    num_pages: int,
    num_slots: int,
    max_num_tokens: int,
    max_draft_len: int,
    pattern: list[bool],
    chunked: bool,
) -> None:
    spec = drafter = None
    if max_draft_len:
        spec = SpeculationSpec(decoding_type="NGram", max_draft_len=max_draft_len, round_cost_per_token=0.0)
        drafter = create_drafter(spec, "cpu")
    rig = make_rig(
        num_pages=num_pages,
        num_slots=num_slots,
        max_num_tokens=max_num_tokens,
        enable_chunked_prefill=chunked,
        spec=spec,
        drafter=drafter,
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


def check_answer(rig: Rig, request: ExecutorRequest, refused: bool) -> None:
    answer = rig.answers[request.request_id]
    alone = make_rig()
    expected = alone.submit(request)
    alone.run()
    assert answer.token_ids == expected.token_ids[: len(answer.token_ids)], "company changed the text"
    if answer.last.error is not None:
        assert answer.last.error.kind is FailureKind.CAPACITY
        assert refused, "the pages of a whole life were reserved, so capacity cannot be missing"
    elif answer.last.finish_reason == "length":
        assert len(answer.token_ids) == request.max_tokens
    else:
        assert answer.last.finish_reason == "cancelled"
