# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.pyexecutor.llm_request import (
    ExecutorRequest,
    Finish,
    LlmRequest,
    LlmRequestState,
    SamplingSpec,
)
from tests.unittest._torch.executor.fakes import make_request


def admit(request: ExecutorRequest, max_seq_len: int = 100) -> LlmRequest:
    return LlmRequest.admit(request, max_seq_len=max_seq_len, seed=1, arrival=0.0)


def test_a_prompt_moves_through_its_chunks_into_generation() -> None:
    req = admit(make_request(prompt_len=70))
    assert req.state is LlmRequestState.QUEUED
    req.state = LlmRequestState.CONTEXT_INIT
    req.context_chunk_size = 64
    assert req.is_first_context_chunk and not req.is_last_context_chunk
    req.advance_context()
    assert req.in_context and req.context_current_position == 64
    req.context_chunk_size = 6
    assert req.is_last_context_chunk and not req.is_first_context_chunk
    req.advance_context()
    assert req.in_generation


def test_output_is_cut_to_max_seq_len() -> None:
    assert admit(make_request(prompt_len=90, max_tokens=50)).max_new_tokens == 10
    assert admit(make_request(prompt_len=10, max_tokens=50)).max_new_tokens == 50


def test_the_requests_seed_wins() -> None:
    assert admit(make_request()).seed == 1
    assert admit(make_request(sampling=SamplingSpec(seed=9))).seed == 9


def test_ends() -> None:
    def end(token: int, **changes: object) -> Finish | None:
        return admit(make_request(max_tokens=5, **changes)).append_output(token)  # type: ignore[arg-type]

    assert end(3) is None
    assert end(3, end_id=3) == Finish(reason="stop")
    assert end(3, end_id=3, ignore_eos=True) is None
    assert end(3, stop_token_ids=(2, 3)) == Finish(reason="stop", stop_reason=3)
    assert end(3, end_id=3, ignore_eos=True, stop_token_ids=(3,)) == Finish(reason="stop", stop_reason=3)
    assert end(3, end_id=3, sampling=SamplingSpec(min_tokens=2)) is None
    req = admit(make_request(max_tokens=2))
    assert req.append_output(1) is None
    assert req.append_output(1) == Finish(reason="length")
    last = admit(make_request(max_tokens=1, end_id=4))
    assert last.append_output(4) == Finish(reason="stop")


def test_stop_strings_do_not_count_before_min_tokens_but_see_every_token() -> None:
    class Always:
        seen: list[int] = []

        def push(self, token_id: int) -> str | None:
            self.seen.append(token_id)
            return "x"

    stop = Always()
    req = admit(make_request(stop=stop, sampling=SamplingSpec(min_tokens=3)))
    assert [req.append_output(t) for t in (5, 6, 7)] == [
        None,
        None,
        Finish(reason="stop", stop_reason="x"),
    ]
    assert stop.seen == [5, 6, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt_token_ids is empty"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be >= 1"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, object], message: str) -> None:
    values = {"request_id": 0, "prompt_token_ids": (1,), "max_tokens": 1, **changes}
    with pytest.raises(ValueError, match=message):
        ExecutorRequest(**values)  # type: ignore[arg-type]
