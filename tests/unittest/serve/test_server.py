# SPDX-License-Identifier: Apache-2.0
"""The endpoints around generation, many clients at once, and the end of an engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tensorrt_llm import LLM
from tensorrt_llm._torch.pyexecutor.llm_request import FailureKind, RequestFailure
from tensorrt_llm.serve import openai_server
from tensorrt_llm.serve.openai_server import OpenAIServer, ServerOptions
from tensorrt_llm.version import __version__
from tests.unittest.executor_api.fake_engine import PATIENCE_S, FakeEngine, fake_snapshot
from tests.unittest.executor_api.toy_tokenizer import toy_tokenizer
from tests.unittest.serve.running_server import ServeCall, Served


def series(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and its labels beyond the two that all have."""
    text = served.http.get("/prometheus/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine_type")) == ("toy", "trtllm")
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples[f"trtllm_{name}", frozenset(labels.items())]


def test_models(serving: ServeCall) -> None:
    served = serving(model_names=["toy", "org/alias"])
    listed = served.openai.models.list().data
    assert [(model.id, model.object, model.owned_by) for model in listed] == [
        ("toy", "model", "tensorrt_llm"),
        ("org/alias", "model", "tensorrt_llm"),
    ]
    assert served.openai.models.retrieve("org/alias").id == "org/alias"
    assert served.http.get("/v1/models/gpt").status_code == 404
    answer = served.openai.completions.create(model="org/alias", prompt="a")
    assert answer.model == "org/alias"


def test_small_endpoints(served: Served) -> None:
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/health_generate").status_code == 200
    assert served.http.get("/version").json() == {"version": __version__}
    info = served.http.get("/server_info").json()
    assert (info["verify_scheme"], info["attention_pages"], info["records_bytes"]) == ("records", 11, 3 << 20)
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics"} <= set(paths)


def test_iteration_stats_are_a_json_array_that_drains(serving: ServeCall) -> None:
    served = serving()
    served.engine.stats = [{"iter": 1, "iterLatencyMS": 2.5}, {"iter": 2}]
    assert served.http.get("/metrics").json() == [{"iter": 1, "iterLatencyMS": 2.5}, {"iter": 2}]
    assert served.http.get("/metrics").json() == []


def test_gauges_and_totals_come_from_the_snapshot(serving: ServeCall) -> None:
    samples = series(serving())
    snapshot = fake_snapshot(num_requests_running=0)
    expected = {
        "num_requests_running": 0,
        "num_requests_waiting": snapshot.num_requests_waiting,
        "num_paused_requests": snapshot.num_requests_paused,
        "max_num_active_requests": snapshot.max_batch_size,
        "max_num_tokens_runtime": snapshot.max_num_tokens,
        "kv_cache_max_blocks": snapshot.max_pages,
        "kv_cache_used_blocks": snapshot.used_pages,
        "kv_cache_free_blocks": snapshot.max_pages - snapshot.used_pages,
        "kv_cache_utilization": snapshot.used_pages / snapshot.max_pages,
        "kv_cache_hit_rate": snapshot.cache_hit_rate,
        "iteration_latency_seconds": snapshot.iteration_latency_s,
        "num_requests_completed_total": snapshot.num_requests_completed_total,
        "spec_decode_num_draft_tokens_total": snapshot.draft_tokens_total,
        "spec_decode_num_accepted_tokens_total": snapshot.accepted_tokens_total,
        "spec_decode_acceptance_length": 1 + snapshot.accepted_tokens_total / snapshot.drafted_rounds_total,
        "kv_cache_reused_blocks_total": snapshot.reused_pages_total,
    }
    assert {name: value(samples, name) for name in expected} == expected
    assert value(samples, "spec_decode_drafted_tokens_total", token_position="1") == 3
    assert value(samples, "spec_decode_accepted_tokens_total", token_position="0") == 5
    # Positions that never counted are left out.
    assert ("trtllm_spec_decode_accepted_tokens_total", frozenset({("token_position", "1")})) not in samples


def test_requests_count_at_their_end(serving: ServeCall) -> None:
    served = serving({"text": "abcd", "run_lengths": (2,)})
    served.openai.completions.create(model="toy", prompt="xyz")
    list(served.openai.completions.create(model="toy", prompt="xyz", max_tokens=3, stream=True))
    served.http.post("/v1/completions", json={"model": "gpt", "prompt": "a"})
    served.http.post("/v1/completions", json={"model": "toy"})
    samples = series(served)
    assert value(samples, "request_success_total", finished_reason="stop") == 1
    assert value(samples, "request_success_total", finished_reason="length") == 1
    assert value(samples, "request_error_total", http_code="404") == 1
    assert value(samples, "request_error_total", http_code="400") == 1
    assert value(samples, "prompt_tokens_total") == 6
    assert value(samples, "generation_tokens_total") == 5 + 3
    # The fake's clock: arrival 1.0, first step 1.25, first token 1.5, last token 2.0.
    for name, seconds in {
        "e2e_request_latency_seconds": 1.0,
        "time_to_first_token_seconds": 0.5,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 0.5,
        "request_inference_time_seconds": 0.75,
    }.items():
        assert value(samples, f"{name}_count") == 2, name
        assert value(samples, f"{name}_sum") == 2 * seconds, name
    assert value(samples, "time_per_output_token_seconds_sum") == pytest.approx(0.5 / 4 + 0.5 / 2)


def test_failed_requests_count_as_errors_only(serving: ServeCall) -> None:
    failure = RequestFailure(kind=FailureKind.CAPACITY, message="no cache capacity")
    served = serving({"text": "abc", "failure": failure})
    for streams in (False, True):
        served.http.post("/v1/completions", json={"model": "toy", "prompt": "a", "stream": streams})
    samples = series(served)
    assert value(samples, "request_error_total", http_code="503") == 2
    assert not [name for name, _ in samples if name == "trtllm_request_success_total"]


def test_many_clients_at_once_get_their_own_answers(serving: ServeCall) -> None:
    served = serving({"text": "def x€ STOPped", "run_lengths": (3, 1)})

    def ask(number: int) -> tuple[str, str]:
        limit = 1 + number % 5
        if number % 2:
            chunks = served.openai.completions.create(model="toy", prompt="a", max_tokens=limit, stream=True)
            text = "".join(chunk.choices[0].text for chunk in chunks)
        else:
            messages: Any = [{"role": "user", "content": "a"}]
            answer = served.openai.chat.completions.create(model="toy", messages=messages, max_tokens=limit)
            text = answer.choices[0].message.content or ""
        tokenizer = served.engine.tokenizer
        return text, tokenizer.decode(tokenizer.encode("def x€ STOPped")[:limit])

    with ThreadPoolExecutor(24) as pool:
        for text, expected in pool.map(ask, range(96)):
            assert text == expected
    assert served.engine.num_open == 0


def test_a_fatal_error_fails_requests_and_ends_the_process(
    serving: ServeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "HEALTH_CHECK_INTERVAL_S", 0.01)
    ended = threading.Event()
    served = serving({"gated": True}, on_fatal=ended.set)
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "toy", "prompt": "a"}
        answer = pool.submit(served.http.post, "/v1/completions", json=body)
        served.engine.wait_for(lambda engine: engine.num_open == 1)
        served.engine.die(ArithmeticError("boom"))
        response = answer.result(PATIENCE_S)
    assert (response.status_code, "boom" in response.text) == (500, True)
    assert ended.wait(PATIENCE_S)


def test_a_server_needs_a_tokenizer() -> None:
    llm = LLM.from_engine(FakeEngine(toy_tokenizer()), None)
    with pytest.raises(ValueError, match="needs the tokenizer"):
        OpenAIServer(llm, ServerOptions(model_names=["toy"]))
