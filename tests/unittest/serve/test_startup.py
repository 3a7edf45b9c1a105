# SPDX-License-Identifier: Apache-2.0
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tensorrt_llm.serve import startup
from tensorrt_llm.serve.startup import bind, start_up_line, url_of
from tests.unittest.executor_api.fake_engine import fake_description
from tests.unittest.serve.running_server import serve


def test_a_bound_port_refuses_until_it_listens() -> None:
    with bind("127.0.0.1", 0) as bound:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url_of('127.0.0.1', bound)}/health")
        bound.listen()
        socket.create_connection(bound.getsockname()[:2], timeout=5).close()


def test_a_taken_port_cannot_be_bound() -> None:
    with bind("127.0.0.1", 0) as bound:
        for _ in ("bound", "listening"):
            with pytest.raises(OSError, match="in use"):
                bind("127.0.0.1", bound.getsockname()[1])
            bound.listen()


@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "localhost"), ("localhost", "localhost")]
)
def test_url_is_one_that_clients_can_use(host: str, name: str) -> None:
    with bind(host, 0) as bound:
        assert url_of(host, bound) == f"http://{name}:{bound.getsockname()[1]}"


def test_start_up_line_names_url_model_split_and_scheme() -> None:
    line = start_up_line("http://localhost:8000", "toy", fake_description())
    for part in (
        "http://localhost:8000",
        "toy",
        "11 attention pages of 32",
        "5 state slots",
        "records",
        "64 tokens",
    ):
        assert part in line
    assert ("3.0 MiB of draft records" in line) and ("2.5 MiB of other side buffers" in line)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_garbage_collection_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    calls: list[str] = []
    monkeypatch.setattr(startup.gc, "disable", lambda: calls.append("disabled"))
    monkeypatch.setenv("TRTLLM_SERVER_DISABLE_GC", switch)
    with serve({}, {}):
        assert calls == ["disabled"] * int(switch)


def test_a_server_can_be_restarted_at_once_on_its_port() -> None:
    """Also while the kernel still remembers connections that the first one closed."""
    with serve({}, {}) as first:
        port = urlsplit(first.url).port
        assert first.http.get("/health", headers={"connection": "close"}).status_code == 200
    assert port is not None
    with bind("127.0.0.1", port) as bound:
        assert url_of("127.0.0.1", bound) == first.url
