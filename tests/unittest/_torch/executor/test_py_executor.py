# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Iterable, Sized
from dataclasses import replace

import pytest

from tensorrt_llm._torch.pyexecutor.inbox import ExecutorUnhealthyError
from tensorrt_llm._torch.pyexecutor.llm_request import ExecutorResponse, FailureKind, SamplingSpec
from tensorrt_llm._torch.pyexecutor.model_engine import ModelEngine
from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tensorrt_llm._torch.speculative.create import create_drafter
from tensorrt_llm._torch.speculative.interface import SpeculationSpec
from tensorrt_llm._torch.speculative.ngram import NGramDrafter
from tests.unittest._torch.executor.fakes import (
    Collected,
    Rig,
    ScriptedDrafter,
    make_request,
    make_rig,
)


class StopOn:
    """A stop checker that finds "stop" when the last tokens are these."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)
        self.seen: list[int] = []

    def push(self, token_id: int) -> str | None:
        self.seen.append(token_id)
        return "stop" if self.seen[-len(self._tokens) :] == self._tokens else None


def speculation(max_draft_len: int, **more: object) -> SpeculationSpec:
    return SpeculationSpec(decoding_type="NGram", max_draft_len=max_draft_len, **more)  # type: ignore[arg-type]


def scripted_rig(texts: dict[int, list[int]], script: list[tuple[int, int]], **more: int) -> Rig:
    return make_rig(spec=speculation(7), drafter=ScriptedDrafter(texts, script), **more)  # type: ignore[arg-type]


def plain_texts(requests: Iterable[object], **limits: int) -> dict[int, list[int]]:
    rig = make_rig(**limits)  # type: ignore[arg-type]
    for request in requests:
        rig.submit(request)  # type: ignore[arg-type]
    return rig.run()


def test_text_does_not_depend_on_company_or_chunks() -> None:
    requests = [make_request(i, prompt_len=1 + 37 * i, max_tokens=9 + i) for i in range(8)]
    together = plain_texts(requests)
    alone = {request.request_id: plain_texts([request])[request.request_id] for request in requests}
    in_pieces = plain_texts(requests, max_num_tokens=70, num_slots=3)
    assert together == alone == in_pieces
    assert [len(together[i]) for i in range(8)] == [9 + i for i in range(8)]


def test_chunks_stop_at_snapshot_points() -> None:
    requests = [make_request(i, prompt_len=300, max_tokens=4) for i in range(2)]
    rig = make_rig()
    rig.cache.snapshot_interval = 128
    for request in requests:
        rig.submit(request)
    for _ in range(2):
        rig.step()
        assert rig.answers[0].responses == []
    assert rig.run() == plain_texts(requests)
    assert rig.executor.get_stats()[0]["scheduledSumPrefillTokens"] == 256


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("max_draft_len", [1, 3, 5, 7])
@pytest.mark.parametrize("cost", [0.0, 0.1])
def test_ngram_drafts_change_no_text(max_draft_len: int, batch: int, cost: float) -> None:
    spec = speculation(max_draft_len, round_cost_per_token=cost)
    requests = [make_request(i, prompt_len=30 + i, max_tokens=120) for i in range(batch)]
    rig = make_rig(spec=spec, drafter=create_drafter(spec, "cpu"))
    for request in requests:
        rig.submit(request)
    assert rig.run() == plain_texts(requests)
    assert rig.executor.snapshot().accepted_tokens_total > 0, "the drafts never mattered"


@pytest.mark.parametrize("accepted", range(8))
def test_every_acceptance_length_leaves_the_text(accepted: int) -> None:
    requests = [make_request(i, prompt_len=20 + i, max_tokens=80) for i in range(3)]
    texts = plain_texts(requests)
    rig = scripted_rig(texts, [(7, accepted)])
    for request in requests:
        rig.submit(request)
    assert rig.run() == texts
    snapshot = rig.executor.snapshot()
    assert snapshot.accepted_by_position[:accepted] == snapshot.drafted_by_position[:accepted]
    assert sum(snapshot.accepted_by_position[accepted:]) == 0


def test_five_hundred_tokens_with_every_draft_rejected() -> None:
    request = make_request(prompt_len=10, max_tokens=500)
    texts = plain_texts([request], max_seq_len=600)
    rig = scripted_rig(texts, [(7, 0)], max_seq_len=600)
    answer = rig.submit(request)
    assert rig.run() == texts
    assert answer.last.num_accepted_tokens == 0
    assert answer.last.num_draft_tokens > 3400
    assert answer.last.decode_iterations == 500


def test_rounds_of_changing_length_run_in_groups() -> None:
    script = [(7, 7), (3, 1), (0, 0), (5, 5), (1, 0), (7, 3)]
    requests = [make_request(i, prompt_len=20, max_tokens=90 - 3 * i) for i in range(4)]
    texts = plain_texts(requests)
    rig = scripted_rig(texts, script)
    rig.submit(requests[0])
    rig.step()
    for request in requests[1:]:
        rig.submit(request)
    assert rig.run() == texts
    sizes = set(rig.model.group_sizes)
    assert any(len(groups) > 1 for groups in sizes)
    assert {size for groups in sizes for size in groups} >= {1, 2, 4, 6, 8}
    assert all(list(groups) == sorted(set(groups)) for groups in sizes), "equal lengths belong in one group"


SAMPLED = SamplingSpec(
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    seed=123,
    min_tokens=15,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    logit_bias={4: 1.5, 7: -3.0},
    num_logprobs=2,
)


@pytest.mark.parametrize(
    "script", [[(7, 7)], [(7, 0)], [(7, 3), (0, 0), (5, 5), (1, 1)]], ids=["all", "none", "mixed"]
)
def test_sampled_text_and_logprobs_do_not_depend_on_drafts(script: list[tuple[int, int]]) -> None:
    requests = [make_request(i, prompt_len=12, max_tokens=70, sampling=SAMPLED, end_id=9) for i in range(3)]
    plain = make_rig()
    expected = [plain.submit(request) for request in requests]
    texts = plain.run()
    rig = scripted_rig(texts, script)
    answers = [rig.submit(request) for request in requests]
    assert rig.run() == texts
    for answer, other in zip(answers, expected, strict=True):
        assert logprobs_of(answer) == logprobs_of(other)
        assert len(logprobs_of(answer)) == len(answer.token_ids) >= 15


def logprobs_of(answer: Collected) -> list[object]:
    return [entry for response in answer.responses for entry in response.logprobs]


def test_unseeded_requests_differ_and_seeded_ones_repeat() -> None:
    free = SamplingSpec(temperature=1.5)
    seeded = SamplingSpec(temperature=1.5, seed=7)
    prompt = (1, 2, 3)
    rig = make_rig()
    for i, sampling in enumerate([free, free, seeded, seeded]):
        request = make_request(i, max_tokens=30, sampling=sampling)
        rig.submit(type(request)(request_id=i, prompt_token_ids=prompt, max_tokens=30, sampling=sampling))
    texts = rig.run()
    assert texts[0] != texts[1]
    assert texts[2] == texts[3]


@pytest.mark.parametrize("script", [[(0, 0)], [(7, 7)], [(7, 2), (5, 5)]], ids=["plain", "all", "some"])
@pytest.mark.parametrize("offset", range(8))
def test_ends_inside_a_round_are_trimmed(offset: int, script: list[tuple[int, int]]) -> None:
    """End token, stop token, stop string and max_tokens, at every place of a round of eight."""
    base = make_request(prompt_len=11, max_tokens=60)
    text = plain_texts([base])[0]
    end = first_new_token(text, 20 + offset)
    for name in ("end_id", "stop_token_ids", "stop", "max_tokens"):
        stop = StopOn(text[end])
        changes: dict[str, object] = {
            "end_id": {"end_id": text[end]},
            "stop_token_ids": {"stop_token_ids": (text[end],)},
            "stop": {"stop": stop},
            "max_tokens": {"max_tokens": end + 1},
        }[name]
        rig = scripted_rig({0: text}, script)
        logged = SamplingSpec(num_logprobs=0)
        answer = rig.submit(
            make_request(**{"prompt_len": 11, "max_tokens": 60, "sampling": logged, **changes})  # type: ignore[arg-type]
        )
        assert rig.run()[0] == text[: end + 1]
        assert len(logprobs_of(answer)) == end + 1
        assert rig.executor.snapshot().generation_tokens_total == end + 1
        rounds = answer.last.decode_iterations - 1
        assert answer.last.num_accepted_tokens + rounds + 1 == end + 1
        assert answer.last.finish_reason == ("length" if name == "max_tokens" else "stop")
        assert (
            answer.last.stop_reason
            == {
                "end_id": None,
                "stop_token_ids": text[end],
                "stop": "stop",
                "max_tokens": None,
            }[name]
        )
        if name == "stop":
            assert stop.seen == text[: end + 1], "the checker saw a token that is not in the output"


def first_new_token(text: list[int], start: int) -> int:
    """The first index from `start` on whose token did not occur before."""
    return next(i for i in range(start, len(text)) if text[i] not in text[:i])


def test_min_tokens_keep_the_end_away() -> None:
    text = plain_texts([make_request(max_tokens=40)])[0]
    end = text[3]
    request = make_request(max_tokens=40, end_id=end, sampling=SamplingSpec(min_tokens=10))
    got = plain_texts([request])[0]
    assert end not in got[:10]
    assert len(got) >= 10


def test_ignored_end_token_stays_in_the_text() -> None:
    text = plain_texts([make_request(max_tokens=40)])[0]
    assert plain_texts([make_request(max_tokens=40, end_id=text[3], ignore_eos=True)])[0] == text


def test_output_stops_at_max_seq_len() -> None:
    rig = make_rig(max_seq_len=50)
    answer = rig.submit(make_request(prompt_len=40, max_tokens=30))
    assert len(rig.run()[0]) == 10
    assert answer.last.finish_reason == "length"


def test_the_rest_waits_for_slots_and_pages() -> None:
    rig = make_rig(num_pages=8, num_slots=3)
    # 3 pages each for life: two at a time by pages, three by slots.
    for i in range(5):
        rig.submit(make_request(i, prompt_len=10, max_tokens=15))
    rig.step()
    assert rig.cache.num_used_slots == 2
    assert rig.executor.snapshot().num_requests_waiting == 3
    texts = rig.run()
    assert texts == plain_texts([make_request(i, prompt_len=10, max_tokens=15) for i in range(5)])


@pytest.mark.parametrize(
    ("limits", "request_changes", "message"),
    [
        ({"max_seq_len": 30}, {"prompt_len": 30}, "max_seq_len=30"),
        (
            {"max_num_tokens": 100, "enable_chunked_prefill": False},
            {"prompt_len": 101},
            "max_num_tokens=100",
        ),
        (
            {"num_pages": 5},
            {"prompt_len": 30, "max_tokens": 20},
            "need 7 cache pages of 8 tokens; there are 5",
        ),
        (
            {},
            {"stop_token_ids": (50,)},
            "stop_token_ids has a token outside the vocabulary, which is 0 to 49",
        ),
        ({}, {"sampling": SamplingSpec(logit_bias={-1: 1.0})}, "logit_bias has a token outside"),
    ],
)
def test_what_can_never_run_is_refused_with_the_limit(
    limits: dict[str, int], request_changes: dict[str, object], message: str
) -> None:
    rig = make_rig(**limits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        rig.executor.submit(make_request(**request_changes), lambda response: None)  # type: ignore[arg-type]
    rig.submit(make_request(1))
    assert len(rig.run()[1]) == 20, "the next good request works"


def test_a_request_exactly_as_large_as_the_cache_runs() -> None:
    rig = make_rig(num_pages=5, spec=speculation(3), drafter=create_drafter(speculation(3), "cpu"))
    rig.submit(make_request(prompt_len=21, max_tokens=20))
    assert len(rig.run()[0]) == 20


def test_an_open_id_is_refused_and_a_finished_one_is_not() -> None:
    rig = make_rig()
    rig.submit(make_request())
    with pytest.raises(ValueError, match="request_id 0 is in use"):
        rig.executor.submit(make_request(), lambda response: None)
    rig.run()
    rig.submit(make_request())
    rig.run()


def kept_of_requests(executor: PyExecutor) -> list[Sized]:
    """What the executor's parts keep by request id, of an executor with an n-gram drafter."""
    engine, drafter = executor._engine, executor._speculator._drafter
    assert isinstance(engine, ModelEngine) and isinstance(drafter, NGramDrafter)
    return [engine._pages, executor._sampler._histories, drafter._readers, executor._open]


@pytest.mark.parametrize("end", ["length", "cancelled", "lost"])
def test_an_id_used_again_finds_nothing_of_the_request_before(end: str) -> None:
    sampling = replace(SAMPLED, min_tokens=0, repetition_penalty=1.3, frequency_penalty=0.4)
    first = make_request(4, prompt_len=60, max_tokens=50, sampling=sampling)
    second = replace(first, prompt_token_ids=make_request(9, prompt_len=41).prompt_token_ids)
    spec = speculation(5, round_cost_per_token=0.0, is_public_pool=False)
    fresh = make_rig(spec=spec, drafter=create_drafter(spec, "cpu"))
    expected = fresh.submit(second)
    fresh.run()

    rig = make_rig(spec=spec, drafter=create_drafter(spec, "cpu"))
    client = LeavingClient()
    rig.executor.submit(first, client)
    for _ in range(5):
        rig.step()
    assert all(len(kept) == 1 for kept in kept_of_requests(rig.executor)), "the test sees what is kept"
    if end == "cancelled":
        rig.executor.cancel(4)
    client.has_left = end == "lost"
    rig.run()
    assert all(len(kept) == 0 for kept in kept_of_requests(rig.executor))
    again = rig.submit(second)
    rig.run()
    assert again.token_ids == expected.token_ids
    assert logprobs_of(again) == logprobs_of(expected)
    assert again.last.num_draft_tokens == expected.last.num_draft_tokens > 0
    assert all(len(kept) == 0 for kept in kept_of_requests(rig.executor))


class LeavingClient:
    """A callback that raises once its client has left."""

    def __init__(self) -> None:
        self.has_left = False

    def __call__(self, response: ExecutorResponse) -> None:
        if self.has_left:
            raise OSError("planted callback failure")


def test_no_capacity_while_nothing_runs_is_answered() -> None:
    rig = make_rig()
    rig.cache.refuse = lambda req: req.py_request_id == 0
    failed, served = rig.submit(make_request(0)), rig.submit(make_request(1))
    rig.run()
    assert failed.last.error is not None
    assert failed.last.error.kind is FailureKind.CAPACITY
    assert served.last.finish_reason == "length"


def test_running_requests_that_cannot_grow_give_way_one_by_one() -> None:
    rig = make_rig()
    answers = [rig.submit(make_request(i, max_tokens=30)) for i in range(3)]
    for _ in range(4):
        rig.step()
    allowed = 2
    rig.cache.refuse = lambda req: rig.cache.num_used_slots > allowed
    rig.run()
    assert [answer.last.error is None for answer in answers] == [True, True, False]
    assert answers[2].last.error is not None
    assert answers[2].last.error.kind is FailureKind.CAPACITY


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_at_any_point_returns_slot_and_pages(steps: int) -> None:
    spec = speculation(3, round_cost_per_token=0.0)
    rig = make_rig(spec=spec, drafter=create_drafter(spec, "cpu"), num_slots=2, max_num_tokens=70)
    others = [make_request(i, prompt_len=100, max_tokens=25) for i in (1, 2)]
    answer = rig.submit(make_request(0, prompt_len=150, max_tokens=40))
    for request in others:
        rig.submit(request)
    for _ in range(steps):
        rig.step()
    rig.executor.cancel(0)
    rig.executor.cancel(0)
    rig.executor.cancel(99)
    texts = rig.run()
    assert answer.last.finish_reason == "cancelled"
    assert {i: texts[i] for i in (1, 2)} == plain_texts(others)
    rig.executor.cancel(0)
    rig.step()
    assert [response.is_final for response in answer.responses].count(True) == 1


def test_cancelling_a_waiting_request() -> None:
    rig = make_rig(num_slots=1)
    rig.submit(make_request(0))
    waiting = rig.submit(make_request(1))
    rig.step()
    rig.executor.cancel(1)
    rig.run()
    assert waiting.last.finish_reason == "cancelled"
    assert waiting.token_ids == []


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    requests = [make_request(0, prompt_len=30, max_tokens=10), make_request(1, prompt_len=5, max_tokens=20)]
    rig = make_rig()
    rig.model.nan_positions = {33}
    failed, served = (rig.submit(request) for request in requests)
    rig.run()
    assert failed.last.error is not None
    assert failed.last.error.kind is FailureKind.REQUEST
    assert "no finite logits at position 34" in failed.last.error.message
    assert served.token_ids == plain_texts(requests)[1]


def test_a_raising_stop_checker_fails_its_request_only() -> None:
    class Broken:
        def push(self, token_id: int) -> str | None:
            raise KeyError("planted")

    rig = make_rig()
    failed, served = rig.submit(make_request(0, stop=Broken())), rig.submit(make_request(1))
    rig.run()
    assert failed.last.error is not None
    assert failed.last.error.kind is FailureKind.REQUEST
    assert served.last.finish_reason == "length"


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_raising_callback_drops_its_request_only(at: str) -> None:
    def callback(response: ExecutorResponse) -> None:
        if at == "first" or response.is_final:
            raise OSError("planted")

    rig = make_rig()
    rig.executor.submit(make_request(0), callback)
    served = rig.submit(make_request(1))
    rig.run()
    assert served.last.finish_reason == "length"


def test_a_raising_drafter_fails_its_request_only() -> None:
    class Broken(ScriptedDrafter):
        def propose(self, request: object, max_draft_len: int, num_generating: int) -> list[int]:
            if request.py_request_id == 0:  # type: ignore[attr-defined]
                return [1000]
            return []

    rig = make_rig(spec=speculation(3), drafter=Broken({}, [(1, 1)]))
    failed, served = rig.submit(make_request(0)), rig.submit(make_request(1))
    rig.run()
    assert failed.last.error is not None
    assert "the drafter proposed [1000]" in failed.last.error.message
    assert served.last.finish_reason == "length"


def test_forced_acceptance_takes_the_drafters_word() -> None:
    requests = [make_request(prompt_len=20, max_tokens=61)]
    texts = plain_texts(requests)
    spec = speculation(7)
    rig = make_rig(spec=spec, drafter=ScriptedDrafter(texts, [(7, 0)]), forced_mean=2.5)
    answer = rig.submit(requests[0])
    rig.run()
    rounds = answer.last.decode_iterations - 1
    assert answer.last.num_accepted_tokens == pytest.approx(2.5 * rounds, abs=2)
    assert len(answer.token_ids) == 61


def test_a_closed_gate_ends_drafting_for_good() -> None:
    requests = [make_request(prompt_len=20, max_tokens=60)]
    texts = plain_texts(requests)
    spec = speculation(7, acceptance_rate_window_size=4, acceptance_rate_threshold=0.5)
    rig = make_rig(spec=spec, drafter=ScriptedDrafter(texts, [(7, 1)]))
    answer = rig.submit(requests[0])
    assert rig.run() == texts
    assert answer.last.num_draft_tokens == 4 * 7


def test_counters_and_gauges() -> None:
    requests = [make_request(i, prompt_len=20 + i, max_tokens=30) for i in range(2)]
    texts = plain_texts(requests)
    rig = scripted_rig(texts, [(7, 3), (0, 0)])
    answers = [rig.submit(request) for request in requests]
    assert rig.executor.snapshot().num_requests_waiting == 2
    rig.step()
    snapshot = rig.executor.snapshot()
    assert (snapshot.num_requests_running, snapshot.num_requests_waiting) == (2, 0)
    assert (snapshot.used_pages, snapshot.max_pages, snapshot.tokens_per_page) == (6, 400, 8)
    rig.run()
    snapshot = rig.executor.snapshot()
    assert (snapshot.num_requests_running, snapshot.used_pages) == (0, 0)
    assert (snapshot.prompt_tokens_total, snapshot.generation_tokens_total) == (41, 60)
    assert snapshot.draft_tokens_total == sum(a.last.num_draft_tokens for a in answers)
    assert snapshot.accepted_tokens_total == sum(a.last.num_accepted_tokens for a in answers)
    assert sum(snapshot.drafted_by_position) == snapshot.draft_tokens_total
    assert sum(snapshot.accepted_by_position) == snapshot.accepted_tokens_total
    assert snapshot.acceptance_length == 1 + snapshot.accepted_tokens_total / snapshot.drafted_rounds_total
    times = answers[0].last.timestamps
    assert (
        times.first_scheduled is not None and times.first_token is not None and times.last_token is not None
    )
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.last_token


class Waiter(Collected):
    """Collects on the loop's thread; `wait` blocks the test until the end came."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()

    def __call__(self, response: ExecutorResponse) -> None:
        self.responses.append(response)
        if response.is_final:
            self._done.set()

    def wait(self) -> None:
        assert self._done.wait(timeout=60), "no final response"


def test_the_thread_serves_cancels_and_stops() -> None:
    rig = make_rig()
    rig.executor.start()
    requests = [make_request(i, prompt_len=20, max_tokens=30) for i in range(12)]
    waiters = [Waiter() for _ in requests]
    for request, waiter in zip(requests, waiters, strict=True):
        rig.executor.submit(request, waiter)
    for waiter in waiters:
        waiter.wait()
    snapshot = rig.executor.snapshot()
    assert (snapshot.num_requests_running, snapshot.used_pages) == (0, 0), "answered before it was counted"
    assert snapshot.num_requests_completed_total == 12
    assert {i: waiter.token_ids for i, waiter in enumerate(waiters)} == plain_texts(requests)
    assert rig.executor.is_healthy
    long, cut = Waiter(), Waiter()
    rig.executor.submit(make_request(50, max_tokens=390), long)
    rig.executor.cancel(50)
    long.wait()
    assert long.last.finish_reason == "cancelled"
    rig.executor.submit(make_request(51, max_tokens=390), cut)
    rig.executor.shutdown()
    cut.wait()
    assert cut.last.error is not None
    assert cut.last.error.kind is FailureKind.SHUTDOWN
    assert rig.cache.is_shut_down
    with pytest.raises(ExecutorUnhealthyError, match="shut down"):
        rig.executor.submit(make_request(52), cut)
    rig.executor.shutdown()


def test_a_cancellation_taken_in_the_step_that_fails_is_still_answered() -> None:
    rig = make_rig()
    rig.model.fail_on_forward = 0
    cancelled, failed = Waiter(), Waiter()
    rig.executor.submit(make_request(0), cancelled)
    rig.executor.submit(make_request(1), failed)
    rig.executor.cancel(0)
    rig.executor.start()
    failed.wait()
    cancelled.wait()
    assert cancelled.last.finish_reason == "cancelled"
    assert failed.last.error is not None
    rig.executor.shutdown()


def test_a_fatal_error_answers_everyone_and_turns_the_executor_unhealthy() -> None:
    rig = make_rig(num_slots=2)
    rig.model.fail_on_forward = 3
    waiters = [Waiter() for _ in range(4)]
    for i, waiter in enumerate(waiters):
        rig.executor.submit(make_request(i, max_tokens=30), waiter)
    rig.executor.start()
    for waiter in waiters:
        waiter.wait()
        assert waiter.last.error is not None
        assert waiter.last.error.kind is FailureKind.FATAL
        assert "planted model failure" in waiter.last.error.message
    assert not rig.executor.is_healthy
    assert "planted" in str(rig.executor.fatal_error)
    with pytest.raises(ExecutorUnhealthyError, match="planted model failure"):
        rig.executor.submit(make_request(9), waiters[0])
    rig.executor.shutdown()
    assert rig.cache.is_shut_down
