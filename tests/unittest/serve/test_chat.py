# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions, with OpenAI's own client."""

from typing import Any

import openai
import pytest

from tests.unittest.executor_api.toy_tokenizer import toy_tokenizer
from tests.unittest.serve.running_server import ServeCall, Served

TOKENIZER = toy_tokenizer()
TEXT = "x€ def"
NUM_TOKENS = len(TOKENIZER.encode(TEXT)) + 1
MESSAGES: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": "ab"}]
ASKED: Any = {"model": "toy", "messages": MESSAGES, "max_tokens": 3}
PROMPT = "s:be|u:ab|a:"


def test_whole_answer(served: Served) -> None:
    answer = served.openai.chat.completions.create(model="toy", messages=MESSAGES)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), NUM_TOKENS)


def test_stream_begins_with_the_role_and_ends_once(served: Served) -> None:
    chunks = list(served.openai.chat.completions.create(model="toy", messages=MESSAGES, stream=True, n=2))
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        first, *middle, last = own
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert all(choice.delta.role is None and choice.finish_reason is None for choice in middle)
        assert "".join(choice.delta.content or "" for choice in middle) == TEXT
        assert (last.delta.content, last.finish_reason) == (None, "stop")


@pytest.mark.parametrize("asks", [False, True])
def test_usage_chunk_only_when_asked(served: Served, asks: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if asks else {}
    chunks = list(
        served.openai.chat.completions.create(model="toy", messages=MESSAGES, stream=True, **options)
    )
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [asks]
    assert (chunks[-1].choices == []) is asks


def test_stream_helper_of_the_client(served: Served) -> None:
    with served.openai.chat.completions.stream(model="toy", messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT


def test_what_the_template_gets(serving: ServeCall) -> None:
    served = serving()
    parts: Any = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    echoed = {"role": "assistant", "content": "hm", "reasoning_content": "echoed back"}
    served.openai.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": parts}, echoed],
        extra_body={"chat_template_kwargs": {"opening": "A>"}},
    )
    served.openai.chat.completions.create(
        model="toy", messages=MESSAGES, extra_body={"add_generation_prompt": False}
    )
    prompts = [TOKENIZER.decode(request.prompt_token_ids) for request in served.engine.requests]
    assert prompts == ["u:cd|a:hm|A>", "s:be|u:ab|"]


def test_defaults_and_limits_that_reach_the_engine(serving: ServeCall) -> None:
    served = serving()
    served.openai.chat.completions.create(model="toy", messages=MESSAGES)
    served.openai.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=3)
    served.openai.chat.completions.create(model="toy", messages=MESSAGES, max_completion_tokens=4)
    limits = [request.max_tokens for request in served.engine.requests]
    assert limits == [served.engine.description.max_seq_len, 3, 4]
    assert served.engine.requests[0].sampling.temperature == 1.0


@pytest.mark.parametrize("top", [None, 0, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_logprobs(serving: ServeCall, top: int | None, streams: bool) -> None:
    served = serving({"text": "def x€", "run_lengths": (2,)})
    asked: Any = {**ASKED, "logprobs": True, "top_logprobs": top}
    if streams:
        chunks = served.openai.chat.completions.create(stream=True, **asked)
        entries = [
            entry
            for chunk in chunks
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content
        ]
    else:
        entries = served.openai.chat.completions.create(**asked).choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["def", " x", "bytes:\\xe2"]
    assert bytes(entries[1].bytes + entries[2].bytes) == b" x\xe2"
    for entry in entries:
        assert entry.logprob == -1.5
        assert [best.logprob for best in entry.top_logprobs] == ([-0.5, -1.5] if top else [])


def test_without_a_template_completions_still_work(serving: ServeCall) -> None:
    served = serving(chat_template=None)
    with pytest.raises(openai.BadRequestError, match="--chat_template"):
        served.openai.chat.completions.create(model="toy", messages=MESSAGES)
    assert served.openai.completions.create(model="toy", prompt="a").choices[0].text == "def x"
