# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client against a real loop with drafts from records, on a model of random weights."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.llmapi import NGramDecodingConfig
from tensorrt_llm.serve.chat_template import ChatTemplate
from tensorrt_llm.serve.openai_server import ServerOptions
from tests.unittest.executor_api.fake_engine import PATIENCE_S
from tests.unittest.executor_api.toy_checkpoint import write_toy_checkpoint
from tests.unittest.serve.running_server import running

EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, device="cpu", max_batch_size=2, max_seq_len=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    llm = LLM(
        checkpoint,
        device="cpu",
        max_batch_size=2,
        max_seq_len=200,
        speculative_config=NGramDecodingConfig(max_draft_len=3, round_cost_per_token=0.0),
    )
    template = ChatTemplate.find(checkpoint)
    with running(llm, ServerOptions(model_names=["toy"], chat_template=template)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def expected(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return llm.generate(prompt, params).outputs[0].text


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 11}])
def test_streamed_text_with_drafts_is_text_without(
    client: openai.OpenAI, plain: LLM, sampling: dict[str, float]
) -> None:
    chunks = client.completions.create(
        model="toy", prompt="def x", max_tokens=50, stream=True, extra_body=EXTRA, **sampling
    )
    top_p = {} if sampling["temperature"] == 0 else {"top_p": 1.0}
    params = SamplingParams(max_tokens=50, ignore_eos=True, **sampling, **top_p)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(plain, "def x", params)


def test_more_clients_than_slots_each_get_their_own_text(client: openai.OpenAI, plain: LLM) -> None:
    prompts = [f"{'ab' * number}#" for number in range(1, 13)]

    def ask(prompt: str) -> str:
        answer = client.completions.create(
            model="toy", prompt=prompt, max_tokens=20, temperature=0, extra_body=EXTRA
        )
        assert answer.usage is not None and answer.usage.completion_tokens == 20
        return answer.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, prompts))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert answers == [expected(plain, prompt, params) for prompt in prompts]


def test_stop_string_in_text_that_was_drafted(client: openai.OpenAI, plain: LLM) -> None:
    whole = expected(plain, "abab" * 8, SamplingParams(max_tokens=60, ignore_eos=True))
    stop = whole[25:28]
    answer = client.completions.create(
        model="toy", prompt="abab" * 8, max_tokens=60, temperature=0, stop=stop, extra_body=EXTRA
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_chat_uses_the_checkpoint_s_template(client: openai.OpenAI, plain: LLM) -> None:
    answer = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "ab"}],
        max_tokens=10,
        temperature=0,
        extra_body=EXTRA,
    )
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    assert answer.choices[0].message.content == expected(plain, "# ab\n", params)


def test_a_prompt_over_the_limit_is_refused_and_the_next_is_served(client: openai.OpenAI) -> None:
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="max_seq_len=200"):
            client.completions.create(model="toy", prompt="a" * 200)
        assert client.completions.create(model="toy", prompt="a", max_tokens=1).choices


def test_a_client_that_leaves_frees_its_slot(url: str, client: openai.OpenAI) -> None:
    body = {"model": "toy", "prompt": "a", "max_tokens": 180, "stream": True, **EXTRA}
    for _ in range(4):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            assert next(response.iter_lines()).startswith("data: {")
    answer = client.completions.create(model="toy", prompt="a", max_tokens=5, extra_body=EXTRA)
    assert answer.usage is not None and answer.usage.completion_tokens == 5


def test_metrics_of_a_real_engine(url: str, client: openai.OpenAI) -> None:
    client.completions.create(model="toy", prompt="abab" * 8, max_tokens=40, temperature=0, extra_body=EXTRA)
    series = httpx.get(f"{url}/prometheus/metrics").text
    name = "trtllm_spec_decode_num_draft_tokens_total"
    (drafted,) = (line for line in series.splitlines() if line.startswith(name))
    assert float(drafted.split()[-1]) > 0
    assert httpx.get(f"{url}/metrics").json()[-1]["specDecodingStats"]["acceptanceLength"] >= 1
    info = httpx.get(f"{url}/server_info").json()
    assert info["verify_scheme"] == "records" and info["records_bytes"] > 0
    assert httpx.get(f"{url}/health_generate").status_code == 200
