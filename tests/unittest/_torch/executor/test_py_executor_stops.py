# SPDX-License-Identifier: Apache-2.0
"""How the executor's end comes: whatever fails on the way, every open request is answered once."""

from collections.abc import Callable

import pytest

from tensorrt_llm._torch.pyexecutor.inbox import ExecutorUnhealthyError, Inbox, Submission
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorResponse, FailureKind, LlmRequest
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tests.unittest._torch.executor.fakes import Collected, Rig, make_request, make_rig

PATIENCE_S = 60


def raise_planted(*args: object) -> None:
    raise RuntimeError("planted release failure")


def refuse_to_free(rig: Rig, request_id: int) -> None:
    free = rig.cache.free_resources

    def free_or_raise(req: LlmRequest) -> None:
        if req.py_request_id == request_id:
            raise_planted()
        free(req)

    rig.cache.free_resources = free_or_raise  # type: ignore[method-assign]


BROKEN_PARTS: list[Callable[[Rig], None]] = [
    lambda rig: refuse_to_free(rig, 1),
    lambda rig: setattr(rig.executor._engine, "forget", raise_planted),
    lambda rig: setattr(rig.executor._sampler, "forget", raise_planted),
    lambda rig: setattr(rig.executor._speculator, "finish", raise_planted),
]


def run_out(rig: Rig) -> None:
    """Let the loop's thread run until it ends."""
    rig.executor.start()
    assert rig.executor._thread is not None
    rig.executor._thread.join(PATIENCE_S)
    assert not rig.executor._thread.is_alive()


def assert_answered_once(answer: Collected, kind: FailureKind) -> None:
    assert [response.is_final for response in answer.responses].count(True) == 1
    assert answer.last.error is not None
    assert answer.last.error.kind is kind


@pytest.mark.parametrize("break_part", BROKEN_PARTS, ids=["cache", "engine", "sampler", "speculator"])
def test_a_release_that_fails_leaves_nobody_without_an_answer(break_part: Callable[[Rig], None]) -> None:
    rig = make_rig(num_slots=2)
    break_part(rig)
    ended = rig.submit(make_request(1, max_tokens=2))
    others = [rig.submit(make_request(i, max_tokens=50)) for i in (2, 3)]
    run_out(rig)
    assert ended.last.finish_reason == "length"
    for answer in others:
        assert_answered_once(answer, FailureKind.FATAL)
        assert "planted release failure" in answer.last.error.message  # type: ignore[union-attr]
    assert not rig.executor.is_healthy
    assert "planted" in str(rig.executor.fatal_error)
    rig.executor.shutdown()
    assert rig.cache.is_shut_down


def test_a_request_whose_callback_and_release_both_fail_leaves_the_rest_their_answers() -> None:
    rig = make_rig()
    refuse_to_free(rig, 0)

    def leave(response: ExecutorResponse) -> None:
        raise OSError("planted callback failure")

    rig.executor.submit(make_request(0), leave)
    ended, cut = rig.submit(make_request(1, max_tokens=1)), rig.submit(make_request(2))
    run_out(rig)
    assert ended.last.finish_reason == "length"
    assert_answered_once(cut, FailureKind.FATAL)
    rig.executor.shutdown()
    assert rig.cache.is_shut_down


def test_a_callback_may_shut_the_executor_down() -> None:
    rig = make_rig(num_slots=2)
    others = [rig.submit(make_request(1, max_tokens=200))]
    seen: list[ExecutorResponse] = []

    def stop(response: ExecutorResponse) -> None:
        seen.append(response)
        rig.executor.shutdown()

    rig.executor.submit(make_request(0, max_tokens=2), stop)
    others.append(rig.submit(make_request(2)))
    run_out(rig)
    assert rig.cache.is_shut_down
    assert seen[-1].is_final
    for answer in others:
        assert_answered_once(answer, FailureKind.SHUTDOWN)
    with pytest.raises(ExecutorUnhealthyError, match="shut down"):
        rig.executor.submit(make_request(9), stop)
    rig.executor.shutdown()
    assert rig.executor.fatal_error is None


def test_a_callback_may_shut_the_executor_down_while_it_fails() -> None:
    rig = make_rig()
    rig.model.fail_on_forward = 1
    rig.executor.submit(make_request(0), lambda response: rig.executor.shutdown() if response.error else None)
    other = rig.submit(make_request(1))
    run_out(rig)
    assert_answered_once(other, FailureKind.FATAL)
    assert rig.cache.is_shut_down


def test_a_cancellation_that_comes_too_late_spares_the_next_request_of_its_id() -> None:
    rig = make_rig()
    forward = rig.executor._engine.forward

    def cancel_meanwhile(batch: ScheduledRequests) -> object:
        rig.executor.cancel(5)
        return forward(batch)

    rig.executor._engine.forward = cancel_meanwhile  # type: ignore[assignment,method-assign]
    first = rig.submit(make_request(5, max_tokens=1))
    rig.run()
    assert first.last.finish_reason == "length"
    rig.executor._engine.forward = forward  # type: ignore[method-assign]
    second = rig.submit(make_request(5, max_tokens=4))
    rig.run()
    assert (second.last.finish_reason, len(second.token_ids)) == ("length", 4)


def test_the_inbox_keeps_the_cancellations_of_open_requests() -> None:
    inbox = Inbox()
    for i in (3, 1, 2):
        request = LlmRequest.admit(make_request(i), max_seq_len=400, seed=0, arrival=0.0)
        inbox.submit(Submission(request, Collected().responses.append))
    for i in (3, 1, 3, 7):
        inbox.cancel(i)
    inbox.release(1)
    mail = inbox.take()
    assert [submission.request.py_request_id for submission in mail.submissions] == [3, 1, 2]
    assert mail.cancelled_ids == [3]
    assert inbox.take().cancelled_ids == []
