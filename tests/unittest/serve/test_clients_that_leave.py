# SPDX-License-Identifier: Apache-2.0
"""When a client closes its connection, its request ends in the engine."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.unittest.serve.running_server import ServeCall, Served

COMPLETION = {"model": "toy", "prompt": "a", "max_tokens": 50, "ignore_eos": True}


def send_and_hold(served: Served, body: dict[str, object]) -> socket.socket:
    """A connection on which the request was sent and nothing was read."""
    address = urlsplit(served.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=20)
    content = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
    return connection


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choices", [1, 2])
def test_leaving_before_the_first_token(serving: ServeCall, streams: bool, choices: int) -> None:
    served = serving({"gated": True})
    connection = send_and_hold(served, {**COMPLETION, "stream": streams, "n": choices})
    served.engine.wait_for(lambda engine: engine.num_open == choices)
    connection.close()
    served.engine.wait_for(lambda engine: engine.num_open == 0)
    assert sorted(served.engine.cancelled_ids) == list(range(1, choices + 1))


@pytest.mark.parametrize("prompts", ["a", ["a", "b", "c"]])
def test_leaving_in_the_middle_of_a_stream(serving: ServeCall, prompts: object) -> None:
    served = serving({"gated": True})
    served.engine.release(2)
    with served.http.stream(
        "POST", "/v1/completions", json={**COMPLETION, "prompt": prompts, "stream": True}
    ) as response:
        assert next(response.iter_lines()).startswith("data: {")
    served.engine.wait_for(lambda engine: engine.num_open == 0)
    assert served.engine.cancelled_ids


def test_leaving_between_whole_answer_and_next_request_harms_nobody(serving: ServeCall) -> None:
    served = serving({"gated": True})
    connection = send_and_hold(served, COMPLETION)
    served.engine.wait_for(lambda engine: engine.num_open == 1)
    connection.close()
    served.engine.wait_for(lambda engine: engine.num_open == 0)
    served.engine.release(100)
    answer = served.openai.completions.create(model="toy", prompt="a")
    assert answer.choices[0].text == "def x"


def test_given_up_requests_are_counted_as_cancelled(serving: ServeCall) -> None:
    served = serving({"gated": True})
    for streams in (False, True):
        connection = send_and_hold(served, {**COMPLETION, "stream": streams})
        served.engine.wait_for(lambda engine: engine.num_open == 1)
        connection.close()
        served.engine.wait_for(lambda engine: engine.num_open == 0)
    # The health check passes through the same event loop, behind what the closed connections left to do.
    assert served.http.get("/health").status_code == 200
    series = served.http.get("/prometheus/metrics").text
    label = 'engine_type="trtllm",finished_reason="cancelled",model_name="toy"'
    assert f"trtllm_request_success_total{{{label}}} 2.0" in series
