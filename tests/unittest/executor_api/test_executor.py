# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorRequest, FailureKind
from tensorrt_llm.executor import ChoiceResponse, GenerationExecutor, SubmittedRequest
from tests.unittest.executor_api.fake_engine import PATIENCE_S, FakeEngine
from tests.unittest.executor_api.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()


def request(max_tokens: int = 3) -> ExecutorRequest:
    return ExecutorRequest(request_id=0, prompt_token_ids=(1, 2), max_tokens=max_tokens)


def read_to_end(submitted: SubmittedRequest, num_choices: int) -> list[ChoiceResponse]:
    arrivals: list[ChoiceResponse] = []
    while sum(arrival.response.is_final for arrival in arrivals) < num_choices:
        arrivals.append(submitted.responses.get(PATIENCE_S))
    return arrivals


def test_engine_is_started() -> None:
    engine = FakeEngine(TOKENIZER)
    GenerationExecutor(engine)
    assert engine.is_started


def test_choices_get_ids_of_their_own_and_their_own_answers() -> None:
    engine = FakeEngine(TOKENIZER, text="abc")
    executor = GenerationExecutor(engine)
    first, second = executor.submit([request(), request(2)]), executor.submit([request()])
    ids = [*first.request_ids, *second.request_ids]
    assert len(set(ids)) == 3
    arrivals = read_to_end(first, 2)
    for choice, length in ((0, 3), (1, 2)):
        responses = [arrival.response for arrival in arrivals if arrival.choice == choice]
        assert {response.request_id for response in responses} == {first.request_ids[choice]}
        assert sum(len(response.token_ids) for response in responses) == length
    read_to_end(second, 1)
    assert executor.num_open_requests == 0


def test_a_refused_choice_takes_the_others_with_it(monkeypatch) -> None:
    engine = FakeEngine(TOKENIZER, gated=True)
    executor = GenerationExecutor(engine)
    submit = engine.submit

    def refuse_long(submitted: ExecutorRequest, on_response: object) -> None:
        if submitted.max_tokens > 10:
            raise ValueError("max_tokens is over the limit of 10")
        submit(submitted, on_response)

    monkeypatch.setattr(engine, "submit", refuse_long)
    with pytest.raises(ValueError, match="limit of 10"):
        executor.submit([request(), request(11)])
    assert executor.num_open_requests == 0
    engine.wait_for(lambda fake: fake.num_open == 0)
    assert engine.cancelled_ids == [1]


def test_cancel_reaches_every_choice() -> None:
    engine = FakeEngine(TOKENIZER, gated=True)
    submitted = GenerationExecutor(engine).submit([request(), request()])
    submitted.cancel()
    reasons = [arrival.response.finish_reason for arrival in read_to_end(submitted, 2)]
    assert reasons == ["cancelled", "cancelled"]


def test_shutdown_answers_what_the_engine_left_open(monkeypatch) -> None:
    engine = FakeEngine(TOKENIZER, gated=True)
    executor = GenerationExecutor(engine)
    monkeypatch.setattr(engine, "shutdown", lambda: None)
    submitted = executor.submit([request(), request()])
    executor.shutdown()
    executor.shutdown()
    errors = [arrival.response.error for arrival in read_to_end(submitted, 2)]
    assert [error.kind for error in errors if error] == [FailureKind.SHUTDOWN] * 2
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit([request()])
    monkeypatch.undo()
    engine.shutdown()


def test_answers_after_the_end_are_dropped(monkeypatch) -> None:
    engine = FakeEngine(TOKENIZER, text="ab")
    callbacks = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda r, answer: (callbacks.append(answer), submit(r, answer)))
    submitted = GenerationExecutor(engine).submit([request(1)])
    (last,) = read_to_end(submitted, 1)
    callbacks[0](last.response)
    with pytest.raises(TimeoutError):
        submitted.responses.get(0)
