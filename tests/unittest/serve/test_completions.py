# SPDX-License-Identifier: Apache-2.0
"""/v1/completions, with OpenAI's own client."""

import json

import openai
import pytest

from tests.unittest.executor_api.toy_tokenizer import EOS_TEXT, toy_tokenizer
from tests.unittest.serve.conftest import ServeCall, Served

TOKENIZER = toy_tokenizer()
TEXT = "x€ def"
NUM_TOKENS = len(TOKENIZER.encode(TEXT)) + 1


def test_whole_answer(served: Served) -> None:
    answer = served.openai.completions.create(model="toy", prompt="ab")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "toy"
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, TEXT, "stop")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        2,
        NUM_TOKENS,
        2 + NUM_TOKENS,
    )
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == answer.id


def test_stream_is_deltas_with_one_end(served: Served) -> None:
    chunks = list(served.openai.completions.create(model="toy", prompt="ab", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_on_the_wire(served: Served) -> None:
    body = {"model": "toy", "prompt": "ab", "stream": True, "stream_options": {"include_usage": True}}
    response = served.http.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"].startswith("cmpl-")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
    assert all("usage" not in chunk for chunk in chunks[:-1])
    # A chunk per run of tokens, also where it completes no character.
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["x", "", "€ ", "def", ""]
    assert "logprobs" not in chunks[0]["choices"][0]


def test_usage_on_every_chunk_when_asked(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        served.openai.completions.create(model="toy", prompt="ab", stream=True, stream_options=options)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[-1] == NUM_TOKENS


@pytest.mark.parametrize(
    ("prompt", "num_prompts", "num_tokens"),
    [("ab", 1, 2), (["ab", "c"], 2, 3), ([65, 66], 1, 2), ([[65], [66, 67]], 2, 3)],
)
@pytest.mark.parametrize("streams", [False, True])
def test_forms_of_prompts_and_several_choices(
    served: Served, prompt: object, num_prompts: int, num_tokens: int, streams: bool
) -> None:
    if streams:
        texts = [""] * (2 * num_prompts)
        options = {"include_usage": True}
        for chunk in served.openai.completions.create(
            model="toy", prompt=prompt, n=2, stream=True, stream_options=options
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = served.openai.completions.create(model="toy", prompt=prompt, n=2)
        texts, usage = [choice.text for choice in answer.choices], answer.usage
        assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    assert texts == [TEXT] * (2 * num_prompts)
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_tokens, 2 * num_prompts * NUM_TOKENS)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("prompt", ["ab", ["c", "d"], TOKENIZER.encode("ab")])
def test_echo_puts_the_prompt_first(served: Served, prompt: object, streams: bool) -> None:
    expected = ["ab" + TEXT] if prompt != ["c", "d"] else ["c" + TEXT, "d" + TEXT]
    if streams:
        texts = [""] * len(expected)
        for chunk in served.openai.completions.create(model="toy", prompt=prompt, echo=True, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = served.openai.completions.create(model="toy", prompt=prompt, echo=True)
        texts = [choice.text for choice in answer.choices]
    assert texts == expected


def test_what_reaches_the_engine(serving: ServeCall) -> None:
    served = serving()
    served.openai.completions.create(model="toy", prompt="a")
    served.openai.completions.create(
        model="toy", prompt="a", temperature=0, max_tokens=5, seed=3,
        logit_bias={"65": -9}, presence_penalty=1,
        extra_body={"top_k": 7, "min_p": 0.5, "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True},
    )  # fmt: skip
    default, given = served.engine.requests
    assert (default.sampling.temperature, default.sampling.top_p, default.max_tokens) == (1.0, 1.0, 16)
    assert not default.sampling.is_greedy and given.sampling.is_greedy
    assert (given.max_tokens, given.sampling.seed, given.sampling.logit_bias) == (5, 3, {65: -9})
    assert (given.sampling.top_k, given.sampling.min_p, given.sampling.min_tokens) == (7, 0.5, 1)
    assert (given.stop_token_ids, given.ignore_eos, given.sampling.presence_penalty) == ((9,), True, 1)


def test_nulls_stand_for_absent_fields(served: Served) -> None:
    nulls = {
        "n": None,
        "stop": None,
        "max_tokens": None,
        "temperature": None,
        "logprobs": None,
        "suffix": None,
    }
    response = served.http.post(
        "/v1/completions", json={"model": "toy", "prompt": "a", "stream": None, **nulls}
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("run_lengths", [(1,), (2, 3), (20,)])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_split_over_tokens_and_runs(
    serving: ServeCall, run_lengths: tuple[int, ...], include: bool
) -> None:
    served = serving({"text": "ab STOPped", "run_lengths": run_lengths})
    extra = {"include_stop_str_in_output": include}
    expected = "ab STOP" if include else "ab "
    answer = served.openai.completions.create(model="toy", prompt="a", stop=["STOP"], extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert answer.choices[0].model_extra["stop_reason"] == "STOP"
    assert answer.usage is not None and answer.usage.completion_tokens == len(TOKENIZER.encode("ab STOP"))
    chunks = list(
        served.openai.completions.create(model="toy", prompt="a", stop="STOP", stream=True, extra_body=extra)
    )
    shown = [chunk.choices[0].text for chunk in chunks]
    assert "".join(shown) == expected
    assert all("S" not in text for text in shown[:-1])


def test_length_is_told(served: Served) -> None:
    answer = served.openai.completions.create(model="toy", prompt="a", max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 2


def test_special_tokens_when_asked(served: Served) -> None:
    extra = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    answer = served.openai.completions.create(model="toy", prompt="a", extra_body=extra)
    assert answer.choices[0].text == TEXT + EOS_TEXT


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_of_the_older_form(serving: ServeCall, streams: bool) -> None:
    served = serving({"text": "def x€", "run_lengths": (2,)})
    if streams:
        parts = [
            chunk.choices[0].logprobs
            for chunk in served.openai.completions.create(
                model="toy", prompt="a", logprobs=2, max_tokens=4, stream=True
            )
        ]
    else:
        parts = [
            served.openai.completions.create(model="toy", prompt="a", logprobs=2, max_tokens=4)
            .choices[0]
            .logprobs
        ]
    tokens = [token for part in parts for token in part.tokens]
    assert tokens == ["def", " x", "bytes:\\xe2", "bytes:\\x82"]
    assert [value for part in parts for value in part.token_logprobs] == [-1.5] * 4
    assert [offset for part in parts for offset in part.text_offset] == [0, 3, 5, 15]
    best = [entry for part in parts for entry in part.top_logprobs]
    assert all(entry[token] == -1.5 for token, entry in zip(tokens, best, strict=True))
    assert all(sorted(entry.values()) == [-1.5, -0.5] for entry in best)


def test_a_failed_request_in_a_stream_raises_in_the_client(serving: ServeCall) -> None:
    served = serving({"text": "abc", "failure": _no_capacity()})
    with pytest.raises(openai.APIError, match="no cache capacity"):
        list(served.openai.completions.create(model="toy", prompt="a", stream=True))
    with pytest.raises(openai.InternalServerError, match="no cache capacity") as caught:
        served.openai.completions.create(model="toy", prompt="a")
    assert (caught.value.status_code, caught.value.type, caught.value.code) == (
        503,
        "server_error",
        "capacity",
    )
    served.engine.failure = None
    assert served.openai.completions.create(model="toy", prompt="a").choices[0].text == "abc"


def test_one_failure_of_several_prompts_ends_the_stream(serving: ServeCall) -> None:
    served = serving({"text": "abc", "failure": _no_capacity()})
    with pytest.raises(openai.APIError, match="no cache capacity"):
        list(served.openai.completions.create(model="toy", prompt=["a", "b", "c"], stream=True))
    served.engine.wait_for(lambda engine: engine.num_open == 0)


def _no_capacity() -> object:
    from tensorrt_llm._torch.pyexecutor.llm_request import FailureKind, RequestFailure

    return RequestFailure(kind=FailureKind.CAPACITY, message="no cache capacity")
