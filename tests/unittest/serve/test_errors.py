# SPDX-License-Identifier: Apache-2.0
"""Requests that cannot be served get one clear answer each, and the next good one is served."""

import re
from typing import Any

import openai
import pytest

from tensorrt_llm.serve.chat_template import ChatTemplate
from tests.unittest.serve.running_server import ServeCall, Served

MESSAGES = [{"role": "user", "content": "a"}]
COMPLETION = {"model": "toy", "prompt": "a"}
CHAT = {"model": "toy", "messages": MESSAGES}

REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({**COMPLETION, "model": "gpt"}, 404, "'gpt' does not exist; this server has 'toy'", "model"),
    ({"model": "toy"}, 400, "prompt: Field required", "prompt"),
    ({"prompt": "a"}, 400, "model: Field required", "model"),
    ({**COMPLETION, "prompt": ""}, 400, "no tokens", None),
    ({**COMPLETION, "prompt": []}, 400, "prompt: must be a string, a list", "prompt"),
    ({**COMPLETION, "prompt": [1, "a"]}, 400, "prompt: must be a string, a list", "prompt"),
    ({**COMPLETION, "prompt": "a" * 64}, 400, "64 tokens; max_seq_len=64", None),
    ({**COMPLETION, "prompt": ["a", "b" * 64]}, 400, "64 tokens; max_seq_len=64", None),
    ({**COMPLETION, "max_token": 3}, 400, "max_token: there is no 'max_token'; the nearest", "max_token"),
    ({**COMPLETION, "guided_json": {}}, 400, "guided_json: 'guided_json' is not offered", "guided_json"),
    ({**COMPLETION, "max_tokens": 0}, 400, "max_tokens=0: must be a whole number >= 1", "max_tokens"),
    ({**COMPLETION, "max_tokens": "many"}, 400, "max_tokens: .*it is 'many'", "max_tokens"),
    ({**COMPLETION, "temperature": -1}, 400, "temperature=-1.0: must be a number >= 0", "temperature"),
    ({**COMPLETION, "top_k": -1}, 400, "top_k=-1", "top_k"),
    ({**COMPLETION, "n": 5}, 400, "n=5: at most max_batch_size=4", "n"),
    ({**COMPLETION, "best_of": 3}, 400, "best_of=3 is not supported", "best_of"),
    ({**COMPLETION, "stop": ["a", 3]}, 400, "stop: must be a string or a list", "stop"),
    ({**COMPLETION, "stop": ""}, 400, "non-empty", "stop"),
    ({**COMPLETION, "suffix": "b"}, 400, "suffix: .*leave suffix out", "suffix"),
    ({**COMPLETION, "echo": True, "logprobs": 1}, 400, "echo with logprobs", None),
    ({**COMPLETION, "logprobs": 21}, 400, "logprobs=21", "logprobs"),
    ({**COMPLETION, "stream_options": {}}, 400, "stream_options needs stream", None),
    ({**COMPLETION, "logit_bias": {"x": 1}}, 400, "logit_bias", None),
    (
        {**COMPLETION, "response_format": {"type": "json_object"}},
        400,
        "'json_object' is not supp",
        None,
    ),
    ({**CHAT, "messages": []}, 400, "messages: ", "messages"),
    (
        {**CHAT, "messages": [{"role": "king", "content": "a"}]},
        400,
        r"messages\[0\]\.role: ",
        "messages[0].role",
    ),
    (
        {**CHAT, "messages": [{"role": "user", "content": 3}]},
        400,
        r"content: must be a string",
        "messages[0].content",
    ),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "content of type 'image_url' is not supported",
        None,
    ),
    ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools are not supported", "tools"),
    ({**CHAT, "top_logprobs": 2}, 400, "top_logprobs needs logprobs", None),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "logprobs=21", "logprobs"),
    ({**CHAT, "max_tokens": 2, "max_completion_tokens": 3}, 400, "same limit", None),
    ({**CHAT, "messages": [{"role": "user", "content": "a" * 99}]}, 400, "max_seq_len=64", None),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("body", "status", "message", "param"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals_name_what_is_wrong(
    served: Served, body: dict[str, Any], status: int, message: str, param: str | None, streams: bool
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    streamed = {} if "stream_options" in body else {"stream": streams}
    response = served.http.post(path, json={**body, **streamed})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == ("model_not_found" if status == 404 else None)
    assert re.search(message, error["message"]), error["message"]
    if param is not None:
        assert error["param"] == param
    assert "\n" not in error["message"]
    assert served.http.post("/v1/completions", json=COMPLETION).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"{", "application/json", "the body is not JSON"),
        (b"[1]", "application/json", "the body must be a JSON object"),
        (b'"a"', "application/json", "the body must be a JSON object"),
        (b"", "application/json", "the body must be a JSON object"),
        (b"a=b", "application/x-www-form-urlencoded", "content type application/json"),
        (b"\xff\xfe", "application/json", "the body is not JSON"),
    ],
)
def test_malformed_bodies(served: Served, content: bytes, kind: str, message: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = served.http.post(path, content=content, headers={"content-type": kind})
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]


def test_unknown_routes_and_methods(served: Served) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = served.http.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_the_client_raises_what_it_should(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        served.openai.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        served.openai.completions.create(model="toy", prompt="a", top_p=3)
    assert (bad.value.param, bad.value.type) == ("top_p", "invalid_request_error")


def test_a_template_that_refuses_is_the_client_s_error(serving: ServeCall) -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", name="strict")
    served = serving(chat_template=template)
    response = served.http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


def test_a_fault_of_ours_says_no_more_than_that(serving: ServeCall, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serving()

    def fail(*_: object) -> None:
        raise KeyError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "submit", fail)
        response = served.http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error" and "secret" not in response.text
    assert served.http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_api_key(serving: ServeCall) -> None:
    served = serving(api_key="sesame")
    assert served.openai.completions.create(model="toy", prompt="a").choices[0].text == "def x"
    wrong = openai.OpenAI(base_url=f"{served.url}/v1", api_key="open", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError, match="Bearer"):
        wrong.models.list()
    assert served.http.get("/v1/models").status_code == 401
    assert served.http.get("/health").status_code == 200


def test_engine_down(serving: ServeCall) -> None:
    served = serving({"gated": True})
    served.engine.die(ArithmeticError("boom"))
    response = served.http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 503, response.text
    health = served.http.get("/health")
    assert (health.status_code, "boom" in health.text) == (503, True)
