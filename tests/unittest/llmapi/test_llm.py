# SPDX-License-Identifier: Apache-2.0
"""`LLM` around a scripted engine."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm._torch.pyexecutor.llm_request import FailureKind, RequestFailure
from tensorrt_llm.llmapi import RequestError, RequestOutput
from tests.unittest.executor_api.fake_engine import PATIENCE_S, FakeEngine, fake_description
from tests.unittest.executor_api.toy_tokenizer import EOS_TEXT, eos_id, toy_tokenizer

TOKENIZER = toy_tokenizer()
EOS = eos_id(TOKENIZER)


def build(**script: Any) -> tuple[FakeEngine, LLM]:
    engine = FakeEngine(TOKENIZER, end_id=EOS, **script)
    return engine, LLM.from_engine(engine, TOKENIZER, end_ids=(EOS,))


@pytest.fixture
def llm() -> Iterator[LLM]:
    _, llm = build(text="def x")
    with llm:
        yield llm


def test_text_ids_and_reason_of_a_prompt(llm: LLM) -> None:
    output = llm.generate("ab")
    assert isinstance(output, RequestOutput) and output.finished
    assert (output.prompt, output.prompt_token_ids) == ("ab", TOKENIZER.encode("ab"))
    (choice,) = output.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("def x", "stop", None)
    assert choice.token_ids == [*TOKENIZER.encode("def x"), EOS]
    assert choice.length == len(choice.token_ids)


@pytest.mark.parametrize("prompt", ["ab", {"prompt": "ab"}, {"prompt_token_ids": TOKENIZER.encode("ab")}])
def test_forms_of_a_prompt(llm: LLM, prompt: Any) -> None:
    assert llm.generate(prompt).prompt_token_ids == TOKENIZER.encode("ab")
    assert llm.generate(TOKENIZER.encode("ab")).prompt_token_ids == TOKENIZER.encode("ab")


def test_several_prompts_come_back_in_order(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    outputs = llm.generate(["a", "bb"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["a", "bb"]
    assert [output.outputs[0].length for output in outputs] == [1, 2]
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("", ValueError, "no tokens"),
        (3, TypeError, "not int|iterable"),
        ([1.5], TypeError, "text, token ids"),
        ({"prompt": "a", "x": 1}, TypeError, "prompt_token_ids"),
        ("a" * 64, ValueError, "64 tokens; max_seq_len=64"),
    ],
)
def test_prompts_that_cannot_run_are_refused_and_the_next_one_runs(
    llm: LLM, prompt: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        llm.generate(prompt)
    assert llm.generate("ab").outputs[0].text == "def x"


def test_parameters_that_do_not_fit_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n=5: at most max_batch_size=4"):
        llm.generate("a", SamplingParams(n=5))
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_one_refused_prompt_aborts_the_others() -> None:
    engine, llm = build(gated=True)
    with pytest.raises(ValueError, match="64 tokens"):
        llm.generate(["a", "b" * 64], use_tqdm=False)
    engine.wait_for(lambda fake: fake.num_open == 0)
    assert len(engine.cancelled_ids) == 1


def test_what_the_engine_is_asked(llm: LLM) -> None:
    engine, llm = build()
    params = SamplingParams(
        n=2, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1, seed=2**63 - 1, min_tokens=2, logprobs=3,
        stop_token_ids=[7], bad_token_ids=[9], logit_bias={3: 1.5}, presence_penalty=0.5, max_tokens=None,
    )  # fmt: skip
    llm.generate("ab", params)
    first, second = engine.requests
    spec = first.sampling
    assert (spec.temperature, spec.top_k, spec.top_p, spec.min_p) == (0.5, None, 0.9, 0.1)
    assert (spec.seed, second.sampling.seed) == (2**63 - 1, 0)
    assert spec.logit_bias == {3: 1.5, 9: -1e9}
    assert (spec.min_tokens, spec.num_logprobs, spec.presence_penalty) == (2, 3, 0.5)
    assert (first.end_id, first.stop_token_ids, first.max_tokens) == (EOS, (7,), 64)


def test_several_end_tokens_and_how_to_change_them() -> None:
    engine = FakeEngine(TOKENIZER, text="ab", end_id=EOS)
    llm = LLM.from_engine(engine, TOKENIZER, end_ids=(EOS, 5))
    for params in (SamplingParams(), SamplingParams(end_id=-1), SamplingParams(ignore_eos=True)):
        llm.generate("a", SamplingParams(max_tokens=2) if params is None else params)
    asked = [(request.end_id, request.stop_token_ids, request.ignore_eos) for request in engine.requests]
    assert asked == [(EOS, (5,), False), (None, (), False), (EOS, (), True)]


def test_prompt_is_truncated_from_the_left(llm: LLM) -> None:
    output = llm.generate("abcd", SamplingParams(truncate_prompt_tokens=2))
    assert output.prompt_token_ids == TOKENIZER.encode("cd")


@pytest.mark.parametrize("run_lengths", [(1,), (2,), (3, 1, 4), (9,)])
def test_streaming_gives_deltas_that_join_to_the_whole(run_lengths: tuple[int, ...]) -> None:
    _, llm = build(text="x€ STOPped€", run_lengths=run_lengths)
    whole = llm.generate("a").outputs[0]
    texts, ids = [], []
    for output in llm.generate_async("a", streaming=True):
        texts.append(output.outputs[0].text_diff)
        ids.extend(output.outputs[0].token_ids_diff)
    assert "".join(texts) == whole.text == "x€ STOPped€"
    assert ids == whole.token_ids


@pytest.mark.parametrize("run_lengths", [(1,), (2,), (3, 1, 4), (20,)])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_text_and_ids_at_one_token(run_lengths: tuple[int, ...], include: bool) -> None:
    _, llm = build(text="ab STOPped", run_lengths=run_lengths)
    params = SamplingParams(stop=["STOP", "never"], include_stop_str_in_output=include)
    shown = ""
    for output in llm.generate_async("a", params, streaming=True):
        choice = output.outputs[0]
        shown += choice.text_diff
        assert "ab STOP".startswith(shown)
        assert "S" not in shown or choice.finish_reason == "stop"
    assert shown == choice.text == ("ab STOP" if include else "ab ")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "STOP")
    assert choice.token_ids == TOKENIZER.encode("ab STOP")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token_is_the_last_id_and_not_in_the_text(include: bool, text: str) -> None:
    _, llm = build(text="abc")
    (stop_id,) = TOKENIZER.encode("b")
    params = SamplingParams(stop_token_ids=[stop_id], include_stop_str_in_output=include)
    choice = llm.generate("a", params).outputs[0]
    assert (choice.text, choice.token_ids[-1], choice.stop_reason) == (text, stop_id, stop_id)


def test_length_ends_with_everything_held_back() -> None:
    _, llm = build(text="a STOP")
    choice = llm.generate("a", SamplingParams(stop="STOP!", max_tokens=4)).outputs[0]
    assert (choice.text, choice.finish_reason, choice.length) == ("a STOP", "length", 4)


def test_special_tokens_are_shown_when_asked() -> None:
    _, llm = build(text="a")
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert llm.generate("a", params).outputs[0].text == f"a{EOS_TEXT}"


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    llm = LLM.from_engine(FakeEngine(TOKENIZER, text="ab", end_id=EOS), None, end_ids=(EOS,))
    choice = llm.generate([1, 2]).outputs[0]
    assert (choice.text, choice.token_ids) == ("", [*TOKENIZER.encode("ab"), EOS])
    with pytest.raises(ValueError, match="give token ids"):
        llm.generate("ab")
    with pytest.raises(ValueError, match="use stop_token_ids"):
        llm.generate([1], SamplingParams(stop="x"))


def test_detokenize_off_leaves_text_empty(llm: LLM) -> None:
    assert llm.generate("a", SamplingParams(detokenize=False)).outputs[0].text == ""


def test_logprobs_name_the_sampled_token_first(llm: LLM) -> None:
    choice = llm.generate("a", SamplingParams(logprobs=3, max_tokens=2)).outputs[0]
    assert len(choice.logprobs) == 2
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert list(entry) == [token_id, token_id - 1, token_id + 1]
        assert (entry[token_id].logprob, entry[token_id].rank) == (-1.5, 2)
    assert choice.cumulative_logprob == -3.0


def test_choices_stream_side_by_side() -> None:
    _, llm = build(text="abc")
    texts = ["", ""]
    for output in llm.generate_async("a", SamplingParams(n=2), streaming=True):
        assert sum(bool(choice.token_ids_diff) for choice in output.outputs) == 1
        for choice in output.outputs:
            texts[choice.index] += choice.text_diff
    assert texts == ["abc", "abc"]


def test_awaiting_and_async_iteration() -> None:
    _, llm = build(text="abc")

    async def run() -> tuple[str, list[str], int]:
        awaited = (await llm.generate_async("a")).outputs[0].text
        streamed = [o.outputs[0].text_diff async for o in llm.generate_async("a", streaming=True)]
        whole = [o async for o in llm.generate_async("a")]
        return awaited, streamed, len(whole)

    assert asyncio.run(run()) == ("abc", ["a", "b", "c", ""], 1)


def test_abort_keeps_what_there_is() -> None:
    engine, llm = build(text="abcdef", gated=True)
    engine.release(2)
    output = llm.generate_async("a", streaming=True)
    steps = iter(output)
    next(steps), next(steps)
    output.abort()
    output.result(PATIENCE_S)
    assert output.aborted() and output.finished
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "cancelled")


def test_failed_request_raises_and_others_go_on() -> None:
    failure = RequestFailure(kind=FailureKind.CAPACITY, message="no cache capacity")
    engine, llm = build(failure=failure)
    with pytest.raises(RequestError, match="no cache capacity") as caught:
        llm.generate("a")
    assert caught.value.kind is FailureKind.CAPACITY
    engine.failure = None
    assert llm.generate("a").outputs[0].text == "def x"


def test_fatal_error_answers_everyone_and_shows() -> None:
    engine, llm = build(gated=True)
    output = llm.generate_async("a")
    assert llm.is_healthy
    engine.die(ArithmeticError("boom"))
    with pytest.raises(RequestError, match="boom"):
        output.result(PATIENCE_S)
    assert not llm.is_healthy and isinstance(llm.fatal_error, ArithmeticError)


def test_shutdown_ends_what_runs_and_refuses_what_comes() -> None:
    engine, llm = build(gated=True)
    with llm:
        output = llm.generate_async("a")
    assert engine.is_shut_down and not llm.is_healthy
    with pytest.raises(RequestError, match="shut down") as caught:
        output.result(PATIENCE_S)
    assert caught.value.kind is FailureKind.SHUTDOWN
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("a")
    llm.shutdown()


def test_a_forgotten_llm_stops_its_engine() -> None:
    engine, llm = build()
    del llm
    assert engine.is_shut_down


def test_result_waits_only_so_long() -> None:
    engine, llm = build(gated=True)
    output = llm.generate_async("a")
    with pytest.raises(TimeoutError):
        output.result(0)
    engine.release(100)
    assert output.result(PATIENCE_S).finished


def test_statistics_drain_and_gauges_do_not() -> None:
    engine, llm = build()
    engine.stats = [{"iter": 1}, {"iter": 2}]

    async def read() -> list[dict[str, object]]:
        return [stats async for stats in llm.get_stats_async()]

    assert llm.snapshot() == llm.snapshot()
    assert asyncio.run(read()) == [{"iter": 1}, {"iter": 2}]
    assert llm.get_stats() == []
    assert llm.description == fake_description()


def test_counters_of_a_request(llm: LLM) -> None:
    _, llm = build(text="abcd", run_lengths=(2,))
    metrics = llm.generate("a", SamplingParams(max_tokens=4)).outputs[0].request_perf_metrics
    assert metrics is not None
    assert (metrics.decode_iterations, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (2, 2, 2)
    assert metrics.timestamps.arrival == 1.0
