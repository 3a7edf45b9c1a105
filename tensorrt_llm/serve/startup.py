# SPDX-License-Identifier: Apache-2.0
"""The port, which is taken before a model is loaded, and the process around the application."""

import gc
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from tensorrt_llm import envs
from tensorrt_llm._torch.pyexecutor.description import ExecutorDescription

GRACE_S = 5
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening, so that clients are refused until requests can be served.

    Port 0 takes a free one. Raises OSError if the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Sockets that allow reuse may share a port until one listens: a second server would load its model
        # only to fail then. `ServerProcess.run` allows reuse again, so that a restart need not wait.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(host: str, bound: socket.socket) -> str:
    """Where clients of this machine find a server that was bound to `host`."""
    name = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}"


def start_up_line(url: str, model_name: str, description: ExecutorDescription) -> str:
    """URL, model, cache split and verify scheme."""
    return (
        f"{url} serves {model_name} ({description.device}, {description.dtype}): {description.cache_line()}; "
        f"up to {description.max_batch_size} requests of {description.max_seq_len} tokens"
    )


class ServerProcess:
    """Runs an application on a bound socket until a signal or `fail` ends it."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._failed = False

    def fail(self) -> None:
        """End the server because of a fault of its own."""
        self._failed = True
        if self._server is not None:
            self._server.should_exit = True

    def run(self, app: FastAPI, bound: socket.socket, on_listening: Callable[[], None]) -> bool:
        """Serve; False if the end was `fail`. Requests under way at the end get `GRACE_S` seconds."""
        if envs.server_disable_gc():
            gc.disable()
        config = uvicorn.Config(app, log_level="warning", backlog=BACKLOG, timeout_graceful_shutdown=GRACE_S)
        self._server = _AnnouncingServer(config, on_listening)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._server.run(sockets=[bound])
        return not self._failed


class _AnnouncingServer(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()
